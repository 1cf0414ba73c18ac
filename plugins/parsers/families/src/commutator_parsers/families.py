"""The families by name: what each writes, and how its chat template is recognized."""

# ruff: noqa: RUF001 - markers are what they are

from __future__ import annotations

from collections.abc import Mapping

from attrs import frozen

from commutator_parsers.calls import IdStyle
from commutator_parsers.grammars import (
    EitherCalls,
    Grammar,
    JsonCalls,
    KeyValueCalls,
    NamedCalls,
    NotationCalls,
    PythonCalls,
    TagCalls,
    TreeCalls,
)
from commutator_parsers.parser import Thinking


@frozen(kw_only=True)
class Family:
    """How one family writes calls."""

    grammar: Grammar | None
    """None: the whole answer is divided, as ``whole`` says."""
    whole: str | None = None
    """"harmony" or "elements"."""
    ids: IdStyle = "call"
    silent: tuple[str, ...] = ()
    """Markers around text that say nothing."""
    signs: tuple[tuple[str, ...], ...] = ()
    """A template that holds all of one of these is of the family."""


def _json(*openers: str, closers: tuple[str, ...] = (), **options: object) -> JsonCalls:
    return JsonCalls(openers=openers, closers=closers, **options)  # type: ignore[arg-type]


def _invoke(prefix: str, close: str, *sections: str, **options: object) -> TagCalls:
    """Sections of ``invoke`` with ``parameter``; ``prefix`` stands within each tag."""
    return TagCalls(
        openers=tuple(f"<{prefix}{section}>" for section in sections),
        closers=tuple(f"</{prefix}{section}>" for section in sections),
        call=f'<{close}invoke name="',
        call_tag_ends=('">', '"/>', '" />'),
        call_end=f"</{close}invoke>",
        argument=f'<{close}parameter name="',
        argument_tag_ends=('">',),
        argument_end=f"</{close}parameter>",
        **options,  # type: ignore[arg-type]
    )


def _dsml(space: str, *sections: str) -> TagCalls:
    mark = f"｜DSML｜{space}"
    return TagCalls(
        openers=tuple(f"<{mark}{section}>" for section in sections),
        closers=tuple(f"</{mark}{section}>" for section in sections),
        call=f'<{mark}invoke name="',
        call_tag_ends=('">', '"/>', '" />'),
        call_end=f"</{mark}invoke>",
        argument=f'<{mark}parameter name="',
        argument_tag_ends=('" string="true">', '" string="false">', '">'),
        argument_end=f"</{mark}parameter>",
        types=(('" string="true">', "string"), ('" string="false">', "json")),
    )


def _functions(*openers: str, closers: tuple[str, ...]) -> TagCalls:
    """``<function=N>`` with ``<parameter=K>``."""
    return TagCalls(
        openers=(*openers, "<function="),
        closers=closers,
        call="<function=",
        call_tag_ends=(">",),
        call_end="</function>",
        argument="<parameter=",
        argument_tag_ends=(">",),
        argument_end="</parameter>",
        lines=True,
    )


_DEEPSEEK = NamedCalls(
    openers=("<｜tool▁calls▁begin｜>",),
    closers=("<｜tool▁calls▁end｜>",),
    begin=("<｜tool▁call▁begin｜>",),
    separators=("<｜tool▁sep｜>",),
    kind="function",
    before_json=("```json", "```"),
    after_json=("```",),
    end=("<｜tool▁call▁end｜>",),
)
_MISTRAL = EitherCalls(
    openers=("[TOOL_CALLS]",),
    with_names=_json("[TOOL_CALLS]", listed=True),
    behind_names=NamedCalls(
        openers=("[TOOL_CALLS]",), separators=("[ARGS]",), id_marker="[CALL_ID]"
    ),
)
_KIMI = NamedCalls(
    openers=("<|tool_calls_section_begin|>", "<|tool_call_section_begin|>"),
    closers=("<|tool_calls_section_end|>", "<|tool_call_section_end|>"),
    begin=("<|tool_call_begin|>",),
    separators=("<|tool_call_argument_begin|>",),
    end=("<|tool_call_end|>",),
    name_is_id=True,
    spaced=False,
)
_GLM = KeyValueCalls(
    openers=("<tool_call>",),
    call_end="</tool_call>",
    key=("<arg_key>", "</arg_key>"),
    value=("<arg_value>", "</arg_value>"),
)
_COHERE_SILENT = (
    "<|START_RESPONSE|>",
    "<|END_RESPONSE|>",
    "<|START_TEXT|>",
    "<|END_TEXT|>",
    "<|START_OF_TURN_TOKEN|><|CHATBOT_TOKEN|>",
    "<|END_OF_TURN_TOKEN|>",
)

