"""Writes ``docs/reference/http.md`` from the request classes themselves."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import attrs

from commutator_openai.requests import (
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
| `POST /v1/chat/completions/batch` | several conversations in `messages`, one answer to each |
| `POST /invocations` | chat or completions, as the body shows |
| `POST /v1/embeddings` | [vectors](../how-to/embeddings.md) of texts or token ids |
| `POST /v1/responses`, `/v1/rerank`, `/v1/score` | the engine's own answer; see below |
| `GET /v1/models`, `GET /v1/models/NAME` | what is served |
| `POST /tokenize`, `POST /detokenize` | text to token ids and back |
| `GET /tokenizer_info` | special tokens, chat template and longest prompt, for clients that render and count by themselves |
| `GET /version`, `GET /load` | of this front door: its version, and the requests that it has in hand |
| `GET /live`, `GET /ready`, `GET /health` | is the process up; can it serve; in detail, which needs the permission `metrics` |
| `GET /metrics` | Prometheus; see [metrics](metrics.md); needs the permission `metrics` |
| `GET /ui`, and `/` for browsers | a [page](../how-to/watch.md) that shows the run, and a chat; without a key, as it holds no data |
| `GET /admin/live` | [what that page shows](../how-to/watch.md#the-api-below), as server-sent events; needs the permission `admin` |
| `GET /openapi.json` | OpenAPI 3.1 |

## Headers

| request header | meaning |
|---|---|
| `Authorization: Bearer KEY` | needed everywhere but at `/live`, `/ready` and `/ui` when the section `auth` or `frontend.api_keys` is set |
| `X-Request-Id` | your id for the request; a random one by default. The answer repeats it |
| `X-Request-Timeout-S` | give up after this many seconds, if less than `frontend.request_timeout_s` |
| `endpoint-load-metrics-format: TEXT` or `JSON` | the answer's `endpoint-load-metrics` tells the requests that the model's workers have in hand, and those that wait (ORCA) |
| `X-Commutator-Explain: 1` | the answer's `X-Commutator-Decision` explains the routing, as JSON; needs the permission `explain` |

Every answer names its worker in `X-Commutator-Worker`, and in `X-Commutator-Ignored` the parameters of the request that had no
effect, such as `store`. With `strict: true` in the entry `{kind: openai}` of `protocols` these are answered 400 instead.
`X-Commutator-Fallback` tells which models could not answer, and why, where the section [`traffic`](../how-to/traffic.md) has
another one take their place; the answer's `model` is the one that did.

## Errors

Always OpenAI's shape, `{"error": {"message", "type", "param", "code"}}`:

| status | when |
|---|---|
| 400 | a wrong value or an unknown field (`param` names it); a prompt that is too long (the message has both lengths) |
| 401 | no or a wrong API key |
| 404, 405 | no such model, path or method |
| 413 | the body is over `frontend.max_body_bytes` |
| 429 | a queue is full, every worker stayed busy, or a principal's limit is reached (`rate_limit_exceeded`); `code` says which, `Retry-After` when to try again |
| 503 | no worker is ready, or none for the prefill that the others need, or limits cannot be checked (`limits_unavailable`); `Retry-After` |
| 504 | the request's time is up |

An error after a stream began is sent as an event with the same `error` object, and the stream ends without
`[DONE]`.

## What only the engine does

The front door does not serve tools, JSON schemas, images and `suffix`. Where a model's workers take OpenAI
requests themselves (`vllm`, `sglang`, `trtllm`), it passes such a request to one of them and returns the answer; an error
has the shape above, with `engine_refused`.
The request is routed like every other, by its prefix if the prompt can be rendered here, but no other worker continues
it when its own is lost. Other models refuse it with 400; it is never ignored. `logprobs` from an engine that computes none is
400, too.

## Log probabilities

Of answers and of prompts they are before temperature and filters. In completions `logprobs: N` lists at each place the token and
the `N` likeliest, up to `N` + 1; in chat `top_logprobs: N` the `N` likeliest. `echo` with `logprobs`, and `prompt_logprobs`, tell
those of the prompt, with `max_tokens: 0` alone; the prompt is then computed whole, by one worker, and read from no cache.
Nothing comes before the first token of a prompt, so its two places hold `null`, as vLLM's do and `lm-eval` expects. The type that
`openai` has for them knows no `null`: a client that checks every field (`_strict_response_validation=True`) refuses that answer.
`reference`, `vllm`, `sglang` and `sim` have them; other engines are refused by name. `lm-eval` asks so:

```text
lm-eval --model local-completions --tasks lambada_openai --model_args \
  model=smollm2-135m,base_url=http://127.0.0.1:8000/v1/completions,tokenizer_backend=remote,tokenized_requests=true
```
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
