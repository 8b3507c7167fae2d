"""The faces of a live run: the question at a gate, an approve button, and a line of progress that updates in place.

This is the only room that imports ipywidgets. Nothing here decides: the gate itself refuses (:meth:`proofbook.run.Run.gate`).
"""

from __future__ import annotations

import getpass
import html
import sys
from collections.abc import Mapping
from typing import Any

from proofbook.model import Plan


def shell() -> Any:
    """The IPython shell that we run in, or None."""
    ipython = sys.modules.get("IPython")
    return ipython.get_ipython() if ipython is not None else None


def somebody_is_there() -> bool:
    """Whether a person can answer: an interactive front end allows stdin; papermill, nbclient and nbconvert do not."""
    here = shell()
    kernel = getattr(here, "kernel", None)
    return bool(getattr(kernel, "_allow_stdin", False))


class LiveGate:
    """How a person answers a gate, in two ways that both work in every front end.

    Beside the plan stand two buttons; the plan's cell has ended by then, so that a click always arrives. The gate's cell
    takes a click for the answer, and asks on the keyboard otherwise, which also holds "Run All" until it is answered.
    """

    def __init__(self, approver: str) -> None:
        self._approver = approver or getpass.getuser()
        self._clicked: dict[str, bool] = {}

    def show(self, plan: Plan) -> None:
        """Show the buttons of a plan. What they said is used by the gate's cell, and only for exactly this plan."""
        import ipywidgets as widgets
        from IPython.display import display

        if plan.empty:
            return
        stop = widgets.Button(description=f"Do not: leave {plan.host.hostname} as it is", layout=widgets.Layout(width="auto"))
        approve = widgets.Button(
            description=f"Approve: {plan.title}", button_style="warning", layout=widgets.Layout(width="auto"), icon="check"
        )
        said = widgets.HTML(f"Nothing is decided yet. Who approves: {html.escape(self._approver)}")

        def clicked(yes: bool) -> None:
            self._clicked[plan.digest] = yes
            word = "Approved" if yes else "Not approved"
            said.value = f"<b>{word}</b> by {html.escape(self._approver)}; run the gate's cell to go on."
            stop.disabled = approve.disabled = True

        stop.on_click(lambda _button: clicked(False))
        approve.on_click(lambda _button: clicked(True))
        display(widgets.VBox([widgets.HBox([stop, approve]), said]))  # type: ignore[no-untyped-call]

    def ask(self, plan: Plan) -> tuple[str, str]:
        """(who approves, how): "button" or "typed"; the name is "" when the plan is not approved."""
        from IPython.display import Markdown, display

        if plan.digest in self._clicked:
            return (self._approver if self._clicked[plan.digest] else "", "button")
        lines = [f"**{plan.title}** on **{plan.host.hostname}** (`{plan.host.name}`, machine-id `{plan.host.machine_id}`)", ""]
        lines += [f"- {action.what}" + (f": `{' '.join(action.argv)}`" if action.argv else "") for action in plan.actions]
        lines += [f"- cannot be undone: {text}" for text in plan.cannot_undo]
        lines += ["", f"plan digest `{plan.digest}`"]
        display(Markdown("\n".join(lines)))  # type: ignore[no-untyped-call]
        typed = input(f"Do not approve: press Enter.  Approve: type the machine's own name ({plan.host.hostname}): ").strip()
        return (self._approver if typed == plan.host.hostname else "", "typed")


class ProgressLine:
    """Shows a run's progress lines in one place, so that a cell ends with one static line and not with a hundred."""

    def __init__(self) -> None:
        self._handle: Any = None
        self._last = ""

    def __call__(self, event: str, data: Mapping[str, Any]) -> None:
        if event == "step.started":
            self._handle = None
        elif event == "progress":
            self._show(str(data["text"]))
        elif event == "step.ended" and self._handle is not None and data.get("duration_s") is not None:
            self._show(f"{self._last} · {data['outcome']} after {float(data['duration_s']):.0f} s")

    def _show(self, text: str) -> None:
        from IPython.display import Markdown, display

        self._last = text
        if self._handle is None:
            self._handle = display(Markdown(text), display_id=True)  # type: ignore[no-untyped-call]
        else:
            self._handle.update(Markdown(text))  # type: ignore[no-untyped-call]
