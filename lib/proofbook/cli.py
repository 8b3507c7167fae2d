"""The ``proofbook`` command: thin. Every subcommand is one call into the library, and says how it came out.

stdout carries results (with ``--json`` one JSON value on the last line); progress goes to stderr.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment
from rich.table import Table

from proofbook import __version__
from proofbook.errors import BadParameter, LabError, NoSuchRun, ProofbookError, Refused
from proofbook.visible import capped, json_text, short_digests, visible

if TYPE_CHECKING:
    from proofbook.launch import Outcome

app = typer.Typer(
    name="proofbook",
    help="Runbooks for GPU servers that leave evidence: live in JupyterLab, or headless.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    add_completion=False,
)
hosts_app = typer.Typer(help="The machines of the inventory.", no_args_is_help=True)
lab_app = typer.Typer(help="Simulated GPU servers behind a real SSH server on this machine.", no_args_is_help=True)
app.add_typer(hosts_app, name="hosts")
app.add_typer(lab_app, name="lab")
lease_app = typer.Typer(help="Who may change a machine now: one run at a time, said by the machine itself.", no_args_is_help=True)
app.add_typer(lease_app, name="lease")


class SafeConsole(Console):
    """A terminal that obeys us alone: what a machine said is shown, control characters and all, and never acted upon."""

    def print(self, *objects: Any, **how: Any) -> None:
        # WHY here too: rich takes some control characters (a carriage return, a backspace) out of a text without a word
        super().print(*(visible(o) if isinstance(o, str) else o for o in objects), **how)

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        for segment in super().render(renderable, options):
            yield segment if segment.control else Segment(visible(segment.text), segment.style)


out = SafeConsole(highlight=False, soft_wrap=True)
err = SafeConsole(stderr=True, highlight=False, soft_wrap=True)

JsonFlag = Annotated[bool, typer.Option("--json", help="Print JSON (one value, the last line of stdout).")]
OutputsOption = Annotated[
    Path | None, typer.Option("--outputs", help="The archive of records (default: $PROOFBOOK_OUTPUTS, or outputs/ here).")
]

STYLE = {"PASS": "bold green", "WARN": "bold yellow", "UNKNOWN": "bold magenta", "FAIL": "bold red", "NOT_CHECKED": "dim"}


#: The most lines of a plan's difference that the terminal shows.
DIFF_LINES = 60


def _styled(verdict: str) -> str:
    style = STYLE.get(verdict, "")
    return f"[{style}]{verdict}[/]" if style else verdict


# -------------------------------------------------------------------------------------------------- run


@app.command()
def run(
    runbook: Annotated[str, typer.Argument(help="Which runbook; `proofbook runbooks` lists them.")],
    host: Annotated[str, typer.Option("--host", help="A name from proofbook.toml or ~/.ssh/config, or lab:<scenario>.")] = "",
    parameter: Annotated[
        list[str] | None, typer.Option("-p", "--parameter", help="name=value; may be said several times.")
    ] = None,
    approve: Annotated[str, typer.Option("--approve", help="The digest of the plan that you read.")] = "",
    approver: Annotated[str, typer.Option("--approver", help="Who approves it.")] = "",
    outputs: OutputsOption = None,
    as_json: JsonFlag = False,
) -> None:
    """Run a runbook headless. Exit codes: 0 PASS/WARN · 1 FAIL · 2 refused before contact · 3 waiting at a gate · 4 UNKNOWN ·
    5 rolled back · 6 rollback failed · 7 refused or aborted after contact."""
    from proofbook import launch, procedures

    progress = Progress()
    try:
        procedure = procedures.load(runbook)
        parameters = procedure.from_text(_pairs(parameter or []))
        for name, value, option in (
            ("host", host, "--host"),
            ("approved", approve, "--approve"),
            ("approver", approver, "--approver"),
        ):
            if value:
                _add_once(parameters, name, value, option)
        outcome = launch.launch(runbook, parameters, outputs=outputs, tell=progress)
    except Refused as error:
        outcome = launch.refused(runbook, host, error)
    _print_outcome(outcome, progress, as_json=as_json)
    raise typer.Exit(outcome.exit_code)


def _pairs(given: list[str]) -> dict[str, str]:
    pairs: dict[str, str] = {}
    for text in given:
        name, equals, value = text.partition("=")
        if not equals or not name.isidentifier():
            raise BadParameter(f"-p {text!r} is not name=value", hint="write it as one word: -p settle_minutes=5")
        if name in pairs:
            raise BadParameter(f"parameter {name!r} is given twice", hint="say it once")
        pairs[name] = value
    return pairs


def _add_once(parameters: dict[str, Any], name: str, value: str, option: str) -> None:
    if parameters.get(name, value) != value:
        raise BadParameter(f"{option} says {value!r}, and -p {name}= says {parameters[name]!r}", hint="say it once")
    parameters[name] = value


class Progress:
    """Journal lines → one line of text each on stderr; remembers the plan, to show it at a gate."""

    def __init__(self, console: Console = err, prefix: str = "") -> None:
        self._console = console
        self._prefix = prefix
        self.plan: Mapping[str, Any] | None = None

    def __call__(self, entry: Mapping[str, Any]) -> None:
        text = self._text(entry["event"], entry["data"])
        if text:
            from rich.markup import escape

            clock = entry["ts"][11:19]
            self._console.print(f"[dim]{clock}[/] {self._prefix}{text if text.startswith('[') else escape(text)}")

    def _text(self, event: str, data: Mapping[str, Any]) -> str:
        from rich.markup import escape

        match event:
            case "host.proven":
                who = data["identity"]
                ids = f"machine-id {who['machine_id'][:12]}…, boot {who['boot_id'][:12]}…"
                return f"  {who['hostname']} answers ({data['note']}): {ids}"  # never first: a name is not markup
            case "step.started":
                return f"[bold]{data['step']} · {escape(data['title'])}[/]"
            case "progress":
                return f"  {data['text']}"
            case "act.intent":
                return f"  acting: {data['what']}"
            case "finding" if data["verdict"] in ("FAIL", "UNKNOWN", "WARN"):
                about = f"{data['subject']}: {data['reason']}" if data["subject"] else data["reason"]
                return f"[{STYLE[data['verdict']]}]  {data['verdict']:<7}[/] {escape(capped(about))}"
            case "plan":
                self.plan = data
                return ""
            case "trouble":
                return f"[bold red]  {escape(capped(data['message']))}[/]"
            case _:
                return ""


def _print_outcome(outcome: Outcome, progress: Progress, *, as_json: bool) -> None:
    if as_json:
        if outcome.message:
            err.print(outcome.message, markup=False)
        print(outcome.to_json())
        return
    if outcome.message and not outcome.waiting_for:
        err.print(outcome.message, markup=False)
    if outcome.waiting_for and progress.plan:
        _print_plan(progress.plan, outcome)
    if outcome.summary:
        out.print(capped(outcome.summary), markup=False, style="bold")
    if outcome.concluded:
        _print_conclusion(outcome.concluded)
    found = f"concluded: {outcome.conclusion.upper()} · " if outcome.conclusion else ""
    out.print(f"{found}{_styled(outcome.verdict)} · {outcome.status} · exit code {outcome.exit_code}")
    for data in outcome.problems:
        about = f"{data['subject']}: " if data["subject"] else ""
        out.print(f"[{STYLE[data['verdict']]}]{data['verdict']:<7}[/] ", end="")
        out.print(capped(f"{about}{data['reason']}"), markup=False)
        if data["what_to_do"]:
            out.print(capped(f"        → {data['what_to_do']}"), markup=False)
    if outcome.not_checked:
        out.print(f"not checked ({len(outcome.not_checked)}):")
        for reason in outcome.not_checked:
            out.print(capped(f"  · {reason}"), markup=False)
    if outcome.record:
        out.print(f"record: {outcome.record}", markup=False)


def _print_conclusion(said: Mapping[str, str]) -> None:
    from proofbook.model import hypothesis_word

    because = f" {said['outcome'].capitalize()}: {said['because']}" if said["because"] else ""
    out.print(capped(f"{hypothesis_word(said['outcome'])}: {said['hypothesis'].rstrip('.')}.{because}"), markup=False)
    if said["scope"]:
        out.print(capped(f"  holds for: {said['scope']}"), markup=False)


def _print_plan(plan: Mapping[str, Any], outcome: Outcome) -> None:
    out.print(f"\n{plan['title']} ({plan['host']['name']}) waits for an approval", markup=False, style="bold")
    for action in plan["actions"]:
        out.print(short_digests(f"  would do: {action['what']}  {' '.join(action['argv'])}"), markup=False)
    for fact in plan["facts"]:
        out.print(f"  now: {fact}", markup=False)
    for text in plan["cannot_undo"]:
        out.print(f"  cannot be undone: {text}", markup=False)
    for undo in plan["undo"]:
        out.print(short_digests(f"  taken back by: {undo['what']}"), markup=False)
    out.print(f"  expected time: {plan['expected_s'] / 60:.0f} min")
    _print_difference(str(plan.get("diff") or ""), outcome.record)
    out.print("\nto approve exactly this, run the same command again with:")
    out.print(f"  --approve {outcome.waiting_for['digest'] if outcome.waiting_for else ''} --approver YOUR-NAME\n", markup=False)


def _print_difference(diff: str, record: str | None) -> None:
    """What would be written, line by line: who approves has read it."""
    lines = diff.rstrip("\n").split("\n") if diff.strip() else []
    if lines:
        out.print("  the difference:")
    for line in lines[:DIFF_LINES]:
        style = {"+": "green", "-": "red"}.get(line[:1], "dim" if line.startswith("@@") else "")
        out.print(f"    {line}", markup=False, style=style)
    if len(lines) > DIFF_LINES:
        where = f" in {record}/record.html" if record else ""
        out.print(f"    … {len(lines) - DIFF_LINES} more lines{where}", markup=False)


# ---------------------------------------------------------------------------------------------- recover


RunArgument = Annotated[str, typer.Argument(help="A run id, or the beginning or the end of one.")]


@app.command()
def resume(run: RunArgument, outputs: OutputsOption = None, as_json: JsonFlag = False) -> None:
    """Go on with a change whose runner died after the approval: asks the machine what happened, then carries on."""
    from proofbook import recover

    progress = Progress()
    outcome = recover.resume(run, outputs=outputs, tell=progress)
    _print_outcome(outcome, progress, as_json=as_json)
    raise typer.Exit(outcome.exit_code)


@app.command()
def rollback(
    run: RunArgument,
    who: Annotated[str, typer.Option("--approver", "--who", help="Whose decision it is; the record keeps it.")] = "",
    outputs: OutputsOption = None,
    as_json: JsonFlag = False,
) -> None:
    """Undo what a run began or kept, and verify the old state; says what to do by hand when that fails."""
    from proofbook import recover

    progress = Progress()
    outcome = recover.roll_back(run, who=who, outputs=outputs, tell=progress)
    _print_outcome(outcome, progress, as_json=as_json)
    raise typer.Exit(outcome.exit_code)


# ------------------------------------------------------------------------------------------------- demo


@app.command()
def demo(
    outputs: OutputsOption = None,
    scenario: Annotated[list[str] | None, typer.Option("--scenario", help="Only these lab scenarios (default: a tour).")] = None,
) -> None:
    """Show a whole runbook run: reboot verification on simulated GPU servers, healthy and broken."""
    from proofbook.demo import tour

    raise typer.Exit(tour(out, err, outputs=outputs, scenarios=scenario or None))


# ---------------------------------------------------------------------------------------------- looking


@app.command()
def runbooks(as_json: JsonFlag = False) -> None:
    """The runbooks, what they are for, and what they take."""
    from proofbook import procedures

    described = [procedures.load(name).describe() for name in procedures.names()]
    if as_json:
        print(json_text(described))
        return
    for one in described:
        out.print(
            f"[bold]{one['name']}[/] · {'changes the host' if one['changes_the_host'] else 'reads only'}\n  {one['purpose']}"
        )
        table = Table(box=None, pad_edge=False, padding=(0, 2))
        for column in ("parameter", "type", "default", "what it means"):
            table.add_column(column)
        for p in one["parameters"]:
            table.add_row(f"  {p['name']}", p["type"], "(required)" if p["required"] else repr(p["default"]), p["help"])
        out.print(table)


@app.command()
def show(
    run_id: Annotated[str, typer.Argument(metavar="RUN", help="A run id, or its beginning or end.")],
    outputs: OutputsOption = None,
    as_json: JsonFlag = False,
) -> None:
    """One record: verdict, what was not verified, findings, what became of it later, and where it is."""
    from proofbook import begun
    from proofbook.model import RunStatus

    book = _archive(outputs)
    found = book.load(run_id)
    since = begun.later(book.since(found.run_id)).get(found.run_id, "")
    since = f"later: {since}" if since else ""
    status, why = begun.not_ended(book, found.run_id) if found.status == RunStatus.RUNNING else (found.status, "")
    standing = f"{status}: {why}" if why else ""
    if as_json:
        print(json_text({**found.as_json(), "stands": status, "remark": why, "later": since.removeprefix("later: ")}))
        return
    if not found.journal.get("intact", True):
        err.print(
            f"DAMAGED: {found.journal.get('trouble')}; what follows is what can still be read", markup=False, style="bold red"
        )
    # WHY first: what the record says of the machine was true when it was written, and may be no longer
    for remark in filter(None, (standing, since)):
        out.print(remark, markup=False, style="bold")
    out.print(found.as_text(), markup=False)
    out.print(f"record: {book.folder_of(found.run_id)}", markup=False)


@app.command()
def runs(outputs: OutputsOption = None, as_json: JsonFlag = False) -> None:
    """The archive, newest first; what is damaged or in quarantine stands at the end."""
    book = _archive(outputs)
    listed = _listed(book)
    if as_json:
        print(json_text(listed))
        return
    width = max((len(r["host"]) for r in listed), default=0)
    for r in listed:
        verdict = r["verdict"] or "–"
        out.print(f"[{STYLE.get(verdict, 'dim')}]{verdict:<8}[/] ", end="")
        out.print(f"{r['stands']:<16} {r['host']:<{width}}  {r['run_id']}", markup=False)
        for remark in filter(None, (r["remark"], r["later"] and f"later: {r['later']}")):
            out.print(f"           {remark}", markup=False)
    damaged = book.damaged()
    for folder, why in damaged:
        out.print("[bold red]damaged[/]  ", end="")
        out.print(f"{folder}: {why}", markup=False)
    if not listed and not damaged:
        out.print("no records yet")


def _listed(book: Any) -> list[dict[str, Any]]:
    """Every record in a line, newest first. A run that has not ended has no verdict: what is fine so far may still fail."""
    from proofbook import begun
    from proofbook.model import RunStatus

    found = sorted(book.runs(), key=lambda r: r.run_id, reverse=True)
    later = begun.later(found)
    listed = []
    for brief in found:
        stands, remark, verdict = brief.status, "", brief.verdict
        if brief.status == RunStatus.RUNNING:
            stands, remark = begun.not_ended(book, brief.run_id)
            verdict = None
        more = {"verdict": verdict, "stands": stands, "remark": remark, "later": later.get(brief.run_id, "")}
        listed.append({**brief.brief(), **more})
    return listed


@app.command()
def verify(
    run_id: Annotated[str, typer.Argument(metavar="RUN", help="A run id, or its beginning or end.")],
    outputs: OutputsOption = None,
) -> None:
    """Is a record unchanged since it was sealed? Checks its manifest and the journal's hash chain."""
    troubles = _archive(outputs).verify(run_id)
    for trouble in troubles:
        out.print(f"damaged: {trouble}", markup=False, style="bold red")
    if not troubles:
        out.print("[bold green]intact[/]: every file is as it was sealed, and the journal's chain is whole")
    raise typer.Exit(1 if troubles else 0)


