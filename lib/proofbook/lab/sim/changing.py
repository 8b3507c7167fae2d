"""Guarded changes, the lease and detached steps of a simulated machine: what guard.sh, lease.sh and detached.sh do to it.

They work on its files, in the same places and with the same words as on a real machine. The guard's timer is an event of
the machine's life; it is written in the files too, so a reboot (which drops all events) sets it again.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import posixpath
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from typing import TYPE_CHECKING

from proofbook.lab.sim.locks import why_not
from proofbook.lab.sim.os_state import System, Unit
from proofbook.lab.sim.vfs import FileNode, directory, link
from proofbook.remote.guard import CHANGES

if TYPE_CHECKING:
    from proofbook.lab.sim.life import Life

_BASE = "/var/lib/proofbook"
_UNITS = "/etc/systemd/system"
_RUNS = ("active", "activating", "reloading")


class Refusal(Exception):
    """A verb does not do its part; the exit status of the program and its words."""

    def __init__(self, status: int, words: str) -> None:
        super().__init__(words)
        self.status = status


@dataclass
class Disk:
    """The written files of one userland, as root sees them."""

    life: Life
    system: System

    def node(self, path: str) -> FileNode | None:
        return self.system.files.get(path)

    def read(self, path: str) -> bytes | None:
        node = self.node(path)
        return node.read() if node is not None and node.kind == "file" else None

    def text(self, path: str) -> str:
        return (self.read(path) or b"").decode("utf-8", "replace")

    def put(self, path: str, node: FileNode | None, *, grows: bool = False) -> None:
        """Put a file in place. Raises OSError where that cannot be; ``grows``: its bytes are not there yet."""
        locked = why_not(self.system, path, grows=grows)
        if locked is not None:
            raise locked
        files = self.system.files
        files.pop(path, None)  # so that the change comes last: a layer is read in the order of its entries
        files[path] = node
        self.life.machine.revision += 1

    def write(self, path: str, data: bytes | str, *, mode: int = 0o600, grows: bool = True) -> None:
        content = data.encode() if isinstance(data, str) else data
        self.put(path, FileNode("file", content, mode=mode, mtime=self.life.now), grows=grows)

    def below(self, folder: str) -> list[str]:
        return [p for p, node in self.system.files.items() if node is not None and p.startswith(folder + "/")]

    def remove(self, path: str) -> None:
        """A file, or a folder with what is in it. Raises OSError where that cannot be."""
        locked = why_not(self.system, path, grows=False)
        if locked is not None:
            raise locked
        for below in [path, *self.below(path)]:
            if self.system.files.pop(below, None) is not None:
                self.system.files[below] = None
        self.life.machine.revision += 1

    def present(self, path: str) -> str:
        """The digest of a file, "absent", or "odd"."""
        node = self.node(path)
        if node is None:
            return "odd" if self.below(path) else "absent"
        return hashlib.sha256(node.read()).hexdigest() if node.kind == "file" and not node.error else "odd"


@dataclass(frozen=True)
class _File:
    number: int
    old: str
    new: str
    mode: int
    path: str

    @classmethod
    def parse(cls, number: int, line: str) -> _File:
        old, new, mode, path = line.split(" ", 3)
        return cls(number, old, new, int(mode, 8), path)


class Change:
    """The guarded change of one run in one userland."""

    def __init__(self, life: Life, system: System, run_id: str) -> None:
        self.life, self.system, self.run = life, system, run_id
        self.disk = Disk(life, system)
        self.folder = f"{CHANGES}/{run_id}"
        self.timer, self.service = f"proofbook-guard-{run_id}.timer", f"proofbook-guard-{run_id}.service"

    @property
    def state(self) -> str:
        return self.disk.text(f"{self.folder}/state").strip() or "none"

    @state.setter
    def state(self, word: str) -> None:
        self.disk.write(f"{self.folder}/state", word + "\n", grows=False)  # renamed from a word that was written beforehand

    @property
    def files(self) -> list[_File]:
        lines = self.disk.text(f"{self.folder}/manifest").splitlines()
        return [_File.parse(n, line) for n, line in enumerate(lines, 1)]

    @property
    def unit(self) -> tuple[str, bool]:
        """Its name, "-" for none, and whether it ran before the change."""
        name, _, was_active = self.disk.text(f"{self.folder}/unit").strip().partition(" ")
        return name or "-", was_active == "1"

    @property
    def left(self) -> int:
        return round(float(self.disk.text(f"{self.folder}/deadline").split(" ")[0] or 0) - self.life.now)

    def log(self, text: str) -> None:
        path = f"{self.folder}/log"
        at = datetime.fromtimestamp(self.life.now, UTC)
        with suppress(OSError):
            self.disk.write(path, self.disk.text(path) + f"{at:%Y-%m-%dT%H:%M:%SZ} {text}\n")

    def _unit_state(self, name: str) -> str:
        unit = self.system.units.get(name)
        return unit.active if unit else "inactive"

    def report(self) -> str:
        out = [f"state {self.state}", f"now {int(self.life.now)}"]
        if self.state != "none":
            name, was_active = self.unit
            out += [f"unit {name}", f"was_active {int(was_active)}"]
            out += [f"active {self._unit_state(name)}"] if name != "-" else []
            out += ["touched 1"] if self.disk.node(f"{self.folder}/installing") else []
            if self.disk.node(f"{self.folder}/deadline"):
                out += [f"deadline {int(self.life.now) + self.left}", f"left {self.left}"]
            for one in self.files:
                has = self.disk.present(one.path)
                word = {one.new: "new", one.old: "old"}.get(has, "absent" if has == "absent" else "other")
                out.append(f"file {word} {one.old} {one.new} {one.path}")
                out += [f"kept {path}" for path, node in self.system.files.items() if node and path.startswith(self._theirs(one))]
            out += [f"log {line}" for line in self.disk.text(f"{self.folder}/log").splitlines()[-20:]]
        out += [f"kept {path}" for path in self.disk.below(self._theirs_after)]
        timer = self.system.units.get(self.timer)
        shown = ("loaded", timer.active, timer.sub, "enabled") if timer else ("not-found", "inactive", "dead", "")
        names = ("LoadState", "ActiveState", "SubState", "UnitFileState")
        out.append("guard " + " ".join(f"{name}={value}" for name, value in zip(names, shown, strict=True)))
        out.append("storage lasting zfs")
        if outcome := self.disk.text(f"{_BASE}/outcomes/{self.run}").strip():
            out.append(f"outcome {outcome}")
        return "".join(line + "\n" for line in [*out, "end"])

    # ------------------------------------------------------------------------------------------------- verbs

    def stage(self, unit: str, request: bytes) -> None:
        lines = request.decode("utf-8", "replace").splitlines()
        manifest = [line.removeprefix("file ") for line in lines if line.startswith("file ")]
        if not lines or lines[-1] != f"end {len(manifest)}" or not manifest:
            raise Refusal(65, "the new files came incomplete")
        text = "".join(line + "\n" for line in manifest)
        if self.state not in ("none", "staged"):
            if self.state == "armed" and self.disk.text(f"{self.folder}/manifest") == text:
                return
            raise Refusal(77, f"there is a change {self.run} already, and it is {self.state}")
        files = [_File.parse(n, line) for n, line in enumerate(manifest, 1)]
        program, new = self._decoded(iter(lines[:-1]), files)
        for one in files:
            self._as_planned(one)
        self.drop_guard()
        self.disk.remove(self.folder)
        for path in (_BASE, CHANGES, self.folder):
            if self.disk.node(path) is None:
                self.disk.put(path, directory(0o700))
        for one in files:
            if one.old != "absent":
                self.disk.put(f"{self.folder}/old/{one.number}", replace(self._node(one.path)))
            if one.new != "absent":
                self.disk.write(f"{self.folder}/new/{one.number}", new[one.number])
        self.disk.write(f"{self.folder}/guard.sh", program)
        self.disk.write(f"{self.folder}/manifest", text)
        self.disk.write(f"{self.folder}/unit", f"{unit} {int(self._unit_state(unit) in _RUNS)}\n")
        self.state = "staged"
        self.log(f"stage: {len(files)} file(s) kept")

    def _node(self, path: str) -> FileNode:
        node = self.disk.node(path)
        if node is None:
            raise Refusal(76, f"{path} is gone")
        return node

    @staticmethod
    def _decoded(lines: Iterator[str], files: Sequence[_File]) -> tuple[bytes, dict[int, bytes]]:
        """The program, and the new bytes by the number of their file. Raises Refusal for what came damaged."""
        program, new, number = b"", {}, 0
        for line in lines:
            kind, _, rest = line.partition(" ")
            number += kind == "file"
            want = rest.split(" ")[0] if kind == "program" else files[number - 1].new
            if want == "absent":
                continue
            try:
                data = base64.b64decode(next(lines, ""), validate=True)
            except binascii.Error:
                data = b""
            if hashlib.sha256(data).hexdigest() != want:
                raise Refusal(65, f"what should be {'guard.sh' if kind == 'program' else files[number - 1].path} came damaged")
            if kind == "program":
                program = data
            else:
                new[number] = data
        return program, new

    def _as_planned(self, one: _File) -> None:
        has, node = self.disk.present(one.path), self.disk.node(one.path)
        if node is not None and node.kind == "link":
            raise Refusal(76, f"{one.path} is a symbolic link to {node.target}: name the file that it leads to")
        if has == "odd":
            raise Refusal(76, f"{one.path} is not a file that can be read")
        if has != one.old:
            raise Refusal(76, f"{one.path} has changed: it is {has}, the plan saw {one.old}")
        for manifest in [p for p in self.disk.below(CHANGES) if p.endswith("/manifest")]:
            other = Change(self.life, self.system, manifest.split("/")[-2])
            taken = other.run != self.run and other.state in ("armed", "firing", "failed")
            if taken and any(f.path == one.path for f in other.files):
                message = f"{one.path} belongs to the change {other.run}, which is {other.state}"
                raise Refusal(77, f"{message}: confirm it or take it back first")

    def arm(self, verb: str, seconds: int) -> None:
        if (verb, self.state) not in (("arm", "staged"), ("arm", "armed"), ("extend", "armed")):
            raise Refusal(77, f"a change that is {self.state} cannot be guarded")
        if self.state == "armed" and self.left <= 0:
            raise Refusal(77, "its time is up")
        at = self.life.now + seconds
        self.disk.write(f"{self.folder}/deadline", f"{at} {seconds}\n")
        for name, section in (
            (self.service, f"[Service]\nType=oneshot\nExecStart=/bin/sh {self.folder}/guard.sh due {self.run}\n"),
            (self.timer, f"[Timer]\nOnActiveSec={seconds}\nPersistent=true\n\n[Install]\nWantedBy=timers.target\n"),
        ):
            what = f"Take back the change of proofbook run {self.run} unless it is confirmed in time"
            self.disk.write(f"{_UNITS}/{name}", f"[Unit]\nDescription={what}\n\n{section}", mode=0o644)
        self.disk.put(f"{_UNITS}/timers.target.wants/{self.timer}", link(f"{_UNITS}/{self.timer}"))
        self.state = "armed"
        self.set_timer()
        self.log(f"{verb}: taken back in {seconds} s unless confirmed")

    def set_timer(self) -> None:
        """Let the timer wait for the deadline, also one that passed while the machine was off."""
        self.system.units[self.timer] = Unit(
            self.timer, f"When the change of proofbook run {self.run} is taken back", active="active", sub="waiting"
        )
        self.life.cancel("guard_due", self.system.name, self.run)
        self.life.at(self.life.now + max(0, self.left), "guard_due", self.system.name, self.run)

    def install(self) -> None:
        if self.state != "armed":
            raise Refusal(77, f"a change that is {self.state} cannot be put in place")
        if self.left <= 0:
            raise Refusal(77, "its time is up")
        self._refuse_strange()
        self.disk.write(f"{self.folder}/installing", b"")
        for one in self.files:
            if self.disk.present(one.path) == one.new:
                continue
            if one.new == "absent":
                self.disk.remove(one.path)
            else:
                self.disk.write(one.path, self.disk.read(f"{self.folder}/new/{one.number}") or b"", mode=one.mode)
        self.life.reload(self.system)
        self.log("install: the new files are in place")

    def suspend(self) -> None:
        if self.state != "armed":
            raise Refusal(77, f"a change that is {self.state} cannot be suspended")
        if self.disk.node(f"{self.folder}/installing") is None:
            raise Refusal(77, "it was not put in place")
        if self.left <= 0:
            raise Refusal(77, "its time is up")
        self._refuse_strange()
        for one in self.files:
            has = self.disk.present(one.path)
            if one.old == "absent" and has != "absent":
                self.disk.remove(one.path)
            elif has != one.old:
                self.disk.put(one.path, replace(self._node(f"{self.folder}/old/{one.number}")))
        self.life.reload(self.system)
        self.log("suspend: the old files are back for a while")

    def _refuse_strange(self) -> None:
        """Nobody else's bytes are overwritten."""
        for one in self.files:
            has = self.disk.present(one.path)
            if has not in (one.old, one.new):
                raise Refusal(76, f"{one.path} is neither as it was nor as the change has it: {has}")

    def confirm(self) -> None:
        match self.state:
            case "none":
                if self.disk.text(f"{_BASE}/outcomes/{self.run}").startswith("confirmed "):
                    return
                raise Refusal(66, f"nothing is known here of a change {self.run}")
            case "armed":
                if self.disk.node(f"{self.folder}/installing") is None:
                    raise Refusal(77, "it was not put in place")
                for one in self.files:
                    if self.disk.present(one.path) != one.new:
                        raise Refusal(76, f"{one.path} is not as it was installed")
            case state:
                raise Refusal(77, f"a change that is {state} cannot be confirmed")
        self._outcome("confirmed")
        self.drop_guard()
        self.disk.remove(self.folder)

    def clean(self) -> None:
        if self.state not in ("none", "staged", "fired"):
            raise Refusal(77, f"a change that is {self.state} is not removed: its old files may be the only copy")
        self.drop_guard()
        for path in [p for p in self.disk.below(self.folder) if p.startswith(f"{self.folder}/other.")]:
            self.disk.put(f"{self._theirs_after}/{path.rpartition('/')[2]}", self.disk.node(path))
        self.disk.remove(self.folder)

    @property
    def _theirs_after(self) -> str:
        """Where what somebody else wrote is kept when the change itself is cleared away."""
        return f"{_BASE}/theirs/{self.run}"

    def drop_guard(self) -> None:
        self.life.cancel("guard_due", self.system.name, self.run)
        self.system.units.pop(self.timer, None)
        for path in (f"{_UNITS}/timers.target.wants/{self.timer}", f"{_UNITS}/{self.timer}", f"{_UNITS}/{self.service}"):
            if self.disk.node(path) is not None:
                self.disk.remove(path)

    def _outcome(self, word: str) -> None:
        self.disk.write(f"{_BASE}/outcomes/{self.run}", f"{word} {int(self.life.now)}\n", grows=False)

    def begin_fire(self, *, due: bool = False) -> None:
        """Bring the old files back and stop the unit; :meth:`go_on` follows when it is down. ``due``: the timer does it."""
        match self.state:
            case "none":
                raise Refusal(66, f"nothing is known here of a change {self.run}")
            case "fired":
                return
        touched = self.disk.node(f"{self.folder}/installing") is not None
        again = self.state in ("firing", "failed")
        self._state_if_it_can_be("firing")
        self.log("fire: taking back" + (" again" if again else ", since its time is up" if due else ", as asked"))
        back = [self._given_back(one) for one in self.files]
        if not all(back):
            self._state_if_it_can_be("failed")
            why = "not everything could be brought back; tried again in a minute"
            self.log(f"fire: {why}")
            self.life.cancel("guard_due", self.system.name, self.run)
            self.life.at(self.life.now + 60.0, "guard_due", self.system.name, self.run)
            raise Refusal(1, why)
        self.life.reload(self.system)
        unit = self.system.units.get(self.unit[0])
        if unit is not None and touched:
            self.life.stop(self.system, unit)
        self.life.at(self.life.now, "guard_goes_on", self.system.name, self.run)

    def _state_if_it_can_be(self, word: str) -> None:
        with suppress(OSError):
            self.state = word

    def _given_back(self, one: _File) -> bool:
        """Bring one old file back; False when that cannot be."""
        has = self.disk.present(one.path)
        try:
            if has not in (one.old, one.new, "absent"):
                self._keep_theirs(one)
            if one.old == "absent" and has != "absent":
                self.disk.remove(one.path)
            elif has != one.old:
                self.disk.put(one.path, replace(self._node(f"{self.folder}/old/{one.number}")))
        except OSError:
            self.log(f"fire: {one.path} could not be brought back: it is {has}")
            return False
        return True

    def _keep_theirs(self, one: _File) -> None:
        """A copy of what somebody else wrote; the file itself, by another name, where a full disk has no room for one."""
        earlier = [p for p in self.disk.below(self.folder) if p.startswith(self._theirs(one)[0])]
        if any(self.disk.present(path) == self.disk.present(one.path) for path in earlier):
            return
        kept = self._theirs(one)[0] + str(int(self.life.now))
        try:
            self.disk.put(kept, self.disk.node(one.path), grows=True)
        except OSError:
            kept = self._theirs(one)[1] + str(int(self.life.now))
            self.disk.put(kept, self.disk.node(one.path))
            self.disk.remove(one.path)
        self.log(f"fire: {one.path} was neither old nor new; what it held is kept in {kept}")

    def _theirs(self, one: _File) -> tuple[str, str]:
        """How the names begin under which it is kept: a copy, and the file itself."""
        beside = one.path.rpartition("/")[0]
        return f"{self.folder}/other.{one.number}.", f"{beside}/.proofbook-{self.run}.{one.number}.theirs."

    def go_on(self) -> None:
        name, was_active = self.unit
        unit = self.system.units.get(name)
        if unit is not None and unit.active == "deactivating":
            self.life.at(self.life.now + 0.5, "guard_goes_on", self.system.name, self.run)
            return
        if unit is not None and was_active and unit.active not in _RUNS:
            unit.n_restarts = 0
            self.life.start(self.system, unit)
        self.log(f"fire: the old files are back; {name} is {self._unit_state(name)}")
        self._outcome("fired")
        self.state = "fired"
        self.drop_guard()


