"""Checks of a machine."""

from __future__ import annotations

from collections.abc import Iterator

from commutator_doctor.facts import Gpu, Machine
from commutator_doctor.findings import Checks, Found, Severity

TESTED = {"vllm": "0.32.0", "sglang": "0.5.23"}
"""The engines' versions that the tests of this release ran with."""

_GB = 1e9
_FEW_FILES = 4096
_LITTLE_SHARED = 1 << 30
_HOT_C = 88
_OLD_DRIVER = 525
"""The first major version whose CUDA (12) engines of today are built for."""
_SLOW_DISK = 150e6
_NEAR_DAYS = 14
_LITTLE_AVAILABLE = 0.1
_SLOW_CONNECT_S = 0.05
_CLOCK_OFF_S = 5.0
_CLOCK_ERROR_S = 1.0
_LONG_QUEUE = 2.0
_TAKEN = 0.1
_OLDEST_PYTHON = (3, 11)
_IN_MEMORY = {"tmpfs", "ramfs"}
_OVER_NETWORK = {"nfs", "nfs4", "cifs", "fuse.sshfs", "9p", "ceph", "lustre", "glusterfs"}

MACHINE: Checks[Machine] = Checks("This machine")
_ERROR, _WARNING, _NOTE = Severity.ERROR, Severity.WARNING, Severity.NOTE


@MACHINE.add(
    "config-invalid",
    "configuration",
    _ERROR,
    means="The configuration has mistakes, or this machine lacks what it names.",
    remedy="Correct each line; `commutator config check FILE` says the same.",
)
def _config_invalid(machine: Machine) -> Iterator[Found]:
    yield from (Found(problem) for problem in machine.config_problems)


@MACHINE.add(
    "config-warning",
    "configuration",
    _WARNING,
    means="The configuration is valid, and something in it hardly does what its author means.",
    remedy="Change the option that the line names.",
)
def _config_warning(machine: Machine) -> Iterator[Found]:
    yield from (Found(warning) for warning in machine.config_warnings)


@MACHINE.add(
    "python-old",
    "software",
    _ERROR,
    means="Commutator needs Python 3.11 or later.",
    remedy="Make an environment with a newer Python, and install Commutator there.",
)
def _python_old(machine: Machine) -> Iterator[Found]:
    if tuple(map(int, machine.python.split(".")[:2])) < _OLDEST_PYTHON:
        yield Found(f"Python {machine.python}", {"version": machine.python})


@MACHINE.add(
    "versions-mixed",
    "software",
    _ERROR,
    means="Distributions of Commutator of different versions are installed together.",
    remedy="Install all of them in one version: `pip install -U commutator PLUGIN...`.",
)
def _versions_mixed(machine: Machine) -> Iterator[Found]:
    core = dict(machine.versions).get("commutator")
    others = [f"{name} {version}" for name, version in machine.versions if version != core]
    if core is not None and others:
        yield Found(f"commutator {core} beside {', '.join(others)}", {"others": len(others)})


@MACHINE.add(
    "plugin-broken",
    "software",
    _ERROR,
    means="An installed plugin cannot be loaded, so its kinds are unknown.",
    remedy="Reinstall or remove the plugin; `commutator plugins` shows the same.",
)
def _plugin_broken(machine: Machine) -> Iterator[Found]:
    yield from (Found(problem) for problem in machine.broken_plugins)


@MACHINE.add(
    "open-files-low",
    "limits",
    _WARNING,
    means="Each connection of a client takes a descriptor, as does each connection to a worker.",
    remedy="Raise the hard limit: `LimitNOFILE=1048576` in a systemd unit, `--ulimit "
    "nofile=1048576` for Docker, or /etc/security/limits.conf.",
)
def _open_files_low(machine: Machine) -> Iterator[Found]:
    most = machine.limits.open_files
    if most is not None and most < _FEW_FILES:
        yield Found(f"at most {most} open files for each process", {"limit": most})


