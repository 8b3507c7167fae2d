"""The checks and the evidence of the identity experiment, on observations of a machine with two GPUs."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from proofbook.checks.identity.evidence import choose, first_error, the_boot_before, the_trial
from proofbook.checks.identity.preflight import FitForIdentity
from proofbook.checks.identity.restored import PutBack, restored
from proofbook.checks.identity.rule import Kind, Outcome, Restored, conclude
from proofbook.checks.identity.trial import ValidTrial
from proofbook.errors import CannotTell
from proofbook.intent import GpuSpec
from proofbook.lab.sim import fault_lines
from proofbook.model import Check, Finding, Observation, Probe, Seen, Verdict
from proofbook.probes.boot import Machine, MachineFacts
from proofbook.probes.iommu import IommuFacts, IommuGroup, IommuGroups
from proofbook.probes.iommu_identity import EarlyModules, IdentityFacts, IdentityState
from proofbook.probes.kernel_log import KernelLine, KernelLog, KernelMessages
from proofbook.probes.nvidia import Driver, DriverFacts, GpuRow, Gpus, GpuTable
from proofbook.probes.pci import PciDevices, PciFacts
from proofbook.remote.iommu_identity import FLAG, IdentityLog
from proofbook.signatures import LogContext, LogLine, judge

ONE, TWO, AUDIO = "0000:01:00.0", "0000:41:00.0", "0000:01:00.1"
T0 = datetime(2026, 3, 9, 16, 0, tzinfo=UTC)
BOOT = "a1" * 16
LOG = IdentityLog("identity", (ONE,), 3.41, 3.42, {ONE: (13, "DMA-FQ")}, {ONE: 3.45}, {}, "done")


def pci(address: str, group: int, **more: Any) -> PciFacts:
    return replace(PciFacts(address, 0x10DE, 0x2BB5, 0x030200, "nvidia", group, 0, None), **more)


def row(address: str) -> GpuRow:
    return GpuRow(address, 0, f"GPU-{address}", "RTX PRO 6000", "98.02", "P8", 1, 5, 16, 16)


def kernel(*said: tuple[float, str], complete: bool = True) -> KernelMessages:
    lines = [(0.0, "Linux version 6.17.13-1-pve"), (7.6, "nvidia: loading out-of-tree module taints kernel."), *said]
    told = tuple(KernelLine(at, T0 + timedelta(seconds=at), 6, text) for at, text in lines)
    return KernelMessages(told, complete, () if complete else ("Missed 27 kernel messages",), "journal", BOOT)


def healthy(**changed: Any) -> dict[Probe[Any], Any]:
    """Two GPUs, each alone in its group; ``changed`` replaces answers by the name of the probe's class."""
    answers: dict[Probe[Any], Any] = {
        Machine(): MachineFacts("gpu-hv1", "4f" * 16, BOOT, "6.17.13-1-pve", "quiet", 100.0, T0),
        KernelLog(): kernel(),
        PciDevices(): {ONE: pci(ONE, 13), TWO: pci(TWO, 21)},
        IommuGroups(): groups("DMA-FQ", "DMA-FQ"),
        Driver(): DriverFacts("595.58.03", True, "", {}, None, None, None, None),
        Gpus(): GpuTable({ONE: row(ONE), TWO: row(TWO)}, {}, "595.58.03", 0, {}),
        IdentityState(): IdentityFacts((), None),
        EarlyModules(): (),
    }
    for probe in answers:
        if type(probe).__name__ in changed:
            answers[probe] = changed[type(probe).__name__]
    return answers


def groups(one: str, two: str, *together: str) -> IommuFacts:
    members = {13: IommuGroup(one, (ONE, *together)), 21: IommuGroup(two, (TWO,))}
    return IommuFacts(members, {d: g.type for g in members.values() for d in g.devices})


def seen(answers: dict[Probe[Any], Any]) -> Seen:
    """A string as an answer is why it is unknown."""
    return Seen(
        Observation(p, None if isinstance(a, str) else a, a if isinstance(a, str) else "", T0, BOOT) for p, a in answers.items()
    )


def in_identity(*said: tuple[float, str], up: bool = False, **changed: Any) -> Seen:
    rows = {TWO: row(TWO)} | ({ONE: row(ONE)} if up else {})
    boot_a = {
        "IommuGroups": groups("identity", "DMA-FQ"),
        "IdentityState": IdentityFacts((), LOG),
        "KernelLog": kernel(*said),
        "Gpus": GpuTable(rows, {}, "595.58.03", 0, {}),
    }
    return seen(healthy(**{**boot_a, **changed}))


