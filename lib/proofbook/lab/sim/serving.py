"""SGLang servers on a simulated machine: their processes, their GPU memory, their log lines, their port, and their end.

What a server says and answers comes from :class:`proofbook.lab.standin.engine.Server`; here it gets a machine around it. Every
stage is an event of the machine's life that names the server's main process by PID and serial, so that nothing happens to a
later process with the same PID.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from proofbook.lab.sim.os_state import Container, Endpoint, Process, System, Unit
from proofbook.lab.sim.state import Gpu
from proofbook.lab.standin import arguments, memory
from proofbook.lab.standin.engine import Effect, Reply, Server
from proofbook.lab.standin.startlog import dated

if TYPE_CHECKING:
    from proofbook.lab.sim.life import Life

#: How CUDA programs die: the last lines of PyTorch's tracebacks.
_ERROR_803 = (
    "RuntimeError: Unexpected error from cudaGetDeviceCount(). "
    "Error 803: system has unsupported display driver / cuda driver combination"
)
_UNKNOWN_ERROR = (
    "RuntimeError: CUDA unknown error - this may be due to an incorrectly set up environment, "
    "e.g. changing env variable CUDA_VISIBLE_DEVICES after program start."
)
_INVALID_DEVICE = "torch.AcceleratorError: CUDA error: invalid device ordinal"

_SUPPRESSED = "a596d6fe7bfa4994828e72309e95d61e"  # SD_MESSAGE_JOURNAL_DROPPED
_GENERATES = ("/generate", "/v1/chat/completions", "/v1/completions")

is_sglang = arguments.is_server


def generates(method: str, path: str) -> bool:
    """Whether a request makes the server decode tokens, and so counts as one that is under way."""
    return method == "POST" and path.partition("?")[0] in _GENERATES


def ranks_of(life: Life, system: System) -> list[Gpu]:
    return [g for g in life.machine.gpus_of(system) if g.condition == "ok"]


# --------------------------------------------------------------------------------------------- starting


def launch(life: Life, system: System, process: Process, unit: Unit | None) -> None:
    """A process whose command line is a server's begins: all that follows is scheduled. ``unit``: None when started by hand."""
    machine = life.machine
    gpus = ranks_of(life, system)
    server = Server(
        tuple(process.argv),
        dict(process.environ),
        system.packages.get("sglang", "0.5.10"),
        dict(unit.server_faults) if unit else {},
        free_gib=tuple(memory.FREE - g.used_mib / 1024 for g in gpus),
        ready_s=machine.timing.sglang_s,
        seed=machine.seed,
        cuda_error=_why_cuda_fails(life, system, process),
    )
    if server.resolved is not None and len(gpus) < server.tp_size and not server.cuda_error:
        server = Server(server.argv, server.environ, server.version, cuda_error=_INVALID_DEVICE, ready_s=server.ready_s)
    system.servers[process.pid] = server
    begun = life.now

    def later(second: float, what: str, *more: Any) -> None:
        life.at(begun + second, "server", what, system.name, process.pid, process.serial, *more)

    if server.ranks_after_s is not None:
        later(min(server.ranks_after_s, 0.5), "ranks")
    for second, text in server.startup():
        later(second, "says", text, server.resolved is not None)
    if server.ends is not None:
        later(server.ends.after_s, "ends", server.ends.killed, server.ends.status)
        return
    later(server.fills_after_s, "fills")
    if server.listens_after_s is not None and server.ready_after_s is not None:
        later(server.listens_after_s, "listens")
        for effect in server.background():
            later(server.ready_after_s + effect.after_s, "befalls", effect)


def _why_cuda_fails(life: Life, system: System, process: Process) -> str:
    """The last line of the traceback with which a CUDA program dies here; "" when it does not."""
    nvidia = life.machine.hw.nvidia
    if nvidia.library_version != nvidia.module_version:
        return _ERROR_803
    denied = system.devices if isinstance(system, Container) else {}
    return _UNKNOWN_ERROR if denied.get("/dev/nvidia-uvm", "") else ""


# ------------------------------------------------------------------------------------------- what happens


def happen(life: Life, what: str, name: str, pid: int, serial: int, *more: Any) -> None:
    """Let one stage happen to a server, if its main process is still that very one."""
    system = life.machine.system(name)
    process, server = system.processes.get(pid), system.servers.get(pid)
    if process is not None and server is not None and process.serial == serial:
        _STAGES[what](life, system, process, server, *more)


def _ranks(life: Life, system: System, process: Process, server: Server) -> None:
    """The schedulers and the detokenizer, under the names that they give themselves."""
    for title in [*(f"sglang::scheduler_TP{rank}" for rank in range(server.tp_size)), "sglang::detokenizer"]:
        child = life.spawn(system, [title], process.environ, process.cgroup, process.unit, parent=process.pid)
        child.comm, child.exe = title[:15], process.exe
        child.rss_kib = 6_291_456 if "scheduler" in title else 524_288


