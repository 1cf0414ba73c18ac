"""Answers an operator's questions about the storage tiers of one engine: see ``commutator kv``.

statistics {}                                   everything that is counted
contents   {}                                   what lies where, in blocks and bytes
why        {token_ids, cache_salt?, lora_name?} which blocks of a prompt would be reused
prefetch   {token_ids, cache_salt?, lora_name?} brings a prompt's blocks up from slow tiers
evict      {tier?}                              removes the blocks of one tier, or of all
verify     {tier?}                              reads every block again; bad ones are removed
peers      {addresses}                          where other workers lend blocks now
"""

from __future__ import annotations

import threading
import time
import uuid
from collections.abc import Callable, Generator, Mapping, Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as TooLateError
from typing import Any

import attrs
import msgspec
from attrs import frozen

from commutator.errors import CommutatorError, EngineError
from commutator.kv.keys import BlockKey
from commutator.kv.load_result import LoadResult
from commutator.kv.service import KvService
from commutator.kv.tier import UNBOUNDED
from commutator.kv.tier_thread import JobUrgency
from commutator.kv.tier_worker import TierWorker
from commutator.kv.verify import Verification

__all__ = ["DeviceBlocks", "KvAdmin", "LocatedPrompt", "PromptQuestion"]

_COUNT_TIMEOUT_S = 3.0
_ASK_TIMEOUT_S = 2.0
_POLL_S = 0.01
VERIFY_REASON = "found corrupt by verify"


@frozen
class PromptQuestion:
    """A prompt whose blocks are looked for."""

    token_ids: tuple[int, ...]
    cache_salt: str | None = None
    lora_name: str | None = None


@frozen
class LocatedPrompt:
    """What the engine knows of it."""

    keys: Sequence[BlockKey]
    """Of every block that could be reused."""
    on_device: int
    """So many of the first are in the engine's own memory."""
    block_size: int


@frozen
class DeviceBlocks:
    """The engine's own KV memory."""

    medium: str
    """As in KV events."""
    held: int
    """Blocks that running requests use."""
    cached: int
    """Blocks that nobody uses, and that can be reused."""
    capacity: int
    block_bytes: int


@frozen
class _OneTier:
    tier: str | None = None


@frozen
class _Peers:
    addresses: tuple[str, ...]


