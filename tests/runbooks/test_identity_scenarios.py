"""Every scenario of the identity experiment comes out as its file says: the exam of its rule, its way back and its record."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from proofbook import launch, notebook, recover
from proofbook.archive import Archive
from proofbook.errors import LabError, ProofbookError
from proofbook.inventory import connect, load_inventory
from proofbook.lab.sim import client
from proofbook.launch import runbook_file
from proofbook.model import Check
from proofbook.probes import drive
from proofbook.probes.iommu import IommuGroups
from proofbook.procedures import iommu_identity_experiment
from proofbook.record import RunRecord
from proofbook.run import Run

RUNBOOK = "iommu-identity-experiment"
SCENARIOS = [info.scenario for info in client.scenarios() if RUNBOOK in info.runbooks]

#: What the conclusion must give as its reason.
BECAUSE = {
    "identity-fsp-0x177": "its FSP refused first (code 0x177)",
    "identity-works": "started with its group in the identity domain",
    "identity-no-control": "differs in command line",
    "identity-lost-link": "reads as all ones is no answer",
    "identity-too-late": "bound to nvidia already",
    "identity-group-shared": "it was not fit to be",
    "identity-never-back": "did not come back from the experiment's boot",
    "identity-restore-fails": "DAMAGED",
    "identity-with-audio": "started with its group in the identity domain",
    "identity-old-kernel": "the kernel refused the write: Invalid argument; its type is DMA-FQ",
    "identity-reset-stays": "its FSP refused first (code 0x177)",
    "identity-reset-clears": "but after a reset in the same boot (0000:01:00.0 by bus) it started, still in the identity domain",
    "identity-reset-kills": "a reset lost 0000:01:00.0 by flr: cut the power, a reboot does not bring it back",
}
#: What a failed finding must say besides.
FAILS = {
    "identity-too-late": "DMA-FQ, not identity",
    "identity-group-shared": "also holds 0000:41:00.0",
    "identity-never-back": "NOT SEEN TO BE RESTORED",
    "identity-restore-fails": "NOT RESTORED: it does not start any more",
    "identity-old-kernel": "DMA-FQ, not identity",
    "identity-reset-kills": "NOT RESTORED: the type of its group is no type, before DMA-FQ; it does not start any more",
}


#: A person who reads the plan beside the run, and approves what it shows.
READS_AND_APPROVES = ("approver=approver, approved=approved", 'approver="tester", approved=plan.digest')


def play(cells_of: Path, outputs: Path, parameters: Mapping[str, Any], *, beside: bool = False) -> str:
    """The code cells, in order, until one raises. What was raised, "" for nothing: what it came to is in the record."""
    cells = [c for c in json.loads(cells_of.read_text())["cells"] if c["cell_type"] == "code"]
    first, *others = ["".join(c["source"]) for c in cells]
    edits = "\n".join(f"{name} = {value!r}" for name, value in parameters.items())
    names: dict[str, Any] = {"__name__": "__main__"}
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PROOFBOOK_OUTPUTS", str(outputs))
        try:
            for source in [f"{first}\n{edits}", *others]:
                said = source.replace(*READS_AND_APPROVES) if beside else source
                exec(compile(said, RUNBOOK, "exec"), names)
        except ProofbookError as error:
            return f"{type(error).__name__}: {error}"
    return ""


def execute(outputs: Path, *, beside: bool = False, **parameters: Any) -> RunRecord:
    """The notebook's cells in this process, in order, until one raises. ``beside``: somebody is there to approve."""
    before = {r.run_id for r in Archive(outputs).runs()}
    notebook._current.clear()
    play(runbook_file(RUNBOOK), outputs, parameters, beside=beside)
    (new,) = [r for r in Archive(outputs).runs() if r.run_id not in before]
    return Archive(outputs).load(new.run_id)


def right(scenario: str) -> dict[str, Any]:
    (info,) = [i for i in client.scenarios() if i.scenario == scenario]
    said: dict[str, Any] = info.as_json()["runbooks"][RUNBOOK]
    return said


def test_each_way_to_end_has_a_scenario() -> None:
    assert set(SCENARIOS) == BECAUSE.keys()


@pytest.mark.lab
@pytest.mark.runbook
@pytest.mark.parametrize("scenario", SCENARIOS)
def test_scenario(scenario: str, lab: Path, outputs: Path) -> None:
    client.reset(scenario)
    expected = right(scenario)
    given = {**expected["parameters"], "host": f"lab:{scenario}"}
    record = execute(outputs, beside=scenario != "identity-fsp-0x177", **given)
    if scenario == "identity-fsp-0x177":
        assert record.waiting_for is not None
        assert record.exit_code == 3
        record = execute(outputs, **given, approved=record.waiting_for["digest"], approver="tester")
    came = {
        "verdict": record.verdict,
        "status": record.status,
        "exit_code": record.exit_code,
        "conclusion": record.conclusion_word,
    }
    assert came == {k: expected[k] for k in came}, record.summary
    assert record.conclusion is not None and BECAUSE[scenario] in record.conclusion["because"]
    failed = [f["reason"] for f in record.findings if f["verdict"] == "FAIL"]
    assert any(FAILS[scenario] in reason for reason in failed) if scenario in FAILS else not failed
    assert Archive(outputs).verify(record.run_id) == []
    assert client.unknown_commands(scenario) == []
    if scenario in LOOKS:
        LOOKS[scenario](record)
    client.stop(scenario)


