"""Compaction: a conversation becomes what its user said, and a model's summary of all of it."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import msgspec
from attrs import define, field

from commutator.contract.answer import AnswerWriter, Batch, Content, Failure, Finish, Usage
from commutator_openai.values import wrong
from commutator_responses.items import Item, with_ids
from commutator_responses.reading import Asked, read_request
from commutator_responses.summary import sealed
from commutator_responses.tools import ServerTools
from commutator_responses.writer import usage_of

_REQUEST = (
    "Summarize this conversation for yourself: what was said up to here will be gone, except for "
    "my own messages and your summary. Write down what I want, what was done and found so far, "
    "with the names, paths, numbers and results that are still needed, what was decided and why, "
    "and what remains to be done. Answer with the summary alone."
)
_READ = frozenset({
    *("cache_salt", "instructions", "max_output_tokens", "model", "priority", "prompt_cache_key"),
    *("reasoning", "safety_identifier", "seed", "temperature", "top_k", "top_p", "user"),
})  # fmt: skip
"""What has an effect, beside `input` and `previous_response_id`: the API's own, and sampling."""
_OTHER = frozenset({"input", "previous_response_id"})
_KEPT_ROLES = ("user", "system", "developer")


def read_compaction(
    body: Mapping[str, Any], items: Sequence[Item], *, server_tools: ServerTools, earlier: int
) -> Asked:
    """Body of POST /v1/responses/compact; ``items`` are the conversation.

    Raises RequestError that names the field.
    """
    if not items:
        raise wrong("input", "expected a conversation to compact, or its previous_response_id")
    given = {name: value for name, value in body.items() if name in _READ}
    last: Item = {"type": "message", "role": "user", "content": _REQUEST}
    asked = read_request(
        {**given, "store": False}, [*items, last], server_tools=server_tools, earlier=earlier
    )
    others = [name for name, value in body.items() if value is not None]
    asked.ignored = sorted({*asked.ignored, *others} - _READ - _OTHER)
    return asked


@define
class CompactionWriter(AnswerWriter):
    """Keeps the summary; ``whole`` is what takes the conversation's place."""

    key: str
    """Makes ids."""
    items: Sequence[Item]
    """The conversation."""
    _pieces: list[str] = field(init=False, factory=list)
    _reason: str = field(init=False, default="stop")

    def keep(self, batch: Batch) -> None:
        for _, event in batch:
            if isinstance(event, Content):
                self._pieces.append(event.text)
            elif isinstance(event, Finish):
                self._reason = event.reason

    @property
    def kept_bytes(self) -> int:
        return sum(map(len, self._pieces))

    def whole(self, usage: Usage) -> Iterator[bytes]:
        """Raises ``Failure`` where there is no summary that could take the place of anything."""
        summary = "".join(self._pieces).strip()
        if self._reason == "length" or not summary:
            what = "has no end within its longest answer" if summary else "is empty"
            text = f"the model's summary {what}; keep the conversation, and ask again"
            text += " with another max_output_tokens, or send truncation: auto with responses"
            raise Failure(422, text, "compaction_failed", "max_output_tokens")
        kept = [
            item
            for item in with_ids(self.items, self.key)
            if item["type"] == "message" and item["role"] in _KEPT_ROLES
        ]
        made = {
            "id": f"cmp_{self.key}",
            "type": "compaction",
            "encrypted_content": sealed(summary),
        }
        yield msgspec.json.encode(
            {
                "id": f"resp_{self.key}",
                "object": "response.compaction",
                "created_at": int(time.time()),
                "output": [*kept, made],
                "usage": usage_of(usage),
            }
        )

    def stream(self, batch: Batch) -> bytes:
        raise NotImplementedError("compactions are not streamed")

    def stream_end(self, usage: Usage) -> bytes:
        raise NotImplementedError("compactions are not streamed")

    def stream_failed(self, failure: Failure) -> bytes:
        raise NotImplementedError("compactions are not streamed")
