# ruff: noqa: RUF001 - markers are what they are
"""What trained models are asked and what they answer, and the families that they write it in."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from attrs import evolve, field, frozen
from tests.support.judges import installed_judges

__all__ = ["FAMILIES", "Family", "Said", "Turn", "history", "tool", "turns"]


@frozen(kw_only=True)
class Said:
    """An answer, as its client reads it."""

    reasoning: str | None = None
    content: str | None = None
    calls: tuple[tuple[str, Mapping[str, Any]], ...] = ()
    """Names and arguments."""


@frozen(kw_only=True)
class Turn:
    """A conversation, as a client of chat completions sends it, and its answer."""

    name: str
    messages: Sequence[Mapping[str, Any]]
    said: Said
    tools: Sequence[Mapping[str, Any]] = ()
    tool_choice: Any = "auto"
    thinks: bool = False
    """Whether the request asks models to think that do not do so by themselves."""
    schema: Mapping[str, Any] | None = None
    """What the request says that the answer follows."""
    ids: Sequence[str] = ()
    """Of its calls, where the model writes ids and those of every answer would not do."""

    @property
    def forced(self) -> bool:
        """Whether the model has to call."""
        return self.tool_choice not in ("auto", "none")


@frozen(kw_only=True)
class Family:
    """How one family of models writes, by its published template."""

    name: str
    template: str
    """The template's file, without its ending."""
    end: str
    """The token that ends an answer."""
    special: tuple[str, ...]
    """Its other special tokens that these conversations have."""
    added: tuple[str, ...] = ()
    """Tokens that are not special, as its tokenizer has them."""
    call_end: str | None = None
    """What ends an answer with calls, where it is something else."""
    begin: str = ""
    """The token that begins a prompt, if there is one."""
    thinks: Literal["always", "asked", "never"] = "always"
    talks_and_calls: bool = True
    """Whether an answer may have both text and calls."""
    between_calls: str | None = None
    """What stands between two calls, where the template takes but one."""
    begins_thinking: bool = False
    """Whether its prompts begin the thoughts; if not, an answer that has to follow something, or to
    call, has none."""
    can_be_forced: bool = True
    """Whether its models can be made to call."""
    one_call: bool = False
    """Whether an answer has but one call."""
    no_thoughts: str = ""
    """With what a prompt ends so that the model does not think, where history has it not."""
    no_thoughts_in_history: str = ""
    """What history has instead."""
    replaced: Mapping[str, str] = field(factory=dict)
    """In the template: what is not the same every day."""

    @property
    def ends(self) -> tuple[str, ...]:
        """Each token that ends an answer."""
        return (self.end,) if self.call_end is None else (self.end, self.call_end)


def _tokens(texts: str) -> tuple[str, ...]:
    return tuple(texts.split())


_TODAY = {'strftime_now("%Y-%m-%d")': '"2026-11-28"'}