@app.command()
def sweep(outputs: OutputsOption = None) -> None:
    """Mark runs whose runner died as lost, and seal what they left."""
    lost = _archive(outputs).sweep()
    for run_id in lost:
        out.print(f"lost: {run_id}", markup=False)
    out.print(f"{len(lost)} run(s) marked as lost")


def _archive(outputs: Path | None) -> Any:
    from proofbook.archive import Archive
    from proofbook.notebook import outputs_folder

    return Archive((outputs or outputs_folder()).resolve())


# ------------------------------------------------------------------------------------------------ hosts


@hosts_app.command("check")
def hosts_check(
    names: Annotated[list[str] | None, typer.Argument(help="Names (default: all of proofbook.toml).")] = None,
    as_json: JsonFlag = False,
) -> None:
    """For each host: reachable, key known, privileges, which tools exist. Exit code 1 when one is not usable, also because a
    declared container cannot be entered."""
    from proofbook import hosts

    reports = hosts.check(names or None)
    if as_json:
        print(json_text([r.as_json() for r in reports]))
    else:
        out.print(hosts.table(reports))
    raise typer.Exit(0 if reports and all(r.usable for r in reports) else 1)


# ------------------------------------------------------------------------------------------------ lease


@lease_app.command("show")
def lease_show(
    host: Annotated[str, typer.Argument(help="A name from proofbook.toml or ~/.ssh/config, or lab:….")],
    outputs: OutputsOption = None,
) -> None:
    """Which run may change this machine now, since when, whether anybody is still at it, and what to do next."""
    from proofbook import begun, leases
    from proofbook.changes.lease import explain

    held = leases.show(host)
    said = [explain(held, held.now), *begun.next_steps(_archive(outputs), held.run, host)] if held else [f"no run holds {host}"]
    out.print("\n".join(said), markup=False)