@MACHINE.add(
    "locked-memory-low",
    "limits",
    _WARNING,
    means="RDMA devices are here, and transfers by RDMA pin the memory they read and write.",
    remedy="Set `LimitMEMLOCK=infinity` in a systemd unit, `--ulimit memlock=-1` for Docker.",
)
def _locked_memory_low(machine: Machine) -> Iterator[Found]:
    most = machine.limits.locked_bytes
    rdma = [one.name for one in machine.interfaces if one.rdma]
    if most is not None and rdma and machine.nixl.needed_by:
        text = f"at most {most / 1e6:.4g} MB of locked memory, beside {', '.join(rdma)}"
        yield Found(text, {"limit_bytes": most})


@MACHINE.add(
    "memory-short",
    "memory",
    _ERROR,
    means="Storage tiers in host memory are larger than the memory there is.",
    remedy="Lower `tiers[].capacity`, or run fewer workers on this machine. Each worker has the "
    "capacity for itself.",
)
def _memory_short(machine: Machine) -> Iterator[Found]:
    there = machine.memory.total
    if (limit := machine.memory.cgroup_limit) is not None:
        there = min(there, limit)
    if machine.pinned_bytes > there:
        text = (
            f"tiers of all workers take {machine.pinned_bytes / _GB:.4g} GB of host memory, and "
            f"there are {there / _GB:.4g} GB"
        )
        yield Found(text, {"wanted_bytes": machine.pinned_bytes, "there_bytes": there})


@MACHINE.add(
    "memory-low",
    "memory",
    _WARNING,
    means="Hardly any memory is left, so the kernel may kill a worker or swap.",
    remedy="End other programs, or give workers less: `tiers[].capacity`, `kv_cache_bytes`.",
)
def _memory_low(machine: Machine) -> Iterator[Found]:
    memory = machine.memory
    if memory.available < _LITTLE_AVAILABLE * memory.total:
        part = memory.available / memory.total
        text = f"{memory.available / _GB:.3g} of {memory.total / _GB:.3g} GB available"
        yield Found(f"{text} ({part:.0%})", {"available_bytes": memory.available})


@MACHINE.add(
    "swapping",
    "memory",
    _WARNING,
    means="Memory was moved to a swap device, from where it comes back slowly.",
    remedy="Use less memory, or turn swap off on machines that serve: `swapoff -a`.",
)
def _swapping(machine: Machine) -> Iterator[Found]:
    used = machine.memory.swap_used
    if used > _LITTLE_AVAILABLE * machine.memory.total:
        yield Found(f"{used / _GB:.3g} GB in swap", {"bytes": used})


@MACHINE.add(
    "shared-memory-small",
    "memory",
    _WARNING,
    means="Processes of one engine exchange data in /dev/shm; Docker gives containers 64 MB.",
    remedy="`docker run --ipc=host` or `--shm-size=16g`; in Kubernetes an emptyDir of medium "
    "Memory at /dev/shm.",
)
def _shared_memory_small(machine: Machine) -> Iterator[Found]:
    total = machine.memory.shared_total
    wanting = [one.option for one in machine.engines if one.needs_shared_memory]
    if not wanting:
        return
    if total is None:
        yield Found("there is no /dev/shm")
    elif min(total, machine.memory.shared_free) < _LITTLE_SHARED:
        free = machine.memory.shared_free
        text = f"shared memory of {total / 1e6:.4g} MB, {free / 1e6:.4g} MB free"
        yield Found(f"{text}, for {', '.join(wanting)}", {"bytes": total, "free_bytes": free})


@MACHINE.add(
    "cpu-busy",
    "cpu",
    _WARNING,
    means="More processes want to run than there are cores, so tokens come late.",
    remedy="End other programs, raise a container's CPU limit, or move front doors elsewhere.",
)
def _cpu_busy(machine: Machine) -> Iterator[Found]:
    if machine.load > _LONG_QUEUE * machine.cores:
        text = f"{machine.load:.1f} processes want to run on {machine.cores:g} cores"
        yield Found(text, {"load": machine.load, "cores": machine.cores})


