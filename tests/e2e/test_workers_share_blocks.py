"""The second worker reuses blocks from the first one's memory, and those it stored in S3."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.support.oracle import SOURCE
from tests.support.seaweed import ACCESS_KEY, SECRET_KEY, SeaweedServer
from tests.support.shared_workers import WorkerProbe, cluster_of, introduce

from commutator.tokenizer.load import load_text_model
from commutator_scaffold.local_cluster import LocalCluster

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]

BLOCK = 16


@pytest.fixture(scope="module")
def prompt() -> list[int]:
    text = "The commutator decides at every instant which coil feeds which wire. " * 20
    return load_text_model(SOURCE).encode(text)


def test_what_lies_in_the_memory_of_the_first(root: Path, prompt: list[int]) -> None:
    arguments = ["--set", "tiers[1].ask_timeout_s=2.0"]
    with LocalCluster(root / "examples" / "shared.yaml", arguments=arguments) as cluster:
        first, second = WorkerProbe(cluster, 0), WorkerProbe(cluster, 1)
        introduce(first, second)
        introduce(second, first)
        before = [worker.loads("peer")["loaded"] for worker in (first, second)]
        blocks = (len(prompt) - 1) // BLOCK
        expected, cached = first.answer_stored(prompt)
        assert cached == 0
        tokens, cached = second.answer_stored(prompt)
        assert tokens == expected
        assert cached == blocks * BLOCK
        after = [worker.loads("peer")["loaded"] for worker in (first, second)]
        assert [new - old for new, old in zip(after, before, strict=True)] == [0, blocks]
        assert second.loads("dram") == {}


@pytest.mark.long
def test_what_the_first_stored_in_s3(
    seaweed: SeaweedServer, prompt: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TEST_S3_KEY", ACCESS_KEY)
    monkeypatch.setenv("TEST_S3_SECRET", SECRET_KEY)
    s3 = {
        "kind": "s3",
        "bucket": seaweed.new_bucket(),
        "endpoint": seaweed.endpoint,
        "access_key": {"env": "TEST_S3_KEY"},
        "secret_key": {"env": "TEST_S3_SECRET"},
        "list_limit": 0,
    }
    with cluster_of(2, [s3]) as cluster:
        first, second = WorkerProbe(cluster, 0), WorkerProbe(cluster, 1)
        expected, _ = first.answer_stored(prompt, "s3")
        blocks = (len(prompt) - 1) // BLOCK
        tokens, cached = second.answer(prompt)
        assert tokens == expected
        assert cached == blocks * BLOCK
        assert second.loads("s3") == {"loaded": blocks}
