"""``commutator kv bench`` on a real S3 server, beside boto3."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml
from click.testing import CliRunner
from tests.support.seaweed import ACCESS_KEY, SECRET_KEY, SeaweedServer

from commutator.cli.main import main

pytestmark = [pytest.mark.slow, pytest.mark.timeout(120)]


def test_a_bucket_is_measured_and_left_empty(
    seaweed: SeaweedServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TEST_S3_KEY", ACCESS_KEY)
    monkeypatch.setenv("TEST_S3_SECRET", SECRET_KEY)
    bucket = seaweed.new_bucket()
    tier = {
        "kind": "s3",
        "bucket": bucket,
        "endpoint": seaweed.endpoint,
        "access_key": {"env": "TEST_S3_KEY"},
        "secret_key": {"env": "TEST_S3_SECRET"},
    }
    file = tmp_path / "cluster.yaml"
    models = [{"name": "m", "source": "package:m"}]
    file.write_text(
        yaml.safe_dump({"models": models, "engines": [{"kind": "reference"}], "tiers": [tier]})
    )
    size = ("--total-mib", "16", "--block-kib", "1024", "--rounds", "2")
    done = CliRunner().invoke(main, ["kv", "bench", str(file), *size, "--json"])
    assert done.exit_code == 0, done.output
    store, load = json.loads(done.stdout)
    assert (store["operation"], load["operation"]) == ("store", "load")
    for line in (store, load):
        assert line["gb_per_s"] > 0
        assert line["raw_gb_per_s"].keys() == {"boto3"}
    assert "Contents" not in seaweed.client.list_objects_v2(Bucket=bucket)
