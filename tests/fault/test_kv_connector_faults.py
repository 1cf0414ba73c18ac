"""Disks and S3 stores that fail under a KV service: it serves on, and recovers by itself."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from tests.support.fault_proxy import Fault, FaultProxy
from tests.support.kv_rig import KvRig, chain, setups
from tests.support.kv_tiers import DRAM, ON_EVICT
from tests.support.seaweed import ACCESS_KEY, SECRET_KEY, SeaweedServer
from tests.support.small_disk import run_on_small_disk

pytestmark = [pytest.mark.slow, pytest.mark.timeout(180)]

# A bad disk that becomes a good one.
SCRIPT = """
import json, subprocess
from pathlib import Path
from tests.support.kv_rig import KvRig, chain, setups
from tests.support.kv_tiers import DRAM, nvme
folder = Path({folder!r})
{spoil}
with KvRig(setups(DRAM, nvme(folder / "blocks", 200))) as rig:
    rig.store(chain(1, 8))
    during = rig.load(chain(1, 8)), rig.tier("nvme").up
    {mend}
    rig.wait_for(lambda: rig.tier("nvme").up)
    rig.store(chain(2, 8))
    print(json.dumps([*during, rig.tier("nvme").published]))
"""


@pytest.mark.parametrize(
    ("options", "spoil", "mend"),
    [
        (
            "size=4m",
            '(folder / "ballast").write_bytes(bytes(3_700_000))',
            '(folder / "ballast").unlink()',
        ),
        ("size=4m,ro", "", 'subprocess.run(["mount", "-o", "remount,rw", folder], check=True)'),
    ],
    ids=["full", "read-only"],
)
def test_a_bad_disk_is_used_once_it_is_a_good_one(
    options: str, spoil: str, mend: str, tmp_path: Path
) -> None:
    folder = tmp_path / "disk"
    script = SCRIPT.format(folder=str(folder), spoil=spoil, mend=mend)
    loaded, up, published = json.loads(run_on_small_disk(folder, script, options))
    assert (loaded, up) == (8, False), "memory serves meanwhile"
    assert published == 8


@pytest.fixture
def proxy(seaweed: SeaweedServer) -> Iterator[FaultProxy]:
    with FaultProxy(seaweed.port) as running:
        yield running


@pytest.fixture
def s3(
    seaweed: SeaweedServer, proxy: FaultProxy, monkeypatch: pytest.MonkeyPatch
) -> dict[str, Any]:
    monkeypatch.setenv("TIER_S3_KEY", ACCESS_KEY)
    monkeypatch.setenv("TIER_S3_SECRET", SECRET_KEY)
    return {
        "kind": "s3",
        "bucket": seaweed.new_bucket(),
        "endpoint": proxy.endpoint,
        "access_key": {"env": "TIER_S3_KEY"},
        "secret_key": {"env": "TIER_S3_SECRET"},
    }


@pytest.fixture
def hasty_s3(s3: dict[str, Any]) -> dict[str, Any]:
    """Gives up soon; only for tests in which the store fails: a busy machine is slow, too."""
    return {**s3, "request_timeout_s": 1.0, "load_timeout_s": 2.0, "store_timeout_s": 4.0}


@pytest.mark.parametrize(
    "fault",
    [Fault(refuse=True), Fault(status=503), Fault(hang=True), Fault(cut_after_bytes=300)],
    ids=["down", "503", "hangs", "cut off"],
)
def test_a_store_that_fails_costs_little_and_comes_back(
    fault: Fault, hasty_s3: dict[str, Any], proxy: FaultProxy
) -> None:
    with KvRig(setups(DRAM, hasty_s3)) as rig:
        rig.store(chain(1, 8))
        rig.connector.stores.evict(chain(1, 8), "dram")
        assert rig.load(chain(1, 8)) == 8
        assert rig.tier("s3").loads == {"loaded": 8}
        proxy.set(fault)
        started_s = time.monotonic()
        assert rig.load(chain(1, 8)) == 0
        assert time.monotonic() - started_s < 6, "a prompt does not wait for longer"
        for number in range(2, 7):
            rig.offload(chain(number, 8))
        for number in range(2, 7):
            rig.wait_for(partial(_is_there, rig, number))
        rig.settle(60)
        assert rig.tier("dram").published == 40
        proxy.set(Fault())

        def stored() -> bool:
            rig.store(chain(9, 8))
            rig.connector.stores.evict(chain(9, 8), "dram")
            return rig.load(chain(9, 8)) == 8

        rig.wait_for(stored, 60)
        assert rig.load(chain(1, 8)) == 8, "what was there before is there again"
        rig.settle()


def test_a_bucket_that_is_not_there_is_used_once_it_is(
    s3: dict[str, Any], seaweed: SeaweedServer
) -> None:
    name = f"late-{time.time_ns()}"
    with KvRig(setups(DRAM, s3 | {"bucket": name})) as rig:
        assert not rig.tier("s3").up
        rig.store(chain(1, 8))
        rig.wait_for(partial(_is_there, rig, 1), 60)  # memory serves meanwhile
        seaweed.client.create_bucket(Bucket=name)
        rig.wait_for(lambda: rig.tier("s3").up, 60)
        rig.store(chain(2, 8))
        rig.connector.stores.evict(chain(2, 8), "dram")
        rig.wait_for(partial(_is_there, rig, 2), 60)
        assert rig.tier("s3").loads["loaded"] == 8


def _is_there(rig: KvRig, number: int) -> bool:
    return rig.load(chain(number, 8)) == 8


def test_a_slow_store_is_waited_for_only_as_long_as_it_may_take(
    hasty_s3: dict[str, Any], proxy: FaultProxy
) -> None:
    with KvRig(setups(hasty_s3)) as rig:
        rig.store(chain(1, 8))
        proxy.set(Fault(delay_s=0.05))
        assert rig.load(chain(1, 8)) == 8
        proxy.set(Fault(delay_s=3.0))
        started_s = time.monotonic()
        assert rig.load(chain(1, 8)) == 0
        assert time.monotonic() - started_s < 6
        proxy.set(Fault())
        rig.wait_for(lambda: rig.load(chain(1, 8)) == 8, 60)
        rig.settle(60)


def test_bytes_that_changed_on_their_way_from_s3_are_no_blocks(
    s3: dict[str, Any], proxy: FaultProxy
) -> None:
    with KvRig(setups(s3)) as rig:
        for number in range(4):
            rig.store(chain(number, 2))
        proxy.set(Fault(corrupt=True))
        assert sum(rig.load(chain(number, 2)) for number in range(4)) < 8
        counts = rig.tier("s3").loads
        assert counts.get("corrupt", 0) + counts.get("failed", 0) > 0
        proxy.set(Fault())
        for number in range(4):
            rig.store(chain(number, 2))
        rig.wait_for(lambda: sum(rig.load(chain(number, 2)) for number in range(4)) == 8, 60)
        rig.settle()


def test_a_second_engine_finds_what_the_first_stored(s3: dict[str, Any]) -> None:
    with KvRig(setups(s3)) as first, KvRig(setups({**s3, "list_limit": 0})) as second:
        first.store(chain(1, 8))
        # A lookup that a busy machine answers late is not waited for: the next one has the answer.
        second.wait_for(lambda: second.load([*chain(1, 8), *chain(2, 1)]) == 8)
        assert second.tier("s3").loads == {"loaded": 8}
        second.settle()


def test_what_memory_gives_up_goes_to_s3(s3: dict[str, Any]) -> None:
    with KvRig(setups({**DRAM, "capacity": 8 * 4096}, {**s3, **ON_EVICT})) as rig:
        for number in range(4):
            rig.store(chain(number, 8))
        assert [rig.load(chain(number, 8)) for number in range(4)] == [8] * 4
        assert rig.tier("s3").loads == {"loaded": 24}
