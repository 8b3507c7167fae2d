"""``systemctl`` on a simulated machine, as systemd 257 answers."""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Callable, Iterable
from datetime import UTC, datetime

from proofbook.lab.sim import units
from proofbook.lab.sim.life import JOURNAL_SOCKETS
from proofbook.lab.sim.os_state import Unit
from proofbook.lab.sim.shell import Answer, Context, said

_ACTS = ("reboot", "start", "stop", "restart", "enable", "disable", "daemon-reload", "reset-failed", "kill")
_CODES = {0: "(null)", 1: "exited", 2: "killed"}


async def systemctl(ctx: Context, argv: list[str]) -> Answer:
    """Answer ``systemctl``: options may stand anywhere, as getopt lets them."""
    options: dict[str, str] = {}
    words: list[str] = []
    rest = argv[1:]
    while rest:
        word = rest.pop(0)
        if word.startswith("--"):
            name, equals, value = word[2:].partition("=")
            if not equals and name in ("property", "type", "state", "output", "lines", "signal", "kill-whom"):
                value = rest.pop(0) if rest else ""
            options[name] = ",".join(filter(None, (options.get(name), value)))
        elif word.startswith("-") and len(word) > 1:
            name = {"p": "property", "t": "type", "n": "lines", "o": "output"}.get(word[1], word[1])
            value = word[2:] or (rest.pop(0) if word[1] in "ptno" and rest else "")
            options[name] = ",".join(filter(None, (options.get(name), value)))
        else:
            words.append(word)
    verb, names = (words[0], words[1:]) if words else ("list-units", [])
    handlers: dict[str, Callable[[Context, list[str], dict[str, str]], Answer]] = {
        "show": _show,
        "cat": _cat,
        "list-units": _list_units,
        "is-system-running": _is_system_running,
        "is-enabled": _is_enabled,
        "is-active": _is_active,
        "is-failed": _is_failed,
        "status": _status,
        "reboot": _reboot,
        "start": _start,
        "stop": _stop,
        "restart": _restart,
        "enable": _enable,
        "disable": _disable,
        "daemon-reload": _daemon_reload,
        "reset-failed": _reset_failed,
        "kill": _kill,
    }
    if ctx.system.state == "off":
        return said(error="Failed to connect to system scope bus via local transport: Connection refused\n", status=1)
    if verb not in handlers:
        ctx.note_unknown(" ".join(argv))
        return said(error=f"Unknown command verb '{verb}'.\n", status=1)
    if ctx.user.uid != 0 and verb in _ACTS:
        return said(error=f"Call to {verb.title()} failed: Interactive authentication required.\n", status=1)
    names = [_full(n) for n in names]
    if verb in ("start", "restart"):
        await _until_down(ctx, names)
    answer = handlers[verb](ctx, names, options)
    if verb in ("stop", "restart") and "no-block" not in options:
        await _until_down(ctx, names)
    if verb == "restart":
        await _until_down(ctx, names)
        answer = _start(ctx, names, options)
    if verb in _ACTS:
        ctx.life.machine.revision += 1
    return answer


async def _until_down(ctx: Context, names: list[str]) -> None:
    """Wait until the units that are being stopped are down, as systemctl does."""
    mine = [u for n in names if (u := ctx.system.units.get(n)) is not None]
    await ctx.until(lambda: all(u.active != "deactivating" for u in mine), 600.0)


def _full(name: str) -> str:
    return (
        name
        if re.search(r"\.(service|target|socket|timer|mount|slice|scope|device)$", name) or "*" in name
        else name + ".service"
    )


def stamp(at: float | None) -> str:
    return datetime.fromtimestamp(at, UTC).strftime("%a %Y-%m-%d %H:%M:%S UTC") if at is not None else ""


def _unit(ctx: Context, name: str) -> Unit:
    """The loaded unit; one that has no file is loaded as not-found, as systemd does when somebody asks for it."""
    known = ctx.system.units.get(name)
    if known is not None:
        known.enabled = units.enabled_state(ctx.system, name)
        known.need_reload = _changed_on_disk(ctx, known)
        return known
    loaded = units.load(ctx.system, name)
    return loaded or Unit(name, name, load="not-found", enabled="")


