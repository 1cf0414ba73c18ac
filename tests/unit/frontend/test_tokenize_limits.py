"""/tokenize and /detokenize are within the limits of every other request."""

from __future__ import annotations

import pytest
from tests.support.front_door import FakeDispatcher, front_door

from commutator.contract.request import UNKNOWN_CALLER

REQUESTS = [("/tokenize", {"prompt": "Hi"}), ("/detokenize", {"tokens": [5]})]


@pytest.mark.parametrize(("path", "body"), REQUESTS)
async def test_they_wait_for_a_place_until_their_time_is_up(
    path: str, body: dict[str, object]
) -> None:
    async with front_door(
        FakeDispatcher(), max_concurrent_requests=1, request_timeout_s=0.5
    ) as door:
        async with door.services.limiter.of(UNKNOWN_CALLER):
            status, refused = await door.post(path, body)
        assert (status, refused["error"]["code"]) == (504, "deadline_exceeded")
        assert (await door.post(path, body))[0] == 200


@pytest.mark.parametrize(("path", "body"), REQUESTS)
async def test_there_are_only_so_many_places(path: str, body: dict[str, object]) -> None:
    async with front_door(
        FakeDispatcher(), max_concurrent_requests=1, max_queued_requests=0
    ) as door:
        async with door.services.limiter.of(UNKNOWN_CALLER):
            status, refused = await door.post(path, body)
        assert (status, refused["error"]["code"]) == (429, "queue_full")


@pytest.mark.parametrize("path", [path for path, _ in REQUESTS])
async def test_a_slow_body_counts_against_the_deadline(path: str) -> None:
    async with front_door(FakeDispatcher(), request_timeout_s=0.1) as door:
        assert b"504" in await door.status_line_for_unfinished_body(path)
