"""The token API's questions about hand-overs: what is answered, and what is refused."""

from __future__ import annotations

import pytest
from tests.support.handover_rig import request, tiny_worker

from commutator.engine import Emit, TokenApiClient, TokenApiServer, TokenEngine
from commutator.errors import EngineError
from commutator.types import EngineInfo, EngineLoad, GenerateRequest


class Plain(TokenEngine):
    """Knows nothing of hand-overs."""

    def start(self, emit: Emit) -> EngineInfo:
        return EngineInfo("plain", "0", "m", 10, 1, 1)

    def submit(self, key: int, request: GenerateRequest) -> None: ...

    def abort(self, key: int) -> None: ...

    def load(self) -> EngineLoad:
        return EngineLoad()

    def reset_prefix_cache(self) -> None: ...

    def stop(self) -> None: ...


async def test_an_engine_that_hands_nothing_over_says_so() -> None:
    server = TokenApiServer(Plain())
    port = await server.start("127.0.0.1", 0)
    client = TokenApiClient(f"127.0.0.1:{port}", answer_timeout_s=60)
    for what in ("hello", "statistics"):
        with pytest.raises(EngineError, match="hands no KV over"):
            await client.handover(what, {}, timeout_s=60)
    with pytest.raises(EngineError, match="hands no KV over"):
        await client.handover_statistics(timeout_s=60)
    assert await client.load() == EngineLoad()
    await client.close()
    await server.stop()


async def test_questions_that_make_no_sense_are_refused_and_others_answered() -> None:
    async with tiny_worker() as worker:
        for what, arguments in (
            ("guess", {}),
            ("watch", {"id": "x"}),
            ("watch", {"id": 1, "have": 0, "state": "unknown", "wait_s": 0.0}),
            ("release", {}),
        ):
            with pytest.raises(EngineError):
                await worker.client.handover(what, arguments, timeout_s=60)
        watch = {"id": "x", "have": 0, "state": "unknown", "wait_s": 0.01}
        news = await worker.client.handover("watch", watch, timeout_s=60)
        assert news["state"] == "unknown"
        # What is released before it begins is over, and its prefill leg is told so.
        assert await worker.client.handover("release", {"id": "x"}, timeout_s=60) is None
        news = await worker.client.handover("watch", watch, timeout_s=60)
        assert news["state"] == "failed"
        with pytest.raises(EngineError, match="given the hand-over up"):
            await worker.tokens(request(range(5, 40), handover={"pull": "x", "lease_s": 60.0}))
        await worker.until_idle()