def spoken(lines: list[fault_lines.Line], at: float = 8.1) -> list[tuple[float, str]]:
    return [(at + n * 0.001, line.text) for n, line in enumerate(lines)]


def judged(check: Check, look: Seen) -> list[Finding]:
    return list(check.judge(look))


def bad(found: list[Finding]) -> list[str]:
    return [f"{f.verdict} {f.subject} {f.reason}" for f in found if f.verdict not in (Verdict.PASS, Verdict.NOT_CHECKED)]


BEFORE = the_boot_before(seen(healthy()), (ONE, TWO))
FSP = spoken(fault_lines.fsp_boot_failed(ONE, 0))


# ----------------------------------------------------------------------------------------------------- which GPUs


def test_which_gpus_are_treated() -> None:
    look = seen(healthy(PciDevices={ONE: pci(ONE, 13), TWO: pci(TWO, 21, numa_node=1)}))
    assert choose("", look) == (ONE,)
    assert choose("all", look) == (ONE, TWO)
    assert choose("node:1", look) == (TWO,)
    assert choose("41:00.0, 01:00.0", look) == (TWO, ONE)
    with pytest.raises(ValueError, match="no GPU is on NUMA node 7"):
        choose("node:7", look)
    with pytest.raises(ValueError, match="is no GPU of this machine"):
        choose("0000:99:00.0", look)


def test_a_device_that_the_inventory_calls_a_gpu_is_one() -> None:
    odd = pci(ONE, 13, vendor=0x1234)
    with pytest.raises(CannotTell):
        choose("", seen(healthy(PciDevices={ONE: odd})))
    assert choose("", seen(healthy(PciDevices={ONE: odd})), (GpuSpec(pci=ONE),)) == (ONE,)


# ------------------------------------------------------------------------------------------------------ preflight

FIT = FitForIdentity((ONE,), True, "https://bmc.example")
UNFIT: dict[str, tuple[dict[str, Any], str]] = {
    "another card in the group": ({"IommuGroups": groups("DMA-FQ", "DMA-FQ", "0000:02:00.0")}, "also holds 0000:02:00.0"),
    "another slot of the bus in the group": (
        {"IommuGroups": groups("DMA-FQ", "DMA-FQ", "0000:01:01.0")},
        "also holds 0000:01:01.0",
    ),
    "a bridge beside its own audio function": (
        {"IommuGroups": groups("DMA-FQ", "DMA-FQ", AUDIO, "0000:00:01.1")},
        "also holds 0000:00:01.1:",
    ),
    "already identity": ({"IommuGroups": groups("identity", "DMA-FQ")}, "identity already"),
    "a kernel that does not say types": ({"IommuGroups": groups("", "DMA-FQ")}, "5.11"),
    "no iommu": ({"IommuGroups": IommuFacts({}, {})}, "no iommu group"),
    "another driver": ({"PciDevices": {ONE: pci(ONE, 13, driver="vfio-pci"), TWO: pci(TWO, 21)}}, "vfio-pci"),
    "not on the bus": ({"PciDevices": {TWO: pci(TWO, 21)}}, "not on the bus"),
    "it does not run now": ({"Gpus": GpuTable({TWO: row(TWO)}, {}, "", 0, {})}, "does not run now"),
    "whether it runs is not known": ({"Gpus": "nvidia-smi gave no answer"}, "not known"),
    "the initramfs loads the driver": ({"EarlyModules": ("/etc/initramfs-tools/modules: nvidia",)}, "initramfs"),
    "SEV-SNP": ({"KernelLog": kernel((0.5, "SEV-SNP: RMP table physical range [0x1-0x2]"))}, "SEV-SNP"),
    "memory encryption": ({"KernelLog": kernel((0.5, "Memory Encryption Features active: AMD SME"))}, "encrypted"),
    "files of another experiment": ({"IdentityState": IdentityFacts((FLAG,), None)}, FLAG),
    "no control": ({"PciDevices": {ONE: pci(ONE, 13)}}, "only the boot before"),
}


def test_a_machine_that_is_fit() -> None:
    assert bad(judged(FIT, seen(healthy()))) == []


