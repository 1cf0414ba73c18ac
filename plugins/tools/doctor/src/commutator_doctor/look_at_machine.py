"""Gathers the facts of this machine; what cannot be read is left as unknown."""

from __future__ import annotations

import ctypes
import importlib.metadata
import os
import platform
import re
import resource
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import urlsplit

from commutator_doctor import facts

_TIMEOUT_S = 20.0
_CONNECT_S = 3.0
_TRIED_BYTES = 8 << 20
_ALIGNED = 4096
_DAY_S = 86_400.0
_TIME_ERROR = 5
_STA_UNSYNC = 0x40
_ADDRESS = re.compile(r"^(?:[a-z][a-z0-9+.-]*://)?(?:[^@/\s]*@)?(\[[0-9a-fA-F:]+\]|[\w.-]+):(\d+)")
_SCHEMES = {"http": 80, "https": 443, "nats": 4222, "tls": 4222, "etcd": 2379}
_ADDRESS_OPTIONS = {"address", "endpoint", "endpoints", "servers", "url", "urls", "jwks_url"}
_PARALLEL = {
    *("--tensor-parallel-size", "-tp", "--tp-size", "--tp"),
    *("--pipeline-parallel-size", "-pp", "--pp-size", "--pp"),
    *("--data-parallel-size", "-dp", "--dp-size", "--dp"),
}
_SERVERS = {"vllm": "vllm", "sglang": "sglang", "trtllm": "tensorrt_llm"}
_QUERY = {
    "index": "index",
    "name": "name",
    "driver": "driver_version",
    "total": "memory.total",
    "used": "memory.used",
    "temperature": "temperature.gpu",
    "errors": "ecc.errors.uncorrected.volatile.total",
    "heat": "clocks_throttle_reasons.hw_thermal_slowdown",
    "power": "clocks_throttle_reasons.hw_power_brake_slowdown",
    "mig": "mig.mode.current",
    "width": "pcie.link.width.current",
    "width_max": "pcie.link.width.max",
    "fabric": "fabric.state",
}

ValueT = TypeVar("ValueT")


def look_at_machine(
    config: Any = None,
    *,
    problems: Sequence[str] = (),
    warnings: Sequence[str] = (),
    against_deployment_s: float | None = None,
) -> facts.Machine:
    """This machine; with a ``Config`` also what it names."""
    engines = tuple(_engines(config)) if config is not None else ()
    ports = tuple(_ports(config)) if config is not None else ()
    limits, synchronized, error_s = _limits(), *_clock()
    return facts.Machine(
        system=f"{platform.system()} {platform.release()} {platform.machine()}",
        python=platform.python_version(),
        cores=_cores(),
        load=os.getloadavg()[0],
        limits=limits,
        memory=_memory(),
        gpus=_gpus(),
        interfaces=tuple(_interfaces()),
        nixl=_nixl(config),
        engines=engines,
        ports=ports,
        disks=tuple(_disks(config)) if config is not None else (),
        certificates=tuple(_certificates(config)) if config is not None else (),
        peers=tuple(_peers(config)) if config is not None else (),
        clock=facts.Clock(
            synchronized=synchronized,
            error_s=error_s,
            against_deployment_s=against_deployment_s,
        ),
        torch=version_of("torch"),
        pinned_bytes=_pinned(config) if config is not None else 0,
        spans_hosts=config is not None and bool(config.cluster.host.spans_hosts),
        versions=tuple(sorted(_versions())),
        broken_plugins=tuple(_broken_plugins()),
        config_problems=tuple(problems),
        config_warnings=tuple(warnings),
        idle=not any(port.deployment for port in ports),
    )


def version_of(distribution: str) -> str | None:
    """Of an installed distribution; None where there is none."""
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def _versions() -> Iterator[tuple[str, str]]:
    for distribution in importlib.metadata.distributions():
        name = distribution.name or ""
        if name == "commutator" or name.startswith("commutator-"):
            yield name, distribution.version


def _broken_plugins() -> Iterator[str]:
    from commutator.plugins import load_plugins

    for one in load_plugins().installed:
        if one.problem is not None:
            yield f"{one.name} ({one.distribution}): {one.problem}"


def _or(default: ValueT, get: Callable[[], ValueT]) -> ValueT:
    """What ``get`` returns; ``default`` where the system does not have it."""
    try:
        return get()
    except (OSError, ValueError, KeyError, IndexError):
        return default


def _text(path: str | Path) -> str:
    return _or("", lambda: Path(path).read_text(encoding="utf-8", errors="replace").strip())