def _changed_on_disk(ctx: Context, unit: Unit) -> bool:
    fresh = units.load(ctx.system, unit.name)
    if fresh is None:
        return True
    return (fresh.drop_ins, fresh.exec_start, fresh.environment, fresh.description, fresh.restart, fresh.fragment) != (
        unit.drop_ins,
        unit.exec_start,
        unit.environment,
        unit.description,
        unit.restart,
        unit.fragment,
    )


# ---------------------------------------------------------------------------------------------- show


def properties(ctx: Context, unit: Unit) -> dict[str, str]:
    """The properties of a unit in the order in which ``systemctl show`` prints them, whatever order was asked."""
    boot = ctx.life.machine.boot.started_at
    tasks = sum(p.unit == unit.name for p in ctx.system.processes.values())

    def monotonic(at: float | None) -> str:
        return str(round((at - boot) * 1e6)) if at is not None else "0"

    result: dict[str, str] = {}
    if unit.name.endswith(".service"):
        result |= {
            "Type": unit.type if unit.load == "loaded" else "",
            "ExitType": "main",
            "Restart": unit.restart,
            "NotifyAccess": "main" if unit.type == "notify" else "none",
            "RestartUSec": _span(unit.restart_s),
            "TimeoutStartUSec": "1min 30s",
            "TimeoutStopUSec": _span(unit.timeout_stop_s),
            "RemainAfterExit": "yes" if unit.type == "oneshot" else "no",
            "MainPID": str(unit.main_pid),
            "ControlPID": "0",
            "StatusText": "",
            "Result": unit.result,
            "NRestarts": str(unit.n_restarts),
            "ExecMainStartTimestamp": stamp(unit.exec_started_at),
            "ExecMainStartTimestampMonotonic": monotonic(unit.exec_started_at),
            "ExecMainExitTimestamp": stamp(unit.exec_ended_at),
            "ExecMainExitTimestampMonotonic": monotonic(unit.exec_ended_at),
            "ExecMainPID": str(unit.exec_pid),
            "ExecMainCode": str(unit.exec_code),
            "ExecMainStatus": str(unit.exec_status),
            "ExecStart": _exec_start(unit),
            "Slice": "system.slice",
            "ControlGroup": f"/system.slice/{unit.name}" if tasks else "",
            "MemoryCurrent": str(unit.memory_bytes) if unit.memory_bytes else "[not set]",
            "TasksCurrent": str(tasks) if tasks else "[not set]",
            "Environment": " ".join(_assignment(k, v) for k, v in unit.environment.items()),
            **_environment_files(unit),
            "WorkingDirectory": "",
            "RootDirectory": "",
            "User": "",
            "Group": "",
            "OOMPolicy": "stop",
            "KillMode": unit.kill_mode,
            "KillSignal": "15",
            "SendSIGKILL": "yes",
            "MemoryMax": "infinity",
            "PrivateTmp": "no",
            "StandardOutput": "journal",
            "StandardError": "inherit",
            "SyslogIdentifier": unit.identifier,
            "BusName": "",
        }
        if not unit.exec_start:
            del result["ExecStart"]  # a unit that has no command has no such line, not an empty one
    result |= {
        "Id": unit.name,
        "Names": unit.name,
        "Requires": "system.slice sysinit.target",
        "RequiredBy": "",
        "WantedBy": "multi-user.target" if unit.enabled == "enabled" or unit.boot_offset_s is not None else "",
        "TriggeredBy": " ".join(JOURNAL_SOCKETS) if unit.name == "systemd-journald.service" else "",
        "Description": unit.description,
        "LoadState": unit.load,
        "ActiveState": unit.active,
        "FreezerState": "running",
        "SubState": unit.sub,
        "FragmentPath": unit.fragment,
        "DropInPaths": " ".join(unit.drop_ins),
        "UnitFileState": unit.enabled,
        "UnitFilePreset": "enabled" if unit.enabled else "",
        "StateChangeTimestamp": stamp(unit.inactive_enter_at or unit.active_enter_at),
        "StateChangeTimestampMonotonic": monotonic(unit.inactive_enter_at or unit.active_enter_at),
        "InactiveExitTimestamp": stamp(unit.inactive_exit_at),
        "InactiveExitTimestampMonotonic": monotonic(unit.inactive_exit_at),
        "ActiveEnterTimestamp": stamp(unit.active_enter_at),
        "ActiveEnterTimestampMonotonic": monotonic(unit.active_enter_at),
        "ActiveExitTimestamp": stamp(unit.active_exit_at),
        "ActiveExitTimestampMonotonic": monotonic(unit.active_exit_at),
        "InactiveEnterTimestamp": stamp(unit.inactive_enter_at),
        "InactiveEnterTimestampMonotonic": monotonic(unit.inactive_enter_at),
        "StartLimitIntervalUSec": "10s",
        "StartLimitBurst": "5",
        "CanStart": "yes" if unit.load == "loaded" else "no",
        "NeedDaemonReload": "yes" if unit.need_reload else "no",
        "ConditionResult": "no" if unit.behaviour == "skipped" and unit.active == "inactive" else "yes",
        "InvocationID": unit.invocation_id,
        "Transient": "no",
    }
    return result