@MACHINE.add(
    "cores-few",
    "cpu",
    _WARNING,
    means="Fewer cores than front doors and workers with GPUs need: about one for each.",
    remedy="Raise the container's CPU limit, or use fewer workers.",
)
def _cores_few(machine: Machine) -> Iterator[Found]:
    workers = sum(one.workers * max(1, one.gpus_each) for one in machine.engines if one.gpus_each)
    if workers and machine.cores < workers:
        text = f"{machine.cores:g} cores for {workers} processes with a GPU each"
        yield Found(text, {"cores": machine.cores, "processes": workers})


@MACHINE.add(
    "gpu-driver-silent",
    "gpu",
    _ERROR,
    means="The kernel has GPU devices, and the driver's tool cannot ask them.",
    remedy="Run `nvidia-smi`: a mismatch of driver and library ends with a reboot; in a container "
    "install NVIDIA's container toolkit and start with `--gpus all`.",
)
def _gpu_driver_silent(machine: Machine) -> Iterator[Found]:
    gpus = machine.gpus
    if gpus.device_files and gpus.problem is not None:
        yield Found(
            f"{gpus.device_files} devices, and nvidia-smi: {gpus.problem}",
            {"devices": gpus.device_files},
        )


@MACHINE.add(
    "gpu-too-few",
    "gpu",
    _ERROR,
    means="The entries of `engines` need more GPUs than this machine has.",
    remedy="Lower `replicas` or the tensor-parallel size, or run entries on different hosts.",
)
def _gpu_too_few(machine: Machine) -> Iterator[Found]:
    needed = sum(one.workers * one.gpus_each for one in machine.engines)
    there = len(machine.gpus.found)
    if needed > there and machine.gpus.problem is None:
        parts = [
            f"{one.option} {one.workers} x {one.gpus_each}"
            for one in machine.engines
            if one.gpus_each
        ]
        text = f"{needed} GPUs needed ({', '.join(parts)}), {there} here"
        yield Found(text, {"needed": needed, "there": there})


@MACHINE.add(
    "gpu-driver-old",
    "gpu",
    _ERROR,
    means="The driver is older than the CUDA that engines of today are built for.",
    remedy="Update the driver to 525 or later (CUDA 12), to 580 or later for CUDA 13.",
)
def _gpu_driver_old(machine: Machine) -> Iterator[Found]:
    for driver in sorted({one.driver for one in machine.gpus.found if one.driver}):
        major = driver.split(".")[0]
        if major.isdecimal() and int(major) < _OLD_DRIVER:
            yield Found(f"driver {driver}", {"driver": driver})


@MACHINE.add(
    "gpu-memory-taken",
    "gpu",
    _WARNING,
    means="Something else uses GPU memory, and engines take a fixed part of all of it.",
    remedy="`nvidia-smi` lists the processes; end those that are left over.",
)
def _gpu_memory_taken(machine: Machine) -> Iterator[Found]:
    if not machine.idle:
        return
    for gpu in machine.gpus.found:
        if gpu.total_bytes and gpu.used_bytes > _TAKEN * gpu.total_bytes:
            text = f"{gpu.used_bytes / _GB:.3g} of {gpu.total_bytes / _GB:.3g} GB in use"
            yield _of(gpu, text, used_bytes=gpu.used_bytes, total_bytes=gpu.total_bytes)


@MACHINE.add(
    "gpu-memory-errors",
    "gpu",
    _ERROR,
    means="GPU memory has errors that its ECC could not correct: results may be wrong.",
    remedy="Drain its workers, reset or reboot; if errors come back, have the GPU replaced.",
)
def _gpu_memory_errors(machine: Machine) -> Iterator[Found]:
    for gpu in machine.gpus.found:
        if gpu.uncorrected_errors:
            text = f"{gpu.uncorrected_errors} uncorrected memory errors since the driver started"
            yield _of(gpu, text, errors=gpu.uncorrected_errors)


