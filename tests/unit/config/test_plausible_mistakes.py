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
from commutator.contract.settings import Secret
from commutator.errors import ConfigError
from commutator_http.config import key_problems

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
    (warning,) = warnings(tmp_path, text)
    assert "no key is asked for" in warning


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


def test_keys_of_the_author_are_ignored_at_any_depth(tmp_path: Path) -> None:
    text = "x-base: &base {name: b, x-note: 3}\nrouter: {kind: kv, x-why: [1]}\n"
    text += MINIMAL.replace("{kind: sim}", "{kind: sim, <<: *base}")
    (tmp_path / "c.yaml").write_text(text)
    config = load_config([tmp_path / "c.yaml"], environ={}).config
    assert config.engines[0].name == "b"
    (tmp_path / "d.yaml").write_text(MINIMAL + "xbase: {}")
    with pytest.raises(ConfigError, match="xbase: unknown key"):
        load_config([tmp_path / "d.yaml"], environ={})


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("port: 80", "port: unknown key; it belongs to `frontend`"),
        (
            "cluster: {host: {insecure: true}}",
            "cluster.host.insecure: unknown key; it belongs to `cluster`",
        ),
        (
            "router: {kind: round_robin, overlap_score_weight: 1}",
            "router.overlap_score_weight: unknown key; it is an option of the kind kv",
        ),
    ],
)
def test_an_option_in_the_wrong_place_is_told_the_right_one(
    tmp_path: Path, text: str, expected: str
) -> None:
    assert expected in problems(tmp_path, text)


def test_arguments_of_servers_are_told_where_they_belong(tmp_path: Path) -> None:
    (tmp_path / "c.yaml").write_text(MINIMAL.replace("sim", "sim, tensor_parallel_size: 2"))
    with pytest.raises(ConfigError, match=r"belongs to `args` of sglang, trtllm, vllm"):
        load_config([tmp_path / "c.yaml"], environ={})


def test_a_server_that_runs_already_is_one_worker(tmp_path: Path) -> None:
    text = MINIMAL.replace("sim", 'vllm, url: "http://127.0.0.1:1", replicas: 2')
    (tmp_path / "c.yaml").write_text(text)
    with pytest.raises(ConfigError, match=r"engines\[0\].replicas: a server at a `url` is one"):
        load_config([tmp_path / "c.yaml"], environ={})


@pytest.mark.parametrize("value", ["${DIR}/kv", "$DIR/kv", "/a/$DIR", "${DIR:-x}"])
def test_variables_of_a_shell_are_refused_with_what_to_set(tmp_path: Path, value: str) -> None:
    (problem,) = problems(tmp_path, f'runtime: {{state_dir: "{value}"}}')
    assert problem.startswith("runtime.state_dir: $")
    assert "COMMUTATOR__RUNTIME__STATE_DIR" in problem
    environ = {"COMMUTATOR__RUNTIME__STATE_DIR": str(tmp_path)}
    assert load_config([tmp_path / "c.yaml"], environ=environ).config.runtime.state_dir


def test_a_dollar_that_is_no_variable_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "c.yaml").write_text(MINIMAL + 'runtime: {state_dir: "/tmp/$5-a$b"}')
    assert load_config([tmp_path / "c.yaml"], environ={}).config.runtime.state_dir


def test_escaped_pairs_are_one_character_in_yaml_and_json(tmp_path: Path) -> None:
    name = r'"a \ud83d\ude42"'
    (tmp_path / "c.yaml").write_text(MINIMAL.replace("name: m", f"name: {name}"))
    models = f'[{{"name": {name}, "source": "package:m"}}]'
    body = f'{{"models": {models}, "engines": [{{"kind": "sim"}}]}}'
    (tmp_path / "c.json").write_text(body)
    for file in ("c.yaml", "c.json"):
        assert load_config([tmp_path / file], environ={}).config.models[0].name == "a 🙂"
    for file in ("c.yaml", "c.json"):
        text = (tmp_path / file).read_text().replace(r"\ude42", "")
        (tmp_path / file).write_text(text)
        with pytest.raises(ConfigError, match="half of a character"):
            load_config([tmp_path / file], environ={})


def test_models_without_an_engine_are_warned_of(tmp_path: Path) -> None:
    text = MINIMAL.replace("}]", "}, {name: n, source: package:m}]", 1).replace(
        "kind: sim", "kind: sim, model: m"
    )
    (tmp_path / "c.yaml").write_text(text)
    loaded = load_config([tmp_path / "c.yaml"], environ={})
    (warning,) = warnings_of(loaded.config, loaded.host)
    assert warning.startswith("models[1] (n): no entry of `engines` serves it, so its requests")
    loaded = load_config(
        [tmp_path / "c.yaml"], sets=["cluster={host: {listen: 10.0.0.1}, insecure: true}",
                                     "registry.address=10.0.0.1:4000"], environ={}
    )  # fmt: skip
    assert list(warnings_of(loaded.config, loaded.host)) == []


@pytest.mark.parametrize(
    ("frontend", "count"),
    [
        ("{host: 0.0.0.0}", 1),
        ('{host: "::"}', 1),
        ("{host: localhost}", 0),
        ("{host: 127.0.0.2}", 0),
        ("{host: 0.0.0.0, api_keys: [{env: K}]}", 0),
        ("{admin: {host: 10.0.0.1, port: 9000}}", 1),
    ],
)
def test_doors_that_let_everybody_in_are_warned_of(
    tmp_path: Path, frontend: str, count: int
) -> None:
    found = warnings(tmp_path, f"frontend: {frontend}")
    assert len([line for line in found if "no key is asked for" in line]) == count


def test_a_newline_after_a_secret_is_cut_in_variables_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("K", "abc\r\n")
    assert Secret(env="K").reveal() == "abc"


@pytest.mark.parametrize("key", [" abc", "abc\t", "a\nb", "a\x00b"[:1] + "\x7f"])
def test_keys_that_no_header_can_hold_are_refused(key: str, tmp_path: Path) -> None:
    (tmp_path / "key").write_text(key)
    (problem,) = key_problems([Secret(file=str(tmp_path / "key"))])
    assert problem.startswith("api_keys[0]: file ")
    (tmp_path / "key").write_text("Schlüssel mit Leerzeichen\n")
    assert not list(key_problems([Secret(file=str(tmp_path / "key"))]))
