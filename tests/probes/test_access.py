from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

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


def test_what_somebody_needs_is_looked_for_where_root_finds_it(machine: Any) -> None:
    machine.on("id", "-u", stdout="0\n").on("id", "-un", stdout="ops\n")
    sudo = {("id", "-u"): "0\n", ("which",): "/usr/sbin/lxc-attach\n/usr/bin/journalctl\n"}
    answered = machine._answer
    machine._answer = lambda c: (
        replace(answered(c), stdout=sudo[c.argv[:2] if c.argv[0] == "id" else c.argv[:1]]) if c.root else answered(c)
    )
    machine.on("which", stdout="/usr/bin/journalctl\n", status=1)
    facts = machine.value(Access(("lxc-attach", "lxc-info", "journalctl")))
    assert (facts.tools["lxc-attach"], facts.tools["lxc-info"]) == ("/usr/sbin/lxc-attach", None)
    assert list(facts.tools) == [*TOOLS, "lxc-attach", "lxc-info"]


def test_a_refused_sudo_finds_nothing(login: Any) -> None:
    facts = login("1000", stdout="/evil/pct\n", stderr="sudo: a password is required\n", status=1).value(Access())
    assert facts.tools["pct"] == "/usr/sbin/pct"


def test_only_root_itself_and_its_path_are_asked_as_root(login: Any) -> None:
    machine = login("0")
    machine.value(Access())
    assert [c.argv[0] for c in machine.asked() if c.root] == ["id", "which"]


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
