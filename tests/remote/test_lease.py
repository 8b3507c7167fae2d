"""lease.sh and detached.sh on a root folder with a systemd of its own. A real one: tests/real."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from proofbook.changes import detached, lease
from proofbook.errors import ApprovalUsed, CannotTell, LeaseHeld
from proofbook.model import Command
from proofbook.remote.lease import lease_command, parse_approvals, parse_lease

from .change_lab import Root

MINE, THEIRS = "20260408T150412Z-3f2a", "20260408T160000Z-77aa"
DIGEST = "sha256:" + "5f" * 32
#: systemd-run that runs the unit's command here and now, and then what systemd would run after it.
_SYSTEMD_RUN = r"""#!/bin/sh
echo "$*" >> "${0%/*}/../runs"
[ ! -f "${0%/*}/../deaf" ] || { echo "Failed to connect to bus" >&2; exit 1; }
while :; do case $1 in --property=ExecStopPost=*) after=${1#*Post=} ;; --*) ;; *) break ;; esac; shift; done
[ ! -f "${0%/*}/../slow" ] || exit 0
"$@"; status=$?
SERVICE_RESULT=$([ $status = 0 ] && echo success || echo exit-code) EXIT_CODE=exited EXIT_STATUS=$status ${after}
exit 0
"""


@pytest.fixture(params=[["dash"], ["bash", "--posix"], ["busybox", "sh"]], ids=lambda argv: argv[0])
def root(request: pytest.FixtureRequest, tmp_path: Path) -> Root:
    shell: list[str] = request.param
    if shutil.which(shell[0]) is None:
        pytest.skip(f"{shell[0]} is not installed")
    made = Root(tmp_path, shell)
    made.script("systemd-run", _SYSTEMD_RUN)
    return made


# -------------------------------------------------------------------------------------------------------- the lease


def test_one_run_holds_it(root: Root) -> None:
    assert lease.held(root.run(lease.show())) is None
    mine = lease.obtained(root.run(lease.acquire(MINE, "mira  at\tlaptop\n", 600)), MINE)
    assert (mine.holder, mine.expired, mine.other_boot) == ("mira at laptop", False, False)
    assert (mine.expires - mine.taken).total_seconds() == pytest.approx(600, abs=1)
    with pytest.raises(LeaseHeld, match=r"mira at laptop .* another (10|9) min"):
        lease.obtained(root.run(lease.acquire(THEIRS, "noa", 600)), THEIRS)
    again = lease.obtained(root.run(lease.acquire(MINE, "mira", 900)), MINE)
    assert again.taken == mine.taken
    assert lease.obtained(root.run(lease.renew(MINE, 1200)), MINE).expires > again.expires
    assert parse_lease(root.run(lease.release(THEIRS))), "nobody releases another's"
    assert lease.held(root.run(lease.release(MINE))) is None
    assert lease.obtained(root.run(lease.acquire(THEIRS, "noa", 600)), THEIRS).holder == "noa"


def test_every_use_of_an_approval_is_counted(root: Root) -> None:
    assert parse_approvals(root.run(lease.show())) == 0
    root.run(lease.acquire(MINE, "mira", 600))
    for digest, count in ((DIGEST, 1), (DIGEST, 1), ("sha256:" + "60" * 32, 2)):
        assert root.run(lease.use(digest, MINE)).exit_status == 0
        assert parse_approvals(root.run(lease.show())) == count


def test_an_expired_one_is_explained_and_not_simply_taken(root: Root) -> None:
    root.run(lease.acquire(MINE, "mira", 600))
    root.wall(4000)
    root.boot("22222222-2222-2222-2222-222222222222")
    with pytest.raises(LeaseHeld, match=r"ran out 5\d min ago.*rebooted since") as refused:
        lease.obtained(root.run(lease.acquire(THEIRS, "noa", 600)), THEIRS)
    assert MINE in refused.value.hint
    assert root.run(lease.break_lease(THEIRS, "noa")).exit_status == 75, "only the one that is named is broken"
    assert lease.held(root.run(lease.break_lease(MINE, "noa at the console"))) is None
    log = (root.proofbook / "lease.log").read_text()
    assert f"run={MINE}" in log
    assert log.endswith("by=noa at the console\n")
    lease.obtained(root.run(lease.acquire(THEIRS, "noa", 600)), THEIRS)
    with pytest.raises(LeaseHeld, match="noa"):
        lease.obtained(root.run(lease.renew(MINE, 600)), MINE)


def test_a_broken_lease_ends_its_run(root: Root) -> None:
    root.run(lease.acquire(MINE, "mira", 600))
    root.run(lease.break_lease(MINE, "noa"))
    with pytest.raises(LeaseHeld, match="somebody broke it"):
        lease.obtained(root.run(lease.renew(MINE, 600)), MINE)


def test_an_approval_is_used_once(root: Root) -> None:
    with pytest.raises(LeaseHeld):
        lease.used(root.run(lease.use(DIGEST, MINE)), DIGEST, MINE)
    root.run(lease.acquire(MINE, "mira", 600))
    first = lease.used(root.run(lease.use(DIGEST, MINE)), DIGEST, MINE)
    assert lease.used(root.run(lease.use(DIGEST, MINE)), DIGEST, MINE) == first, "by one who did not hear the answer"
    with pytest.raises(LeaseHeld, match="mira"):
        lease.used(root.run(lease.use(DIGEST, THEIRS)), DIGEST, THEIRS)
    root.run(lease.release(MINE))
    root.run(lease.acquire(THEIRS, "noa", 600))
    with pytest.raises(ApprovalUsed, match=f"{MINE}.*{first.at:%H:%M:%S}"):
        lease.used(root.run(lease.use(DIGEST, THEIRS)), DIGEST, THEIRS)


def test_of_many_at_once_one_gets_it(root: Root) -> None:
    runs = [f"run-{n}" for n in range(6)]
    argvs = [[*root.shell, *lease.acquire(run, run, 600).argv[1:]] for run in runs]
    asked = [subprocess.Popen(a, env=root.environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) for a in argvs]
    won = [run for run, process in zip(runs, asked, strict=True) if process.wait(60) == 0]
    held = lease.held(root.run(lease.show()))
    assert held is not None
    assert won == [held.run]


@pytest.mark.parametrize("verb", ["acquire", "use"])
def test_the_power_goes_between_any_two_writes_of_it(root: Root, verb: str) -> None:
    if verb == "use":
        root.run(lease.acquire(MINE, "mira", 600))
    asked = lease.acquire(MINE, "mira", 600) if verb == "acquire" else lease.use(DIGEST, MINE)
    for call in range(1, 50):
        root.mortal(call)
        done = root.run(asked)
        root.immortal()
        if done.exit_status == 0:
            break
        held = lease.held(root.run(lease.show()))
        assert held is None or held.run == MINE
        again = root.run(asked)
        assert again.exit_status == 0, again
        shutil.rmtree(root.proofbook / ("approvals" if verb == "use" else "."))
    assert call > 2


def test_words_that_are_none(root: Root) -> None:
    for words in [("dance",), ("acquire", MINE, "x"), ("acquire", MINE, "x", "soon"), ("use", "../../etc", MINE), ()]:
        asked = lease_command(*(words or ("",)))
        assert root.run(asked).exit_status == 64, words
        with pytest.raises(CannotTell):
            lease.held(root.run(asked))
    for build in (
        lambda: lease.acquire(MINE, " \n", 600),
        lambda: lease.acquire(MINE, "x", 1),
        lambda: lease.acquire("../x", "x", 600),
        lambda: lease.use("sha256:12", MINE),
    ):
        with pytest.raises(ValueError):
            build()


# -------------------------------------------------------------------------------------------------- detached steps


def step(root: Root, asked: Command) -> detached.StepStatus:
    return detached.parse(root.run(asked))


def test_a_step_runs_once_and_its_words_arrive_as_they_are(root: Root) -> None:
    words = [
        "sh",
        "-c",
        'printf "%s|" "$@"; echo err >&2; exit 3',
        "name",
        "a  b",
        "it's",
        "$HOME",
        "100%",
        "",
        "two\nlines\n",
        "\\",
    ]
    assert step(root, detached.status(MINE, "count")).state == "never"
    ended = step(root, detached.start(MINE, "count", words, None, 60))
    assert (ended.state, ended.exit_status, ended.result, ended.err_bytes) == ("ended", 3, "exit-code", 4)
    folder = root.proofbook / "steps" / MINE / "count"
    assert (folder / "out").read_text() == "a  b|it's|$HOME|100%||two\nlines\n|\\|"
    step(root, detached.start(MINE, "count", words, None, 60))
    assert len((root.fake / "runs").read_text().splitlines()) == 1
    assert "RuntimeMaxSec=60" in (root.fake / "runs").read_text()
    assert step(root, detached.clean(MINE)).state == "never"


def test_a_step_that_runs_is_found_again_and_one_that_is_gone_is_lost(root: Root) -> None:
    (root.fake / "slow").touch()
    unit = detached.unit_of(MINE, "wait")
    root.active(unit, "active")
    assert step(root, detached.start(MINE, "wait", ["sleep", "9"], None, 60)).state == "running"
    assert step(root, detached.status(MINE, "wait")).state == "running"
    root.active(unit, "inactive")
    assert "did not say how it ended" in step(root, detached.status(MINE, "wait")).why
    root.active(unit, "active")
    root.boot("11111111-1111-1111-1111-111111111111", started=4711)
    assert "started anew" in step(root, detached.status(MINE, "wait")).why
    root.boot("11111111-1111-1111-1111-111111111111")
    (root.fake / "deaf").touch()
    with pytest.raises(CannotTell, match="systemd does not answer"):
        step(root, detached.status(MINE, "wait"))


def test_a_step_that_systemd_did_not_take_was_never_begun(root: Root) -> None:
    (root.fake / "deaf").touch()
    with pytest.raises(CannotTell, match="Failed to connect to bus"):
        step(root, detached.start(MINE, "count", ["true"], None, 60))
    (root.fake / "deaf").unlink()
    assert step(root, detached.start(MINE, "count", ["true"], None, 60)).exit_status == 0


def test_how_a_killed_step_ended(root: Root) -> None:
    step(root, detached.start(MINE, "count", ["true"], None, 60))
    (root.proofbook / "steps" / MINE / "count" / "ended").write_text("1775661060 oom-kill killed KILL degraded\n")
    killed = step(root, detached.status(MINE, "count"))
    assert (killed.exit_status, killed.result) == (137, "oom-kill")
    (root.proofbook / "steps" / MINE / "count" / "ended").write_text("1775661060 success killed TERM stopping\n")
    assert "shut down" in step(root, detached.status(MINE, "count")).why


def test_names_that_are_none() -> None:
    for bad in ("", "A", "a b", "../x", "a_b"):
        with pytest.raises(ValueError, match="not the name of a step"):
            detached.status(MINE, bad)
    with pytest.raises(ValueError, match="runs a command"):
        detached.start(MINE, "x", [], None, 60)
