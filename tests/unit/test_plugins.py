"""The plugin host: what it takes, what it refuses, and whom it blames."""

from __future__ import annotations

import types
from collections.abc import Callable
from importlib.metadata import EntryPoint
from typing import Any

import pytest

from commutator import EngineConfig, RouterConfig, RoutingPolicy, Scorer, hookimpl
from commutator.errors import PluginError
from commutator.plugins import Installed, Offer, PluginHost, load_plugins
from commutator.types import EngineInfo, WorkerRecord

WORKER = WorkerRecord("w-0", "w", "fake", "m", "127.0.0.1:1", EngineInfo("fake", "1", "m", 1, 1, 1))


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
    assert installed.kinds == [Offer("router", "turns", "beta")]
    assert installed.hooks == ("router_register",)
    assert host.routers.kinds["turns"].distribution == "dist-mine"


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
    assert "unknown hook worker_upp" in refused(module(worker_upp=lambda worker: None))


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


def test_observers_are_called_and_cannot_do_harm(caplog: pytest.LogCaptureFixture) -> None:
    seen: list[str] = []

    def worker_up(worker: WorkerRecord) -> None:
        seen.append(worker.worker_id)

    def worker_down(reason: str) -> None:
        raise RuntimeError(reason)

    host = PluginHost()
    add(host, module(worker_up=worker_up, worker_down=worker_down))
    host.worker_up(WORKER)
    host.worker_down(WORKER, "stopped")
    assert seen == ["w-0"]
    assert "a plugin failed in worker_down" in caplog.text


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
    assert "hook worker_up(worker=WorkerRecord(worker_id='w-0'" in trace
    assert "hook worker_up answered by watcher: []" in trace
