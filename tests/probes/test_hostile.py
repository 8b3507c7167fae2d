"""Whatever a machine says, a probe gives a value or a reason; it never takes the run down."""

from __future__ import annotations

import json
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from proofbook.intent import ContainerSpec
from proofbook.model import Command, Probe, Result
from proofbook.probes import drive
from proofbook.probes.access import Access, Logins
from proofbook.probes.boot import Boots, Machine, Shutdown
from proofbook.probes.containers import ContainerState
from proofbook.probes.iommu import IommuGroups
from proofbook.probes.journal import UnitJournal
from proofbook.probes.kernel_log import KernelLog
from proofbook.probes.nvidia import ComputeApps, Driver, Gpus
from proofbook.probes.pci import AerCounters, PciDevices
from proofbook.probes.service import Endpoint
from proofbook.probes.systemd import FailedUnits, RunningServices, SystemState, UnitProcess, UnitState

NOW = datetime(2026, 4, 8, 15, 10, 15, tzinfo=UTC)
BOOT = "7c0e2c5b3f0e4f0a9c550a4b1d2e3f40"
SPEC = ContainerSpec(name="c1", kind="pct", id="102", devices=("/dev/nvidia0",))
PROBES: tuple[Probe[Any], ...] = (
    Access(),
    Logins(),
    Machine(),
    Boots(),
    Shutdown(BOOT),
    KernelLog(),
    KernelLog(BOOT),
    PciDevices(),
    AerCounters(),
    IommuGroups(),
    Driver(),
    Gpus(),
    ComputeApps(),
    UnitState("a.service"),
    UnitState("a.service", SPEC),
    FailedUnits(),
    RunningServices(),
    SystemState(),
    UnitProcess("a.service"),
    UnitJournal("a.service"),
    Endpoint("http://127.0.0.1/"),
    ContainerState(SPEC),
)

#: Pieces that lead deeper into the readers than noise does.
PIECES = [
    b"\n",
    b"\0",
    b"F /sys/bus/pci/devices/",
    b"0000:41:00.0",
    b"/vendor\n|0x10de\n",
    b"|",
    b"D /sys/bus/pci\n",
    b"N x\n",
    b"=",
    b"{",
    b"}",
    b"LoadState=loaded\nActiveState=active\n",
    b"MainPID=1\n",
    b"InvocationID=ab\n",
    b'{"MESSAGE":',
    b"null",
    b"[1,2]",
    b'"__REALTIME_TIMESTAMP":"1"',
    b"<?xml ?>",
    b"<nvidia_smi_log>",
    b"</nvidia_smi_log>",
    b", ",
    b"000",
    b"[    0.000000] Linux version ",
    BOOT.encode(),
    b"running\n",
    b"F /proc/uptime\n|1.0 1.0\n",
    b"F /etc/machine-id\n|" + BOOT.encode() + b"\n",
    b"\xff",
    "²".encode(),
]
OUTPUT = st.one_of(st.binary(max_size=60), st.lists(st.sampled_from(PIECES), max_size=12).map(b"".join))


@settings(max_examples=150, deadline=None)
@given(
    out=OUTPUT,
    err=OUTPUT,
    status=st.sampled_from([0, 1, 6, 7, 127, 255, None]),
    lost=st.sampled_from([0, 9]),
    timed_out=st.booleans(),
)
def test_anything_is_a_value_or_a_reason(out: bytes, err: bytes, status: int | None, lost: int, timed_out: bool) -> None:
    def gather(commands: Sequence[Command]) -> list[Result]:
        return [Result(c, status, out, err, NOW, 0.1, timed_out, lost) for c in commands]

    for answer in drive(PROBES, gather).values():
        assert answer.known or (answer.unknown and answer.value is None)
        assert "cannot read the answer: Attribute" not in answer.unknown
        assert "cannot read the answer: Type" not in answer.unknown


@settings(max_examples=100, deadline=None)
@given(
    fields=st.dictionaries(
        st.sampled_from(
            [
                "__REALTIME_TIMESTAMP",
                "__MONOTONIC_TIMESTAMP",
                "_SOURCE_MONOTONIC_TIMESTAMP",
                "PRIORITY",
                "MESSAGE",
                "_PID",
                "_BOOT_ID",
                "MESSAGE_ID",
            ]
        ),
        st.recursive(
            st.none() | st.integers() | st.text(max_size=9) | st.floats(allow_nan=False, allow_infinity=False),
            lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=2),
            max_leaves=5,
        ),
    )
)
def test_journal_fields_of_any_shape(fields: dict[str, Any]) -> None:
    def gather(commands: Sequence[Command]) -> list[Result]:
        return [Result(c, 0, json.dumps(fields).encode() + b"\n", b"", NOW, 0.1) for c in commands]

    answer = drive([Shutdown(BOOT)], gather)[Shutdown(BOOT)]
    assert answer.known or not answer.unknown.startswith("cannot read")


@pytest.mark.parametrize("probe", PROBES, ids=repr)
def test_silence_with_exit_status_127_is_never_a_value_that_says_all_is_well(probe: Probe[Any]) -> None:
    answer = drive([probe], lambda commands: [Result(c, 127, b"", b"", NOW, 0.0) for c in commands])[probe]
    assert not answer.known
