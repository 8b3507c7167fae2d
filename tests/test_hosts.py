"""`hosts check`: every machine gets its row, whatever is wrong with it or with its neighbours."""

from __future__ import annotations

import json
import threading
from collections.abc import Generator, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from io import StringIO
from typing import ClassVar, Literal

import pytest
from rich.console import Console

from proofbook import hosts
from proofbook.errors import (
    BadInventory,
    CannotConnect,
    CannotTell,
    ChangedHostKey,
    ConnectionLost,
    LabError,
    LoginFailed,
    UnknownHostKey,
)
from proofbook.host import WallClock
from proofbook.hosts import HostKey, Privileges, Reach
from proofbook.intent import ContainerSpec
from proofbook.inventory import Connect, HostSpec, Inventory
from proofbook.model import Command, Probe, Result, command
from proofbook.probes.access import AccessFacts
from proofbook.transports.base import Clock, Peer, Put, Transport

KEY = "ssh-ed25519 SHA256:abc"


@dataclass
class Machine(Transport):
    """A machine with one login: ``facts`` is what the access probe finds, or the reason why it cannot."""

    facts: AccessFacts | Exception
    opening: Exception | None = None
    gathering: Exception | None = None
    closed: int = 0
    asked: list[Command] = field(default_factory=list)

    def open(self, *, timeout_s: float = 15.0) -> Peer:
        if self.opening:
            raise self.opening
        return Peer("192.0.2.1:22", KEY, "OpenSSH_9.2")

    def gather(self, commands: Sequence[Command]) -> list[Result]:
        if self.gathering:
            raise self.gathering
        self.asked += commands
        return [Result(c, 0, b"", b"", datetime.now(UTC), 0.01) for c in commands]

    def close(self) -> None:
        self.closed += 1

    def reopen(self, *, timeout_s: float = 15.0) -> Peer:
        raise AssertionError("a check connects once")

    def run(self, command: Command) -> Result:
        raise AssertionError("a check asks in one round trip")

    def stream(self, command: Command) -> Iterator[bytes]:
        raise AssertionError("a check follows nothing")

    def put(self, data: bytes, path: str, *, mode: int = 0o644, backup: bool = True, root: bool = True) -> Put:
        raise AssertionError("a check changes nothing")

    def tunnel(self, port: int, host: str = "127.0.0.1") -> AbstractContextManager[tuple[str, int]]:
        raise AssertionError("a check needs no tunnel")


ROOT = AccessFacts(0, "root", True, "", {"nvidia-smi": "/usr/bin/nvidia-smi", "pct": None})
SUDO = AccessFacts(1000, "oncall", True, "", {"nvidia-smi": "/usr/bin/nvidia-smi", "pct": "/usr/sbin/pct"})
NOBODY = AccessFacts(1000, "oncall", False, "sudo: a password is required", {"nvidia-smi": None, "pct": None})

MACHINES: dict[str, Machine | Exception] = {
    "root": Machine(ROOT),
    "sudo": Machine(SUDO),
    "nobody": Machine(NOBODY),
    "new": Machine(ROOT, opening=UnknownHostKey("its key is in no known_hosts", hint="compare the fingerprint on its console")),
    "swapped": Machine(ROOT, opening=ChangedHostKey("its key is not the trusted one")),
    "stranger": Machine(ROOT, opening=LoginFailed("does not let us in")),
    "dark": Machine(ROOT, opening=CannotConnect("no answer within 15 s")),
    "fading": Machine(ROOT, gathering=ConnectionLost("the connection was lost")),
    "mumbling": Machine(CannotTell("`id` said nothing")),
    "broken": Machine(ROOT, gathering=KeyError("a [bug] of ours")),
    "labless": LabError("the lab cannot start"),
}


@pytest.fixture
def connect(monkeypatch: pytest.MonkeyPatch) -> Connect:
    """Machines by name; the access probe's answer is the machine's ``facts``."""
    here = threading.local()

    @dataclass(frozen=True)
    class KnownAnswer(Probe[AccessFacts]):
        also: tuple[str, ...] = ()
        name: ClassVar[str] = "access.Access"

        def ask(self) -> Generator[Sequence[Command], Sequence[Result], AccessFacts]:
            yield [command("id", "-u")]
            if isinstance(here.machine.facts, Exception):
                raise here.machine.facts
            return here.machine.facts  # type: ignore[no-any-return]

    monkeypatch.setattr(hosts, "Access", KnownAnswer)

    def to(spec: HostSpec) -> tuple[Transport, Clock]:
        machine = MACHINES[spec.name]
        if isinstance(machine, Exception):
            raise machine
        machine.closed = 0
        here.machine = machine
        return machine, WallClock()

    return to


def inventory(*names: str) -> Inventory:
    return Inventory(hosts={name: HostSpec(name=name) for name in names})


