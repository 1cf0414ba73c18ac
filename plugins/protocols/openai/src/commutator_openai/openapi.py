"""The OpenAPI 3.1 document, generated from the classes that validate requests and shape answers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from commutator.contract.worker import Role
from commutator.frontend import TIMEOUT_HEADER
from commutator_openai import requests, responses
from commutator_openai.embeddings import EmbeddingRequest
from commutator_openai.fields import request_schema

_POST = {
    "/v1/chat/completions": (
        "Answer a conversation.",
        requests.ChatRequest,
        responses.ChatCompletion,
    ),
    "/v1/chat/completions/batch": (
        "Answer several conversations.",
        requests.BatchRequest,
        responses.ChatCompletion,
    ),
    "/v1/completions": ("Continue a text.", requests.CompletionRequest, responses.Completion),
    "/v1/embeddings": ("Turn texts into vectors.", EmbeddingRequest, responses.EmbeddingList),
    "/tokenize": ("Text to tokens.", requests.TokenizeRequest, responses.TokenizeResponse),
    "/detokenize": ("Tokens to text.", requests.DetokenizeRequest, responses.DetokenizeResponse),
}
"""Summary, body and answer by path."""
_WORKER = {
    "name": "id",
    "in": "path",
    "required": True,
    "schema": {"type": "string"},
    "description": "A worker id, as /health lists them.",
}
_ROLE = {
    "name": "role",
    "in": "path",
    "required": True,
    "schema": {"enum": [*Role]},
}
_TIER = ("tier", {"type": "string"}, "Only this tier.")
_ASKED = (
    ("worker", {"type": "string"}, "Ask only this worker."),
    ("model", {"type": "string"}, "Ask only the workers of this model."),
)
_AT = ("at", {"type": "number"}, "Seconds since 1970; by default now.")
_TIMEOUT = ("timeout_s", {"type": "number", "exclusiveMinimum": 0}, "Seconds for each worker.")


def _query(*named: tuple[str, dict[str, Any], str]) -> list[dict[str, Any]]:
    return [
        {"name": name, "in": "query", "schema": schema, "description": meaning}
        for name, schema, meaning in named
    ]


_ADMIN: Mapping[str, tuple[str, str, list[dict[str, Any]]]] = {
    "/admin/workers/{id}/drain": (
        "post",
        "Send a worker no new requests; it finishes those it has.",
        [_WORKER],
    ),
    "/admin/workers/{id}/undrain": ("post", "Send a worker requests again.", [_WORKER]),
    "/admin/workers/{id}/role/{role}": ("post", "Give a worker a role.", [_WORKER, _ROLE]),
    "/admin/workers/{id}/load": ("get", "A worker's requests, as it counts them.", [_WORKER]),
    "/admin/tiers": ("get", "Blocks and bytes in KV tiers.", _query(*_ASKED)),
    "/admin/tiers/statistics": ("get", "Counters of KV tiers.", _query(*_ASKED)),
    "/admin/tiers/explain": (
        "post",
        "Which blocks of a prompt would be reused.",
        _query(*_ASKED),
    ),
    "/admin/tiers/evict": ("post", "Remove blocks from KV tiers.", _query(*_ASKED, _TIER)),
    "/admin/tiers/verify": (
        "post",
        "Read and check every block of KV tiers.",
        _query(*_ASKED, _TIER, _TIMEOUT),
    ),
    "/admin/live": ("get", "The state of the whole run, every second.", []),
    "/admin/live/door": ("get", "What this front-door process alone knows of the run.", []),
    "/admin/live/decision": (
        "get",
        "Why one of the last requests went to its worker.",
        _query(("request", {"type": "string"}, "Its id.")),
    ),
    "/admin/planner": ("get", "What the planner wants and sees, and its last plan.", []),
    "/admin/planner/explain": ("get", "The last plan until a time, and why.", _query(_AT)),
    "/admin/planner/history": ("get", "The planner's latest changes and warnings.", []),
}
"""Method, summary and parameters by path, for those with the permission `admin`."""
_KV_PROMPT = {
    "type": "object",
    "required": ["token_ids"],
    "properties": {
        "token_ids": {"type": "array", "items": {"type": "integer"}},
        "cache_salt": {"type": ["string", "null"]},
        "lora_name": {"type": ["string", "null"]},
    },
}
"""The body of /admin/tiers/explain."""


def openapi_document(
    version: str, models: Sequence[str], *, needs_key: bool, operations: bool = True
) -> dict[str, Any]:
    """``version`` is Commutator's; ``models`` are the names that requests may give.

    ``operations``: whether /health, /metrics and /admin/ are there.
    """
    model_id = {
        "name": "id",
        "in": "path",
        "required": True,
        "schema": {"type": "string"},
        "examples": {name: {"value": name} for name in models},
    }
    protected = {path: {"post": _post(*operation)} for path, operation in _POST.items()} | {
        "/v1/models": {"get": _get("The models served.", _ref(responses.ModelList))},
        "/v1/models/{id}": {
            "get": _get("One model.", _ref(responses.ModelCard)) | {"parameters": [model_id]}
        },
    }
    anything = {"type": "object"}
    protected |= {
        "/tokenizer_info": {
            "get": _get("Special tokens, chat template, longest prompt.", anything)
        },
        "/version": {"get": _get("The front door's version.", anything)},
        "/load": {"get": _get("Requests that the front door has in hand.", anything)},
    }
    invocation = _post("What the body shows.", requests.ChatRequest, responses.ChatCompletion)
    either = [_ref(requests.ChatRequest), _ref(requests.CompletionRequest)]
    invocation["requestBody"]["content"]["application/json"]["schema"] = {"anyOf": either}
    protected["/invocations"] = {"post": invocation}
    if operations:
        protected |= {
            "/health": {"get": _get("Models, workers and load.", anything)},
            "/metrics": {"get": _get("Prometheus metrics.", {"type": "string"}, "text/plain")},
        }
        for path, (method, summary, parameters) in _ADMIN.items():
            kind = "text/event-stream" if path == "/admin/live" else "application/json"
            operation = _get(summary, anything, kind) | {"parameters": parameters}
            if path == "/admin/tiers/explain":
                body = {"required": True, "content": {"application/json": {"schema": _KV_PROMPT}}}
                operation["requestBody"] = body
            protected[path] = {method: operation}
    protected["/openapi.json"] = {"get": _get("This document.", anything)}
    free = {
        "/live": {"get": _get("Whether the process answers.", anything)},
        "/ready": {"get": _get("Whether every model can be served.", anything)},
    }
    document: dict[str, Any] = {
        "openapi": "3.1.0",
        "info": {
            "title": "Commutator",
            "version": version,
            "description": "An OpenAI-compatible front door to LLM engines.",
        },
        "paths": protected | free,
        "components": {"schemas": _schemas(models)},
    }
    if needs_key:
        bearer = {"bearer": {"type": "http", "scheme": "bearer"}}
        document["components"]["securitySchemes"] = bearer
        for methods in protected.values():
            for operation in methods.values():
                operation["security"] = [{"bearer": []}]
    return document


def _schemas(models: Sequence[str]) -> dict[str, Any]:
    classes = [cls for _, *body_and_answer in _POST.values() for cls in body_and_answer]
    classes += [responses.ErrorBody, responses.ModelCard, responses.ModelList]
    schemas = {cls.__name__: {"description": cls.__doc__, **request_schema(cls)} for cls in classes}
    for _, body, _ in _POST.values():
        schema = schemas[body.__name__]
        model = schema["properties"]["model"]
        names = [*models] if "model" in schema.get("required", ()) else [*models, None]
        schema["properties"]["model"] = {"enum": names, "description": model["description"]}
    return schemas


def _ref(cls: type) -> dict[str, str]:
    return {"$ref": f"#/components/schemas/{cls.__name__}"}


def _header(name: str, schema: dict[str, Any], description: str) -> dict[str, Any]:
    return {"name": name, "in": "header", "schema": schema, "description": description}


def _post(summary: str, body: type, answer: type) -> dict[str, Any]:
    operation = _get(summary, _ref(answer))
    operation["requestBody"] = {
        "required": True,
        "content": {"application/json": {"schema": _ref(body)}},
    }
    if issubclass(body, requests.GenerationRequest):
        operation["responses"]["200"]["content"]["text/event-stream"] = {
            "schema": {"type": "string", "description": "Chunks as OpenAI sends them."}
        }
        operation["parameters"] = [
            _header(
                TIMEOUT_HEADER,
                {"type": "number", "exclusiveMinimum": 0},
                "Give up after this many seconds; lowers the limit of the configuration.",
            ),
            _header("X-Request-Id", {"type": "string"}, "The id of the request; sent back."),
            _header(
                "X-Commutator-Explain",
                {"enum": ["1"]},
                "Explain the choice of the worker in the answer's X-Commutator-Decision.",
            ),
        ]
    return operation


def _get(
    summary: str, schema: dict[str, Any], content_type: str = "application/json"
) -> dict[str, Any]:
    return {
        "summary": summary,
        "responses": {
            "200": {"description": "Done.", "content": {content_type: {"schema": schema}}},
            "default": {
                "description": "An error.",
                "content": {"application/json": {"schema": _ref(responses.ErrorBody)}},
            },
        },
    }
