"""The S3 server is away, slow, refuses or lies: loads miss, stores fail, and it all recovers."""

from __future__ import annotations

import socketserver
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import ClassVar

import psutil
import pytest
from tests.support.fault_proxy import Fault, FaultProxy
from tests.support.s3_tiers import MakeTier, tier_maker
from tests.support.seaweed import ACCESS_KEY, SECRET_KEY, SeaweedServer
from tests.support.tier_mover import TierMover, block_of, geometry_of, random_keys

from commutator.contract.settings import Secret
from commutator.contract.tier import Direction
from commutator.errors import ConfigError, TierError, TransferTimeoutError
from commutator_s3.config import S3TierConfig
from commutator_s3.tier import S3Tier

pytestmark = [pytest.mark.slow, pytest.mark.timeout(180)]

BLOCK_BYTES = 200_000


@pytest.fixture
def proxy(seaweed: SeaweedServer) -> Iterator[FaultProxy]:
    with FaultProxy(seaweed.port) as running:
        yield running


@pytest.fixture
def make_tier(
    seaweed: SeaweedServer, proxy: FaultProxy, monkeypatch: pytest.MonkeyPatch
) -> MakeTier:
    """Tiers over a fresh bucket behind the proxy, or with any other option."""
    return tier_maker(seaweed, proxy.endpoint, monkeypatch, request_timeout_s=1.0)


def check_works(mover: TierMover, seed: int) -> None:
    keys = random_keys(3, seed)
    assert mover.store(keys) == [None] * 3
    assert mover.load(keys) == [block_of(key, BLOCK_BYTES) for key in keys]


@pytest.mark.parametrize(
    ("fault", "said"),
    [
        (Fault(refuse=True), "cannot be reached"),
        (Fault(hang=True), "cannot be reached"),
        (Fault(status=503), "503"),
    ],
    ids=["down", "hangs", "503"],
)
def test_open_fails_in_time_and_works_once_the_server_does(
    make_tier: MakeTier, proxy: FaultProxy, fault: Fault, said: str
) -> None:
    tier = make_tier()
    proxy.set(fault)
    started = time.monotonic()
    with pytest.raises(TierError, match=said):
        tier.open(geometry_of(BLOCK_BYTES))
    assert time.monotonic() - started < 15
    with pytest.raises(TierError, match="not open"):
        tier.lookup(random_keys(1))
    proxy.set(Fault())
    with TierMover(tier, BLOCK_BYTES) as mover:
        check_works(mover, seed=0)


