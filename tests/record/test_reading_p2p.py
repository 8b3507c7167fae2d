"""Records of the pair matrix beside one another: what they hold, whose faults, and what they cannot show."""

from __future__ import annotations

import copy
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from proofbook.errors import CannotTell, NoSuchRun
from proofbook.reading import Shelf, open_archive
from proofbook.reading.p2p import Matrices, PairRun, matrices
from proofbook.view import faults_over_time, pair_figures_chart, pairs_over_runs

NOTEBOOKS = Path(__file__).resolve().parents[2] / "notebooks"


@pytest.fixture(scope="module")
def shelf() -> Shelf:
    return open_archive(NOTEBOOKS / "example-p2p.tar.xz")


@pytest.fixture(scope="module")
def runs(shelf: Shelf) -> Matrices:
    return matrices(shelf)


@pytest.fixture(scope="module")
def each(runs: Matrices) -> tuple[PairRun, ...]:
    """All right; five pairs fault; a card faults; no IOMMU; a GPU wedges; another driver and an impossible figure."""
    return tuple(runs)


def lines(shown: object) -> list[str]:
    return repr(shown).splitlines()


def test_the_example_verifies_and_is_of_one_machine(each: tuple[PairRun, ...]) -> None:
    assert [r.record.conclusion_word for r in each] == [
        "supported",
        "refuted",
        "supported",
        "supported",
        "refuted",
        "inconclusive",
    ]
    assert len({r.record.machine_id for r in each}) == 1
    for run in each:
        assert repr(run.reading.seal).startswith("Unchanged since it was sealed")


def test_an_archive_without_a_pair_is_refused() -> None:
    with pytest.raises(NoSuchRun, match="tested a pair"):
        matrices(open_archive(NOTEBOOKS / "example-archive.tar.xz"))


def test_the_runs_that_a_notebook_looks_into_are_chosen_by_what_is_in_them(runs: Matrices, each: tuple[PairRun, ...]) -> None:
    assert (runs.faulty, runs.with_foreign, runs.latest) == (each[1], each[2], each[5])
    assert repr(runs.latest_against_first) == repr(runs.against(each[5].tail, each[0].tail))
    clean = Matrices([each[0]])
    assert repr(clean.faulty.timeline).startswith("There is no run with faults of a pair")
    assert "another device" in repr(clean.with_foreign.others)
    assert "one run of its machine alone" in repr(clean.latest_against_first)


def test_a_run_is_found_by_the_end_of_its_id(runs: Matrices, each: tuple[PairRun, ...]) -> None:
    assert runs.read(each[2].tail) is each[2]
    for unknown in ("ffffff", ""):
        with pytest.raises(NoSuchRun):
            runs.read(unknown)


def test_what_differs_between_the_runs_stands_apart_from_what_does_not(runs: Matrices) -> None:
    told = lines(runs.conditions)
    rows = {line.split("  ")[0]: line for line in told[2:-1]}
    assert {"driver", "IOMMU", "kernel command line", "boot"} <= rows.keys() and "kernel" not in rows
    assert rows["driver"].split()[1:] == ["595.58.03"] * 5 + ["595.45.04"]
    assert "amd_iommu=off iommu=off" in rows["kernel command line"] and "root=" not in rows["kernel command line"]
    assert "DmaRemapPeerMmio: 1" in told[-1] and "machine-id" in told[-1]


# ------------------------------------------------------------------------------------------------------ changes


def test_changes_name_the_pairs_the_paths_and_what_else_differs(runs: Matrices, each: tuple[PairRun, ...]) -> None:
    told = " ".join(" ".join(lines(runs.changes)).split())
    assert f"{each[1].tail} {each[0].tail} nothing that is recorded" in told
    against = " ".join(" ".join(lines(runs.against(each[5].tail, each[0].tail))).split())
    assert "driver: 595.58.03" in against and "then, 595.45.04 now" in against and "verified then, invalid now" in against
    assert "(188%)" in against, "a figure that changed is a change too"


