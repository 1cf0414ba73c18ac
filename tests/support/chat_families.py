"""Chat templates in the manner of many families of models, with tokenizers that have their tokens.

Each writes every field of ``conversation`` into its prompt.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import Any

from attrs import frozen
from tests.support.tokenizers import LLAMA3, O200K, QWEN2, trained
from tokenizers import AddedToken, Regex, Tokenizer, models, normalizers, pre_tokenizers

from commutator.tokenizer.text_model import ChatTemplate

__all__ = ["FAMILIES", "FIELDS", "Family", "conversation", "family"]

_TOOLS = (
    "{%- for tool in tools or [] %}{{ tool | tojson }}\n{% endfor %}"
    "{%- for one in documents or [] %}{{ one.title }}: {{ one.text | trim }}\n{% endfor %}"
    "{{ style }}"
)
_CALL = "{{ call.id }}{{ call.function.name }}{{ call.function.arguments | tojson }}"


def _calls(begin: str, end: str, call: str = _CALL) -> str:
    return f"{{%- for call in m.tool_calls or [] %}}{begin}{call}{end}{{% endfor %}}"


def _chat(head: str, said: str, tail: str) -> str:
    return f"{head}{{% for m in messages %}}{said}{{% endfor %}}{tail}"


_THOUGHTS = (
    "{%- set text, thoughts = m.content, m.reasoning_content %}"
    "{%- if '</think>' in (text or '') %}"
    "{%- set thoughts = text.split('</think>')[0].split('<think>')[-1].strip('\\n') %}"
    "{%- set text = text.split('</think>')[-1].lstrip('\\n') %}{%- endif %}"
)
_ARGUMENTS = (
    "{{ call.id }}<function={{ call.function.name }}>"
    "{%- for key, value in call.function.arguments.items() %}<{{ key }}>{{ value | string }}"
    "</{{ key }}>{% endfor %}"
)
_EXTRA = (
    "{%- for tool in tools or [] %}{{ tool.function.name }}{{ tool.function.description }}"
    "{%- for key, one in tool.function.parameters.properties.items() %}{{ '<' ~ key ~ '>' }}"
    "{{ one.description }}{{ one.enum | string }}{{ '</' ~ key ~ '>' }}{% endfor %}{% endfor %}"
    "{%- for one in documents or [] %}{{ one | string }}{% endfor %}{{ style }}"
)
_HEADER = "{{ '<|start_header_id|>' + m.role + '<|end_header_id|>\n\n' }}{{ m.name }}"
TEMPLATES: Mapping[str, str] = {
    "chatml": _chat(
        "<|im_start|>system\n" + _TOOLS + "<|im_end|>\n",
        "{{ '<|im_start|>' + m.role + '\n' + (m.name or '') + (m.content or '') }}"
        "{{ m.reasoning_content }}" + _calls("", "") + "{{ '<|im_end|>\n' }}",
        "<|im_start|>assistant\n",
    ),
    "qwen3": _chat(
        "<|im_start|>system\n# Tools\n<tools>\n" + _TOOLS + "</tools><|im_end|>\n",
        _THOUGHTS
        + "<|im_start|>{{ m.role }}\n{{ m.name }}{% if thoughts %}<think>\n{{ thoughts }}\n</think>"
        "\n\n{% endif %}{% if m.role == 'tool' %}<tool_response>\n{{ text }}\n</tool_response>"
        "{% else %}{{ text }}{% endif %}"
        + _calls("<tool_call>\n", "\n</tool_call>")
        + "<|im_end|>\n",
        "<|im_start|>assistant\n<think>\n",
    ),
    "llama3": _chat(
        "{{ bos_token }}" + _TOOLS,
        _HEADER + "{{ m.reasoning_content }}{{ (m.content or '') | trim }}"
        "{% if m.tool_calls %}<|python_tag|>" + _calls("", "") + "<|eom_id|>"
        "{% else %}<|eot_id|>{% endif %}",
        "<|start_header_id|>assistant<|end_header_id|>\n\n",
    ),
    "mistral": _chat(
        "{{ bos_token }}[AVAILABLE_TOOLS]" + _TOOLS + "[/AVAILABLE_TOOLS]",
        "{% if m.role == 'user' %}[INST]{{ m.name }} {{ m.content }}[/INST]"
        "{% elif m.role == 'tool' %}[TOOL_RESULTS]"
        "{{ {'content': m.content, 'name': m.name} | tojson }}[/TOOL_RESULTS]"
        "{% elif m.role == 'system' %}[SYSTEM_PROMPT]{{ m.content }}[/SYSTEM_PROMPT]{% else %}"
        "{% if m.reasoning_content %}[THINK]{{ m.reasoning_content }}[/THINK]{% endif %}"
        "{{ m.content }}" + _calls("[TOOL_CALLS]", "") + "{{ eos_token }}{% endif %}",
        "",
    ),
    "gemma": _chat(
        "{{ bos_token }}" + _TOOLS,
        "{{ '<start_of_turn>' + ('model' if m.role == 'assistant' else m.role) + '\n' }}"
        "{{ m.name }}{{ m.reasoning_content }}{{ (m.content or '') | trim }}"
        + _calls("", "")
        + "<end_of_turn>\n",
        "<start_of_turn>model\n",
    ),
    "phi": _chat(
        _TOOLS,
        "{{ '<|' + m.role + '|>' + '\n' + (m.name or '') + (m.content or '') }}"
        "{{ m.reasoning_content }}" + _calls("", "") + "{{ '<|end|>\n' }}",
        "{{ '<|assistant|>\n' }}",
    ),
    "deepseek": _chat(
        "{{ bos_token }}" + _TOOLS,
        _THOUGHTS + "{% if m.role == 'user' %}<\uff5cUser\uff5c>{{ m.name }}{{ text }}"
        "{% elif m.role == 'assistant' %}<\uff5cAssistant\uff5c>{{ m.reasoning_content }}{{ text }}"
        + _calls("<\uff5ctool\u2581call\u2581begin\uff5c>", "<\uff5ctool\u2581call\u2581end\uff5c>")
        + "{{ eos_token }}{% else %}{{ m.name }}{{ text }}{% endif %}",
        "{{ '<\\uff5cAssistant\\uff5c><think>\n' }}",
    ),
    "glm": _chat(
        "[gMASK]<sop>{% if tools %}<|system|>\n" + _TOOLS + "{% endif %}",
        "<|{{ 'observation' if m.role == 'tool' else m.role }}|>{{ m.name }}\n"
        "{{ m.reasoning_content }}{{ m.content }}" + _calls("<tool_call>", "</tool_call>"),
        "<|assistant|>\n<think></think>",
    ),
    "kimi": _chat(
        "<|im_system|>tool_declare<|im_middle|>" + _TOOLS + "<|im_end|>",
        "{% if m.role == 'user' %}<|im_user|>{% elif m.role == 'assistant' %}<|im_assistant|>"
        "{% else %}<|im_system|>{% endif %}{{ m.name or m.role }}<|im_middle|>"
        "{{ m.reasoning_content }}{{ m.content }}"
        + _calls("<|tool_call_begin|>", "<|tool_call_end|>")
        + "<|im_end|>",
        "<|im_assistant|>assistant<|im_middle|>",
    ),
    "granite": _chat(
        "<|start_of_role|>documents<|end_of_role|>" + _TOOLS + "<|end_of_text|>\n",
        "{{ '<|start_of_role|>' + m.role + '<|end_of_role|>' + (m.content or '') }}{{ m.name }}"
        "{{ m.reasoning_content }}" + _calls("<|tool_call|>", "") + "{{- '<|end_of_text|>\n' }}",
        "<|start_of_role|>assistant<|end_of_role|>",
    ),
    "harmony": _chat(
        "<|start|>developer<|message|>" + _EXTRA + "<|end|>",
        "{%- if '<|channel|>' in (m.content or '') %}{{ raise_exception('no') }}{% endif %}"
        "{% if m.reasoning_content %}<|start|>assistant<|channel|>analysis<|message|>"
        "{{ m.reasoning_content }}<|end|>{% endif %}"
        + _calls(
            "<|start|>assistant to=functions.{{ call.function.name }}<|channel|>commentary"
            "<|message|>",
            "<|call|>",
        )
        + "<|start|>{{ m.name or m.role }}<|message|>{{ m.content }}<|end|>",
        "<|start|>assistant",
    ),
    "hunyuan": _chat(
        "{%- set kind = ':opensource' %}{%- set user = '<\uff5chy_User{}\uff5c>'.format(kind) %}"
        "{%- set assistant = '<\uff5chy_Assistant{}\uff5c>'.format(kind) %}{{ bos_token }}"
        + _TOOLS,
        "{{ user if m.role == 'user' else assistant }}{{ m.name }}{{ m.reasoning_content }}"
        "{{ m.content }}" + _calls("", ""),
        "{{ assistant }}",
    ),
    "nemotron": _chat(
        "<SPECIAL_10>System\n<tools>" + _EXTRA + "</tools>\n",
        "{{ '<SPECIAL_11>' + m.role }}\n{{ m.name }}"
        "{{ (m.content or '').replace('/think', '').strip() }}"
        "{%- if m.reasoning_content %}<think>{{ m.reasoning_content }}</think>{% endif %}"
        + _calls("<tool_call>", "</tool_call>", _ARGUMENTS)
        + "\n<SPECIAL_12>\n",
        "<SPECIAL_11>assistant\n<think>\n",
    ),
    "cohere": _chat(
        "{{ bos_token }}" + _TOOLS,
        "<|START_OF_TURN_TOKEN|>{{ m.role | upper }}{{ m.name }}{{ m.reasoning_content }}"
        "{{ m.content }}" + _calls("<|START_ACTION|>", "<|END_ACTION|>") + "<|END_OF_TURN_TOKEN|>",
        "<|START_OF_TURN_TOKEN|>ASSISTANT",
    ),
}
_CONTROL = re.compile(
    "<\\|[^|<>{}' ]+\\|>|<\uff5c[^<>{}\uff5c]+\uff5c>|\\[/?[A-Z_]+\\]|</?think>|</?tool\\w+>"
    "|<(?:start|end)_of_turn>|<SPECIAL_\\d+>|\\[gMASK\\]|<sop>"
)
_BUILT = {
    "phi": ("<|user|>", "<|assistant|>", "<|system|>", "<|tool|>"),
    "glm": ("<|user|>", "<|assistant|>", "<|system|>", "<|observation|>"),
    "hunyuan": ("<\uff5chy_User:opensource\uff5c>", "<\uff5chy_Assistant:opensource\uff5c>"),
}
"""Tokens that a template builds."""
_SPACES = normalizers.Sequence([normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")])


def _split(pattern: str) -> pre_tokenizers.PreTokenizer:
    words = pre_tokenizers.Split(Regex(pattern), behavior="isolated")
    level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    return pre_tokenizers.Sequence([words, level])


_KINDS: Mapping[str, Callable[[tuple[AddedToken, ...]], Tokenizer]] = {
    "byte level": lambda added: trained(
        models.BPE(), _split(QWEN2), normalizers.NFC(), added=added
    ),
    "whole words": lambda added: trained(
        models.BPE(ignore_merges=True), _split(LLAMA3), added=added
    ),
    "cased words": lambda added: trained(models.BPE(), _split(O200K), added=added),
    "pieces": lambda added: trained(
        models.BPE(unk_token="<unk>", fuse_unk=True), None, _SPACES, added=added
    ),
}
_KIND_OF = {
    "llama3": "whole words",
    "mistral": "pieces",
    "gemma": "pieces",
    "harmony": "cased words",
    "phi": "pieces",
}


@frozen(eq=False)
class Family:
    """One template and a tokenizer for it."""

    name: str
    tokenizer: Tokenizer
    controls: tuple[str, ...]
    """Its control tokens."""
    unguarded: ChatTemplate
    guarded: ChatTemplate

    def ids(self, messages: Sequence[Mapping[str, Any]], variables: Mapping[str, Any]) -> list[int]:
        """The prompt's, as a front door finds them."""
        prompt = self.guarded.prompt(messages, variables=variables)
        tokenizer, text = self.tokenizer, prompt.text
        if prompt.sealed is not None:
            assert prompt.controls is not None
            double, problem = prompt.controls.double
            assert double is not None, problem
            tokenizer, text = double, prompt.sealed
        ids: list[int] = tokenizer.encode(text, add_special_tokens=False).ids
        return ids

    def control_ids(self, ids: Sequence[int]) -> list[int]:
        """Those of control tokens, in their order."""
        known = {self.tokenizer.token_to_id(text) for text in self.controls}
        return [one for one in ids if one in known]


