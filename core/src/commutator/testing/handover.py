"""The part of the engines' suite that is about prefill at one worker and decode at another."""

from __future__ import annotations

import asyncio
import uuid
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Sequence
from contextlib import AbstractAsyncContextManager, aclosing, asynccontextmanager, suppress
from typing import Any

import pytest
from attrs import evolve, field, frozen

from commutator.engine.contract import EngineClient
from commutator.engine.handover.style import HandoverLegs, HandoverStyle
from commutator.errors import CommutatorError, EngineError, EngineHandoverError
from commutator.types import GenerateRequest, SamplingParams, TokenDelta, WorkerRecord

__all__ = ["HandoverTests", "WorkerPair"]

_ANSWER = SamplingParams(max_tokens=12, temperature=0.0, ignore_eos=True)
_DELAYS_S = (0.0, 0.002, 0.01, 0.03, 0.1, 0.3)
"""When a leg is aborted, after it was begun."""
_PATIENCE_S = 60.0


@frozen(eq=False)
class WorkerPair:
    """Two fresh workers, and the way in which they hand KV over."""

    style: HandoverStyle
    prefill: EngineClient
    decode: EngineClient
    records: tuple[WorkerRecord, WorkerRecord]
    timeout_s: float = field(default=_PATIENCE_S)

    def legs(self, request: GenerateRequest) -> HandoverLegs:
        """One try of one request."""
        prefill, decode = self.records
        name = f"handover-{uuid.uuid4().hex}"
        return HandoverLegs(name, request, prefill, decode, timeout_s=self.timeout_s)

    async def run(self, request: GenerateRequest) -> list[TokenDelta]:
        """Both legs, as routing runs them; the decode leg's deltas."""
        legs = self.legs(request)
        if self.style.sequential:
            first = await _all_of(self.prefill, self.style.prefill_request(legs))
            return await _all_of(self.decode, self.style.decode_request(legs, first[-1].handover))
        prefilling = asyncio.create_task(_all_of(self.prefill, self.style.prefill_request(legs)))
        try:
            return await _all_of(self.decode, self.style.decode_request(legs, None))
        finally:
            prefilling.cancel()
            await asyncio.gather(prefilling, return_exceptions=True)