def test_mistakes_are_reported_at_open(
    make_tier: MakeTier, monkeypatch: pytest.MonkeyPatch
) -> None:
    geometry = geometry_of(BLOCK_BYTES)
    with pytest.raises(TierError, match="no such bucket; create it, or set create_bucket"):
        make_tier(bucket="nobody-made-this").open(geometry)
    monkeypatch.setenv("TEST_S3_SECRET", "wrong")
    with pytest.raises(TierError, match="refused"):
        make_tier().open(geometry)
    for name in ("AWS_ACCESS_KEY_ID", "AWS_PROFILE", "AWS_SESSION_TOKEN"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("AWS_CONFIG_FILE", "/nowhere")
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", "/nowhere")
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    with pytest.raises(TierError, match="no credentials: set access_key"):
        make_tier(access_key=None, secret_key=None).open(geometry)
    with pytest.raises(TierError, match="holds no block"):
        make_tier(capacity=10).open(geometry)
    monkeypatch.delenv("TEST_S3_KEY")
    with pytest.raises(ConfigError, match="TEST_S3_KEY is not set"):
        make_tier()


class _Endless(socketserver.StreamRequestHandler):
    """Answers each request without end, or sends it elsewhere."""

    head = (
        b"HTTP/1.1 200 OK\r\nContent-Type: application/xml\r\nContent-Length: 1000000000000\r\n\r\n"
    )
    piece, wait_s = b"a" * 65_536, 0.0

    def handle(self) -> None:
        while self.rfile.readline().strip():
            pass
        with suppress(OSError):
            self.wfile.write(self.head)
            while self.piece:
                self.wfile.write(self.piece)
                time.sleep(self.wait_s)


class _Dripping(_Endless):
    piece, wait_s = b"a", 0.05


class _Elsewhere(_Endless):
    head = b"HTTP/1.1 307 Moved\r\nLocation: http://127.0.0.1/\r\nContent-Length: 0\r\n\r\n"
    piece = b""


class _Wanting(_Endless):
    head = b"HTTP/1.1 400 Bad\r\nContent-Length: 0\r\nx-amz-bucket-region: eu-1\r\n\r\n"
    piece = b""


@pytest.mark.security
@pytest.mark.parametrize(
    ("handler", "said"),
    [
        (_Endless, "did not end within 8388608 bytes"),
        (_Dripping, "did not end within 2 s"),
        (_Elsewhere, "redirects are not followed"),
        (_Wanting, "400"),
    ],
)
def test_a_server_that_answers_without_end_is_given_up(
    make_tier: MakeTier, handler: type[_Endless], said: str
) -> None:
    with socketserver.ThreadingTCPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        tier, before = make_tier(endpoint=f"http://127.0.0.1:{server.server_address[1]}"), rss()
        started = time.monotonic()
        with pytest.raises(TierError, match=said):
            tier.open(geometry_of(BLOCK_BYTES))
        assert time.monotonic() - started < 15
        assert rss() - before < 64 << 20
        server.shutdown()


class _Proxy(_Endless):
    """Refuses what it is to pass on."""

    head = b"HTTP/1.1 403 No\r\nContent-Length: 0\r\n\r\n"
    piece = b""
    asked: ClassVar[list[bytes]] = []

    def handle(self) -> None:
        self.asked.append(self.rfile.readline())
        super().handle()


def test_a_proxy_of_the_environment_is_used(
    make_tier: MakeTier, monkeypatch: pytest.MonkeyPatch
) -> None:
    with socketserver.ThreadingTCPServer(("127.0.0.1", 0), _Proxy) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        for name in ("http_proxy", "HTTP_PROXY"):
            monkeypatch.setenv(name, f"http://127.0.0.1:{server.server_address[1]}")
        for name in ("no_proxy", "NO_PROXY"):
            monkeypatch.delenv(name, raising=False)
        with pytest.raises(TierError, match="refused"):
            make_tier(endpoint="http://store.example:9000").open(geometry_of(BLOCK_BYTES))
        server.shutdown()
    assert _Proxy.asked
    assert all(b"http://store.example:9000/" in line for line in _Proxy.asked)


def rss() -> int:
    return psutil.Process().memory_info().rss


def test_a_missing_bucket_is_created_when_asked_for(make_tier: MakeTier) -> None:
    bucket = f"made-{time.time_ns()}"
    for _ in range(2):
        with TierMover(make_tier(bucket=bucket, create_bucket=True), BLOCK_BYTES) as mover:
            assert mover.tier.probe(random_keys(1)) == [None]


@pytest.mark.parametrize("fault", [Fault(refuse=True), Fault(status=503)], ids=["down", "503"])
def test_the_server_goes_away_and_comes_back(
    make_tier: MakeTier, proxy: FaultProxy, fault: Fault
) -> None:
    keys = random_keys(3)
    with TierMover(make_tier(), BLOCK_BYTES) as mover:
        mover.store(keys)
        proxy.set(fault)
        assert mover.load(keys) == ["failed"] * 3
        assert None not in mover.store(random_keys(2, seed=1))
        with pytest.raises(TierError):
            mover.tier.probe(random_keys(1, seed=2))
        with pytest.raises(TierError):
            mover.tier.evict(keys)
        assert None not in mover.tier.lookup(keys), "what could not be deleted stays known"
        proxy.set(Fault())
        assert mover.load(keys) == [block_of(key, BLOCK_BYTES) for key in keys]
        mover.tier.evict(keys)
        assert mover.tier.probe(keys[:1]) == [None]
        check_works(mover, seed=3)


def test_a_server_that_hangs_is_given_up(make_tier: MakeTier, proxy: FaultProxy) -> None:
    keys = random_keys(3)
    with TierMover(make_tier(), BLOCK_BYTES) as mover:
        mover.store(keys)
        proxy.set(Fault(hang=True))
        mover.timeout_s = 1.0
        slots = [stored.slot for stored in mover.tier.lookup(keys) if stored is not None]
        results = mover.move(Direction.READ, slots, [mover.arena.block_bytes] * 3)
        assert all(isinstance(result, TransferTimeoutError) for result in results)
        proxy.set(Fault())
        mover.timeout_s = 20.0
        # What was given up may still write to memory until NIXL lets go of it.
        deadline_s = time.monotonic() + 60
        reaped: list[int] = []
        while not reaped and time.monotonic() < deadline_s:
            reaped += mover.agent.reap()
            time.sleep(0.05)
        assert reaped
        assert mover.load(keys) == [block_of(key, BLOCK_BYTES) for key in keys]


def test_a_slow_server_is_waited_for(make_tier: MakeTier, proxy: FaultProxy) -> None:
    with TierMover(make_tier(), BLOCK_BYTES) as mover:
        proxy.set(Fault(delay_s=0.1))
        check_works(mover, seed=0)
        found = make_tier()
        found.open(geometry_of(BLOCK_BYTES))
        assert None not in found.probe(random_keys(3))
        found.close()


def test_bytes_damaged_on_the_way_are_never_loaded(make_tier: MakeTier, proxy: FaultProxy) -> None:
    keys = random_keys(3)
    with TierMover(make_tier(), BLOCK_BYTES) as mover:
        mover.store(keys)
        proxy.set(Fault(corrupt=True))
        assert set(mover.load(keys)) <= {"corrupt", "failed"}
        proxy.set(Fault())
        assert mover.load(keys) == [block_of(key, BLOCK_BYTES) for key in keys]


@pytest.mark.parametrize("size_bytes", [50, BLOCK_BYTES // 2])
def test_an_answer_cut_off_is_never_taken_for_a_block(
    make_tier: MakeTier, proxy: FaultProxy, size_bytes: int
) -> None:
    """NIXL calls an answer done that ends in its headers."""
    keys = random_keys(3)
    with TierMover(make_tier(), BLOCK_BYTES) as mover:
        mover.store(keys)
        proxy.set(Fault(cut_after_bytes=size_bytes))
        assert set(mover.load(keys)) <= {"corrupt", "failed"}


def test_a_killed_server_comes_back_with_what_it_acknowledged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TEST_S3_KEY", ACCESS_KEY)
    monkeypatch.setenv("TEST_S3_SECRET", SECRET_KEY)
    server = SeaweedServer(tmp_path)
    try:
        server.start()
        tier = S3Tier(
            S3TierConfig(
                kind="s3",
                bucket="survives",
                endpoint=server.endpoint,
                access_key=Secret(env="TEST_S3_KEY"),
                secret_key=Secret(env="TEST_S3_SECRET"),
                request_timeout_s=1.0,
                create_bucket=True,
            )
        )
        keys = random_keys(5)
        with TierMover(tier, BLOCK_BYTES) as mover:
            assert mover.store(keys) == [None] * 5
            server.kill()
            assert mover.load(keys) == ["failed"] * 5
            server.start()
            assert mover.load(keys) == [block_of(key, BLOCK_BYTES) for key in keys]
    finally:
        server.close()
