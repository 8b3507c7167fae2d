"""The faces of a live run: the question at a gate, an approve button, and a line of progress that updates in place.

This is the only room that imports ipywidgets. Nothing here decides: the gate itself refuses (:meth:`proofbook.run.Run.gate`).
"""

from __future__ import annotations

import getpass
import sys
from collections.abc import Callable, Mapping
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


def ask_at_gate(approver: str) -> Callable[[Plan], str]:
    """The typed gate. It works in every front end, from the keyboard, and holds "Run All" until it is answered.

    Returns a function that gives the approver's name, or "" to stop.
    """

    def ask(plan: Plan) -> str:
        from IPython.display import Markdown, display

        lines = [f"**{plan.title}** on **{plan.host.hostname}** (`{plan.host.name}`, machine-id `{plan.host.machine_id}`)", ""]
        lines += [f"- {action.what}" + (f": `{' '.join(action.argv)}`" if action.argv else "") for action in plan.actions]
        lines += [f"- cannot be undone: {text}" for text in plan.cannot_undo]
        lines += ["", f"plan digest `{plan.digest}`"]
        display(Markdown("\n".join(lines)))  # type: ignore[no-untyped-call]
        typed = input(f"Do not approve: press Enter.  Approve: type the machine's own name ({plan.host.hostname}): ").strip()
        if typed != plan.host.hostname:
            return ""
        return approver or getpass.getuser()

    return ask


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