@MACHINE.add(
    "gpu-kernel-errors",
    "gpu",
    _ERROR,
    means="The kernel's log has errors of the GPU driver (Xid).",
    remedy="Look the number up in NVIDIA's list of Xid errors; 48, 63, 64, 79, 94 and 95 mean "
    "hardware: drain the host.",
)
def _gpu_kernel_errors(machine: Machine) -> Iterator[Found]:
    if lines := machine.gpus.kernel_errors:
        yield Found(f"{len(lines)} lines, the last: {lines[-1]}", {"lines": len(lines)})


@MACHINE.add(
    "gpu-slowed",
    "gpu",
    _WARNING,
    means="Heat or a power limit keeps the GPU's clocks low, so every token takes longer.",
    remedy="Look at fans, air and the power limit (`nvidia-smi -q -d PERFORMANCE`).",
)
def _gpu_slowed(machine: Machine) -> Iterator[Found]:
    for gpu in machine.gpus.found:
        hot = gpu.temperature_c is not None and gpu.temperature_c >= _HOT_C
        if gpu.slowed_by or hot:
            reasons = " and ".join(gpu.slowed_by) or "nothing yet"
            text = f"slowed by {reasons} at {gpu.temperature_c} °C"
            yield _of(gpu, text, temperature_c=gpu.temperature_c or 0)


@MACHINE.add(
    "gpu-link-narrow",
    "gpu",
    _WARNING,
    means="The GPU's PCIe link uses fewer lanes than it could: KV moves to the host more slowly.",
    remedy="Reseat the card, or move it to a slot with all lanes. Idle GPUs lower the speed of "
    "lanes, not their number.",
)
def _gpu_link_narrow(machine: Machine) -> Iterator[Found]:
    for gpu in machine.gpus.found:
        width, most = gpu.link_width, gpu.link_width_max
        if width and most and width < most:
            yield _of(gpu, f"PCIe x{width} of x{most}", width=width, max_width=most)


@MACHINE.add(
    "gpu-mig",
    "gpu",
    _ERROR,
    means="A GPU is divided by MIG, and tensor parallelism cannot use its instances.",
    remedy="Turn MIG off (`nvidia-smi -mig 0`, as root), or serve with one instance a worker.",
)
def _gpu_mig(machine: Machine) -> Iterator[Found]:
    parallel = [one.option for one in machine.engines if one.gpus_each > 1]
    for gpu in machine.gpus.found:
        if gpu.mig and parallel:
            yield _of(gpu, f"MIG is on, and {', '.join(parallel)} need whole GPUs")


@MACHINE.add(
    "gpu-fabric-down",
    "gpu",
    _ERROR,
    means="NVLink's switches are not set up, so CUDA fails to start on several GPUs.",
    remedy="Start NVIDIA's fabric manager, of the driver's version: "
    "`systemctl start nvidia-fabricmanager`.",
)
def _gpu_fabric_down(machine: Machine) -> Iterator[Found]:
    for gpu in machine.gpus.found:
        if gpu.fabric is not None and gpu.fabric.lower() not in {"completed", "n/a", "[n/a]"}:
            yield _of(gpu, f"the state of its fabric is {gpu.fabric}")


@MACHINE.add(
    "gpu-mixed",
    "gpu",
    _WARNING,
    means="The GPUs are of different models, and a tensor-parallel group runs as its slowest.",
    remedy="Give each engine entry GPUs of one model, by CUDA_VISIBLE_DEVICES in its `env`.",
)
def _gpu_mixed(machine: Machine) -> Iterator[Found]:
    names = sorted({one.name for one in machine.gpus.found})
    if len(names) > 1 and any(one.gpus_each > 1 for one in machine.engines):
        yield Found(", ".join(names), {"models": len(names)})


@MACHINE.add(
    "torch-without-cuda",
    "gpu",
    _WARNING,
    means="GPUs are here, and PyTorch was built for CPUs: the engine `reference` runs on the CPU.",
    remedy="Install PyTorch's wheel for CUDA in this environment.",
)
def _torch_without_cuda(machine: Machine) -> Iterator[Found]:
    here = [one.option for one in machine.engines if one.kind in {"reference", "encoder"}]
    if here and machine.gpus.found and (machine.torch or "").endswith("+cpu"):
        yield Found(f"PyTorch {machine.torch}, {len(machine.gpus.found)} GPUs")