def _says(life: Life, system: System, process: Process, server: Server, text: str, with_date: bool = True) -> None:
    unit = system.units.get(process.unit)
    if unit is None:
        return  # started by hand: what it says goes to somebody's terminal
    text = dated(text, life.now, process.pid) if with_date else text
    second = life.now - process.started_at
    if unit.suppressed[0] <= second < unit.suppressed[1]:
        unit.dropped += text.count("\n") + 1
        return
    if unit.dropped:
        _tell_dropped(life, system, process, unit)
    for line in text.split("\n"):
        # WHY: the journal keeps one priority per stream; what a program prints as an error is priority 6 all the same.
        life.says(system, unit, line)


def _tell_dropped(life: Life, system: System, process: Process, unit: Unit) -> None:
    about = {
        "OBJECT_PID": str(process.pid),
        "OBJECT_SYSTEMD_UNIT": unit.name,
        "OBJECT_SYSTEMD_INVOCATION_ID": unit.invocation_id,
        "N_DROPPED": str(unit.dropped),
    }
    life.journald(system, f"Suppressed {unit.dropped} messages from {unit.name}", _SUPPRESSED, 4, **about)
    unit.dropped = 0


def _fills(life: Life, system: System, process: Process, server: Server) -> None:
    """The weights and pools take their memory; from then on the files are in the page cache."""
    if server.hangs_at_start and "p2p-hang" in server.faults:
        return
    schedulers = [c for c in children(system, process.pid) if c.argv[0].startswith("sglang::scheduler_TP")]
    for gpu, child in zip(life.machine.gpus_of(system), schedulers, strict=False):
        gpu.processes.append((child.host_pid, child.argv[0], server.used_mib))
        gpu.power_w, gpu.temperature_c, gpu.pstate = 82.4, 34, "P1"
    if server.resolved is not None:
        system.page_cache[str(server.resolved.args["model_path"])] = 1.0
    unit = system.units.get(process.unit)
    if unit is not None:
        unit.memory_bytes = 41 * 1024**3


def _listens(life: Life, system: System, process: Process, server: Server) -> None:
    owner = system.endpoints.get(server.port)
    if owner is None:
        where = str(server.resolved.args["host"]) if server.resolved else "0.0.0.0"
        system.endpoints[server.port] = Endpoint(server.port, process.pid, where)
        return
    lines, end = server.port_taken()
    drop_later(life, system, process)
    for line in lines:
        _says(life, system, process, server, line)
    life.at(life.now + 0.4, "server", "ends", system.name, process.pid, process.serial, end.killed, end.status)


def _ends(life: Life, system: System, process: Process, server: Server, killed: bool, status: int) -> None:
    life.main_ended(system, process, killed=killed, status=status)


def _befalls(life: Life, system: System, process: Process, server: Server, effect: Effect) -> None:
    for line in effect.lines:
        _says(life, system, process, server, line)
    if effect.kind == "die":
        life.main_ended(system, process, killed=True, status=9)
        return
    title = f"sglang::scheduler_TP{effect.rank}"
    for child in [c for c in children(system, process.pid) if c.argv[0] == title]:
        del system.processes[child.pid]
    life.free_gpus()


_STAGES: dict[str, Callable[..., None]] = {
    "ranks": _ranks,
    "says": _says,
    "fills": _fills,
    "listens": _listens,
    "ends": _ends,
    "befalls": _befalls,
}


def drop_later(life: Life, system: System, process: Process) -> None:
    """What a server had still to do will not happen."""
    events = life.machine.events
    mine = (system.name, process.pid, process.serial)
    life.keep_events([e for e in events if not (e.kind == "server" and e.arguments[1:4] == mine)])


def children(system: System, pid: int) -> list[Process]:
    return [p for p in system.processes.values() if p.ppid == pid]


# ---------------------------------------------------------------------------------------------- answering


def server_at(system: System, port: int) -> tuple[Process, Server] | None:
    """Who answers on a port of a userland; None when nobody listens."""
    endpoint = system.endpoints.get(port)
    if endpoint is None:
        return None
    process, server = system.processes.get(endpoint.pid), system.servers.get(endpoint.pid)
    return (process, server) if process is not None and server is not None else None


def respond(
    life: Life,
    system: System,
    process: Process,
    server: Server,
    method: str,
    path: str,
    body: bytes,
    client: str,
    authorization: str = "",
) -> Reply:
    """Ask the server now: what it prints and what befalls it is scheduled, and the reply says how long it takes."""
    second = life.now - process.started_at
    ready = server.ready_after_s is None or second >= server.ready_after_s
    running = max(1, system.running.get(process.pid, 0))
    reply = server.answer(
        method, path, body, running=running, ready=ready, client=client, age_s=second, authorization=authorization
    )
    key = (system.name, process.pid, process.serial)
    for at, text in reply.log:
        life.at(life.now + at, "server", "says", *key, text)
    for effect in reply.effects:
        life.at(life.now + effect.after_s, "server", "befalls", *key, effect)
    life.machine.revision += 1
    return reply