def _cores() -> float:
    if hasattr(os, "sched_getaffinity"):
        count = float(len(os.sched_getaffinity(0)))
    else:
        count = float(os.cpu_count() or 1)
    quota, _, period = _text("/sys/fs/cgroup/cpu.max").partition(" ")
    if quota.isdecimal() and period.isdecimal():
        count = min(count, int(quota) / int(period))
    return count


def _limits() -> facts.Limits:
    def hard(name: str) -> int | None:
        number = getattr(resource, name, None)
        if number is None:
            return None
        _, most = resource.getrlimit(number)
        return None if most == resource.RLIM_INFINITY else most

    return facts.Limits(
        open_files=hard("RLIMIT_NOFILE"),
        locked_bytes=hard("RLIMIT_MEMLOCK"),
        processes=hard("RLIMIT_NPROC"),
    )


def _memory() -> facts.Memory:
    found: dict[str, int] = {}
    for line in _text("/proc/meminfo").splitlines():
        name, _, rest = line.partition(":")
        number = rest.split()[:1]
        if number and number[0].isdecimal():
            found[name] = int(number[0]) * 1024
    limit = _text("/sys/fs/cgroup/memory.max")
    shared = _or(None, lambda: shutil.disk_usage("/dev/shm"))  # noqa: S108 - its size is asked
    total = found.get("MemTotal") or os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return facts.Memory(
        total=total,
        available=found.get("MemAvailable", total),
        cgroup_limit=int(limit) if limit.isdecimal() else None,
        shared_total=None if shared is None else shared.total,
        shared_free=0 if shared is None else shared.free,
        swap_used=found.get("SwapTotal", 0) - found.get("SwapFree", 0),
    )


class _Timex(ctypes.Structure):
    """Of Linux, adjtimex(2), as far as it is read."""

    _fields_ = (
        ("modes", ctypes.c_uint),
        ("offset", ctypes.c_long),
        ("freq", ctypes.c_long),
        ("maxerror", ctypes.c_long),
        ("esterror", ctypes.c_long),
        ("status", ctypes.c_int),
        ("rest", ctypes.c_byte * 256),
    )


def _clock() -> tuple[bool | None, float | None]:
    """Whether the kernel's clock is synchronized, and how far it may be off in seconds."""
    try:
        ask = ctypes.CDLL(None, use_errno=True).adjtimex
    except (OSError, AttributeError):
        return None, None
    timex = _Timex()
    state = ask(ctypes.byref(timex))
    if state < 0:
        return None, None
    if state == _TIME_ERROR or timex.status & _STA_UNSYNC:
        return False, None
    return True, timex.maxerror / 1e6


def _run(command: Sequence[str], timeout_s: float = _TIMEOUT_S) -> tuple[str, str | None]:
    """Output, and why it failed if it did."""
    try:
        done = subprocess.run(  # noqa: S603 - programs of this machine, or that the user names
            command, capture_output=True, text=True, timeout=timeout_s, check=False
        )
    except subprocess.TimeoutExpired:
        return "", f"no answer within {timeout_s:.0f} s"
    except OSError as error:
        return "", error.strerror or str(error)
    if done.returncode:
        said = (done.stderr.strip() or done.stdout.strip()).splitlines()
        return done.stdout, said[-1] if said else f"exit code {done.returncode}"
    return done.stdout, None


Run = Callable[[Sequence[str]], tuple[str, str | None]]


def _gpus() -> facts.Gpus:
    files = [one for one in Path("/dev").glob("nvidia*") if one.name[6:].isdecimal()]
    others = tuple(one for one in ("/dev/kfd", "/dev/dxg", "/dev/accel") if Path(one).exists())
    program = shutil.which("nvidia-smi")
    if program is None:
        problem = "it is not installed" if files else None
        return facts.Gpus(device_files=len(files), problem=problem, others=others)
    found, problem = ask_gpus(_run, program)
    return facts.Gpus(
        found=tuple(found),
        device_files=len(files),
        problem=problem,
        kernel_errors=tuple(xid_lines(_run(["dmesg"])[0])) if files else (),
        others=others,
    )


def ask_gpus(run: Run, program: str) -> tuple[list[facts.Gpu], str | None]:
    """The GPUs that `nvidia-smi` lists, and why it does not; older drivers know fewer fields."""
    fields = dict(_QUERY)
    while True:
        names = ",".join(fields.values())
        text, problem = run([program, f"--query-gpu={names}", "--format=csv,noheader,nounits"])
        unknown = next((key for key, name in fields.items() if problem and f'"{name}"' in text), "")
        unknown = unknown or next(
            (key for key, name in fields.items() if f'"{name}"' in (problem or "")), ""
        )
        if not unknown or len(fields) == 1:
            break
        del fields[unknown]
    if problem is not None:
        return [], problem
    rows = [[cell.strip() for cell in line.split(",")] for line in text.splitlines() if line]
    return [_gpu(dict(zip(fields, row, strict=False))) for row in rows], None


