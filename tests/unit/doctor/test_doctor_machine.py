"""Faults planted into the facts of a machine; GPUs, RDMA devices and hosts are stand-ins."""

from __future__ import annotations

from typing import Any

import pytest
from attrs import evolve

from commutator_doctor.facts import (
    Certificate,
    Clock,
    Disk,
    Engine,
    Gpu,
    Gpus,
    Interface,
    Limits,
    Machine,
    Memory,
    Nixl,
    Peer,
    Port,
)
from commutator_doctor.findings import Severity, exit_code
from commutator_doctor.machine import MACHINE

GB = 1 << 30
GPU = Gpu(
    index=0,
    name="H100",
    driver="570.86.10",
    total_bytes=80 * GB,
    used_bytes=GB,
    temperature_c=60,
    uncorrected_errors=0,
    link_width=16,
    link_width_max=16,
    fabric="Completed",
)
SERVERS = Engine(
    option="engines[0]",
    kind="vllm",
    version="0.32.0",
    workers=2,
    gpus_each=4,
    needs_shared_memory=True,
)
HEALTHY = Machine(
    gpus=Gpus(found=tuple(evolve(GPU, index=index) for index in range(8)), device_files=8),
    interfaces=(
        Interface(name="lo"),
        Interface(name="eth0"),
        Interface(name="mlx5_0", rdma=True),
    ),
    nixl=Nixl(version="1.5.1", needed_by=("tiers[0]",), devices="mlx5_0:1,eth0", peer_memory=True),
    engines=(SERVERS, Engine(option="engines[1]", kind="sim")),
    ports=(Port(option="frontend.port", host="0.0.0.0", port=8000),),
    disks=(
        Disk(
            option="tiers[1].path",
            path="/kv",
            kind="nvme",
            wanted_bytes=100 * GB,
            write_bytes_per_s=2e9,
        ),
    ),
    certificates=(Certificate(option="frontend.tls.cert_file", path="c.pem", days_left=60),),
    peers=(Peer(option="registry.endpoints[0]", address="10.0.0.2:2379", connect_s=0.001),),
    clock=Clock(error_s=0.01, against_deployment_s=0.4),
    torch="2.9.0+cu128",
    pinned_bytes=16 * GB,
    spans_hosts=True,
    versions=(("commutator", "0.2.0"), ("commutator-sim", "0.2.0")),
)
DISK, PEER, PORT = HEALTHY.disks[0], HEALTHY.peers[0], HEALTHY.ports[0]
REFERENCE = Engine(option="engines[0]", kind="reference")


def gpu(**changed: Any) -> dict[str, Any]:
    """One of eight GPUs changed."""
    others = HEALTHY.gpus.found[1:]
    return {"gpus": evolve(HEALTHY.gpus, found=(evolve(GPU, **changed), *others))}


def nixl(**changed: Any) -> dict[str, Any]:
    return {"nixl": evolve(HEALTHY.nixl, **changed)}


def engine(**changed: Any) -> dict[str, Any]:
    return {"engines": (evolve(SERVERS, **changed),)}


def disk(**changed: Any) -> dict[str, Any]:
    return {"disks": (evolve(DISK, **changed),)}