@pytest.mark.parametrize(
    ("name", "reach", "key", "privileges", "usable", "says"),
    [
        ("root", Reach.YES, HostKey.KNOWN, Privileges.ROOT, True, ""),
        ("sudo", Reach.YES, HostKey.KNOWN, Privileges.SUDO, True, ""),
        ("nobody", Reach.YES, HostKey.KNOWN, Privileges.NONE, False, "a password is required"),
        ("new", Reach.KEY_REFUSED, HostKey.UNKNOWN, Privileges.CANNOT_TELL, False, "compare the fingerprint"),
        ("swapped", Reach.KEY_REFUSED, HostKey.CHANGED, Privileges.CANNOT_TELL, False, "not the trusted one"),
        ("stranger", Reach.LOGIN_REFUSED, HostKey.KNOWN, Privileges.CANNOT_TELL, False, "does not let us in"),
        ("dark", Reach.NO, HostKey.NOT_SEEN, Privileges.CANNOT_TELL, False, "no answer within 15 s"),
        ("fading", Reach.LOST, HostKey.KNOWN, Privileges.CANNOT_TELL, False, "the connection was lost"),
        ("mumbling", Reach.YES, HostKey.KNOWN, Privileges.CANNOT_TELL, False, "`id` said nothing"),
        ("broken", Reach.NO, HostKey.NOT_SEEN, Privileges.CANNOT_TELL, False, "KeyError: 'a [bug] of ours'"),
        ("labless", Reach.NOT_TRIED, HostKey.NOT_SEEN, Privileges.CANNOT_TELL, False, "the lab cannot start"),
    ],
)
def test_each_state_of_a_machine_is_its_own_answer(
    connect: Connect, name: str, reach: Reach, key: HostKey, privileges: Privileges, usable: bool, says: str
) -> None:
    row = hosts.check_host(HostSpec(name=name), connect=connect)
    assert (row.reach, row.host_key, row.privileges, row.usable) == (reach, key, privileges, usable)
    assert says in f"{row.trouble} {row.what_to_do}"
    assert bool(says) == (not usable), "an unusable machine never goes without a word"
    machine = MACHINES[name]
    if isinstance(machine, Machine):
        assert machine.closed == 1


def test_all_machines_at_once_in_their_order_with_every_trouble(connect: Connect) -> None:
    rows = hosts.check(inventory=inventory(*MACHINES), connect=connect)
    assert [row.name for row in rows] == list(MACHINES)
    assert [row.name for row in rows if row.usable] == ["root", "sudo"]


def test_names_choose_and_an_unknown_one_costs_only_its_row(connect: Connect, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("proofbook.inventory._resolves", lambda name: False)
    rows = hosts.check(["sudo", "rooot", "sudo"], inventory=inventory("root", "sudo"), connect=connect)
    assert [(row.name, row.reach) for row in rows] == [("sudo", Reach.YES), ("rooot", Reach.NOT_TRIED)]
    assert "did you mean root?" in rows[1].trouble


def test_nothing_to_check_is_refused_not_fine() -> None:
    with pytest.raises(BadInventory, match="no inventory was found"):
        hosts.check(inventory=Inventory())


def test_missing_tools_are_named(connect: Connect) -> None:
    assert hosts.check_host(HostSpec(name="root"), connect=connect).missing_tools == ("pct",)
    assert hosts.check_host(HostSpec(name="dark"), connect=connect).missing_tools == ()


@pytest.mark.parametrize(
    ("name", "kind", "usable", "says"),
    [
        ("sudo", "pct", True, ""),
        ("root", "pct", False, "pct is not there, and container web (pct) cannot be looked into without"),
        ("root", "docker", False, "docker is not there"),
        ("sudo", "nspawn", False, "machinectl and systemd-run are not there"),
        ("nobody", "docker", False, "a password is required"),
    ],
)
def test_a_declared_container_that_cannot_be_entered_is_not_usable(
    connect: Connect, name: str, kind: Literal["pct", "docker", "nspawn"], usable: bool, says: str
) -> None:
    spec = HostSpec(name=name, containers=(ContainerSpec(name="web", kind=kind, id="102"),))
    row = hosts.check_host(spec, connect=connect)
    assert row.usable is usable
    assert says in f"{row.trouble} {row.what_to_do}"
    assert ("is not there" in row.trouble) <= ("correct the container's kind" in row.what_to_do)
    assert name != "nobody" or not row.trouble, "who may not look does not know what is missing"


def test_json_says_the_same(connect: Connect) -> None:
    row = hosts.check_host(HostSpec(name="sudo", address="192.0.2.9"), connect=connect)
    said = json.loads(json.dumps(row.as_json()))
    assert said["target"] == "192.0.2.9"
    assert (said["reach"], said["host_key"], said["privileges"], said["usable"]) == ("yes", "known", "sudo", True)
    assert said["fingerprint"] == KEY


def test_the_table_says_everything_without_colour(connect: Connect) -> None:
    console = Console(width=200, no_color=True, record=True, file=StringIO())
    console.print(hosts.table(hosts.check(inventory=inventory(*MACHINES), connect=connect)))
    text = console.export_text()
    for part in ("sudo (oncall)", "CHANGED", "login refused", "no answer within 15 s", "a [bug] of ours", "not asked"):
        assert part in text
