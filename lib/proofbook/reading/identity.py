"""What records of identity experiments say: each boot's timeline and what its lines prove, the types, the rule, the conclusion.

Nothing is measured or judged anew: conclusions, reasons and findings are the runs' own. Times and lines are read from the bytes
that are in a record, by the same rule as in the run. A boot that nobody saw proves nothing, and says so.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from functools import cached_property, partial
from typing import Any, TypeVar

from proofbook.checks.identity.evidence import PROBES, started, the_trial
from proofbook.checks.identity.restored import PROBES as RESTORED
from proofbook.checks.identity.rule import TRANSLATED, Before, FirstError, GpuBoot, Kind, Trial, control
from proofbook.checks.looking import join
from proofbook.errors import CannotTell, NoSuchRun
from proofbook.intent import GpuSpec
from proofbook.model import Probe, Seen, Verdict
from proofbook.probes.boot import Machine
from proofbook.probes.iommu import IommuGroups
from proofbook.probes.iommu_identity import IdentityFacts, IdentityState
from proofbook.probes.kernel_log import KernelLog
from proofbook.reading import Nothing, Reading, Shelf, pick
from proofbook.view import Picture, Shown, boots_over_time, table, types_by_boot

__all__ = ["Boot", "Experiment", "Experiments", "Step", "experiments"]

T = TypeVar("T")

_RUNBOOK, _CHANGE = "iommu-identity-experiment", "iommu-identity"
_WRITTEN = "written down before"
_LABELS = ("before", "boot A", "boot B")
#: What the operator's note holds, in its order: the word that begins each part, and how it is called here.
_PARTS = (
    ("Hypothesis:", "hypothesis"),
    ("Prediction:", "prediction"),
    ("It is blocked if", "blocked if"),
    ("Stop rule:", "stop rule"),
)
#: What a first error of each kind shows.
_KINDS = {
    Kind.FSP: "its security processor (FSP) answered, and refused: the class of error that the hypothesis is about",
    Kind.LINK: "the link was lost: its registers read as all ones, so nobody was there to refuse anything",
    Kind.FIRMWARE: "its firmware (GSP) failed after the FSP had let it: another cause than an FSP that refuses",
    Kind.OTHER: "another error than one of its FSP",
}
#: Questions that a boot answers.
_TRANSLATED, _START = "every group translated", "the treated GPUs start"
_DISARMED, _SET, _LOADED = "the flag is gone first", "the type is written, and read back", "the driver is loaded after that"
_BOUND, _CONTROL = "bound to nvidia, and still identity", "a control tells what a failure means"
_GONE, _BACK, _ALL_START, _SERVED = "nothing of it is left", "every group as before", "every GPU starts", "the services answer"
#: The questions that every experiment answers, in the order of its boots. A step answers one of them.
QUESTIONS = (
    *(("before", question) for question in (_TRANSLATED, _START)),
    *(("boot A", question) for question in (_DISARMED, _SET, _LOADED, _BOUND, _START, _CONTROL)),
    *(("boot B", question) for question in (_GONE, _BACK, _ALL_START, _SERVED)),
)


@dataclass(frozen=True, slots=True)
class Step:
    """One line of an experiment, and what it proves.

    ``at_s``: seconds since the kernel of its boot started; None where nobody saw it. ``held`` None: not seen, or not known.
    ``says``: who says it: the program, the kernel, sysfs, nvidia-smi, the run. ``about``: the one GPU that it is of, "" for more.
    ``error``: of a first error its class, and its code where it has one.
    """

    boot: str
    question: str
    at_s: float | None
    says: str
    text: str
    held: bool | None
    proves: str
    about: str = ""
    error: str = ""


@dataclass(frozen=True, slots=True)
class Boot:
    """One boot of the machine, as the record saw it."""

    label: str
    boot_id: str
    seen: Seen

    @property
    def looked_s(self) -> float | None:
        """Its uptime when it was looked at last; None when it is not known."""
        machine = self.value(Machine())
        return machine.uptime_s if machine is not None else None

    def value(self, probe: Probe[T]) -> T | None:
        """What a probe saw in this boot; None when it is not known."""
        try:
            return self.seen.value(probe)
        except CannotTell:
            return None


class Experiment:
    """One identity experiment: two boots, a rule, a conclusion."""

    def __init__(self, reading: Reading) -> None:
        self.reading = reading
        self.record = reading.record
        self.plan = next((p for p in self.record.plans if p["change"] == _CHANGE), None)

    @property
    def tail(self) -> str:
        return self.record.run_id[-6:]

    @property
    def name(self) -> str:
        """What it concluded, of which GPUs, and the end of the run's id, which finds it in the archive."""
        return f"{self.record.conclusion_word or self.record.status}, {', '.join(self.treated) or 'no GPU'} ({self.tail})"

    @property
    def treated(self) -> tuple[str, ...]:
        return tuple(self.plan["settings"]["treated"]) if self.plan else ()

    @property
    def before(self) -> Mapping[str, Sequence[Any]]:
        """Every GPU as the plan found it: {PCI address: [type of its group, whether it ran]}."""
        before: Mapping[str, Sequence[Any]] = self.plan["settings"]["before"] if self.plan else {}
        return before

    @property
    def conclusion(self) -> Mapping[str, Any]:
        return self.record.conclusion or {}

    # -- the boots

    @cached_property
    def boots(self) -> dict[str, Boot]:
        """The boots that were seen, by label: those that the run's own looks were in. One that nobody saw is not there."""
        titles = {step["step"]: step["title"] for step in self.record.steps}
        found = {"before": str(self.record.before.get("boot_id", ""))}
        for label in _LABELS[1:]:
            inside = [e["boot_id"] for e in self.record.evidence if f"({label}" in titles.get(e["step"], "")]
            found |= {label: inside[-1]} if inside else {}
        return {label: self._boot(label, boot_id) for label, boot_id in found.items() if boot_id}

    def _boot(self, label: str, boot_id: str) -> Boot:
        # WHY not all of them: only boot A's kernel log is needed, and reading one takes long.
        probes = PROBES if label == "boot A" else (Machine(), *RESTORED)
        # WHY none of a further part: after a reset a GPU of boot A is not as that boot had left it.
        later = {step["step"] for step in self.record.steps if step["verb"] == "further"}
        evidence = [e for e in self.record.evidence if e["boot_id"] == boot_id and e["step"] not in later]
        return Boot(label, boot_id, self.reading.look(probes, evidence))

    @cached_property
    def trial(self) -> Trial | None:
        """What boot A showed, by the rule's own reading; None when nobody saw it."""
        boot = self.boots.get("boot A")
        if boot is None:
            return None
        try:
            return the_trial(boot.seen, self.treated, tuple(GpuSpec(pci=pci) for pci in self.before))
        except CannotTell:
            return None

    # -- its lines, and what they prove

    @property
    def first_errors(self) -> frozenset[Kind]:
        """Of what kinds the first errors of the treated GPUs were in boot A; none where nobody saw it."""
        return frozenset(g.first.kind for g in self.trial.treated if g.first) if self.trial is not None else frozenset()

    @cached_property
    def steps(self) -> tuple[Step, ...]:
        """Every line that proves something, boot by boot, in the order of its time."""
        told = [*self._before(), *self._boot_a(), *self._boot_b()]
        return tuple(sorted(told, key=lambda s: (_LABELS.index(s.boot), s.at_s if s.at_s is not None else -1.0)))

    def _before(self) -> Iterator[Step]:
        boot = self.boots.get("before")
        at = boot.looked_s if boot is not None else None
        said = partial(Step, "before")
        kinds = {pci: str(kind) for pci, (kind, _) in self.before.items()}
        held = all(kind in TRANSLATED for kind in kinds.values())
        yield said(_TRANSLATED, at, "sysfs", _types(kinds), held, "there is a translated state to compare with, and to put back")
        up = {pci: bool(running) for pci, (_, running) in self.before.items() if pci in self.treated}
        yield said(_START, at, "nvidia-smi", _starts(up), all(up.values()), "a failure in boot A is none that they had already")

    def _unseen(self, label: str) -> Iterator[Step]:
        why = "the machine did not let us in" if self._went_down_at else "it was never made"
        for boot, question in QUESTIONS:
            if boot == label:
                yield Step(label, question, None, "nobody", f"not seen: {why}", None, "nothing")

    def _boot_a(self) -> Iterator[Step]:
        boot, trial = self.boots.get("boot A"), self.trial
        if boot is None or trial is None:
            yield from self._unseen("boot A")
            return
        yield from self._program(boot)
        yield self._loaded(boot, trial)
        for gpu in trial.treated:
            yield self._bound(gpu, boot)
            yield self._start_of(gpu, boot)
        yield self._control(boot, trial)

    def _program(self, boot: Boot) -> Iterator[Step]:
        """The unit's own log of this boot."""
        said = partial(Step, "boot A")
        facts = boot.value(IdentityState())
        log = facts.log if facts is not None else None
        if log is None:
            for question in (_DISARMED, _SET):
                yield said(question, None, "nobody", "the program left no log in this boot", None, "nothing")
            return
        gone = log.disarmed_s is not None
        text = "disarmed, before anything is written" if gone else log.trouble or "not disarmed"
        yield said(_DISARMED, log.disarmed_s, "the program", text, gone, "the boot after this one is clean, whatever happens now")
        for pci in self.treated:
            if pci in log.set:
                number, was = log.groups.get(pci, (None, "?"))
                text = f"group {number} of {pci}: {was} before, {log.wanted} now"
                proves = "the kernel says so itself: a write that returns no error proves nothing"
                yield said(_SET, log.set[pci], "the program", text, True, proves, pci)
            else:
                text = f"{pci}: {log.refused.get(pci) or log.trouble or 'nothing is said of it'}"
                yield said(_SET, log.began_s, "the program", text, False, "this boot is no experiment", pci)

    def _loaded(self, boot: Boot, trial: Trial) -> Step:
        said = partial(Step, "boot A", _LOADED)
        at = trial.driver_s
        if at is None:
            return said(None, "the kernel", "no line says when the driver was loaded", None, "no order is known")
        log = boot.value(KernelLog())
        lines = [ln.text for ln in (log.lines if log is not None else ()) if ln.monotonic_s == at]
        text = next((line for line in lines if "nvidia" in line or "NVRM" in line), "")
        early = [pci for pci in self.treated if pci not in trial.set_s or trial.set_s[pci] >= at]
        proves = "the driver was there before the type" if early else "no driver had the device while its type was changed"
        return said(at, "the kernel", text, not early, proves)

    def _bound(self, gpu: GpuBoot, boot: Boot) -> Step:
        held = gpu.iommu_type == "identity" and gpu.driver == "nvidia"
        text = f"{gpu.pci}: {gpu.iommu_type or 'no type'}, bound to {gpu.driver or 'no driver'}"
        proves = f"the driver {'tried it' if held else 'did not try it'} in the experiment's state"
        return Step("boot A", _BOUND, boot.looked_s, "sysfs", text, held, proves, gpu.pci)

    def _start_of(self, gpu: GpuBoot, boot: Boot) -> Step:
        said, first = partial(Step, "boot A", _START), gpu.first
        if gpu.started:
            where = (
                "in the identity domain" if gpu.iommu_type == "identity" else f"with its group {gpu.iommu_type or 'of no type'}"
            )
            return said(boot.looked_s, "nvidia-smi", f"{gpu.pci}: started", True, f"it starts {where}", gpu.pci)
        if first is not None:
            return said(first.at_s, "the kernel", first.text, False, _KINDS[first.kind], gpu.pci, _class_of(first))
        known = gpu.started is not None
        text = f"{gpu.pci}: {'not started' if known else 'not known'}"
        return said(boot.looked_s, "nvidia-smi", text, False if known else None, "nothing: no line says why", gpu.pci)

    def _control(self, boot: Boot, trial: Trial) -> Step:
        before = Before(tuple(GpuBoot(pci, str(kind), "", bool(up)) for pci, (kind, up) in self.before.items()))
        held, how = control(before, trial) if trial.others else self._control_said()
        proves = "nothing else in this boot kept GPUs from starting" if held else "a failure could have another cause"
        return Step("boot A", _CONTROL, boot.looked_s, "nvidia-smi", how.removeprefix("control: "), held, proves)

    def _control_said(self) -> tuple[bool, str]:
        """Without another GPU in the same boot the boot before is the control, and the run's own words say whether it counts."""
        said = next((r for r in self.conclusion.get("reasons", ()) if "control" in r), "no other GPU in the same boot")
        return said.startswith("control: "), said.removeprefix("no control: ")

    def _boot_b(self) -> Iterator[Step]:
        boot = self.boots.get("boot B")
        if boot is None:
            yield from self._unseen("boot B")
            return
        said, at = partial(Step, "boot B"), boot.looked_s
        text, held = _left(boot.value(IdentityState()))
        yield said(_GONE, at, "sysfs", text, held, "the boots that follow are clean ones too")
        iommu = boot.value(IommuGroups())
        kinds = {pci: iommu.by_device.get(pci, "no type") for pci in self.before} if iommu is not None else {}
        same = all(kinds[pci] == kind for pci, (kind, _) in self.before.items()) if kinds else None
        yield said(_BACK, at, "sysfs", _types(kinds) or "not known", same, "it was put back, as the kernel itself says")
        up = {pci: started(boot.seen, pci) for pci in self.before}
        needed = [up[pci] for pci, (_, running) in self.before.items() if running]
        every = None if None in needed else all(needed)
        yield said(_ALL_START, at, "nvidia-smi", _starts(up), every, "no GPU was hurt by it, as far as a start can show")
        yield self._served(boot)

    def _served(self, boot: Boot) -> Step:
        """By the run's own findings of that boot; the last look counts."""
        said = partial(Step, "boot B", _SERVED)
        found = {
            f["subject"]: f for f in self.record.findings if f["check"] == "service.ServiceAnswers" and "boot B" in f["look"]
        }
        if not found:
            return said(None, "the run", "nobody asked, or none was meant to run", None, "nothing")
        text = "; ".join(f"{subject}: {f['reason']}" for subject, f in found.items())
        held = all(f["verdict"] == Verdict.PASS for f in found.values())
        return said(boot.looked_s, "the run", text, held, "what was served before is served again")

    # -- one experiment's answers

    @property
    def written(self) -> Shown:
        """What was written down before anything was done, and when that was."""
        note = next((n for n in self.record.notes if n["title"] == _WRITTEN), None)
        if note is None:
            return table(("what", "in words"), (), note="Nothing was written down before: the run ended earlier.")
        first = self._went_down_at
        when = f"Written down {_clock(note['ts'])} UTC" + (
            f", {_apart(note['ts'], first)} before boot A." if first else "; no boot A followed."
        )
        return table(("what", "in words"), _parts(note["text"]), note=when)

    @property
    def _went_down_at(self) -> str:
        """When boot A was asked for; "" when it never was."""
        acts = self.plan["acts"] if self.plan else ()
        return next((act["started_at"] for act in acts if act["argv"][:1] == ["systemctl"]), "")

    @property
    def timeline(self) -> Shown:
        """Line by line: when, who says it, and what it proves."""
        rows = [(_brief(s.boot), _seconds(s.at_s), s.says, s.text, _HELD[s.held], s.proves) for s in self.steps]
        note = "Seconds are since the kernel of that boot started."
        # A boot that nobody saw answers none of its questions, which is one line.
        return table(("boot", "s", "says", "line", "held", "what it proves"), list(dict.fromkeys(rows)), note=note)

    @property
    def picture(self) -> Picture:
        """The boots after the first over time."""
        return boots_over_time(
            [(label, [s for s in _drawn(self.steps) if s["boot"] == label]) for label in _LABELS[1:]],
            title=f"What was seen, and when: {self.name}",
        )

    @property
    def types(self) -> Shown:
        """The type of each GPU's group in each boot, and whether it started."""
        rows = [(pci, role, *(_cell(kind, up) for kind, up in boots)) for pci, role, boots in self._types]
        return table(("GPU", "role", *_LABELS), rows, note="The type of a group is what sysfs says after the driver bound.")

    @property
    def _types(self) -> list[tuple[str, str, list[tuple[str | None, bool | None]]]]:
        """(address, role, per boot: type, started); a type None: nobody saw that boot."""
        return [
            (
                pci,
                "treated" if pci in self.treated else "control",
                [(str(kind), bool(up)), *(self._later(b, pci) for b in _LABELS[1:])],
            )
            for pci, (kind, up) in self.before.items()
        ]

    def _later(self, label: str, pci: str) -> tuple[str | None, bool | None]:
        boot = self.boots.get(label)
        iommu = boot.value(IommuGroups()) if boot is not None else None
        if boot is None or iommu is None:
            return None, None
        return iommu.by_device.get(pci, "no type"), started(boot.seen, pci)

    @property
    def rule(self) -> Shown:
        """The conclusion, the steps of the rule that led to it, and what it holds for."""
        said = self.conclusion
        rows = [
            ("hypothesis", said.get("hypothesis", "")),
            ("outcome", str(said.get("outcome", "")).upper()),
            ("because", said.get("because", "")),
        ]
        rows += [(f"rule, step {n}", text) for n, text in enumerate(said.get("reasons", ()), 1)]
        rows += [("as it was afterwards", _RESTORED[said.get("damaged")]), ("holds for", said.get("scope", ""))]
        return table(("what", "in words"), rows)