@pytest.mark.parametrize("what", UNFIT)
def test_what_makes_it_unfit(what: str) -> None:
    changed, words = UNFIT[what]
    said = bad(judged(FIT, seen(healthy(**changed))))
    assert any(words in one for one in said), said


AUDIO_TOO: dict[str, Any] = {
    "PciDevices": {
        ONE: pci(ONE, 13),
        AUDIO: pci(AUDIO, 13, device=0x22E8, class_code=0x040300, driver="snd_hda_intel"),
        TWO: pci(TWO, 21),
    },
    "IommuGroups": groups("DMA-FQ", "DMA-FQ", AUDIO),
}


def with_audio(**changed: Any) -> Seen:
    return seen(healthy(**{**AUDIO_TOO, **changed}))


def on_kernel(release: str) -> MachineFacts:
    return MachineFacts("gpu-hv1", "4f" * 16, BOOT, release, "quiet", 100.0, T0)


def test_a_gpus_own_audio_function_belongs_to_it() -> None:
    found = judged(FIT, with_audio())
    assert bad(found) == []
    assert any(f"{AUDIO} (snd_hda_intel), whose type changes with it" in f.reason for f in found)
    assert any("alone with 1 function of its own" in f.reason for f in found)


@pytest.mark.parametrize(
    ("kernel", "answer"),
    [
        ("6.8.12-1-pve", ""),
        ("6.12.41+deb13-amd64", ""),
        ("7.0.0", ""),
        ("6.2.16-20-pve", "refuse that for a group of several devices (EINVAL)"),
        ("6.1.0-25-amd64", "(EINVAL)"),
        ("5.15.0", "(EINVAL)"),
        ("6.5.13-6-pve", "in between it is not known"),
        ("unheard of", "it is not known"),
    ],
)
def test_what_this_kernel_may_answer_for_a_group_of_several_is_said_before(kernel: str, answer: str) -> None:
    said = bad(judged(FIT, with_audio(Machine=on_kernel(kernel))))
    assert [s.split()[0] for s in said] == (["WARN"] if answer else [])
    assert all(answer in s and kernel in s for s in said)
    assert bad(judged(FIT, seen(healthy(Machine=on_kernel(kernel))))) == []  # alone in its group: every kernel does it


def test_an_audio_driver_in_the_initramfs_matters_where_there_is_an_audio_function() -> None:
    early = ("/etc/initramfs-tools/modules: snd-hda-intel",)
    assert bad(judged(FIT, seen(healthy(EarlyModules=early)))) == []
    (said,) = bad(judged(FIT, with_audio(EarlyModules=early)))
    assert "snd-hda-intel" in said


def test_a_console_that_nobody_confirmed() -> None:
    (said,) = bad(judged(replace(FIT, console_confirmed=False), seen(healthy())))
    assert said.startswith("FAIL") and "console" in said


# ---------------------------------------------------------------------------------------------------------- boot A

VALID = ValidTrial((ONE,), BEFORE)


def outcome(look: Seen) -> Outcome:
    return conclude(BEFORE, the_trial(look, (ONE,), ()), Restored(True)).outcome


def test_a_refusal_with_a_control_is_a_valid_trial() -> None:
    look = in_identity(*FSP)
    found = judged(VALID, look)
    assert bad(found) == [] and outcome(look) is Outcome.BLOCKED
    assert any("0x177" in f.reason for f in found)


def test_a_gpu_that_starts_is_a_valid_trial() -> None:
    look = in_identity(up=True)
    assert bad(judged(VALID, look)) == [] and outcome(look) is Outcome.SUPPORTED


SHOWS_NOTHING: dict[str, tuple[Seen, str]] = {
    "the program left no log": (in_identity(*FSP, IdentityState=IdentityFacts((), None)), "did not run"),
    "it refused": (
        in_identity(
            *FSP,
            IommuGroups=groups("DMA-FQ", "DMA-FQ"),
            IdentityState=IdentityFacts((), replace(LOG, set={}, end="refused", refused={ONE: "it is bound to nvidia already"})),
        ),
        "bound to nvidia already",
    ),
    "it could not disarm": (
        in_identity(*FSP, IdentityState=IdentityFacts((FLAG,), replace(LOG, set={}, end="idle", trouble="read-only"))),
        "read-only",
    ),
    "set too late": (in_identity(*FSP, IdentityState=IdentityFacts((), replace(LOG, set={ONE: 9.0}))), "after the driver"),
    "the log has a gap": (in_identity(KernelLog=kernel(*FSP, complete=False)), "Missed 27"),
    "nothing in the log": (in_identity(), "does not say why"),
    "a lost link": (in_identity(*spoken(fault_lines.fsp_boot_timeout(ONE, [0xFFFFFFFF] * 5))), "link was lost first"),
    "no control": (in_identity(*FSP, Gpus=GpuTable({}, {}, "595.58.03", 0, {})), "no control"),
    "nvidia-smi says nothing": (in_identity(*FSP, Gpus="nvidia-smi gave no answer"), "not known"),
}


