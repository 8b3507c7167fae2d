"""The text of faults, held against the patterns that the sources and field reports give."""

from __future__ import annotations

import re

import pytest

from proofbook.lab.sim import fault_lines as said

GPU, UUID = "0000:41:00.0", "GPU-e94d7a08-51c6-4b2f-8d3e-7f60b9a2c415"
XID = re.compile(r"NVRM: Xid \(PCI:0000:41:00\): (?P<n>\d+),(?: pid=(?P<pid>[^,]+),)?(?: name=(?P<name>[^,]+),)? (?P<text>.+)")
PAGE_FAULT = re.compile(
    r"(?P<drv>\S+) (?P<bdf>[0-9a-f]{4}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-7]): AMD-Vi: Event logged \[IO_PAGE_FAULT "
    r"domain=0x(?P<dom>[0-9a-f]{4,}) address=(?P<addr>0x[0-9a-f]+) flags=(?P<flags>0x[0-9a-f]{4})\]"
)


def texts(lines: list[said.Line]) -> list[str]:
    assert lines and all(0 <= line.priority <= 7 for line in lines)
    return [line.text for line in lines]


def test_xid_79_names_the_card_first() -> None:
    lines = texts(said.xid79(GPU, UUID, pid="4711", name="python3"))
    assert lines[0] == f"NVRM: GPU at PCI:0000:41:00: {UUID}"
    found = XID.fullmatch(lines[1])
    assert found and (found["n"], found["pid"], found["name"], found["text"]) == (
        "79", "4711", "python3", "GPU has fallen off the bus.")  # fmt: skip
    bare = XID.fullmatch(texts(said.xid79(GPU, UUID))[1])
    assert bare and bare["pid"] is None


def test_recovery_actions_have_the_drivers_words() -> None:
    (line,) = texts(said.xid154(GPU, "Reset"))
    assert line.endswith("154, GPU recovery action changed from 0x0 (None) to 0x1 (GPU Reset Required)")
    assert any("0x2 (Node Reboot Required)" in line for line in texts(said.consequences(GPU)))


@pytest.mark.parametrize(("write", "flags"), [(True, "0x0020"), (False, "0x0000")])
def test_a_page_fault_says_who_and_which_way(write: bool, flags: str) -> None:
    (line,) = texts(said.io_page_fault("nvidia", GPU, 0x18, 0x4D7201180, write))
    found = PAGE_FAULT.fullmatch(line)
    assert found and (found["drv"], found["bdf"], found["dom"], found["flags"]) == ("nvidia", GPU, "0018", flags)
    assert int(found["addr"], 16) == 0x4D7201180


def test_a_burst_is_cut_at_ten_and_counted() -> None:
    lines = texts(said.page_fault_burst("nvidia", GPU, 0x18, 0x1000, True, 10442))
    assert len(lines) == 11 and lines[-1] == "amd_iommu_report_page_fault: 10432 callbacks suppressed"
    assert len({PAGE_FAULT.fullmatch(line)["addr"] for line in lines[:10]}) == 10  # type: ignore[index]
    assert len(said.page_fault_burst("nvidia", GPU, 0x18, 0x1000, True, 3)) == 3


def test_intel_and_unknown_requesters() -> None:
    assert texts(said.dmar_fault(GPU, 0x7CD80000, write=False)) == [
        "DMAR: DRHD: handling fault status reg 2",
        "DMAR: [DMA Read NO_PASID] Request device [41:00.0] fault addr 0x7cd80000 [fault reason 0x06] PTE Read access is not set",
    ]
    (line,) = texts(said.io_page_fault_unknown_device("0000:07:00.0", 3, 0x80000040, True))
    assert line == "AMD-Vi: Event logged [IO_PAGE_FAULT device=0000:07:00.0 domain=0x0003 address=0x80000040 flags=0x0020]"


def test_an_api_mismatch_names_both_versions() -> None:
    lines = texts(said.api_mismatch("595.71.05", "595.58.03"))
    assert lines[0] == "NVRM: API mismatch: the client 'nvidia-smi' (pid 4711)"
    assert "has the version 595.71.05, but this kernel module has the version 595.58.03." in lines[1]


def test_fallen_off_at_probe_has_no_xid() -> None:
    lines = texts(said.fallen_off_at_probe(GPU))
    assert lines[1] == "NVRM: (PCI ID: 10de:2bb5) installed in this system has"
    assert lines[2] == "NVRM: fallen off the bus and is not responding to commands."
    assert not any("Xid" in line for line in lines)


def test_security_processor_failures_are_two_different_things() -> None:
    cot = texts(said.fsp_boot_failed(GPU, 1, code=0x177))
    assert re.search(r"FSP response reported error\. Task ID: 0x\w+ Command type: 0x14 Error code: 0x177$", cot[0])
    assert f"NVRM: GPU {GPU}: rm_init_adapter failed, device minor number 1" in cot
    (timeout,) = texts(said.fsp_boot_timeout(GPU))
    assert XID.fullmatch(timeout) and "while polling for FSP boot complete, 0x0, 0x9f," in timeout


def test_aer_goes_through_the_root_port() -> None:
    lines = texts(said.aer_uncorrectable("0000:40:01.1", "nvidia", GPU, (0x10DE, 0x2BB5), fatal=True))
    assert lines[0] == "pcieport 0000:40:01.1: AER: Uncorrectable (Fatal) error message received from 0000:41:00.0"
    assert f"nvidia {GPU}:   device [10de:2bb5] error status/mask=00004000/00000000" in lines
    assert f"nvidia {GPU}:    [14] CmpltTO                (First)" in lines
    assert f"nvidia {GPU}: AER: can't recover (no error_detected callback)" in lines
    corrected = texts(said.aer_correctable("0000:40:01.1", "nvidia", GPU, (0x10DE, 0x2BB5)))
    assert corrected[2].endswith("error status/mask=00000040/0000e000") and corrected[3].endswith("[ 6] BadTLP")


def test_gaps_and_noise() -> None:
    assert texts(said.missed(127)) == ["Missed 127 kernel messages"]
    assert texts(said.mlx5_command_failed("0000:22:00.0", 25))[-1] == "mlx5_cmd_out_err: 15 callbacks suppressed"
    nic = texts(said.nic_fault("bnxt_en", "0000:a2:00.0", "enp162s0f0np0", 0x2B, 0xFFF2A000))
    assert PAGE_FAULT.fullmatch(nic[0]) and "NETDEV WATCHDOG" in nic[1]
    assert "iommu ivhd0: AMD-Vi: Event logged [IOTLB_INV_TIMEOUT device=0000:41:00.0 address=0x1002147e0]" in texts(
        said.iotlb_timeout(GPU, 0x1002147E0)
    )