def _gpu(row: Mapping[str, str]) -> facts.Gpu:
    def number(name: str) -> int | None:
        text = row.get(name, "")
        return int(text) if text.isdecimal() else None

    slowed = tuple(word for word in ("heat", "power") if row.get(word) == "Active")
    fabric = row.get("fabric")
    return facts.Gpu(
        index=number("index") or 0,
        name=row.get("name", "?"),
        driver=row.get("driver", ""),
        total_bytes=(number("total") or 0) << 20,
        used_bytes=(number("used") or 0) << 20,
        temperature_c=number("temperature"),
        uncorrected_errors=number("errors"),
        slowed_by=slowed,
        mig=row.get("mig") == "Enabled",
        link_width=number("width"),
        link_width_max=number("width_max"),
        fabric=None if fabric in {None, "", "N/A", "[N/A]"} else fabric,
    )


def xid_lines(log: str) -> Iterator[str]:
    """Lines of the kernel's log with errors of NVIDIA's driver."""
    for line in log.splitlines():
        if "NVRM: Xid" in line:
            yield line.strip()


def _interfaces() -> Iterator[facts.Interface]:
    for path in sorted(Path("/sys/class/net").glob("*")):
        yield facts.Interface(name=path.name, up=_text(path / "operstate") in {"up", "unknown"})
    for path in sorted(Path("/sys/class/infiniband").glob("*")):
        states = [_text(port) for port in path.glob("ports/*/state")]
        up = any("ACTIVE" in state for state in states)
        yield facts.Interface(name=path.name, up=up, rdma=True)


_NIXL_PROGRAM = "import nixl._api"


def _nixl(config: Any) -> facts.Nixl:
    wanting = tuple(_wanting_nixl(config)) if config is not None else ()
    version = next(filter(None, map(version_of, ("nixl", "nixl-cu12", "nixl-cu13"))), None)
    problem = None
    if version is not None and wanting:
        _, problem = _run([sys.executable, "-c", _NIXL_PROGRAM])
    interfaces = None if config is None else config.runtime.kv_interfaces
    return facts.Nixl(
        version=version,
        problem=problem,
        needed_by=wanting,
        transports=os.environ.get("UCX_TLS"),
        devices=",".join(interfaces) if interfaces else os.environ.get("UCX_NET_DEVICES"),
        peer_memory=Path("/sys/module/nvidia_peermem").exists(),
    )


def _wanting_nixl(config: Any) -> Iterator[str]:
    yield from (f"tiers[{index}]" for index, _ in enumerate(config.tiers))
    for index, engine in enumerate(config.engines):
        if engine.role != "both" and engine.kind != "sim":
            yield f"engines[{index}].role"


def _engines(config: Any) -> Iterator[facts.Engine]:
    for index, engine in enumerate(config.engines):
        option = f"engines[{index}]"
        package = _SERVERS.get(engine.kind)
        if package is None or getattr(engine, "url", None) is not None:
            yield facts.Engine(option=option, kind=engine.kind, workers=engine.replicas)
            continue
        python = str(Path(getattr(engine, "python", sys.executable)).expanduser())
        program = f"import importlib.metadata as m; print(m.version({package!r}))"
        text, problem = _run([python, "-c", program])
        arguments = tuple(getattr(engine, "args", ()))
        on_cpu = bool(getattr(engine, "on_cpu", False)) or "+cpu" in text
        # Another launcher chooses machines by what they have.
        each = 0 if on_cpu or config.launcher.kind != "process" else gpus_of(arguments)
        yield facts.Engine(
            option=option,
            kind=engine.kind,
            python=python,
            version=text.strip() or None,
            problem=None if problem is None else f"{python}: {problem}",
            workers=engine.replicas,
            gpus_each=each,
            needs_shared_memory=gpus_of(arguments) > 1,
        )


def gpus_of(arguments: Sequence[str]) -> int:
    """The GPUs of one server with these arguments."""
    count = 1
    following = [*arguments[1:], ""][: len(arguments)]
    for argument, after in zip(arguments, following, strict=True):
        name, equals, value = argument.partition("=")
        number = value if equals else after
        if name in _PARALLEL and number.isdecimal():
            count *= int(number)
    return count