def at_boot(life: Life, system: System) -> None:
    """systemd starts the timers that are enabled; one whose time has passed elapses at once."""
    disk = Disk(life, system)
    for path in [p for p in disk.below(CHANGES) if p.endswith("/state")]:
        change = Change(life, system, path.split("/")[-2])
        if change.state in ("armed", "firing", "failed"):
            change.set_timer()


def due(life: Life, system: System, run_id: str) -> None:
    """The timer has elapsed."""
    change = Change(life, system, run_id)
    if _up(system) and (change.state in ("firing", "failed") or (change.state == "armed" and change.left <= 0)):
        try:
            change.begin_fire(due=True)
        except Refusal:
            return  # it comes again in a minute
        if change.unit[0] == "reboot.target":
            life.at(life.now + 1.0, "guard_reboots")


def goes_on(life: Life, system: System, run_id: str) -> None:
    change = Change(life, system, run_id)
    if _up(system) and change.state == "firing":
        change.go_on()


def _up(system: System) -> bool:
    return system.state in ("starting", "running")


# ------------------------------------------------------------------------------------------------------------ lease


def lease(life: Life, system: System, words: Sequence[str]) -> tuple[int, str, str]:
    """A verb of lease.sh: exit status, stdout, stderr."""
    disk, path, now = Disk(life, system), f"{_BASE}/lease", int(life.now)
    held = dict(line.partition("=")[::2] for line in disk.text(path).splitlines())
    verb, arguments = words[0], list(words[1:])
    out, status, why = f"now={now}\nboot_now={life.machine.boot.id}\n", 0, ""
    asking = arguments[1:2] if verb == "use" else arguments[:1]
    ours = bool(held) and asking == [held["run"]]
    match verb, arguments:
        case "acquire", [run, holder, ttl] if not held or ours:
            taken, boot = held.get("taken", str(now)), held.get("boot_id", life.machine.boot.id)
            held = {"run": run, "holder": holder, "taken": taken, "expires": str(now + int(ttl)), "boot_id": boot}
        case "acquire", [_, _, _]:
            status, why = 75, f"run {held['run']} has the lease"
        case "release", [_]:
            held = {} if ours else held
        case "show", []:
            pass
        case (("renew" | "break" | "use"), [*_]) if not ours:
            status, why = 75, f"run {held['run']} has the lease" if held else "nobody has the lease"
        case "renew", [_, ttl]:
            held["expires"] = str(now + int(ttl))
        case "break", [run, who]:
            history = f"{_BASE}/lease.log"
            line = f"{datetime.fromtimestamp(now, UTC):%Y-%m-%dT%H:%M:%SZ} broken run={run} holder={held['holder']} by={who}\n"
            disk.write(history, disk.text(history) + line)
            held = {}
        case "use", [digest, run]:
            used = f"{_BASE}/approvals/{digest}"
            if disk.node(used) is None:
                disk.write(used, f"run={run} at={now}\n")
            by, at = (word.partition("=")[2] for word in disk.text(used).split())
            out += f"used_by={by}\nused_at={at}\n"
            status, why = (0, "") if by == run else (76, f"the approval was used by run {by}")
        case _:
            status, why = 64, f"used wrongly: {verb} with {len(arguments)} words"
    out += f"approvals={len(disk.below(f'{_BASE}/approvals'))}\n"
    if held:
        disk.write(path, "".join(f"{k}={v}\n" for k, v in held.items()))
        shown = {**held, "expired": "no" if int(held["expires"]) > now else "yes"}
        out += "".join(f"{k}={v}\n" for k, v in shown.items())
    elif disk.node(path) is not None:
        disk.remove(path)
    return status, out + "end\n", why + "\n" if why else ""


