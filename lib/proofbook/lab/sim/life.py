"""The life of a simulated machine: what happens on it as its time goes by.

Everything that takes time is an event (plain data, so that a saved machine goes on where it was): kernel lines, services
that start in stages, a reboot with its stops, its firmware and its boot. :meth:`Life.advance` lets them happen in order.
"""

from __future__ import annotations

import heapq
import pickle
import uuid
from collections.abc import Mapping, Sequence

from proofbook.lab.sim import changing, fault_lines, faults, identity, serving, units
from proofbook.lab.sim.os_state import Boot, Entry, Event, KernelLine, Machine, Process, System, Unit
from proofbook.lab.sim.render_kernel import kernel_boot_lines
from proofbook.lab.standin.startlog import dated

_JOURNALD = "systemd-journald.service"
JOURNAL_SOCKETS = ("systemd-journald.socket", "systemd-journald-dev-log.socket")
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

_LAUNCH_FAILURE = (
    "TP0] Scheduler hit an exception: Traceback (most recent call last):\n"
    "torch.AcceleratorError: CUDA error: unspecified launch failure\n"
)

_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin"
_SIGTERM, _SIGKILL = 15, 9
_CLD_EXITED, _CLD_KILLED = 1, 2
#: The names that systemd prints for exit statuses.
_EXIT_NAMES = {0: "SUCCESS", 1: "FAILURE", 2: "INVALIDARGUMENT"}


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
        """Write one journal entry now; while journald is stopped nobody does."""
        if system.journal_off:
            return
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

    def journald(self, system: System, message: str, catalogue: str = "", priority: int = 6, **more: str) -> None:
        """A line that journald writes into its own journal; ``journalctl -k`` does not show these."""
        fields = {
            "_TRANSPORT": "driver",
            "PRIORITY": str(priority),
            "SYSLOG_FACILITY": "3",
            "SYSLOG_IDENTIFIER": "systemd-journald",
            "_PID": str(system.units[_JOURNALD].main_pid or 287),
            "_UID": "0",
            "_GID": "0",
            "_COMM": "systemd-journal",
            "_SYSTEMD_UNIT": _JOURNALD,
            "MESSAGE": message,
        }
        if catalogue:
            fields["MESSAGE_ID"] = catalogue
        self.entry(system, {**fields, **more})

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

    def on_edited(self, name: str, path: str, text: str) -> None:
        """Somebody writes a file of a userland."""
        units.write(self.machine.system(name), path, text, mtime=self.now)

    def on_missed(self, count: int) -> None:
        """The ring buffer overran under a flood: ``count`` lines were overwritten before journald could read them.

        What the ring buffer held before is gone from it too, and only the end of the flood is seen.
        """
        self.machine.boot.kernel_log.clear()
        self.journald(self.machine.host, f"Missed {count} kernel messages", _JOURNAL_MISSED)
        for serial in range(count, count + 12):
            what = 'apparmor="ALLOWED" operation="open" profile="pve-container-mounthotplug"'
            self.on_kernel(5, f"audit: type=1400 audit({self.now:.3f}:{serial}): {what}")

    def on_journal_stopped(self, name: str) -> None:
        """Somebody stops journald and its sockets, and leaves it at that."""
        system = self.machine.system(name)
        for unit_name in JOURNAL_SOCKETS:
            unit = system.units[unit_name]
            unit.active, unit.sub, unit.inactive_enter_at = "inactive", "dead", self.now
        self.stop(system, system.units[_JOURNALD])

    def on_vacuum(self, keep_from_s: float) -> None:
        """The journal and the ring buffer lose everything before ``keep_from_s`` of this boot, and older boots altogether."""
        m = self.machine
        m.host.journal = [e for e in m.host.journal if e.boot_id == m.boot.id and e.monotonic_us >= keep_from_s * 1e6]
        m.boot.kernel_log = [line for line in m.boot.kernel_log if line.monotonic_s >= keep_from_s]
        self.journald(
            m.host, "Vacuuming done, freed 128.0M of archived journals from /var/log/journal/" + m.host.machine_id + "."
        )

    # -------------------------------------------------------------------------------------------- boot

    def answers_in_s(self) -> float | None:
        """Seconds until a machine that is down answers again; None when it will not, or when it answers now."""
        m = self.machine
        coming = {e.kind: e.at - self.now for e in reversed(m.events)}
        if m.reachable:
            return None
        if "ssh_up" in coming:
            return coming["ssh_up"]
        if "power_on" in coming:
            return coming["power_on"] + m.timing.kernel_to_ssh_s
        going_down = [coming[kind] for kind in ("halt", "power_lost") if kind in coming]
        return (
            going_down[0] + self._off_s() + m.timing.kernel_to_ssh_s if going_down and not m.fault("never-comes-back") else None
        )

    def _off_s(self) -> float:
        slow = self.machine.fault("slow-boot")
        return self.machine.timing.firmware_s + (float(slow.parameters["seconds"]) if slow else 0.0)

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
                and unit.name not in (_JOURNALD, "systemd-udevd.service")
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
            m.host.units[_JOURNALD].main_pid,
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
            self.at(self.now + self._off_s(), "power_on")

    def on_power_on(self) -> None:
        """The kernel starts. Faults of this boot take hold of the hardware first, as it is the hardware that is broken."""
        m = self.machine
        number = m.boots[-1].number + 1 if m.boots else 0
        boot_id = uuid.uuid5(uuid.UUID(m.seed), f"boot {number}").hex
        m.boots.append(Boot(boot_id, number, self.now, m.kernel, m.cmdline))
        m.hw = pickle.loads(pickle.dumps(m.board))  # a deep copy, several times faster than copy.deepcopy
        faults.at_power_on(self)
        identity.at_power_on(self)
        start = self.now
        boot_lines = kernel_boot_lines(m.hw, m.boot.cmdline, m.kernel)
        for seconds, priority, text in boot_lines:
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
        identity.after_power_on(self, boot_lines)

    def on_identity_unit(self, said: tuple[str, ...], done: bool) -> None:
        identity.ran(self, said, done)

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
        changing.at_boot(self, system)

    # ----------------------------------------------------------------------------- changes under guard, steps

    def reload(self, system: System) -> None:
        """systemd reads its units again."""
        faults.at_reload(self, system)
        for name, unit in system.units.items():
            units.load(system, name, unit)
        self.pid1(system, "Reload requested from client PID 4242 ('systemctl')...")
        self.pid1(system, "Reloading finished in 214 ms.")

    def on_guard_due(self, name: str, run_id: str) -> None:
        changing.due(self, self.machine.system(name), run_id)

    def on_guard_goes_on(self, name: str, run_id: str) -> None:
        changing.goes_on(self, self.machine.system(name), run_id)

    def on_guard_reboots(self) -> None:
        """A guard has taken back files that only a boot undoes."""
        self.request_reboot()

    def on_step_ends(self, name: str, folder: str, late: bool) -> None:
        changing.step_ends(self, self.machine.system(name), folder, late=late)

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
            if unit.active in ("active", "activating") and unit.name != _JOURNALD:
                self.stop(container, unit, at_once=True)
        self.pid1(container, "Reached target shutdown.target - System Shutdown.", catalogue=_STARTED)
        self.pid1(container, "Shutting down.", priority=5)
        self.journald(container, "Journal stopped", _JOURNAL_STOP)
        _blank(container)
        self.free_gpus()

    # ----------------------------------------------------------------------------------------- service

    def start(self, system: System, unit: Unit) -> None:
        """Start a unit now; its program goes on in stages."""
        unit.invocation_id = uuid.uuid5(
            uuid.UUID(self.machine.seed), f"{system.name} {unit.name} {self.now:.6f} {system.seqnum}"
        ).hex
        unit.result, unit.exec_code, unit.exec_status, unit.exec_ended_at = "success", 0, 0, None
        unit.inactive_exit_at = unit.active_enter_at = self.now
        unit.active_exit_at = unit.inactive_enter_at = None
        if unit.name.endswith(".socket"):
            unit.active, unit.sub = "active", "running"
            return
        if unit.name == _JOURNALD:
            system.journal_off = False
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
        for left in [p for p in system.processes.values() if p.unit == unit.name]:
            self.pid1(
                system,
                f"{unit.name}: Found left-over process {left.pid} ({left.comm}) in control group while starting unit. Ignoring.",
                unit=unit,
                priority=4,
            )
        unit.active, unit.sub = "active", "running"
        process = self._start_main(system, unit)
        unit.exec_started_at, unit.exec_pid, unit.main_pid = self.now, process.pid, process.pid
        self.pid1(system, f"Started {_name(unit)}.", unit=unit, catalogue=_STARTED)
        if serving.is_sglang(unit.exec_start):
            serving.launch(self, system, process, unit)

    def _start_main(self, system: System, unit: Unit) -> Process:
        environ = {
            "LANG": "C.UTF-8",
            "PATH": _PATH,
            "INVOCATION_ID": unit.invocation_id,
            "JOURNAL_STREAM": f"9:{20000 + system.next_pid}",
            "SYSTEMD_EXEC_PID": str(system.next_pid),
            **unit.environment,
        }
        return self.spawn(system, unit.exec_start, environ, f"/system.slice/{unit.name}", unit.name)

    def spawn(
        self, system: System, argv: Sequence[str], environ: Mapping[str, str], cgroup: str, unit: str = "", *, parent: int = 1
    ) -> Process:
        """A new process of a userland, seen by the host too."""
        pid = self._next_pid(system)
        exe = argv[0] if argv else ""
        self.machine.order += 1
        process = Process(
            pid,
            self._host_pid(system, pid),
            parent,
            list(argv),
            dict(environ),
            self.now,
            cgroup,
            unit,
            comm=exe.rpartition("/")[2][:15],
            exe=exe,
            serial=self.machine.order,
        )
        system.processes[pid] = process
        return process

    def _next_pid(self, system: System) -> int:
        pid = system.next_pid
        system.next_pid += 3
        return pid

    def _host_pid(self, system: System, pid: int) -> int:
        return pid if system is self.machine.host else self._next_pid(self.machine.host)

    def on_server(self, what: str, name: str, pid: int, serial: int, *more: object) -> None:
        """A stage in the life of an SGLang server."""
        serving.happen(self, what, name, pid, serial, *more)

    def main_ended(self, system: System, process: Process, *, killed: bool, status: int) -> None:
        """A service's main process ends by itself; systemd does what the unit's ``Restart=`` says."""
        unit = system.units.get(process.unit)
        if unit is None or unit.main_pid != process.pid:
            self.remove(system, process)
            return
        how = f"code=killed, status={status}/KILL" if killed else f"code=exited, status={status}/{_EXIT_NAMES.get(status, 'n/a')}"
        result = "signal" if killed else "exit-code" if status else "success"
        self.pid1(system, f"{unit.name}: Main process exited, {how}", unit=unit, catalogue=_PROCESS_EXIT, priority=5)
        self.remove(system, process)
        unit.main_pid, unit.memory_bytes = 0, 0
        unit.exec_code, unit.exec_status, unit.exec_ended_at = _CLD_KILLED if killed else _CLD_EXITED, status, self.now
        unit.result = result
        self.pid1(system, f"{unit.name}: Failed with result '{result}'.", unit=unit, catalogue=_FAILED_RESULT, priority=4)
        unit.active_exit_at = unit.inactive_enter_at = self.now
        if unit.restart in ("always", "on-failure"):
            unit.active, unit.sub = "activating", "auto-restart"
            self.at(self.now + unit.restart_s, "auto_restart", system.name, unit.name, unit.invocation_id)
        else:
            unit.active, unit.sub = "failed", "failed"

    def remove(self, system: System, process: Process, *, leave: bool = False) -> None:
        """A process is gone, and with it its children (they ask the kernel for that), its port and its GPU memory.

        ``leave``: the scheduler that a fault lets outlive its parent stays, as a child of PID 1.
        """
        serving.drop_later(self, system, process)
        unit = system.units.get(process.unit)
        stays = f"sglang::scheduler_TP{unit.leftover.get('rank', 0)}" if leave and unit and unit.leftover else ""
        for child in serving.children(system, process.pid):
            if child.argv[0] == stays and unit is not None:
                child.ppid = 1
                self.at(self.now + float(unit.leftover["lets_go_after_s"]), "lets_go", system.name, child.pid, child.serial)
            else:
                del system.processes[child.pid]
        system.processes.pop(process.pid, None)
        system.servers.pop(process.pid, None)
        system.running.pop(process.pid, None)
        for port in [p for p, e in system.endpoints.items() if e.pid == process.pid]:
            del system.endpoints[port]
            faults.port_is_free(self, system, port)
        self.free_gpus()

    def on_lets_go(self, name: str, pid: int, serial: int) -> None:
        """A process that hung in the driver is gone at last."""
        system = self.machine.system(name)
        process = system.processes.get(pid)
        if process is not None and process.serial == serial:
            self.remove(system, process)

    def on_port_taken(self, name: str, port: int, unit_name: str) -> None:
        faults.take_port(self, self.machine.system(name), port, unit_name)

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
        process = self.by_hand(system, unit.exec_start, unit.environment)
        serving.launch(self, system, process, None)

    def by_hand(self, system: System, argv: Sequence[str], environ: Mapping[str, str]) -> Process:
        """A process that a person started from a login shell."""
        shell = {"PATH": _PATH, "HOME": "/root", "SHELL": "/bin/bash", "TERM": "xterm-256color", "USER": "root"}
        return self.spawn(system, argv, {**shell, **environ}, "/user.slice/user-0.slice/session-3.scope")

    def stop(self, system: System, unit: Unit, *, at_once: bool = False) -> None:
        """What ``systemctl stop`` sets going: SIGTERM, and the unit is down when its processes have ended.

        ``at_once``: the machine or the container goes down, nobody waits.
        """
        if unit.active not in ("active", "activating", "reloading") or unit.sub.startswith("stop-"):
            return
        self.pid1(system, f"Stopping {_name(unit)}...", unit=unit, catalogue=_STOPPING)
        server = system.servers.get(unit.main_pid)
        if server is None or at_once:
            if server is not None:
                self.says(system, unit, dated(server.stopping()[0][1], self.now, unit.main_pid))
            self._stopped(system, unit)
            return
        unit.active, unit.sub = "deactivating", "stop-sigterm"
        process = system.processes[unit.main_pid]
        key = (system.name, process.pid, process.serial)
        lines = server.stopping()
        ready = server.ready_after_s is not None and self.now - process.started_at >= server.ready_after_s
        if not ready:
            serving.drop_later(self, system, process)
            self.at(self.now + 0.8, "main_stopped", *key)
        elif server.stuck:
            # WHY: the server waits for its running requests without limit, and here they never end; systemd's patience decides.
            self.at(self.now, "server", "says", *key, lines[0][1])
            self.at(self.now + unit.timeout_stop_s, "stop_timed_out", *key)
        else:
            for second, text in lines:
                self.at(self.now + second, "server", "says", *key, text)
            self.at(self.now + lines[-1][0] + 0.2, "main_stopped", *key)

    def on_stop_timed_out(self, name: str, pid: int, serial: int) -> None:
        system = self.machine.system(name)
        process = system.processes.get(pid)
        if process is None or process.serial != serial:
            return
        unit = system.units[process.unit]
        self.pid1(system, f"{unit.name}: State 'stop-sigterm' timed out. Killing.", unit=unit, priority=4)
        for each in [p for p in system.processes.values() if p.unit == unit.name]:
            text = f"{unit.name}: Killing process {each.pid} ({each.comm}) with signal SIGKILL."
            self.pid1(system, text, unit=unit, priority=5)
        self._stopped(system, unit, result="timeout", signal=_SIGKILL)

    def on_main_stopped(self, name: str, pid: int, serial: int) -> None:
        """The main process has ended after SIGTERM; the unit is down when nothing of it is left that systemd waits for."""
        system = self.machine.system(name)
        process = system.processes.get(pid)
        if process is None or process.serial != serial:
            return
        self._stopped(system, system.units[process.unit], leave=True)

    def _stopped(
        self, system: System, unit: Unit, *, result: str = "success", signal: int = _SIGTERM, leave: bool = False
    ) -> None:
        main = system.processes.get(unit.main_pid)
        if main is not None:
            self.remove(system, main, leave=leave)
        remaining = [p for p in system.processes.values() if p.unit == unit.name]
        for process in remaining:
            if leave:
                text = f"{unit.name}: Unit process {process.pid} ({process.comm}) remains running after unit stopped."
                self.pid1(system, text, unit=unit)
            else:
                self.remove(system, process)
        unit.main_pid, unit.memory_bytes = 0, 0
        failed = result != "success"
        unit.active, unit.sub, unit.result = ("failed", "failed", result) if failed else ("inactive", "dead", "success")
        unit.exec_code, unit.exec_status, unit.exec_ended_at = _CLD_KILLED, signal, self.now
        unit.active_exit_at = unit.inactive_enter_at = self.now
        if failed:
            self.pid1(system, f"{unit.name}: Failed with result '{result}'.", unit=unit, catalogue=_FAILED_RESULT, priority=4)
        else:
            self.pid1(system, f"{unit.name}: Deactivated successfully.", unit=unit, catalogue=_SUCCESS)
        if unit.name == _JOURNALD:
            self.journald(system, "Journal stopped", _JOURNAL_STOP)
            system.journal_off = True
        self.pid1(system, f"Stopped {_name(unit)}.", unit=unit, catalogue=_STOPPED)

    def kill_unit(self, system: System, unit: Unit) -> None:
        """``systemctl kill --signal=SIGKILL --kill-whom=all``: every process of the unit's control group."""
        main = system.processes.get(unit.main_pid)
        for process in [p for p in system.processes.values() if p.unit == unit.name and p is not main]:
            self.remove(system, process)
        if main is not None:
            self.main_ended(system, main, killed=True, status=_SIGKILL)

    def free_gpus(self) -> None:
        """Take the processes off the GPUs that no longer run."""
        alive = {p.host_pid for s in self.machine.systems() for p in s.processes.values()}
        for gpu in self.machine.hw.gpus.values():
            gpu.processes = [p for p in gpu.processes if p[0] in alive]
            if not gpu.processes:
                gpu.power_w, gpu.temperature_c, gpu.pstate = 39.2, 27, "P8"

    def keep_events(self, events: list[Event]) -> None:
        """Let these alone be what is to come."""
        self.machine.events[:] = events
        heapq.heapify(self.machine.events)

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
                    main = system.processes.get(unit.main_pid)
                    if main is None:
                        continue
                    for line in dated(_LAUNCH_FAILURE, self.now, main.pid).split("\n"):
                        self.says(system, unit, line)
                    self.main_ended(system, main, killed=True, status=_SIGKILL)

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
    system.servers.clear()
    system.running.clear()
    system.state, system.next_pid, system.journal_off = "off", 300, False
    for path in [p for p in system.files if p.startswith(("/run/", "/dev/shm/"))]:
        del system.files[path]
    for name, unit in list(system.units.items()):
        system.units[name] = Unit(unit.name, unit.description, boot_offset_s=unit.boot_offset_s)
        units.load(system, name, system.units[name])