@lease_app.command("break")
def lease_break(
    host: Annotated[str, typer.Argument(help="A name from proofbook.toml or ~/.ssh/config, or lab:….")],
    run: Annotated[str, typer.Argument(help="The run that holds it, as `proofbook lease show` says it.")],
    who: Annotated[str, typer.Option("--who", help="Your name; the machine keeps it.")] = "",
) -> None:
    """Take the lease away from a run that is really over. What that run had begun stays begun: roll it back, or go on with it."""
    from proofbook import leases

    before = leases.break_it(host, run, who)
    out.print(f"run {before.run} of {before.holder} no longer holds {host}", markup=False)
    out.print(f"what it had begun: proofbook resume {before.run}, or proofbook rollback {before.run}", markup=False)


# -------------------------------------------------------------------------------------------------- lab


@lab_app.command("list")
def lab_list(
    runbook: Annotated[str, typer.Option("--runbook", help="Only scenarios of this runbook.")] = "", as_json: JsonFlag = False
) -> None:
    """The scenarios, what is wrong in each, and how each runbook should come out; one line each when it is piped."""
    from proofbook import procedures
    from proofbook.lab.sim import client

    if runbook:
        procedures.load(runbook)  # refuses a name that there is not
    listed = [info.as_json() for info in client.scenarios() if not runbook or runbook in info.runbooks]
    if runbook:
        listed = [{**one, "runbooks": {runbook: one["runbooks"][runbook]}} for one in listed]
    if as_json:
        print(json_text(listed))
        return
    if not out.is_terminal:  # for grep and cut: a scenario is a line
        for one in listed:
            right = " · ".join(f"{name}: {r['verdict']}" for name, r in one["runbooks"].items())
            print(visible(f"lab:{one['scenario']}\t{' '.join(one['wrong'].split())}\t{right}"))  # rich would take the tabs
        return
    table = Table(box=None, pad_edge=False, padding=(0, 2))
    for column in ("host", "what is wrong", "right verdict"):
        table.add_column(column, no_wrap=column == "host")
    for one in listed:
        verdicts = " · ".join(f"{name}: {_styled(r['verdict'])}" for name, r in one["runbooks"].items())
        table.add_row(f"lab:{one['scenario']}", one["wrong"], verdicts)
    out.print(table)


