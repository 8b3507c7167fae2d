"""Changes: observations in, a plan out; and how an approved plan is acted on, kept, and taken back."""

from __future__ import annotations

from importlib import import_module

from proofbook.errors import RecordError
from proofbook.model import Change

#: Name of a change → module and class. Only changes that can be taken back from their plan alone are here.
_UNDOABLE: dict[str, tuple[str, str]] = {}


def acting(name: str) -> Change:
    """The change that a stored plan is of, able to confirm and to roll back. Raises RecordError for one that is not known."""
    if name not in _UNDOABLE:
        raise RecordError(
            f"a change named {name!r} cannot be taken back by this version",
            hint=f"it knows: {', '.join(_UNDOABLE) or 'none'}; undo it by hand, with what the record says",
        )
    module, cls = _UNDOABLE[name]
    change: Change = getattr(import_module(f"proofbook.changes.{module}"), cls).for_undo()
    return change
