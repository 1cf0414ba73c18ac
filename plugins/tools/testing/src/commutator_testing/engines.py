"""The conformance suite for engines: subclass it, start your engine, run pytest.

::

    class TestMyEngine(EngineContract):
        @asynccontextmanager
        async def running(self):
            async with my_engine_server() as address:
                yield MyConnector().connect(MyConfig(kind="mine"), address)

        def another_client(self, client):
            return MyConnector().connect(MyConfig(kind="mine"), client.address)
"""

from __future__ import annotations

import asyncio
import uuid
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Sequence
from contextlib import AbstractAsyncContextManager, aclosing, asynccontextmanager, suppress
from typing import Any

import pytest
import pytest_asyncio
import zmq.asyncio
from attrs import evolve, field, frozen

from commutator import (
    AdapterIdentity,
    Constraint,
    EngineClient,
    FinishReason,
    GenerateRequest,
    HandoverRequest,
    HandoverStyle,
    MediaIdentity,
    SamplingParams,
    TokenDelta,
    WorkerRecord,
)
from commutator.contract.block import BlockStored
from commutator.errors import CommutatorError, EngineError, EngineHandoverError, RequestError
from commutator.kv_events.codec import decode_batch

_UNKNOWN_ADAPTER = AdapterIdentity(name="of nobody", digest="0" * 64)
_UNKNOWN_MEDIA = MediaIdentity(kind="smell", digest="0" * 64, start=0, tokens=1)
GREEDY = SamplingParams(max_tokens=12, temperature=0.0, ignore_eos=True)


def make_request(
    name: str, token_ids: Sequence[int], sampling: SamplingParams = GREEDY
) -> GenerateRequest:
    """A request for tests; by default greedy, with an answer of 12 tokens."""
    return GenerateRequest(request_id=name, token_ids=list(token_ids), sampling=sampling)


async def collect(client: EngineClient, request: GenerateRequest) -> list[TokenDelta]:
    """Every delta of one request."""
    async with aclosing(client.generate(request)) as stream:
        return [delta async for delta in stream]


def tokens(deltas: Sequence[TokenDelta]) -> list[int]:
    """The token ids of a request's deltas, in order."""
    return [token for delta in deltas for token in delta.token_ids]


def cached_tokens(deltas: Sequence[TokenDelta]) -> int | None:
    """Prompt tokens found in the KV cache; some engines report them only at the end."""
    return next((d.cached_tokens for d in deltas if d.cached_tokens is not None), None)


_DELAYS_S = (0.0, 0.002, 0.01, 0.03, 0.1, 0.3)
"""Delays between the start of a prefill or decode and its abort."""
_LATE_S = (0.0, 0.5, 2.0, 8.0)
"""How long after its lease lapsed a decode request comes."""
_PATIENCE_S = 60.0


@frozen(eq=False)
class WorkerPair:
    """Two fresh workers, and how they hand KV over."""

    style: HandoverStyle
    prefill: EngineClient
    decode: EngineClient
    records: tuple[WorkerRecord, WorkerRecord]
    timeout_s: float = field(default=_PATIENCE_S)

    def handover(self, request: GenerateRequest) -> HandoverRequest:
        """One try of one request."""
        prefill, decode = self.records
        name = f"handover-{uuid.uuid4().hex}"
        return HandoverRequest(
            handover_id=name,
            request=request,
            prefill=prefill,
            decode=decode,
            timeout_s=self.timeout_s,
        )

    async def run(self, request: GenerateRequest) -> list[TokenDelta]:
        """Run prefill and decode as routing does; returns the deltas of the decode."""
        handover = self.handover(request)
        if self.style.sequential:
            first = await collect(self.prefill, self.style.prefill_request(handover))
            return await collect(
                self.decode, self.style.decode_request(handover, first[-1].handover)
            )
        prefilling = asyncio.create_task(
            collect(self.prefill, self.style.prefill_request(handover))
        )
        try:
            return await collect(self.decode, self.style.decode_request(handover, None))
        finally:
            prefilling.cancel()
            await asyncio.gather(prefilling, return_exceptions=True)


