"""A body that becomes a thousand times larger stops nobody, read or not, with a key or without."""

from __future__ import annotations

import asyncio
import gzip
import json
import zlib
from collections.abc import Callable, Iterator
from typing import Any

import brotli
import pytest
import requests
from aiohttp import ClientSession, ClientTimeout
from tests.support.front_door import MODEL, FakeDispatcher, FrontDoor, answer, front_door
from tests.support.loop_watch import LoopWatch, serving_in_a_thread, times_slower

from commutator.contract.settings import Secret
from commutator_http.inflate import CODINGS, MOST_TIMES_LARGER, InflateError, Inflater

try:
    from compression import zstd  # type: ignore[import-not-found,unused-ignore]
except ImportError:
    from backports import zstd

pytestmark = [pytest.mark.security, pytest.mark.slow]

LONGEST_S = 0.05 * times_slower()
KEY = "the-right-key"
SPACES = b" " * (200 << 20)
PACK: dict[str, Callable[[bytes], bytes]] = {
    "gzip": lambda data: gzip.compress(data, 6),
    "deflate": lambda data: zlib.compress(data, 6),
    "br": lambda data: brotli.compress(data, quality=1),
    "zstd": zstd.compress,
    "gzip, gzip": lambda data: gzip.compress(gzip.compress(data, 6)),
}
PATHS = ["/v1/completions", "/v1/chat/completions", "/v1/embeddings", "/tokenize", "/nowhere",
         "/health", "/live", "/admin/workers", "/ui/style.css", "/v1/models"]  # fmt: skip
KEYS = {"none": None, "wrong": "another-key", "right": KEY}

Served = tuple[FrontDoor, LoopWatch]


@pytest.fixture(scope="module")
def bombs() -> dict[str, bytes]:
    made = {name: pack(SPACES) for name, pack in PACK.items()}
    assert all(len(bomb) < len(SPACES) / MOST_TIMES_LARGER for bomb in made.values())
    return made


@pytest.fixture(scope="module")
def served(monkeypatch_module: pytest.MonkeyPatch) -> Iterator[Served]:
    monkeypatch_module.setenv("COMMUTATOR_TEST_KEY", KEY)
    keys = (Secret(env="COMMUTATOR_TEST_KEY"),)
    dispatcher = FakeDispatcher(answer("Hello! " * 400), delay_s=0.002)
    with serving_in_a_thread(lambda: front_door(dispatcher, api_keys=keys)) as (door, watch):
        requests.get(f"{door.url}/live", timeout=30)
        yield door, watch


@pytest.fixture(scope="module")
def monkeypatch_module() -> Iterator[pytest.MonkeyPatch]:
    with pytest.MonkeyPatch.context() as patch:
        yield patch


def completion(**more: Any) -> bytes:
    return json.dumps({"model": MODEL, "prompt": "Hi", "max_tokens": 4, **more}).encode()


def headers(coding: str, key: str | None) -> dict[str, str]:
    auth = {} if key is None else {"Authorization": f"Bearer {key}"}
    return {"Content-Type": "application/json", "Content-Encoding": coding, **auth}


@pytest.mark.parametrize("coding", [name for name in PACK if name != "gzip, gzip"])
def test_each_coding_is_unpacked_here(served: Served, coding: str) -> None:
    """So that what follows does not hold because nothing was ever unpacked."""
    door, _ = served
    done = requests.post(
        f"{door.url}/v1/completions", PACK[coding](completion()), headers=headers(coding, KEY)
    )
    assert done.status_code == 200, done.text


def test_two_codings_are_refused_by_name(served: Served) -> None:
    door, _ = served
    given = headers("gzip, gzip", KEY)
    body = PACK["gzip, gzip"](completion())
    done = requests.post(f"{door.url}/v1/completions", body, headers=given)
    assert done.status_code == 415
    assert done.json()["error"]["code"] == "unsupported_content_encoding"
    assert "gzip" in done.headers["Accept-Encoding"]


async def send_and_linger(url: str, port: int, path: str, body: bytes, given: Any) -> bytes:
    """The beginning of the answer, as a client gets it that keeps its connection open."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    lines = [f"{name}: {value}" for name, value in given.items()]
    head = [f"POST {path} HTTP/1.1", "Host: x", f"Content-Length: {len(body)}", *lines, "", ""]
    writer.write("\r\n".join(head).encode() + body)
    try:
        answered = await asyncio.wait_for(reader.read(64), 20)
        await asyncio.sleep(0.2)  # aiohttp read on for 2 s, unpacking, in one turn of the loop
    finally:
        writer.close()
    return answered


@pytest.mark.parametrize("key", KEYS)
@pytest.mark.parametrize("coding", PACK)
def test_nobody_waits(served: Served, bombs: dict[str, bytes], coding: str, key: str) -> None:
    """All paths at once; `/live` and a stream are asked beside them."""
    door, watch = served
    given = headers(coding, KEYS[key])

    async def run() -> None:
        async with ClientSession(timeout=ClientTimeout(60)) as session:
            stream = asyncio.create_task(read_stream(session, door.url))
            answered = await asyncio.gather(
                *(send_and_linger(door.url, door.port, path, bombs[coding], given)
                  for path in PATHS)
            )  # fmt: skip
            assert all(part.startswith(b"HTTP/1.1 ") for part in answered)
            assert await stream

    best_s = 1.0
    for _ in range(3):  # what a body does, it does each time
        watch.reset()
        asyncio.run(run())
        best_s = min(best_s, watch.longest_s())
        if best_s < LONGEST_S:
            break
    assert best_s < LONGEST_S


async def read_stream(session: ClientSession, url: str) -> bool:
    """Whether a stream came to its end."""
    asked = {"model": MODEL, "prompt": "Hi", "max_tokens": 200, "stream": True}
    given = {"Authorization": f"Bearer {KEY}"}
    async with session.post(f"{url}/v1/completions", json=asked, headers=given) as answered:
        return b"[DONE]" in await answered.read()


@pytest.mark.parametrize("coding", CODINGS)
def test_what_becomes_far_larger_is_refused(coding: str) -> None:
    packed = PACK[coding.removeprefix("x-")](b" " * (8 << 20))
    inflater = Inflater(coding, 64 << 20)
    with pytest.raises(InflateError, match="100 times larger"):
        for _ in inflater.pieces(packed):
            pass


@pytest.mark.parametrize("coding", CODINGS)
@pytest.mark.parametrize("cut", [1, 7, 1000, 10**9])
def test_pieces_of_any_size_give_the_same(coding: str, cut: int) -> None:
    text = json.dumps({"text": ["Größe 大小 " * 50, *range(20_000)]}).encode()
    packed = PACK[coding.removeprefix("x-")](text)
    inflater = Inflater(coding, 64 << 20)
    for start in range(0, len(packed), cut):
        for _ in inflater.pieces(packed[start : start + cut]):
            pass
    assert inflater.end() == text