class HandoverTests(ABC):
    """Skipped for an engine whose ``EngineInfo.handover`` is None."""

    tokenized_prompt: Sequence[int]
    takes_cache_salts: bool = True
    """Whether requests may carry a ``cache_salt``, by which prompts find nothing of others'."""

    @abstractmethod
    def running(self) -> AbstractAsyncContextManager[EngineClient]:
        """A fresh engine server, and a client for it that is not yet started."""

    @abstractmethod
    async def _until_idle(self, client: EngineClient) -> None: ...

    def handover_style(self, lease_s: float) -> HandoverStyle:
        """What the engine's connector returns, with leases of so many seconds if it has leases."""
        del lease_s
        pytest.fail("EngineInfo.handover is set: override handover_style() to have it tested")

    async def spoil_kv(self, client: EngineClient) -> None:
        """Damage every KV block in that worker's memory, unseen by the worker itself."""
        del client
        pytest.skip("override spoil_kv() to have it tested that damaged blocks are refused")

    def worker_record(self, client: EngineClient, info: Any) -> WorkerRecord:
        """How routing knows the worker; override it when ``admin_address`` is None."""
        address = client.admin_address or ""
        return WorkerRecord(f"worker-{address}", "engine", info.kind, info.model, address, info)

    @asynccontextmanager
    async def _pair(
        self, lease_s: float = _PATIENCE_S, timeout_s: float = _PATIENCE_S
    ) -> AsyncIterator[WorkerPair]:
        async with self.running() as prefill, self.running() as decode:
            infos = [await client.start() for client in (prefill, decode)]
            try:
                if any(info.handover is None for info in infos):
                    pytest.skip("this engine hands no KV over")
                records = [
                    self.worker_record(client, info)
                    for client, info in zip((prefill, decode), infos, strict=True)
                ]
                style = self.handover_style(lease_s)
                here, there = (info.handover for info in infos)
                assert here is not None
                assert there is not None
                assert style.mismatch(here, there) is None, "two equal workers do not match"
                yield WorkerPair(style, prefill, decode, (records[0], records[1]), timeout_s)
            finally:
                await prefill.close()
                await decode.close()

    def _prompt(self, repeated: int = 5) -> list[int]:
        return list(self.tokenized_prompt) * repeated

    def _request(self, token_ids: Sequence[int]) -> GenerateRequest:
        return GenerateRequest(f"request-{uuid.uuid4().hex}", list(token_ids), _ANSWER)

    async def _both_idle(self, pair: WorkerPair) -> None:
        await self._until_idle(pair.prefill)
        await self._until_idle(pair.decode)

    async def _still_right(self, pair: WorkerPair, expected: list[int]) -> None:
        """A whole hand-over works, and the decode worker's own answer is the same."""
        await self._both_idle(pair)
        request = self._request(self._prompt())
        patient = evolve(pair, style=self.handover_style(_PATIENCE_S))
        assert _tokens(await patient.run(request)) == expected
        assert _tokens(await _all_of(pair.decode, request)) == expected
        await self._both_idle(pair)

    async def test_an_answer_prefilled_elsewhere_is_the_same(self) -> None:
        async with self._pair() as pair:
            for repeated in (1, 5):
                prompt = self._prompt(repeated)
                # Asked of the prefill worker under another salt, so that neither has it cached.
                salted = self._apart(self._request(prompt), "alone")
                expected = _tokens(await _all_of(pair.prefill, salted))
                deltas = await pair.run(self._request(prompt))
                assert _tokens(deltas) == expected
                await self._both_idle(pair)

    async def test_prefixes_on_either_side_change_nothing(self) -> None:
        async with self._pair() as pair:
            prompt = self._prompt()
            salted = self._apart(self._request(prompt), "alone")
            expected = _tokens(await _all_of(pair.prefill, salted))
            await _all_of(pair.prefill, self._request(prompt[: len(prompt) // 2]))
            await _all_of(pair.decode, self._request(prompt[: len(prompt) // 3]))
            assert _tokens(await pair.run(self._request(prompt))) == expected
            # Now both have all of it.
            assert _tokens(await pair.run(self._request(prompt))) == expected
            await self._both_idle(pair)

    async def test_many_at_once(self) -> None:
        async with self._pair() as pair:
            prompts = [self._prompt()[shift:] for shift in range(6)]
            salted = [self._apart(self._request(each), "alone") for each in prompts]
            expected = [_tokens(await _all_of(pair.prefill, each)) for each in salted]
            answers = await asyncio.gather(*(pair.run(self._request(each)) for each in prompts))
            assert [_tokens(deltas) for deltas in answers] == expected
            await self._both_idle(pair)

    async def test_a_prefill_leg_aborted_at_any_point_leaves_nothing(self) -> None:
        async with self._pair() as pair:
            if pair.style.sequential:
                pytest.skip("there is no decode leg while the prefill leg runs")
            expected = await self._alone(pair)
            for number, delay_s in enumerate(_DELAYS_S):
                legs = pair.legs(self._salted(f"try-{number}"))
                decoding = asyncio.create_task(
                    _all_of(pair.decode, pair.style.decode_request(legs, None))
                )
                await _abort_after(pair.prefill, pair.style.prefill_request(legs), delay_s)
                with suppress(EngineHandoverError):  # The abort may have come too late for that.
                    assert _tokens(await decoding) == expected
            await self._still_right(pair, expected)

    async def test_a_decode_leg_aborted_at_any_point_leaves_nothing(self) -> None:
        async with self._pair(lease_s=3.0) as pair:
            expected = await self._alone(pair)
            for number, delay_s in enumerate(_DELAYS_S):
                legs = pair.legs(self._salted(f"try-{number}"))
                prefilling = asyncio.create_task(
                    _all_of(pair.prefill, pair.style.prefill_request(legs))
                )
                handed = (await prefilling)[-1].handover if pair.style.sequential else None
                await _abort_after(pair.decode, pair.style.decode_request(legs, handed), delay_s)
                # Told in time that nobody wants it, the prefill worker may say so.
                results = await asyncio.gather(prefilling, return_exceptions=True)
                assert not isinstance(results[0], BaseException) or isinstance(
                    results[0], CommutatorError
                )
            await self._still_right(pair, expected)

    async def test_a_decode_leg_that_never_comes_holds_nothing_for_ever(self) -> None:
        async with self._pair(lease_s=1.0) as pair:
            expected = await self._alone(pair)
            legs = pair.legs(self._salted("late"))
            first = await _all_of(pair.prefill, pair.style.prefill_request(legs))
            await self._until_idle(pair.prefill)
            # It comes after all, and is told so.
            late = pair.style.decode_request(legs, first[-1].handover)
            with pytest.raises(EngineHandoverError):
                await _all_of(pair.decode, late)
            await self._still_right(pair, expected)

    async def test_a_hand_over_that_nobody_knows_fails_in_time(self) -> None:
        async with self._pair(timeout_s=1.0) as pair:
            if pair.style.sequential:
                pytest.skip("a decode leg needs what the prefill leg has handed")
            legs = pair.legs(self._salted("unknown"))
            async with asyncio.timeout(_PATIENCE_S):
                with pytest.raises(EngineHandoverError):
                    await _all_of(pair.decode, pair.style.decode_request(legs, None))
            await self._both_idle(pair)

    async def test_a_damaged_block_is_never_used(self) -> None:
        async with self._pair() as pair:
            expected = await self._alone(pair)
            legs = pair.legs(self._request(self._prompt()))
            first = await _all_of(pair.prefill, pair.style.prefill_request(legs))
            await self.spoil_kv(pair.prefill)
            with pytest.raises(EngineHandoverError):
                await _all_of(pair.decode, pair.style.decode_request(legs, first[-1].handover))
            await self._both_idle(pair)
            own = await _all_of(pair.decode, self._request(self._prompt()))
            assert _tokens(own) == expected

    async def _alone(self, pair: WorkerPair) -> list[int]:
        return _tokens(await _all_of(pair.prefill, self._salted("alone")))

    def _salted(self, salt: str) -> GenerateRequest:
        return self._apart(self._request(self._prompt()), salt)

    def _apart(self, request: GenerateRequest, salt: str) -> GenerateRequest:
        return evolve(request, cache_salt=salt) if self.takes_cache_salts else request


async def _all_of(client: EngineClient, request: GenerateRequest) -> list[TokenDelta]:
    async with aclosing(client.generate(request)) as stream:
        return [delta async for delta in stream]


async def _abort_after(client: EngineClient, request: GenerateRequest, delay_s: float) -> None:
    """Begin it and close its stream a little later; what it says until then is not looked at."""
    stream = client.generate(request)
    try:
        async with asyncio.timeout(delay_s):
            async for _ in stream:
                pass
    except (TimeoutError, EngineError):
        pass
    finally:
        await stream.aclose()


def _tokens(deltas: Sequence[TokenDelta]) -> list[int]:
    return [token for delta in deltas for token in delta.token_ids]
