"""TensorRT-LLM's executor loop as far as a KV connector sees it, in the documented order of calls.

Each rank has memory and tiers of its own. Before a token is computed, and when a request ends, each
byte of its KV must be right: what was computed, reused and loaded.
"""

from __future__ import annotations

import pickle
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

from tests.support.trtllm.kv_pages import Pages
from tests.support.trtllm.kv_pool import BLOCK_TOKENS, KvPool, chain
from tests.support.trtllm.kv_runtime import Connector

__all__ = ["MOST_ANSWER", "KvExecutor", "LlmRequest", "RequestData", "SchedulerOutput"]

MOST_ANSWER = 8
"""Tokens; the first cache manager gives all pages at once."""
_LOOK_S = 0.002
_LOOKS = 30_000
"""A minute, or longer on a busy machine."""


@dataclass
class RequestData:
    """TensorRT-LLM's description of a scheduled request for a connector."""

    request_id: int
    new_tokens: list[int]
    new_block_ids: list[int]
    computed_position: int
    num_scheduled_tokens: int
    block_hashes: list[int] = field(default_factory=list)
    priorities: list[int] | None = None
    cache_salt: str | None = None
    new_block_ids_by_layer_group: list[list[int]] = field(default_factory=list)


@dataclass
class SchedulerOutput:
    new_requests: list[RequestData] = field(default_factory=list)
    cached_requests: list[RequestData] = field(default_factory=list)
    attention_dp_rank: int | None = None


@dataclass(eq=False)
class LlmRequest:
    """TensorRT-LLM's request, and its state in the cache managers."""

    request_id: int
    tokens: list[int]
    cache_salt: str | None = None
    lora_task_id: int | None = None
    is_dummy_request: bool = False
    prompt_len: int = 0
    position: int = 0
    """How many tokens have KV."""
    pages: list[int] = field(default_factory=list)
    told: tuple[int, int] | None = None
    """How many tokens and pages the connector has been given."""
    offer: int | None = None
    """How many tokens the connector can load; None before it was asked."""
    matched: int = 0
    """How many of them were used."""

    def __post_init__(self) -> None:
        self.prompt_len = len(self.tokens)

    def get_tokens(self, beam: int) -> list[int]:
        assert beam == 0
        return list(self.tokens)


