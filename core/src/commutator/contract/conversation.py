"""What a client asks, in no protocol's words: a protocol reads its requests into these values.

``None`` means everywhere that the client did not say: the default of the model or the deployment
holds.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any, Literal

from attrs import define, field, frozen

from commutator.contract.request import Constraint, KvRetention

__all__ = [
    "Conversation",
    "Described",
    "Generate",
    "Media",
    "Message",
    "Part",
    "Reasoning",
    "ReasoningOptions",
    "Speaker",
    "Text",
    "Tool",
    "ToolCall",
    "ToolChoice",
    "ToolResult",
]

Speaker = str
"""Whose turn a message is: "system", "developer", "user", "assistant", "tool", or another word that
the model's chat template may know."""


@define  # many are made for each request, and a frozen class takes twice as long to fill
class Text:
    """A part of a message that is text."""

    text: str
    """Text alone: nothing in it stands for a control token."""
    retention: KvRetention | None = None
    """How long to retain the KV blocks up to the end of this part's message."""


@frozen(kw_only=True)
class Media:
    """A part that is no text: a picture, a sound, a video or a file."""

    kind: str
    """"image", "audio", "video" or "file"."""
    digest: str | None = None
    """Names its content, if that came with the request: what KV blocks are known by."""
    url: str | None = None
    """Where an engine may fetch it; "data:" URLs hold the content."""


@frozen(kw_only=True)
class ToolCall:
    """A call that the assistant made."""

    id: str
    """Names the call within the conversation."""
    name: str
    """The tool."""
    arguments: str
    """The arguments as the model wrote them, JSON unless the model erred."""


@frozen(kw_only=True)
class ToolResult:
    """What a tool answered."""

    call_id: str
    """The ``ToolCall.id`` that it answers."""
    parts: Sequence[Text | Media] = ()
    """The answer."""


@frozen
class Reasoning:
    """What the assistant thought before it answered."""

    text: str
    """The thoughts."""


Part = Text | Media | ToolCall | ToolResult | Reasoning
"""What a message is made of."""


@define(kw_only=True)  # as above
class Message:
    """One turn of a conversation."""

    role: Speaker
    """Who speaks."""
    content: str | Sequence[Part]
    """Text, or parts of several kinds in their order."""
    name: str | None = None
    """The speaker's own name, for the model's chat template."""
    retention: KvRetention | None = None
    """How long to retain the KV blocks of the prompt up to the end of this message."""


class Described(dict[str, Any]):
    """What templates write as JSON, again and again. It never changes."""

    @cached_property
    def as_json(self) -> str:
        """Its JSON."""
        return json.dumps(self, ensure_ascii=False, default=list)


@frozen(kw_only=True)
class Tool:
    """A function that the model may call."""

    name: str
    """Unique in the conversation."""
    description: str = ""
    """For the model."""
    parameters: Mapping[str, Any] = field(factory=dict)
    """JSON Schema of the arguments."""
    strict: bool = False
    """Whether the arguments must follow the schema."""

    @cached_property
    def described(self) -> Described:
        """As templates know it, which is OpenAI's way."""
        function = Described(
            name=self.name,
            description=self.description,
            parameters=self.parameters or {"type": "object", "properties": {}},
        )
        return Described(type="function", function=function)


@frozen(kw_only=True)
class ToolChoice:
    """Which tools the model has to call."""

    mode: Literal["auto", "none", "required", "named"] = "auto"
    """"named": the tool ``name``."""
    name: str | None = None
    """The tool of "named"."""
    parallel: bool = True
    """Whether an answer may have several calls."""


@frozen(kw_only=True)
class ReasoningOptions:
    """How much a model that reasons thinks first."""

    effort: str | None = None
    """As the model's template knows it, such as "low"."""
    show: bool = True
    """Whether the client wants to see it."""


@define(kw_only=True)  # as above
class Conversation:
    """A chat to be continued."""

    messages: Sequence[Message]
    """In their order, at least one."""
    tools: Sequence[Tool] = ()
    """What the model may call."""
    tool_choice: ToolChoice | None = None
    """What it has to call."""
    reasoning: ReasoningOptions | None = None
    """How it is to think."""
    add_generation_prompt: bool = True
    """Whether the template's beginning of an answer follows the last message."""
    continue_final_message: bool = False
    """Whether the answer continues the last message; needs ``add_generation_prompt`` false."""
    variables: Mapping[str, Any] | None = None
    """Variables of the chat template."""


@define(kw_only=True)  # as above
class Generate:
    """Answers to a conversation, or continuations of prompts."""

    model: str | None
    """As the client named it; None: the only one that it may use."""
    conversation: Conversation | None = None
    """What to answer; None: continue ``prompts``."""
    further: Sequence[Conversation] = ()
    """More conversations, each answered as the first one is."""
    prompts: Sequence[str | list[int]] = ()
    """Texts or token ids to continue, each by itself."""
    answers: int = 1
    """How many for the conversation, or for each prompt; at least 1."""
    stream: bool = False
    """Whether the client wants the answer as it comes."""
    max_tokens: int | None = None
    """Longest answer in tokens; 0: no answer, only what is asked about the prompt."""
    min_tokens: int = 0
    """Nothing ends an answer before this many tokens."""
    temperature: float | None = None
    """As of ``SamplingParams``, like all of the following."""
    top_p: float | None = None
    """Above 0, at most 1."""
    top_k: int | None = None
    """0 and below keep all."""
    min_p: float | None = None
    """0 to 1."""
    seed: int | None = None
    """A signed 64-bit integer; answer i of several uses ``seed`` + i."""
    repetition_penalty: float | None = None
    """Above 0."""
    presence_penalty: float | None = None
    """Against tokens that occurred."""
    frequency_penalty: float | None = None
    """Against tokens by how often they occurred."""
    logit_bias: Mapping[str, float] = field(factory=dict)
    """What is added to logits, by token ids in decimal."""
    top_logprobs: int | None = None
    """None: no log probabilities; n: also those of the n likeliest tokens."""
    prompt_logprobs: int | None = None
    """The same for the tokens of prompts, all but the first of each."""
    token_ids: bool = False
    """Whether events tell the tokens of answers."""
    keep_tokens: int | None = None
    """Prompts are cut to this many tokens: their last, or their first where it is below 0."""
    stop: Sequence[str] = ()
    """Strings that end an answer."""
    stop_token_ids: Sequence[int] = ()
    """Tokens that end an answer."""
    ignore_eos: bool = False
    """Whether the model's end tokens do not end an answer."""
    include_stop: bool = False
    """Whether the stop string or token is part of the answer."""
    skip_special_tokens: bool = True
    """Whether special tokens are left out of the text."""
    echo: bool = False
    """Whether an answer begins with its prompt."""
    user: str | None = None
    """A label of the client's own."""
    session_id: str | None = None
    """Names a conversation over several requests."""
    priority: int | None = None
    """Lower is served earlier."""
    cache_salt: str | None = None
    """KV blocks are shared only between requests of the same salt."""
    retention: KvRetention | None = None
    """How long to retain the KV blocks of the whole prompt."""
    migration_limit: int | None = None
    """How often an answer may change its worker."""
    constraint: Constraint | None = None
    """What each answer has to follow."""
    engine_options: Mapping[str, Any] = field(factory=dict)
    """Options that only the model's engine has, by name."""
    params: Mapping[str, str] = field(factory=dict)
    """What the protocol calls fields, for errors, by their names in OpenAI's chat."""
