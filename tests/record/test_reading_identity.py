"""Identity experiments read from their records: each boot's lines, what they prove, the rule, and boots that nobody saw."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from proofbook.errors import NoSuchRun
from proofbook.probes.iommu import IommuGroups
from proofbook.probes.kernel_log import KernelLog
from proofbook.reading import Shelf, open_archive
from proofbook.reading.identity import QUESTIONS, Experiment, Experiments, Step, experiments
from proofbook.view import boots_over_time, types_by_boot

NOTEBOOKS = Path(__file__).resolve().parents[2] / "notebooks"


@pytest.fixture(scope="module")
def shelf() -> Shelf:
    return open_archive(NOTEBOOKS / "example-identity.tar.xz")


@pytest.fixture(scope="module")
def tried(shelf: Shelf) -> Experiments:
    return experiments(shelf)


@pytest.fixture(scope="module")
def each(tried: Experiments) -> tuple[Experiment, Experiment, Experiment, Experiment]:
    """Its FSP refused; its link was lost; it never came back; it started."""
    blocked, lost, gone, works = tried
    return blocked, lost, gone, works


def answers(experiment: Experiment, boot: str, question: str) -> list[Step]:
    return [s for s in experiment.steps if (s.boot, s.question) == (boot, question)]


def test_the_example_verifies_and_tells_its_stories(each: tuple[Experiment, ...]) -> None:
    assert [e.record.conclusion_word for e in each] == ["blocked", "inconclusive", "inconclusive", "supported"]
    for experiment in each:
        assert repr(experiment.reading.seal).startswith("Unchanged since it was sealed")


def test_an_archive_without_an_experiment_is_refused() -> None:
    with pytest.raises(NoSuchRun, match="made an identity experiment"):
        experiments(open_archive(NOTEBOOKS / "example-archive.tar.xz"))


def test_an_experiment_is_found_by_the_end_of_its_run(tried: Experiments, each: tuple[Experiment, ...]) -> None:
    assert tried.read(each[3].tail) is each[3]
    for unknown in ("ffffff", ""):
        with pytest.raises(NoSuchRun):
            tried.read(unknown)


def test_the_experiments_that_a_notebook_looks_into_are_chosen_by_what_they_showed(
    tried: Experiments, each: tuple[Experiment, ...]
) -> None:
    assert (tried.blocked, tried.lost_link, tried.unseen) == each[:3]
    works = Experiments([each[3]])
    for none, words in ((works.blocked, "came out blocked"), (works.lost_link, "a link was lost"), (works.unseen, "nobody saw")):
        assert words in repr(none.timeline) and words in none.rule._repr_html_()


def test_each_boot_is_the_one_that_the_run_looked_at(each: tuple[Experiment, ...]) -> None:
    blocked, _, gone, _ = each
    assert list(blocked.boots) == ["before", "boot A", "boot B"] and list(gone.boots) == ["before"]
    assert len({boot.boot_id for boot in blocked.boots.values()}) == 3
    assert {i["identity"]["boot_id"] for i in blocked.record.identities} == {b.boot_id for b in blocked.boots.values()}


def test_every_question_is_answered_by_every_experiment(each: tuple[Experiment, ...]) -> None:
    for experiment in each:
        assert {(s.boot, s.question) for s in experiment.steps} == set(QUESTIONS), experiment.name


def test_the_order_of_boot_a_is_flag_type_driver_error(each: tuple[Experiment, ...]) -> None:
    blocked = each[0]
    (flag,) = answers(blocked, "boot A", "the flag is gone first")
    (loaded,) = answers(blocked, "boot A", "the driver is loaded after that")
    written = answers(blocked, "boot A", "the type is written, and read back")
    refused = answers(blocked, "boot A", "the treated GPUs start")
    assert flag.at_s is not None and loaded.at_s is not None
    times = [s.at_s for s in (*written, *refused) if s.at_s is not None]
    assert len(times) == 4 and flag.at_s < min(times[:2]) <= max(times[:2]) < loaded.at_s < min(times[2:])
    assert "loading out-of-tree module" in loaded.text
    assert [s.about for s in written] == ["0000:01:00.0", "0000:41:00.0"]


def test_the_class_of_the_first_error_tells_a_refusal_from_a_lost_link(each: tuple[Experiment, ...]) -> None:
    blocked, lost, _, works = each
    assert {s.error for s in answers(blocked, "boot A", "the treated GPUs start")} == {"fsp, 0x177"}
    (step,) = answers(lost, "boot A", "the treated GPUs start")
    assert (step.error, step.held) == ("link-lost", False) and "nobody was there to refuse" in step.proves
    (step,) = answers(works, "boot A", "the treated GPUs start")
    assert (step.error, step.held) == ("", True)


def test_types_and_starts_are_those_that_the_run_put_into_its_table(each: tuple[Experiment, ...]) -> None:
    for experiment in each:
        (own,) = [t for t in experiment.record.tables if t["name"] == "boots"]
        told = {line.split("  ")[0]: line for line in repr(experiment.types).splitlines()}
        for pci, role, before, _, in_a, started, _ in own["rows"]:
            assert role in told[pci] and f"{before}, started" in told[pci]
            if in_a:
                assert f"{in_a}, {'started' if started == 'yes' else 'NOT STARTED'}" in told[pci]
            else:
                assert told[pci].count("not seen") == 2


def test_a_boot_that_nobody_saw_proves_nothing(tried: Experiments, each: tuple[Experiment, ...]) -> None:
    gone = each[2]
    unseen = [s for s in gone.steps if s.boot != "before"]
    assert unseen and all((s.held, s.at_s, s.proves) == (None, None, "nothing") for s in unseen)
    told = repr(gone.timeline).splitlines()
    assert sum("the machine did not let us in" in line for line in told) == 2, "one line a boot"
    assert "NOT SEEN: nobody could look" in repr(gone.rule)
    assert f"{gone.name}, 0000:01:00.0 (treated), boot A: not seen" in repr(tried.types)


def test_what_was_written_down_is_older_than_boot_a(each: tuple[Experiment, ...]) -> None:
    told = repr(each[0].written).splitlines()
    assert [line.split("  ")[0] for line in told[2:-1] if not line.startswith(" ")] == [
        "hypothesis",
        "prediction",
        "blocked if",
        "stop rule",
    ]
    assert told[-1].endswith("s before boot A.") and " -" not in told[-1]


def test_the_rule_is_told_as_the_run_concluded(each: tuple[Experiment, ...]) -> None:
    blocked = each[0]
    told = " ".join(repr(blocked.rule).split())
    assert "outcome BLOCKED" in told and "rule, step 4" in told
    for reason in blocked.conclusion["reasons"]:
        assert reason in told
    assert "VBIOS" in told and "one boot" in told


def test_side_by_side_each_answer_has_its_column(tried: Experiments, each: tuple[Experiment, ...]) -> None:
    rows = repr(tried.proofs).splitlines()[2:]
    start = next(line for line in rows if line.startswith("A     ") and "the treated GPUs start" in line)
    answered = [part for part in start.split("  ") if part.strip()][2:]
    assert [a.strip()[:3] for a in answered] == ["NO:", "NO:", "not", "yes"]
    assert "fsp, 0x177" in answered[0] and "link-lost" in answered[1]
    assert len(rows) == len(QUESTIONS)


def test_scopes_tell_machines_apart_that_share_a_name(tried: Experiments, each: tuple[Experiment, ...]) -> None:
    told = repr(tried.scopes)
    assert all(e.record.machine_id[:8] in told for e in each)
    assert len({e.record.machine_id for e in each}) == 4
    assert "driver 595" in told.splitlines()[-1], "what all share is said once"


def test_what_was_not_verified_begins_with_the_run_that_ended_early(tried: Experiments, each: tuple[Experiment, ...]) -> None:
    first = repr(tried.limits).splitlines()[2]
    assert first.startswith("run ended early") and first.endswith(each[2].tail)


def test_the_picture_leaves_out_no_step(each: tuple[Experiment, ...]) -> None:
    for experiment in (each[0], each[2]):
        told = repr(experiment.picture).splitlines()
        assert len(told) == 1 + sum(s.boot != "before" for s in experiment.steps)
        assert experiment.picture.png.startswith(b"\x89PNG")
    assert any("the treated GPUs start: 0000:41:00.0: did not hold at" in line for line in repr(each[0].picture).splitlines())


def test_pictures_of_nothing_say_so() -> None:
    assert boots_over_time([("boot A", [])]).png.startswith(b"\x89PNG")
    assert repr(types_by_boot([])) == "The type of each GPU's iommu group, boot by boot"


# ---------------------------------------------------------------------------------------------- reading answers anew


def test_a_question_that_was_not_asked_is_unknown_and_says_so(each: tuple[Experiment, ...]) -> None:
    reading = each[0].reading
    seen = reading.look([KernelLog()], [])
    assert "the record holds no answer to it" in seen[KernelLog()].unknown


def test_of_several_answers_the_last_counts(each: tuple[Experiment, ...]) -> None:
    blocked = each[0]
    every = blocked.reading.look([IommuGroups()], blocked.record.evidence)
    assert every.value(IommuGroups()).by_device["0000:01:00.0"] == "DMA-FQ", "boot B's is the last"
    boot_a = [e for e in blocked.record.evidence if e["boot_id"] == blocked.boots["boot A"].boot_id]
    assert blocked.reading.look([IommuGroups()], boot_a).value(IommuGroups()).by_device["0000:01:00.0"] == "identity"


def test_a_release_that_asked_for_fewer_files_is_still_read(each: tuple[Experiment, ...]) -> None:
    blocked = each[0]
    cut = [
        {**e, "argv": [*e["argv"][:-1]]} if e["argv"][-1] == "/sys/kernel/iommu_groups/*/devices/*" else e
        for e in blocked.record.evidence
    ]
    assert cut != list(blocked.record.evidence)
    assert blocked.reading.look([IommuGroups()], cut).value(IommuGroups()).on


def test_a_log_that_is_gone_leaves_the_order_open(each: tuple[Experiment, ...], tmp_path: Path) -> None:
    own = tmp_path / "outputs"
    shutil.copytree(each[0].reading.folder.parents[4], own)
    reading = open_archive(own).read(each[0].record.run_id)
    experiment = Experiment(reading)
    for evidence in reading.record.evidence:
        if evidence["boot_id"] == each[0].boots["boot A"].boot_id and evidence["argv"][0] in ("journalctl", "dmesg"):
            log = reading.folder / evidence["stdout_file"]
            if evidence["stdout_file"]:
                log.chmod(0o600)
                log.write_bytes(b"")
    (loaded,) = answers(experiment, "boot A", "the driver is loaded after that")
    assert (loaded.held, loaded.at_s) == (None, None)
    assert all(s.error == "" for s in experiment.steps)