_GLM: dict[str, Any] = {
    "end": "<|user|>",
    "call_end": "<|observation|>",
    "special": _tokens("[gMASK] <sop> <|system|> <|assistant|>"),
    "added": _tokens(
        "<think> </think> <tool_call> </tool_call> <tool_response> "
        "</tool_response> <arg_key> </arg_key> <arg_value> </arg_value>"
    ),
}
_FAMILIES = (
    Family(
        name="hermes",
        template="Qwen-Qwen3-0.6B",
        end="<|im_end|>",
        special=_tokens("<|im_start|>"),
        added=_tokens("<tool_call> </tool_call> <tool_response> </tool_response> <think> </think>"),
    ),
    Family(
        name="qwen3_coder",
        template="Qwen3.5-4B",
        end="<|im_end|>",
        special=_tokens("<|im_start|>"),
        added=_tokens("<tool_call> </tool_call> <tool_response> </tool_response> <think> </think>"),
        begins_thinking=True,
    ),
    Family(
        name="llama3_json",
        template="meta-llama-Llama-3.1-8B-Instruct",
        begin="<|begin_of_text|>",
        end="<|eot_id|>",
        special=_tokens("<|start_header_id|> <|end_header_id|> <|python_tag|> <|eom_id|>"),
        thinks="never",
        talks_and_calls=False,
        between_calls="; ",
    ),
    Family(
        name="mistral",
        template="Mistral-Small-3.2-24B-Instruct-2506",
        begin="<s>",
        end="</s>",
        special=_tokens(
            "[INST] [/INST] [AVAILABLE_TOOLS] [/AVAILABLE_TOOLS] [TOOL_CALLS] "
            "[CALL_ID] [ARGS] [TOOL_RESULTS] [TOOL_CONTENT] [/TOOL_RESULTS] "
            "[SYSTEM_PROMPT] [/SYSTEM_PROMPT]"
        ),
        thinks="never",
        talks_and_calls=False,
        replaced=_TODAY,
    ),
    Family(
        name="deepseek_v3_2",
        template="deepseek-ai-DeepSeek-V3.2",
        begin="<｜begin▁of▁sentence｜>",
        end="<｜end▁of▁sentence｜>",
        special=(),
        added=_tokens("<｜User｜> <｜Assistant｜> <think> </think> ｜DSML｜"),
        thinks="asked",
        no_thoughts="<think></think>",
        no_thoughts_in_history="</think>",
    ),
    Family(
        name="kimi_k2",
        template="Kimi-K2-Thinking",
        end="<|im_end|>",
        special=_tokens(
            "<|im_system|> <|im_user|> <|im_assistant|> <|im_middle|> "
            "<|tool_calls_section_begin|> <|tool_calls_section_end|> "
            "<|tool_call_begin|> <|tool_call_argument_begin|> "
            "<|tool_call_end|>"
        ),
        added=_tokens("<think> </think>"),
    ),
    Family(
        name="glm",
        template="GLM-4.6",
        **_GLM,
    ),
    Family(
        name="glm_4_7",
        template="GLM-4.7-Flash",
        **_GLM,
        begins_thinking=True,
    ),
    Family(
        name="minimax_m2",
        template="MiniMax-M2",
        end="[e~[",
        special=_tokens("]~!b[ ]~b]"),
        added=_tokens("<think> </think> <minimax:tool_call> </minimax:tool_call>"),
        begins_thinking=True,
    ),
    Family(
        name="gemma4",
        template="google-gemma-4-31B-it",
        begin="<bos>",
        end="<turn|>",
        call_end="<|tool_response>",
        special=_tokens(
            "<|turn> <|tool> <tool|> <|tool_call> <tool_call|> "
            '<tool_response|> <|"|> <|channel> <channel|> <|think|>'
        ),
        thinks="asked",
        talks_and_calls=False,
        can_be_forced=False,
        no_thoughts="<|channel>thought\n<channel|>",
    ),
    Family(
        name="gpt_oss",
        template="openai-gpt-oss-120b",
        end="<|return|>",
        call_end="<|call|>",
        special=_tokens("<|start|> <|message|> <|channel|> <|constrain|> <|end|>"),
        talks_and_calls=False,
        one_call=True,
        replaced=_TODAY,
    ),
)
FAMILIES: Mapping[str, Family] = {family.name: family for family in _FAMILIES}


def _in_family(family: Family, turn: Turn) -> Turn:
    """With the answer that the family gives."""
    said = turn.said
    held = (turn.forced or turn.schema is not None) and not family.begins_thinking
    if held or family.thinks == "never" or (family.thinks == "asked" and not turn.thinks):
        said = evolve(said, reasoning=None)
    if said.calls and not family.talks_and_calls:
        said = evolve(said, content=None)
    if family.one_call:
        said = evolve(said, calls=said.calls[:1])
    # Others think anyway, and some write into the prompt how much was asked for.
    return evolve(turn, said=said, thinks=turn.thinks and family.thinks == "asked")


def tool(name: str, **properties: Any) -> dict[str, Any]:
    """A function as chat completions know it, each property with a type or a whole schema."""
    schemas = {
        key: {"type": one} if isinstance(one, str) else one for key, one in properties.items()
    }
    parameters = {"type": "object", "properties": schemas, "required": [*schemas]}
    function = {"name": name, "description": f"It is {name}.", "parameters": parameters}
    return {"type": "function", "function": function}


def history(said: Said, *results: str, ids: Sequence[str] = ()) -> list[dict[str, Any]]:
    """An answer and the results of its calls, in the history of chat completions.

    Ids have 9 characters, which every family takes, unless ``ids`` has others.
    """
    message: dict[str, Any] = {"role": "assistant", "content": said.content}
    if said.reasoning is not None:
        message["reasoning_content"] = said.reasoning
    ids = ids or [f"call0000{number}" for number, _ in enumerate(said.calls)]
    calls = [
        {
            "id": one,
            "type": "function",
            "function": {"name": name, "arguments": json.dumps(arguments, ensure_ascii=False)},
        }
        for one, (name, arguments) in zip(ids, said.calls, strict=True)
    ]
    told = [
        {"role": "tool", "tool_call_id": one, "content": result}
        for one, result in zip(ids, results, strict=False)
    ]
    return [{**message, **({"tool_calls": calls} if calls else {})}, *told]


