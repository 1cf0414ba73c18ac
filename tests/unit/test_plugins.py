"""The plugin host: what it takes, what it refuses, and whom it blames."""

from __future__ import annotations

import inspect
import json
import os
import subprocess
import sys
import types
from collections.abc import Callable
from importlib import metadata
from importlib.metadata import EntryPoint
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from packaging.specifiers import SpecifierSet

import commutator
from commutator import plugins
from commutator.contract import CONTRACT_VERSION, changes_since
from commutator.contract.engine import EngineConfig
from commutator.contract.observer import OBSERVING_HOOKS, AnsweredRequest, Observer
from commutator.contract.routing import RouterConfig, RoutingPolicy, Scorer
from commutator.contract.worker import EngineInfo, WorkerRecord
from commutator.errors import PluginError
from commutator.hookspecs import hookimpl
from commutator.plugins import Installed, PluginHost, load_plugins

WORKER = WorkerRecord(
    worker_id="w-0",
    engine="w",
    kind="fake",
    model="m",
    address="127.0.0.1:1",
    info=EngineInfo(
        kind="fake", version="1", model="m", max_model_len=1, block_size=1, kv_capacity_blocks=1
    ),
)


def module(**functions: Callable[..., Any]) -> types.ModuleType:
    plugin = types.ModuleType("plugin")
    for name, function in functions.items():
        setattr(plugin, name, hookimpl(function))
    return plugin


def add(host: PluginHost, plugin: object, name: str = "mine") -> Installed:
    installed = Installed(name, f"dist-{name}", "1.0")
    host.add(plugin, installed)
    return installed


def router_register(register: Any) -> None:
    register("turns", RouterConfig, lambda config: RoutingPolicy, stability="beta")


def test_registered_kinds_and_hooks_are_listed() -> None:
    host = PluginHost()
    installed = add(host, module(router_register=router_register))
    assert [str(kind) for kind in installed.kinds] == ["router turns (beta)"]
    assert installed.hooks == ("router_register",)
    assert host.routers.kinds["turns"].origin.distribution == "dist-mine"


def refused(plugin: object, host: PluginHost | None = None) -> str:
    with pytest.raises(PluginError) as caught:
        add(host or PluginHost(), plugin)
    assert caught.value.distribution == "dist-mine"
    return str(caught.value)


def test_a_class_where_an_instance_is_meant() -> None:
    class Plugin:
        pass

    assert "names the class Plugin" in refused(Plugin)

    def engine_register(register: Any) -> None:
        register("x", EngineConfig, Plugin)

    text = refused(module(engine_register=engine_register))
    assert 'engine "x": expected an instance, got the class Plugin: write Plugin()' in text


def test_a_connector_of_the_wrong_type() -> None:
    def engine_register(register: Any) -> None:
        register("x", EngineConfig, object())

    text = refused(module(engine_register=engine_register))
    assert "expected an EngineConnector, got object" in text


def test_a_config_class_of_the_wrong_family() -> None:
    def router(register: Any) -> None:
        register("x", EngineConfig, lambda config: None)

    assert "must subclass RouterConfig" in refused(module(router_register=router))


def test_an_unknown_hook_name() -> None:
    text = refused(module(worker_upp=lambda worker: None))
    assert 'unknown hook worker_upp; did you mean "worker_up"?' in text
    text = refused(module(tier_registered=lambda register: None))
    assert 'unknown hook tier_registered; did you mean "tier_register"?' in text


def test_a_hook_with_a_wrong_argument() -> None:
    def worker_up(wroker: Any) -> None:
        pass

    text = refused(module(worker_up=worker_up))
    assert "worker_up" in text
    assert "wroker" in text


def test_a_stage_that_is_not_finished() -> None:
    class Half(Scorer):
        pass

    def stage(register: Any) -> None:
        register("half", Half)

    text = refused(module(route_stage_register=stage))
    assert 'stage "half": Half does not define score' in text


def test_commands_have_a_module_of_their_own() -> None:
    def command_register(register: Any) -> None:
        register("hello", "Greet the user.", lambda: None)

    assert "belongs into a module of its own" in refused(module(command_register=command_register))


def test_a_hook_wrapper_is_refused() -> None:
    plugin = types.ModuleType("plugin")
    plugin.worker_up = hookimpl(lambda worker: (yield), wrapper=True)  # type: ignore[attr-defined]
    assert "worker_up: hooks have no wrappers" in refused(plugin)


def test_a_plugin_that_raises_while_registering_leaves_nothing_behind() -> None:
    seen: list[WorkerRecord] = []

    def bad(register: Any) -> None:
        router_register(register)
        raise KeyError("no such table")

    def watch(worker: WorkerRecord) -> None:
        seen.append(worker)

    host = PluginHost()
    text = refused(module(router_register=bad, worker_up=watch), host)
    assert "dist-mine: router_register raised KeyError: 'no such table'" in text
    assert not host.routers.kinds
    host.worker_up(WORKER)
    assert seen == []
    assert add(host, module(router_register=router_register)).kinds


