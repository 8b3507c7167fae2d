"""Records of MTP changes beside one another: only what they hold, with what they do not hold said."""

from __future__ import annotations

import copy
import shutil
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

import pytest

from proofbook.errors import CannotTell, NoSuchRun
from proofbook.probes.journal import JournalEntry
from proofbook.reading import Shelf, open_archive
from proofbook.reading.mtp import LogSizes, Trial, Trials, sizes_of, trials
from proofbook.view import compared_starts

NOTEBOOKS = Path(__file__).resolve().parents[2] / "notebooks"


@pytest.fixture(scope="module")
def shelf() -> Shelf:
    return open_archive(NOTEBOOKS / "example-mtp.tar.xz")


@pytest.fixture(scope="module")
def changes(shelf: Shelf) -> Trials:
    return trials(shelf)


@pytest.fixture(scope="module")
def each(changes: Trials) -> tuple[Trial, Trial, Trial, Trial]:
    """Kept, kept on another release, taken back since no draft was accepted, taken back since it did not come up."""
    kept, other, ineffective, no_memory = changes
    return kept, other, ineffective, no_memory


def test_the_example_verifies_and_tells_its_story(each: tuple[Trial, ...]) -> None:
    assert [(t.release, t.outcome, t.decision["rung"] if t.decision else "") for t in each] == [
        ("0.5.10", "kept", "PASS_WITH_LIMITS"),
        ("0.5.13", "kept", "PASS_WITH_LIMITS"),
        ("0.5.10", "taken back", "FAIL_INEFFECTIVE"),
        ("0.5.10", "taken back", "FAIL_STARTUP"),
    ]
    for trial in each:
        assert repr(trial.reading.seal).startswith("Unchanged since it was sealed")
        assert f"{trial.name}  {trial.record.host}" in repr(Trials([trial]).seals)
    assert "no draft is accepted" in repr(each[2].reading.decisions)


def test_an_archive_without_such_a_change_is_refused() -> None:
    with pytest.raises(NoSuchRun, match="changed a server's speculation"):
        trials(open_archive(NOTEBOOKS / "example-archive.tar.xz"))


def test_a_change_is_found_by_the_end_of_its_run(changes: Trials, each: tuple[Trial, ...]) -> None:
    assert changes.read(each[1].record.run_id[-6:]) is each[1]
    with pytest.raises(NoSuchRun, match="ffffff"):
        changes.read("ffffff")
    with pytest.raises(NoSuchRun):
        changes.read("")


def test_each_start_is_read_once_from_the_longest_look_at_it(each: tuple[Trial, ...]) -> None:
    kept, _, _, no_memory = each
    assert [(s.speculative, s.came_up) for s in kept.starts] == [(False, True), (True, True)]
    assert [(s.speculative, s.came_up) for s in no_memory.starts] == [(False, True), (True, False)]
    looks = [e["stdout_bytes"] for e in kept.reading.asked_by("journal.UnitJournal")]
    assert len(looks) > len(kept.starts)
    assert kept.after is not None and kept.after.story.start is not None
    assert "decode" in kept.after.story.start.milestones, "the first look came before the first answer"


def test_gains_are_those_of_the_runs_and_a_missing_one_says_why(changes: Trials, each: tuple[Trial, ...]) -> None:
    gain = each[0].value("serving.Gain")
    assert gain is not None and each[2].value("serving.Gain") is None
    told = repr(changes.levels)
    for level in gain["levels"]:
        assert f"{level['speedup']['low']:.2f}x to {level['speedup']['high']:.2f}x" in told
    without = told.splitlines()[-1]
    assert f"{each[2].name}: an earlier question was answered with no" in without
    picture = changes.gains
    assert picture.png.startswith(b"\x89PNG")
    assert f"{each[0].name}, concurrency 1: gain" in repr(picture) and f"{each[3].name}: not measured" in repr(picture)


def test_kinds_stand_in_the_order_of_their_gain(changes: Trials, each: tuple[Trial, ...]) -> None:
    gain = each[0].value("serving.Gain")
    assert gain is not None
    kinds = gain["levels"][0]["by_kind"]
    head = repr(changes.kinds).splitlines()[0].split()
    assert head[-len(kinds) :] == sorted(kinds, key=lambda kind: -kinds[kind])


def test_an_unfair_comparison_is_called_so(changes: Trials) -> None:
    assert "mamba_strategy" in repr(changes.fairness)