@lab_app.command("up")
def lab_up(scenario: str) -> None:
    """Start a simulated machine (or say that it runs), and how to log in to it. One that is down is not what was asked for."""
    place = _place(scenario)
    how = (
        "already running" if place.reused else "its process was killed, and it goes on as it was" if place.resumed else "started"
    )
    out.print(f"{how}: {_ssh_line(place)}", markup=False)


@lab_app.command("ssh")
def lab_ssh(scenario: str) -> None:
    """Log in to a simulated machine and look around."""
    import os
    import shlex

    words = shlex.split(_ssh_line(_place(scenario)))
    os.execvp(words[0], words)


@lab_app.command("status")
def lab_status(as_json: JsonFlag = False) -> None:
    """Which simulated machines run now."""
    from proofbook.lab.sim import client

    running = client.status()
    if as_json:
        print(json_text(running))
        return
    for one in running:
        answers = "" if one["reachable"] else f"  does not answer now{_back(one['answers_in_s'])}"
        out.print(
            f"lab:{one['scenario']}  port {one['port']}  pid {one['pid']}  boot {one['boot_id'][:12]}…  {one['now']}{answers}"
        )
    if not running:
        out.print("no simulated machine runs")


@lab_app.command("reset")
def lab_reset(scenario: Annotated[str | None, typer.Argument(help="Which (default: all).")] = None) -> None:
    """Stop simulated machines and forget their state; the next use begins from the scenario."""
    from proofbook.lab.sim import client

    client.reset(_scenario(scenario) if scenario else None)
    out.print("reset")


