"""The life of a simulated machine: what happens on it as its time goes by.

Everything that takes time is an event (plain data, so that a saved machine goes on where it was): kernel lines, services
that start in stages, a reboot with its stops, its firmware and its boot. :meth:`Life.advance` lets them happen in order.
"""

from __future__ import annotations

import heapq
import pickle
import uuid

from proofbook.lab.sim import fault_lines, faults, sglang, units
from proofbook.lab.sim.os_state import Boot, Container, Endpoint, Entry, Event, KernelLine, Machine, Process, System, Unit
from proofbook.lab.sim.render_kernel import kernel_boot_lines

#: The catalogue ids of systemd's own messages (systemd's ``sd-messages.h``).
_STARTED = "39f53479d3a045ac8e11786248231fbf"
_STARTING = "7d4958e842da4a758f6c1cdc7b36dcc5"
_STOPPING = "de5b426a63be47a7b6ac3eaac82e2f6f"
_STOPPED = "9d1aaa27d60140bd96365438aad20286"
_FAILED_RESULT = "d9b373ed55a64feb8242e02dbe79a49c"
_PROCESS_EXIT = "98e322203f7a4ed290d09fe03c09fe15"
_SUCCESS = "7ad2d189f7e94e70a38c781354912448"
_RESTART = "5eb03494b6584870a536b337290809b3"
_STARTUP = "b07a249cd024414a82dd00cd181378ff"
_JOURNAL_START = "f77379a8490b408bbe5f6940505a777b"
_JOURNAL_STOP = "d93fb3c9c24d451a97cea615ce59c00b"
_JOURNAL_MISSED = "e9bf28e6e834481bb6f48f548ad13606"

#: How CUDA programs die: the last lines of PyTorch's tracebacks.
_OUT_OF_MEMORY = (
    "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 9.87 GiB. "
    "GPU 0 has a total capacity of 94.97 GiB of which 7.41 GiB is free."
)
_ERROR_803 = (
    "RuntimeError: Unexpected error from cudaGetDeviceCount(). "
    "Error 803: system has unsupported display driver / cuda driver combination"
)
_UNKNOWN_ERROR = (
    "RuntimeError: CUDA unknown error - this may be due to an incorrectly set up environment, "
    "e.g. changing env variable CUDA_VISIBLE_DEVICES after program start."
)
_LAUNCH_FAILURE = "TP0] Scheduler hit an exception: torch.AcceleratorError: CUDA error: unspecified launch failure"
_SIGTERM_LINE = "SIGTERM received. signum=None frame=None. Draining requests and shutting down..."

_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin"
_SIGTERM, _SIGKILL = 15, 9
_CLD_EXITED, _CLD_KILLED = 1, 2


