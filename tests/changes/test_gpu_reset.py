"""The attempts of a plan: on what they may be made, when they stop, and what each came to."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from proofbook.changes.gpu_reset import ResetAttempts
from proofbook.changes.iommu_identity import IommuIdentity
from proofbook.checks.identity.rule import Attempt, Before, Came, GpuBoot, Kind
from proofbook.lab.sim import fault_lines
from proofbook.model import Command, Identity, Observation, Plan, Probe, Result, Seen
from proofbook.probes.boot import Machine, MachineFacts
from proofbook.probes.change_state import GuardState
from proofbook.probes.iommu import IommuFacts, IommuGroup, IommuGroups
from proofbook.probes.kernel_log import KernelLine, KernelLog, KernelMessages
from proofbook.probes.nvidia import Driver, DriverFacts, GpuRow, Gpus, GpuTable
from proofbook.probes.pci import PciDevices, PciFacts, ResetMethods
from proofbook.remote.gpu_reset import RESET_S
from proofbook.remote.guard import GuardStatus

ONE, TWO, CONTROL = "0000:01:00.0", "0000:41:00.0", "0000:81:00.0"
T0 = datetime(2026, 3, 9, 16, 0, tzinfo=UTC)
BOOT = "a1" * 16
HOST = Identity("gpu01", "gpu01", "4f" * 16, BOOT, "ssh-ed25519 SHA256:x", "root", 0, "6.17")
BEFORE = Before(tuple(GpuBoot(pci, "DMA-FQ", "nvidia", True) for pci in (ONE, TWO, CONTROL)))
WAITS = {"LoadState": "loaded", "ActiveState": "active", "SubState": "waiting", "UnitFileState": "enabled"}
GUARDED = GuardStatus("armed", T0, left_s=4000, guard=WAITS)


def seen(answers: dict[Probe[Any], Any]) -> Seen:
    """A string as an answer is why it is unknown."""
    return Seen(
        Observation(p, None if isinstance(a, str) else a, a if isinstance(a, str) else "", T0, BOOT) for p, a in answers.items()
    )


def planned(*methods: str, listed: dict[str, tuple[str, ...]] | None = None, treated: tuple[str, ...] = (ONE, TWO)) -> Plan:
    have = listed if listed is not None else dict.fromkeys((ONE, TWO, CONTROL), ("flr", "bus"))
    change = IommuIdentity(treated, BEFORE, reset_methods=methods)
    return change.plan(seen({ResetMethods(): have}), HOST)


def events(vendor: str = "0x10de", *, driver: str = "nvidia", blocked: str = "", refused: str = "", **errors: str) -> str:
    """What the program tells of one attempt, as it goes with these errors."""
    if refused:
        return json.dumps({"event": "refused", "why": refused})
    told: list[dict[str, Any]] = [
        {"event": "begin", "address": "", "method": "", "listed": ["flr", "bus"], "vendor": "0x10de", "driver": "nvidia"}
    ]
    for step in ("unbind", "method", "reset"):
        if step == blocked:
            told.append({"event": "blocked", "step": step})
            return "\n".join(map(json.dumps, told))
        told.append({"event": "step", "step": step, "error": errors.get(step, "")})
        if step in errors and step != "reset":
            break
    else:
        told += [{"event": "vendor", "vendor": vendor, "error": ""}, {"event": "listed", "listed": ["flr", "bus"]}]
    return "\n".join(map(json.dumps, [*told, {"event": "end", "driver": driver}]))


@dataclass
class Hands:
    """A machine on which an attempt does what ``says`` has for it, in order. ``starts``: the GPUs that start after how many acts.

    ``None`` in ``says``: the connection is lost.
    """

    says: Sequence[str | None] = ()
    starts: dict[str, int] = field(default_factory=dict)
    guard: GuardStatus | str = GUARDED
    kind: str = "identity"
    lines: list[KernelLine] = field(default_factory=list)
    adds: Sequence[fault_lines.Line] = ()
    forgets: bool = False
    smi_answers: bool = True
    run_id: str = "r1"
    acts: list[tuple[str, Command]] = field(default_factory=list)

    def act(self, what: str, do: Command, *, loss_expected: bool = False) -> Result | None:
        said = self.says[len(self.acts)] if len(self.acts) < len(self.says) else events()
        self.acts.append((what, do))
        if said is None:
            assert loss_expected
            return None
        for line in self.adds:
            self.say(line.text)
        if self.forgets:
            self.lines = self.lines[2:]
        return Result(do, 0, said.encode(), b"", T0, 1.0)

    def say(self, text: str) -> None:
        at = 100.0 + len(self.lines)
        self.lines.append(KernelLine(at, T0 + timedelta(seconds=at), 4, text))

    def look(self, *probes: Probe[Any]) -> Seen:
        up = [pci for pci in (ONE, TWO, CONTROL) if pci in self.starts and len(self.acts) >= self.starts[pci]]
        rows = {pci: GpuRow(pci, 0, f"GPU-{pci}", "RTX PRO 6000", "98.02", "P8", 1, 5, 16, 16) for pci in up}
        groups = {n: IommuGroup(self.kind, (pci,)) for n, pci in enumerate((ONE, TWO, CONTROL))}
        answers: dict[Probe[Any], Any] = {
            GuardState("r1"): self.guard,
            KernelLog(): KernelMessages(tuple(self.lines), True, (), "journal", BOOT),
            Machine(): MachineFacts("gpu01", "4f" * 16, BOOT, "6.17", "quiet", 100.0, T0),
            PciDevices(): {pci: PciFacts(pci, 0x10DE, 0x2BB5, 0x030200, "nvidia", 1, 0, None) for pci in (ONE, TWO, CONTROL)},
            IommuGroups(): IommuFacts(groups, dict.fromkeys((ONE, TWO, CONTROL), self.kind)),
            Driver(): DriverFacts("595.58.03", True, "", {}, None, None, None, None),
            Gpus(): GpuTable(rows, {}, "595.58.03", 0, {}) if self.smi_answers else "nvidia-smi gave no answer",
        }
        return seen({probe: answers[probe] for probe in probes})

    peek = look

    def asked(self) -> list[tuple[str, str]]:
        """(GPU, method) of each attempt that was made."""
        options = [json.loads(do.argv[-1]) for _, do in self.acts]
        return [(o["address"], o["method"]) for o in options]


def made(plan: Plan, hands: Any, *failed: str) -> list[Attempt]:
    hands.say("Linux version 6.17.13-1-pve")
    hands.say("nvidia: loading out-of-tree module taints kernel.")
    for line in fault_lines.fsp_boot_failed(ONE, 0):  # boot A's own refusal is no news
        hands.say(line.text)
    applied = ResetAttempts(failed or (ONE,)).act(plan, hands, lambda text: None)
    assert (applied.outcome, applied.plan) == ("done", plan)
    return list(applied.facts["attempts"])


def came(attempts: Sequence[Attempt]) -> dict[tuple[str, str], Came]:
    return {(a.pci, a.method): a.came for a in attempts}


def test_each_method_is_tried_in_order_and_one_that_clears_is_the_last() -> None:
    hands = Hands(starts={ONE: 2})
    attempts = made(planned("flr", "bus", "pm", listed={ONE: ("pm", "flr", "bus")}, treated=(ONE,)), hands)
    assert hands.asked() == [(ONE, "flr"), (ONE, "bus")]
    assert came(attempts) == {(ONE, "flr"): Came.STAYED, (ONE, "bus"): Came.CLEARED, (ONE, "pm"): Came.NOT_TRIED}
    assert attempts[2].why == "it started after bus already"


def test_a_gpu_that_started_does_not_keep_the_next_from_being_tried() -> None:
    hands = Hands(starts={ONE: 1})
    attempts = made(planned("flr"), hands, ONE, TWO)
    assert hands.asked() == [(ONE, "flr"), (TWO, "flr")]
    assert came(attempts) == {(ONE, "flr"): Came.CLEARED, (TWO, "flr"): Came.STAYED}


def test_only_what_the_plan_lists_is_tried_and_never_a_control() -> None:
    plan, hands = planned("flr", "bus", listed={ONE: ("flr",), CONTROL: ("flr", "bus")}, treated=(ONE,)), Hands()
    assert made(plan, hands, ONE, TWO, CONTROL) != []
    assert hands.asked() == [(ONE, "flr")]
    forged = replace(plan, settings={**plan.settings, "resets": {CONTROL: ["flr"]}})
    hands = Hands()
    assert made(forged, hands, CONTROL) == [] and hands.acts == []
    assert made(planned(), Hands(), ONE) == []  # a plan without resets


def test_after_a_lost_gpu_nothing_is_tried() -> None:
    hands = Hands([events("0xffff", driver="", reset="ENOTTY (Inappropriate ioctl for device)")])
    attempts = made(planned("flr", "bus"), hands, ONE, TWO)
    assert hands.asked() == [(ONE, "flr")]
    assert attempts[0].came is Came.LOST and (attempts[0].vendor_before, attempts[0].vendor_after) == ("0x10de", "0xffff")
    assert "ENOTTY" in attempts[0].why
    assert [a.came for a in attempts[1:]] == [Came.NOT_TRIED] * 3
    assert {a.why for a in attempts[1:]} == {f"nothing was tried after flr on {ONE}: lost"}


@pytest.mark.parametrize("step", ["unbind", "method", "reset"])
def test_after_a_write_that_does_not_return_nothing_is_tried(step: str) -> None:
    hands = Hands([events(blocked=step)])
    attempts = made(planned("flr", "bus"), hands, ONE, TWO)
    assert len(hands.acts) == 1 and attempts[0].came is Came.BLOCKED and attempts[0].why.startswith(step)
    assert {a.came for a in attempts[1:]} == {Came.NOT_TRIED}


@pytest.mark.parametrize("said", [None, "Traceback", events().rpartition("\n")[0]], ids=["lost", "garbled", "cut off"])
def test_an_attempt_that_nobody_saw_the_end_of_is_the_last(said: str | None) -> None:
    hands = Hands([said])
    attempts = made(planned("flr", "bus"), hands)
    assert [a.came for a in attempts] == [Came.UNKNOWN, Came.NOT_TRIED] and len(hands.acts) == 1


def test_a_reset_that_the_kernel_refuses_is_not_one_that_does_not_help() -> None:
    hands = Hands([events(reset="EINVAL (Invalid argument)")])
    attempts = made(planned("flr", "bus"), hands)
    assert came(attempts) == {(ONE, "flr"): Came.REFUSED, (ONE, "bus"): Came.STAYED}
    assert "EINVAL" in attempts[0].why


@pytest.mark.parametrize("step", ["unbind", "method"])
def test_without_what_comes_before_it_no_reset_was_tried(step: str) -> None:
    hands = Hands([events(**{step: "EBUSY (Device or resource busy)"})])
    attempts = made(planned("flr", "bus"), hands)
    assert attempts[0].came is Came.NOT_TRIED and f"{step}: EBUSY" in attempts[0].why
    assert attempts[1].came is Came.STAYED  # the next one may be


def test_what_the_machine_refuses_now_was_not_tried() -> None:
    hands = Hands([events(refused="flr is not in its reset_method (bus)")])
    assert came(made(planned("flr"), hands)) == {(ONE, "flr"): Came.NOT_TRIED}


def test_off_and_on_its_driver_may_be_enough() -> None:
    hands = Hands([events(reset="EINVAL (Invalid argument)")], starts={ONE: 1})
    (attempt,) = made(planned("flr"), hands)
    assert attempt.came is Came.CLEARED and "EINVAL" in attempt.why


def test_a_gpu_that_starts_with_its_group_translated_shows_nothing() -> None:
    (attempt,) = made(planned("flr"), Hands(starts={ONE: 1}, kind="DMA-FQ"))
    assert attempt.came is Came.UNKNOWN and "its group is DMA-FQ" in attempt.why


def test_whether_it_starts_must_be_known() -> None:
    (attempt,) = made(planned("flr"), Hands(smi_answers=False))
    assert attempt.came is Came.UNKNOWN and "whether it starts is not known" in attempt.why


def test_the_first_error_is_the_first_after_the_reset() -> None:
    again = [fault_lines.Line(4, "e1000e 0000:22:00.0: link is up"), *fault_lines.fsp_boot_failed(ONE, 0, code=0x9E)]
    (attempt,) = made(planned("flr"), Hands(adds=again))
    assert attempt.first is not None and (attempt.first.kind, attempt.first.code) == (Kind.FSP, "0x9e")
    (silent,) = made(planned("flr"), Hands())
    assert silent.first is None and "why is not known" in silent.why
    (cut,) = made(planned("flr"), Hands(adds=again, forgets=True))
    assert cut.first is None and "does not go on where it was" in cut.why


NO_TIME: dict[str, tuple[GuardStatus | str, str]] = {
    "too little time": (replace(GUARDED, left_s=int(RESET_S)), "the guard reboots in"),
    "none is told": (replace(GUARDED, left_s=None), "the guard reboots in 0 s"),
    "it has fired": (GuardStatus("fired", T0), "the guard does not wait (it is fired)"),
    "its timer is not there": (replace(GUARDED, guard={}), "does not wait"),
    "nobody knows": ("the machine does not answer", "not known: the machine does not answer"),
}


@pytest.mark.parametrize("what", NO_TIME)
def test_nothing_is_begun_that_the_guard_would_cut_short(what: str) -> None:
    guard, why = NO_TIME[what]
    hands = Hands(guard=guard)
    attempts = made(planned("flr", "bus"), hands)
    assert hands.acts == [] and {a.came for a in attempts} == {Came.NOT_TRIED}
    assert all(why in a.why for a in attempts)


def test_each_attempt_is_an_act_that_says_what_it_does() -> None:
    hands = Hands()
    made(planned("flr"), hands)
    ((what, do),) = hands.acts
    assert what.startswith(f"reset {ONE} by flr: off its driver") and do.root