def test_a_duplicate_kind_names_both_distributions() -> None:
    host = PluginHost()
    add(host, module(router_register=router_register), "first")
    text = refused(module(router_register=router_register), host)
    assert "dist-mine" in text
    assert "already registered by dist-first" in text


def test_an_unknown_stability() -> None:
    def router(register: Any) -> None:
        register("x", RouterConfig, lambda config: None, stability="solid")

    assert "alpha, beta, stable" in refused(module(router_register=router))


@pytest.mark.security
@pytest.mark.parametrize("bad_first", [True, False])
def test_every_plugin_is_called_even_when_one_raises(
    caplog: pytest.LogCaptureFixture, bad_first: bool
) -> None:
    seen: list[str] = []

    def good(worker: WorkerRecord, reason: str) -> None:
        seen.append(f"{worker.worker_id} {reason}")

    def bad(reason: str) -> None:
        raise RuntimeError(reason)

    host = PluginHost()
    plugins = {"good": module(worker_down=good), "bad": module(worker_down=bad)}
    for name in sorted(plugins, reverse=not bad_first):
        add(host, plugins[name], name)
    host.worker_down(WORKER, "stopped")
    assert seen == ["w-0 stopped"]
    assert "plugin bad failed in worker_down" in caplog.text
    assert "plugin good" not in caplog.text


ANSWERED = AnsweredRequest(
    request_id="r", principal=None, peer=None, method="POST", path="/", model="m", status=200,
    reason=None, workers=(), prompt_tokens=2, cached_tokens=0, generated_tokens=1, duration_s=0.1,
)  # fmt: skip


def test_every_observing_hook_reaches_plugins_and_observers_with_its_arguments() -> None:
    """The host and ``Observer`` name the same arguments."""
    seen: list[tuple[str, str, dict[str, Any]]] = []

    def recording(who: str, hook: str) -> Callable[..., None]:
        signature = inspect.signature(getattr(Observer(), hook))
        source = f"lambda {', '.join(signature.parameters)}: note({who!r}, {hook!r}, locals())"
        function: Callable[..., None] = eval(source, {"note": note})
        return function

    def note(who: str, hook: str, arguments: dict[str, Any]) -> None:
        seen.append((who, hook, arguments))

    host = PluginHost()
    add(host, module(**{hook: recording("plugin", hook) for hook in OBSERVING_HOOKS}))
    methods = {hook: staticmethod(recording("observer", hook)) for hook in OBSERVING_HOOKS}
    host.add_observer("watcher", type("Watcher", (Observer,), methods)())
    for hook in OBSERVING_HOOKS:
        given: dict[str, object] = {
            name: object() for name in inspect.signature(getattr(host, hook)).parameters
        }
        if hook == "request_answered":
            given["answered"] = ANSWERED
        getattr(host, hook)(**given)
        assert seen[-2:] == [("plugin", hook, given), ("observer", hook, given)]


def test_an_observer_that_was_removed_hears_nothing_and_costs_nothing() -> None:
    seen: list[str] = []

    class Watcher(Observer):
        def __init__(self, name: str) -> None:
            self.name = name

        def worker_up(self, worker: WorkerRecord) -> None:
            seen.append(self.name)

    host = PluginHost()
    watchers = [Watcher("first"), Watcher("second")]
    for one in watchers:
        host.add_observer(one.name, one)
    host.worker_up(WORKER)
    host.remove_observer(watchers[0])
    host.worker_up(WORKER)
    assert seen == ["first", "second", "second"]
    host.remove_observer(watchers[1])
    assert "worker_up" not in host._listeners  # a call of the hook looks no further
    host.worker_up(WORKER)
    assert seen == ["first", "second", "second"]


async def test_an_observer_is_started_and_stopped_and_may_fail(
    caplog: pytest.LogCaptureFixture,
) -> None:
    seen: list[str] = []

    class Watcher(Observer):
        def __init__(self, name: str) -> None:
            self.name = name

        async def start(self) -> None:
            seen.append(f"{self.name} starts")

        async def stop(self) -> None:
            seen.append(f"{self.name} stops")
            raise RuntimeError("disk full")

    host = PluginHost()
    host.add_observer("first", Watcher("first"))
    host.add_observer("second", Watcher("second"))
    await host.start()
    await host.stop()
    assert seen == ["first starts", "second starts", "second stops", "first stops"]
    assert "observer first failed to stop" in caplog.text


def test_plugins_are_loaded_blocked_and_skipped(caplog: pytest.LogCaptureFixture) -> None:
    found = [
        EntryPoint("good", "commutator_round_robin", "commutator"),
        EntryPoint("unwanted", "commutator_round_robin", "commutator"),
        EntryPoint("broken", "no_such_module", "commutator"),
    ]
    host = load_plugins(block=["unwanted"], found=found)
    by_name = {plugin.name: plugin for plugin in host.installed}
    assert by_name["good"].problem is None
    assert by_name["unwanted"].problem == "blocked"
    assert by_name["broken"].problem is not None
    assert "cannot be imported: ModuleNotFoundError" in by_name["broken"].problem
    assert "no_such_module" in caplog.text
    assert set(host.routers.kinds) == {"round_robin"}


