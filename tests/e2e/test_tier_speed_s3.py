"""`python -m bench.tier_speed` on a real S3 server, beside boto3."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml
from bench.tier_speed import Line, measure_file
from tests.support.seaweed import ACCESS_KEY, SECRET_KEY, SeaweedServer

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
    store, load = measure_file(file, 1 << 20, 16 << 20, rounds=2)
    for line, operation in ((store, "store"), (load, "load")):
        assert isinstance(line, Line), line
        assert line.operation == operation
        assert line.gb_per_s > 0
        assert line.raw_gb_per_s.keys() == {"boto3"}
    assert "Contents" not in seaweed.client.list_objects_v2(Bucket=bucket)
