"""guard.sh on a root folder with a systemctl of its own: what it does, refuses, and survives. A real systemd: tests/real."""

from __future__ import annotations

import hashlib
import shutil
import subprocess
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

import pytest

from proofbook.changes.guard import FileChange, Guard, GuardStatus
from proofbook.errors import CannotTell
from proofbook.model import Result
from proofbook.remote.guard import GUARD, guard_command, parse_guard, stage_request

from .change_lab import Root

RUN = "20260408T150412Z-3f2a"
UNIT = "sglang-qwen.service"
OLD = b"[Service]\nExecStart=/opt/sglang/bin/python -m sglang.launch_server --tp 2\n"
NEW = OLD.replace(b"--tp 2", b"--tp 2 --speculative-algorithm NEXTN") + b"# \x00\xff without a last newline"
SHELLS = [["dash"], ["bash", "--posix"], ["busybox", "sh"]]


def digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


class Change:
    """A unit file that is edited, a drop-in that is new and needs its folder, and a file that goes."""

    def __init__(self, root: Root) -> None:
        self.root, self.guard = root, Guard(RUN, UNIT)
        self.unit = root.etc / UNIT
        self.drop_in = root.etc / f"{UNIT}.d" / "50 mtp.conf"
        self.gone = root.root / "etc" / "a file with blanks "
        self.unit.write_bytes(OLD)
        self.unit.chmod(0o640)
        self.gone.write_bytes(b"old\n")
        root.active(UNIT, "active")
        self.files = (
            FileChange(str(self.unit), digest(OLD), NEW, 0o644),
            FileChange(str(self.drop_in), None, b"[Service]\nEnvironment=A=1\n"),
            FileChange(str(self.gone), digest(b"old\n"), None),
        )

    def do(self, verb: str, *words: int) -> GuardStatus:
        """A verb that must do its part."""
        asked = self.guard.stage(self.files) if verb == "stage" else getattr(self.guard, verb)(*words)
        return self.guard.done(self.root.run(asked))

    def refused(self, verb: str, *words: int) -> GuardStatus:
        asked = self.guard.stage(self.files) if verb == "stage" else getattr(self.guard, verb)(*words)
        status = parse_guard(self.root.run(asked))
        assert status.code, f"{verb} was not refused: {status}"
        assert status.refused
        return status

    def until(self, verb: str) -> GuardStatus:
        """All verbs up to and with ``verb``."""
        status = self.do("stage")
        if verb != "stage":
            status = self.do("arm", 600)
        return self.do("install") if verb == "install" else status

    def is_now(self) -> str:
        """ "old" or "new" when every file is, byte for byte and with nothing beside it; "between" otherwise."""
        there = {p.relative_to(self.root.etc).as_posix() for p in self.root.etc.rglob("*") if "proofbook" not in p.name}
        there -= {"timers.target.wants"}
        beside = list((self.root.root / "etc").rglob(".proofbook*"))
        if (
            self.unit.read_bytes() == OLD
            and self.gone.exists()
            and self.gone.read_bytes() == b"old\n"
            and not self.drop_in.exists()
        ):
            return "old" if there == {UNIT} and self.unit.stat().st_mode & 0o777 == 0o640 and not beside else "between"
        if self.unit.read_bytes() == NEW and self.drop_in.exists() and not self.gone.exists():
            return "new"
        return "between"

    def units(self) -> list[str]:
        return sorted(p.name for p in self.root.etc.rglob("proofbook-guard*"))


@pytest.fixture
def change(tmp_path: Path) -> Change:
    return Change(Root(tmp_path))


@pytest.fixture(params=SHELLS, ids=lambda argv: argv[0])
def in_each_shell(request: pytest.FixtureRequest, tmp_path: Path) -> Change:
    shell: list[str] = request.param
    if shutil.which(shell[0]) is None:
        pytest.skip(f"{shell[0]} is not installed")
    return Change(Root(tmp_path, shell))


# ------------------------------------------------------------------------------------------------- the way through


