"""A front door records its requests as a trace: times, lengths and block ids, no text, no tokens.

One JSON object a line, in the order in which requests end. Block ids are chained keyed hashes:
equal first ids mean an equal prefix of the same model, adapter and cache salt, and without the key
nobody can tell whether a prompt of their choice is in the trace. For `commutator doctor` each line
has the worker, the tokens that it found cached, an id of the salt, and a sketch of the whole text.
"""

from __future__ import annotations

import json
import os
import secrets
import stat
import tempfile
import time
from array import array
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from functools import partial
from hashlib import blake2b
from pathlib import Path
from typing import Annotated, Any

import msgspec
from attrs import Attribute, define, frozen

from commutator.contract.observer import AnswerProgress
from commutator.contract.request import GenerateRequest, RequestOutcome, RequestSummary
from commutator.contract.settings import Bounds, NonNegativeInt, Size, setting
from commutator_records.log_file import FileObserver, FileObserverConfig, OwnFile

_KEY_BYTES = 32
_CHAIN_BYTES = 16
_ID_MASK = (1 << 53) - 1
"""Ids are exact in every reader of JSON."""
_TOKEN_BYTES = 36
"""Memory of a token id in a list."""

_PIECE_TOKENS = 16
_SKETCH_IDS = 8
_SPREAD, _SPREAD_MASK = 2654435761, 0xFFFFFFFF
_RARE = _SPREAD_MASK // 16
"""One of 16 distinct tokens begins a piece."""
_ESCAPE = "backslashreplace"
"""A client can send what no encoding has."""

_encode = msgspec.json.encode


def _allowed(_: object, _field: Attribute[Any], value: bool) -> None:
    if not value:
        raise ValueError(
            "set it to true: this observer reads prompts, and writes keyed hashes of them, no text"
        )


@frozen(kw_only=True)
class RecordingConfig(FileObserverConfig):
    """Each front door records its requests as a trace: times, lengths and block ids, no text.

    `commutator replay` reads such a trace.
    """

    prompts: bool = setting(
        "To be set to true: it reads the tokens of prompts, and writes keyed hashes of them.",
        False,
        validator=_allowed,
    )
    path: str = setting(
        "The file. Each front-door process writes one of its own: of `NAME.jsonl`, "
        "`NAME.0.jsonl`, `NAME.1.jsonl`, ... Block ids are keyed hashes; the key is in "
        "`NAME.jsonl.key`, which is made where there is none."
    )
    block_tokens: Annotated[int, Bounds(minimum=1, maximum=512)] = setting(
        "Prompt tokens for each block id: shared prefixes are known to this many tokens. Engines "
        "in a replay need blocks of a part or a multiple of it.",
        16,
    )
    rotate_bytes: Size = setting("A file that is longer is rotated.", 64 << 20)
    keep: NonNegativeInt = setting(
        "Rotated files that are kept: `NAME.0.jsonl.1` is the latest. 0 keeps none.", 7
    )


@define
class _Open:
    """A request that has not ended."""

    time_s: float
    request: GenerateRequest
    progress: AnswerProgress | None = None