def blocked_and_put_back(record: RunRecord) -> None:
    """What the record of the story must hold: what was written down first, both boots, the scope, the way back."""
    assert record.conclusion is not None
    assert record.conclusion["damaged"] is False
    for word in ("0000:01:00.0, 0000:41:00.0", "VBIOS", "driver 595", "kernel 6.17", "board GENOA"):
        assert word in record.conclusion["scope"]
    noted = next(n for n in record.notes if n["title"] == "written down before")
    boot_a = next(t for t in record.timeline if t["text"].startswith("Acting: boot A"))
    assert noted["ts"] < boot_a["ts"]
    assert any(n["kind"] == "not-verified" and n["title"] == "resets" for n in record.notes)
    back = [f for f in record.findings if f["check"] == "identity.PutBack"]
    assert {f["look"] for f in back} == {"boot B", "boot B, settled"} and {f["verdict"] for f in back} == {"PASS"}
    (table,) = [t for t in record.tables if t["name"] == "boots"]
    roles = {row[0]: (row[1], row[4], row[5]) for row in table["rows"]}
    assert roles["0000:01:00.0"] == ("treated", "identity", "NO")
    assert roles["0000:81:00.0"] == ("control", "DMA-FQ", "yes")


def loud(record: RunRecord) -> None:
    """A machine that is not as it was: the first words of the record, with what to do."""
    assert record.summary.startswith("NOT RESTORED")
    assert "ACT NOW" in record.summary and "power" in record.summary


def audio_and_back(record: RunRecord) -> None:
    """The audio function is in the plan, of the same type in boot A with its driver, and as before in boot B."""
    audio = "0000:01:00.1"
    (plan,) = record.plans
    assert f"identity 0000:01:00.0 {audio}" in plan["diff"] and any(audio in fact for fact in plan["facts"])
    (table,) = [t for t in record.tables if t["name"] == "functions"]
    assert table["rows"][0] == [audio, "0000:01:00.0", "DMA-FQ", "snd_hda_intel", "identity", "snd_hda_intel"]
    assert {row[4] for row in table["rows"][1:]} == {"DMA-FQ"}
    back = [f["reason"] for f in record.findings if f["check"] == "identity.PutBack" and f["subject"] == "0000:01:00.0"]
    assert len(back) == 2 and all(f"{audio} bound to snd_hda_intel, as before" in reason for reason in back)


def warned_and_put_back(record: RunRecord) -> None:
    """What the kernel may answer stood there before the gate; the machine is as it was."""
    warned = next(f for f in record.findings if f["verdict"] == "WARN" and "EINVAL" in f["reason"])
    assert warned["look"] == "before" and "6.2.16-20-pve" in warned["reason"]
    assert record.conclusion is not None and record.conclusion["damaged"] is False
    assert record.summary.endswith("the machine is as it was. Leave the group translated.")


def resets(record: RunRecord) -> dict[tuple[str, str], list[Any]]:
    """(GPU, method) to what came of it: the word, what was seen, vendor before and after, driver after, first error after."""
    (table,) = [t for t in record.tables if t["name"] == "resets"]
    return {(row[0], row[1]): row[2:] for row in table["rows"]}


def reset_acts(record: RunRecord) -> list[str]:
    """The resets that were sent to the machine, each journaled before it was."""
    acts = [act["what"] for plan in record.plans for act in plan["acts"] if act["what"].startswith("reset ")]
    (boot_b,) = [t["ts"] for t in record.timeline if t["text"].startswith("Acting: boot B")]
    assert all(t["ts"] < boot_b for t in record.timeline if t["text"].startswith("Acting: reset"))
    return acts


def not_verified_of_resets(record: RunRecord) -> str:
    (note,) = [n["text"] for n in record.notes if n["kind"] == "not-verified" and n["title"] == "resets"]
    return str(note)


def stays(record: RunRecord) -> None:
    came = resets(record)
    word, why, *more, first = came[("0000:01:00.0", "flr")]
    assert (word, more) == ("did not clear", ["0x10de", "0x10de", "nvidia"])
    assert "Error code: 0x177" in first and first in why
    assert came[("0000:01:00.0", "cxl_bus")][:2] == ["NOT TRIED", "it is not in its reset_method (flr bus)"]
    assert "cxl_bus on 0000:01:00.0: NOT TRIED" in not_verified_of_resets(record)
    (plan,) = record.plans
    assert [a["what"] for a in plan["actions"] if "reset it by" in a["what"]] == [plan["actions"][3]["what"]]
    assert any("A RESET CAN KILL" in text for text in plan["cannot_undo"])
    listed = [f for f in record.findings if f["check"] == "identity.ResetsListed"]
    assert [f["verdict"] for f in listed] == ["PASS", "NOT_CHECKED"]
    assert len(reset_acts(record)) == 1