@cache
def family(name: str) -> Family:
    """The family of this name."""
    source = TEMPLATES[name]
    written = source.replace("\\uff5c", "\uff5c")
    found = {*_CONTROL.findall(written), *_BUILT.get(name, ()), "<s>", "</s>"}
    controls = tuple(sorted(found))
    # Thoughts and calls are often not special; some are looked for in normalized text.
    added = tuple(
        AddedToken(text, special="t" not in text[1:3], normalized=name == "cohere")
        for text in controls
    )
    tokenizer = _KINDS[_KIND_OF.get(name, "byte level")](added)
    values = {"bos_token": "<s>", "eos_token": "</s>"}
    guarded = ChatTemplate(source, values, tokenizer)
    return Family(name, tokenizer, controls, ChatTemplate(source, values), guarded)


FAMILIES = tuple(TEMPLATES)

FIELDS = (
    "system", "user", "user name", "later user", "answer", "reasoning", "call id", "called name",
    "argument name", "argument", "nested argument", "result", "result name", "tool name",
    "tool description", "parameter name", "parameter description", "choice", "document title",
    "document", "variable",
)  # fmt: skip


def conversation(
    *, as_text: bool = False, **texts: str
) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """(messages, variables) with a text in each of ``FIELDS``, blanks written as underscores.

    ``as_text``: arguments are JSON as text.
    """
    text = {field: f"a {field}" for field in FIELDS}
    text |= {field.replace("_", " "): one for field, one in texts.items()}
    assert len(text) == len(FIELDS)
    arguments = {
        text["argument name"]: text["argument"],
        "list": [1, {"deep": text["nested argument"]}],
    }
    function = {
        "name": text["called name"],
        "arguments": json.dumps(arguments, ensure_ascii=False) if as_text else arguments,
    }
    messages: list[dict[str, Any]] = [
        {"role": "system", "content": text["system"]},
        {"role": "user", "content": text["user"], "name": text["user name"]},
        {
            "role": "assistant",
            "content": text["answer"],
            "reasoning_content": text["reasoning"],
            "tool_calls": [{"id": text["call id"], "type": "function", "function": function}],
        },
        {
            "role": "tool",
            "content": text["result"],
            "name": text["result name"],
            "tool_call_id": text["call id"],
        },
        {"role": "user", "content": text["later user"]},
    ]
    parameter = {
        "type": "string",
        "description": text["parameter description"],
        "enum": [text["choice"]],
    }
    tool = {
        "name": text["tool name"],
        "description": text["tool description"],
        "parameters": {"type": "object", "properties": {text["parameter name"]: parameter}},
    }
    variables = {
        "tools": [{"type": "function", "function": tool}],
        "documents": [{"title": text["document title"], "text": text["document"]}],
        "style": text["variable"],
    }
    return messages, variables
