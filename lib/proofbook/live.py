"""The faces of a live run: the question at a gate, its buttons, and lines of progress that update in place.

This is the only room that imports ipywidgets. Nothing here decides: the gate itself refuses (:meth:`proofbook.run.Run.gate`).
What is said to the engineer is said as text in the notebook too, since buttons are gone when it is opened again.
"""

from __future__ import annotations

import getpass
import sys
import threading
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from typing import Any

from markupsafe import Markup, escape

from proofbook.model import Plan
from proofbook.record import Keeper, argv_text, load_record
from proofbook.view import Shown, card, duration_text, table
from proofbook.visible import visible

#: How often the gate asks again after something that is neither Enter nor the machine's name: a slip should not end the run.
TRIES = 3

#: Progress lines that stay on the screen; all of them are in the journal.
LINES = 12


def shell() -> Any:
    """The IPython shell that we run in, or None."""
    ipython = sys.modules.get("IPython")
    return ipython.get_ipython() if ipython is not None else None


def somebody_is_there() -> bool:
    """Whether a person can answer: an interactive front end allows stdin; papermill, nbclient and nbconvert do not."""
    here = shell()
    kernel = getattr(here, "kernel", None)
    return bool(getattr(kernel, "_allow_stdin", False))


def _after_this_cell(show: Callable[[], None]) -> None:
    """Show something below the result of the running cell; at once where there is no cell."""
    here = shell()
    if here is None:
        show()
        return

    def once(_result: Any) -> None:
        here.events.unregister("post_run_cell", once)
        show()

    here.events.register("post_run_cell", once)


# ------------------------------------------------------------------------------------------------- gate


class _Question:
    """One plan and what a person said about it. Clicks come in on a thread of the kernel's; the gate reads on another."""

    def __init__(self, plan: Plan, approver: str) -> None:
        import ipywidgets as widgets

        self.plan = plan
        self._approver = approver
        self._lock = threading.Lock()
        self._answer: bool | None = None
        self._taken = False
        wide = widgets.Layout(width="auto")
        self._stop = widgets.Button(description=f"Do not: leave {plan.host.hostname} as it is", layout=wide)
        self._approve = widgets.Button(
            description=f"Approve: {plan.title}", button_style="warning", layout=wide, icon="check", tooltip=plan.digest
        )
        read = f"{datetime.now(UTC):%H:%M:%S} UTC"
        self._said = widgets.HTML()
        self._say(f"Nothing is decided yet. The plan was read from the machine at {read}. Who approves: {approver}")
        self._stop.on_click(lambda _button: self._clicked(False))
        self._approve.on_click(lambda _button: self._clicked(True))
        self._box = widgets.VBox([widgets.HBox([self._stop, self._approve]), self._said])

    def show(self) -> None:
        from IPython.display import display

        bundle = dict(self._box._repr_mimebundle_())
        bundle["text/plain"] = "[buttons of the live notebook: what was decided here stands below the gate's cell]"
        display(bundle, raw=True)  # type: ignore[no-untyped-call]

    def _say(self, text: str) -> None:
        self._said.value = f'<span role="status">{escape(visible(text))}</span>'

    def _clicked(self, yes: bool) -> None:
        """Take a click. Until the gate's cell takes the answer nothing has happened, so the other button stays."""
        with self._lock:
            if self._taken:
                return
            self._answer = yes
            self._stop.disabled, self._approve.disabled = not yes, yes
        at = f"{datetime.now(UTC):%H:%M:%S} UTC"
        if yes:
            self._say(f"Approved by {self._approver} at {at}. Nothing has happened yet: run the gate's cell to go on.")
        else:
            self._say(f"Not approved, at {at}. The gate's cell will stop the run; {self.plan.host.hostname} stays as it is.")

    def take(self) -> bool | None:
        """What was clicked (None: nothing yet). From now on the buttons are of no use."""
        with self._lock:
            self._taken = True
            self._stop.disabled = self._approve.disabled = True
        if self._answer is None:
            self._say("The gate's cell asks now: answer there.")
        return self._answer

    def settle(self, yes: bool) -> None:
        self._say(f"Approved by {self._approver}." if yes else f"Not approved: {self.plan.host.hostname} was left as it is.")


class LiveGate:
    """How a person answers a gate, in two ways that both work in every front end.

    Below the plan stand two buttons; the plan's cell has ended by then, so that a click always arrives. The gate's cell
    takes a click for the answer, and asks on the keyboard otherwise, which also holds "Run All" until it is answered.
    """

    def __init__(self, approver: str) -> None:
        self._approver = approver or getpass.getuser()
        self._questions: dict[str, _Question] = {}

    def show(self, plan: Plan) -> None:
        """Show the buttons of a plan. What they said is used by the gate's cell, and only for exactly this plan."""
        if plan.empty:
            return
        if plan.digest not in self._questions:
            self._questions[plan.digest] = _Question(plan, self._approver)
        # WHY: first the plan, then the buttons: nobody should meet "Approve" before what it approves.
        _after_this_cell(self._questions[plan.digest].show)

    def ask(self, plan: Plan) -> tuple[str, str]:
        """(who approves, how): "button" or "typed"; the name is "" when the plan is not approved."""
        from IPython.display import display

        question = self._questions.get(plan.digest)
        clicked = question.take() if question is not None else None
        if clicked is not None:
            yes, how = clicked, "button"
        else:
            display(_restated(plan))  # type: ignore[no-untyped-call]
            yes, how = _typed(plan.host.hostname), "typed"
        if question is not None:
            question.settle(yes)
        if yes:
            display(_approved(plan, self._approver, how))  # type: ignore[no-untyped-call]
        return (self._approver if yes else "", how)