_HELD = {True: "yes", False: "NO", None: "not seen"}
_RESTORED = {False: "yes, it was seen to be", True: "NO: it is DAMAGED", None: "NOT SEEN: nobody could look"}


def _brief(label: str) -> str:
    """``A`` of ``boot A``, for the column that is called boot."""
    return label.removeprefix("boot ")


def _cell(kind: str | None, up: bool | None) -> str:
    if kind is None:
        return "not seen"
    return f"{kind}, {'started' if up else 'not known whether it started' if up is None else 'NOT STARTED'}"


def _left(facts: IdentityFacts | None) -> tuple[str, bool | None]:
    """What there is of the experiment, and whether that is nothing; None: not known."""
    if facts is None:
        return "not known", None
    if facts.present:
        return f"left: {join(facts.present)}", False
    return ("no file, and it did not run", True) if facts.log is None else ("no file, but it ran in this boot", False)


def _types(kinds: Mapping[str, str]) -> str:
    """``DMA-FQ: all 4 GPUs``; else each type with its GPUs."""
    by_kind: dict[str, list[str]] = {}
    for pci, kind in kinds.items():
        by_kind.setdefault(kind or "no type", []).append(pci)
    if len(by_kind) == 1:
        return (
            f"{next(iter(by_kind))}: all {len(kinds)} GPUs" if len(kinds) > 1 else f"{next(iter(by_kind))}: {next(iter(kinds))}"
        )
    return "; ".join(f"{kind}: {join(pcis, 8)}" for kind, pcis in by_kind.items())


