"""Identity, boots, the end of the boot before, kernel and command line."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from proofbook.checks.boot import KernelAndCommandLine, OrderlyShutdown, Rebooted, SameMachine, StillUp
from proofbook.model import Suggested, Verdict
from proofbook.probes.boot import Boot, Boots, Machine, Shutdown

PASS, WARN, FAIL, UNKNOWN, NOT_CHECKED = Verdict.PASS, Verdict.WARN, Verdict.FAIL, Verdict.UNKNOWN, Verdict.NOT_CHECKED
Break = Callable[[Any], Any]


def nothing(w: Any) -> Any:
    return w


@pytest.mark.parametrize(
    ("broken", "verdict", "says"),
    [
        (nothing, PASS, "as before"),
        (lambda w: w.change(Machine(), machine_id="5c" + "1d" * 15), FAIL, "another machine answers"),
        (lambda w: w.change(Machine(), machine_id=""), UNKNOWN, "identifies nothing"),
        (lambda w: w.change(Machine(), machine_id="0" * 32), UNKNOWN, "identifies nothing"),
        (lambda w: w.change(Machine(), machine_id="4f3a"), UNKNOWN, "32 hex digits"),
    ],
)
def test_same_machine(world: Any, broken: Break, verdict: Verdict, says: str) -> None:
    before = world.baseline()
    (finding,) = broken(world).judge(SameMachine(before))
    assert finding.verdict is verdict
    assert says in finding.reason


def test_same_machine_without_an_earlier_look(world: Any) -> None:
    assert world.judge(SameMachine(None))[0].verdict is NOT_CHECKED
    assert world.verdict(SameMachine(None, world.MACHINE_ID)) is PASS
    assert world.verdict(SameMachine(None, "5c" + "1d" * 15)) is FAIL
    blind = world.baseline()
    blind = replace(blind, machine=None, unknown={"machine": "permission denied"})
    assert world.judge(SameMachine(blind))[0].reason == "the machine-id of before is not known: permission denied"
    assert world.verdict(SameMachine(blind)) is UNKNOWN


def boots(*ids: str) -> tuple[Boot, ...]:
    return tuple(Boot(n - len(ids) + 1, i) for n, i in enumerate(ids))


@pytest.mark.parametrize(
    ("broken", "planned", "verdict", "says"),
    [
        (nothing, True, PASS, "exactly one boot"),
        (lambda w: w.change(Machine(), boot_id=w.OLD), True, FAIL, "it did not reboot"),
        (lambda w: w.change(Machine(), boot_id="b2b2"), True, UNKNOWN, "nothing follows"),
        (lambda w: w.change(Machine(), boot_id=""), True, UNKNOWN, "nothing follows"),
        (lambda w: w.change(Machine(), boot_id="f" * 32), True, UNKNOWN, "nothing follows"),
        (lambda w: w.put(Boots(), boots(w.OLD, w.OTHER, w.NEW)), True, FAIL, "2 boots since then"),
        (lambda w: w.put(Boots(), boots(w.OLD, w.OTHER, w.NEW)), False, WARN, "2 boots since then"),
        (lambda w: w.put(Boots(), boots(w.NEW)), True, UNKNOWN, "no longer boot a1a1a1a1"),
        (lambda w: w.put(Boots(), boots(w.OLD)), True, UNKNOWN, "is not the running one"),
        (lambda w: w.put(Boots(), ()), True, UNKNOWN, "is not the running one"),
        (lambda w: w.blind(Boots()), True, UNKNOWN, "permission denied"),
        # Order in the answer does not matter, the index does.
        (lambda w: w.put(Boots(), boots(w.OLD, w.NEW)[::-1]), True, PASS, "exactly one boot"),
    ],
)
def test_rebooted(world: Any, broken: Break, planned: bool, verdict: Verdict, says: str) -> None:
    before = world.baseline()
    findings = broken(world).judge(Rebooted(before, planned=planned))
    assert world.verdict(Rebooted(before, planned=planned)) is verdict
    assert says in findings[-1].reason


def test_a_changed_boot_id_is_said_even_when_the_boots_cannot_be_counted(world: Any) -> None:
    changed, counted = world.blind(Boots()).judge(Rebooted(world.baseline()))
    assert (changed.verdict, counted.verdict) == (PASS, UNKNOWN)


def test_rebooted_needs_to_know_the_boot_before(world: Any) -> None:
    assert world.judge(Rebooted(None))[0].verdict is NOT_CHECKED
    assert world.verdict(Rebooted(replace(world.baseline(), machine=None))) is UNKNOWN
    assert world.verdict(Rebooted(world.baseline(boot_id="12"))) is UNKNOWN


def test_a_reset_between_the_looks_is_a_failure(world: Any) -> None:
    first = world.baseline(boot_id=world.NEW)
    assert world.verdict(StillUp(first)) is PASS
    world.change(Machine(), boot_id=world.OTHER)
    (finding,) = world.judge(StillUp(first))
    assert (finding.verdict, finding.action) == (FAIL, Suggested.CHECK_HARDWARE)
    assert world.verdict(StillUp(replace(first, machine=None))) is UNKNOWN


@pytest.mark.parametrize(
    ("broken", "verdict", "says"),
    [
        (nothing, PASS, "orderly"),
        (lambda w: w.change(Shutdown(w.OLD), orderly=False, why="nothing of a shutdown"), WARN, "unclean"),
        (lambda w: w.blind(Shutdown(w.OLD), why="the journal does not keep it"), UNKNOWN, "does not keep it"),
        # The boot that still runs has not ended; its log has no shutdown, and that is no fault.
        (lambda w: w.change(Machine(), boot_id=w.OLD).change(Shutdown(w.OLD), orderly=False), NOT_CHECKED, "still runs"),
    ],
)
def test_orderly_shutdown(world: Any, broken: Break, verdict: Verdict, says: str) -> None:
    (finding,) = broken(world).judge(OrderlyShutdown(world.OLD))
    assert finding.verdict is verdict
    assert says in finding.reason


def test_an_unknown_boot_before_is_not_judged(world: Any) -> None:
    assert OrderlyShutdown("").needs() == (Boots(),)
    (late,) = world.judge(OrderlyShutdown(""))
    assert late.verdict is UNKNOWN and "too late" in late.reason
    (first,) = world.put(Boots(), (Boot(0, world.NEW),)).judge(OrderlyShutdown(""))
    assert first.verdict is NOT_CHECKED and "knows this boot alone" in first.reason
    (refused,) = world.blind(Boots(), why="`journalctl` needs root, and sudo refused").judge(OrderlyShutdown(""))
    assert refused.verdict is UNKNOWN and "`journalctl` needs root, and sudo refused" in refused.reason


def cmdline(w: Any, change: Callable[[str], str]) -> Any:
    return w.change(Machine(), cmdline=change(w.values[Machine()].cmdline))


@pytest.mark.parametrize(
    ("broken", "more", "verdict", "says"),
    [
        (nothing, {}, PASS, "as before"),
        (nothing, {"kernel": "6.17.13-1-pve"}, PASS, "as meant"),
        (nothing, {"kernel": "6.18.0-1-pve"}, FAIL, "runs instead of 6.18.0-1-pve"),
        (lambda w: w.change(Machine(), kernel="6.18.0-1-pve"), {}, WARN, "before it was"),
        (lambda w: w.change(Machine(), kernel="6.18.0-1-pve"), {"kernel": "6.18.0-1-pve"}, PASS, "as meant"),
        (lambda w: w.change(Machine(), kernel=""), {}, UNKNOWN, "not known"),
        (nothing, {"options": ("iommu=pt",)}, FAIL, "iommu=pt is not on the command line"),
        (lambda w: cmdline(w, lambda c: c + " iommu=pt"), {"options": ("iommu=pt",)}, WARN, "new: iommu=pt"),
        (lambda w: cmdline(w, lambda c: c + " amd_iommu=off"), {}, WARN, "bears on the GPUs"),
        (lambda w: cmdline(w, lambda c: c.replace(" quiet", "")), {}, WARN, "gone: quiet"),
        # The name of the kernel's image follows the kernel; it is no change of its own.
        (lambda w: cmdline(w, lambda c: c.replace("vmlinuz-6.17", "vmlinuz-6.18")), {}, PASS, "as before"),
    ],
)
def test_kernel_and_command_line(world: Any, broken: Break, more: dict[str, Any], verdict: Verdict, says: str) -> None:
    check = KernelAndCommandLine(world.baseline(), **more)
    findings = broken(world).judge(check)
    assert world.verdict(check) is verdict
    assert any(says in f.reason for f in findings)


def test_options_that_are_none_are_named(world: Any) -> None:
    cmdline(world, lambda c: c + " amd_iommu=on iommu=pt iommu=off")
    findings = world.judge(KernelAndCommandLine(world.baseline()))
    assert findings[-1].verdict is WARN
    assert "amd_iommu=on is no option" in findings[-1].reason
    assert "iommu is given 2 times (pt, off): the last one wins" in findings[-1].reason


def test_the_order_of_a_repeated_option_matters(world: Any) -> None:
    cmdline(world, lambda c: c + " iommu=pt iommu=off")
    before = world.baseline()
    cmdline(world, lambda c: c.replace("iommu=pt iommu=off", "iommu=off iommu=pt"))
    assert "the order" in world.judge(KernelAndCommandLine(before))[1].reason


def test_kernel_without_any_expectation(world: Any) -> None:
    assert {f.verdict for f in world.judge(KernelAndCommandLine(None))} == {NOT_CHECKED}
    (finding,) = world.judge(KernelAndCommandLine(replace(world.baseline(), machine=None)))
    assert finding.verdict is UNKNOWN
    assert "of before is not known" in finding.reason