def _environment_files(unit: Unit) -> dict[str, str]:
    """One line a file in systemd's answer, no line without any."""
    shown = [f"{f.lstrip('-')} (ignore_errors={'yes' if f.startswith('-') else 'no'})" for f in unit.environment_files]
    return {"EnvironmentFiles": "\nEnvironmentFiles=".join(shown)} if shown else {}


def _exec_start(unit: Unit) -> str:
    if not unit.exec_start:
        return ""
    start = stamp(unit.exec_started_at) or "n/a"
    stop = stamp(unit.exec_ended_at) or "n/a"
    return (
        f"{{ path={unit.exec_start[0]} ; argv[]={' '.join(unit.exec_start)} ; ignore_errors=no ; "
        f"start_time=[{start}] ; stop_time=[{stop}] ; "
        f"pid={unit.exec_pid} ; code={_CODES[unit.exec_code]} ; status={unit.exec_status}{'' if unit.exec_status else '/0'} }}"
    )


def _assignment(name: str, value: str) -> str:
    text = f"{name}={value}"
    if re.fullmatch(r"[^\s\"'\\$`;&|<>(){}]*", text):
        return text
    escaped = text.replace("\\", "\\\\").replace('"', '\\"').replace("$", "\\$").replace("`", "\\`").replace("\n", "\\n")
    return f'"{escaped}"'


def _span(seconds: float) -> str:
    """A time span as systemd prints it: ``1min 30s``, ``250ms``, ``infinity``."""
    if seconds == float("inf"):
        return "infinity"
    if seconds < 1:
        return f"{seconds * 1000:g}ms"
    minutes, rest = divmod(seconds, 60)
    return " ".join([*([f"{minutes:g}min"] if minutes else []), *([f"{rest:g}s"] if rest or not minutes else [])])


def _show(ctx: Context, names: list[str], options: dict[str, str]) -> Answer:
    wanted = [p for p in options.get("property", "").split(",") if p]
    only_value = "value" in options
    blocks = []
    if not names:
        manager = {"Version": "257.9-1~deb13u1", "SystemState": ctx.system.state, "NFailedUnits": str(len(_failed(ctx)))}
        return said("".join(f"{k}={v}\n" for k, v in manager.items() if not wanted or k in wanted))
    for name in _matching(ctx, names, everything="all" in options):
        shown = properties(ctx, _unit(ctx, name))
        lines = [(v if only_value else f"{k}={v}") + "\n" for k, v in shown.items() if not wanted or k in wanted]
        blocks.append("".join(lines))
    return said("\n".join(blocks))


def _matching(ctx: Context, names: Iterable[str], *, everything: bool) -> list[str]:
    """The units that these names and patterns mean; an inactive one fits a pattern only when everything is asked for."""
    shown = [u.name for u in ctx.system.units.values() if everything or u.active != "inactive"]
    found: list[str] = []
    for name in names:
        found += fnmatch.filter(shown, name) if "*" in name else [name]
    return found


