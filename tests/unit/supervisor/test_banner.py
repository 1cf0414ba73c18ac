"""What people see once everything is ready, and may paste."""

from __future__ import annotations

import json
import shlex

import pytest
from attrs import evolve
from tests.support.front_door import frontend_config

from commutator.auth.keys import KeysConfig
from commutator.config.model import Config
from commutator.contract.engine import EngineConfig, ModelConfig
from commutator.contract.settings import Secret
from commutator.plugins import load_plugins
from commutator.supervisor.supervisor import banner, front_door_address
from commutator_http.config import TlsConfig

HOST = load_plugins()


def make(**frontend: object) -> Config:
    return Config(
        models=(ModelConfig(name="it's a model", source="-"),),
        engines=(EngineConfig(kind="steam", name="north", model="it's a model", replicas=3),),
        frontend=frontend_config(**frontend),
    )


def shown(config: Config, *, colour: bool = False) -> str:
    return banner(config, front_door_address(config, HOST, 80), colour=colour)


@pytest.mark.parametrize(
    ("host", "url"),
    [
        ("127.0.0.1", "http://127.0.0.1:80"),
        ("0.0.0.0", "http://127.0.0.1:80"),
        ("::", "http://[::1]:80"),
        ("::1", "http://[::1]:80"),
        ("localhost", "http://localhost:80"),
        ("gpu-7.example", "http://gpu-7.example:80"),
    ],
)
def test_the_url_is_one_that_works_here(host: str, url: str) -> None:
    assert front_door_address(make(host=host), HOST, 80).url == url


def test_the_banner_names_everything_and_its_command_can_be_pasted() -> None:
    text = shown(make())
    assert "Ready: http://127.0.0.1:80/v1" in text
    row = next(line for line in text.splitlines() if "north" in line)
    assert row.split()[1:-1] == ["north", "steam", "it's", "a", "model", "3"]
    words = shlex.split(text.splitlines()[-1])
    assert words[:3] == ["curl", "-s", "http://127.0.0.1:80/v1/chat/completions"]
    assert json.loads(words[-1])["model"] == "it's a model"
    assert "\x1b" not in text


def test_where_principals_need_keys_the_banner_says_so() -> None:
    config = evolve(make(), auth=(KeysConfig(kind="keys"),))
    assert "Try it, and add the key of a principal, -H 'Authorization: Bearer KEY':" in shown(
        config
    )
    known = evolve(make(api_keys=(Secret(env="KEY"),)), auth=(KeysConfig(kind="keys"),))
    assert "\nTry it:\n" in shown(known)


def test_names_that_look_like_markup_stand_as_they_are() -> None:
    for name in ("a[/b]", "[bold]x", ":rocket:", "back\\"):
        config = Config(
            models=(ModelConfig(name=name, source="-"),),
            engines=(EngineConfig(kind="steam", name="north", model=name),),
            frontend=frontend_config(),
        )
        text = shown(config, colour=True)
        assert f" {name} " in text
        assert json.loads(shlex.split(text.splitlines()[-1])[-1])["model"] == name


def test_a_key_is_named_never_shown() -> None:
    config = make(api_keys=(Secret(env="PATH"),))
    assert '"Authorization: Bearer $PATH"' in shown(config)
    config = make(api_keys=(Secret(file="/run/my key"),))
    assert "Bearer $(cat '/run/my key')" in shown(config)


def test_tls_is_https() -> None:
    config = make(tls=TlsConfig(cert_file="c.pem", key_file="k.pem"))
    assert front_door_address(config, HOST, 443).url == "https://127.0.0.1:443"
    assert "--cacert c.pem" in shown(config)