def _ports(config: Any) -> Iterator[facts.Port]:
    frontend = config.frontend
    doors = [("frontend", frontend)]
    doors += [(f"frontend.doors[{index}]", door) for index, door in enumerate(frontend.doors)]
    seen: set[tuple[str, int]] = set()
    for option, door in doors:
        host, port = getattr(door, "host", None), getattr(door, "port", None)
        if not isinstance(host, str) or not isinstance(port, int) or not port:
            continue
        if (host, port) not in seen:
            seen.add((host, port))
            yield _port(f"{option}.port", host, port)


def _port(option: str, host: str, port: int) -> facts.Port:
    problem = None
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        with socket.socket(family, socket.SOCK_STREAM) as tried:
            tried.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            tried.bind((host, port))
    except OSError as error:
        problem = (error.strerror or str(error)).lower()
    here = "127.0.0.1" if host in {"0.0.0.0", ""} else host  # noqa: S104 - it is not bound
    return facts.Port(
        option=option,
        host=host,
        port=port,
        problem=problem,
        holder=_holder(port) if problem else None,
        deployment=problem is not None and _is_front_door(here, port),
    )


def _is_front_door(host: str, port: int) -> bool:
    import urllib.request

    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(f"http://{host}:{port}/live", timeout=_CONNECT_S) as answer:
            return bool(answer.read(1000).strip() == b'{"status":"ok"}')
    except (OSError, ValueError):
        return False


def _holder(port: int) -> str | None:
    """The process of this user that listens at ``port``."""
    inodes = set()
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        for line in _text(table).splitlines()[1:]:
            cells = line.split()
            if cells[3] == "0A" and int(cells[1].rpartition(":")[2], 16) == port:
                inodes.add(f"socket:[{cells[9]}]")
    for process in Path("/proc").glob("[0-9]*"):
        if any(link in inodes for link in _links(process / "fd")):
            return f"{_text(process / 'comm')} (pid {process.name})"
    return None


def _links(folder: Path) -> Iterator[str]:
    """Where the links in ``folder`` lead; those that go away meanwhile are left out."""
    with suppress(OSError):
        for file in folder.iterdir():
            with suppress(OSError):
                yield str(file.readlink())


def _peers(config: Any) -> Iterator[facts.Peer]:
    from commutator.config.show import shown

    found: dict[tuple[str, int], str] = {}
    for option, host, port in addresses_in(shown(config, hide=True)):
        found.setdefault((host, port), option)
    own = {config.cluster.host.reachable_at} if config.cluster.host.spans_hosts else set()
    for (host, port), option in found.items():
        if host in own:
            continue  # what this host serves itself need not run yet
        begun = time.monotonic()
        try:
            socket.create_connection((host.strip("[]"), port), _CONNECT_S).close()
        except OSError as error:
            problem = str(error.strerror or error).lower()
            yield facts.Peer(option=option, address=f"{host}:{port}", problem=problem)
        else:
            connect_s = time.monotonic() - begun
            yield facts.Peer(option=option, address=f"{host}:{port}", connect_s=connect_s)


def addresses_in(value: Any, option: str = "", name: str = "") -> Iterator[tuple[str, str, int]]:
    """Option, host and port of each address of others in plain data of a configuration."""
    if isinstance(value, Mapping):
        for key, item in value.items():
            yield from addresses_in(item, f"{option}.{key}" if option else str(key), str(key))
    elif isinstance(value, list | tuple):
        for index, item in enumerate(value):
            yield from addresses_in(item, f"{option}[{index}]", name)
    elif isinstance(value, str) and name in _ADDRESS_OPTIONS:
        scheme = value.partition("://")[0] if "://" in value else ""
        if matched := _ADDRESS.match(value):
            yield option, matched[1], int(matched[2])
        elif scheme in _SCHEMES and (host := urlsplit(value).hostname):
            yield option, host, _SCHEMES[scheme]


def _certificates(config: Any) -> Iterator[facts.Certificate]:
    from commutator.config.show import shown

    for option, path in files_in(shown(config, hide=True)):
        yield _certificate(option, Path(path).expanduser())


def files_in(value: Any, option: str = "") -> Iterator[tuple[str, str]]:
    """Option and path of each certificate in plain data of a configuration."""
    if isinstance(value, Mapping):
        for key, item in value.items():
            below = f"{option}.{key}" if option else str(key)
            if key in {"cert_file", "ca_file"} and isinstance(item, str):
                yield below, item
            else:
                yield from files_in(item, below)
    elif isinstance(value, list | tuple):
        for index, item in enumerate(value):
            yield from files_in(item, f"{option}[{index}]")