class TraceRecorder(FileObserver):
    """Writes a line for each request that came to routing, served or not.

    Requests that a server gets as the client sent them are not recorded, as their lengths are not
    known.
    """

    def __init__(self, config: RecordingConfig, clock: Callable[[], float] = time.time) -> None:
        """``clock``: seconds since 1970."""
        super().__init__("trace of requests", config)
        self._block_tokens = config.block_tokens
        self._clock = clock
        self._key = b""
        self._open: dict[int, _Open] = {}
        """By the identity of the summary, which every hook gets; ids may be those of clients."""

    def prompt_received(self, request: RequestSummary, prompt: GenerateRequest) -> None:
        self._open[id(request)] = _Open(self._clock(), prompt)

    def answer_begun(self, request: RequestSummary, progress: AnswerProgress) -> None:
        if (one := self._open.get(id(request))) is not None:
            one.progress = progress

    def request_finished(self, request: RequestSummary, outcome: RequestOutcome) -> None:
        if (one := self._open.pop(id(request), None)) is not None:
            more = {"cached_length": outcome.cached_tokens, "worker": outcome.worker_id}
            self._add(request, one, outcome.generated_tokens, **more)

    def request_failed(
        self, request: RequestSummary, error: BaseException, worker_id: str | None
    ) -> None:
        if (one := self._open.pop(id(request), None)) is not None:
            generated = 0 if one.progress is None else one.progress.generated_tokens
            self._add(request, one, generated, failed=True)

    def _add(self, summary: RequestSummary, one: _Open, output_length: int, **more: Any) -> None:
        said = {
            "timestamp": round(one.time_s * 1000, 3),
            "input_length": len(one.request.token_ids),
            "output_length": output_length,
            "block_tokens": self._block_tokens,
            "model": summary.model,
            **more,
        }
        size = _TOKEN_BYTES * len(one.request.token_ids)
        self.add(partial(self._line, said, summary.model, one.request), size)

    def _line(self, said: dict[str, Any], model: str, request: GenerateRequest) -> bytes:
        ids = block_ids(self._key, model, request, self._block_tokens)
        said = {**said, "hash_ids": list(ids), "sketch": sketch(self._key, request.token_ids)}
        if request.cache_salt is not None:
            said["salt_id"] = _number(
                self._key, b"salt", request.cache_salt.encode("ascii", _ESCAPE)
            )
        return _encode(said) + b"\n"

    def _open_file(self) -> OwnFile:
        file = super()._open_file()
        path = Path(self._config.path).expanduser()
        try:
            self._key = _shared_key(path.with_name(path.name + ".key"))
        except BaseException:
            file.close()
            raise
        return file


def block_ids(key: bytes, model: str, request: GenerateRequest, block_tokens: int) -> Iterator[int]:
    """An id for each block of the prompt, the last of which may be partial.

    Two prompts have equal first ids where they begin with equal tokens for the same model, adapter
    and cache salt.
    """
    # A client can send lone surrogates, which UTF-8 refuses.
    who = json.dumps([model, request.adapter_digest, request.cache_salt]).encode("ascii")
    chain = blake2b(who, key=key, digest_size=_CHAIN_BYTES).digest()
    tokens = memoryview(array("Q", request.token_ids)).cast("B")
    size = block_tokens * 8
    for begin in range(0, len(tokens), size):
        block = chain + tokens[begin : begin + size]
        chain = blake2b(block, key=key, digest_size=_CHAIN_BYTES).digest()
        yield int.from_bytes(chain[:8], "big") & _ID_MASK


def sketch(key: bytes, tokens: Sequence[int]) -> list[int]:
    """A few ids of pieces of a text; of a text that is mostly the same, most are equal.

    It does not matter what is before the pieces, or how much.

    Places are chosen by the tokens there, so that they move with the text.
    """
    places = [at for at, token in enumerate(tokens) if token * _SPREAD & _SPREAD_MASK < _RARE]
    found = set()
    for place in places:
        piece = array("Q", tokens[place : place + _PIECE_TOKENS]).tobytes()
        if len(piece) == _PIECE_TOKENS * 8:
            found.add(_number(key, b"piece", piece))
    return sorted(found)[:_SKETCH_IDS]


def _number(key: bytes, of: bytes, content: bytes) -> int:
    digest = blake2b(content, key=key, digest_size=8, person=of).digest()
    return int.from_bytes(digest, "big") & _ID_MASK


def _shared_key(path: Path) -> bytes:
    """The key of all front doors that record here, made by the first. Raises OSError."""
    with tempfile.NamedTemporaryFile(dir=path.parent, prefix=path.name) as made:  # mode 0600
        made.write(secrets.token_bytes(_KEY_BYTES))
        made.flush()
        with suppress(FileExistsError):
            os.link(made.name, path)
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    with os.fdopen(descriptor, "rb") as file:
        found = os.fstat(file.fileno())
        if found.st_uid != os.geteuid() or not stat.S_ISREG(found.st_mode):
            raise PermissionError(f"{path}: not a file of this user")
        if found.st_mode & 0o077:
            raise PermissionError(f"{path}: others may read it; chmod 600, or remove it")
        key = file.read()
    if len(key) != _KEY_BYTES:
        raise OSError(f"{path}: expected {_KEY_BYTES} bytes, found {len(key)}; remove it")
    return key
