"""Was the matrix validly run, and is the machine as it was? What it found is another question, and has another answer.

A pair that loses data is no failure of the run: it is what the run is for. The run has failed where its figures cannot be
believed, or where it left the machine worse than it found it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from proofbook.checks.looking import counted, join, short_id
from proofbook.checks.p2p.matrix import CONTROL, State
from proofbook.model import Check, Finding, Measurement, Probe, Seen, Suggested

__all__ = ["LeftAsItWas", "ValidlyRun"]

_CUT = "what was found until then stands; what was not tested is not known"


@dataclass(frozen=True)
class ValidlyRun(Check):
    """The matrix came to its end, its controls held, and its figures can be true."""

    measured: Measurement
    name: ClassVar[str] = "p2p.ValidlyRun"
    title: ClassVar[str] = "Was the pair matrix validly run?"

    def needs(self) -> tuple[Probe[Any], ...]:
        return ()

    def judge(self, seen: Seen) -> Sequence[Finding]:
        value = self.measured.value
        if not value["cells"]:
            if value["run"]["refused"]:
                return [self.unknown(f"the probe did not run: {value['run']['refused']}")]
            return [self.not_checked(f"{counted(len(value['gpus']), 'GPU')}: there is no pair to test")]
        return [
            self._whole(value),
            self._undisturbed(value["run"]),
            self._alone(value),
            self._control(value),
            self._possible(value),
            *self._log(value),
        ]

    def _whole(self, value: Mapping[str, Any]) -> Finding:
        run = value["run"]
        tried, all_pairs = _tried(value), len(value["cells"])
        said = f"{tried} of {counted(all_pairs, 'ordered pair')} tried, {counted(run['results'], 'copy', 'copies')} compared"
        if run["refused"]:
            return self.unknown(f"the probe did not run: {run['refused']}")
        if run["restarted"]:
            return self.warned(f"the machine restarted under it: {said}; {_CUT}", action=Suggested.LOOK)
        if not run["ended"]:
            return self.unknown(f"the probe was cut off: {said}; {_CUT}", action=Suggested.LOOK)
        if run["stopped"] or tried < all_pairs:
            why = run["stopped"] or join((f"{pci}: {why}" for pci, why in run["unfit"].items()), 2) or "see the pairs"
            return self.warned(f"{said}; the others were left alone on purpose ({why})")
        return self.passed(said)

    def _undisturbed(self, run: Mapping[str, Any]) -> Finding:
        if run["disturbed"]:
            return self.failed(
                f"somebody computed on the GPUs beside it: {join(run['disturbed'], 3)}",
                action=Suggested.LOOK,
                what_to_do="Believe neither the figures nor their work: see whether the server answers right, and test again.",
            )
        if run["company_not_known"]:
            return self.unknown(f"whether it was alone on the GPUs is not known: {run['company_not_known']}")
        return self.passed("at its end nobody else was on the GPUs")

    def _alone(self, value: Mapping[str, Any]) -> Finding:
        broken = {pci: why for pci, why in value["locals"].items() if why}
        if broken:
            shown = join((f"{pci} ({why})" for pci, why in broken.items()), 2)
            return self.warned(f"not every GPU copies by itself: {shown}", action=Suggested.CHECK_HARDWARE, observed=broken)
        if not value["locals"]:
            return self.not_checked("no GPU was looked at by itself")
        return self.passed(f"all {counted(len(value['locals']), 'GPU')} copy right by themselves")

    def _control(self, value: Mapping[str, Any]) -> Finding:
        arms = {(c["src"], c["dst"]): c["paths"][CONTROL] for c in value["cells"] if CONTROL in c["paths"]}
        run = {pair: arm for pair, arm in arms.items() if arm["state"] != State.NOT_RUN}
        bad = [f"{a} to {b} ({arm['reason']})" for (a, b), arm in run.items() if arm["state"] != State.VERIFIED]
        if bad:
            return self.failed(
                f"the copy through host memory fails too for {counted(len(bad), 'pair')}: {join(bad, 2)}",
                action=Suggested.CHECK_HARDWARE,
                what_to_do="This is not peer-to-peer's fault alone: test the GPUs, their memory and the host's first.",
            )
        if not run:
            return self.not_checked("the control through host memory was not run")
        return self.passed(f"the control through host memory is right for all {counted(len(run), 'pair')} that were tried")

    def _possible(self, value: Mapping[str, Any]) -> Finding:
        invalid = [f"{c['src']} to {c['dst']}: {c['reason']}" for c in value["cells"] if c["state"] == State.INVALID]
        if invalid:
            return self.failed(
                f"{counted(len(invalid), 'pair')} with figures that cannot be true: {join(invalid, 2)}",
                action=Suggested.LOOK,
                what_to_do="No record, but no measurement: the copy did not go where it was sent, or the clock is wrong.",
            )
        return self.passed("no figure is more than the links can carry")

    def _log(self, value: Mapping[str, Any]) -> list[Finding]:
        silences = sorted({c["silence"] for c in value["cells"] if c["silence"] and c["state"] != State.NOT_RUN})
        foreign = [self.warned(f"in a window of the test, and no pair's: {text}") for text in value["foreign"][:6]]
        if silences:
            return [self.not_checked(f"a clean kernel log proves nothing here: {join(silences, 2)}"), *foreign]
        return [self.passed("the kernel's log of every window was read, and its silence means something"), *foreign]


@dataclass(frozen=True)
class LeftAsItWas(Check):
    """The same boot, and GPUs at rest that still copy by themselves."""

    measured: Measurement
    name: ClassVar[str] = "p2p.LeftAsItWas"
    title: ClassVar[str] = "Is the machine as it was before the test?"

    def needs(self) -> tuple[Probe[Any], ...]:
        return ()

    def judge(self, seen: Seen) -> Sequence[Finding]:
        run = self.measured.value["run"]
        if not run["boot_id"]:
            return [self.unknown("the probe never said which boot it ran in")]
        out = [self._boot(run)]
        unrested = sorted({*run["unrested"], *(pci for pci, why in run["unfit"].items() if "baseline" not in why)})
        if unrested:
            out.append(
                self.failed(
                    f"{join(unrested)} did not come to rest: {join((run['unfit'].get(pci, 'busy') for pci in unrested), 2)}",
                    action=Suggested.RESET_GPU,
                    what_to_do="Do not serve on it. Look at its recovery action (nvidia-smi -q); a reset, or a power cycle.",
                )
            )
        elif run["ended"]:
            out.append(self.passed("every GPU came to rest after every window"))
        return out

    def _boot(self, run: Mapping[str, Any]) -> Finding:
        if run["restarted"]:
            return self.failed(
                f"it restarted in the middle: boot {short_id(run['boot_id'])}… began, {short_id(run['boot_now'])}… runs now",
                action=Suggested.LOOK,
                what_to_do="Run reboot-verification; peer-to-peer must stay off here.",
            )
        return self.passed(f"still boot {short_id(run['boot_id'])}…")


def _tried(value: Mapping[str, Any]) -> int:
    return sum(cell["state"] not in (State.NOT_RUN, State.ADVERTISED) for cell in value["cells"])