def test_accept_lengths_show_the_draft_that_accepts_nothing(changes: Trials, each: tuple[Trial, ...]) -> None:
    told = repr(changes.accepts).splitlines()
    broken = [line for line in told if line.startswith(each[2].name)]
    assert broken and all(line.endswith(": 1.00") for line in broken)
    assert not [line for line in told if line.startswith(each[3].name)], "it never came up, so it was never asked"


def test_starts_side_by_side_name_the_one_that_never_became_ready(changes: Trials, each: tuple[Trial, ...]) -> None:
    told = repr(changes.starts)
    assert f"{each[3].name}: never became ready, Weights" in told
    assert f"{each[3].name}: never became ready, Ready" not in told
    assert told.splitlines()[1].startswith("before: SGLang 0.5.10")


def test_a_run_that_had_nothing_to_do_took_nothing_back(each: tuple[Trial, ...]) -> None:
    ended = each[2]
    plans = [{**p, "acts": [], "applied": {"outcome": "nothing-to-do", "summary": "", "facts": {}}} for p in ended.record.plans]
    reading = copy.copy(ended.reading)
    reading.record = replace(ended.record, plans=[{**p, "settings": {}} for p in plans])
    idle = Trial(reading)
    assert (ended.outcome, idle.outcome) == ("taken back", "nothing changed")
    assert idle.name == f"a release that was not told, nothing changed ({ended.record.run_id[-6:]})"
    assert "nothing changed" not in repr(Trials([ended]).decided)
    assert "  nothing changed  " in repr(Trials([idle]).decided), "the rung alone would read as a change that was undone"


def test_the_changes_that_a_notebook_looks_into_are_chosen_by_what_became_of_them(
    changes: Trials, each: tuple[Trial, ...]
) -> None:
    assert (changes.kept, changes.not_up) == (each[0], each[3])
    assert repr(each[3].why_not_up) == repr(each[3].reading.evidence("sglang-raise-mem-fraction"))
    alone = Trials([each[2]])
    assert repr(alone.kept.memory.chart((0.7,), ("0.5.9",))).startswith("There is no change that was kept")
    assert "never became ready" in repr(alone.not_up.reading.decisions)
    assert "no line that says why" in repr(each[0].why_not_up)


def test_what_comes_days_after_ready_does_not_stretch_the_start() -> None:
    steps = [
        {"key": "weights", "title": "Weights", "from_s": 2.0, "to_s": 60.0, "detail": ""},
        {"key": "ready", "title": "Ready", "from_s": 80.0, "to_s": None, "detail": ""},
        {"key": "prefill", "title": "First prefill", "from_s": 90.0, "to_s": None, "detail": ""},
    ]
    idle = [*steps[:2], {**steps[2], "from_s": 803501.0}]
    told = repr(compared_starts([("quick", steps), ("idle", idle)])).splitlines()
    assert "quick, First prefill: 90 to 90 s" in told
    assert "idle, First prefill: 803501 to 803501 s, long after it was ready: not drawn to scale" in told
    never = [steps[0], {**steps[2], "from_s": 803501.0}]
    assert "not drawn" not in repr(compared_starts([("never ready", never)])), "without a ready there is no edge"


def test_what_was_not_verified_comes_before_what_it_holds_for(changes: Trials) -> None:
    rows = [line for line in repr(changes.limits).splitlines()[2:] if not line.startswith(" ")]
    kinds = [line.split("  ")[0] for line in rows]
    assert kinds[0] == "could not tell" and kinds[-1] == "holds for"
    assert "limit" in kinds and "not verified" in kinds
    once = [line for line in rows if "the first configuration was not" in line]
    assert len(once) == 1, "record and decision say it both"


# ---------------------------------------------------------------------------------------------------- memory


def test_the_arithmetic_is_held_against_what_the_log_said(each: tuple[Trial, ...]) -> None:
    rows = {what: (predicted, said, off) for what, predicted, said, off in each[0].memory.against_log()}
    assert rows["requests at once"][1] == "31" and rows["does it come up?"][:2] == ("yes", "yes")
    assert all(abs(float(off)) <= 1 for _, said, off in rows.values() if off and said != "not said")


def test_a_start_that_died_keeps_its_prediction_and_the_number_that_was_wrong(each: tuple[Trial, ...]) -> None:
    rows = {what: (predicted, said, off) for what, predicted, said, off in each[3].memory.against_log()}
    assert rows["does it come up?"][:2] == ("yes", "no")
    assert float(rows["weights of the model, GiB"][2]) > 5
    assert rows["requests at once"][1:] == ("not said", "")


