"""Values that are what they look like, and values that could never work."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from commutator.config.load import Loaded, load_config
from commutator.errors import ConfigError
from commutator_http.config import HttpConfig

MINIMAL = """
models: [{name: m, source: package:m}]
engines: [{kind: sim}]
"""


def load(tmp_path: Path, *texts: str, sets: Sequence[str] = ()) -> Loaded:
    files = [tmp_path / f"{number}.yaml" for number in range(len(texts))]
    for file, text in zip(files, texts, strict=True):
        file.write_text(text, encoding="utf-8")
    return load_config(files, sets=sets, environ={})


def problems(tmp_path: Path, *texts: str, sets: Sequence[str] = ()) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        load(tmp_path, *texts, sets=sets)
    return [line.replace(f"{tmp_path}/", "") for line in caught.value.problems]


def test_numbers_with_an_exponent_are_numbers(tmp_path: Path) -> None:
    text = "tracing: {endpoint: x, sample_ratio: 5e-5}\nruntime: {lease_s: 1e1}"
    config = load(tmp_path, MINIMAL, text, sets=["runtime.drain_timeout_s=1e2"]).config
    assert config.tracing is not None
    runtime = config.runtime
    told = (config.tracing.sample_ratio, runtime.lease_s, runtime.drain_timeout_s)
    assert told == (0.00005, 10.0, 100.0)


@pytest.mark.parametrize(("text", "shown"), [(".inf", "Infinity"), (".nan", "NaN")])
def test_numbers_are_finite(tmp_path: Path, text: str, shown: str) -> None:
    assert problems(tmp_path, MINIMAL, f"runtime: {{drain_timeout_s: {text}}}") == [
        (
            "1.yaml:1: runtime.drain_timeout_s: expected a number of at least 0, "
            f"got {shown}, which is not finite"
        )
    ]


@pytest.mark.parametrize(
    ("written", "meant"),
    [
        ("https://chat.example/", '"https://chat.example"'),
        ("https://chat.example/app?x", '"https://chat.example"'),
        ("chat.example", '"https://chat.example"'),
        ("chat.example:8080", '"https://chat.example:8080"'),
        ("HTTPS://Chat.Example", '"https://chat.example"'),
        ("https://chat.example:443", '"https://chat.example"'),
        ("https://bücher.example", '"https://xn--bcher-kva.example"'),
        ("https://user@chat.example", '"https://chat.example"'),
        ("https://*.example", 'it as "https://chat.example"'),
        ("https://", 'it as "https://chat.example"'),
        ("", 'it as "https://chat.example"'),
        ("http://[::1", 'it as "https://chat.example"'),
    ],
)
def test_what_no_browser_calls_an_origin_is_refused(
    tmp_path: Path, written: str, meant: str
) -> None:
    text = f"frontend:\n  cors_origins: ['{written}']"
    assert problems(tmp_path, MINIMAL, text) == [
        (
            f'1.yaml:2: frontend.cors_origins: "{written}" is no origin, so no page would ever '
            f"match: write {meant}"
        )
    ]


def test_origins_are_what_browsers_send(tmp_path: Path) -> None:
    origins = ["https://chat.example", "http://localhost:3000", "http://[::1]:80000", "*", "null"]
    origins += ["http://10.0.0.1", "capacitor://localhost", "chrome-extension://abcdef"]
    config = load(tmp_path, MINIMAL, f"frontend: {{cors_origins: {origins}}}").config
    assert isinstance(config.frontend.door, HttpConfig)
    assert list(config.frontend.door.cors_origins) == origins


@pytest.mark.parametrize("name", ["", "  "])
def test_a_model_needs_a_name(tmp_path: Path, name: str) -> None:
    (line,) = problems(tmp_path, MINIMAL, f"models: [{{name: '{name}', source: package:m}}]")
    assert line == "1.yaml:1: models[0].name: it is empty; give the name that clients ask for"


def test_absurd_numbers_of_processes_are_refused(tmp_path: Path) -> None:
    sets = ["engines[0].replicas=100000000", "frontend.replicas=5000"]
    assert problems(tmp_path, MINIMAL, sets=sets) == [
        (
            "engines[0].replicas: expected an integer from 1 to 10000, got 100000000 "
            "(from --set engines[0].replicas)"
        ),
        (
            "frontend.replicas: expected an integer from 1 to 1000, got 5000 "
            "(from --set frontend.replicas)"
        ),
    ]