def test_a_log_that_became_worthless_is_a_change_although_no_state_is(runs: Matrices, each: tuple[PairRun, ...]) -> None:
    told = lines(runs.against(each[3].tail, each[2].tail))
    assert any("all 12" in line and "a clean log proves nothing now" in line for line in told)
    assert not any("verified then" in line for line in told)


def test_a_run_against_itself_has_changed_in_nothing(runs: Matrices, each: tuple[PairRun, ...]) -> None:
    told = repr(runs.against(each[0].tail, each[0].tail))
    assert "every pair as before" in told and "nothing that is recorded" in told


def test_pairs_that_only_one_run_tested_are_named(runs: Matrices, each: tuple[PairRun, ...]) -> None:
    fewer = copy.copy(each[1])
    fewer.cells = {pair: cell for pair, cell in each[1].cells.items() if pair != ("0000:01:00.0", "0000:41:00.0")}
    both = Matrices([each[0], fewer])
    assert any("not tested now" in line for line in lines(both.against(fewer.tail, each[0].tail)))
    assert any("tested now, not there then" in line for line in lines(both.against(each[0].tail, fewer.tail)))


def test_only_runs_of_one_machine_follow_each_other(each: tuple[PairRun, ...]) -> None:
    stranger = PairRun(each[5].reading)
    first = stranger.record.identities[0]
    elsewhere = {**first, "identity": {**first["identity"], "machine_id": "f" * 32}}
    stranger.record = replace(stranger.record, identities=(elsewhere,))
    told = lines(Matrices([each[0], stranger]).changes)
    assert stranger.name in told[-1] and each[0].name in told[-1], "neither has anything before it"
    assert f"{stranger.tail} has no good run before it" in lines(Matrices([each[0], stranger]).since_good)[-1]


# ------------------------------------------------------------------------------------------------------- faults


def test_faults_are_attributed_as_the_run_itself_did(each: tuple[PairRun, ...]) -> None:
    for run in each:
        said = {pair: cell["faults"] for pair, cell in run.cells.items() if cell["faults"]}
        read: dict[tuple[str, str], list[str]] = {}
        for fault in run.faults:
            if len(fault.pairs) == 1:
                read.setdefault(fault.pairs[0], []).append(fault.told)
        assert read == said, run.name


def test_printed_and_suppressed_lines_are_counted_apart_and_none_twice(each: tuple[PairRun, ...]) -> None:
    faulty = each[1]
    windows = faulty.probe.windows
    printed = sum(not line.suppressed for line in faulty.lines)
    notes = sum("callbacks suppressed" in line.text for window in windows for line in window.lines)
    assert printed + notes == sum(len(window.lines) for window in windows), "every line of these windows is a fault's"
    row = next(line for line in lines(faulty.by_pair) if line.startswith("0000:01:00.0 to 0000:81:00.0"))
    assert "20       526332      526352" in row
    assert "lower bound" in lines(faulty.by_pair)[-1]


def test_who_asked_is_the_requester_and_a_read_is_the_peers(each: tuple[PairRun, ...]) -> None:
    told = " ".join(" ".join(lines(each[1].by_pair)).split())
    assert "0000:01:00.0 wrote to 0000:81:00.0: 10" in told
    assert "read from 0000:01:00.0: 10" in told
    assert "all pairs at once" in told and "pairs told apart by who asked" in told


def test_faults_by_group_name_the_devices_that_asked(each: tuple[PairRun, ...]) -> None:
    rows = [line for line in lines(each[1].by_group) if "DMA-FQ" in line]
    assert [line.split()[2:4] for line in rows] == [
        ["0000:01:00.0", "60"],
        ["0000:41:00.0", "40"],
        ["0000:81:00.0", "40"],
        ["0000:c1:00.0", "60"],
    ]
    assert "there is no group" in repr(each[3].by_group)