FAMILIES: Mapping[str, Family] = {
    "gpt_oss": Family(
        grammar=None,
        whole="harmony",
        signs=(("<|channel|>", "<|constrain|>"), ("<|channel|>analysis",)),
    ),
    "kimi_k3": Family(grammar=None, whole="elements", ids="call", signs=(("<|open|>", "<|sep|>"),)),
    "kimi_k2": Family(grammar=_KIMI, ids="kimi", signs=(("<|tool_calls_section_begin|>",),)),
    "deepseek_v4_1": Family(
        grammar=_dsml(" ", "calls", "tool_calls", "function_calls"), signs=(("｜DSML｜ ",),)
    ),
    "deepseek_v3_2": Family(
        grammar=_dsml("", "function_calls", "tool_calls", "calls"), signs=(("｜DSML｜",),)
    ),
    "deepseek_v3": Family(
        grammar=_DEEPSEEK, signs=(("<｜tool▁calls▁begin｜>",), ("<｜tool▁call▁begin｜>",))
    ),
    "step3": Family(
        grammar=TagCalls(
            openers=("<｜tool_calls_begin｜>",),
            closers=("<｜tool_calls_end｜>",),
            before_calls=("<｜tool_call_begin｜>", "function", "<｜tool_sep｜>"),
            after_calls=("<｜tool_call_end｜>",),
            call='<steptml:invoke name="',
            call_tag_ends=('">', '"/>'),
            call_end="</steptml:invoke>",
            argument='<steptml:parameter name="',
            argument_tag_ends=('">',),
            argument_end="</steptml:parameter>",
        ),
        signs=(("steptml:invoke",),),
    ),
    "minimax_m3": Family(
        grammar=TreeCalls(
            openers=("]<]minimax[>[<tool_call>",),
            closers=("]<]minimax[>[</tool_call>",),
            mark="]<]minimax[>[",
        ),
        signs=(("]<]minimax[>[",),),
    ),
    "minimax_m2": Family(
        grammar=_invoke("minimax:", "", "tool_call"), signs=(("<minimax:tool_call>",),)
    ),
    "minimax_m1": Family(
        grammar=_json("<tool_calls>", closers=("</tool_calls>",), after_opener="\n"),
        signs=(("<tool_calls>", "<end_of_sentence>"),),
    ),
    "hunyuan_v3": Family(
        grammar=KeyValueCalls(
            openers=("<tool_calls:opensource>",),
            closers=("</tool_calls:opensource>",),
            begin="<tool_call:opensource>",
            name_end="<tool_sep:opensource>",
            call_end="</tool_call:opensource>",
            key=("<arg_key:opensource>", "</arg_key:opensource>"),
            value=("<arg_value:opensource>", "</arg_value:opensource>"),
        ),
        signs=(("<arg_key:opensource>",), ("HYTK", "<tool_sep"), (":opensource", "<tool_calls")),
    ),
    "glm": Family(grammar=_GLM, signs=(("<arg_key>",),)),
    "seed_oss": Family(
        grammar=_functions("<seed:tool_call>", closers=("</seed:tool_call>",)),
        signs=(("<seed:tool_call>",),),
    ),
    "qwen3_coder": Family(
        grammar=_functions("<tool_call>", closers=("</tool_call>",)),
        signs=(("<function=", "<parameter="),),
    ),
    "minicpm5": Family(
        grammar=TagCalls(
            openers=('<function name="',),
            call='<function name="',
            call_tag_ends=('">',),
            call_end="</function>",
            argument='<param name="',
            argument_tag_ends=('">',),
            argument_end="</param>",
            cdata=True,
        ),
        signs=(('<function name="', '<param name="'),),
    ),
    "functionary": Family(
        grammar=NamedCalls(openers=("<function=",), separators=(">",), end=("</function>",)),
        signs=(("<function=", "</function>"),),
    ),
    "gigachat3": Family(
        grammar=_json("<|function_call|>", "function call<|role_sep|>"),
        silent=("<|message_sep|>",),
        signs=(
            ("<|function_call|>",),
            ("function call<|role_sep|>",),
            ("function call", "<|role_sep|>"),
        ),
    ),
    "solar_open": Family(
        grammar=NamedCalls(
            openers=("<|tool_calls|>",),
            closers=("<|calls|>",),
            begin=("<|tool_call:begin|>",),
            id_first="<|tool_call:name|>",
            separators=("<|tool_call:args|>",),
            end=("<|tool_call:end|>",),
        ),
        silent=("<|begin|>assistant", "<|content|>", "<|end|>"),
        signs=(("<|tool_call:begin|>",),),
    ),
    "gemma4": Family(
        grammar=NotationCalls(
            openers=("<|tool_call>",), quote='<|"|>', end=("<tool_call|>",), spaced=False
        ),
        signs=(("<|tool_call>",),),
    ),
    "function_gemma": Family(
        grammar=NotationCalls(
            openers=("<start_function_call>",),
            quote="<escape>",
            end=("<end_function_call>",),
            spaced=False,
        ),
        signs=(("<start_function_call>",),),
    ),
    "mistral": Family(grammar=_MISTRAL, ids="nine", signs=(("[TOOL_CALLS]",),)),
    "lfm2": Family(
        grammar=PythonCalls(
            openers=("<|tool_call_start|>",),
            closers=("<|tool_call_end|>",),
        ),
        signs=(
            ("<|tool_call_start|>",),
            ("<|tool_list_start|>",),
            ("<|im_start|>", "List of tools: ["),
        ),
    ),
    "olmo3": Family(
        grammar=PythonCalls(
            openers=("<function_calls>",), closers=("</function_calls>",), brackets=False
        ),
        signs=(("<function_calls>",),),
    ),
    "llama4_pythonic": Family(
        grammar=PythonCalls(
            openers=("<|python_start|>",),
            line_openers=("[",),
            closers=("<|python_end|>",),
            spaced=False,
        ),
        signs=(("<|python_start|>",), ("<|header_start|>", "[func_name1(")),
    ),
    "pythonic": Family(
        grammar=PythonCalls(line_openers=("[",)),
        signs=(("func_name1(params_name1",),),
    ),
    "llama3_json": Family(
        grammar=JsonCalls(
            openers=("<|python_tag|>",),
            line_openers=("{",),
            spaced=False,
            argument_key="parameters",
        ),
        signs=(("<|python_tag|>",), ("<|start_header_id|>", '"parameters"')),
    ),
    "apertus": Family(
        grammar=_json("<|tools_prefix|>", closers=("<|tools_suffix|>",), keyed=True, listed=True),
        signs=(("<|tools_prefix|>",),),
    ),
    "granite": Family(
        grammar=_json("<|tool_call|>", "<tool_call>", closers=("</tool_call>",), listed=True),
        silent=("<response>", "</response>"),
        signs=(("<|tool_call|>",),),
    ),
    "phi4": Family(grammar=_json("functools", listed=True), signs=(("functools[",), ("<|tool|>",))),
    "nemotron": Family(
        grammar=_json("<TOOLCALL>", closers=("</TOOLCALL>",), listed=True), signs=(("<TOOLCALL>",),)
    ),
    "internlm": Family(
        grammar=_json(
            "<|action_start|><|plugin|>",
            "<|action_start|>",
            closers=("<|action_end|>",),
            argument_key="parameters",
            after_opener="\n",
        ),
        signs=(("<|plugin|>",),),
    ),
    "cohere": Family(
        grammar=_json(
            "<|START_ACTION|>",
            "Action:",
            closers=("<|END_ACTION|>", "```"),
            listed=True,
            name_key="tool_name",
            argument_key="parameters",
        ),
        silent=_COHERE_SILENT,
        signs=(("<|START_ACTION|>",), ("<|CHATBOT_TOKEN|>", "Action:")),
    ),
    "ernie": Family(
        grammar=_json("<tool_call>", closers=("</tool_call>",), after_opener="\n"),
        silent=("<response>", "</response>"),
        signs=(("<tool_call>", "<response>"),),
    ),
    "hunyuan": Family(
        grammar=_json("<tool_calls>", closers=("</tool_calls>",), listed=True),
        silent=("<answer>", "</answer>"),
        signs=(("<tool_calls>", "<answer>"), ("<tool_calls>", "hy_")),
    ),
    "jamba": Family(
        grammar=_json("<tool_calls>", closers=("</tool_calls>",), listed=True),
        signs=(("<tool_calls>",),),
    ),
    "longcat": Family(
        grammar=_json("<longcat_tool_call>", closers=("</longcat_tool_call>",), after_opener="\n"),
        signs=(("<longcat_tool_call>",),),
    ),
    "xlam": Family(
        grammar=JsonCalls(
            openers=("[TOOL_CALLS]", "<tool_call>", "```json"),
            line_openers=("[",),
            closers=("</tool_call>", "```"),
            listed=True,
        ),
    ),
    "hermes": Family(
        grammar=_json("<tool_call>", closers=("</tool_call>",), after_opener="\n"),
        signs=(("<tool_call>",),),
    ),
}
"""The first family whose sign a template holds is detected: the more special one comes first."""