def test_a_change_that_is_confirmed(in_each_shell: Change) -> None:
    change = in_each_shell
    assert change.do("status").state == "none"
    staged = change.do("stage")
    assert (staged.state, staged.was_active, staged.all_old, change.is_now()) == ("staged", True, True, "old")
    armed = change.do("arm", 600)
    assert armed.guarded
    assert armed.left_s == 600
    installed = change.do("install")
    assert (installed.all_new, installed.touched, change.is_now()) == (True, True, "new")
    assert change.unit.stat().st_mode & 0o777 == 0o644
    done = change.do("confirm")
    assert (done.state, done.outcome, change.is_now(), change.units()) == ("none", "confirmed", "new", [])
    assert change.do("confirm").outcome == "confirmed"  # again, by one who did not hear the answer
    assert not list(change.root.proofbook.glob("changes/*"))
    assert not list((change.root.root / "etc").rglob(".proofbook*"))


def test_a_change_that_is_taken_back(in_each_shell: Change) -> None:
    change = in_each_shell
    change.until("install")
    change.root.calls()
    fired = change.do("fire")
    assert (fired.state, fired.all_old, change.is_now(), change.units()) == ("fired", True, "old", [])
    calls = change.root.calls()
    order = [calls.index("daemon-reload"), calls.index(f"reset-failed -- {UNIT}"), calls.index(f"restart -- {UNIT}")]
    assert order == sorted(order), "systemd reads the old unit before it starts it, and forgets the crash loop of the new one"
    change.do("fire")
    assert f"restart -- {UNIT}" not in change.root.calls(), "taking back twice starts the unit once"
    assert change.refused("confirm").code == 77
    assert change.do("clean").outcome == "fired"
    assert not list(change.root.proofbook.glob("changes/*"))


def test_every_step_may_be_repeated(change: Change) -> None:
    for verb, words in [("stage", ()), ("arm", (600,)), ("install", ())]:
        first = change.do(verb, *words)
        assert change.do(verb, *words).files == first.files
    assert change.do("stage").all_new, "staging again what is installed changes nothing"
    assert change.do("arm", 900).left_s == 900
    assert change.do("extend", 300).left_s == 300


def test_a_change_that_is_suspended_for_a_while(in_each_shell: Change) -> None:
    change = in_each_shell
    assert change.refused("suspend").code == 77
    change.until("arm")
    assert change.refused("suspend").code == 77, "nothing of it is in place yet"
    change.do("install")
    change.root.calls()
    suspended = change.do("suspend")
    assert (suspended.state, suspended.all_old, suspended.touched, change.is_now()) == ("armed", True, True, "old")
    assert suspended.guarded, "whatever happens now, the machine ends with the old files"
    assert not change.drop_in.parent.exists(), "the folder that the change made is gone too"
    assert [c for c in change.root.calls() if "show" not in c and "is-" not in c] == ["daemon-reload"]
    assert change.do("suspend").all_old, "it may be repeated"
    assert change.refused("confirm").code == 76, "what is not in place is not kept"
    assert (change.do("install").all_new, change.is_now()) == (True, "new")
    assert change.do("confirm").outcome == "confirmed"
    assert (change.is_now(), change.units()) == ("new", [])
    assert not list((change.root.root / "etc").rglob(".proofbook*"))


def test_the_time_runs_out_while_a_change_is_suspended(change: Change) -> None:
    change.until("install")
    change.do("suspend")
    change.root.uptime(1600)
    assert change.refused("suspend").code == 77
    change.root.calls()
    change.root.due(RUN)
    assert (change.do("status").state, change.is_now(), change.units()) == ("fired", "old", [])
    assert f"restart -- {UNIT}" in change.root.calls(), "the unit may still have run with the new files"


def test_what_somebody_else_wrote_is_not_suspended(change: Change) -> None:
    change.until("install")
    change.unit.write_bytes(b"mine\n")
    assert change.refused("suspend").code == 76
    assert (change.unit.read_bytes(), change.drop_in.exists()) == (b"mine\n", True)


def test_a_unit_that_did_not_run_is_left_stopped(change: Change) -> None:
    change.root.active(UNIT, "failed")
    change.until("install")
    change.root.active(UNIT, "active")
    assert not change.do("fire").was_active
    assert change.root.is_active(UNIT) == "inactive"


