"""One quick-start cluster for all end-to-end tests that only talk to it; some have their own."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import openai
import pytest
from tests.support.launched_servers import wait_for_workers
from tests.support.seaweed import ACCESS_KEY, SECRET_KEY, SeaweedServer
from tests.support.server_stores import S3_KEY, S3_SECRET, Stores

from commutator.trust import adopt
from commutator_scaffold.local_cluster import LocalCluster

MODEL = "smollm2-135m"


@pytest.fixture(scope="session")
def quickstart(root: Path) -> Iterator[LocalCluster]:
    with LocalCluster(root / "examples" / "quickstart.yaml", joins=False) as running:
        yield running


@pytest.fixture(scope="module")
def cluster(quickstart: LocalCluster) -> Iterator[LocalCluster]:
    with adopt(quickstart.secret):
        yield quickstart


@pytest.fixture
def pair(cluster: LocalCluster) -> LocalCluster:
    """One of two workers, both of which are ready: the test before may have killed one."""
    wait_for_workers(cluster, 2)
    return cluster


@pytest.fixture
def client(cluster: LocalCluster) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{cluster.url}/v1", api_key="none", max_retries=0) as made:
        yield made


@pytest.fixture(scope="module")
def stores(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stores]:
    """With an S3 server of their own, which may be killed."""
    folder = tmp_path_factory.mktemp("stores")
    server = SeaweedServer(folder / "seaweed")
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setenv(S3_KEY, ACCESS_KEY)
        monkeypatch.setenv(S3_SECRET, SECRET_KEY)
        try:
            server.start()
            yield Stores(server, folder / "nvme", server.new_bucket())
        finally:
            server.close()
