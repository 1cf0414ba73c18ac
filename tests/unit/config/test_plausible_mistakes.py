"""Files that load, or nearly, and do not do what their author means."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
from attrs import evolve

from commutator.auth.keys import expiry_unix_s
from commutator.auth.unlimited import UnlimitedLimiter
from commutator.cli.likely_mistakes import warnings_of
from commutator.config.load import load_config
from commutator.contract.limiter import LimiterConfig
from commutator.contract.principal import AuthenticatorConfig
from commutator.contract.registration import Origin
from commutator.errors import ConfigError

MINIMAL = """
models: [{name: m, source: package:m}]
engines: [{kind: sim}]
"""
HASH = "7c9e03a90f6ff9fa8d4a6ed9e0d0e0dd6d6ff6f3a15d9bd9e7d7bb0f1ee1a2c5"
TODAY_UNIX_S = expiry_unix_s("2026-06-01")


def problems(tmp_path: Path, text: str) -> list[str]:
    (tmp_path / "c.yaml").write_text(MINIMAL + text)
    with pytest.raises(ConfigError) as caught:
        load_config([tmp_path / "c.yaml"], environ={})
    return [line.partition(": ")[2] for line in caught.value.problems]


def warnings(tmp_path: Path, text: str, sets: Sequence[str] = ()) -> list[str]:
    (tmp_path / "c.yaml").write_text(MINIMAL + text)
    loaded = load_config([tmp_path / "c.yaml"], sets=sets, environ={})
    return list(warnings_of(loaded.config, loaded.host, TODAY_UNIX_S))


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("router: kv", 'router: expected a mapping such as {kind: kv}, got "kv"'),
        ("tiers: [a b]", 'tiers[0]: expected a mapping such as {kind: NAME}, got "a b"'),
        ("disaggregation: 3", "disaggregation: expected a mapping such as {kind: NAME}, got 3"),
    ],
)
def test_a_kind_alone_shows_how_it_is_written(tmp_path: Path, text: str, expected: str) -> None:
    assert expected in problems(tmp_path, text)


def test_a_limiter_that_nobody_is_asked_for_is_warned_of(tmp_path: Path) -> None:
    (tmp_path / "c.yaml").write_text(MINIMAL)
    loaded = load_config([tmp_path / "c.yaml"], environ={})
    host = loaded.host
    origin = Origin(plugin="mine", distribution="tests")
    host.limiters.add(origin, "mine", LimiterConfig, lambda _: UnlimitedLimiter(), "alpha")
    asked = AuthenticatorConfig(kind="keys")
    for kind, auth, count in [
        ("mine", (), 1), ("mine", (asked,), 0), ("ledger", (), 0), ("unlimited", (), 0)
    ]:  # fmt: skip
        config = evolve(loaded.config, limiter=LimiterConfig(kind=kind), auth=auth)
        found = [line for line in warnings_of(config, host) if line.startswith("limiter: ")]
        assert len(found) == count
    del host.limiters.kinds["mine"]


def test_of_equally_near_names_the_one_that_begins_alike_is_meant(tmp_path: Path) -> None:
    (problem,) = problems(tmp_path, "routing: {kind: kv}")
    assert problem == 'routing: unknown key; did you mean "router"?'


@pytest.mark.parametrize("keys", ["[cmt-abc]", "cmt-abc"])
def test_a_key_in_place_of_its_hash_is_not_repeated(tmp_path: Path, keys: str) -> None:
    text = f"auth: [{{kind: keys, principals: [{{name: a, keys: {keys}}}]}}]"
    (problem,) = problems(tmp_path, text)
    assert "{sha256: HASH} as `commutator key NAME` prints it" in problem
    assert "cmt-abc" not in problem


@pytest.mark.parametrize(
    "frontend",
    [
        "{port: 9000, admin: {port: 9000}}",
        "{admin: {port: 8000}}",
        "{host: 0.0.0.0, port: 9000, admin: {port: 9000}}",
        "{host: 10.0.0.1, port: 9000, admin: {host: '::', port: 9000}}",
    ],
)
def test_operators_and_clients_cannot_share_an_address(tmp_path: Path, frontend: str) -> None:
    (problem,) = problems(tmp_path, f"frontend: {frontend}")
    assert problem.startswith("frontend.admin.port: ")
    assert "choose another" in problem


def test_the_same_port_at_different_addresses_is_fine(tmp_path: Path) -> None:
    text = "frontend: {host: 10.0.0.1, port: 9000, admin: {host: 127.0.0.1, port: 9000}}"
    assert warnings(tmp_path, text) == []


def test_a_blocked_plugin_that_is_not_installed_is_warned_of(tmp_path: Path) -> None:
    (warning,) = warnings(tmp_path, "plugins: {block: [sglangg, vllm]}")
    assert warning.startswith(
        'plugins.block[0]: no plugin "sglangg" is installed; installed: anthropic, balance, '
    )


def test_a_principal_whose_requests_cannot_succeed_is_warned_of(tmp_path: Path) -> None:
    keys = f"[{{sha256: {HASH}, expires: '2026-05-31'}}]"
    text = f"auth: [{{kind: keys, principals: [{{name: a, models: [m, llama], keys: {keys}}}]}}]"
    assert warnings(tmp_path, text) == [
        'auth[0].principals[0] (a): models: no model is named "llama"; known models: m',
        "auth[0].principals[0] (a): keys: 7c9e03a9... expired on 2026-05-31; remove it",
    ]
    later = text.replace("2026-05-31", "2026-06-02").replace("[m, llama]", "[m]")
    assert warnings(tmp_path, later) == []


def test_disaggregation_without_prefill_workers_is_warned_of(tmp_path: Path) -> None:
    (warning,) = warnings(tmp_path, "disaggregation: {kind: always}")
    assert warning.startswith("disaggregation: without effect, as no engine has the role prefill")
    both = "{kind: sim, name: p, role: prefill}, {kind: sim, name: d}"
    sets = [f"engines=[{both}]"]
    assert warnings(tmp_path, "disaggregation: {kind: always}", sets) == []