def test_a_crash_looping_unit_counts_as_running(change: Change) -> None:
    change.root.active(UNIT, "activating")
    assert change.do("stage").was_active


def test_what_was_never_installed_restarts_nothing(change: Change) -> None:
    change.until("arm")
    change.root.calls()
    assert change.do("fire").state == "fired"
    assert f"restart -- {UNIT}" not in change.root.calls()
    assert change.is_now() == "old"


def test_without_a_unit(change: Change) -> None:
    change.guard = Guard(RUN, "")
    change.until("install")
    change.root.calls()
    assert change.do("fire").unit == ""
    assert not [c for c in change.root.calls() if c.startswith(("restart", "stop -- "))]
    assert change.is_now() == "old"


# ------------------------------------------------------------------------------------------------------- refusals


@pytest.mark.parametrize("how", ["edited", "gone", "appeared", "link", "folder", "parent"])
def test_a_file_that_is_not_as_planned(change: Change, how: str) -> None:
    if how == "edited":
        change.unit.write_bytes(OLD + b"\n")
    elif how == "gone":
        change.gone.unlink()
    elif how == "appeared":
        change.drop_in.parent.mkdir()
        change.drop_in.write_text("")
    elif how == "link":
        real = change.root.root / "opt.service"
        change.unit.rename(real)
        change.unit.symlink_to(real)
    elif how == "folder":
        change.gone.unlink()
        change.gone.mkdir()
    else:
        change.drop_in.parent.write_text("a file where a folder should be")
    before = {p: p.read_bytes() for p in change.root.etc.rglob("*") if p.is_file()}
    status = change.refused("stage")
    assert status.code == 76
    assert status.state == "none"
    assert {p: p.read_bytes() for p in change.root.etc.rglob("*") if p.is_file()} == before
    if how == "link":
        assert str(change.root.root / "opt.service") in status.refused, "it says which file to name"
    assert change.refused("arm", 60).code == 77


def test_nothing_is_installed_without_a_guard(change: Change) -> None:
    change.do("stage")
    assert change.refused("install").code == 77
    change.do("arm", 600)
    change.root.active(change.guard.timer, "inactive")  # somebody stopped it
    assert change.refused("install").code == 77
    assert change.is_now() == "old"


def test_nothing_is_installed_when_the_time_is_up(change: Change) -> None:
    change.until("arm")
    change.root.uptime(1600)
    for verb, words in [("install", ()), ("extend", (60,)), ("arm", (60,))]:
        assert change.refused(verb, *words).code == 77
    assert change.is_now() == "old"


def test_an_edit_between_arming_and_installing_is_not_overwritten(change: Change) -> None:
    change.until("arm")
    change.gone.write_bytes(b"mine\n")
    assert change.refused("install").code == 76
    assert (change.unit.read_bytes(), change.gone.read_bytes()) == (OLD, b"mine\n")


def test_what_is_no_longer_as_installed_is_not_confirmed(change: Change) -> None:
    change.until("install")
    change.unit.write_bytes(b"mine\n")
    assert change.refused("confirm").code == 76
    fired = change.do("fire")
    assert (change.is_now(), fired.state) == ("old", "fired")
    (kept,) = (change.root.proofbook / "changes" / RUN).glob("other.1.*")
    assert kept.read_bytes() == b"mine\n", "what somebody wrote in between may be the only copy"


def test_a_file_belongs_to_one_change(change: Change) -> None:
    change.until("arm")
    mine, change.guard = change.guard, Guard("another-run", UNIT)
    assert change.refused("stage").code == 77
    change.guard = mine
    change.do("fire")
    change.guard = Guard("another-run", UNIT)
    assert change.do("stage").state == "staged"


def test_a_guard_that_systemd_does_not_take(change: Change) -> None:
    change.do("stage")
    (change.root.fake / "deaf").touch()
    assert change.refused("arm", 600).code == 69
    assert change.refused("install").code == 77
    (change.root.fake / "deaf").unlink()
    assert change.do("arm", 600).guarded