def _certificate(option: str, path: Path) -> facts.Certificate:
    try:
        from cryptography import x509
    except ImportError:
        return facts.Certificate(option=option, path=str(path))
    try:
        read = x509.load_pem_x509_certificates(path.read_bytes())
    except OSError as error:
        problem = error.strerror or str(error)
        return facts.Certificate(option=option, path=str(path), problem=problem.lower())
    except ValueError:
        return facts.Certificate(option=option, path=str(path), problem="is no PEM certificate")
    ends = min(one.not_valid_after_utc.timestamp() for one in read)
    days = (ends - time.time()) / _DAY_S
    return facts.Certificate(option=option, path=str(path), days_left=days)


def _pinned(config: Any) -> int:
    workers = sum(engine.replicas for engine in config.engines)
    return sum(
        workers * tier.capacity
        for tier in config.tiers
        if tier.kind == "dram" and isinstance(getattr(tier, "capacity", None), int)
    )


def _disks(config: Any) -> Iterator[facts.Disk]:
    workers = sum(engine.replicas for engine in config.engines)
    for index, tier in enumerate(config.tiers):
        path, capacity = getattr(tier, "path", None), getattr(tier, "capacity", 0)
        if isinstance(path, str):
            wanted = workers * capacity if isinstance(capacity, int) else 0
            folder = Path(path.partition("{")[0] or ".")
            yield _disk(f"tiers[{index}].path", tier.kind, folder, wanted)
    for index, observer in enumerate(config.observers):
        path = getattr(observer, "path", None)
        if isinstance(path, str):
            wanted = getattr(observer, "rotate_bytes", 0) * (getattr(observer, "keep", 0) + 1)
            yield _disk(f"observers[{index}].path", observer.kind, Path(path).parent, wanted)


def _disk(option: str, kind: str, path: Path, wanted: int) -> facts.Disk:
    folder = path.expanduser().absolute()
    there = next(one for one in (folder, *folder.parents) if one.exists())
    writable = there.is_dir() and os.access(there, os.W_OK | os.X_OK)
    used = sum(
        _size(file) for file in (folder.rglob("*") if kind == "nvme" and folder.is_dir() else ())
    )
    direct, speed = _try_disk(there) if writable and kind == "nvme" else (None, None)
    return facts.Disk(
        option=option,
        path=str(folder),
        kind=kind,
        file_system=_file_system(there),
        free_bytes=shutil.disk_usage(there).free + used,
        wanted_bytes=wanted,
        writable=writable,
        direct_io=direct,
        write_bytes_per_s=speed,
        rotates=_rotates(there),
    )


def _size(file: Path) -> int:
    return _or(0, lambda: file.lstat().st_blocks * 512)


def _file_system(path: Path) -> str:
    """Of the longest mount point above ``path``."""
    best, kind = "", "?"
    for line in _text("/proc/mounts").splitlines():
        cells = line.split(" ")
        where = cells[1].replace("\\040", " ")
        inside = path == Path(where) or Path(where) in path.parents
        if inside and len(where) >= len(best):
            best, kind = where, cells[2]
    return kind


def _rotates(path: Path) -> bool:
    device = path.stat().st_dev
    block = Path(f"/sys/dev/block/{os.major(device)}:{os.minor(device)}")
    queues = (block / "queue/rotational", block / "../queue/rotational")
    return any(_text(one) == "1" for one in queues) and not block.resolve().name.startswith("vd")


def _try_disk(folder: Path) -> tuple[bool | None, float | None]:
    """Whether a new file can be read past the page cache, and how fast it is written."""
    import mmap
    import tempfile

    try:
        with tempfile.NamedTemporaryFile(dir=folder, prefix="commutator-doctor-") as file:
            content = os.urandom(1 << 20)
            begun = time.monotonic()
            for _ in range(_TRIED_BYTES >> 20):
                file.write(content)
            file.flush()
            os.fsync(file.fileno())
            speed = _TRIED_BYTES / max(1e-6, time.monotonic() - begun)
            if not hasattr(os, "O_DIRECT"):
                return None, speed
            try:
                descriptor = os.open(file.name, os.O_RDONLY | os.O_DIRECT)
                try:
                    with mmap.mmap(-1, _ALIGNED) as page:
                        os.preadv(descriptor, [page], 0)
                finally:
                    os.close(descriptor)
            except OSError:
                return False, speed
            return True, speed
    except OSError:
        return None, None