_THINK = (("<think>", "</think>"),)

REASONING: Mapping[str, Thinking] = {
    "think": Thinking(pairs=_THINK),
    "think_or_call": Thinking(pairs=_THINK, ended_by_calls=True),
    "thinks_at_once": Thinking(pairs=_THINK, begun=True),
    "mistral": Thinking(pairs=(("[THINK]", "[/THINK]"), *_THINK)),
    "gemma4": Thinking(pairs=(("<|channel>thought", "<channel|>"),), anywhere=True),
    "minimax_m3": Thinking(pairs=(("<mm:think>", "</mm:think>"),), ended_by_calls=True),
    "seed_oss": Thinking(pairs=(("<seed:think>", "</seed:think>"),)),
    "kimi_vl": Thinking(pairs=(("◁think▷", "◁/think▷"),)),
    "cohere": Thinking(pairs=(("<|START_THINKING|>", "<|END_THINKING|>"),)),
    "hunyuan_v3": Thinking(pairs=(("<think:opensource>", "</think:opensource>"),)),
    "solar_open": Thinking(pairs=(("<|think|>", "<|end|>"),)),
    "apriel": Thinking(pairs=(("Here are my reasoning steps:", "[BEGIN FINAL RESPONSE]"),)),
    "granite": Thinking(
        pairs=(
            ("Here is my thought process:", "Here is my response:"),
            ("Here's my thought process:", "Here's my response:"),
        )
    ),
    "apertus": Thinking(pairs=(("<|inner_prefix|>", "<|inner_suffix|>"),), anywhere=True),
}