class KvAdmin:
    """Methods may be called from any thread but the engine's own and the tiers'.

    ``locate`` is the engine's part of ``why``, ``device`` that of ``contents``: the level above all
    tiers, for engines that can tell of it.
    """

    def __init__(
        self,
        service: KvService,
        locate: Callable[[PromptQuestion], LocatedPrompt],
        device: Callable[[], DeviceBlocks] | None = None,
    ) -> None:
        self._service = service
        self._locate = locate
        self._device = device
        self._verifying = threading.Lock()

    def answer(self, what: str, arguments: Mapping[str, Any]) -> Any:
        """Plain values. Raises EngineError for a question that makes no sense."""
        try:
            match what:
                case "statistics":
                    return msgspec.to_builtins(self._service.statistics())
                case "contents":
                    return self._contents()
                case "why":
                    return self._why(msgspec.convert(arguments, PromptQuestion))
                case "prefetch":
                    return self._prefetch(msgspec.convert(arguments, PromptQuestion))
                case "evict":
                    return self._evict(msgspec.convert(arguments, _OneTier).tier)
                case "peers":
                    addresses = msgspec.convert(arguments, _Peers).addresses
                    return self._service.use_peers(addresses)
                case "verify":
                    return self._verify(msgspec.convert(arguments, _OneTier).tier)
        except msgspec.ValidationError as error:
            raise EngineError(f"the arguments of {what!r} are wrong: {error}") from error
        raise EngineError(f"unknown question {what!r} about KV blocks")

    def _contents(self) -> list[dict[str, Any]]:
        sizes = [self._ask(number, _stored_bytes) for number in range(len(self._service.tiers))]
        return self._on_device() + [
            {
                "tier": state.name,
                "medium": state.medium,
                "up": state.up,
                "blocks": state.published,
                "pinned": state.retained,
                "bytes": size,
                "capacity_blocks": None if state.capacity >= UNBOUNDED else state.capacity,
            }
            for state, size in zip(self._service.statistics().tiers, sizes, strict=True)
        ]

    def _on_device(self) -> list[dict[str, Any]]:
        if self._device is None:
            return []
        device = self._device()
        blocks = device.held + device.cached
        return [
            {
                "tier": "device",
                "medium": device.medium,
                "up": True,
                "blocks": blocks,
                "pinned": device.held,
                "bytes": blocks * device.block_bytes,
                "capacity_blocks": device.capacity,
            }
        ]

    def _why(self, question: PromptQuestion) -> dict[str, Any]:
        prompt = self._locate(question)
        self._until(
            lambda ask_id: not self._service.must_ask(ask_id, prompt.keys, prompt.on_device)
        )
        names = [setup.name for setup in self._service.tiers]
        return {
            "prompt_tokens": len(question.token_ids),
            "block_size": prompt.block_size,
            "blocks": [
                attrs.asdict(block)
                | {
                    "key": block.key.hex(),
                    "tier": None if block.tier is None else names[block.tier],
                }
                for block in self._service.why(prompt.keys, prompt.on_device)
            ],
        }

    def _prefetch(self, question: PromptQuestion) -> None:
        prompt = self._locate(question)
        if prompt.on_device < len(prompt.keys):
            self._until(
                lambda ask_id: self._service.prefetch(ask_id, prompt.keys, prompt.on_device)
            )

    def _until(self, is_done: Callable[[str], bool]) -> None:
        """Ask again, under the same id, while shared tiers are being asked; not for ever."""
        ask_id = f"admin-{uuid.uuid4().hex}"
        deadline_s = time.monotonic() + _ASK_TIMEOUT_S
        try:
            while not is_done(ask_id) and time.monotonic() <= deadline_s:
                time.sleep(_POLL_S)
        finally:
            self._service.drop(ask_id)

    def _evict(self, tier: str | None) -> dict[str, int]:
        self._numbers(tier)
        before = self._service.statistics()
        self._service.evict(tier=tier)
        after = self._service.statistics()
        return {
            old.name: old.published - new.published
            for old, new in zip(before.tiers, after.tiers, strict=True)
            if tier in (None, old.name)
        }

    def _verify(self, tier: str | None) -> list[dict[str, Any]]:
        numbers = self._numbers(tier)
        if not self._verifying.acquire(blocking=False):
            raise EngineError("the blocks are being verified already; wait for that to end")
        try:
            checks = {
                number: Verification(self._service.tiers[number].load_timeout_s)
                for number in numbers
            }
            for number, check in checks.items():
                self._service.on_tier(number, JobUrgency.VERIFY, check.run)
            return [self._verified(number, check) for number, check in checks.items()]
        finally:
            self._verifying.release()

    def _verified(self, number: int, check: Verification) -> dict[str, Any]:
        check.over.wait()
        name = self._service.tiers[number].name
        if check.corrupt:
            self._service.evict(check.corrupt, tier=name, reason=VERIFY_REASON)
        return {
            "tier": name,
            "blocks": check.blocks,
            "intact": check.results[LoadResult.LOADED],
            "corrupt": check.results[LoadResult.CORRUPT],
            "gone": check.results[LoadResult.MISSING],
            "unreadable": check.results[LoadResult.FAILED],
            "bytes": check.size_bytes,
            "seconds": check.seconds,
            "problem": check.problem,
        }

    def _numbers(self, tier: str | None) -> list[int]:
        names = [setup.name for setup in self._service.tiers]
        if tier is None:
            return list(range(len(names)))
        if tier not in names:
            raise EngineError(f"there is no tier {tier!r} here; there is: {', '.join(names)}")
        return [names.index(tier)]

    def _ask(self, tier: int, ask: Callable[[TierWorker], int]) -> int | None:
        """The answer from the tier's thread; None when it is down or busy."""
        answer: Future[int | None] = Future()

        def run(worker: TierWorker | None) -> Generator[None, None, None]:
            try:
                answer.set_result(None if worker is None else ask(worker))
            except CommutatorError:
                answer.set_result(None)
            yield from ()

        self._service.on_tier(tier, JobUrgency.OFFLOAD, run)
        try:
            return answer.result(_COUNT_TIMEOUT_S)
        except TooLateError:
            return None


def _stored_bytes(worker: TierWorker) -> int:
    return sum(stored.size_bytes for stored in worker.setup.tier.committed())