@MACHINE.add(
    "gpu-untested",
    "gpu",
    _NOTE,
    means="Accelerators of makers on whose hardware nothing here has been run.",
    remedy="vLLM and SGLang may serve on it; nothing in Commutator but `reference` and `hbm` "
    "depends on CUDA.",
)
def _gpu_untested(machine: Machine) -> Iterator[Found]:
    yield from (Found(name) for name in machine.gpus.others)


@MACHINE.add(
    "nixl-missing",
    "transfer",
    _ERROR,
    means="KV blocks are to be moved, and NIXL, which moves them, is not installed or broken.",
    remedy="`pip install 'nixl[cu12]'` in this environment, and in the engine's.",
)
def _nixl_missing(machine: Machine) -> Iterator[Found]:
    nixl = machine.nixl
    if nixl.needed_by and (nixl.version is None or nixl.problem is not None):
        why = nixl.problem or "not installed"
        yield Found(f"NIXL is needed by {', '.join(nixl.needed_by)}: {why}")


@MACHINE.add(
    "ucx-transports",
    "transfer",
    _ERROR,
    means="UCX_TLS leaves UCX no transport between processes.",
    remedy="Unset UCX_TLS, or name `tcp` (every machine) or `rc` (RDMA), with `cuda_copy` and "
    "`cuda_ipc` for GPU memory.",
)
def _ucx_transports(machine: Machine) -> Iterator[Found]:
    named = machine.nixl.transports
    if not named or not machine.nixl.needed_by or named.startswith("^"):
        return
    words = set(named.split(","))
    remote = {"all", "tcp", "rc", "rc_v", "rc_x", "ud", "ud_v", "dc", "ib", "sm", "shm", "posix"}
    if not words & remote:
        yield Found(f"UCX_TLS={named}")


@MACHINE.add(
    "kv-interface-missing",
    "transfer",
    _ERROR,
    means="An interface that KV is to move over is not on this machine, or is down.",
    remedy="Correct `runtime.kv_interfaces` (or UCX_NET_DEVICES), or bring the interface up.",
)
def _kv_interface_missing(machine: Machine) -> Iterator[Found]:
    states = {one.name: one.up for one in machine.interfaces}
    for name in filter(None, (machine.nixl.devices or "").split(",")):
        device = name.partition(":")[0]
        if device in {"all", "lo"}:
            continue
        if device not in states:
            yield Found(f"{device} is not here; there are: {', '.join(sorted(states))}", {}, name)
        elif not states[device]:
            yield Found(f"{device} is down", {}, name)


@MACHINE.add(
    "gpu-direct-off",
    "transfer",
    _NOTE,
    means="RDMA devices and GPUs are here, and network cards cannot read GPU memory directly.",
    remedy="Load the module: `modprobe nvidia_peermem`; without it KV is staged in host memory.",
)
def _gpu_direct_off(machine: Machine) -> Iterator[Found]:
    rdma = [one.name for one in machine.interfaces if one.rdma]
    if rdma and machine.gpus.found and machine.nixl.needed_by and not machine.nixl.peer_memory:
        yield Found(f"{', '.join(rdma)} beside {len(machine.gpus.found)} GPUs")


@MACHINE.add(
    "engine-missing",
    "engine",
    _ERROR,
    means="The environment of an engine has no such engine, or cannot be run.",
    remedy="Install it there, or correct the option `python` of the entry.",
)
def _engine_missing(machine: Machine) -> Iterator[Found]:
    for one in machine.engines:
        if one.problem is not None:
            yield Found(f"{one.kind}: {one.problem}", {}, one.option)