# ------------------------------------------------------------------------------------------- looking


def _cat(ctx: Context, names: list[str], options: dict[str, str]) -> Answer:
    texts, errors = [], ""
    for name in names:
        path = units.fragment_path(ctx.system, name)
        if not path:
            errors += f"No files found for {name}.\n"
            continue
        for part in [path, *units.drop_in_paths(ctx.system, name)]:
            texts.append(f"# {part}\n{(units.text_of(ctx.system, part) or '').rstrip(chr(10))}\n")
    return said("\n".join(texts), error=errors, status=1 if errors else 0)


def _failed(ctx: Context) -> list[Unit]:
    return [u for u in ctx.system.units.values() if u.active == "failed"]


def _list_units(ctx: Context, names: list[str], options: dict[str, str]) -> Answer:
    kinds, states = set(filter(None, options.get("type", "").split(","))), set(filter(None, options.get("state", "").split(",")))
    if "failed" in options:
        states.add("failed")
    shown = [
        u
        for u in ctx.system.units.values()
        if (not kinds or u.name.rpartition(".")[2] in kinds)
        and (not states or {u.active, u.sub, u.load} & states)
        and ("all" in options or "a" in options or states or u.active != "inactive")
        and (not names or any(fnmatch.fnmatch(u.name, n) for n in names))
    ]
    shown.sort(key=lambda u: u.name)
    width = max((len(u.name) for u in shown), default=0)
    subs = max((len(u.sub) for u in shown), default=0)
    actives = max((len(u.active) for u in shown), default=0)
    mark = {True: "", False: "  "}["plain" in options]
    lines = [f"{mark}{u.name:<{width}} {u.load} {u.active:<{actives}} {u.sub:<{subs}} {u.description}\n" for u in shown]
    if "no-legend" in options:
        return said("".join(lines))
    head = f"{mark}{'UNIT':<{width}} LOAD   {'ACTIVE':<{actives}} {'SUB':<{subs}} DESCRIPTION\n"
    return said(head + "".join(lines) + f"\n{len(shown)} loaded units listed.\n")


def _is_system_running(ctx: Context, names: list[str], options: dict[str, str]) -> Answer:
    state = ctx.system.state
    if state == "running" and _failed(ctx):
        state = "degraded"
    return said(state + "\n", status=0 if state == "running" else 1)


def _is_enabled(ctx: Context, names: list[str], options: dict[str, str]) -> Answer:
    output, status = "", 1
    for name in names:
        state = units.enabled_state(ctx.system, name) or "not-found"
        output += state + "\n"
        status = 0 if state in ("enabled", "static") else (4 if state == "not-found" else status)
    return said(output, status=status)


def _is_active(ctx: Context, names: list[str], options: dict[str, str]) -> Answer:
    states = [_unit(ctx, n).active for n in names]
    return said(
        "" if "quiet" in options or "q" in options else "".join(s + "\n" for s in states), status=0 if "active" in states else 3
    )


def _is_failed(ctx: Context, names: list[str], options: dict[str, str]) -> Answer:
    states = [_unit(ctx, n).active for n in names]
    return said("".join(s + "\n" for s in states), status=0 if "failed" in states else 1)


def _status(ctx: Context, names: list[str], options: dict[str, str]) -> Answer:
    if not names:
        return said(
            f"● {ctx.system.hostname}\n    State: {ctx.system.state}\n"
            f"    Units: {len(ctx.system.units)} loaded\n   Failed: {len(_failed(ctx))} units\n"
        )
    output, status = "", 0
    for name in names:
        unit = _unit(ctx, name)
        if unit.load == "not-found":
            return said(error=f"Unit {name} could not be found.\n", status=4)
        since = unit.active_enter_at if unit.active == "active" else unit.inactive_enter_at
        output += f"● {unit.name} - {unit.description}\n     Loaded: loaded ({unit.fragment}; {unit.enabled}; preset: enabled)\n"
        output += "".join(f"    Drop-In: {d}\n" for d in unit.drop_ins)
        reason = f" (Result: {unit.result})" if unit.result != "success" else ""
        output += f"     Active: {unit.active} ({unit.sub}){reason}" + (f" since {stamp(since)}" if since else "") + "\n"
        if unit.main_pid:
            output += f"   Main PID: {unit.main_pid} ({ctx.system.processes[unit.main_pid].comm})\n"
        recent = [e for e in ctx.system.journal if e.fields.get("_SYSTEMD_UNIT") == name or e.fields.get("UNIT") == name][-10:]
        output += "\n" + "".join(
            f"{datetime.fromtimestamp(e.realtime_us / 1e6, UTC):%b %d %H:%M:%S} {ctx.system.hostname} "
            f"{e.fields['SYSLOG_IDENTIFIER']}[{e.fields.get('_PID', '')}]: {e.fields['MESSAGE']}\n"
            for e in recent
        )
        status = 0 if unit.active == "active" else 3
    return said(output, status=status)