def _starts(up: Mapping[str, bool | None]) -> str:
    words = {True: "started", False: "NOT started", None: "not known"}
    by_word: dict[str, list[str]] = {}
    for pci, running in up.items():
        by_word.setdefault(words[running], []).append(pci)
    if len(by_word) == 1 and len(up) > 2:
        return f"all {len(up)} GPUs: {next(iter(by_word))}"
    return "; ".join(f"{join(pcis, 8)}: {word}" for word, pcis in by_word.items())


def _seconds(at: float | None) -> str:
    return "" if at is None else f"{at:.2f}" if at < 100 else f"{at:.0f}"


def _clock(ts: str) -> str:
    return ts[:19].replace("T", " ")


def _apart(first: str, later: str) -> str:
    return f"{(datetime.fromisoformat(later) - datetime.fromisoformat(first)).total_seconds():.0f} s"


def _parts(text: str) -> list[tuple[str, str]]:
    """The note's parts. One that does not read as expected stays whole."""
    places = [(text.find(word), word, name) for word, name in _PARTS]
    if any(at < 0 for at, _, _ in places):
        return [(_WRITTEN, text)]
    ends = [at for at, _, _ in places[1:]] + [len(text)]
    return [(name, text[at + len(word) : end].strip()) for (at, word, name), end in zip(places, ends, strict=True)]


