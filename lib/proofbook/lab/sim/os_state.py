"""The software side of a simulated GPU server: ONE state, from which every answer is rendered.

A :class:`Machine` has one kernel (its boots, its log, its hardware) and one or more userlands (:class:`System`): the
host's and one for each container. Times are seconds since the epoch on the lab's clock, unless a name says otherwise.
Everything here is plain data, so that a machine can be saved and go on after its process was killed.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from proofbook.lab.sim.state import Gpu, Hardware
from proofbook.lab.sim.vfs import FileNode
from proofbook.lab.standin.engine import Server


@dataclass
class KernelLine:
    """One line of the kernel's ring buffer."""

    monotonic_s: float
    priority: int
    text: str


@dataclass
class Boot:
    """One boot of the machine. ``ended_at`` is None for the present one."""

    id: str  # 32 hex digits, as the journal has it
    number: int  # 0 is the oldest one that the machine remembers
    started_at: float  # when the kernel started: monotonic time 0
    kernel: str
    cmdline: str
    kernel_log: list[KernelLine] = field(default_factory=list)
    ended_at: float | None = None
    orderly: bool = False

    @property
    def dashed_id(self) -> str:
        """As ``/proc/sys/kernel/random/boot_id`` has it."""
        i = self.id
        return f"{i[:8]}-{i[8:12]}-{i[12:16]}-{i[16:20]}-{i[20:]}"


@dataclass
class Entry:
    """One journal entry; the fields that all entries of a boot share are added when it is printed."""

    seqnum: int
    realtime_us: int
    monotonic_us: int
    boot_id: str
    fields: dict[str, str]


@dataclass
class Process:
    pid: int  # as its own userland sees it
    host_pid: int  # as the host sees it
    ppid: int
    argv: list[str]
    environ: dict[str, str]
    started_at: float
    cgroup: str  # "/system.slice/ssh.service"
    unit: str = ""
    uid: int = 0
    comm: str = ""
    rss_kib: int = 8192
    exe: str = ""
    serial: int = 0  # tells it from a later process with its PID


@dataclass
class Unit:
    """A systemd unit. What it runs is read from its file and drop-ins when it is loaded, as systemd does it."""

    name: str
    description: str
    active: str = "inactive"
    sub: str = "dead"
    result: str = "success"
    enabled: str = "enabled"  # UnitFileState
    load: str = "loaded"
    type: str = "simple"
    fragment: str = ""  # path; its text is in the files
    drop_ins: list[str] = field(default_factory=list)
    exec_start: list[str] = field(default_factory=list)
    environment: dict[str, str] = field(default_factory=dict)
    restart: str = "no"
    restart_s: float = 0.1
    identifier: str = ""  # SyslogIdentifier=; "" means the program's name
    need_reload: bool = False
    boot_offset_s: float | None = None  # seconds after its system's start when an enabled unit starts; None: never by itself
    main_pid: int = 0
    n_restarts: int = 0
    invocation_id: str = ""
    exec_started_at: float | None = None
    exec_ended_at: float | None = None
    exec_pid: int = 0
    exec_code: int = 0  # CLD_EXITED 1, CLD_KILLED 2; 0 while it runs
    exec_status: int = 0
    inactive_exit_at: float | None = None
    active_enter_at: float | None = None
    active_exit_at: float | None = None
    inactive_enter_at: float | None = None
    behaviour: str = ""  # how a fault treats the unit: "" as it should · "skipped"
    memory_bytes: int = 0
    environment_files: list[str] = field(default_factory=list)  # as EnvironmentFile= names them, "-" included
    kill_mode: str = "control-group"
    timeout_stop_s: float = 90.0
    server_faults: dict[str, dict[str, Any]] = field(default_factory=dict)  # what its SGLang does wrong
    leftover: dict[str, Any] = field(default_factory=dict)  # the scheduler that outlives a stop: rank, lets_go_after_s
    suppressed: tuple[float, float] = (0.0, 0.0)  # journald drops what it says between these seconds of its start
    dropped: int = 0


@dataclass
class Endpoint:
    """Something that listens on a TCP port of a userland."""

    port: int
    pid: int  # who listens
    address: str = "0.0.0.0"