def test_hook_calls_can_be_traced(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COMMUTATOR_TRACE_HOOKS", "1")
    host = PluginHost()
    add(host, module(worker_up=lambda worker: None), "watcher")
    host.worker_up(WORKER)
    trace = capsys.readouterr().err
    assert "watcher: worker_up(worker=WorkerRecord(worker_id='w-0'" in trace


@pytest.mark.slow
def test_a_plugin_built_for_another_contract_is_refused_with_both_versions(tmp_path: Path) -> None:
    """Three distributions, really built and installed: for an older, this and a newer contract."""
    major, minor = CONTRACT_VERSION
    older, fitting, newer = (
        f">={major}.{number},<{major}.{number + 1}" for number in (minor - 1, minor, minor + 1)
    )
    builds = {"older": older, "fitting": fitting, "newer": newer}
    for name, wanted in builds.items():
        folder = tmp_path / name
        (folder / f"plugin_{name}").mkdir(parents=True)
        (folder / f"plugin_{name}" / "__init__.py").write_text(
            "from commutator import RouterConfig, hookimpl\n"
            "@hookimpl\n"
            "def router_register(register):\n"
            f"    register({name!r}, RouterConfig, print)\n"
        )
        (folder / "pyproject.toml").write_text(
            "[build-system]\nrequires = ['hatchling']\nbuild-backend = 'hatchling.build'\n"
            f"[project]\nname = 'plugin-{name}'\nversion = '7.0'\n"
            f"dependencies = ['commutator{wanted}']\n"
            f"[project.entry-points.commutator]\n{name} = 'plugin_{name}'\n"
        )
    subprocess.run(
        [
            sys.executable, "-m", "pip", "install", "-q", "--no-index", "--no-deps",
            "--no-build-isolation", "--disable-pip-version-check",
            "--target", str(tmp_path / "site"),
            *(str(tmp_path / name) for name in builds),
        ],
        check=True,
    )  # fmt: skip
    done = subprocess.run(
        [sys.executable, "-m", "commutator", "plugins", "--json"],
        capture_output=True, text=True, check=True,
        env={**os.environ, "PYTHONPATH": str(tmp_path / "site")},
    )  # fmt: skip
    problems = {plugin["name"]: plugin["problem"] for plugin in json.loads(done.stdout)}
    ours = f"{'.'.join(map(str, CONTRACT_VERSION))}, that of commutator {commutator.__version__}"
    assert problems["fitting"] is None
    changed = changes_since((major, minor - 1), CONTRACT_VERSION)
    assert problems["older"] == (
        f"built for an older contract (commutator {SpecifierSet(older)}) than {ours}; upgrade "
        "plugin-older" + (f"; what changed since: {changed}" if changed else "")
    )
    assert problems["newer"] == (
        f"built for a newer contract (commutator {SpecifierSet(newer)}) than {ours}; upgrade "
        "commutator"
    )


@pytest.mark.parametrize(
    ("ours", "wanted", "changed"),
    [
        ("0.2.0", ">=0.1,<0.2", "; what changed since: 0.2: requests ask by typed fields"),
        ("0.2.7", ">=0.1.4,<0.2", "; what changed since: 0.2: requests ask by typed fields"),
        ("0.2.0", ">=0.0.3,<0.1", "; what changed since: 0.2: requests ask by typed fields"),
        ("0.3.0", ">=0.2,<0.3", ""),
        ("0.2.0", ">=0.3,<0.4", ""),
        ("0.2.0", ">=0.2,<0.3", None),
        ("0.2.0", "", None),
    ],
)
def test_a_wheel_of_an_older_contract_learns_what_changed_in_a_line(
    monkeypatch: pytest.MonkeyPatch, ours: str, wanted: str, changed: str | None
) -> None:
    """It needs no more than the numbers: those of the version are the contract's."""
    monkeypatch.setattr(plugins, "__version__", ours)
    monkeypatch.setattr(plugins, "CONTRACT_VERSION", tuple(map(int, ours.split(".")[:2])))
    dist = cast(metadata.Distribution, SimpleNamespace(requires=[f"commutator{wanted}"]))
    installed = Installed("mine", "dist-mine", "7.0")
    if changed is None:
        plugins.check_contract(dist, installed)
        return
    with pytest.raises(PluginError) as caught:
        plugins.check_contract(dist, installed)
    text = str(caught.value)
    assert "\n" not in text
    assert changed in text
    assert ("what changed" in text) == bool(changed)


def test_the_contract_version_begins_the_version() -> None:
    numbers = commutator.__version__.split(".")[: len(CONTRACT_VERSION)]
    assert tuple(map(int, numbers)) == CONTRACT_VERSION
    assert metadata.version("commutator") == commutator.__version__
