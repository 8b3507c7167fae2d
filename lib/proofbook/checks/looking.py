"""Small helpers with which checks read observations and word their findings."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from proofbook.errors import CannotTell
from proofbook.intent import ContainerSpec
from proofbook.model import Check, Finding, Probe, Seen, Suggested

__all__ = ["Told", "counted", "join", "short_id", "tell", "there", "unseen", "well_formed_id"]

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Told(Generic[T]):
    """The value of a probe and "", or None and why it is unknown."""

    value: T | None
    unknown: str

    @property
    def pair(self) -> tuple[T | None, str]:
        return self.value, self.unknown


def tell(seen: Seen, probe: Probe[T]) -> Told[T]:
    """What ``probe`` saw, without raising: for checks that can say something even when one of their answers is missing."""
    try:
        return Told(seen.value(probe), "")
    except CannotTell as why:
        return Told(None, str(why) or "no reason was given")


_REFUSED = re.compile(r"permi|needs root|sudo|only be read by root|not all entries may be read", re.IGNORECASE)


def unseen(check: Check, why: str, subject: str = "") -> Finding:
    """The finding of a check that could not look: UNKNOWN, with what would let it look."""
    if _REFUSED.search(why):
        what = (
            "Log in as root, or let this account run these commands by sudo without a password (`proofbook hosts "
            "check` tries them)."
        )
        return check.unknown(f"cannot be told: {why}", subject=subject, action=Suggested.GRANT, what_to_do=what)
    what = "Try the command of the evidence by hand on the machine; then look again."
    return check.unknown(f"cannot be told: {why}", subject=subject, action=Suggested.LOOK, what_to_do=what)


def there(container: ContainerSpec | None, words: str) -> str:
    """A command to copy, as it has to be typed on the host for what runs in ``container`` (None: on the host itself)."""
    if container is None:
        return f"`{words}`"
    if container.kind == "nspawn":
        return f"`systemd-run --machine={container.tool_id} --pipe --quiet {words}`"
    return f"`{' '.join(container.enter())} {words}`"


def well_formed_id(text: str) -> bool:
    """Whether this is a machine-id or boot-id: 32 hex digits, not all alike (a cut or zeroed id identifies nothing)."""
    return len(text) == 32 and set(text) <= set("0123456789abcdef") and len(set(text)) > 1


def short_id(text: str) -> str:
    """The first digits of an id, enough to tell two apart in a sentence."""
    return text[:8] or "(empty)"


def counted(n: int, one: str, many: str = "") -> str:
    """``counted(2, "GPU")`` is "2 GPUs"."""
    return f"{n} {one if n == 1 else many or one + 's'}"


def join(items: Iterable[str], at_most: int = 6) -> str:
    """A readable list that stays short: the first ones, then how many more."""
    texts: Sequence[str] = list(items)
    shown = ", ".join(texts[:at_most])
    return shown + (f" and {len(texts) - at_most} more" if len(texts) > at_most else "")