# --------------------------------------------------------------------------------------------------------- detached


def step_folder(run_id: str, step: str) -> str:
    return posixpath.join(_BASE, "steps", run_id, step)


def begin_step(life: Life, system: System, folder: str) -> None:
    """Note that a step was begun, and in which life of its systemd."""
    Disk(life, system).write(f"{folder}/begun", f"{int(life.now)} {life.machine.boot.id}/{system.started_at}\n")


def end_step(life: Life, system: System, folder: str, status: int, out: bytes, err: bytes) -> None:
    """What systemd and the step leave when it is over."""
    disk = Disk(life, system)
    disk.write(f"{folder}/out", out)
    disk.write(f"{folder}/err", err)
    _ended(disk, folder, f"{'exit-code' if status else 'success'} exited {status}")


def stop_step(life: Life, system: System, folder: str, *, late: bool) -> None:
    """systemd ends a step with SIGTERM: because its time is used up (``late``), or because somebody asked for it."""
    disk = Disk(life, system)
    if disk.node(f"{folder}/begun") is not None and disk.node(f"{folder}/ended") is None:
        _ended(disk, folder, f"{'timeout' if late else 'success'} killed TERM")


def _ended(disk: Disk, folder: str, how: str) -> None:
    disk.write(f"{folder}/ended", f"{int(disk.life.now)} {how}\n")


def step_ends(life: Life, system: System, folder: str, *, late: bool) -> None:
    """A step's time has come, if it is still the same life of the same systemd."""
    if "step running" in step_report(life, system, folder):
        if late:
            stop_step(life, system, folder, late=True)
        else:
            end_step(life, system, folder, 0, b"", b"")


def step_report(life: Life, system: System, folder: str) -> str:
    """As detached.sh says how a step stands."""
    disk = Disk(life, system)
    begun = disk.text(f"{folder}/begun").split()
    if not begun:
        return "step never\nend\n"
    out = [f"began {begun[0]}", f"now {int(life.now)}"]
    out += [f"{name} {len(data)}" for name in ("out", "err") if (data := disk.read(f"{folder}/{name}")) is not None]
    if ended := disk.text(f"{folder}/ended").split():
        out += ["step ended", f"ended {ended[0]}", f"result {ended[1]}", f"how {ended[2]}", f"status {ended[3]}"]
    elif begun[1] != f"{life.machine.boot.id}/{system.started_at}":
        out += ["step lost", "why the machine was started anew while it ran"]
    else:
        out.append("step running")
    return "".join(line + "\n" for line in [*out, "end"])
