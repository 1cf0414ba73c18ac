"""What `config check` accepts comes to Ready with `sim`, or names what the check could not know.

FILES=2000 for as many as `make test-files` tries; SEED for others.
"""

from __future__ import annotations

import os
from collections import Counter
from pathlib import Path

import pytest
from tests.support.generated_files import drawn

from commutator.config.kinds import file_schema
from commutator.config.load import load_config
from commutator.config.yaml_file import to_yaml
from commutator.errors import CommutatorError
from commutator.plugins import load_plugins
from commutator.supervisor.preflight import check_machine
from commutator_scaffold.local_cluster import LocalCluster

pytestmark = [pytest.mark.slow, pytest.mark.long]

FILES = int(os.environ.get("FILES", "3"))
SEED = int(os.environ.get("SEED", "0"))
NOT_KNOWN: tuple[str, ...] = ()
"""What a start may say that no check could know."""


def test_what_the_check_accepts_comes_to_ready(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)  # files may name others beside them
    schema = file_schema(load_plugins())
    path = tmp_path / "drawn.yaml"
    said: Counter[str] = Counter()
    wrong: list[str] = []
    seed = SEED
    while said["accepted"] < FILES:
        seed += 1
        assert seed - SEED < 100 * FILES, f"hardly any file is accepted: {said}"
        path.write_text(to_yaml(drawn(seed, schema)))
        try:
            loaded = load_config([path])
            check_machine(loaded.config, loaded.host)
        except CommutatorError:
            said["refused"] += 1
            continue
        said["accepted"] += 1
        try:
            with LocalCluster(path, start_timeout_s=60.0):
                said["ready"] += 1
        except (RuntimeError, TimeoutError) as error:
            if not any(text in str(error) for text in NOT_KNOWN):
                wrong.append(f"seed {seed}:\n{path.read_text()}\n{str(error)[-1500:]}")
    print(f"\n{said}")
    assert not wrong, "\n\n".join(wrong[:20])