class KvExecutor:
    """``step`` computes a chunk of each admitted prompt, or adds a token to its answer."""

    def __init__(
        self,
        folder: Path,
        *tiers: Mapping[str, Any],
        ranks: int = 1,
        pages: int = 24,
        chunk: int = 100,
        grouped: bool = False,
        device: str = "cpu",
        **options: Any,
    ) -> None:
        """``grouped``: with the second KV cache manager, which gives pages chunk by chunk.

        ``options``: those of ``Connector``.
        """
        self.pools = [KvPool(pages, rank, device) for rank in range(ranks)]
        self.connector = Connector(folder, tiers, self.pools, grouped=grouped, **options)
        self.scheduler: Any = self.connector.scheduler
        self.workers: list[Any] = self.connector.workers
        self.pages = Pages(pages)
        self.waiting: list[LlmRequest] = []
        self.running: list[LlmRequest] = []
        self.stream: Any = None
        self._chunk = chunk
        self.arrived = 0
        self._grouped = grouped

    def arrive(self, tokens: list[int], **facts: Any) -> LlmRequest:
        self.arrived += 1
        request = LlmRequest(self.arrived, list(tokens), **facts)
        self.waiting.append(request)
        return request

    def ask(self, request: LlmRequest) -> None:
        """The scheduling pass: one question for each allocation."""
        assert request.offer is None
        digests = chain(request.tokens, request.cache_salt)
        self._reuse(request, self.pages.match(digests, 0))
        request.offer, later = self.scheduler.get_num_new_matched_tokens(request, request.position)
        assert not later
        assert request.offer % BLOCK_TOKENS == 0
        assert request.position + request.offer < len(request.tokens)

    def admit(self, request: LlmRequest) -> bool:
        """Give it pages. False when there are too few."""
        length = len(request.tokens)
        if not self._grouped and self.pages.room < _pages(length + MOST_ANSWER):
            return False
        if request.offer is None:
            self.ask(request)
        assert request.offer is not None
        if self._grouped:
            self._overtake(request)
            end = request.position + request.offer
            self._extend(request, min(length, end + self._chunk))
            self._shorten(request)
            if self._room(request) <= request.position + request.offer:
                return False
        else:
            self._extend(request, length + MOST_ANSWER)
        request.matched = request.offer
        request.position += request.offer
        form = "_by_layer_group" if self._grouped else ""
        pages = [request.pages] if self._grouped else request.pages
        getattr(self.scheduler, f"update_state_after_alloc{form}")(request, pages)
        self.waiting.remove(request)
        self.running.append(request)
        return True

    def step(self) -> None:
        """Admit what fits, and compute."""
        for request in list(self.waiting):
            if not self.admit(request):
                if not self.running:
                    self._make_room(request)
                break
        scheduled = self._schedule()
        if scheduled:
            self._hand_over(scheduled)
        for worker in self.workers:
            worker.start_load_kv(self.stream)
        for request, count in scheduled:
            self.check(request)
            self._compute(request, count)
        for worker in self.workers:
            worker.wait_for_save(self.stream)
            assert worker.get_finished([], []) == ([], [])
        for request, _ in scheduled:
            if request.position == len(request.tokens):
                request.tokens.append(7 * len(request.tokens) % 5)

    def check(self, request: LlmRequest) -> None:
        """Check every byte of the tokens that count as computed."""
        digests = chain(request.tokens[: request.position], request.cache_salt)
        for rank, pool in enumerate(self.pools):
            for position, digest in enumerate(digests):
                page, place = divmod(position, BLOCK_TOKENS)
                where = f"request {request.request_id}, token {position}, rank {rank}"
                assert pool.holds(request.pages[page], place, digest), f"wrong KV: {where}"

    def finish(self, request: LlmRequest) -> None:
        """The request is complete or cancelled, in any state."""
        if request in self.running:
            self.check(request)
        self._end(request)

    def preempt(self, request: LlmRequest) -> None:
        """The request loses its pages and runs again; to the connector it has finished."""
        self.finish(request)
        self.waiting.append(request)

    def reset(self, request: LlmRequest) -> None:
        """The request loses its pages and its claim, and runs again from its beginning."""
        self.scheduler.request_reset(request)
        self._release(request)
        self.waiting.append(request)

    def run(self, request: LlmRequest, answer: int = 1) -> LlmRequest:
        """Run one request to its end."""
        while len(request.tokens) < request.prompt_len + answer:
            self.step()
        self.finish(request)
        return request

    def settle(self) -> None:
        """Wait until all stores have ended, and all host memory is free."""
        self._hand_over([])  # carries out the remaining orders of the last request
        for worker in self.workers:
            worker.start_load_kv(self.stream)
            worker.wait_for_save(self.stream)
        for _ in range(_LOOKS):
            for worker in self.workers:
                worker.get_finished([], [])
            hosts = [worker._side._host for worker in self.workers]
            if all(host.free == host.count for host in hosts):
                return
            time.sleep(_LOOK_S)
        raise AssertionError("host memory is not given back")

    def close(self) -> None:
        self.connector.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _schedule(self) -> list[tuple[LlmRequest, int]]:
        """The running requests, and how many tokens of each are computed."""
        scheduled: list[tuple[LlmRequest, int]] = []
        for request in list(self.running):
            count = min(self._chunk, len(request.tokens) - request.position)
            self._extend(request, request.position + count)
            count = min(count, self._room(request) - request.position)
            if count:
                scheduled.append((request, count))
            else:
                self.preempt(request)
        return scheduled

    def _hand_over(self, scheduled: list[tuple[LlmRequest, int]]) -> None:
        output = SchedulerOutput()
        for request, count in scheduled:
            is_new = request.told is None
            tokens, pages = request.told or (0, 0)
            more = list(request.pages[pages:])
            data = RequestData(
                request.request_id,
                list(request.tokens[tokens:]),
                more,
                request.position - (request.matched if is_new else 0),
                count,
                cache_salt=request.cache_salt,
                new_block_ids_by_layer_group=[more] if self._grouped else [],
            )
            request.told = len(request.tokens), len(request.pages)
            (output.new_requests if is_new else output.cached_requests).append(data)
        metadata = pickle.dumps(self.scheduler.build_connector_meta(output))
        for worker in self.workers:
            worker.bind_connector_meta(pickle.loads(metadata))

    def _compute(self, request: LlmRequest, count: int) -> None:
        digests = chain(request.tokens, request.cache_salt)
        for position in range(request.position, request.position + count):
            page, place = divmod(position, BLOCK_TOKENS)
            for pool in self.pools:
                pool.write(request.pages[page], place, digests[position])
        request.position += count
        for block in range(request.position // BLOCK_TOKENS):
            self.pages.commit(digests[(block + 1) * BLOCK_TOKENS - 1], request.pages[block])

    def _reuse(self, request: LlmRequest, pages: list[int]) -> None:
        self.pages.use(pages)
        request.pages += pages
        request.position += BLOCK_TOKENS * len(pages)

    def _overtake(self, request: LlmRequest) -> None:
        """Other requests may have computed more of the same prompt since the question."""
        assert request.offer is not None
        start = request.position
        digests = chain(request.tokens, request.cache_salt)
        self._reuse(request, self.pages.match(digests, len(request.pages)))
        if request.position > start and request.offer:
            taken = min(request.offer, request.position - start)
            self.scheduler.cancel_load(request, start, start + taken)
            request.offer -= taken

    def _shorten(self, request: LlmRequest) -> None:
        """Cancel the part of the claim for which there are no pages."""
        assert request.offer is not None
        whole = (self._room(request) - 1 - request.position) // BLOCK_TOKENS
        used = min(request.offer, BLOCK_TOKENS * max(0, whole))
        if used < request.offer:
            start = request.position
            self.scheduler.cancel_load(request, start + used, start + request.offer)
            request.offer = used

    def _room(self, request: LlmRequest) -> int:
        return BLOCK_TOKENS * len(request.pages)

    def _extend(self, request: LlmRequest, tokens: int) -> None:
        more = self.pages.take(_pages(tokens) - len(request.pages))
        for page in more:
            for pool in self.pools:
                pool.scribble(page)
        request.pages += more

    def _make_room(self, request: LlmRequest) -> None:
        """When nothing runs, waiting requests must give up their pages."""
        for other in [other for other in self.waiting if other is not request and other.pages]:
            self.reset(other)

    def _end(self, request: LlmRequest) -> None:
        form = "_by_layer_group" if self._grouped else ""
        pages = [request.pages] if self._grouped else request.pages
        assert getattr(self.scheduler, f"request_finished{form}")(request, pages) is False
        self._release(request)

    def _release(self, request: LlmRequest) -> None:
        self.pages.release(request.pages)
        request.pages, request.position, request.matched = [], 0, 0
        request.told = request.offer = None
        for requests in (self.waiting, self.running):
            if request in requests:
                requests.remove(request)


def _pages(tokens: int) -> int:
    return -(-tokens // BLOCK_TOKENS)