@pytest.mark.parametrize("what", SHOWS_NOTHING)
def test_what_shows_nothing_is_no_valid_trial(what: str) -> None:
    look, words = SHOWS_NOTHING[what]
    assert any(words in said for said in bad(judged(VALID, look))), bad(judged(VALID, look))
    assert outcome(look) is Outcome.INCONCLUSIVE


BOTH = replace(LOG, addresses=(ONE, AUDIO), set={ONE: 3.45, AUDIO: 3.46})


def audio_in_boot_a(kind: str = "identity", driver: str = "snd_hda_intel", **changed: Any) -> Seen:
    devices = {**AUDIO_TOO["PciDevices"], AUDIO: replace(AUDIO_TOO["PciDevices"][AUDIO], driver=driver)}
    members = groups("identity", "DMA-FQ", AUDIO)
    types = IommuFacts(members.groups, {**members.by_device, AUDIO: kind})
    given = {"IommuGroups": types, "PciDevices": devices, "IdentityState": IdentityFacts((), BOTH), **changed}
    return in_identity(*FSP, **given)


def test_an_audio_function_is_read_back_with_its_driver() -> None:
    before = the_boot_before(with_audio(), (ONE, TWO))
    check = ValidTrial((ONE,), before)
    found = judged(check, audio_in_boot_a())
    assert bad(found) == []
    assert [f.reason for f in found if f.subject == AUDIO] == ["identity, bound to snd_hda_intel, as before"]
    came = conclude(before, the_trial(audio_in_boot_a(), (ONE,), ()), Restored(True))
    assert came.outcome is Outcome.BLOCKED and any(f"{AUDIO} bound to snd_hda_intel" in r for r in came.reasons)
    (said,) = bad(judged(check, audio_in_boot_a(driver="")))
    assert said.startswith(f"WARN {AUDIO}") and "before to snd_hda_intel" in said
    assert any(s.startswith(f"FAIL {AUDIO}") for s in bad(judged(check, audio_in_boot_a("DMA-FQ"))))


def test_an_audio_function_of_another_type_is_no_experiment() -> None:
    came = conclude(the_boot_before(with_audio(), (ONE, TWO)), the_trial(audio_in_boot_a("DMA-FQ"), (ONE,), ()), Restored(True))
    assert came.outcome is Outcome.INCONCLUSIVE and f"{AUDIO}, a function of {ONE}, is DMA-FQ" in came.because


def test_a_kernel_that_refuses_is_told_with_the_type_that_was_kept() -> None:
    why = "the kernel refused the write: Invalid argument; its type is DMA-FQ"
    refused = replace(BOTH, set={}, end="partly", refused={ONE: why, AUDIO: why})
    kept = groups("DMA-FQ", "DMA-FQ", AUDIO)
    look = audio_in_boot_a(IommuGroups=kept, IdentityState=IdentityFacts((), refused))
    came = conclude(BEFORE, the_trial(look, (ONE,), ()), Restored(True))
    assert came.outcome is Outcome.INCONCLUSIVE
    assert came.because == f"the kernel did not set every type: {ONE}: {why}; {AUDIO}: {why}"
    assert any(s.startswith("FAIL") and "Invalid argument" in s for s in bad(judged(VALID, look)))


def first_of(*said: tuple[float, str]) -> Kind | None:
    lines = [LogLine(text, at) for at, text in sorted(said)]
    error = first_error(judge(lines, context=LogContext(gpus=frozenset({ONE, TWO}))).findings, ONE)
    return error.kind if error else None


def test_what_comes_first_decides() -> None:
    lost = spoken(fault_lines.xid79(ONE, f"GPU-{ONE}", serial="1"), 5.0)
    assert first_of(*FSP) is Kind.FSP
    assert first_of(*lost, *FSP) is Kind.LINK
    assert first_of(*spoken(fault_lines.wpr2_still_up(ONE, 0))) is Kind.FIRMWARE
    assert first_of(*spoken(fault_lines.init_failed(TWO, 1))) is None


