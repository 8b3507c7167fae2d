from __future__ import annotations

from typing import Any

import pytest

from proofbook.model import command
from proofbook.probes.access import TOOLS, Access, Login, Logins


@pytest.fixture
def login(machine: Any) -> Any:
    """Somebody with this uid; what is asked as root answers ``as_root``."""

    def is_(uid: str, **as_root: Any) -> Any:
        machine.on("id", "-u", stdout=uid + "\n").on("id", "-un", stdout="ops\n")
        machine.on("which", stdout="/usr/bin/journalctl\n/usr/sbin/pct\n", status=1)
        machine.as_root = as_root
        return machine

    return is_


def test_root(login: Any) -> None:
    facts = login("0").value(Access())
    assert (facts.uid, facts.user, facts.sudo, facts.sudo_unknown) == (0, "ops", True, "")
    assert facts.tools["journalctl"] == "/usr/bin/journalctl" and facts.tools["curl"] is None
    assert set(facts.tools) == set(TOOLS)


def test_sudo_granted(login: Any) -> None:
    facts = login("1000", stdout="0\n").value(Access())
    assert (facts.uid, facts.sudo) == (1000, True)


def test_sudo_refused(login: Any) -> None:
    facts = login("1000", stderr="sudo: a password is required\n", status=1).value(Access())
    assert (facts.sudo, facts.sudo_unknown) == (False, "sudo: a password is required")


def test_no_number_is_unknown(login: Any) -> None:
    assert "said no number" in login("nobody").unknown(Access())


def test_only_one_question_needs_root(login: Any) -> None:
    machine = login("0")
    machine.value(Access())
    assert [c for c in machine.asked() if c.root] == [command("id", "-u", root=True)]


def test_logins(machine: Any) -> None:
    text = (
        "ana      pts/0        2026-04-08 15:02 (192.0.2.10)\n"
        "root     tty1         Apr  8 14:11\n"
        "ben    + pts/1        2026-04-08 15:02 (tmux(991).%0)\n"
    )
    assert machine.on("who", stdout=text).value(Logins()) == (
        Login("ana", "pts/0", "2026-04-08 15:02", "192.0.2.10"),
        Login("root", "tty1", "Apr  8 14:11", ""),
        Login("ben", "pts/1", "2026-04-08 15:02", "tmux(991).%0"),
    )
    assert machine.on("who", stdout="").value(Logins()) == ()
    assert "a line that is no login" in machine.on("who", stdout="x\n").unknown(Logins())