def test_what_decides_the_memory_is_that_of_the_new_start(each: tuple[Trial, ...]) -> None:
    told = [line.split("  ")[0] + ":" + line.split()[-1] for line in repr(each[1].memory.asked).splitlines()]
    assert {"release:0.5.13", "--mem-fraction-static:0.85", "draft tokens of a verify step:6"} <= set(told)


def test_gb_and_gib_stand_beside_one_another(each: tuple[Trial, ...]) -> None:
    told = repr(each[0].memory.units)
    whole = next(line for line in told.splitlines() if line.startswith("the checkpoint  "))
    assert whole.split()[2:5] == ["244220000000", "244.2", "227.4"]
    assert "58.1 GB" in told and "means GiB" in told


def test_what_fits_depends_on_fraction_release_and_wish(each: tuple[Trial, ...]) -> None:
    memory = each[0].memory
    told = repr(memory.fits((0.70, 0.85), ("0.5.10", "0.5.13"), (None, 8)))
    assert told.count("does not fit") == 1
    assert "31 · 550 k" in told and "26 · 1038 k" in told
    picture = memory.chart((0.70, 0.85), ("0.5.10", "0.5.13"))
    assert "SGLang 0.5.10, fraction 0.7: does not fit" in repr(picture) and picture.png.startswith(b"\x89PNG")
    with pytest.raises(TypeError, match="frction"):
        memory.budget(frction=0.7)


def test_a_record_without_the_log_of_before_cannot_tell(each: tuple[Trial, ...], tmp_path: Path) -> None:
    own = tmp_path / "outputs"
    shutil.copytree(each[0].reading.folder.parents[4], own)
    copy = Trial(open_archive(own).read(each[0].record.run_id))
    first = copy.reading.asked_by("journal.UnitJournal")[0]
    log = copy.reading.folder / first["stdout_file"]
    log.chmod(0o600)
    log.write_bytes(b"".join(line for line in log.read_bytes().splitlines(True) if b"Load weight" not in line))
    with pytest.raises(CannotTell, match="how much was free"):
        copy.memory.budget()


def entries(*lines: str) -> list[JournalEntry]:
    return [JournalEntry(datetime(2026, 3, 9, 16, tzinfo=UTC), None, 6, line) for line in lines]


def test_of_several_ranks_the_one_with_least_room_counts() -> None:
    said = sizes_of(
        entries(
            "[2026-03-09 16:00:04 TP0] Load weight begin. avail mem=94.12 GB",
            "[2026-03-09 16:01:02 TP0] Load weight end. type=Qwen3_5MoeForConditionalGeneration, mem usage=57.40 GB.",
            "[2026-03-09 16:01:02 TP1] Load weight end. type=Qwen3_5MoeForConditionalGeneration, mem usage=57.90 GB.",
            "[2026-03-09 16:01:08 TP0] Mamba Cache is allocated. max_mamba_cache_size: 33, conv_state size: 0.01GB, "
            "ssm_state size: 1.18GB intermediate_ssm_state_cache size: 10.13GB intermediate_conv_window_cache size: 0.18GB",
            "[2026-03-09 16:01:09 TP0] KV Cache is allocated. #tokens: 116224, K size: 0.66 GB, V size: 0.66 GB",
            "[2026-03-09 16:01:30 TP0] Load weight end. type=Qwen3_5ForCausalLMMTP, mem usage=1.91 GB.",
            "[2026-03-09 16:01:31 TP0] KV Cache is allocated. #tokens: 116224, K size: 0.06 GB, V size: 0.06 GB",
            "[2026-03-09 16:02:20 TP1] max_total_num_tokens=116000, chunked_prefill_size=8192, max_running_requests=8, "
            "context_len=262144, available_gpu_mem=12.30 GB",
        )
    )
    assert (said.free, said.weights, said.draft, said.slots, said.tokens) == (94.12, 57.9, 1.91, 33, 116000)
    assert (said.running, said.left) == (8, 12.3)
    assert said.reserved == pytest.approx(10.31) and said.kv == pytest.approx(1.32)


def test_what_a_log_does_not_say_stays_unsaid() -> None:
    assert sizes_of(entries("Uvicorn running on http://0.0.0.0:30000")) == LogSizes()
    cut = entries("[TP0] KV Cache is allocated. #tokens: 1024, K size: 0.01 GB, V size: 0.01 GB")
    assert (sizes_of(cut).tokens, sizes_of(cut).running, sizes_of(cut).draft) == (1024, None, None)
