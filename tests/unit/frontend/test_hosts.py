"""A door that asks for no key is not used by pages of other sites under names of theirs."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.support.front_door import MODEL, FakeDispatcher, front_door

from commutator_http.hosts import Hosts

ASKED = {"model": MODEL, "max_tokens": 4, "messages": [{"role": "user", "content": "Hi"}]}
PATHS = ("/v1/models", "/metrics", "/health", "/live", "/ui", "/", "/nothing")

pytestmark = pytest.mark.security


async def _statuses(door: Any, host: str) -> dict[str, int]:
    found = {}
    for path in PATHS:
        async with door.session.get(door.url + path, headers={"Host": host}) as response:
            found[path] = response.status
    body = {"json": ASKED, "headers": {"Host": host, "Origin": f"http://{host}"}}
    async with door.session.post(door.url + "/v1/chat/completions", **body) as response:
        found["chat"] = response.status
    return found


@pytest.mark.parametrize("host", ["evil.example:8000", "evil.example", "127.0.0.1.evil.example"])
async def test_a_name_that_anybody_may_own_opens_nothing(host: str) -> None:
    async with front_door(FakeDispatcher()) as door:
        assert set((await _statuses(door, host)).values()) == {403}


@pytest.mark.parametrize(
    "host",
    ["localhost:8000", "127.0.0.1:8000", "10.1.2.3", "[::1]:8000", "gpu-box", "gpu.local:1",
     "commutator.llm.svc.cluster.local", "LOCALHOST.", "llm.example:8000"],
)  # fmt: skip
async def test_names_that_nobody_can_own_and_allowed_ones_are_served(host: str) -> None:
    async with front_door(FakeDispatcher(), allowed_hosts=("llm.example",)) as door:
        found = await _statuses(door, host)
    assert 403 not in found.values()
    assert found["chat"] == 200


async def test_every_name_may_where_that_was_said() -> None:
    async with front_door(FakeDispatcher(), allowed_hosts=("*",)) as door:
        assert (await _statuses(door, "evil.example"))["chat"] == 200


_LABEL = st.text("abcdefghijklmnopqrstuvwxyz0123456789-", min_size=1, max_size=12)


@given(st.lists(_LABEL, min_size=1, max_size=4), st.sampled_from(["", ":80", ":8000", "."]))
def test_no_public_name_is_ever_right(labels: list[str], end: str) -> None:
    hosts = Hosts(())
    assert not hosts.allows(".".join([*labels, "example"]) + end)
    assert not hosts.allows(".".join([*labels, "local", "com"]) + end)
    assert hosts.allows(labels[0].replace(".", "") + (end if end != "." else ""))
