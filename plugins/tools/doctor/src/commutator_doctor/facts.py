"""What is known of a machine: values that checks read, and that tests make up."""

from __future__ import annotations

from attrs import frozen


@frozen(kw_only=True)
class Limits:
    """Of a process; None means that there is none."""

    open_files: int | None = None
    """The hard limit, to which every process of a deployment raises its own."""
    locked_bytes: int | None = None
    processes: int | None = None


@frozen(kw_only=True)
class Memory:
    """In bytes."""

    total: int = 64 << 30
    available: int = 48 << 30
    cgroup_limit: int | None = None
    """Of a container; None: the whole machine's."""
    shared_total: int | None = 32 << 30
    """The size of /dev/shm; None where there is none."""
    shared_free: int = 32 << 30
    swap_used: int = 0


@frozen(kw_only=True)
class Gpu:
    """One line of `nvidia-smi`."""

    index: int
    name: str
    driver: str = ""
    total_bytes: int = 0
    used_bytes: int = 0
    temperature_c: int | None = None
    uncorrected_errors: int | None = None
    slowed_by: tuple[str, ...] = ()
    """What keeps its clocks low: `heat`, `power`."""
    mig: bool = False
    link_width: int | None = None
    link_width_max: int | None = None
    fabric: str | None = None
    """The state of NVLink's fabric; None where it has none."""


@frozen(kw_only=True)
class Gpus:
    """What this machine has of them."""

    found: tuple[Gpu, ...] = ()
    device_files: int = 0
    """Of /dev/nvidia0, /dev/nvidia1, ...; a container may have been given fewer than there are."""
    problem: str | None = None
    """Why `nvidia-smi` could not be asked, if it could not."""
    kernel_errors: tuple[str, ...] = ()
    """Lines of the kernel's log with an Xid."""
    others: tuple[str, ...] = ()
    """Accelerators of other makers, by device file."""


@frozen(kw_only=True)
class Interface:
    """A network or RDMA device."""

    name: str
    up: bool = True
    rdma: bool = False


@frozen(kw_only=True)
class Nixl:
    """What moves KV blocks."""

    version: str | None = None
    problem: str | None = None
    """Why it cannot be imported, if it cannot."""
    needed_by: tuple[str, ...] = ()
    """The options that need it."""
    transports: str | None = None
    """UCX_TLS of the environment."""
    devices: str | None = None
    """UCX_NET_DEVICES of the environment, or `runtime.kv_interfaces`."""
    peer_memory: bool = False
    """Whether the module is loaded by which network cards read GPU memory."""


@frozen(kw_only=True)
class Engine:
    """An entry of `engines`."""

    option: str
    kind: str
    python: str | None = None
    """Of its environment; None: this one's."""
    version: str | None = None
    problem: str | None = None
    """Why its version is not known, if it should be."""
    workers: int = 1
    gpus_each: int = 0
    needs_shared_memory: bool = False


@frozen(kw_only=True)
class Port:
    """One that the configuration wants to listen at."""

    option: str
    host: str
    port: int
    problem: str | None = None
    """Why it cannot be listened at."""
    holder: str | None = None
    """The process that listens there, where this user may know."""
    deployment: bool = False
    """Whether a front door answers there."""


@frozen(kw_only=True)
class Disk:
    """A folder that the configuration writes to, and what holds it."""

    option: str
    path: str
    kind: str = ""
    """Of the option: `nvme`, `recording`, ..."""
    file_system: str = "ext4"
    free_bytes: int = 1 << 40
    wanted_bytes: int = 0
    """What all workers of this machine may write there."""
    writable: bool = True
    direct_io: bool | None = True
    """Whether files can be read past the page cache; None: not tried."""
    write_bytes_per_s: float | None = None
    """Of a small file, to the medium; None: not measured."""
    rotates: bool = False


@frozen(kw_only=True)
class Certificate:
    """A file that the configuration names."""

    option: str
    path: str
    days_left: float | None = None
    problem: str | None = None


@frozen(kw_only=True)
class Peer:
    """Another service or host that the configuration names."""

    option: str
    address: str
    problem: str | None = None
    connect_s: float | None = None


@frozen(kw_only=True)
class Clock:
    """Of this machine."""

    synchronized: bool | None = True
    """As the kernel says; None: it does not."""
    error_s: float | None = None
    """How far it may be off, as the kernel estimates."""
    against_deployment_s: float | None = None
    """Ours less the front door's; within a second, as HTTP tells no more."""


@frozen(kw_only=True)
class Machine:
    """This machine, seen with a configuration in mind if there is one."""

    system: str = "Linux 6.8 x86_64"
    python: str = "3.12.3"
    cores: float = 16
    """That this process may use; of a container's quota, a part of one counts."""
    load: float = 0.5
    """Processes that want to run, in the mean of the last minute."""
    limits: Limits = Limits(open_files=1 << 20)
    memory: Memory = Memory()
    gpus: Gpus = Gpus()
    interfaces: tuple[Interface, ...] = (Interface(name="lo"), Interface(name="eth0"))
    nixl: Nixl = Nixl()
    engines: tuple[Engine, ...] = ()
    ports: tuple[Port, ...] = ()
    disks: tuple[Disk, ...] = ()
    certificates: tuple[Certificate, ...] = ()
    peers: tuple[Peer, ...] = ()
    clock: Clock = Clock()
    torch: str | None = None
    """The version of PyTorch here."""
    pinned_bytes: int = 0
    """Host memory that tiers of all workers take."""
    spans_hosts: bool = False
    versions: tuple[tuple[str, str], ...] = ()
    """Distributions of Commutator that are installed."""
    broken_plugins: tuple[str, ...] = ()
    config_problems: tuple[str, ...] = ()
    config_warnings: tuple[str, ...] = ()
    idle: bool = True
    """Whether no deployment runs here; used memory and ports then need a reason."""