def _user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def _probe(name: str, content: str | None = None, *calls: tuple[str, Mapping[str, Any]]) -> Turn:
    """A scenario of canitoolcall's probe."""
    installed_judges()
    from canitoolcall.probe import BUILTIN_SCENARIOS

    (scenario,) = (one for one in BUILTIN_SCENARIOS if one.id == name)
    return Turn(
        name=name,
        messages=scenario.messages,
        tools=scenario.tools,
        tool_choice=scenario.tool_choice,
        said=Said(reasoning=f"So {name}.", content=content, calls=calls),
    )


_FORECAST = tool("forecast_for_a_city", city="string", days="integer", hourly="boolean")
_ASKED = _user("How is the weather in Zürich & <b>東京</b>?")
_BOTH = _user("And in the two others, please.")
_LOOKED = Said(
    reasoning='The user asks for "天気", so I ask the tool.',
    content="Let me look.",
    calls=(("forecast_for_a_city", {"city": "Zürich <b>", "days": 3, "hourly": False}),),
)
_LOOKED_TWICE = Said(
    reasoning="Two cities: two calls.",
    calls=(
        ("forecast_for_a_city", {"city": "東京", "days": 1, "hourly": True}),
        ("forecast_for_a_city", {"city": 'a "quoted" \\ one', "days": 12, "hourly": False}),
    ),
)
_IDS = ("call00011", "call00012")
_EVENT = {
    "title": "Design review",
    "attendees": [
        {"name": "Ana", "email": "ana@example.com"},
        {"name": "Bo", "email": "bo@example.com"},
    ],
    "location": {"city": "Berlin", "room": "4.12"},
}
_NOTE = {"title": "Grüße aus Zürich", "body": "Café ☕ in 東京 — naïve résumé 🚀"}
_PLACE = {
    "type": "object",
    "properties": {"city": {"type": "string"}, "people": {"type": "integer"}},
    "required": ["city", "people"],
    "additionalProperties": False,
}


def turns(family: Family) -> Sequence[Turn]:
    """All that its model knows."""
    looked = _in_family(family, Turn(name="", messages=(), said=_LOOKED, thinks=True)).said
    twice = _in_family(family, Turn(name="", messages=(), said=_LOOKED_TWICE)).said
    if family.between_calls is not None:
        twice = evolve(twice, calls=twice.calls[:1])
    sunny = {"role": "assistant", "content": "Sunny, 20 °C."}
    after_one = [_ASKED, *history(looked, "sunny, 20 °C"), sunny, _BOTH]
    known = (
        _probe("single-call", None, ("get_weather", {"city": "Paris"})),
        _probe(
            "parallel-calls",
            None,
            ("get_weather", {"city": "Paris"}),
            ("get_weather", {"city": "Tokyo"}),
        ),
        _probe("no-call", "42"),
        _probe("nested-args", None, ("create_event", _EVENT)),
        _probe("unicode-args", None, ("save_note", _NOTE)),
        _probe("empty-args", None, ("get_server_time", {})),
        _probe("forced-tool-choice", None, ("get_weather", {"city": "Lisbon"})),
        _probe("tool-result-followup", "It is 18 °C and clear in Paris."),
        _probe("reasoning-then-call", None, ("record_answer", {"answer": "9.9"})),
        Turn(
            name="text",
            messages=[_user("Tell me of the sea.")],
            said=Said(
                reasoning="The sea, 海: wide.\n\nTwo lines of it.",
                content="The sea is **wide**.\n\n- Its water is salt: 35 g/kg.\n- 海 🌊.",
            ),
        ),
        Turn(
            name="schema",
            messages=[_user("Describe Berlin.")],
            said=Said(reasoning="As JSON.", content='{"city": "Berlin", "people": 3700000}'),
            schema=_PLACE,
        ),
        Turn(name="call", messages=[_ASKED], tools=[_FORECAST], said=_LOOKED, thinks=True),
        Turn(
            name="result",
            messages=after_one,
            tools=[_FORECAST],
            said=_LOOKED_TWICE,
            ids=_IDS[: len(twice.calls)],
        ),
        Turn(
            name="two results",
            messages=[*after_one, *history(twice, "rain", "snow", ids=_IDS[: len(twice.calls)])],
            tools=[_FORECAST],
            said=Said(reasoning="Both are here.", content="Rain in 東京, and snow."),
        ),
    )
    kept = (turn for turn in known if family.can_be_forced or not turn.forced)
    return [_in_family(family, turn) for turn in kept]
