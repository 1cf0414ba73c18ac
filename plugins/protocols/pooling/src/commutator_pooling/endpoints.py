"""Reads the requests of each endpoint, and writes its answer.

The score of two texts is a cross-encoder's own. Where a model makes vectors, it is their cosine.
"""

from __future__ import annotations

import math
import time
from base64 import b64encode
from collections.abc import Awaitable, Callable, Mapping, Sequence
from operator import mul
from typing import Any, Literal, TypeVar

import msgspec
from attrs import evolve, frozen

from commutator import Operation
from commutator.errors import RequestError
from commutator.frontend import Call, TimeLimit, read_object
from commutator_openai.chat import as_request
from commutator_openai.embeddings import cut_of
from commutator_openai.fields import hints_given
from commutator_openai.pass_through import PassThrough
from commutator_openai.pooling import Asked, Cut, Pooled, floats, offered, pool
from commutator_openai.tolerance import IGNORED_HEADER, ignored_header
from commutator_pooling.requests import (
    MAX_DOCUMENTS,
    ClassifyRequest,
    Document,
    EmbedRequest,
    PoolingRequest,
    RerankRequest,
    RerankV2Request,
    ScoreRequest,
)

T = TypeVar("T")
Said = tuple[int, Callable[[], dict[str, Any]]]
"""About how many bytes of texts and numbers an answer has, and what makes it."""

_COHERE_TOKENS_PER_DOCUMENT = 4_096
_SCORE_BYTES = 64
"""Of one score in an answer."""
_META = {"api_version": {"version": "2"}}


