"""Writes ``docs/reference/http.md`` from the request classes themselves."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import attrs

from commutator.frontend.requests import (
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    TokenizeRequest,
)

PAGE = Path(__file__).resolve().parent.parent / "docs" / "reference" / "http.md"
HEAD = """# HTTP

Generated from the classes that validate requests (`make docs`); `/openapi.json` holds the same for machines.

| | |
|---|---|
| `POST /v1/chat/completions`, `POST /v1/completions` | answers, whole or as server-sent events |
| `POST /v1/embeddings`, `/v1/responses`, `/v1/rerank`, `/v1/score` | the engine's own answer; see below |
| `GET /v1/models`, `GET /v1/models/NAME` | what is served |
| `POST /tokenize`, `POST /detokenize` | text to token ids and back |
| `GET /live`, `GET /ready`, `GET /health` | is the process up; can it serve; in detail |
| `GET /metrics` | Prometheus; see [metrics](metrics.md) |
| `GET /openapi.json` | OpenAPI 3.1 |

## Headers

| request header | meaning |
|---|---|
| `Authorization: Bearer KEY` | needed when `frontend.api_keys` is set |
| `X-Request-Id` | your id for the request; one is made otherwise. It comes back in the answer |
| `X-Request-Timeout-S` | give up after so many seconds, if less than `frontend.request_timeout_s` |
| `X-Commutator-Explain: 1` | the answer's `X-Commutator-Decision` explains the routing, as JSON |

Every answer names its worker in `X-Commutator-Worker`.

## Errors

Always OpenAI's shape, `{"error": {"message", "type", "param", "code"}}`:

| status | when |
|---|---|
| 400 | a wrong value or an unknown field (`param` names it); a prompt that is too long (both lengths are told) |
| 401 | no or a wrong API key |
| 404, 405 | no such model, path or method |
| 413 | the body is over `frontend.max_body_bytes` |
| 429 | a queue is full, or every worker stayed busy; `code` says which, `Retry-After` when to try again |
| 503 | no worker is ready, or none for the prefill that the others need; `Retry-After` |
| 504 | the request's time is up |

An error after a stream began is sent as an event with the same `error` object, and the stream ends without
`[DONE]`.

## What only the engine does

Tools, JSON schemas, images and `suffix` are not served by the front door. Where a model's workers take OpenAI
requests themselves (`vllm`, `sglang`, `trtllm`), such a request goes to one of them as it came, and its answer comes
back as it is; it is routed like every other, by its prefix where the prompt can be rendered here, but it does not go
on at another worker when its own is lost. Everywhere else it is refused with 400, never ignored.
"""


def page() -> str:
    parts = [HEAD]
    for cls in (ChatRequest, CompletionRequest, TokenizeRequest, DetokenizeRequest):
        doc = (cls.__doc__ or "").strip().splitlines()[0].removeprefix("Body of ").rstrip(".")
        parts.append(f"## {doc}\n\n{fields(cls)}")
    return "\n".join(parts)


def fields(cls: Any) -> str:
    lines = ["| field | meaning |", "|---|---|"]
    for field in attrs.fields(cls):
        needed = " (required)" if field.default is attrs.NOTHING else ""
        doc = field.metadata["doc"].replace("|", "\\|")
        lines.append(f"| `{field.name}`{needed} | {doc} |")
    return "\n".join(lines) + "\n"


def write() -> None:
    PAGE.write_text(page())


if __name__ == "__main__":
    write()