@MACHINE.add(
    "engine-untested",
    "engine",
    _NOTE,
    means="An engine's version is another than the one that the tests of this release ran with.",
    remedy="Other versions may work; where something fails, try the tested one first.",
)
def _engine_untested(machine: Machine) -> Iterator[Found]:
    for one in machine.engines:
        tested = TESTED.get(one.kind)
        if tested is None or one.version is None:
            continue
        if one.version.partition("+")[0] != tested:
            text = f"{one.kind} {one.version}; tested: {tested}"
            yield Found(text, {"version": one.version, "tested": tested}, one.option)


@MACHINE.add(
    "port-taken",
    "network",
    _ERROR,
    means="A port to listen at is in use, or may not be used.",
    remedy="End what listens there, or choose another port: `--port`, `frontend.port`.",
)
def _port_taken(machine: Machine) -> Iterator[Found]:
    for one in machine.ports:
        if one.problem is not None and not one.deployment:
            holder = f" by {one.holder}" if one.holder else ""
            yield Found(
                f"{one.host}:{one.port}: {one.problem}{holder}", {"port": one.port}, one.option
            )


@MACHINE.add(
    "deployment-runs",
    "network",
    _NOTE,
    means="A deployment already listens at the port of this configuration.",
    remedy="Change it while it runs: `commutator diff FILE`, then `commutator apply FILE`.",
)
def _deployment_runs(machine: Machine) -> Iterator[Found]:
    for one in machine.ports:
        if one.deployment:
            yield Found(f"a front door answers at {one.host}:{one.port}", {}, one.option)


@MACHINE.add(
    "peer-unreachable",
    "network",
    _ERROR,
    means="Another service or host that the configuration names does not accept connections.",
    remedy="Is it running, is its address right, does a firewall close the port?",
)
def _peer_unreachable(machine: Machine) -> Iterator[Found]:
    for one in machine.peers:
        if one.problem is not None:
            yield Found(f"{one.address}: {one.problem}", {}, one.option)


@MACHINE.add(
    "peer-far",
    "network",
    _WARNING,
    means="A connection to another host takes long; each decision over it waits as long.",
    remedy="Keep registry, event bus and workers in one data centre.",
)
def _peer_far(machine: Machine) -> Iterator[Found]:
    for one in machine.peers:
        if one.connect_s is not None and one.connect_s > _SLOW_CONNECT_S:
            text = f"{one.address}: {one.connect_s * 1000:.0f} ms to connect"
            yield Found(text, {"seconds": one.connect_s}, one.option)


@MACHINE.add(
    "certificate-expires",
    "network",
    _ERROR,
    means="A certificate has expired or will soon, or cannot be read.",
    remedy="`commutator certs renew` for the cluster's, your authority's tool for a front door's. "
    "Running processes read changed files again.",
)
def _certificate_expires(machine: Machine) -> Iterator[Found]:
    for one in machine.certificates:
        if one.problem is not None:
            yield Found(f"{one.path}: {one.problem}", {}, one.option)
        elif one.days_left is not None and one.days_left < _NEAR_DAYS:
            when = f"expires in {one.days_left:.0f} days"
            if one.days_left < 0:
                when = f"expired {-one.days_left:.0f} days ago"
            yield Found(f"{one.path} {when}", {"days_left": round(one.days_left, 1)}, one.option)


@MACHINE.add(
    "disk-not-writable",
    "disk",
    _ERROR,
    means="A folder that is to be written cannot be.",
    remedy="Give the deployment's user the right to write there, or name another folder.",
)
def _disk_not_writable(machine: Machine) -> Iterator[Found]:
    for one in machine.disks:
        if not one.writable:
            yield Found(f"{one.path} cannot be written", {}, one.option)


@MACHINE.add(
    "disk-full",
    "disk",
    _ERROR,
    means="A disk has less room than what is to be written there.",
    remedy="Free room, or lower `capacity`. Each worker has the capacity for itself.",
)
def _disk_full(machine: Machine) -> Iterator[Found]:
    for one in machine.disks:
        if one.writable and one.free_bytes < one.wanted_bytes:
            text = (
                f"{one.path}: {one.wanted_bytes / _GB:.4g} GB wanted, "
                f"{one.free_bytes / _GB:.4g} GB free"
            )
            numbers = {"wanted_bytes": one.wanted_bytes, "free_bytes": one.free_bytes}
            yield Found(text, numbers, one.option)