@frozen
class Endpoints:
    """``strict``: parameters without effect are refused."""

    strict: bool

    async def rerank(self, call: Call) -> None:
        """POST /rerank and /v1/rerank: Jina's, Cohere's older and vLLM's form."""
        await self._serve(call, RerankRequest, self._rerank, (Operation.SCORE, Operation.EMBED))

    async def rerank_v2(self, call: Call) -> None:
        """POST /v2/rerank."""
        await self._serve(call, RerankV2Request, self._rerank, (Operation.SCORE, Operation.EMBED))

    async def score(self, call: Call) -> None:
        """POST /score and /v1/score."""
        await self._serve(call, ScoreRequest, self._score, (Operation.SCORE, Operation.EMBED))

    async def classify(self, call: Call) -> None:
        """POST /classify."""
        await self._serve(call, ClassifyRequest, self._classify, (Operation.CLASSIFY,))

    async def pooling(self, call: Call) -> None:
        """POST /pooling."""
        offered = (Operation.EMBED, Operation.CLASSIFY, Operation.TOKEN_EMBED)
        await self._serve(call, PoolingRequest, self._pooling, offered)

    async def embed_v2(self, call: Call) -> None:
        """POST /v2/embed."""
        await self._serve(call, EmbedRequest, self._embed, (Operation.EMBED,))

    async def _serve(
        self,
        call: Call,
        cls: type[T],
        answer: Callable[[Call, T, str, TimeLimit], Awaitable[Said]],
        operations: Sequence[str],
    ) -> None:
        """``answer`` gets the first of ``operations`` that a worker of the model offers."""

        async def serve() -> None:
            limit = call.time_limit()
            async with limit:
                data = await read_object(call)
                operation = offered(call, data, operations)
                if operation is None:
                    await PassThrough(frozenset()).passed(call, data)
                    return
                body, ignored = await as_request(call, data, cls, strict=self.strict)
                unused = (*hints_given(body), *ignored)
                if unused:
                    call.answer_headers[IGNORED_HEADER] = ignored_header(unused)
                size, make = await answer(call, body, operation, limit)
                encoded = await call.off_loop(size, lambda: msgspec.json.encode(make()))
            await call.reply([encoded])

        name = call.endpoint.rpartition("/")[2]
        await call.traced(name, serve())

    async def _rerank(
        self, call: Call, body: RerankRequest | RerankV2Request, operation: str, limit: TimeLimit
    ) -> Said:
        texts = [one.text if isinstance(one, Document) else one for one in body.documents]
        is_v2 = isinstance(body, RerankV2Request)
        wants_texts = isinstance(body, RerankRequest) and body.return_documents is not False
        cut = cut_of(body)
        if cut.side == "none" and (is_v2 or body.max_tokens_per_doc is not None):
            most = body.max_tokens_per_doc or _COHERE_TOKENS_PER_DOCUMENT
            cut = Cut(side="right", second_tokens=most)
        scores, found = await self._scores(
            call, body, operation, [(body.query, text) for text in texts], cut, limit
        )

        def make() -> dict[str, Any]:
            results = [
                {
                    "index": index,
                    "relevance_score": scores[index],
                    **({"document": {"text": texts[index]}} if wants_texts else {}),
                }
                for index in ranked(scores, body.top_n)
            ]
            units = {"search_units": -(-len(texts) // 100)}
            if is_v2:
                meta = {**_META, "billed_units": units, "tokens": {"input_tokens": found}}
                return {"id": call.request_id, "results": results, "meta": meta}
            return {
                "id": f"rerank-{call.request_id}",
                "model": call.model,
                "results": results,
                "usage": _usage(found),
            }

        return _SCORE_BYTES * len(scores) + (sum(map(len, texts)) if wants_texts else 0), make

    async def _score(
        self, call: Call, body: ScoreRequest, operation: str, limit: TimeLimit
    ) -> Said:
        one = _texts(body, "text_1", "queries")
        other = _texts(body, "text_2", "documents")
        pairs = pairs_of(one, other)
        activation = body.use_activation is not False
        if not activation and operation == Operation.EMBED:
            raise RequestError(
                "use_activation: this model makes vectors, whose cosine has none", "use_activation"
            )
        scores, tokens = await self._scores(
            call, body, operation, pairs, cut_of(body), limit, activation=activation
        )
        return _list(
            call,
            "score",
            len(scores),
            lambda index: {"index": index, "object": "score", "score": scores[index]},
            tokens,
            _SCORE_BYTES * len(scores),
        )

    async def _scores(
        self,
        call: Call,
        body: RerankRequest | RerankV2Request | ScoreRequest,
        operation: str,
        pairs: Sequence[tuple[str, str]],
        cut: Cut,
        limit: TimeLimit,
        *,
        activation: bool = True,
    ) -> tuple[list[float], int]:
        """(the score of each pair, tokens)."""
        param = "text_1" if isinstance(body, ScoreRequest) else "documents"
        asked = Asked(
            model=body.model,
            operation=operation,
            inputs=pairs,
            param=param,
            cut=cut,
            activation=activation,
            priority=body.priority,
            user=body.user,
        )
        if operation == Operation.SCORE:
            found = await pool(call, asked, limit)
            return [_one(row) for row in found.rows], found.prompt_tokens
        places: dict[str, int] = {}
        for text in (text for pair in pairs for text in pair):
            places.setdefault(text, len(places))
        if cut.second_tokens is not None:
            cut = evolve(cut, tokens=cut.second_tokens)
        found = await pool(call, evolve(asked, inputs=[*places], cut=cut), limit)

        def compared() -> list[float]:
            vectors = [floats(row) for row in found.rows]
            return [cosine(vectors[places[a]], vectors[places[b]]) for a, b in pairs]

        return await call.off_loop(found.size_bytes, compared), found.prompt_tokens

    async def _classify(
        self, call: Call, body: ClassifyRequest, operation: str, limit: TimeLimit
    ) -> Said:
        found = await self._pooled(call, body, operation, limit)
        infos = call.services.dispatcher.infos(found.model)
        labels = next((info.labels for info in infos if info.labels), ())
        return _list(
            call,
            "classify",
            len(found.rows),
            lambda index: _class(index, floats(found.rows[index]), labels),
            found.prompt_tokens,
            found.size_bytes,
        )

    async def _pooling(
        self, call: Call, body: PoolingRequest, operation: str, limit: TimeLimit
    ) -> Said:
        operation = body.task or operation
        found = await self._pooled(call, body, operation, limit, dimensions=body.dimensions)
        as_base64 = body.encoding_format == "base64"

        def row(index: int) -> dict[str, Any]:
            data = _data(found, index, operation, as_base64)
            return {"index": index, "object": "pooling", "data": data}

        count = len(found.rows)
        return _list(call, "pool", count, row, found.prompt_tokens, found.size_bytes)

    async def _embed(
        self, call: Call, body: EmbedRequest, operation: str, limit: TimeLimit
    ) -> Said:
        if body.texts is None:
            raise RequestError(
                "texts: required, a list of texts", "texts", "missing_required_parameter"
            )
        sides: Mapping[str, Literal["none", "left", "right"]] = {"NONE": "none", "START": "left"}
        asked = Asked(
            model=body.model,
            operation=operation,
            inputs=body.texts,
            param="texts",
            cut=Cut(side=sides.get(body.truncate or "END", "right"), tokens=body.max_tokens),
            dimensions=body.output_dimension,
            priority=body.priority,
        )
        found = await pool(call, asked, limit)
        kinds = body.embedding_types or ("float",)
        texts = body.texts

        def make() -> dict[str, Any]:
            shown: dict[str, list[Any]] = {}
            for kind in kinds:
                show: Callable[[bytes], Any] = floats if kind == "float" else _base64
                shown[kind] = [show(row) for row in found.rows]
            meta = {**_META, "billed_units": {"input_tokens": found.prompt_tokens}}
            return {
                "id": call.request_id,
                "response_type": "embeddings_by_type",
                "texts": texts,
                "embeddings": shown,
                "meta": meta,
            }

        return found.size_bytes * len(kinds) + sum(map(len, texts)), make

    @staticmethod
    async def _pooled(
        call: Call,
        body: ClassifyRequest | PoolingRequest,
        operation: str,
        limit: TimeLimit,
        *,
        dimensions: int | None = None,
    ) -> Pooled:
        asked = Asked(
            model=body.model,
            operation=operation,
            inputs=body.input,
            cut=cut_of(body),
            dimensions=dimensions,
            activation=body.use_activation is not False,
            priority=body.priority,
            user=body.user,
        )
        return await pool(call, asked, limit)


def pairs_of(one: Sequence[str], other: Sequence[str]) -> list[tuple[str, str]]:
    """The first of ``one`` with each of ``other``, or pair by pair. Raises RequestError."""
    if len(one) == 1:
        return [(one[0], text) for text in other]
    if len(one) != len(other):
        raise RequestError(
            f"text_1: expected one text, or as many as text_2, which has {len(other)}; got "
            f"{len(one)}",
            "text_1",
        )
    return [*zip(one, other, strict=True)]


def ranked(scores: Sequence[float], top: int | None) -> list[int]:
    """The places of the ``top`` highest scores, best first; of equal ones the first comes first."""
    return sorted(range(len(scores)), key=lambda place: -scores[place])[:top]


def cosine(one: Sequence[float], other: Sequence[float]) -> float:
    """The cosine of two vectors, 0 where one has no direction."""
    lengths = math.hypot(*one) * math.hypot(*other)
    return sum(map(mul, one, other)) / lengths if lengths else 0.0


def _texts(body: ScoreRequest, name: str, same: str) -> list[str]:
    """The texts of a field that has two names. Raises RequestError."""
    given = [one for one in (getattr(body, name), getattr(body, same)) if one is not None]
    if len(given) != 1:
        raise RequestError(f"{name}: expected either {name} or {same}", name)
    texts = [given[0]] if isinstance(given[0], str) else given[0]
    if not isinstance(texts, list) or not 0 < len(texts) <= MAX_DOCUMENTS:
        raise RequestError(f"{name}: expected a text, or a list of 1 to {MAX_DOCUMENTS}", name)
    if not all(isinstance(text, str) for text in texts):
        raise RequestError(f"{name}: only texts are served", name, "unsupported_parameter")
    return texts


def _one(row: bytes) -> float:
    (score,) = floats(row)
    return score


def _class(index: int, probabilities: Sequence[float], labels: Sequence[str]) -> dict[str, Any]:
    best = max(range(len(probabilities)), key=probabilities.__getitem__)
    return {
        "index": index,
        "label": labels[best] if best < len(labels) else None,
        "probs": probabilities,
        "num_classes": len(probabilities),
    }


def _data(found: Pooled, index: int, operation: str, as_base64: bool) -> Any:
    row = found.rows[index]
    if operation != Operation.TOKEN_EMBED:
        return _base64(row) if as_base64 else floats(row)
    size = len(row) // found.tokens[index]
    parts = [row[at : at + size] for at in range(0, len(row), size)]
    return _base64(row) if as_base64 else [floats(part) for part in parts]


def _base64(row: bytes) -> str:
    return b64encode(row).decode()


def _usage(tokens: int) -> dict[str, int]:
    return {"prompt_tokens": tokens, "total_tokens": tokens}


def _list(
    call: Call,
    prefix: str,
    count: int,
    row: Callable[[int], dict[str, Any]],
    tokens: int,
    size_bytes: int,
) -> Said:
    def make() -> dict[str, Any]:
        return {
            "id": f"{prefix}-{call.request_id}",
            "object": "list",
            "created": int(time.time()),
            "model": call.model,
            "data": [row(index) for index in range(count)],
            "usage": _usage(tokens),
        }

    return size_bytes, make
