"""The parrot's process."""

from __future__ import annotations

import threading

from commutator import EngineInfo, EngineLoad, FinishReason, GenerateRequest, TokenDelta
from commutator.errors import RequestError
from commutator_engine_kit import Emit, EngineStart, TokenEngine, run_engine_process
from commutator_parrot import ParrotConfig

MAX_MODEL_LEN = 4096


class ParrotEngine(TokenEngine):
    """Says one token of each request's prompt a tick, over and over."""

    def __init__(self, config: ParrotConfig, start: EngineStart) -> None:
        self._tick_s = 1 / config.tokens_per_second
        self._model = start.model.name
        self._said: dict[int, int] = {}
        self._requests: dict[int, GenerateRequest] = {}
        self._stopping = threading.Event()
        self._lock = threading.Lock()

    def start(self, emit: Emit) -> EngineInfo:
        threading.Thread(target=self._speak, args=(emit,), daemon=True).start()
        return EngineInfo(
            kind="parrot",
            version="0.1.0",
            model=self._model,
            max_model_len=MAX_MODEL_LEN,
            block_size=16,
            kv_capacity_blocks=MAX_MODEL_LEN // 16,
        )

    def submit(self, key: int, request: GenerateRequest) -> None:
        if len(request.token_ids) >= MAX_MODEL_LEN:
            raise RequestError(f"prompt of {len(request.token_ids)} tokens is over {MAX_MODEL_LEN}")
        if request.sampling.top_logprobs is not None:
            raise RequestError("the parrot knows no probabilities", "logprobs")
        with self._lock:
            self._requests[key], self._said[key] = request, 0

    def abort(self, key: int) -> None:
        with self._lock:
            self._requests.pop(key, None)
            self._said.pop(key, None)

    def load(self) -> EngineLoad:
        return EngineLoad(running=len(self._requests), kv_capacity_blocks=MAX_MODEL_LEN // 16)

    def reset_prefix_cache(self) -> None:
        """The parrot caches nothing."""

    def stop(self) -> None:
        self._stopping.set()

    def _speak(self, emit: Emit) -> None:
        while not self._stopping.wait(self._tick_s):
            with self._lock:
                emit([(key, self._next(key)) for key in list(self._requests)])

    def _next(self, key: int) -> TokenDelta:
        request, said = self._requests[key], self._said[key]
        self._said[key] = said + 1
        last = said + 1 >= request.sampling.max_tokens
        if last:
            del self._requests[key], self._said[key]
        return TokenDelta(
            token_ids=(request.token_ids[said % len(request.token_ids)],),
            cached_tokens=0 if said == 0 else None,
            finish_reason=FinishReason.LENGTH if last else None,
        )


if __name__ == "__main__":
    run_engine_process(ParrotConfig, ParrotEngine)
