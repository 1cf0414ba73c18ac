"""Runs an encoder under the token API's server: one thread computes whatever waits, in batches."""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Sequence
from importlib.metadata import version

from torch import Tensor
from torch.nn import functional

from commutator import (
    EngineInfo,
    EngineLoad,
    FinishReason,
    GenerateRequest,
    Operation,
    Pooling,
    TokenDelta,
)
from commutator.errors import EngineOverloadedError, RequestError
from commutator.tokenizer import locate_model
from commutator_encoder.batches import Input, Job, Waiting, batches_of
from commutator_encoder.config import EncoderConfig
from commutator_encoder.facts import read_facts
from commutator_encoder.model import Encoder, load_encoder, pooled, squashed
from commutator_engine_kit import Emit, EngineStart, TokenEngine
from commutator_engine_kit.pytorch import prepare_pytorch

log = logging.getLogger(__name__)

_CPU_TOKENS = 2_048
_GPU_TOKENS = 32_768
_BLOCK_SIZE = 16
"""The engine has no KV cache; this is the unit in which routing counts work."""


class EncoderEngine(TokenEngine):
    """Computes vectors, scores and classes. An input is computed with whatever waits beside it."""

    def __init__(
        self,
        encoder: Encoder,
        config: EncoderConfig,
        *,
        name: str,
        max_model_len: int | None = None,
    ) -> None:
        """``name`` is that of the model; ``max_model_len`` lowers its longest input."""
        self._encoder = encoder
        self._config = config
        facts = encoder.facts
        longest = facts.max_tokens if max_model_len is None else max_model_len
        self.max_tokens = min(facts.max_tokens, longest)
        """Longest input."""
        on_cpu = encoder.device.type == "cpu"
        self._most_tokens = config.max_tokens_per_batch or (_CPU_TOKENS if on_cpu else _GPU_TOKENS)
        self._info = EngineInfo(
            kind="encoder",
            version=version("commutator-encoder"),
            model=name,
            max_model_len=self.max_tokens,
            block_size=_BLOCK_SIZE,
            kv_capacity_blocks=0,
            pid=os.getpid(),
            operations=facts.operations,
            labels=facts.labels or (),
        )
        self._waiting = Waiting()
        self._running: set[Job] = set()
        self._jobs: dict[int, Job] = {}
        self._changed = threading.Condition()
        """Guards what is above it."""
        self._stopping = False
        self._thread: threading.Thread | None = None

    @classmethod
    def of(cls, config: EncoderConfig, start: EngineStart) -> EncoderEngine:
        """Load the model. Raises ConfigError when it cannot be as configured."""
        model = start.model
        device, dtype = prepare_pytorch(
            config.device,
            config.dtype,
            threads=config.threads,
            replicas=config.replicas,
            where="encoder engine",
        )
        path = locate_model(model.source)
        facts = read_facts(path, config.matryoshka_dimensions)
        encoder = load_encoder(path, facts, device=device, dtype=dtype)
        return cls(encoder, config, name=model.name, max_model_len=model.max_model_len)

    def start(self, emit: Emit) -> EngineInfo:
        self._thread = threading.Thread(target=self._run, args=(emit,), name="engine", daemon=True)
        self._thread.start()
        return self._info

    def submit(self, key: int, request: GenerateRequest) -> None:
        pooling = self._checked(request)
        with self._changed:
            if len(self._waiting) >= self._config.max_queued_requests and self._jobs:
                raise EngineOverloadedError(
                    f"the worker has {len(self._waiting)} requests waiting, and takes no more than "
                    f"{self._config.max_queued_requests}"
                )
            job = self._jobs[key] = Job(key, request, pooling)
            self._waiting.add(job)
            self._changed.notify()

    def abort(self, key: int) -> None:
        with self._changed:
            if (job := self._jobs.pop(key, None)) is not None:
                job.aborted = True

    def load(self) -> EngineLoad:
        with self._changed:
            running = len(self._running)
            return EngineLoad(running=running, waiting=max(0, len(self._jobs) - running))

    def reset_prefix_cache(self) -> None:
        """Does nothing: nothing is cached."""

    def stop(self) -> None:
        with self._changed:
            self._stopping = True
            self._changed.notify()
        if self._thread is not None:
            self._thread.join()

    def _checked(self, request: GenerateRequest) -> Pooling:
        """Raises RequestError for what cannot be computed."""
        pooling, facts = request.pooling, self._encoder.facts
        assert pooling is not None, "unmet() refuses what generates"
        lengths = pooling.lengths
        if not lengths or min(lengths) < 1 or sum(lengths) != len(request.token_ids):
            raise RequestError("input: expected inputs of at least one token each")
        if (longest := max(lengths)) > self.max_tokens:
            raise RequestError(
                f"input: {longest} tokens are more than the {self.max_tokens} of this model"
            )
        if (largest := max(request.token_ids)) >= self._encoder.vocab_size:
            raise RequestError(
                f"input: token id {largest} is out of vocabulary: expected ids below "
                f"{self._encoder.vocab_size}"
            )
        if pooling.firsts and len(pooling.firsts) != len(lengths):
            raise RequestError("input: expected where each pair of texts is divided")
        wanted = pooling.dimensions
        if wanted is not None and wanted != facts.hidden_size and wanted not in facts.matryoshka:
            only = [*facts.matryoshka, facts.hidden_size]
            raise RequestError(
                f"dimensions: vectors of this model have {' or '.join(map(str, only))} numbers, "
                f"got {wanted}"
            )
        return pooling

    def _run(self, emit: Emit) -> None:
        """Compute until ``stop``. An error ends the process; its supervisor restarts it."""
        try:
            while (inputs := self._take()) is not None:
                for batch in batches_of(inputs, self._most_tokens):
                    if done := self._finish(batch, self._compute(batch)):
                        emit(done)
        except Exception:
            log.critical("the engine failed; the process ends, to be restarted", exc_info=True)
            os._exit(os.EX_SOFTWARE)

    def _take(self) -> list[Input] | None:
        with self._changed:
            self._running = set()
            while not self._stopping:
                if inputs := self._waiting.take(self._most_tokens):
                    self._running = {one.job for one in inputs}
                    return inputs
                self._changed.wait()
        return None

    def _finish(
        self, batch: Sequence[Input], rows: Sequence[bytes]
    ) -> list[tuple[int, TokenDelta]]:
        """Enter the results; the last deltas of the requests that are complete."""
        done = []
        with self._changed:
            for one, row in zip(batch, rows, strict=True):
                job = one.job
                job.rows[one.number] = row
                job.left -= 1
                if not job.left and self._jobs.pop(job.key, None) is not None:
                    vectors = b"".join(row for row in job.rows if row is not None)
                    done.append(
                        (job.key, TokenDelta(finish_reason=FinishReason.STOP, vectors=vectors))
                    )
        return done

    def _compute(self, batch: Sequence[Input]) -> list[bytes]:
        """The result of each input."""
        encoder, lengths = self._encoder, [len(one.token_ids) for one in batch]
        states = encoder([one.token_ids for one in batch], [one.first for one in batch])
        if encoder.head is not None:
            logits = encoder.head(pooled(states, lengths, "cls"))
            final = squashed(logits, encoder.facts.squash)
            return [
                _bytes((final if one.job.pooling.activation else logits)[row])
                for row, one in enumerate(batch)
            ]
        vectors = pooled(states, lengths, encoder.facts.pooling).float()
        unit = functional.normalize(vectors, dim=1)
        results, at = [], 0
        for row, (one, length) in enumerate(zip(batch, lengths, strict=True)):
            results.append(
                _bytes(self._result(one.job.pooling, vectors[row], unit[row], states, at, length))
            )
            at += length
        return results

    def _result(
        self, asked: Pooling, vector: Tensor, unit: Tensor, states: Tensor, at: int, length: int
    ) -> Tensor:
        if asked.operation == Operation.TOKEN_EMBED:
            tokens = states[at : at + length].float()[:, : asked.dimensions]
            return functional.normalize(tokens, dim=1) if asked.activation else tokens
        normalized = asked.activation and (self._encoder.facts.normalized or asked.dimensions)
        if asked.dimensions is None or asked.dimensions == len(vector):
            return unit if normalized else vector
        cut = vector[: asked.dimensions]
        return functional.normalize(cut, dim=0) if normalized else cut


def _bytes(values: Tensor) -> bytes:
    return values.float().contiguous().cpu().numpy().astype("<f4", copy=False).tobytes()
