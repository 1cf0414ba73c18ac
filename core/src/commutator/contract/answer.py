"""What is answered, in no protocol's words: events, from which a protocol writes its answers.

The events of one answer come in this order: ``PromptLogprobs`` where they are asked for, any
number of ``Content``, ``ReasoningContent`` and calls (``CallStart``, ``CallArguments``,
``CallEnd``), then one ``Finish``. A call without its ``CallEnd`` is none: the answer reached its
limit within it, or it proved malformed, and then its text follows as ``Content``. Whole answers
leave it out; a stream has shown its beginning already. A request with several answers has them
interleaved, each with the answer's number; its ``Usage`` comes at the very end.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from typing import Literal

from attrs import define, field, frozen

from commutator.contract.request import TokenLogprob

__all__ = [
    "AnswerEvent",
    "AnswerWriter",
    "Batch",
    "CallArguments",
    "CallEnd",
    "CallStart",
    "Content",
    "Failure",
    "Finish",
    "FinishKind",
    "PromptLogprobs",
    "ReasoningContent",
    "Usage",
]

FinishKind = Literal["stop", "length", "tool_calls", "refusal"]
"""Why an answer ended: by itself or a stop sequence, at its limit, with calls, or by refusing."""


@define  # many are made for each request, and a frozen class takes twice as long to fill
class Content:
    """More text of the answer."""

    text: str
    """May be empty where there are only log probabilities."""
    logprobs: tuple[tuple[int, TokenLogprob], ...] = ()
    """(offset in the answer's text, entry) for each token whose text is certain by now."""
    token_ids: tuple[int, ...] = ()
    """Where asked for, the tokens of this event and those after it of the same step."""


@define
class PromptLogprobs:
    """The log probabilities of the answer's prompt."""

    entries: tuple[TokenLogprob, ...]
    """One for each of its tokens but the first."""


@define
class ReasoningContent:
    """More of what the model thinks before it answers."""

    text: str
    """Not empty."""


@define
class CallStart:
    """A call of a tool begins."""

    call: int
    """Its number in the answer, from 0."""
    id: str
    """Names it within the conversation."""
    name: str
    """The tool."""


@define
class CallArguments:
    """More of a call's arguments, as the model writes them: all of a call joined are its JSON."""

    call: int
    """The number of ``CallStart``."""
    text: str
    """Not empty."""


@define
class CallEnd:
    """A call's arguments are complete."""

    call: int
    """The number of ``CallStart``."""


@define
class Finish:
    """The answer's last event."""

    reason: FinishKind
    """Why it ended."""
    stop: str | int | None = None
    """With "stop": the stop string or token id of the request that ended it; None: the model."""


@frozen(kw_only=True)
class Usage:
    """Tokens of one request, all answers together."""

    prompt_tokens: int
    """Each prompt counts once, however many answers."""
    completion_tokens: int
    """Tokens generated, those of reasoning among them."""
    cached_tokens: int
    """Prompt tokens that the workers found in their KV caches."""
    reasoning_tokens: int = 0
    """Tokens generated before the answers proper."""


AnswerEvent = (
    PromptLogprobs | Content | ReasoningContent | CallStart | CallArguments | CallEnd | Finish
)
"""What one answer consists of."""
Batch = Sequence[tuple[int, AnswerEvent]]
"""(number of the answer, event), in the order in which they came."""


@define
class Failure(Exception):  # noqa: N818 - a value as well
    """An answer that is no success, in HTTP's terms; each protocol writes it in its own shape."""

    status: int
    """400 to 599."""
    message: str
    """For people: what is wrong, and what to do."""
    code: str | None = None
    """For programs, such as "model_not_found"."""
    param: str | None = None
    """The field of the request that is wrong."""
    headers: Mapping[str, str] = field(factory=dict)
    """Headers of the answer, such as Retry-After."""


class AnswerWriter(ABC):
    """Writes one request's answer in the words of one protocol. Used by one thread at a time.

    Either ``stream`` is called for each batch and then ``stream_end``, or ``keep`` for each batch
    and then ``whole``. Both say the same. Methods may be called in a thread where they take long.
    """

    stream_type: str = "text/event-stream; charset=utf-8"
    """The content type of a streamed answer."""
    whole_type: str = "application/json; charset=utf-8"
    """The content type of a whole answer."""
    ping: bytes = b""
    """May be sent in a stream between any two pieces, and before the first; it says nothing. Empty:
    nothing is sent, however long the silence."""

    @abstractmethod
    def stream(self, batch: Batch) -> bytes:
        """What to send for ``batch``, possibly nothing."""

    @abstractmethod
    def stream_end(self, usage: Usage) -> bytes:
        """What to send after the last batch."""

    @abstractmethod
    def stream_failed(self, failure: Failure) -> bytes:
        """What ends a stream that fails after its beginning was sent."""

    @abstractmethod
    def keep(self, batch: Batch) -> None:
        """Add ``batch`` to the whole answer."""

    @property
    @abstractmethod
    def kept_bytes(self) -> int:
        """About how long the whole answer is by now."""

    @abstractmethod
    def whole(self, usage: Usage) -> Iterator[bytes]:
        """The whole answer, in parts that take some milliseconds at most. Called once."""