def test_registers_that_read_all_ones_turn_a_refusal_into_a_lost_link() -> None:
    dump = (8.11, "NVRM: GPU0 kfspDumpDebugState_GH100: NV_PFSP_FALCON_COMMON_SCRATCH_GROUP_2(0) = 0xffffffff")
    poll = (8.10, "NVRM: GPU0 kfspPollForResponse_IMPL: FSP command timed out")
    ending = spoken(fault_lines.init_failed(ONE, 0), 8.12)
    assert first_of(poll, *ending) is Kind.FSP
    assert first_of(poll, dump, *ending) is Kind.LINK


# ---------------------------------------------------------------------------------------------------------- boot B

PUT_BACK = PutBack(BEFORE)
NOT_BACK: dict[str, tuple[dict[str, Any], str]] = {
    "still identity": ({"IommuGroups": groups("identity", "DMA-FQ")}, "the type of its group is identity"),
    "another type": ({"IommuGroups": groups("DMA", "DMA-FQ")}, "the type of its group is DMA, before DMA-FQ"),
    "it does not start": ({"Gpus": GpuTable({TWO: row(TWO)}, {}, "", 0, {})}, "does not start any more"),
    "the control does not start": ({"Gpus": GpuTable({ONE: row(ONE)}, {}, "", 0, {})}, "does not start any more"),
    "nvidia-smi says nothing": ({"Gpus": "no answer"}, "not known"),
    "a file is left": ({"IdentityState": IdentityFacts((FLAG,), None)}, "files are left"),
    "it ran in this boot too": ({"IdentityState": IdentityFacts((), LOG)}, "ran in this boot"),
    "the groups cannot be read": ({"IommuGroups": "lost"}, "NOT SEEN TO BE RESTORED"),
    "its files cannot be read": ({"IdentityState": "lost"}, "NOT SEEN TO BE RESTORED"),
}


def test_a_machine_that_is_as_it_was() -> None:
    look = seen(healthy())
    assert bad(judged(PUT_BACK, look)) == [] and restored(look, BEFORE).whole


@pytest.mark.parametrize("what", NOT_BACK)
def test_what_is_not_as_it_was_is_loud(what: str) -> None:
    changed, words = NOT_BACK[what]
    look = seen(healthy(**changed))
    said = bad(judged(PUT_BACK, look))
    assert any(words in one and one.startswith("FAIL") and "RESTORED" in one for one in said), said
    assert not restored(look, BEFORE).whole


AUDIO_NOT_BACK: dict[str, tuple[dict[str, Any], str]] = {
    "its driver is gone": (
        {"PciDevices": {**AUDIO_TOO["PciDevices"], AUDIO: replace(AUDIO_TOO["PciDevices"][AUDIO], driver="")}},
        f"its function {AUDIO} is bound to no driver, before snd_hda_intel",
    ),
    "another driver has it": (
        {"PciDevices": {**AUDIO_TOO["PciDevices"], AUDIO: replace(AUDIO_TOO["PciDevices"][AUDIO], driver="vfio-pci")}},
        "is bound to vfio-pci, before snd_hda_intel",
    ),
    "it is gone": ({"PciDevices": {ONE: pci(ONE, 13), TWO: pci(TWO, 21)}}, f"its function {AUDIO} is not on the bus"),
    "still identity": ({"IommuGroups": groups("identity", "DMA-FQ", AUDIO)}, f"group of its function {AUDIO} is identity"),
    "the devices cannot be read": ({"PciDevices": "lost"}, "NOT SEEN TO BE RESTORED"),
}


def test_an_audio_function_that_is_as_it_was() -> None:
    before = the_boot_before(with_audio(), (ONE, TWO))
    found = judged(PutBack(before), with_audio())
    assert bad(found) == [] and restored(with_audio(), before).whole
    assert any(f"{AUDIO} bound to snd_hda_intel, as before" in f.reason for f in found)


@pytest.mark.parametrize("what", AUDIO_NOT_BACK)
def test_an_audio_function_that_is_not_as_it_was_is_loud(what: str) -> None:
    changed, words = AUDIO_NOT_BACK[what]
    look, before = with_audio(**changed), the_boot_before(with_audio(), (ONE, TWO))
    assert any(words in one and one.startswith("FAIL") for one in bad(judged(PutBack(before), look)))
    assert not restored(look, before).whole