def _drawn(steps: Sequence[Step]) -> list[dict[str, Any]]:
    """For the picture. A question that is answered for several GPUs is one row each."""
    many = Counter((s.boot, s.question) for s in steps)
    return [
        {
            "boot": s.boot,
            "label": f"{s.question}: {s.about}" if s.about and many[s.boot, s.question] > 1 else s.question,
            "at_s": s.at_s,
            "held": s.held,
            "note": s.error,
        }
        for s in steps
    ]


def _class_of(first: FirstError) -> str:
    """``fsp, 0x177``; an Xid's number is no code of the firmware, and is in the line."""
    return str(first.kind) + (f", {first.code}" if first.code.startswith("0x") else "")


# -------------------------------------------------------------------------------------------------- many runs


def experiments(shelf: Shelf) -> Experiments:
    """The identity experiments of an archive that came to a conclusion, oldest first. Raises NoSuchRun when there is none."""
    readings = [shelf.read(brief.run_id) for brief in reversed(shelf.archive.runs()) if brief.runbook == _RUNBOOK]
    made = [Experiment(r) for r in readings if r.record.conclusion and any(p["change"] == _CHANGE for p in r.record.plans)]
    if not made:
        raise NoSuchRun(
            "no run in this archive made an identity experiment",
            hint="a run that stopped at its gate has changed nothing, and concluded nothing",
        )
    return Experiments(made)