def _scenario(name: str) -> str:
    return name.removeprefix("lab:")


def _place(scenario: str) -> Any:
    """How to reach a machine, started if it did not run. Raises LabError when it is down: nobody could log in."""
    from proofbook.lab.sim import client

    place = client.ensure(_scenario(scenario))
    if not place.reachable:
        name = place.scenario
        raise LabError(
            f"lab:{name} is down{_back(place.answers_in_s)}",
            hint=f"`proofbook lab reset {name}`, then `proofbook lab up {name}` begins with a new one"
            + ("" if place.answers_in_s is None else ", or wait"),
        )
    return place


def _back(seconds: float | None) -> str:
    return ", and does not come back by itself" if seconds is None else f", and answers again in about {seconds:.0f} s"


def _ssh_line(place: Any) -> str:
    return f"ssh -p {place.port} -i {place.identity_file} -o UserKnownHostsFile={place.known_hosts} {place.user}@{place.address}"


PASS_ON = {"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": []}


@lab_app.command("box", context_settings=PASS_ON)
def lab_box(words: typer.Context) -> None:
    """Containers with a real systemd, journald and sshd: up, down, status, ssh, build (needs root; `lab box --help`)."""
    from proofbook.lab.real.cli import box_app

    box_app(words.args or ["--help"], prog_name="proofbook lab box")