# -------------------------------------------------------------------------------------------- acting


def _reboot(ctx: Context, names: list[str], options: dict[str, str]) -> Answer:
    life = ctx.life
    if ctx.system is not life.machine.host:
        container = life.machine.containers[ctx.system.name]
        life.on_stop_container(container.id)
        life.at(life.now + 1.0, "start_container", container.id)
        return said()
    life.request_reboot()
    return said()


def _each(ctx: Context, names: list[str], act: Callable[[Unit], str]) -> Answer:
    errors = ""
    for name in names:
        unit = _unit(ctx, name)
        if unit.load == "not-found":
            errors += f"Failed to {act.__name__} {name}: Unit {name} not found.\n"
            continue
        ctx.system.units.setdefault(name, unit)
        errors += act(unit)
    return said(error=errors, status=5 if "not found" in errors else 1 if "bad unit file setting" in errors else 0)


def _start(ctx: Context, names: list[str], options: dict[str, str]) -> Answer:
    def start(unit: Unit) -> str:
        if unit.load == "bad-setting":
            return f"Failed to start {unit.name}: Unit {unit.name} has a bad unit file setting.\n"
        if unit.active not in ("active", "activating"):
            unit.n_restarts = 0
            ctx.life.start(ctx.system, unit)
        return _reload_warning(unit)

    return _each(ctx, names, start)


def _stop(ctx: Context, names: list[str], options: dict[str, str]) -> Answer:
    def stop(unit: Unit) -> str:
        ctx.life.stop(ctx.system, unit)
        return ""

    return _each(ctx, names, stop)


def _restart(ctx: Context, names: list[str], options: dict[str, str]) -> Answer:
    def restart(unit: Unit) -> str:
        ctx.life.stop(ctx.system, unit)
        return _reload_warning(unit)

    return _each(ctx, names, restart)


def _reload_warning(unit: Unit) -> str:
    if not unit.need_reload:
        return ""
    return (
        f"Warning: The unit file, source configuration file or drop-ins of {unit.name} changed on disk. "
        "Run 'systemctl daemon-reload' to reload units.\n"
    )


def _enable(ctx: Context, names: list[str], options: dict[str, str]) -> Answer:
    errors = "".join(units.enable(ctx.system, n) for n in names)
    if "now" in options:
        return _start(ctx, names, options)
    return said(error=errors)


def _disable(ctx: Context, names: list[str], options: dict[str, str]) -> Answer:
    errors = "".join(units.disable(ctx.system, n) for n in names)
    if "now" in options:
        return _stop(ctx, names, options)
    return said(error=errors)


def _kill(ctx: Context, names: list[str], options: dict[str, str]) -> Answer:
    def kill(unit: Unit) -> str:
        if options.get("signal", "SIGTERM") in ("SIGKILL", "KILL", "9"):
            ctx.life.kill_unit(ctx.system, unit)
        return ""

    return _each(ctx, names, kill)


def _daemon_reload(ctx: Context, names: list[str], options: dict[str, str]) -> Answer:
    ctx.life.reload(ctx.system)
    return said()


def _reset_failed(ctx: Context, names: list[str], options: dict[str, str]) -> Answer:
    for unit in ctx.system.units.values():
        if unit.active == "failed" and (not names or unit.name in names):
            unit.active, unit.sub, unit.result = "inactive", "dead", "success"
    return said()
