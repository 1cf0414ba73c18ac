"""Requests that generate nothing: each input becomes a vector, a score or the chances of classes.

The same for every protocol that has such requests: tokenize, cut if asked, limit, route, account.
A request with many inputs is divided, so that all workers of its model share it.
"""

from __future__ import annotations

import asyncio
import struct
from array import array
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any, Literal

from attrs import field, frozen
from tokenizers import Encoding, Tokenizer

from commutator import EngineInfo, GenerateRequest, Operation, Pooling, SamplingParams
from commutator.errors import EngineError, RequestError
from commutator.frontend import Call, TimeLimit, allowed_priority
from commutator.tokenizer import TextModel
from commutator_openai.pass_through import ENDPOINTS

Text = str | Sequence[int] | tuple[str, str]
"""One input: a text, its token ids, or two texts that are judged together."""

TRUNCATED_HEADER = "X-Commutator-Truncated"
"""The number of inputs that were cut, as the request asked, to what the model takes."""

MAX_INPUTS = 2_048
_LEAST_TOKENS = 256
_MOST_TOKENS = 8_192
"""Of a part that one worker gets: enough to keep it busy, and not to keep others waiting."""
_PARTS_PER_WORKER = 2
"""One is computed while another waits."""
_TOKENIZED_TOGETHER = 64
_EXPLAINED = 4
_FLOAT_BYTES = 4


@frozen(kw_only=True)
class Cut:
    """What becomes of an input that is too long."""

    side: Literal["none", "left", "right"] = "none"
    """Where tokens are cut off; "none": the request is refused. Of two texts the second is cut."""
    tokens: int | None = None
    """The longest input; None: what the model takes."""
    second_tokens: int | None = None
    """Of two texts, the most tokens of the second; None: what the model takes."""


@frozen(kw_only=True)
class Asked:
    """One request, in no protocol's words."""

    model: str | None
    """As the client named it; None: the only one that it may use."""
    operation: str
    """In words of ``Operation``."""
    inputs: Sequence[Text]
    """At least one."""
    param: str = "input"
    """What the inputs are called in errors."""
    cut: Cut = field(factory=Cut)
    dimensions: int | None = None
    activation: bool = True
    priority: int | None = None
    user: str | None = None
    special_tokens: bool = True
    """Whether texts get the special tokens that the model's tokenizer adds."""


@frozen(kw_only=True)
class Pooled:
    """The results of one request, in the order of its inputs."""

    model: str
    """The name of the model that served it."""
    rows: Sequence[bytes]
    """Little-endian float32: of each input its vector, or those of its tokens one after another."""
    tokens: Sequence[int]
    """The tokens of each input, special ones included."""

    @property
    def prompt_tokens(self) -> int:
        """Tokens of all inputs."""
        return sum(self.tokens)

    @property
    def size_bytes(self) -> int:
        """Of all rows."""
        return sum(map(len, self.rows))


@frozen(kw_only=True)
class _Tokenized:
    """The tokens of one input."""

    token_ids: Sequence[int]
    first: int
    """How many of them belong to the first text."""
    was_cut: bool = False


def infos_of(call: Call, model: str | None) -> tuple[str, list[EngineInfo]]:
    """The model's own name, and what its ready workers say. Raises RequestError."""
    name, _ = call.text_model(model)
    return name, call.services.dispatcher.infos(name)


def offered(
    call: Call,
    data: Mapping[str, Any],
    operations: Sequence[str],
    foreign: Sequence[str] = (),
) -> str | None:
    """The first of ``operations`` that a worker of the model in the body ``data`` offers.

    None: only an engine can answer that takes clients' requests unchanged. ``foreign`` are fields
    that only such an engine can read. Raises RequestError where nobody can.
    """
    named = data.get("model")
    if not isinstance(named, str | None):
        return operations[0]  # refused with all that is wrong
    name, infos = infos_of(call, named)
    can = {one for info in infos for one in info.operations}
    # Without a worker any will do: routing says that none is ready.
    found = next((one for one in operations if one in can or not infos), None)
    read = not any(field in data for field in foreign)
    if found is not None and read:
        return found
    if call.endpoint in ENDPOINTS and call.services.dispatcher.forwards(name):
        return None
    if found is not None:
        (param, *_) = (field for field in foreign if field in data)
        raise RequestError(f"{param}: only texts and token ids are served here", param)
    raise RequestError(
        f"model: the workers of {name} do not {' or '.join(operations)}, they "
        f"{', '.join(sorted(can))}",
        "model",
        "unsupported_endpoint",
    )


