"""The programs that change a machine under guard, answered by the simulated one; see :mod:`proofbook.lab.sim.changing`."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from proofbook.lab.sim import changing
from proofbook.lab.sim.changing import Change, Refusal
from proofbook.lab.sim.shell import Answer, Context, said
from proofbook.remote.detached import DETACHED
from proofbook.remote.guard import GUARD
from proofbook.remote.lease import LEASE

#: How long a caller waits for a unit's stop before it is told that the way back is still being gone.
_FIRE_S = 600.0
_NO_ROOT = Answer(64, b"", b"this needs root\n")


async def _guard(ctx: Context, words: list[str]) -> Answer:
    if ctx.user.uid != 0:
        return _NO_ROOT
    if len(words) < 2:
        return said(error="used wrongly\n", status=64)
    verb, run_id, *more = words
    change = Change(ctx.life, ctx.system, run_id)
    status, why = 0, ""
    try:
        match verb, more:
            case "stage", [unit]:
                change.stage(unit, ctx.stdin)
            case (("arm" | "extend"), [seconds]):
                change.arm(verb, int(seconds))
            case "install", []:
                change.install()
            case "suspend", []:
                change.suspend()
            case "confirm", []:
                change.confirm()
            case "fire", []:
                change.begin_fire()
                await ctx.until(lambda: change.state != "firing", _FIRE_S)
            case "clean", []:
                change.clean()
            case "status", []:
                pass
            case _:
                raise Refusal(64, f"used wrongly: {verb} with {len(words)} words")
    except (Refusal, OSError) as refusal:
        full = f"{change.folder} cannot be written (is the disk full?)"
        status, why = (73, full) if isinstance(refusal, OSError) else (refusal.status, str(refusal))
        if change.state != "none" and verb != "fire":
            change.log(f"{verb}: {why}")
    return said(change.report(), error=why + "\n" if why else "", status=status)


def _lease(ctx: Context, words: list[str]) -> Answer:
    if ctx.user.uid != 0:
        return _NO_ROOT
    try:
        status, out, error = changing.lease(ctx.life, ctx.system, words or [""])
    except OSError:
        return said(error="the lease cannot be written in /var/lib/proofbook (is the disk full?)\n", status=73)
    return said(out, error=error, status=status)


async def _detached(ctx: Context, words: list[str]) -> Answer:
    """``sleep`` takes the lab's time; every other step is over at once."""
    # WHY here: the table of commands stands on this module.
    from proofbook.lab.sim.commands import make_shell

    if ctx.user.uid != 0:
        return _NO_ROOT
    verb, run_id, *more = words
    step = more[0] if more else ""
    disk, folder = changing.Disk(ctx.life, ctx.system), changing.step_folder(run_id, step)
    begun = disk.node(f"{folder}/begun") is not None
    match verb:
        case "clean":
            disk.remove(folder.rstrip("/"))
        case "stop":
            changing.stop_step(ctx.life, ctx.system, folder, late=False)
        case "start" if not begun:
            changing.begin_step(ctx.life, ctx.system, folder)
            seconds, argv = float(more[1]), more[2:]
            if argv[0] == "sleep":
                asleep, late = float(argv[1]), float(argv[1]) > seconds
                ctx.life.at(ctx.life.now + min(asleep, seconds), "step_ends", ctx.system.name, folder, late)
            else:
                answer = await make_shell().run_argv(ctx, argv)
                changing.end_step(ctx.life, ctx.system, folder, answer.status, answer.stdout, answer.stderr)
    return said(changing.step_report(ctx.life, ctx.system, folder))


PROGRAMS: dict[str, Callable[[Context, list[str]], Answer | Awaitable[Answer]]] = {
    GUARD: _guard,
    LEASE: _lease,
    DETACHED: _detached,
}