@MACHINE.add(
    "disk-in-memory",
    "disk",
    _WARNING,
    means="A folder for a disk tier lies in memory: it takes what a `dram` tier would, and more "
    "slowly.",
    remedy="Name a folder on a disk, or use a tier of kind `dram`.",
)
def _disk_in_memory(machine: Machine) -> Iterator[Found]:
    for one in machine.disks:
        if one.kind == "nvme" and one.file_system in _IN_MEMORY:
            yield Found(f"{one.path} is {one.file_system}", {}, one.option)


@MACHINE.add(
    "disk-over-network",
    "disk",
    _WARNING,
    means="A folder for a disk tier lies on a file system of the network.",
    remedy="Name a folder on a local NVMe disk; for shared storage use a tier of kind `s3`.",
)
def _disk_over_network(machine: Machine) -> Iterator[Found]:
    for one in machine.disks:
        if one.kind == "nvme" and one.file_system in _OVER_NETWORK:
            yield Found(f"{one.path} is {one.file_system}", {}, one.option)


@MACHINE.add(
    "disk-no-direct-io",
    "disk",
    _WARNING,
    means="Files cannot be read past the page cache (O_DIRECT), so KV takes host memory twice.",
    remedy="Use a file system that can: ext4, XFS.",
)
def _disk_no_direct_io(machine: Machine) -> Iterator[Found]:
    for one in machine.disks:
        if one.kind == "nvme" and one.direct_io is False and one.file_system not in _IN_MEMORY:
            yield Found(f"{one.path}: {one.file_system} refuses O_DIRECT", {}, one.option)


@MACHINE.add(
    "disk-slow",
    "disk",
    _WARNING,
    means="The disk of a tier is slower than most GPUs compute KV, so loading hardly pays.",
    remedy="Use an NVMe disk. A tier that is slower than computing is not read, which "
    "`commutator kv stats` counts.",
)
def _disk_slow(machine: Machine) -> Iterator[Found]:
    for one in machine.disks:
        speed = one.write_bytes_per_s
        if one.kind != "nvme" or speed is None or (speed >= _SLOW_DISK and not one.rotates):
            continue
        medium = "a disk that rotates; " if one.rotates else ""
        text = f"{one.path}: {medium}{speed / 1e6:.0f} MB/s written"
        yield Found(text, {"bytes_per_s": round(speed)}, one.option)


@MACHINE.add(
    "clock-unsynchronized",
    "clock",
    _WARNING,
    means="Nothing keeps this machine's clock right, and several hosts compare times.",
    remedy="Run chrony or systemd-timesyncd. Certificates, tokens and limits depend on it.",
)
def _clock_unsynchronized(machine: Machine) -> Iterator[Found]:
    clock = machine.clock
    if not machine.spans_hosts:
        return
    if clock.synchronized is False:
        yield Found("the kernel says that the clock is not synchronized")
    elif clock.error_s is not None and clock.error_s > _CLOCK_ERROR_S:
        yield Found(f"it may be off by {clock.error_s:.1f} s", {"seconds": clock.error_s})


@MACHINE.add(
    "clock-differs",
    "clock",
    _ERROR,
    means="This machine's clock and the front door's differ.",
    remedy="Synchronize both: tokens (`exp`, `nbf`) and certificates are judged by them.",
)
def _clock_differs(machine: Machine) -> Iterator[Found]:
    off = machine.clock.against_deployment_s
    if off is not None and abs(off) > _CLOCK_OFF_S:
        word = "ahead of" if off > 0 else "behind"
        text = f"{abs(off):.0f} s {word} the front door's"
        yield Found(text, {"seconds": round(off, 1)})


def _of(gpu: Gpu, text: str, **numbers: int) -> Found:
    return Found(text, numbers, f"GPU {gpu.index} {gpu.name}")