def floats(row: bytes) -> tuple[float, ...]:
    """The numbers of a row."""
    return struct.unpack(f"<{len(row) // _FLOAT_BYTES}f", row)


async def pool(call: Call, asked: Asked, limit: TimeLimit) -> Pooled:
    """Tokenize, limit, route, compute and account ``asked``.

    ``limit`` is entered already: reading the request counts, too. Raises RequestError, and what
    dispatching raises. If one part fails, all of them end.
    """
    call.model, _ = call.text_model(asked.model)
    call.user = asked.user
    async with call.services.limiter.of(call.caller(asked.user)):
        return await call.serve(asked.model, partial(_pool, call, asked, limit))


async def _pool(call: Call, asked: Asked, limit: TimeLimit, name: str, text: TextModel) -> Pooled:
    """By the model that is to serve the request now."""
    services = call.services
    if call.adapter is not None:
        raise RequestError(f"model: adapter {call.adapter} answers no {call.path}", "model")
    priority = allowed_priority(call.principal, asked.priority)
    longest = services.max_model_len(name, call.principal)
    inputs: list[_Tokenized] = []
    for begin in range(0, len(asked.inputs), _TOKENIZED_TOGETHER):
        some = asked.inputs[begin : begin + _TOKENIZED_TOGETHER]
        work = partial(tokenized, text.tokenizer, some, asked, longest, text.vocab_size)
        inputs += await call.off_loop(_characters(some), work)
    lengths = [len(one.token_ids) for one in inputs]
    if cut := sum(one.was_cut for one in inputs):
        call.answer_headers[TRUNCATED_HEADER] = str(cut)
    total = sum(lengths)
    if call.counts and call.ticket is None:
        call.ticket = await services.request_limiter.admit(call.principal, total, 1, 0)
    workers = len(services.dispatcher.infos(name))
    parts = parts_of(lengths, workers)
    requests = [
        _request(asked, [inputs[number] for number in part], priority, call.request_id, place)
        for place, part in enumerate(parts)
    ]
    running = _Running(call, name, limit, asked.param)
    results = await running.all(requests, _PARTS_PER_WORKER * max(1, workers))
    rows = [b""] * len(inputs)
    for part, vectors in zip(parts, results, strict=True):
        sizes = [lengths[number] for number in part]
        per_token = asked.operation == Operation.TOKEN_EMBED
        for number, row in zip(part, _rows(vectors, sizes, per_token=per_token), strict=True):
            rows[number] = row
    call.used(total, 0, 0)
    services.metrics.tokens_used(name, total, 0, 0)
    return Pooled(model=name, rows=rows, tokens=lengths)