def detect(template: str) -> str | None:
    """The family whose calls a chat template writes; None: it writes none that we know."""
    for name, family in FAMILIES.items():
        if any(all(sign in template for sign in signs) for signs in family.signs):
            return name
    return None


_REASONING_SIGNS = (
    ("<mm:think>", "minimax_m3"),
    ("<seed:think>", "seed_oss"),
    ("[THINK]", "mistral"),
    ("◁think▷", "kimi_vl"),
    ("<|START_THINKING|>", "cohere"),
    ("<|channel>", "gemma4"),
    (":opensource", "hunyuan_v3"),
    ("<|tool_call:begin|>", "solar_open"),
    ("[BEGIN FINAL RESPONSE]", "apriel"),
    ("<|inner_prefix|>", "apertus"),
    ("Here is my thought process", "granite"),
)
_STRAIGHT_TO_CALLS = ("<|tool_calls_section_begin|>", "<minimax:tool_call>", "<function=")


def detect_reasoning(template: str) -> str | None:
    """How the models of a chat template think; None: not that it says."""
    for sign, name in _REASONING_SIGNS:
        if sign in template:
            return name
    if "</think>" not in template and "<think>" not in template:
        return None
    straight = any(sign in template for sign in _STRAIGHT_TO_CALLS)
    return "think_or_call" if straight else "think"