FAULTS: list[tuple[str, dict[str, Any], str]] = [
    ("config-invalid", {"config_problems": ("models[0].source: no such file",)}, "models[0]"),
    ("config-warning", {"config_warnings": ("limiter: nobody is asked",)}, "limiter"),
    ("python-old", {"python": "3.9.18"}, "3.9.18"),
    (
        "versions-mixed",
        {"versions": (("commutator", "0.2.0"), ("commutator-sim", "0.1.0"))},
        "commutator-sim 0.1.0",
    ),
    ("plugin-broken", {"broken_plugins": ("steam (steam): ImportError",)}, "steam"),
    ("open-files-low", {"limits": Limits(open_files=1024)}, "1024"),
    ("locked-memory-low", {"limits": Limits(locked_bytes=8 << 20)}, "mlx5_0"),
    ("memory-short", {"pinned_bytes": 100 * GB}, "107.4 GB"),
    (
        "memory-short",
        {"memory": Memory(cgroup_limit=8 * GB)},
        "8.59 GB",
    ),
    ("memory-low", {"memory": Memory(available=2 * GB)}, "3%"),
    ("swapping", {"memory": Memory(swap_used=20 * GB)}, "21.5 GB"),
    ("shared-memory-small", {"memory": Memory(shared_total=64 << 20)}, "67.11 MB"),
    ("shared-memory-small", {"memory": Memory(shared_total=None)}, "/dev/shm"),
    ("cpu-busy", {"load": 50.0}, "50.0"),
    ("cores-few", {"cores": 4}, "8 processes"),
    (
        "gpu-driver-silent",
        {"gpus": Gpus(device_files=8, problem="Driver/library version mismatch")},
        "mismatch",
    ),
    ("gpu-too-few", engine(workers=3), "12 GPUs needed (engines[0] 3 x 4), 8 here"),
    ("gpu-driver-old", gpu(driver="470.82.01"), "470.82.01"),
    ("gpu-memory-taken", gpu(used_bytes=60 * GB), "64.4 of 85.9 GB"),
    ("gpu-memory-errors", gpu(uncorrected_errors=3), "3 uncorrected"),
    (
        "gpu-kernel-errors",
        {"gpus": evolve(HEALTHY.gpus, kernel_errors=("NVRM: Xid (PCI:0): 79, fell off",))},
        "79",
    ),
    ("gpu-slowed", gpu(slowed_by=("heat",), temperature_c=91), "heat at 91"),
    ("gpu-slowed", gpu(temperature_c=90), "90 °C"),
    ("gpu-link-narrow", gpu(link_width=8), "x8 of x16"),
    ("gpu-mig", gpu(mig=True), "engines[0]"),
    ("gpu-fabric-down", gpu(fabric="In Progress"), "In Progress"),
    ("gpu-mixed", gpu(name="A100"), "A100, H100"),
    (
        "torch-without-cuda",
        {"torch": "2.9.0+cpu", "engines": (REFERENCE,)},
        "2.9.0+cpu, 8 GPUs",
    ),
    ("gpu-untested", {"gpus": evolve(HEALTHY.gpus, others=("/dev/kfd",))}, "/dev/kfd"),
    ("nixl-missing", nixl(version=None), "not installed"),
    ("nixl-missing", nixl(problem="libucp.so.0: no such file"), "libucp"),
    ("ucx-transports", nixl(transports="cuda_copy"), "UCX_TLS=cuda_copy"),
    ("kv-interface-missing", nixl(devices="ib7"), "ib7 is not here"),
    (
        "kv-interface-missing",
        {"interfaces": (Interface(name="eth0", up=False), Interface(name="mlx5_0"))},
        "eth0 is down",
    ),
    ("gpu-direct-off", nixl(peer_memory=False), "mlx5_0 beside 8 GPUs"),
    ("engine-missing", engine(problem="/x/python: no such file"), "/x/python"),
    ("engine-untested", engine(version="0.31.0"), "tested: 0.32.0"),
    (
        "port-taken",
        {"ports": (evolve(PORT, problem="address in use", holder="nginx (pid 7)"),)},
        "address in use by nginx (pid 7)",
    ),
    (
        "deployment-runs",
        {"ports": (evolve(PORT, problem="address in use", deployment=True),)},
        "a front door answers",
    ),
    ("peer-unreachable", {"peers": (evolve(PEER, problem="timed out"),)}, "10.0.0.2:2379"),
    ("peer-far", {"peers": (evolve(PEER, connect_s=0.12),)}, "120 ms"),
    (
        "certificate-expires",
        {"certificates": (Certificate(option="o", path="c.pem", days_left=-3),)},
        "expired 3 days ago",
    ),
    (
        "certificate-expires",
        {"certificates": (Certificate(option="o", path="c.pem", problem="no such file"),)},
        "no such file",
    ),
    ("disk-not-writable", disk(writable=False), "/kv cannot be written"),
    ("disk-full", disk(free_bytes=GB), "107.4 GB wanted, 1.074 GB free"),
    ("disk-in-memory", disk(file_system="tmpfs"), "tmpfs"),
    ("disk-over-network", disk(file_system="nfs4"), "nfs4"),
    ("disk-no-direct-io", disk(direct_io=False), "O_DIRECT"),
    ("disk-slow", disk(write_bytes_per_s=40e6), "40 MB/s"),
    ("disk-slow", disk(rotates=True), "a disk that rotates"),
    ("clock-unsynchronized", {"clock": Clock(synchronized=False)}, "not synchronized"),
    ("clock-unsynchronized", {"clock": Clock(error_s=16.0)}, "16.0 s"),
    ("clock-differs", {"clock": Clock(against_deployment_s=-40.0)}, "40 s behind"),
]


def test_a_healthy_machine_has_no_finding() -> None:
    assert MACHINE.findings(HEALTHY) == []
    assert MACHINE.findings(Machine()) == []


@pytest.mark.parametrize(
    ("code", "changed", "part"), FAULTS, ids=[f"{code}-{n}" for n, (code, *_) in enumerate(FAULTS)]
)
def test_a_planted_fault_is_found_and_nothing_else(
    code: str, changed: dict[str, Any], part: str
) -> None:
    found = MACHINE.findings(evolve(HEALTHY, **changed))
    assert {one.code for one in found} == {code}
    assert part in found[0].text
    assert found[0].remedy


def test_every_check_has_its_planted_fault() -> None:
    codes = [one.code for one in MACHINE.checks]
    assert sorted(set(codes)) == sorted({code for code, *_ in FAULTS})
    assert len(codes) == len(set(codes)) >= 25


@pytest.mark.parametrize(
    ("changed", "code"),
    [({}, 0), (nixl(peer_memory=False), 0), ({"load": 50.0}, 3), ({"python": "3.9"}, 1)],
)
def test_the_exit_code_is_that_of_the_worst_finding(changed: dict[str, Any], code: int) -> None:
    assert exit_code(MACHINE.findings(evolve(HEALTHY, **changed))) == code


def test_of_a_running_deployment_gpu_memory_is_in_use() -> None:
    busy = evolve(HEALTHY, idle=False, **gpu(used_bytes=70 * GB))
    assert MACHINE.findings(busy) == []


def test_one_host_needs_no_clock() -> None:
    alone = evolve(HEALTHY, spans_hosts=False, clock=Clock(synchronized=False))
    assert MACHINE.findings(alone) == []


def test_notes_are_no_faults() -> None:
    notes = {one.code for one in MACHINE.checks if one.severity is Severity.NOTE}
    assert notes == {"gpu-untested", "gpu-direct-off", "engine-untested", "deployment-runs"}