def parts_of(lengths: Sequence[int], workers: int) -> list[list[int]]:
    """The inputs, by their numbers, divided among ``workers``; shorter ones come first.

    Inputs of about the same length are in one part, so that little is padded. No part has more than
    ``_MOST_TOKENS``, unless a single input has.
    """
    fair = -(-sum(lengths) // (_PARTS_PER_WORKER * max(1, workers)))
    most = min(_MOST_TOKENS, max(_LEAST_TOKENS, fair))
    parts: list[list[int]] = []
    tokens = 0
    for number in sorted(range(len(lengths)), key=lengths.__getitem__):
        tokens += lengths[number]
        if not parts or tokens > most:
            parts.append([])
            tokens = lengths[number]
        parts[-1].append(number)
    return parts


def tokenized(
    tokenizer: Tokenizer, inputs: Sequence[Text], asked: Asked, longest: int, vocab_size: int
) -> list[_Tokenized]:
    """The tokens of ``inputs``, cut as ``asked``. ``longest`` is what the model takes.

    Raises RequestError for one that is too long, or has unknown token ids.
    """
    most = min(longest, asked.cut.tokens or longest)
    texts: list[Any] = [one for one in inputs if isinstance(one, str | tuple)]
    encoded = iter(
        tokenizer.encode_batch_fast(texts, add_special_tokens=asked.special_tokens) if texts else ()
    )
    found = []
    for one in inputs:
        if not isinstance(one, str | tuple):
            found.append(_of_ids(one, asked, most, vocab_size))
            continue
        encoding = next(encoded)
        if len(encoding.ids) > most or _has_long_second(encoding, asked.cut.second_tokens):
            if asked.cut.side == "none":
                raise _too_long(asked, len(encoding.ids), most)
            encoding = _shortened(tokenizer, one, asked, most)
            found.append(_of(encoding, isinstance(one, tuple), was_cut=True))
        else:
            found.append(_of(encoding, isinstance(one, tuple)))
    if not all(one.token_ids for one in found):
        raise RequestError(f"{asked.param}: expected inputs of at least one token", asked.param)
    return found


def _has_long_second(encoding: Encoding, most: int | None) -> bool:
    """Whether the second text of a pair has more than ``most`` tokens."""
    return most is not None and encoding.sequence_ids.count(1) > most


def _of(encoding: Encoding, is_pair: bool, *, was_cut: bool = False) -> _Tokenized:
    ids, first = encoding.ids, len(encoding.ids)
    if is_pair and 1 in (types := encoding.type_ids):
        first = types.index(1)
    return _Tokenized(token_ids=ids, first=first, was_cut=was_cut)


def _of_ids(ids: Sequence[int], asked: Asked, most: int, vocab_size: int) -> _Tokenized:
    if (largest := max(ids, default=0)) >= vocab_size:
        raise RequestError(
            f"{asked.param}: token id {largest} is out of vocabulary: expected ids below "
            f"{vocab_size}",
            asked.param,
        )
    if len(ids) <= most:
        return _Tokenized(token_ids=ids, first=len(ids))
    if asked.cut.side == "none":
        raise _too_long(asked, len(ids), most)
    kept = ids[:most] if asked.cut.side == "right" else ids[-most:]
    return _Tokenized(token_ids=kept, first=most, was_cut=True)


def _shortened(
    tokenizer: Tokenizer, text: str | tuple[str, str], asked: Asked, most: int
) -> Encoding:
    """The text with its special tokens, cut to ``most`` tokens; of a pair the second text is."""
    is_pair, side = isinstance(text, tuple), asked.cut.side
    first, *others = (
        tokenizer.encode_batch_fast([*text], add_special_tokens=False)
        if isinstance(text, tuple)
        else [tokenizer.encode(text, add_special_tokens=False)]
    )
    special = tokenizer.num_special_tokens_to_add(is_pair) if asked.special_tokens else 0
    room = most - special - (len(first.ids) if is_pair else 0)
    if is_pair and asked.cut.second_tokens is not None:
        room = min(room, asked.cut.second_tokens)
    if room < 1:
        raise _too_long(asked, len(first.ids) + special, most)
    (others[0] if is_pair else first).truncate(room, direction=side)
    return tokenizer.post_process(
        first, others[0] if is_pair else None, add_special_tokens=asked.special_tokens
    )


def _too_long(asked: Asked, tokens: int, most: int) -> RequestError:
    return RequestError(
        f"{asked.param}: an input has {tokens} tokens, and at most {most} are served: shorten it, "
        "or ask for it to be cut (truncate_prompt_tokens, or truncate)",
        asked.param,
        "context_length_exceeded",
    )


def _characters(inputs: Sequence[Text]) -> int:
    return sum(sum(map(len, one)) if isinstance(one, tuple) else len(one) for one in inputs)


def _request(
    asked: Asked, inputs: Sequence[_Tokenized], priority: int, request_id: str, place: int
) -> GenerateRequest:
    token_ids = array("I")
    for one in inputs:
        token_ids.extend(one.token_ids)
    pairs = isinstance(asked.inputs[0], tuple)
    return GenerateRequest(
        request_id=f"{request_id}-{place}",
        token_ids=token_ids,
        sampling=SamplingParams(max_tokens=1),
        priority=priority,
        pooling=Pooling(
            operation=asked.operation,
            lengths=tuple(len(one.token_ids) for one in inputs),
            firsts=tuple(one.first for one in inputs) if pairs else (),
            dimensions=asked.dimensions,
            activation=asked.activation,
        ),
    )


def _rows(vectors: bytes, lengths: Sequence[int], *, per_token: bool) -> Iterator[bytes]:
    """Raises EngineError where they are not as many as there are inputs."""
    count = sum(lengths) if per_token else len(lengths)
    if not vectors or len(vectors) % (count * _FLOAT_BYTES):
        raise EngineError(f"the worker sent {len(vectors)} bytes for {count} rows of numbers")
    size, at = len(vectors) // count, 0
    for length in lengths:
        end = at + size * (length if per_token else 1)
        yield vectors[at:end]
        at = end


class _Running:
    """The parts of one request that are computed, each by some worker."""

    def __init__(self, call: Call, model: str, limit: TimeLimit, param: str) -> None:
        self._call = call
        self._model = model
        self._deadline_s = limit.deadline_s
        self._param = param
        self._workers: dict[str, None] = {}
        self._explained: list[dict[str, Any]] = []

    async def all(self, requests: Sequence[GenerateRequest], at_once: int) -> list[bytes]:
        """The vectors of each request, of which up to ``at_once`` are in flight."""
        call = self._call
        call.generating = True
        try:
            # The first may wait for a worker on behalf of all, as waiting for one that computes an
            # earlier part of the same request might never end.
            first = await self._dispatch(requests[0], may_wait=True)
            results = [b""] * len(requests)
            left = iter(enumerate(requests))
            next(left)

            async def work(begun: Any | None) -> None:
                number = 0
                while True:
                    if begun is None:
                        number, request = next(left, (-1, requests[0]))
                        if number < 0:
                            return
                        begun = await self._dispatch(request, may_wait=False)
                    results[number] = await self._result(begun)
                    begun = None

            try:
                async with asyncio.TaskGroup() as group:
                    for task in range(min(at_once, len(requests))):
                        group.create_task(work(None if task else first))
            finally:
                await first.aclose()  # its task may have been cancelled before it began
        except ExceptionGroup as errors:
            raise self._in_words(errors.exceptions[0]) from errors
        finally:
            call.generating = False
            call.note_routing(tuple(self._workers), lambda: self._explained)
        return results

    async def _dispatch(self, request: GenerateRequest, *, may_wait: bool) -> Any:
        services = self._call.services
        dispatched = await services.dispatcher.dispatch(
            self._model,
            request,
            self._call.caller(self._call.user),
            (),  # no prefix of it is cached
            may_wait=may_wait,
            deadline_s=self._deadline_s,
        )
        services.metrics.routed(self._model, dispatched.route)
        return dispatched

    async def _result(self, dispatched: Any) -> bytes:
        times = self._call.services.metrics.token_times(self._model, self._call.arrived_s)
        try:
            async for delta in dispatched:
                if delta.finish_reason is not None:
                    self._workers |= dict.fromkeys(dispatched.worker_ids)
                    if self._call.explains and len(self._explained) < _EXPLAINED:
                        self._explained.append(dispatched.explain())
                    times.tokens(1)  # all that comes, so it is what comes first
                    vectors: bytes = delta.vectors
                    return vectors
        finally:
            await dispatched.aclose()
        raise EngineError("the worker ended a request without an answer")

    def _in_words(self, error: Exception) -> Exception:
        """A worker's refusal, which names a field, in the client's words."""
        if isinstance(error, RequestError) and error.param is None:
            name, colon, text = str(error).partition(": ")
            if colon and name in {"input", "dimensions"}:
                param = self._param if name == "input" else name
                return RequestError(f"{param}: {text}", param, error.code)
        return error