class Experiments:
    """Several experiments beside one another. Each attribute answers one question."""

    def __init__(self, runs: Sequence[Experiment]) -> None:
        self.runs = tuple(runs)

    def __iter__(self) -> Iterator[Experiment]:
        return iter(self.runs)

    def read(self, run: str) -> Experiment:
        """One of them, by an end of its id. Raises NoSuchRun."""
        found = next((e for e in self.runs if run and e.record.run_id.endswith(run)), None)
        if found is None:
            raise NoSuchRun(f"no experiment here is {run!r}", hint="there are " + ", ".join(e.name for e in self.runs))
        return found

    @property
    def blocked(self) -> Experiment | Nothing:
        """The latest that concluded that its hypothesis is blocked."""
        return pick(reversed(self.runs), lambda e: e.record.conclusion_word == "blocked", "no experiment that came out blocked")

    @property
    def lost_link(self) -> Experiment | Nothing:
        """The latest in whose boot A the link of a treated GPU was lost first."""
        none = "no experiment in which a link was lost"
        return pick(reversed(self.runs), lambda e: Kind.LINK in e.first_errors, none)

    @property
    def unseen(self) -> Experiment | Nothing:
        """The latest whose boot A nobody saw."""
        return pick(reversed(self.runs), lambda e: "boot A" not in e.boots, "no experiment whose boot A nobody saw")

    @property
    def seals(self) -> Shown:
        """Whether each record is as it was sealed."""
        return table(("experiment", "on", "seal"), [(e.name, e.record.host, str(e.reading.seal)) for e in self.runs])

    @property
    def concluded(self) -> Shown:
        """What each concluded, why, and whether the machine was put back; with the verdict on the run itself."""
        rows = [
            (
                e.name,
                e.conclusion.get("because", ""),
                len(e.boots),
                _RESTORED[e.conclusion.get("damaged")],
                f"{e.record.status}, {e.record.verdict}",
            )
            for e in self.runs
        ]
        return table(("experiment", "because", "boots seen", "as it was afterwards", "the run itself"), rows)

    @property
    def proofs(self) -> Shown:
        """Every question of every boot, and how each experiment answers it."""
        rows = [(_brief(boot), question, *(_answered(e, boot, question) for e in self.runs)) for boot, question in QUESTIONS]
        return table(("boot", "question", *(f"{e.record.conclusion_word} ({e.tail})" for e in self.runs)), rows)

    @property
    def types(self) -> Picture:
        """The type of each GPU's group over the boots, one panel an experiment."""
        return types_by_boot([(e.name, _LABELS, e._types) for e in self.runs])

    @property
    def scopes(self) -> Shown:
        """What each conclusion holds for: what they share, and what differs between them."""
        parts = {e.tail: [p.strip() for p in str(e.conclusion.get("scope", "")).split("; ") if p.strip()] for e in self.runs}
        shared = [p for p in next(iter(parts.values())) if all(p in said for said in parts.values())]
        rows = [(e.name, e.record.machine_id[:8], "; ".join(p for p in parts[e.tail] if p not in shared)) for e in self.runs]
        return table(
            ("experiment", "machine-id", "holds for"),
            rows,
            note=f"All of them: {'; '.join(shared)}." if shared else "They share nothing.",
        )

    @property
    def limits(self) -> Shown:
        """What was not verified, by the records."""
        told: dict[tuple[str, str], list[str]] = {}
        for experiment in self.runs:
            for gap in experiment.record.not_verified:
                why = gap["why"] if gap["what"].lower() in gap["why"].lower() else f"{gap['what']}: {gap['why']}"
                of = told.setdefault((gap["kind"], why), [])
                of += [] if experiment.tail in of else [experiment.tail]
        rows = [(*row, "all" if len(of) == len(self.runs) else of) for row, of in told.items()]
        rows.sort(key=lambda row: _KINDS_OF_GAP.index(row[0]) if row[0] in _KINDS_OF_GAP else len(_KINDS_OF_GAP))
        return table(("kind", "what", "of"), rows)


#: What a reader must know first, comes first.
_KINDS_OF_GAP = ("run ended early", "could not tell", "not checked", "remark")


def _answered(experiment: Experiment, boot: str, question: str) -> str:
    """The worst answer of the steps that answer it."""
    steps = [s for s in experiment.steps if (s.boot, s.question) == (boot, question)]
    for held in (False, None, True):
        found = [s for s in steps if s.held is held]
        if found:
            at = f" at {_seconds(found[0].at_s)} s" if held is True and found[0].at_s is not None and found[0].at_s < 60 else ""
            error = ", ".join(dict.fromkeys(s.error for s in found if s.error))
            return _HELD[held] + at + (f": {error}" if error else "")
    return "not asked"