def clears(record: RunRecord) -> None:
    came = resets(record)
    assert [came[("0000:01:00.0", m)][0] for m in ("flr", "bus")] == ["did not clear", "cleared"]
    assert "bus on 0000:01:00.0: cleared" in not_verified_of_resets(record)
    assert len(reset_acts(record)) == 2
    assert record.conclusion is not None and record.conclusion["damaged"] is False


def kills(record: RunRecord) -> None:
    """Nothing is tried after the first that loses a GPU; boot B follows; the record asks for the power to be cut."""
    loud(record)
    came = resets(record)
    word, why, before, after, driver, first = came[("0000:01:00.0", "flr")]
    assert (word, before, after, driver) == ("lost", "0x10de", "0xffff", "")
    assert "ENOTTY" in why and "not ready 65535ms after FLR" in first
    others = [("0000:01:00.0", "bus"), ("0000:41:00.0", "flr"), ("0000:41:00.0", "bus")]
    assert {came[key][0] for key in others} == {"NOT TRIED"} and len(came) == 4
    assert {came[key][1] for key in others} == {"nothing was tried after flr on 0000:01:00.0: lost"}
    assert len(reset_acts(record)) == 1
    cold = [f for f in record.findings if f["check"] == "identity.PutBack" and f["verdict"] == "FAIL"]
    assert [f["action"] for f in cold if f["subject"] == "0000:01:00.0"] == ["power-cycle"]
    assert not [f for f in cold if f["subject"] == "0000:41:00.0"]


LOOKS = {
    "identity-fsp-0x177": blocked_and_put_back,
    "identity-restore-fails": loud,
    "identity-never-back": loud,
    "identity-with-audio": audio_and_back,
    "identity-old-kernel": warned_and_put_back,
    "identity-reset-stays": stays,
    "identity-reset-clears": clears,
    "identity-reset-kills": kills,
}


@pytest.mark.lab
@pytest.mark.runbook
def test_a_console_that_nobody_confirmed_keeps_it_from_being_made(lab: Path, outputs: Path) -> None:
    client.reset("identity-works")
    record = execute(outputs, host="lab:identity-works")
    assert (record.status, record.verdict, record.conclusion_word) == ("completed", "FAIL", "inconclusive")
    assert not [act for plan in record.plans for act in plan["acts"]]
    client.stop("identity-works")


@pytest.mark.lab
@pytest.mark.runbook
def test_an_experiment_whose_runner_died_in_boot_a_is_taken_back_and_not_gone_on_with(
    lab: Path, outputs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    client.reset("identity-works")

    def dies(run: Run, start: Any, applied: Any) -> tuple[Check, ...]:
        raise LabError("the runner is gone")

    with monkeypatch.context() as patch:
        patch.setattr(iommu_identity_experiment, "trial", dies)
        record = execute(outputs, beside=True, host="lab:identity-works", console_confirmed=True, settle_minutes=0.0)
        for run in notebook._current.values():
            notebook._left_open(run)
    record = Archive(outputs).load(record.run_id)
    assert (record.status, record.exit_code, record.conclusion_word) == ("aborted", 7, None)
    assert iommu_types()["0000:01:00.0"] == "identity"

    def refused(cells_of: Path, parameters: dict[str, Any], run_id: str) -> tuple[str, str]:
        trouble = play(cells_of, outputs, parameters)
        for run in notebook._current.values():
            notebook._left_open(run)
        return "", trouble

    monkeypatch.setattr(launch, "_execute", refused)
    notebook._current.clear()
    resumed = recover.resume(record.run_id, outputs=outputs)
    assert (resumed.status, resumed.exit_code) == ("aborted", 7)
    assert iommu_types()["0000:01:00.0"] == "identity"

    taken_back = recover.roll_back(record.run_id, outputs=outputs)
    assert (taken_back.status, taken_back.verdict, taken_back.exit_code) == ("completed", "PASS", 0), taken_back
    assert set(iommu_types().values()) == {"DMA-FQ"}
    client.stop("identity-works")


def iommu_types() -> dict[str, str]:
    """What the groups of the GPUs are now, by an ordinary look."""
    transport, _ = connect(load_inventory().resolve("lab:identity-works"))
    transport.open()
    try:
        facts = drive([IommuGroups()], transport.gather)[IommuGroups()].value
    finally:
        transport.close()
    assert facts is not None
    return {pci: kind for pci, kind in facts.by_device.items() if pci.endswith(("01:00.0", "41:00.0", "81:00.0", "c1:00.0"))}
