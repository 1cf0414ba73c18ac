"""What `commutator config check` finds in tiers: one folder twice, odd orders, nothing to lend."""

from __future__ import annotations

from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from commutator.cli.main import main

ENGINES = "[{kind: reference, replicas: 2, kv_cache_bytes: 1000}, {kind: sim, name: other}]"
DRAM = "{kind: dram, capacity: 1MB}"
S3 = "{kind: s3, bucket: b}"


def check(folder: Path, *tiers: str, options: tuple[str, ...] = ()) -> Result:
    file = folder / "cluster.yaml"
    file.write_text(
        "models: [{name: m, source: package:m}]\n"
        f"engines: {ENGINES}\n"
        f"tiers: [{', '.join(tiers)}]\n"
    )
    return CliRunner().invoke(main, ["config", "check", "--elsewhere", *options, str(file)])


def warnings(done: Result) -> list[str]:
    """About tiers; the machine may lack this and that."""
    assert done.exit_code == 0, done.stderr
    return [line for line in done.stderr.splitlines() if line.startswith("warning: tiers[")]


def nvme(path: str) -> str:
    return f"{{kind: nvme, path: '{path}', capacity: 1MB}}"


@pytest.mark.parametrize(
    ("first", "second", "when"),
    [
        ("/kv", "/kv", ""),
        ("/kv", "/x/..//kv/", ""),
        ("/kv/{worker}", "/kv/./{worker}", ""),
        ("/kv/{worker}", "/kv/reference-1", " on worker reference-1"),
        ("/kv/reference-0", "/kv/{worker}", " on worker reference-0"),
    ],
)
def test_two_tiers_in_one_folder(tmp_path: Path, first: str, second: str, when: str) -> None:
    done = check(tmp_path, nvme(first), DRAM, nvme(second))
    assert done.exit_code == 1
    problem = (
        f':3: tiers[2].path: "{second}" is already the folder of tiers[0]{when}; choose another'
    )
    assert problem in done.stderr


def test_links_and_relative_paths_are_followed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "link").symlink_to("kv")
    done = check(tmp_path, nvme("kv"), nvme(f"{tmp_path}/link"))
    assert "tiers[1].path" in done.stderr
    assert done.exit_code == 1


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ("/kv/a/{worker}", "/kv/b/{worker}"),
        ("/a/{worker}", "/b/{worker}"),
        ("/kv/{worker}", "/kv/reference-2/{worker}"),
    ],
)
def test_folders_of_their_own(tmp_path: Path, first: str, second: str) -> None:
    assert warnings(check(tmp_path, nvme(first), nvme(second))) == []


def test_one_folder_for_several_workers(tmp_path: Path) -> None:
    done = check(tmp_path, nvme("/kv"))
    assert done.exit_code == 1
    assert (
        ':3: tiers[0].path: "/kv" would be the folder of reference-0 and of reference-1, and no '
        'two workers can share one; append "/{worker}"'
    ) in done.stderr
    assert check(tmp_path, nvme("/kv"), options=("--set", "engines[0].replicas=1")).exit_code == 0


@pytest.mark.parametrize(
    ("tier", "problem"),
    [
        (nvme(""), "tiers[0].path: expected the path of a folder, got ''"),
        (nvme("  "), "tiers[0].path: expected the path of a folder, got '  '"),
        ("{kind: s3, bucket: ''}", "tiers[0].bucket: expected the bucket's name, got ''"),
    ],
)
def test_empty_places_are_refused(tmp_path: Path, tier: str, problem: str) -> None:
    done = check(tmp_path, tier)
    assert done.exit_code == 1
    assert problem in done.stderr


def test_what_is_no_path_shares_no_folder(tmp_path: Path) -> None:
    done = check(tmp_path, "{kind: nvme, path: 5, capacity: 1}", '{kind: nvme, path: "a\\0"}', "7")
    assert done.exit_code == 1
    assert "tiers[0].path: expected a string" in done.stderr
    assert "give it another" not in done.stderr


@pytest.mark.parametrize(
    ("tiers", "slow", "fast"),
    [
        ((S3, DRAM), "tiers[0] (s3)", "tiers[1] (dram)"),
        ((DRAM, S3, nvme("/kv/{worker}")), "tiers[1] (s3)", "tiers[2] (nvme)"),
        ((nvme("/kv/{worker}"), "{kind: peer}", DRAM), "tiers[0] (nvme)", "tiers[2] (dram)"),
    ],
)
def test_a_slow_tier_before_a_fast_one(
    tmp_path: Path, tiers: tuple[str, ...], slow: str, fast: str
) -> None:
    (warning,) = warnings(check(tmp_path, *tiers))
    assert warning.startswith(f"warning: {fast}: it is faster than {slow}, which is listed before")


@pytest.mark.parametrize(
    "tiers", [(DRAM, nvme("/kv/{worker}"), S3), (DRAM, DRAM), (DRAM, "{kind: peer}", S3)]
)
def test_fastest_first(tmp_path: Path, tiers: tuple[str, ...]) -> None:
    assert warnings(check(tmp_path, *tiers)) == []


@pytest.mark.parametrize("tiers", [("{kind: peer}",), ("{kind: peer}", nvme("/kv/{worker}"))])
def test_a_worker_without_host_memory_lends_nothing(tmp_path: Path, tiers: tuple[str, ...]) -> None:
    (warning,) = warnings(check(tmp_path, *tiers))
    assert warning.startswith("warning: tiers[0] (peer): workers have no blocks in host")


@pytest.mark.parametrize("tiers", [("{kind: peer, listen: null}",), ("{kind: peer}", DRAM)])
def test_a_worker_that_only_borrows_gets_no_warning(tmp_path: Path, tiers: tuple[str, ...]) -> None:
    assert warnings(check(tmp_path, *tiers)) == []


def test_the_default_eviction_policy_is_not_installed(tmp_path: Path) -> None:
    done = check(tmp_path, DRAM, options=("--no-plugin", "eviction"))
    assert done.exit_code == 1
    assert 'tiers[0].eviction: no installed plugin offers the default, "lru"' in done.stderr
    assert "pip install commutator-eviction" in done.stderr
