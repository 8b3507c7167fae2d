"""Which pairs may be used, and which are shown to be bad: named among the findings, whatever the run itself came to."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from proofbook.checks.looking import counted, join
from proofbook.checks.p2p.matrix import REFUTES, State
from proofbook.checks.p2p.verdict import FALLBACK, serve_without
from proofbook.model import Check, Finding, Measurement, Probe, Seen, Suggested

__all__ = ["PairsUsable", "bad_pairs", "failed_in_short", "usable", "weighed"]

Pair = tuple[str, str]

_UNITS = (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10))
#: Pairs that one finding names; the table of pairs has them all.
_NAMED = 12


@dataclass(frozen=True)
class PairsUsable(Check):
    """Every pair carries data rightly, alone and together with others. A pair that does not is a WARN that names it.

    WHY no FAIL: the machine is as it was and the run is valid, which is what the verdict speaks of. A server that goes on using
    such a pair loses data, which is why it may not be left to a picture.
    """

    measured: Measurement
    name: ClassVar[str] = "p2p.PairsUsable"
    title: ClassVar[str] = "Which pairs may be used?"

    def needs(self) -> tuple[Probe[Any], ...]:
        return ()

    def judge(self, seen: Seen) -> Sequence[Finding]:
        value = self.measured.value
        every = counted(len(value["cells"]), "ordered pair")
        found = [self._bad(f"{len(of)} of {every}: {what}", of) for what, of in bad_pairs(value).items()]
        if found:
            return found
        if not value["cells"]:
            return [self.not_checked("there is no pair")]
        if value["judged"]["allowed"]:
            return [self.passed(f"all {every} may be used; {usable(value)}")]
        return [self.not_checked(f"no pair is shown to be bad, nor all of them to be good: {value['judged']['reason']}")]

    def _bad(self, what: str, of: Mapping[Pair, str]) -> Finding:
        return self.warned(
            f"{what}: {named(of, _NAMED)}: peer-to-peer stays off",
            action=Suggested.FIX_CONFIG,
            what_to_do=serve_without(FALLBACK),
            observed={f"{src} to {dst}": how for (src, dst), how in of.items()},
        )


def bad_pairs(value: Mapping[str, Any]) -> dict[str, dict[Pair, str]]:
    """What is wrong -> the ordered pairs with it, and in what of them: alone by state, then what showed only together."""
    found: dict[str, dict[Pair, str]] = {}
    for cell in value["cells"]:
        if cell["state"] in REFUTES:
            found.setdefault(str(cell["state"]), {})[cell["src"], cell["dst"]] = failed_in_short(cell) or cell["reason"]
    alone = {pair for of in found.values() for pair in of}
    for one in value["together"]:
        pair = (one["src"], one["dst"])
        if one["state"] in REFUTES and pair not in alone:
            of = found.setdefault(f"{one['state']} in {one['phase']}, though right alone", {})
            of[pair] = join(dict.fromkeys([*filter(None, of.get(pair, "").split(", ")), one["path"]]))
    return found


def named(of: Mapping[Pair, str], at_most: int) -> str:
    """Pairs with what is wrong with them, which is said once for all that have the same wrong with them."""
    shown: dict[str, list[str]] = {}
    for (src, dst), how in list(of.items())[:at_most]:
        shown.setdefault(how, []).append(f"{src} to {dst}")
    groups = [f"{', '.join(pairs)} ({how})" for how, pairs in shown.items()]
    return "; ".join(groups) + (f" and {len(of) - at_most} more" if len(of) > at_most else "")


def failed_in_short(cell: Mapping[str, Any]) -> str:
    """Every size and path of a pair that came out broken, "" where none did: ``4 B, 64 MiB; ce-push, sm-store``."""
    by_sizes: dict[tuple[int, ...], list[str]] = {}
    for path, told in cell["paths"].items():
        if told["state"] in REFUTES:
            sizes = tuple(told.get("failed") or [told["size"]])  # an earlier release kept the worst size alone
            by_sizes.setdefault(sizes, []).append(path)
    return " and ".join(f"{', '.join(map(_size, sizes))}; {', '.join(paths)}" for sizes, paths in by_sizes.items())


def _size(size: int) -> str:
    return next((f"{size // unit} {name}" for name, unit in _UNITS if size >= unit and size % unit == 0), f"{size} B")


def usable(value: Mapping[str, Any]) -> str:
    """One sentence: which pairs pass in both directions, and which only in one and so are not usable."""
    wrong = {pair for of in bad_pairs(value).values() for pair in of}
    good = {(c["src"], c["dst"]) for c in value["cells"] if c["state"] == State.VERIFIED} - wrong
    pairs = list(dict.fromkeys(_unordered((c["src"], c["dst"])) for c in value["cells"]))
    both = [pair for pair in pairs if _ways(pair) <= good]
    half = [next(iter(_ways(pair) & good)) for pair in pairs if len(_ways(pair) & good) == 1]
    said = f"a pair is usable only if both directions pass: {len(both)} of {counted(len(pairs), 'pair')}"
    if both and len(both) < len(pairs):
        said += f" ({_shown(both, 'and')})"
    return f"{said}; unusable although one direction passes: {_shown(half, 'to')}" if half else said


def _unordered(pair: Pair) -> Pair:
    return (min(pair), max(pair))


def _ways(pair: Pair) -> set[Pair]:
    return {pair, (pair[1], pair[0])}


def _shown(pairs: Iterable[Pair], word: str) -> str:
    return join((f"{a} {word} {b}" for a, b in pairs), _NAMED)


def weighed(value: Mapping[str, Any]) -> str:
    """What stands against pairs that all passed: they work where the vendor does not support it. "" where nothing does."""
    translated = sorted({kind for kind in value["iommu"].values() if kind.startswith("DMA")})
    if not translated or not value["judged"]["allowed"]:
        return ""
    return (
        f"it was shown to work here, in this state (IOMMU {', '.join(translated)}), for these copies, while NVIDIA does not "
        "support peer-to-peer under an IOMMU that translates: watch for IO_PAGE_FAULT lines of a GPU and for answers that turn "
        "wrong, and test again after every change of driver, kernel or firmware"
    )
