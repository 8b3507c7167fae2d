"""`proofbook lease`: whose a machine is, and how a lease is taken away on purpose. The machine's own program answers."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from proofbook import leases
from proofbook.changes import lease
from proofbook.errors import BadParameter, LeaseHeld
from proofbook.host import IDENTIFY, WallClock
from proofbook.inventory import HostSpec
from proofbook.model import Command, Result
from proofbook.transports.base import Clock, Peer

from .remote.change_lab import Root

pytestmark = pytest.mark.skipif(not shutil.which("dash"), reason="there is no dash here")

RUN, OTHER = "20261129T030000Z-mtp-enablement-gpu01-abc123", "20261129T040000Z-mtp-enablement-gpu01-def456"
SAYS = ("0123456789abcdef" * 2, "f" * 32, "gpu01", "root", "0", "6.8")


class Machine:
    """A transport to a machine whose programs run in a folder here."""

    def __init__(self, root: Root) -> None:
        self.root, self.closed = root, False

    def open(self, *, timeout_s: float = 15.0) -> Peer:
        return Peer("192.0.2.7:22", "ssh-ed25519 SHA256:one", "OpenSSH_9.2p1")

    def gather(self, commands: Sequence[Command]) -> list[Result]:
        assert tuple(commands) == IDENTIFY
        now = WallClock().now()
        return [Result(c, 0, said.encode(), b"", now, 0.0) for c, said in zip(commands, SAYS, strict=True)]

    def run(self, asked: Command) -> Result:
        return self.root.run(asked)

    def close(self) -> None:
        self.closed = True


@pytest.fixture
def root(tmp_path: Path) -> Root:
    return Root(tmp_path)


@pytest.fixture
def by(root: Root, monkeypatch: pytest.MonkeyPatch) -> Any:
    """How the machine is reached."""
    machine = Machine(root)
    resolved = type("Known", (), {"resolve": lambda self, name: HostSpec(name=name)})
    monkeypatch.setattr(leases, "load_inventory", resolved)

    def connected(_spec: HostSpec) -> tuple[Machine, Clock]:
        return machine, WallClock()

    return connected


def test_nobody_holds_a_machine(by: Any) -> None:
    assert leases.show("gpu01", by=by) is None
    with pytest.raises(BadParameter, match="no run holds gpu01"):
        leases.break_it("gpu01", RUN, "mira", by=by)


def test_whose_it_is_and_the_connection_is_closed(root: Root, by: Any) -> None:
    root.run(lease.acquire(RUN, "mira@laptop", 600))
    held = leases.show("gpu01", by=by)
    assert held is not None
    assert (held.run, held.holder, held.expired) == (RUN, "mira@laptop", False)
    assert by(HostSpec(name="gpu01"))[0].closed


def test_only_the_run_that_is_named_loses_it_and_the_machine_keeps_who_did_it(root: Root, by: Any) -> None:
    root.run(lease.acquire(RUN, "mira@laptop", 600))
    with pytest.raises(BadParameter, match="who breaks the lease"):
        leases.break_it("gpu01", RUN, "  ", by=by)
    with pytest.raises(LeaseHeld, match=f"run {RUN} of mira@laptop has its lease") as refused:
        leases.break_it("gpu01", OTHER, "noa", by=by)
    assert f"not {OTHER}" in refused.value.hint
    assert leases.break_it("gpu01", RUN, "noa at the console", by=by).run == RUN
    assert leases.show("gpu01", by=by) is None
    assert (root.proofbook / "lease.log").read_text().endswith("by=noa at the console\n")


def test_a_machine_that_cannot_write_does_not_lose_it(root: Root, by: Any) -> None:
    root.run(lease.acquire(RUN, "mira@laptop", 600))
    (root.proofbook / "lease.log").mkdir()
    with pytest.raises(Exception, match="could not be written"):
        leases.break_it("gpu01", RUN, "noa", by=by)
    held = leases.show("gpu01", by=by)
    assert held is not None and held.run == RUN