class Life:
    """Lets time pass on one machine. ``now`` is the time of what is happening (seconds, the lab's clock)."""

    def __init__(self, machine: Machine, now: float) -> None:
        self.machine = machine
        self.now = now

    # ------------------------------------------------------------------------------------------ events

    def at(self, when: float, kind: str, *arguments: object) -> None:
        """Let :meth:`on_<kind> <advance>` happen at ``when``."""
        m = self.machine
        m.order += 1
        heapq.heappush(m.events, Event(when, m.order, kind, arguments))

    def next_event(self) -> float | None:
        return self.machine.events[0].at if self.machine.events else None

    def advance(self, until: float) -> int:
        """Let everything happen that is due by ``until``; how many events that were."""
        happened = 0
        while self.machine.events and self.machine.events[0].at <= until:
            event = heapq.heappop(self.machine.events)
            self.now = max(self.now, event.at)
            getattr(self, f"on_{event.kind}")(*event.arguments)
            happened += 1
        self.now = max(self.now, until)
        if happened:
            self.machine.revision += 1
        return happened

    def cancel(self, kind: str, *leading: object) -> None:
        """Drop the pending events of a kind whose first arguments are ``leading``."""
        events = self.machine.events
        events[:] = [e for e in events if not (e.kind == kind and e.arguments[: len(leading)] == leading)]
        heapq.heapify(events)

    # ----------------------------------------------------------------------------------------- journal

    def entry(self, system: System, fields: dict[str, str]) -> None:
        """Write one journal entry now."""
        boot = self.machine.boot
        system.seqnum += 1
        system.journal.append(
            Entry(system.seqnum, round(self.now * 1e6), round((self.now - boot.started_at) * 1e6), boot.id, fields)
        )

    def pid1(
        self, system: System, message: str, *, unit: Unit | None = None, catalogue: str = "", priority: int = 6, **more: str
    ) -> None:
        """A line that systemd itself says, about a unit or not."""
        fields = {
            "_TRANSPORT": "journal",
            "PRIORITY": str(priority),
            "SYSLOG_FACILITY": "3",
            "SYSLOG_IDENTIFIER": "systemd",
            "_PID": "1",
            "_UID": "0",
            "_GID": "0",
            "_COMM": "systemd",
            "_EXE": "/usr/lib/systemd/systemd",
            "_CMDLINE": "/sbin/init",
            "_SYSTEMD_CGROUP": "/init.scope",
            "_SYSTEMD_UNIT": "init.scope",
            "_SYSTEMD_SLICE": "-.slice",
            "TID": "1",
            "MESSAGE": message,
        }
        if unit is not None:
            fields["UNIT"] = unit.name
            if unit.invocation_id:
                fields["INVOCATION_ID"] = unit.invocation_id
        if catalogue:
            fields["MESSAGE_ID"] = catalogue
        self.entry(system, {**fields, **more})

    def says(self, system: System, unit: Unit, message: str, *, priority: int = 6, pid: int = 0) -> None:
        """A line that a unit's program wrote to its stdout."""
        process = system.processes.get(pid or unit.main_pid)
        comm = process.comm if process else unit.name.removesuffix(".service")
        self.entry(
            system,
            {
                "_TRANSPORT": "stdout",
                "PRIORITY": str(priority),
                "SYSLOG_FACILITY": "3",
                "SYSLOG_IDENTIFIER": unit.identifier or comm,
                "_PID": str(pid or unit.main_pid),
                "_UID": "0",
                "_GID": "0",
                "_COMM": comm,
                "_EXE": process.exe if process else "",
                "_CMDLINE": " ".join(process.argv) if process else "",
                "_STREAM_ID": uuid.uuid5(uuid.NAMESPACE_OID, unit.invocation_id).hex,
                "_SYSTEMD_CGROUP": f"/system.slice/{unit.name}",
                "_SYSTEMD_UNIT": unit.name,
                "_SYSTEMD_SLICE": "system.slice",
                "_SYSTEMD_INVOCATION_ID": unit.invocation_id,
                "MESSAGE": message,
            },
        )

    def journald(self, system: System, message: str, catalogue: str = "", priority: int = 6) -> None:
        """A line that journald writes into its own journal; ``journalctl -k`` does not show these."""
        fields = {
            "_TRANSPORT": "driver",
            "PRIORITY": str(priority),
            "SYSLOG_FACILITY": "3",
            "SYSLOG_IDENTIFIER": "systemd-journald",
            "_PID": str(system.units["systemd-journald.service"].main_pid or 287),
            "_COMM": "systemd-journal",
            "_SYSTEMD_UNIT": "systemd-journald.service",
            "MESSAGE": message,
        }
        if catalogue:
            fields["MESSAGE_ID"] = catalogue
        self.entry(system, fields)

    def logind(self, message: str) -> None:
        unit = self.machine.host.units["systemd-logind.service"]
        self.entry(
            self.machine.host,
            {
                "_TRANSPORT": "syslog",
                "PRIORITY": "5",
                "SYSLOG_FACILITY": "4",
                "SYSLOG_IDENTIFIER": "systemd-logind",
                "_PID": str(unit.main_pid),
                "_COMM": "systemd-logind",
                "_SYSTEMD_UNIT": unit.name,
                "_SYSTEMD_INVOCATION_ID": unit.invocation_id,
                "MESSAGE": message,
            },
        )

    def on_kernel(self, priority: int, text: str) -> None:
        """A kernel line: into the ring buffer, and from there into the host's journal."""
        boot = self.machine.boot
        boot.kernel_log.append(KernelLine(self.now - boot.started_at, priority, text))
        self.entry(
            self.machine.host,
            {
                "_TRANSPORT": "kernel",
                "PRIORITY": str(priority),
                "SYSLOG_FACILITY": "0",
                "SYSLOG_IDENTIFIER": "kernel",
                "MESSAGE": text,
            },
        )

    def on_missed(self, count: int) -> None:
        """The ring buffer overran under a flood: ``count`` lines were overwritten before journald could read them.

        What the ring buffer held before is gone from it too, and only the end of the flood is seen.
        """
        self.machine.boot.kernel_log.clear()
        self.journald(self.machine.host, f"Missed {count} kernel messages", _JOURNAL_MISSED)
        for serial in range(count, count + 12):
            what = 'apparmor="ALLOWED" operation="open" profile="pve-container-mounthotplug"'
            self.on_kernel(5, f"audit: type=1400 audit({self.now:.3f}:{serial}): {what}")

    def on_vacuum(self, keep_from_s: float) -> None:
        """The journal and the ring buffer lose everything before ``keep_from_s`` of this boot, and older boots altogether."""
        m = self.machine
        m.host.journal = [e for e in m.host.journal if e.boot_id == m.boot.id and e.monotonic_us >= keep_from_s * 1e6]
        m.boot.kernel_log = [line for line in m.boot.kernel_log if line.monotonic_s >= keep_from_s]
        self.journald(
            m.host, "Vacuuming done, freed 128.0M of archived journals from /var/log/journal/" + m.host.machine_id + "."
        )

    # -------------------------------------------------------------------------------------------- boot

    def request_reboot(self) -> None:
        """What ``systemctl reboot`` sets going."""
        m = self.machine
        self.logind("The system will reboot now!")
        self.logind("System is rebooting.")
        m.host.state = "stopping"
        for target in ("graphical.target", "multi-user.target"):
            self._stop_target(m.host, m.host.units[target])
        m.revision += 1
        if m.fault("reboot-ignored"):
            self.pid1(
                m.host,
                "Stopping pve-guests.service - PVE guests...",
                catalogue=_STOPPING,
                unit=m.host.units["pve-guests.service"],
            )
            return
        m.requested_boots += 1
        self.at(self.now + 0.3, "stop_ssh")
        if m.fault("unclean-shutdown"):
            self.at(self.now + 2.0, "power_lost")
            return
        for container in m.containers.values():
            self.at(self.now + 1.0, "stop_container", container.id)
        self.at(self.now + m.timing.shutdown_s, "halt")

    def _stop_target(self, system: System, target: Unit) -> None:
        target.active, target.sub, target.active_exit_at, target.inactive_enter_at = "inactive", "dead", self.now, self.now
        self.pid1(system, f"Stopped target {_name(target)}.", unit=target, catalogue=_STOPPED)

    def on_stop_ssh(self) -> None:
        m = self.machine
        ssh = m.host.units["ssh.service"]
        self.pid1(m.host, f"Stopping {_name(ssh)}...", unit=ssh, catalogue=_STOPPING)
        self.says(m.host, ssh, "Received signal 15; terminating.")
        self._stopped(m.host, ssh)
        m.reachable = False
        m.connections_epoch += 1

    def on_halt(self) -> None:
        """The orderly end of a boot: everything stops, the journal says so in its last lines."""
        m = self.machine
        for unit in reversed(list(m.host.units.values())):
            if (
                unit.active == "active"
                and unit.name.endswith(".service")
                and unit.name not in ("systemd-journald.service", "systemd-udevd.service")
            ):
                self._stopped(m.host, unit)
        for target in ("shutdown.target - System Shutdown", "final.target - Late Shutdown Services"):
            self.pid1(m.host, f"Reached target {target}.", catalogue=_STARTED)
        self.pid1(m.host, "systemd-reboot.service: Deactivated successfully.", catalogue=_SUCCESS)
        self.pid1(m.host, "Finished systemd-reboot.service - System Reboot.", catalogue=_STARTED)
        self.pid1(m.host, "Reached target reboot.target - System Reboot.", catalogue=_STARTED)
        self.pid1(m.host, "Shutting down.", priority=5)
        for text in ("Syncing filesystems and block devices.", "Sending SIGTERM to remaining processes..."):
            self._kmsg("systemd-shutdown", 1, text)
        self._kmsg(
            "systemd-journald",
            m.host.units["systemd-journald.service"].main_pid,
            "Received SIGTERM from PID 1 (systemd-shutdow).",
        )
        self.journald(m.host, "Journal stopped", _JOURNAL_STOP)
        self._end_boot(orderly=True)

    def _kmsg(self, who: str, pid: int, text: str) -> None:
        self.entry(
            self.machine.host,
            {
                "_TRANSPORT": "kernel",
                "PRIORITY": "6",
                "SYSLOG_FACILITY": "3",
                "SYSLOG_IDENTIFIER": who,
                "SYSLOG_PID": str(pid),
                "MESSAGE": text,
            },
        )

    def on_power_lost(self) -> None:
        """The machine resets in the middle: no more lines."""
        self._end_boot(orderly=False)

    def _end_boot(self, *, orderly: bool) -> None:
        m = self.machine
        m.boot.ended_at, m.boot.orderly = self.now, orderly
        m.events.clear()  # what the old kernel had still to do will not happen
        m.reachable = False
        for system in m.systems():
            _blank(system)
        if not m.fault("never-comes-back"):
            slow = m.fault("slow-boot")
            self.at(self.now + m.timing.firmware_s + (float(slow.parameters["seconds"]) if slow else 0.0), "power_on")

    def on_power_on(self) -> None:
        """The kernel starts. Faults of this boot take hold of the hardware first, as it is the hardware that is broken."""
        m = self.machine
        number = m.boots[-1].number + 1 if m.boots else 0
        boot_id = uuid.uuid5(uuid.UUID(m.seed), f"boot {number}").hex
        m.boots.append(Boot(boot_id, number, self.now, m.kernel, m.cmdline))
        m.hw = pickle.loads(pickle.dumps(m.board))  # a deep copy, several times faster than copy.deepcopy
        faults.at_power_on(self)
        start = self.now
        for seconds, priority, text in kernel_boot_lines(m.hw, m.boot.cmdline, m.kernel):
            self.at(start + seconds, "kernel", priority, text)
        m.host.state, m.host.started_at = "starting", start
        self.at(start + 4.2, "journal_starts", "")
        for unit in m.host.units.values():
            if unit.boot_offset_s is not None:
                self.at(start + unit.boot_offset_s, "boot_unit", "", unit.name)
        self.at(start + m.timing.kernel_to_ssh_s, "ssh_up")
        for container in m.containers.values():
            if container.onboot:
                self.at(start + m.timing.guests_s, "start_container", container.id)
        self.at(start + m.timing.guests_s + 3.0, "started_up", "")
        faults.after_power_on(self)

    def on_journal_starts(self, name: str) -> None:
        system = self.machine.system(name)
        self.journald(system, "Journal started", _JOURNAL_START)
        self.pid1(
            system,
            "systemd 257.9-1~deb13u1 running in system mode (+PAM +AUDIT +SELINUX +APPARMOR "
            "+IMA +IPE +SMACK +SECCOMP +GCRYPT "
            "-GNUTLS +OPENSSL +ACL +BLKID +CURL +ELFUTILS +FIDO2 +IDN2 -IDN +IPTC +KMOD +LIBCRYPTSETUP)",
        )

    def on_boot_unit(self, name: str, unit_name: str) -> None:
        system = self.machine.system(name)
        unit = system.units[unit_name]
        units.load(system, unit_name, unit)
        if unit.enabled not in ("enabled", "static") or unit.active == "active":
            return
        if unit.behaviour == "skipped":
            self.pid1(
                system,
                f"{_name(unit)} was skipped because of an unmet condition check (ConditionPathIsMountPoint=/models).",
                unit=unit,
            )
            return
        self.start(system, unit)

    def on_ssh_up(self) -> None:
        m = self.machine
        m.reachable = True

    def on_started_up(self, name: str) -> None:
        m = self.machine
        system = m.system(name)
        if system.state != "starting":
            return
        system.state = "running"
        total = self.now - system.started_at
        detail = f"7.214s (kernel) + {total - 7.2:.3f}s (userspace) = {total:.3f}s" if name == "" else f"{total:.3f}s"
        for target in ("multi-user.target", "graphical.target"):
            self.start(system, system.units[target])
        self.pid1(system, f"Startup finished in {detail}.", catalogue=_STARTUP)

    # --------------------------------------------------------------------------------------- container

    def on_start_container(self, container_id: str) -> None:
        m = self.machine
        container = m.containers[container_id]
        if container.state != "off":
            return
        self.pid1(
            m.host,
            f"Started pve-container@{container_id}.service - PVE LXC Container: {container_id}.",
            catalogue=_STARTED,
            UNIT=f"pve-container@{container_id}.service",
        )
        container.state, container.started_at = "starting", self.now
        container.processes[1] = Process(
            1, m.host.next_pid, 0, ["/sbin/init"], {"container": "lxc"}, self.now, "/init.scope", comm="systemd"
        )
        m.host.next_pid += 7
        self.at(self.now + 0.4, "journal_starts", container_id)
        for unit in container.units.values():
            if unit.boot_offset_s is not None:
                self.at(self.now + unit.boot_offset_s, "boot_unit", container_id, unit.name)
        self.at(self.now + 5.0, "started_up", container_id)
        faults.after_container_start(self, container)

    def on_stop_container(self, container_id: str) -> None:
        """An orderly stop: its services end, its journal stops."""
        container = self.machine.containers[container_id]
        if container.state == "off":
            return
        container.state = "stopping"
        self.pid1(container, "Received SIGRTMIN+3.")
        for target in ("graphical.target", "multi-user.target"):
            self._stop_target(container, container.units[target])
        for unit in reversed(list(container.units.values())):
            if unit.active in ("active", "activating") and unit.name != "systemd-journald.service":
                self.stop(container, unit)
        self.pid1(container, "Reached target shutdown.target - System Shutdown.", catalogue=_STARTED)
        self.pid1(container, "Shutting down.", priority=5)
        self.journald(container, "Journal stopped", _JOURNAL_STOP)
        _blank(container)
        self._free_gpus(container)

    # ----------------------------------------------------------------------------------------- service

    def start(self, system: System, unit: Unit) -> None:
        """Start a unit now; its program goes on in stages."""
        unit.invocation_id = uuid.uuid5(
            uuid.UUID(self.machine.seed), f"{system.name} {unit.name} {self.now:.6f} {system.seqnum}"
        ).hex
        unit.result, unit.exec_code, unit.exec_status, unit.exec_ended_at = "success", 0, 0, None
        unit.inactive_exit_at = unit.active_enter_at = self.now
        unit.active_exit_at = unit.inactive_enter_at = None
        if unit.name.endswith(".target"):
            unit.active, unit.sub = "active", "active"
            self.pid1(system, f"Reached target {_name(unit)}.", unit=unit, catalogue=_STARTED)
            return
        if unit.type == "oneshot":
            unit.active, unit.sub = "active", "exited"
            unit.exec_started_at = unit.exec_ended_at = self.now
            unit.exec_code, unit.exec_pid = _CLD_EXITED, self._next_pid(system)
            self.pid1(system, f"Finished {_name(unit)}.", unit=unit, catalogue=_STARTED)
            return
        if unit.type in ("notify", "forking"):
            self.pid1(system, f"Starting {_name(unit)}...", unit=unit, catalogue=_STARTING)
        unit.active, unit.sub = "active", "running"
        process = self._spawn(system, unit)
        unit.exec_started_at, unit.exec_pid, unit.main_pid = self.now, process.pid, process.pid
        self.pid1(system, f"Started {_name(unit)}.", unit=unit, catalogue=_STARTED)
        if sglang.is_sglang(unit.exec_start):
            self._start_sglang(system, unit)

    def _spawn(self, system: System, unit: Unit) -> Process:
        pid = self._next_pid(system)
        environ = {
            "LANG": "C.UTF-8",
            "PATH": _PATH,
            "INVOCATION_ID": unit.invocation_id,
            "JOURNAL_STREAM": f"9:{20000 + pid}",
            "SYSTEMD_EXEC_PID": str(pid),
            **unit.environment,
        }
        argv = list(unit.exec_start)
        exe = argv[0] if argv else ""
        process = Process(
            pid,
            self._host_pid(system, pid),
            1,
            argv,
            environ,
            self.now,
            f"/system.slice/{unit.name}",
            unit.name,
            comm=exe.rpartition("/")[2][:15],
            exe=exe,
        )
        system.processes[pid] = process
        return process

    def _next_pid(self, system: System) -> int:
        pid = system.next_pid
        system.next_pid += 3
        return pid

    def _host_pid(self, system: System, pid: int) -> int:
        return pid if system is self.machine.host else self._next_pid(self.machine.host)

    def _start_sglang(self, system: System, unit: Unit) -> None:
        """SGLang starts: either it comes up in stages, or it dies for a reason that the machine gives it."""
        m, invocation = self.machine, unit.invocation_id
        ranks = sglang.tp_size(unit.exec_start)
        reason = self._why_cuda_fails(system, ranks)
        if not reason and unit.behaviour == "crash":
            reason = _OUT_OF_MEMORY
        if reason:
            for offset, text in sglang.death(reason):
                self.at(self.now + offset, "program_line", system.name, unit.name, invocation, text, 3)
            self.at(self.now + 9.4, "program_exit", system.name, unit.name, invocation, _CLD_EXITED, 1)
            return
        for rank in range(ranks):
            pid = self._next_pid(system)
            system.processes[pid] = Process(
                pid,
                self._host_pid(system, pid),
                unit.main_pid,
                [f"sglang::scheduler_TP{rank}"],
                dict(system.processes[unit.main_pid].environ),
                self.now,
                f"/system.slice/{unit.name}",
                unit.name,
                comm="sglang::schedul",
                rss_kib=6_291_456,
                exe=unit.exec_start[0],
            )
        self.at(self.now + m.timing.sglang_s * 0.34, "fill_gpus", system.name, unit.name, invocation)
        for offset, text in sglang.startup(unit.exec_start, unit.environment, m.timing.sglang_s):
            if unit.behaviour == "hang" and "Capture cuda graph end" in text:
                return  # the graphs are never captured: the process lives on, and its port never opens
            self.at(self.now + offset, "program_line", system.name, unit.name, invocation, text, 6)
        self.at(
            self.now + sglang.listens_after(m.timing.sglang_s),
            "listen",
            system.name,
            unit.name,
            invocation,
            self.now + m.timing.sglang_s,
        )

    def _why_cuda_fails(self, system: System, ranks: int) -> str:
        """The last line of the traceback with which a CUDA program dies here; "" when it does not."""
        m = self.machine
        nvidia = m.hw.nvidia
        if nvidia.library_version != nvidia.module_version:
            return _ERROR_803
        denied = system.devices if isinstance(system, Container) else {}
        if denied.get("/dev/nvidia-uvm", ""):
            return _UNKNOWN_ERROR
        usable = [g for g in m.gpus_of(system) if g.condition == "ok"]
        if len(usable) < ranks:
            return "torch.AcceleratorError: CUDA error: invalid device ordinal"
        return ""

    def _holds(self, system: System, unit: Unit, invocation: str) -> bool:
        return unit.invocation_id == invocation and unit.main_pid in system.processes

    def on_program_line(self, name: str, unit_name: str, invocation: str, text: str, priority: int) -> None:
        system = self.machine.system(name)
        unit = system.units[unit_name]
        if self._holds(system, unit, invocation):
            line = sglang.dated(text, self.now, unit.main_pid) if priority > 3 else text
            # WHY: the journal keeps one priority per stream; what a program prints as an error is priority 6 all the same.
            self.says(system, unit, line)

    def on_fill_gpus(self, name: str, unit_name: str, invocation: str) -> None:
        system = self.machine.system(name)
        unit = system.units[unit_name]
        if not self._holds(system, unit, invocation):
            return
        schedulers = [
            p for p in system.processes.values() if p.unit == unit_name and p.argv[0].startswith("sglang::scheduler_TP")
        ]
        for gpu, process in zip(self.machine.gpus_of(system), schedulers, strict=False):
            gpu.processes.append((process.host_pid, process.argv[0], 76842))
            gpu.power_w, gpu.temperature_c, gpu.pstate = 82.4, 34, "P1"
        unit.memory_bytes = 41 * 1024**3

    def on_listen(self, name: str, unit_name: str, invocation: str, ready_at: float) -> None:
        system = self.machine.system(name)
        unit = system.units[unit_name]
        if self._holds(system, unit, invocation):
            port = sglang.port(unit.exec_start)
            process = system.processes[unit.main_pid]
            system.endpoints[port] = Endpoint(
                port, "sglang", unit_name, {"ready_at": ready_at, "argv": process.argv, "environ": process.environ}
            )

    def on_program_exit(self, name: str, unit_name: str, invocation: str, code: int, status: int) -> None:
        """The main process ends by itself; systemd does what the unit's ``Restart=`` says."""
        system = self.machine.system(name)
        unit = system.units[unit_name]
        if not self._holds(system, unit, invocation):
            return
        how = f"code=exited, status={status}/FAILURE" if code == _CLD_EXITED else f"code=killed, status={status}/KILL"
        result = "exit-code" if code == _CLD_EXITED else "signal"
        self.pid1(system, f"{unit.name}: Main process exited, {how}", unit=unit, catalogue=_PROCESS_EXIT, priority=5)
        self._kill_processes(system, unit)
        unit.exec_code, unit.exec_status, unit.exec_ended_at, unit.result = code, status, self.now, result
        self.pid1(system, f"{unit.name}: Failed with result '{result}'.", unit=unit, catalogue=_FAILED_RESULT, priority=4)
        unit.active_exit_at = unit.inactive_enter_at = self.now
        if unit.restart in ("always", "on-failure"):
            unit.active, unit.sub = "activating", "auto-restart"
            self.at(self.now + unit.restart_s, "auto_restart", name, unit_name, invocation)
        else:
            unit.active, unit.sub = "failed", "failed"

    def on_auto_restart(self, name: str, unit_name: str, invocation: str) -> None:
        system = self.machine.system(name)
        unit = system.units[unit_name]
        if unit.sub != "auto-restart" or unit.invocation_id != invocation:
            return
        unit.n_restarts += 1
        self.pid1(
            system, f"{unit.name}: Scheduled restart job, restart counter is at {unit.n_restarts}.", unit=unit, catalogue=_RESTART
        )
        self.start(system, unit)

    def on_start_by_hand(self, name: str, unit_name: str) -> None:
        """A person runs ``systemctl start``."""
        system = self.machine.system(name)
        if system.units[unit_name].active != "active":
            self.start(system, system.units[unit_name])

    def on_nohup(self, name: str, unit_name: str) -> None:
        """A person starts the unit's program from a shell: it runs and answers, and systemd knows nothing of it."""
        system = self.machine.system(name)
        unit = system.units[unit_name]
        pid = self._next_pid(system)
        environ = {
            "PATH": _PATH,
            "HOME": "/root",
            "SHELL": "/bin/bash",
            "TERM": "xterm-256color",
            "USER": "root",
            **unit.environment,
        }
        system.processes[pid] = Process(
            pid,
            self._host_pid(system, pid),
            1,
            list(unit.exec_start),
            environ,
            self.now,
            "/user.slice/user-0.slice/session-3.scope",
            comm="python",
            exe=unit.exec_start[0],
        )
        port = sglang.port(unit.exec_start)
        ready = self.now + self.machine.timing.sglang_s
        system.endpoints[port] = Endpoint(port, "sglang", "", {"ready_at": ready, "argv": unit.exec_start, "environ": environ})

    def stop(self, system: System, unit: Unit) -> None:
        """What ``systemctl stop`` does; SGLang says that it got the signal."""
        if unit.active not in ("active", "activating", "reloading"):
            return
        self.pid1(system, f"Stopping {_name(unit)}...", unit=unit, catalogue=_STOPPING)
        if sglang.is_sglang(unit.exec_start) and unit.main_pid:
            self.says(
                system,
                unit,
                sglang.dated(_SIGTERM_LINE, self.now, unit.main_pid),
            )
        self._stopped(system, unit)

    def _stopped(self, system: System, unit: Unit) -> None:
        self._kill_processes(system, unit)
        unit.active, unit.sub, unit.result = "inactive", "dead", "success"
        unit.exec_code, unit.exec_status, unit.exec_ended_at = _CLD_KILLED, _SIGTERM, self.now
        unit.active_exit_at = unit.inactive_enter_at = self.now
        self.pid1(system, f"{unit.name}: Deactivated successfully.", unit=unit, catalogue=_SUCCESS)
        self.pid1(system, f"Stopped {_name(unit)}.", unit=unit, catalogue=_STOPPED)

    def _kill_processes(self, system: System, unit: Unit) -> None:
        for pid in [p.pid for p in system.processes.values() if p.unit == unit.name]:
            del system.processes[pid]
        system.endpoints = {port: e for port, e in system.endpoints.items() if e.unit != unit.name}
        unit.main_pid = 0
        if sglang.is_sglang(unit.exec_start):
            self._free_gpus(system)

    def _free_gpus(self, system: System) -> None:
        """Take the processes off the GPUs that no longer run."""
        alive = {p.host_pid for s in self.machine.systems() for p in s.processes.values()}
        for gpu in self.machine.hw.gpus.values():
            gpu.processes = [p for p in gpu.processes if p[0] in alive]
            if not gpu.processes:
                gpu.power_w, gpu.temperature_c, gpu.pstate = 39.2, 27, "P8"

    def on_gpu_lost(self, pci: str) -> None:
        """A GPU falls off the bus (Xid 79), and what follows from it (154, 45)."""
        m = self.machine
        gpu = m.hw.gpus.get(pci)
        if gpu is None:
            return
        lines = [*fault_lines.xid79(pci, gpu.uuid, serial=gpu.serial), *fault_lines.xid154(pci, "Reboot")]
        for host_pid, name, _ in gpu.processes:
            lines += fault_lines.xid(pci, 45, "Ch 00000008", pid=str(host_pid), name=name[:15])
        for line in lines:
            self.on_kernel(line.priority, line.text)
        self.on_gpu_condition(pci, "lost", "Reboot")
        self.at(self.now + 12.0, "gpu_users_die", pci)

    def on_gpu_users_die(self, pci: str) -> None:
        """A GPU is gone: its users are killed by their own watchdogs."""
        gpu = self.machine.hw.gpus.get(pci)
        if gpu is None:
            return
        for system in self.machine.systems():
            for unit in system.units.values():
                pids = {p.host_pid for p in system.processes.values() if p.unit == unit.name}
                if pids & {p[0] for p in gpu.processes}:
                    self.says(
                        system,
                        unit,
                        sglang.dated(
                            _LAUNCH_FAILURE,
                            self.now,
                            unit.main_pid,
                        ),
                    )
                    self.on_program_exit(system.name, unit.name, unit.invocation_id, _CLD_KILLED, _SIGKILL)

    def on_gpu_condition(self, pci: str, condition: str, recovery_action: str) -> None:
        gpu = self.machine.hw.gpus.get(pci)
        if gpu is not None:
            gpu.condition, gpu.recovery_action = condition, recovery_action
            if condition == "lost":
                self.machine.hw.pci[pci].config_dead = True


def _name(unit: Unit) -> str:
    """As systemd 257 names a unit in its messages."""
    return unit.name if unit.description == unit.name else f"{unit.name} - {unit.description}"


def _blank(system: System) -> None:
    """What a system is when it is off: no processes, no listeners, no unit that ever ran."""
    system.processes.clear()
    system.endpoints.clear()
    system.state, system.next_pid = "off", 300
    for path in [p for p in system.files if p.startswith(("/run/", "/dev/shm/"))]:
        del system.files[path]
    for name, unit in list(system.units.items()):
        system.units[name] = Unit(unit.name, unit.description, boot_offset_s=unit.boot_offset_s)
        units.load(system, name, system.units[name])
