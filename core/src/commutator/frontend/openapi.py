"""The OpenAPI 3.1 document, generated from the classes that validate requests and shape answers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from commutator.frontend import requests, responses
from commutator.frontend.deadline import TIMEOUT_HEADER
from commutator.frontend.fields import request_schema

__all__ = ["openapi_document"]

_REQUESTS = (
    requests.ChatRequest,
    requests.CompletionRequest,
    requests.TokenizeRequest,
    requests.DetokenizeRequest,
)
_RESPONSES = (
    responses.ChatCompletion,
    responses.Completion,
    responses.ErrorBody,
    responses.ModelCard,
    responses.ModelList,
    responses.TokenizeResponse,
    responses.DetokenizeResponse,
)
_ERROR = {"$ref": "#/components/schemas/ErrorBody"}


def openapi_document(version: str, models: Sequence[str], *, needs_key: bool) -> dict[str, Any]:
    """``version`` is Commutator's; ``models`` are the names that requests may give."""
    chat = _post(
        "Answer a conversation.", requests.ChatRequest, responses.ChatCompletion, streams=True
    )
    completion = _post(
        "Continue a text.", requests.CompletionRequest, responses.Completion, streams=True
    )
    tokenize = _post("Text to tokens.", requests.TokenizeRequest, responses.TokenizeResponse)
    detokenize = _post("Tokens to text.", requests.DetokenizeRequest, responses.DetokenizeResponse)
    model_id = {
        "name": "id",
        "in": "path",
        "required": True,
        "schema": {"type": "string"},
        "examples": {name: {"value": name} for name in models},
    }
    protected = {
        "/v1/chat/completions": {"post": chat},
        "/v1/completions": {"post": completion},
        "/v1/models": {"get": _get("The models served.", _ref(responses.ModelList))},
        "/v1/models/{id}": {
            "get": _get("One model.", _ref(responses.ModelCard)) | {"parameters": [model_id]}
        },
        "/tokenize": {"post": tokenize},
        "/detokenize": {"post": detokenize},
    }
    anything = {"type": "object"}
    free = {
        "/health": {"get": _get("Models, workers and load.", anything)},
        "/live": {"get": _get("Whether the process answers.", anything)},
        "/ready": {"get": _get("Whether every model can be served.", anything)},
        "/openapi.json": {"get": _get("This document.", anything)},
        "/metrics": {"get": _get("Prometheus metrics.", {"type": "string"}, "text/plain")},
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
        for operations in protected.values():
            for operation in operations.values():
                operation["security"] = [{"bearer": []}]
    return document


def _schemas(models: Sequence[str]) -> dict[str, Any]:
    schemas = {
        cls.__name__: {"description": cls.__doc__, **request_schema(cls)}
        for cls in (*_REQUESTS, *_RESPONSES)
    }
    for cls in _REQUESTS:
        model = schemas[cls.__name__]["properties"]["model"]
        optional = "model" not in schemas[cls.__name__].get("required", ())
        names = [*models, None] if optional else [*models]
        schemas[cls.__name__]["properties"]["model"] = {
            "enum": names,
            "description": model["description"],
        }
    return schemas


def _ref(cls: type) -> dict[str, str]:
    return {"$ref": f"#/components/schemas/{cls.__name__}"}


def _header(name: str, schema: dict[str, Any], description: str) -> dict[str, Any]:
    return {"name": name, "in": "header", "schema": schema, "description": description}


def _post(summary: str, body: type, answer: type, *, streams: bool = False) -> dict[str, Any]:
    operation = _get(summary, _ref(answer))
    operation["requestBody"] = {
        "required": True,
        "content": {"application/json": {"schema": _ref(body)}},
    }
    if streams:
        operation["responses"]["200"]["content"]["text/event-stream"] = {
            "schema": {"type": "string", "description": "Chunks as OpenAI sends them."}
        }
        operation["parameters"] = [
            _header(
                TIMEOUT_HEADER,
                {"type": "number", "exclusiveMinimum": 0},
                "Give up after this many seconds; lowers the limit of the configuration.",
            ),
            _header("X-Request-Id", {"type": "string"}, "Names the request; sent back."),
            _header(
                "X-Commutator-Explain",
                {"enum": ["1"]},
                "Answer X-Commutator-Decision: which worker, and why.",
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
                "content": {"application/json": {"schema": _ERROR}},
            },
        },
    }