def test_a_request_that_came_damaged(change: Change) -> None:
    whole = stage_request(change.files)
    lines = whole.splitlines(keepends=True)
    for request in (
        b"",
        b"".join(lines[:-1]),
        whole[: len(whole) // 2],
        b"".join([*lines[:3], b"QUJD\n", *lines[4:]]),
        b"".join([*lines[:5], *lines[6:]]),
    ):
        status = parse_guard(change.root.run(replace(change.guard.stage(change.files), stdin=request)))
        assert status.code == 65, request
        assert status.state == "none"


def test_words_that_are_none(change: Change) -> None:
    for words in [("arm", RUN), ("arm", RUN, "x"), ("arm", RUN, "12345678"), ("dance", RUN), ("stage", RUN)]:
        result = change.root.run(guard_command(*words))
        assert result.exit_status == 64, words
    for bad in ("../../etc", "a b", "", "-x", "a/b"):
        with pytest.raises(ValueError, match="not an id"):
            Guard(bad, UNIT)
        argv = ["dash", "-c", GUARD, "proofbook-guard", "clean", bad]
        assert subprocess.run(argv, env=change.root.environment, capture_output=True, check=False).returncode == 64
    for path in ("relative", "/a/../b", "/a/./b", "/a//b", "/a\nb", "/a/"):
        with pytest.raises(ValueError, match="path"):
            FileChange(path, None, b"")
    for files in ((), (change.files[0], change.files[0])):
        with pytest.raises(ValueError, match="each of them once"):
            stage_request(files)


# -------------------------------------------------------------------------------------------------- when it is due


def test_the_guard_fires_when_its_time_is_up_and_not_before(in_each_shell: Change) -> None:
    change = in_each_shell
    change.until("install")
    change.root.uptime(1590)
    change.root.due(RUN)
    assert change.is_now() == "new"
    change.root.uptime(1600)
    change.root.due(RUN)
    assert (change.is_now(), change.units()) == ("old", [])
    assert change.do("status").outcome == "fired"


def test_a_guard_of_files_that_only_a_boot_undoes_reboots_when_its_time_is_up(in_each_shell: Change) -> None:
    change = in_each_shell
    change.guard = Guard(RUN, "reboot.target")
    change.until("install")
    change.root.uptime(1599)
    change.root.due(RUN)
    assert "reboot" not in change.root.calls()
    change.root.boot("22222222-2222-2222-2222-222222222222", uptime=30.0)
    change.root.wall(601)
    change.root.due(RUN)
    assert (change.is_now(), change.units()) == ("old", [])
    said = change.root.calls()
    assert said.count("reboot") == 1 and said[-1] == "reboot", "after everything else: it may be the last thing that is done"
    change.root.due(RUN)
    assert "reboot" not in change.root.calls()
    assert change.do("status").outcome == "fired"


def test_who_takes_such_files_back_by_hand_sees_to_the_reboot_himself(change: Change) -> None:
    change.guard = Guard(RUN, "reboot.target")
    change.until("install")
    change.root.calls()
    assert change.do("fire").state == "fired"
    said = change.root.calls()
    assert change.is_now() == "old"
    assert not [call for call in said if "reboot" in call.split() or call.startswith(("restart", "start", "stop reboot"))]


@pytest.mark.parametrize("shift_s", [-7200, 7200])
def test_a_step_of_the_clock_neither_hurries_nor_delays_it(change: Change, shift_s: int) -> None:
    change.until("install")
    change.root.wall(shift_s)
    change.root.uptime(1500)
    change.root.due(RUN)
    assert change.is_now() == "new"
    assert change.do("status").left_s == 100
    change.root.uptime(1601)
    change.root.due(RUN)
    assert change.is_now() == "old"


@pytest.mark.parametrize("life", ["reboot", "container"])
def test_in_another_life_the_wall_clock_decides(change: Change, life: str) -> None:
    change.until("install")
    boot = "22222222-2222-2222-2222-222222222222" if life == "reboot" else "11111111-1111-1111-1111-111111111111"
    change.root.boot(boot, started=999, uptime=5)
    change.root.wall(300)
    change.root.due(RUN)
    assert change.is_now() == "new"
    change.root.wall(601)
    change.root.uptime(10)
    change.root.due(RUN)
    assert change.is_now() == "old"


def test_a_clock_that_fell_far_back_at_the_boot_cannot_keep_it_for_ever(change: Change) -> None:
    change.until("install")
    change.root.boot("22222222-2222-2222-2222-222222222222", uptime=20)
    change.root.wall(-100 * 86400)
    change.root.due(RUN)
    assert change.is_now() == "new"
    change.root.uptime(619)
    assert change.do("status").left_s == 1
    change.root.uptime(620)
    change.root.due(RUN)
    assert change.is_now() == "old"


def test_more_time_given_at_the_last_moment_holds(change: Change) -> None:
    change.until("install")
    change.root.uptime(1599)
    change.do("extend", 600)
    change.root.uptime(1700)
    change.root.due(RUN)
    assert change.is_now() == "new"


def test_a_change_that_was_never_armed_leaves_no_guard_behind(change: Change) -> None:
    change.do("stage")
    (change.root.fake / "refuse").touch()
    change.do("arm", 60)
    (change.root.proofbook / "changes" / RUN / "state").write_text("staged\n")  # as after a power cut just before
    change.root.uptime(1000 + 60 + 3601)
    change.root.due(RUN)
    assert change.units() == []


# ------------------------------------------------------------------------------------------------- when it is hard


def test_a_unit_that_does_not_start_is_said_and_can_be_tried_again(change: Change) -> None:
    change.until("install")
    (change.root.fake / "refuse").touch()
    failed = change.refused("fire")
    assert (failed.code, failed.state, change.is_now(), change.units()) == (1, "failed", "old", [])
    assert f"the old files are back, but {UNIT} is" in failed.refused
    assert change.refused("clean").code == 77, "its old files may be the only copy"
    (change.root.fake / "refuse").unlink()
    assert change.do("fire").state == "fired"


def test_while_systemd_does_not_answer_the_guard_stays(change: Change) -> None:
    change.until("install")
    (change.root.fake / "deaf").touch()
    change.root.uptime(1600)
    change.root.due(RUN)
    assert (change.is_now(), change.units()) == ("old", [f"proofbook-guard-{RUN}.service", *[f"{change.guard.timer}"] * 2])
    (change.root.fake / "deaf").unlink()
    change.root.due(RUN)
    assert change.do("status").state == "fired"
    assert change.units() == []


def test_a_full_disk_cannot_keep_the_old_files_away(change: Change) -> None:
    change.until("install")
    for tool in ("cp", "mkdir", "tee", "dd"):
        change.root.script(tool, "#!/bin/sh\necho No space left on device >&2\nexit 1\n")
    # What is left to a full disk: names. A write that is more than that fails, also to an open file.
    program = "ulimit -S -f 0; trap '' XFSZ; exec dash -c \"$0\" proofbook-guard fire " + RUN
    subprocess.run(["dash", "-c", program, GUARD], env=change.root.environment, capture_output=True, check=False, timeout=60)
    assert change.unit.read_bytes() == OLD
    assert change.gone.read_bytes() == b"old\n"
    assert not change.drop_in.exists()
    assert (change.root.proofbook / "changes" / RUN / "state").read_text() == "fired\n"
    assert change.root.is_active(UNIT) == "active"


def test_what_somebody_else_wrote_is_kept(in_each_shell: Change) -> None:
    change = in_each_shell
    change.until("install")
    change.unit.write_bytes(b"theirs\n")
    fired = change.do("fire")
    (kept,) = map(Path, fired.kept)
    assert (kept.parent, kept.read_bytes()) == (change.root.proofbook / "changes" / RUN, b"theirs\n")
    assert (change.is_now(), fired.fired_by) == ("old", "a run")
    (kept,) = map(Path, change.do("clean").kept)
    assert (kept.parent, kept.read_bytes()) == (change.root.proofbook / "theirs" / RUN, b"theirs\n"), "it outlives the change"


def test_a_guard_that_tries_again_and_again_keeps_it_once(change: Change) -> None:
    change.until("install")
    change.unit.write_bytes(b"theirs\n")
    change.root.script("mv", f'#!/bin/sh\ncase "$*" in *.old\\ *) exit 1 ;; esac\nexec {shutil.which("mv")} "$@"\n')
    for _ in range(3):
        failed = change.refused("fire")
        assert (failed.state, len(failed.kept), change.unit.read_bytes()) == ("failed", 1, b"theirs\n")


def test_without_a_way_back_what_is_there_stays(change: Change) -> None:
    change.until("install")
    change.do("suspend")  # the way back was used
    change.unit.write_bytes(b"theirs\n")
    change.root.script("cp", "#!/bin/sh\necho No space left on device >&2\nexit 1\n")
    failed = change.refused("fire")
    assert (failed.state, failed.kept, change.unit.read_bytes()) == ("failed", (), b"theirs\n")
    assert any("the way back of" in line for line in failed.log)


def test_a_link_to_a_folder_takes_no_file_in(change: Change, tmp_path: Path) -> None:
    change.until("install")
    change.unit.unlink()
    (tmp_path / "theirs").mkdir()
    change.unit.symlink_to(tmp_path / "theirs")
    fired = change.do("fire")
    assert (fired.state, change.unit.read_bytes(), list((tmp_path / "theirs").iterdir())) == ("fired", OLD, [])
    assert [Path(kept).readlink() for kept in fired.kept] == [tmp_path / "theirs"]


@pytest.mark.parametrize("fails", ["at once", "half-way"])
def test_what_somebody_else_wrote_is_kept_on_a_full_disk_too(change: Change, fails: str) -> None:
    change.until("install")
    change.unit.write_bytes(b"theirs\n")
    half = 'for last; do :; done\ntouch "$last"\n' if fails == "half-way" else ""
    change.root.script("cp", f"#!/bin/sh\n{half}echo No space left on device >&2\nexit 1\n")
    fired = change.do("fire")
    (kept,) = map(Path, fired.kept)
    assert (kept.parent, kept.read_bytes()) == (change.unit.parent, b"theirs\n")
    assert kept.suffix not in {".service", ".conf"}, "systemd reads it as nothing"
    assert change.unit.read_bytes() == OLD and not change.drop_in.exists()


def test_what_cannot_be_kept_is_not_overwritten(change: Change) -> None:
    change.until("install")
    change.unit.write_bytes(b"theirs\n")
    change.root.script("cp", "#!/bin/sh\nexit 1\n")
    change.root.script("mv", f'#!/bin/sh\ncase "$*" in *.theirs.*) exit 1 ;; esac\nexec {shutil.which("mv")} "$@"\n')
    failed = change.refused("fire")
    assert (failed.state, change.unit.read_bytes()) == ("failed", b"theirs\n")
    assert any("was written by somebody else and cannot be kept" in line for line in failed.log)


def test_an_immutable_file_is_named_and_tried_again(change: Change) -> None:
    change.until("install")
    if subprocess.run(["chattr", "+i", change.unit], capture_output=True, check=False).returncode:
        pytest.skip("this file system has no such attribute, or one must be root to set it")
    try:
        failed = change.refused("fire")
        assert (failed.code, failed.state) == (1, "failed")
        assert any(f"fire: {change.unit} could not be brought back" in line for line in failed.log)
        assert not change.drop_in.exists(), "what can be brought back is"
        assert change.units(), "the guard stays, and tries again"
    finally:
        subprocess.run(["chattr", "-i", change.unit], check=True)
    change.root.due(RUN)
    assert (change.do("status").state, change.is_now(), change.units()) == ("fired", "old", [])


def test_two_that_take_it_back_at_once_start_the_unit_once(change: Change) -> None:
    change.until("install")
    change.root.calls()
    asked = change.guard.fire()
    argv = ["dash", *asked.argv[1:]]
    both = [subprocess.Popen(argv, env=change.root.environment, stdout=subprocess.PIPE) for _ in range(3)]
    assert [p.wait(60) for p in both] == [0, 0, 0]
    for process in both:
        assert process.stdout is not None
        process.stdout.close()
    assert change.root.calls().count(f"restart -- {UNIT}") == 1
    assert change.is_now() == "old"


def test_confirmed_or_taken_back_but_never_both(change: Change) -> None:
    change.until("install")
    argvs = [["dash", *asked.argv[1:]] for asked in (change.guard.confirm(), change.guard.fire())]
    confirm, fire = [subprocess.Popen(a, env=change.root.environment, stdout=-3, stderr=-3) for a in argvs]
    ended = (confirm.wait(60), fire.wait(60))
    outcome = change.do("status").outcome
    assert (outcome, ended, change.is_now()) in [("confirmed", (0, 66), "new"), ("fired", (77, 0), "old")]


@pytest.mark.parametrize("verb", ["stage", "arm", "install", "suspend", "fire", "confirm"])
def test_the_power_goes_between_any_two_writes(tmp_path: Path, verb: str) -> None:
    """At each call of a tool that writes, everything dies; afterwards the way on and the way back are both open."""
    change = Change(Root(tmp_path / "root"))
    before = {"stage": "", "arm": "stage", "install": "arm", "suspend": "install", "fire": "install", "confirm": "install"}[verb]
    if before:
        change.until(before)
    shutil.copytree(tmp_path / "root", tmp_path / "before", symlinks=True)
    words = (600,) if verb == "arm" else ()
    asked = change.guard.stage(change.files) if verb == "stage" else getattr(change.guard, verb)(*words)
    allowed = {
        "stage": ("none", "staged"),
        "arm": ("staged", "armed"),
        "install": ("armed",),
        "suspend": ("armed",),
        "fire": ("armed", "firing", "fired"),
        "confirm": ("armed", "confirmed", "none"),
    }[verb]
    for call in range(1, 100):
        change.root.mortal(call, when="before" if call % 3 else "after")
        result = change.root.run(asked)
        change.root.immortal()
        if result.exit_status == 0:
            break
        assert result.exit_status == -9, result
        now = parse_guard(change.root.run(change.guard.status()))
        assert now.state in allowed
        if verb in ("install", "suspend", "fire") or now.state == "armed":
            assert change.units() or now.state == "fired", "until it is decided, the guard is there"
        if call % 2:
            _the_way_on(change, verb, words)
        else:
            _the_way_back(change, now)
        shutil.rmtree(tmp_path / "root")
        shutil.copytree(tmp_path / "before", tmp_path / "root", symlinks=True)
    assert call > 5, "the power goes at the calls that it is meant to"


def _the_way_on(change: Change, verb: str, words: tuple[int, ...]) -> None:
    change.do(verb, *words)
    assert change.is_now() == {"install": "new", "confirm": "new"}.get(verb, "old")


def _the_way_back(change: Change, now: GuardStatus) -> None:
    """As the timer goes it in the next life; what was confirmed has none, and what was not staged needs none."""
    if now.state == "none" or now.state == "confirmed":
        assert change.is_now() == ("new" if now.outcome or now.state == "confirmed" else "old")
        assert now.state == "none" or change.do("confirm").outcome == "confirmed"
    else:
        change.root.boot("22222222-2222-2222-2222-222222222222", uptime=30)
        change.root.wall(5000)
        change.root.due(RUN)
        assert change.is_now() == "old"
        assert change.do("fire").state == "fired"
    assert now.state == "none" or change.units() == []


# ------------------------------------------------------------------------------------------------------- answers


def answer(text: str, status: int = 0, error: str = "") -> Result:
    return Result(guard_command("status", RUN), status, text.encode(), error.encode(), datetime.now(UTC), 0.0)


@pytest.mark.parametrize(
    "text",
    ["", "state armed\n", "state dancing\nnow 1\nend\n", "state none\nend\n", "state none\nnow x\nend\n", "file new a\nend\n"],
)
def test_what_is_no_answer(text: str) -> None:
    with pytest.raises(CannotTell):
        parse_guard(answer(text))


def test_a_container_that_cannot_be_entered_is_no_answer() -> None:
    with pytest.raises(CannotTell, match="not running"):
        parse_guard(answer("", 255, "CT 102 not running!\n"))


def test_what_a_file_is() -> None:
    text = (
        "state armed\nnow 1775661015\nunit -\nwas_active 0\n"
        "file absent a0 b0 /gone\nfile absent absent b0 /not yet\nfile absent a0 absent /removed\nfile other a0 b0 /x\nend\n"
    )
    status = parse_guard(answer(text))
    assert [f.content for f in status.files] == ["absent", "old", "new", "other"]
    assert status.files[1].path == "/not yet"
    assert not status.guarded