@pytest.mark.asyncio
class EngineContract(ABC):
    """What every engine must do, seen through its client.

    Hand-overs are tested for an engine whose ``EngineInfo.handover`` is set.
    """

    documented_in = (
        "EngineClient in docs/reference/contract/engine.md and docs/how-to/write-an-engine.md"
    )

    tokenized_prompt: Sequence[int] = tuple(range(100, 148))
    """A prompt of several KV blocks that the engine's model accepts."""
    takes_cache_salts = True
    """Whether requests may carry a ``cache_salt``, which separates their KV."""

    @abstractmethod
    def running(self) -> AbstractAsyncContextManager[EngineClient]:
        """A fresh engine server, and a client for it that is not started yet."""

    @abstractmethod
    def another_client(self, client: EngineClient) -> EngineClient:
        """A second client, not yet started, for the server that ``client`` talks to."""

    capabilities: frozenset[str] = frozenset(
        {"sampling", "stop_tokens", "logprobs", "prefix_cache", "exact_continuation"}
    )
    """Optional features of the engine. Tests of features not listed are skipped.

    ``exact_continuation``: an answer that another worker began continues with its penalties and
    seed.
    """

    def _needs(self, capability: str) -> None:
        if capability not in self.capabilities:
            pytest.skip(f"this engine does not list the capability {capability}")

    def golden(self) -> Sequence[tuple[Sequence[int], Sequence[int]]]:
        """Prompts and their greedy continuations from an independent implementation, if any."""
        return ()

    def handover_style(self, lease_s: float) -> HandoverStyle:
        """What the engine's connector returns, with leases of ``lease_s`` if it has leases."""
        del lease_s
        pytest.fail("EngineInfo.handover is set: override handover_style() to test it")

    async def spoil_kv(self, client: EngineClient) -> None:
        """Damage every KV block in that worker's memory without its knowledge."""
        del client
        pytest.skip("override spoil_kv() to test that damaged blocks are refused")

    def worker_record(self, client: EngineClient, info: Any) -> WorkerRecord:
        """The worker's record in the registry; override it when ``admin_address`` is None."""
        address = client.admin_address or ""
        return WorkerRecord(
            worker_id=f"worker-{address}",
            engine="engine",
            kind=info.kind,
            model=info.model,
            address=address,
            info=info,
        )

    @pytest_asyncio.fixture
    async def client(self) -> AsyncIterator[EngineClient]:
        async with self.running() as client:
            await client.start()
            yield client
            await client.close()

    async def _until_idle(self, client: EngineClient) -> None:
        async with asyncio.timeout(30):
            while True:
                load = await client.load()
                if not load.running and not load.waiting and not load.kv_used_blocks:
                    return
                await asyncio.sleep(0.02)

    async def test_says_what_it_is(self, client: EngineClient) -> None:
        info = await client.start()
        assert info.kind
        assert info.version
        assert info.max_model_len > 0
        assert info.block_size > 0
        assert info.kv_capacity_blocks > 0

    async def test_generates_as_many_tokens_as_asked(self, client: EngineClient) -> None:
        deltas = await collect(client, make_request("a", self.tokenized_prompt))
        assert len(tokens(deltas)) == GREEDY.max_tokens
        assert [d.finish_reason for d in deltas[:-1]] == [None] * (len(deltas) - 1)
        assert deltas[-1].finish_reason is FinishReason.LENGTH
        assert cached_tokens(deltas) is not None
        await self._until_idle(client)

    async def test_greedy_is_repeatable_alone_and_in_company(self, client: EngineClient) -> None:
        prompts = [list(self.tokenized_prompt[i:]) for i in range(6)]
        alone = [tokens(await collect(client, make_request("a", prompt))) for prompt in prompts]
        together = await asyncio.gather(
            *(collect(client, make_request(f"t{i}", prompt)) for i, prompt in enumerate(prompts))
        )
        assert [tokens(deltas) for deltas in together] == alone

    async def test_equals_an_independent_implementation(self, client: EngineClient) -> None:
        for prompt, expected in self.golden():
            sampling = evolve(GREEDY, max_tokens=len(expected))
            deltas = await collect(client, make_request("g", prompt, sampling))
            assert tokens(deltas) == list(expected)

    async def test_a_seed_repeats_and_another_differs(self, client: EngineClient) -> None:
        self._needs("sampling")

        async def sample(seed: int) -> list[int]:
            sampling = evolve(GREEDY, temperature=1.5, seed=seed, max_tokens=20)
            return tokens(await collect(client, make_request("s", self.tokenized_prompt, sampling)))

        assert await sample(1) == await sample(1)
        assert len({tuple(await sample(seed)) for seed in range(4)}) > 1

    async def _continued(
        self, client: EngineClient, request: GenerateRequest, done: Sequence[int]
    ) -> list[TokenDelta]:
        """The rest of an answer whose tokens ``done`` another worker generated."""
        if not (await client.start()).continues_answers:
            pytest.skip("this engine does not continue answers that another worker began")
        token_ids = [*request.token_ids, *done]
        return await collect(
            client, evolve(request, token_ids=token_ids, generated_prefix=len(done))
        )

    async def test_an_answer_that_another_began_goes_on(self, client: EngineClient) -> None:
        request = make_request("a", self.tokenized_prompt)
        whole = tokens(await collect(client, request))
        for count in (1, 5, len(whole) - 1):
            rest = await self._continued(client, request, whole[:count])
            assert tokens(rest) == whole[count:]
            assert rest[-1].finish_reason is FinishReason.LENGTH
            assert cached_tokens(rest) is not None
        await self._until_idle(client)

    async def test_a_seeded_answer_goes_on_as_it_would_have(self, client: EngineClient) -> None:
        self._needs("sampling")
        self._needs("exact_continuation")
        sampling = evolve(
            GREEDY,
            max_tokens=24,
            min_tokens=24,
            temperature=1.5,
            seed=7,
            presence_penalty=0.7,
            frequency_penalty=0.3,
            repetition_penalty=1.2,
        )
        request = make_request("s", self.tokenized_prompt, sampling)
        whole = tokens(await collect(client, request))
        for count in (1, 10, 23):
            assert tokens(await self._continued(client, request, whole[:count])) == whole[count:]

    async def test_a_continued_answer_stops_where_it_would_have(self, client: EngineClient) -> None:
        self._needs("stop_tokens")
        greedy = tokens(await collect(client, make_request("a", self.tokenized_prompt)))
        sampling = evolve(GREEDY, stop_token_ids=(greedy[4],), max_tokens=8)
        whole = await collect(client, make_request("b", self.tokenized_prompt, sampling))
        count = max(1, len(tokens(whole)) // 2)
        request = make_request("c", self.tokenized_prompt, sampling)
        if count < len(tokens(whole)):
            rest = await self._continued(client, request, tokens(whole)[:count])
            assert tokens(rest) == tokens(whole)[count:]
            assert rest[-1].finish_reason is whole[-1].finish_reason
            assert rest[-1].stop_reason == whole[-1].stop_reason

    async def test_logprobs_of_a_continued_answer_are_its_own(self, client: EngineClient) -> None:
        self._needs("logprobs")
        request = make_request("a", self.tokenized_prompt, evolve(GREEDY, top_logprobs=2))
        whole = [entry for d in await collect(client, request) for entry in d.logprobs]
        done = [entry.token_id for entry in whole[:4]]
        rest = [e for d in await self._continued(client, request, done) for e in d.logprobs]
        assert [entry.token_id for entry in rest] == [entry.token_id for entry in whole[4:]]
        for entry, expected in zip(rest, whole[4:], strict=True):
            assert entry.logprob == pytest.approx(expected.logprob, abs=1e-3)

    async def test_a_stop_token_ends_the_answer(self, client: EngineClient) -> None:
        self._needs("stop_tokens")
        greedy = tokens(await collect(client, make_request("a", self.tokenized_prompt)))
        sampling = evolve(GREEDY, stop_token_ids=(greedy[3],))
        deltas = await collect(client, make_request("b", self.tokenized_prompt, sampling))
        first = greedy.index(greedy[3])
        assert tokens(deltas) == greedy[: first + 1]
        assert deltas[-1].finish_reason is FinishReason.STOP
        assert deltas[-1].stop_reason == greedy[3]

    async def test_logprobs_come_one_a_token(self, client: EngineClient) -> None:
        self._needs("logprobs")
        sampling = evolve(GREEDY, top_logprobs=3)
        deltas = await collect(client, make_request("a", self.tokenized_prompt, sampling))
        logprobs = [entry for delta in deltas for entry in delta.logprobs]
        assert [entry.token_id for entry in logprobs] == tokens(deltas)
        for entry in logprobs:
            assert entry.logprob <= 0
            assert len(entry.top) == 3
            # Greedy takes the likeliest token, so it leads its own alternatives.
            assert entry.logprob == pytest.approx(entry.top[0][1], abs=1e-4)
            assert [p for _, p in entry.top] == sorted((p for _, p in entry.top), reverse=True)

    async def test_logprobs_are_never_silently_left_out(self, client: EngineClient) -> None:
        """An engine that computes none raises RequestError for a request that wants them."""
        request = make_request("a", self.tokenized_prompt, evolve(GREEDY, top_logprobs=1))
        try:
            deltas = await collect(client, request)
        except RequestError:
            assert "logprobs" not in self.capabilities
        else:
            assert [e.token_id for delta in deltas for e in delta.logprobs] == tokens(deltas)

    async def test_logprobs_of_prompts_are_of_every_token(self, client: EngineClient) -> None:
        """They come with the first token, though the prompt is in the cache; or are refused."""
        request = evolve(make_request("a", self.tokenized_prompt), prompt_logprobs=2)
        if not (await client.start()).prompt_logprobs:
            with pytest.raises(RequestError, match="prompts"):
                await collect(client, request)
            return
        plain = await collect(client, evolve(request, prompt_logprobs=None))
        for _ in range(2):
            deltas = await collect(client, request)
            assert tokens(deltas) == tokens(plain)
            first, *rest = [delta for delta in deltas if delta.token_ids]
            entries = first.prompt_logprobs
            assert [entry.token_id for entry in entries] == [*self.tokenized_prompt[1:]]
            assert not any(delta.prompt_logprobs for delta in rest)
            for entry in entries:
                assert entry.logprob <= 0
                assert [p for _, p in entry.top] == sorted((p for _, p in entry.top), reverse=True)
                assert len(entry.top) == 2
                known = dict(entry.top).get(entry.token_id, entry.logprob)
                assert entry.logprob == pytest.approx(known, abs=1e-4)

    async def test_what_it_does_not_declare_is_refused_by_name(self, client: EngineClient) -> None:
        """Nothing that a request asks is silently left out."""
        info = await client.start()
        plain = make_request("a", self.tokenized_prompt)
        asked = {
            "response_format": evolve(plain, constraint=Constraint(kind="regex", value="a+")),
            "messages": evolve(plain, media=(_UNKNOWN_MEDIA,)),
            "model": evolve(plain, adapter=_UNKNOWN_ADAPTER),
            "option_of_tomorrow": evolve(plain, options={"option_of_tomorrow": 1}),
        }
        for param, request in asked.items():
            if (unmet := info.unmet(request)) is not None:
                assert unmet.param == param
                with pytest.raises(RequestError):
                    await collect(client, request)
        await self._until_idle(client)

    async def test_a_repeated_prompt_is_found_in_the_cache(self, client: EngineClient) -> None:
        self._needs("prefix_cache")
        info = await client.start()
        request = make_request("a", self.tokenized_prompt)
        assert cached_tokens(await collect(client, request)) == 0
        again = cached_tokens(await collect(client, request))
        full_blocks = (len(self.tokenized_prompt) - 1) // info.block_size
        assert again == full_blocks * info.block_size

    async def test_a_salt_separates_the_cache(self, client: EngineClient) -> None:
        request = make_request("a", self.tokenized_prompt)
        if not self.takes_cache_salts:
            with pytest.raises(RequestError):  # otherwise every tenant would share the prompt
                await collect(client, evolve(request, cache_salt="tenant-1"))
            return
        await collect(client, request)
        salted = await collect(client, evolve(request, cache_salt="tenant-1"))
        assert cached_tokens(salted) == 0
        assert tokens(salted) == tokens(await collect(client, request))

    async def test_closing_a_stream_frees_what_it_held(self, client: EngineClient) -> None:
        sampling = evolve(GREEDY, max_tokens=500)
        for i in range(5):
            stream = client.generate(make_request(f"a{i}", self.tokenized_prompt, sampling))
            await anext(stream)
            await stream.aclose()
        await self._until_idle(client)

    async def test_a_client_that_leaves_frees_what_it_held(self) -> None:
        async with self.running() as client:
            leaving = self.another_client(client)
            await client.start()
            await leaving.start()
            sampling = evolve(GREEDY, max_tokens=500)
            streams = [
                leaving.generate(make_request(f"a{i}", self.tokenized_prompt, sampling))
                for i in range(3)
            ]
            await anext(streams[0])
            await leaving.close()
            await self._until_idle(client)
            await client.close()

    async def test_a_prompt_that_is_too_long_is_refused(self, client: EngineClient) -> None:
        info = await client.start()
        too_long = list(self.tokenized_prompt[:1]) * (info.max_model_len + 1)
        with pytest.raises(RequestError):
            await collect(client, make_request("a", too_long))
        await collect(client, make_request("b", self.tokenized_prompt))

    async def test_kv_events_tell_what_is_cached(self, client: EngineClient) -> None:
        info = await client.start()
        if info.kv_events is None:
            pytest.skip("this engine publishes no KV events")
        context = zmq.asyncio.Context()
        subscriber = context.socket(zmq.SUB)
        subscriber.connect(info.kv_events.endpoint)
        subscriber.subscribe(info.kv_events.topic)
        stored: list[int] = []
        known = set[int | bytes]()
        try:
            prompt = list(self.tokenized_prompt)
            for turn in range(1, 100):  # a subscription takes a moment to arrive
                other = prompt[turn % len(prompt) :] + prompt[: turn % len(prompt)]
                await collect(client, make_request(f"warm-up-{turn}", other))
                if await subscriber.poll(100):
                    break
            while await subscriber.poll(300):
                await subscriber.recv_multipart()
            salt = "tenant-1" if self.takes_cache_salts else None
            request = evolve(make_request("a", prompt), cache_salt=salt)
            await collect(client, request)
            expected = prompt[: len(prompt) // info.block_size * info.block_size]
            async with asyncio.timeout(30):
                while stored[: len(expected)] != expected:
                    _, _, body = await subscriber.recv_multipart()
                    for event in decode_batch(body).events:
                        if isinstance(event, BlockStored):
                            assert event.block_size == info.block_size
                            if event.parent_block_hash is None:
                                assert event.cache_salt == salt
                            assert len(event.token_ids) == len(event.block_hashes) * info.block_size
                            if known.isdisjoint(event.block_hashes):  # no copy in a tier
                                stored += event.token_ids
                            known.update(event.block_hashes)
        finally:
            context.destroy(linger=0)

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
        return make_request(f"request-{uuid.uuid4().hex}", token_ids)

    async def _both_idle(self, pair: WorkerPair) -> None:
        await self._until_idle(pair.prefill)
        await self._until_idle(pair.decode)

    async def _still_right(self, pair: WorkerPair, expected: list[int]) -> None:
        """A complete hand-over works, and the decode worker alone gives the same answer."""
        await self._both_idle(pair)
        request = self._request(self._prompt())
        patient = evolve(pair, style=self.handover_style(_PATIENCE_S))
        assert tokens(await patient.run(request)) == expected
        assert tokens(await collect(pair.decode, request)) == expected
        await self._both_idle(pair)

    async def test_an_answer_prefilled_elsewhere_is_the_same(self) -> None:
        async with self._pair() as pair:
            for repeated in (1, 5):
                prompt = self._prompt(repeated)
                expected = await self._alone(pair, prompt)
                assert tokens(await pair.run(self._request(prompt))) == expected
                await self._both_idle(pair)

    async def test_prefixes_on_either_side_change_nothing(self) -> None:
        async with self._pair() as pair:
            prompt = self._prompt()
            expected = await self._alone(pair, prompt)
            await collect(pair.prefill, self._request(prompt[: len(prompt) // 2]))
            await collect(pair.decode, self._request(prompt[: len(prompt) // 3]))
            assert tokens(await pair.run(self._request(prompt))) == expected
            # Now both have all of it.
            assert tokens(await pair.run(self._request(prompt))) == expected
            await self._both_idle(pair)

    async def test_many_at_once(self) -> None:
        async with self._pair() as pair:
            prompts = [self._prompt()[shift:] for shift in range(6)]
            expected = [await self._alone(pair, each) for each in prompts]
            answers = await asyncio.gather(*(pair.run(self._request(each)) for each in prompts))
            assert [tokens(deltas) for deltas in answers] == expected
            await self._both_idle(pair)

    async def test_a_prefill_leg_aborted_at_any_point_leaves_nothing(self) -> None:
        async with self._pair() as pair:
            if pair.style.sequential:
                pytest.skip("the decode does not run while the prefill runs")
            expected = await self._alone(pair)
            for number, delay_s in enumerate(_DELAYS_S):
                handover = pair.handover(self._salted(f"try-{number}"))
                decoding = asyncio.create_task(
                    collect(pair.decode, pair.style.decode_request(handover, None))
                )
                await _abort_after(pair.prefill, pair.style.prefill_request(handover), delay_s)
                with suppress(EngineHandoverError):  # The abort may have come too late.
                    assert tokens(await decoding) == expected
            await self._still_right(pair, expected)

    async def test_a_decode_leg_aborted_at_any_point_leaves_nothing(self) -> None:
        async with self._pair(lease_s=3.0) as pair:
            expected = await self._alone(pair)
            for number, delay_s in enumerate(_DELAYS_S):
                handover = pair.handover(self._salted(f"try-{number}"))
                prefilling = asyncio.create_task(
                    collect(pair.prefill, pair.style.prefill_request(handover))
                )
                handed = (await prefilling)[-1].handover if pair.style.sequential else None
                await _abort_after(
                    pair.decode, pair.style.decode_request(handover, handed), delay_s
                )
                # A prefill worker that learns of the abort in time may refuse.
                results = await asyncio.gather(prefilling, return_exceptions=True)
                assert not isinstance(results[0], BaseException) or isinstance(
                    results[0], CommutatorError
                )
            await self._still_right(pair, expected)

    async def test_a_decode_request_that_never_comes_holds_nothing_for_ever(self) -> None:
        lease_s = 1.0
        async with self._pair(lease_s=lease_s) as pair:
            for shift, late_s in enumerate(_LATE_S):
                request = self._request(self._prompt()[shift:])
                expected = await self._alone(pair, request.token_ids)
                handover = pair.handover(request)
                first = await collect(pair.prefill, pair.style.prefill_request(handover))
                # A worker looks for lapsed leases now and then, and until it does, a reader may
                # renew one; its load cannot tell when, since a server's figures may be old.
                await asyncio.sleep(lease_s + late_s)
                late = pair.style.decode_request(handover, first[-1].handover)
                try:
                    assert tokens(await collect(pair.decode, late)) == expected
                except EngineHandoverError:
                    break
            else:
                pytest.fail(f"{_LATE_S[-1]} s after its lease lapsed, the KV was still lent")
            await self._still_right(pair, await self._alone(pair))

    async def test_a_hand_over_that_nobody_knows_fails_in_time(self) -> None:
        async with self._pair(timeout_s=1.0) as pair:
            if pair.style.sequential:
                pytest.skip("the decode needs the result of the prefill")
            handover = pair.handover(self._salted("unknown"))
            async with asyncio.timeout(_PATIENCE_S):
                with pytest.raises(EngineHandoverError):
                    await collect(pair.decode, pair.style.decode_request(handover, None))
            await self._both_idle(pair)

    async def test_a_damaged_block_is_never_used(self) -> None:
        async with self._pair() as pair:
            expected = await self._alone(pair)
            handover = pair.handover(self._request(self._prompt()))
            first = await collect(pair.prefill, pair.style.prefill_request(handover))
            await self.spoil_kv(pair.prefill)
            with pytest.raises(EngineHandoverError):
                await collect(pair.decode, pair.style.decode_request(handover, first[-1].handover))
            await self._both_idle(pair)
            own = await collect(pair.decode, self._request(self._prompt()))
            assert tokens(own) == expected

    async def _alone(self, pair: WorkerPair, prompt: Sequence[int] | None = None) -> list[int]:
        """The answer of the prefill worker, under another salt so that neither has it cached."""
        request = self._request(self._prompt() if prompt is None else prompt)
        return tokens(await collect(pair.prefill, self._apart(request, "alone")))

    def _salted(self, salt: str) -> GenerateRequest:
        return self._apart(self._request(self._prompt()), salt)

    def _apart(self, request: GenerateRequest, salt: str) -> GenerateRequest:
        return evolve(request, cache_salt=salt) if self.takes_cache_salts else request


async def _abort_after(client: EngineClient, request: GenerateRequest, delay_s: float) -> None:
    """Start it and close its stream ``delay_s`` later; its deltas are ignored."""
    stream = client.generate(request)
    try:
        async with asyncio.timeout(delay_s):
            async for _ in stream:
                pass
    except (TimeoutError, EngineError):
        pass
    finally:
        await stream.aclose()