@dataclass
class System:
    """One userland: what systemd, the journal and the file system of a host or a container hold."""

    name: str  # "" for the host, the container's id otherwise
    hostname: str
    machine_id: str
    units: dict[str, Unit] = field(default_factory=dict)
    processes: dict[int, Process] = field(default_factory=dict)
    journal: list[Entry] = field(default_factory=list)
    files: dict[str, FileNode | None] = field(default_factory=dict)
    endpoints: dict[int, Endpoint] = field(default_factory=dict)
    servers: dict[int, Server] = field(default_factory=dict)  # by the PID of their main process
    running: dict[int, int] = field(default_factory=dict)  # how many requests for tokens a server has under way
    address: str = "127.0.0.1"  # on the network
    packages: dict[str, str] = field(default_factory=dict)  # what the Python of its services has, and which version
    page_cache: dict[str, float] = field(default_factory=dict)  # folder: the share of its files that is in memory
    state: str = "off"  # off · starting · running · stopping
    immutable: set[str] = field(default_factory=set)  # paths of files that not even root may write (chattr +i)
    read_only: bool = False  # its root file system
    journal_off: bool = False  # journald is stopped, and so are its sockets: what is said now is lost
    started_at: float = 0.0
    seqnum: int = 0
    next_pid: int = 300
    os_release: str = 'PRETTY_NAME="Debian GNU/Linux 13 (trixie)"\nID=debian\nVERSION_ID="13"\n'


@dataclass
class Container(System):
    """A container on the machine: its own userland under the host's kernel."""

    id: str = ""
    kind: str = "pct"
    config: str = ""  # as `pct config` prints it
    devices: dict[str, str] = field(default_factory=dict)  # device path -> "" or the errno name that opening it gives
    onboot: bool = True


@dataclass
class User:
    name: str
    uid: int
    home: str
    sudo: bool


@dataclass
class Fault:
    """Something that goes wrong. ``when``: ``always`` · ``after-reboot``: from the first boot that somebody asked for ·
    ``at-reload``: once, when somebody next makes systemd of the container reload its units, as when two edit at a time.
    """

    kind: str
    when: str
    parameters: dict[str, Any]


@dataclass(order=True)
class Event:
    """Something that will happen at a time of the lab's clock."""

    at: float
    order: int
    kind: str = field(compare=False)
    arguments: tuple[Any, ...] = field(compare=False, default=())


@dataclass
class Timing:
    """How long the stages of a reboot take, in seconds."""

    shutdown_s: float = 14.0
    firmware_s: float = 95.0
    kernel_to_ssh_s: float = 24.0
    guests_s: float = 26.0  # from the kernel's start until containers start
    sglang_s: float = 50.0  # from the start of SGLang until it answers


@dataclass
class Machine:
    """One GPU server: a board, a kernel, and userlands on it."""

    name: str
    board: Hardware  # as it was built; every boot starts from it
    hw: Hardware  # as it is now
    host: System
    containers: dict[str, Container]
    kernel: str
    kernel_version: str  # "#1 SMP PREEMPT_DYNAMIC PMX 6.17.2-1 (2025-10-21T11:55Z)", as `uname -v` prints it
    cmdline: str
    user: User  # who logs in
    timing: Timing = field(default_factory=Timing)
    faults: list[Fault] = field(default_factory=list)
    boots: list[Boot] = field(default_factory=list)
    events: list[Event] = field(default_factory=list)
    requested_boots: int = 0  # how many boots somebody asked for since the machine was made
    reachable: bool = False  # whether the SSH port answers
    connections_epoch: int = 0  # grows each time that all connections are cut
    host_key: str = "first"  # which of its two host keys the machine shows
    happened: set[str] = field(default_factory=set)  # what comes only once, and has come
    revision: int = 0  # grows with every change of the state
    order: int = 0
    seed: str = ""

    @property
    def boot(self) -> Boot:
        """The present (or, while the machine is down, the last) boot."""
        return self.boots[-1]

    def system(self, name: str) -> System:
        """The userland of a container id, or of the host (``""``). Raises KeyError."""
        return self.host if name == "" else self.containers[name]

    def systems(self) -> list[System]:
        return [self.host, *self.containers.values()]

    def gpus_of(self, system: System) -> list[Gpu]:
        """The GPUs that a userland reaches: a container only those whose device node it was given and may open."""
        live = self.hw.live_gpus()
        if not isinstance(system, Container):
            return live
        return [g for g in live if system.devices.get(f"/dev/nvidia{g.minor}", "ENOENT") == ""]

    def active_faults(self) -> list[Fault]:
        """The faults that hold in the present boot."""
        return [f for f in self.faults if f.when == "always" or (f.when == "after-reboot" and self.requested_boots > 0)]

    def fault(self, kind: str) -> Fault | None:
        """The first active fault of a kind."""
        return next((f for f in self.active_faults() if f.kind == kind), None)