def _typed(hostname: str) -> bool:
    """Ask on the keyboard. Only the machine's own name approves; what is neither that nor Enter is asked again."""
    for _try in range(TRIES):
        said = input(f"Do not approve: press Enter.  Approve: type the machine's own name ({hostname}): ").strip()
        if said in ("", hostname):
            return said == hostname
        print(f"That is not the name of this machine ({hostname}). Nothing was done.")
    return False


def _restated(plan: Plan) -> Shown:
    """What an answer is about, once more: where it is typed, the plan may be out of sight."""
    host = plan.host
    lines = [a.what + (f": {' '.join(a.argv)}" if a.argv else "") for a in plan.actions]
    lines += [f"cannot be undone: {text}" for text in plan.cannot_undo]
    head = f"{plan.title} on {host.hostname} ({host.name}, machine-id {host.machine_id})"
    html = Markup('<b>{}</b><ul style="margin:2px 0">{}</ul><span style="opacity:.75">plan {}</span>').format(
        head, Markup("").join(Markup("<li>{}</li>").format(line) for line in lines), plan.digest
    )
    return Shown(html, "\n".join([head, *(f"  - {line}" for line in lines), f"plan {plan.digest}"]))


def _approved(plan: Plan, approver: str, how: str) -> Shown:
    text = f"{plan.title}: approved by {approver} ({how}) at {datetime.now(UTC):%H:%M:%S} UTC. Nothing has happened yet."
    return Shown(Markup("{}").format(text), text)


# --------------------------------------------------------------------------------------------- the screen


class Screen:
    """Shows what a run says besides the results of its cells: the progress of a long step, its tables, and how it ended.

    A step's progress stands in one place, so that its cell ends with a few static lines and not with a hundred.
    """

    def __init__(self, keeper: Keeper) -> None:
        self._keeper = keeper
        self._handle: Any = None
        self._title = ""
        self._since = ""
        self._lines: list[str] = []
        self._keeps = True

    def __call__(self, event: str, data: Mapping[str, Any]) -> None:
        show = getattr(self, f"_on_{event.replace('.', '_')}", None)
        if show is not None:
            show(data)

    def _on_step_started(self, data: Mapping[str, Any]) -> None:
        self._handle = None
        self._title, self._lines = str(data["title"]), []
        self._keeps = data["verb"] != "wait"  # of a countdown only the last line is news
        self._since = f"since {datetime.now(UTC):%H:%M:%S} UTC"
        if data["verb"] in ("apply", "wait"):
            self._show(self._since)

    def _on_act_intent(self, data: Mapping[str, Any]) -> None:
        self._on_progress({"text": f"{data['what']}: {argv_text(data['argv'])}"})

    def _on_progress(self, data: Mapping[str, Any]) -> None:
        self._lines = [*self._lines, str(data["text"])][-LINES:] if self._keeps else [str(data["text"])]
        self._show(self._since)

    def _on_step_ended(self, data: Mapping[str, Any]) -> None:
        if self._handle is None or data.get("duration_s") is None:
            return
        if not self._keeps:
            self._lines = []
        how = "done" if data["outcome"] == "ok" else str(data["outcome"])
        self._show(f"{how} after {duration_text(float(data['duration_s']))}")
        self._handle = None

    def _on_table(self, data: Mapping[str, Any]) -> None:
        from IPython.display import display

        # What changed is the news; it must not stand below thirty rows that did not.
        rows = sorted(data["rows"], key=lambda row: row[-1] == "same")
        told = table(data["columns"], rows, title=data["title"], note=data["note"])
        display(told)  # type: ignore[no-untyped-call]

    def _on_run_closing(self, _data: Mapping[str, Any]) -> None:
        """The record, as it was sealed a moment ago by the keeper, which listens before us."""
        from IPython.display import display

        where = self._keeper.folder
        display(card(load_record(where).as_json(), f"{where}/record.html"))  # type: ignore[no-untyped-call]

    def _show(self, state: str) -> None:
        from IPython.display import display

        html = Markup("<b>{}</b> · {}").format(self._title, state)
        if self._lines:
            html += Markup('<ul style="margin:2px 0">{}</ul>').format(
                Markup("").join(Markup("<li>{}</li>").format(line) for line in self._lines)
            )
        told = Shown(html, "\n".join([f"{self._title} · {state}", *(f"  - {line}" for line in self._lines)]))
        if self._handle is None:
            self._handle = display(told, display_id=True)  # type: ignore[no-untyped-call]
        else:
            self._handle.update(told)