@lab_app.command("vm", context_settings=PASS_ON)
def lab_vm(words: typer.Context) -> None:
    """Virtual machines with a kernel, an IOMMU and stand-in GPUs of their own (needs root; `lab vm --help`)."""
    from proofbook.lab.real.cli import vm_app

    vm_app(words.args or ["--help"], prog_name="proofbook lab vm")


# ----------------------------------------------------------------------------------------------- triage


@app.command()
def triage(
    files: Annotated[
        list[Path], typer.Argument(help="Logs of one incident: files, also compressed; - is stdin.", show_default=False)
    ],
    as_json: JsonFlag = False,
) -> None:
    """Judge logs that somebody pasted. Exit codes: 0 PASS/WARN · 1 FAIL · 2 a file cannot be read · 4 UNKNOWN."""
    from proofbook.triage import triage as judge_files

    said = judge_files(files)
    if as_json:
        print(json_text(said.as_json()))
    else:
        from proofbook.triage.show import write

        write(said, out)
    raise typer.Exit(said.exit_code)


# ------------------------------------------------------------------------------------------------- main


@app.callback(invoke_without_command=True)
def _root(version: Annotated[bool, typer.Option("--version", help="Print the version.")] = False) -> None:
    if version:
        print(__version__)
        raise typer.Exit(0)


def main() -> None:
    """Entry point. Our own errors become one clear message and their exit code; anything else is a bug, and shown whole."""
    try:
        app()
    except (Refused, NoSuchRun) as error:
        err.print(str(error), markup=False, style="bold red")
        sys.exit(2)
    except ProofbookError as error:
        err.print(str(error), markup=False, style="bold red")
        sys.exit(7)


if __name__ == "__main__":
    main()