def test_another_devices_fault_is_no_pairs_and_stays_visible(each: tuple[PairRun, ...]) -> None:
    run = each[2]
    assert run.faults == () and "No fault of a pair" in repr(run.by_pair)
    (fault,) = run.foreign
    assert fault.device == "0000:22:00.0"
    told = " ".join(" ".join(lines(run.others)).split())
    assert "0000:41:00.0 to 0000:01:00.0" in told and "is in no pair of this window" in told
    assert "26     DMA-FQ  0000:22:00.0  1        none: no GPU is in it" in repr(run.by_group)
    assert "other: 0000:22:00.0: 1 other, while 0000:41:00.0 to 0000:01:00.0 was active" in repr(run.timeline)


def test_the_timeline_keeps_marks_in_their_windows(each: tuple[PairRun, ...]) -> None:
    told = lines(each[1].timeline)
    assert "0000:01:00.0 to 0000:81:00.0: 20 pair, 2 suppressed (526332 lines not printed)" in told
    assert not any(line.startswith("0000:01:00.0 to 0000:41:00.0") for line in told)
    assert each[1].timeline.png.startswith(b"\x89PNG")
    assert "no line of a fault" in repr(each[0].timeline)


def test_a_record_without_the_probes_words_cannot_tell(each: tuple[PairRun, ...], tmp_path: Path) -> None:
    own = tmp_path / "outputs"
    shutil.copytree(each[0].reading.folder.parents[4], own)
    run = PairRun(open_archive(own).read(each[0].tail))
    run.measured = {**run.measured, "evidence": []}
    with pytest.raises(CannotTell, match="what the probe said"):
        run.timeline  # noqa: B018


# -------------------------------------------------------------------------------------------------------- speed


def test_speed_is_held_against_its_class_and_its_last_good_run(runs: Matrices, each: tuple[PairRun, ...]) -> None:
    impossible = each[5]
    medians = impossible.class_medians
    assert 50 < medians["cross socket"] < 51 < 55 < medians["same NUMA node"] < 56, "a figure that cannot be true is in no median"
    first = lines(impossible.speeds)[2]
    assert first.startswith("0000:01:00.0 to 0000:41:00.0") and first.endswith("cannot be true")
    told = lines(runs.since_good)
    assert any(impossible.tail in line and "188%" in line and each[1].tail in line for line in told), (
        "the run before it that was good"
    )
    assert f"{each[0].tail} has no good run before it" in told[-1] and f"{each[4].tail} timed nothing" in told[-1]
    assert "the link carries 63 GB/s" in repr(runs.figures)


def test_a_pair_that_lost_its_data_is_no_good_figure(each: tuple[PairRun, ...]) -> None:
    pair = ("0000:01:00.0", "0000:81:00.0")
    assert (pair, "ce-push") in each[0].figures and (pair, "ce-push") not in each[1].figures


# ------------------------------------------------------------------------------------------------ what is not shown


def test_what_cannot_be_shown_comes_in_the_order_of_its_weight(runs: Matrices, each: tuple[PairRun, ...]) -> None:
    rows = [line for line in lines(runs.blind)[2:] if not line.startswith(" ")]
    kinds = list(dict.fromkeys(line.split("  ")[0] for line in rows))
    assert kinds == ["no fault could be logged", "not run", "not timed", "not checked", "limit"]
    silent, not_run = rows[0], rows[1]
    assert silent.endswith(each[3].tail) and not_run.endswith(each[4].tail)
    assert "0000:81:00.0 to 0000:41:00.0" in not_run


def test_the_picture_marks_pairs_whose_silence_proves_nothing(runs: Matrices, each: tuple[PairRun, ...]) -> None:
    told = lines(runs.pairs)
    assert any(each[3].name in line and "a clean log proves nothing" in line for line in told)
    assert not any(each[0].name in line and "proves nothing" in line for line in told)
    assert any(each[4].name in line and line.endswith("8 verified, 3 not run, 1 hung") for line in told)
    assert runs.pairs.png.startswith(b"\x89PNG")


def test_pictures_of_nothing_say_so() -> None:
    assert repr(pairs_over_runs([])) == "What was shown of each pair, run by run"
    assert "no line of a fault" in repr(faults_over_time([], []))
    assert pair_figures_chart([]).png.startswith(b"\x89PNG")
