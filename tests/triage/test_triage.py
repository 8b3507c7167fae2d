"""Pasted logs as people paste them: every form, several boots, tools' answers, damage; and what each must come to."""

from __future__ import annotations

import bz2
import gzip
import json
import lzma
import resource
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from proofbook.errors import BadParameter
from proofbook.model import Verdict
from proofbook.signatures import SignatureFinding, load
from proofbook.triage import Triage, judge_paste, sources, triage
from proofbook.triage.reading import cut_off
from proofbook.triage.recognise import kind_of

XID79 = "NVRM: Xid (PCI:0000:41:00): 79, pid='<unknown>', name=<unknown>, GPU has fallen off the bus."
XID154 = "NVRM: Xid (PCI:0000:41:00): 154, GPU recovery action changed from 0x0 (None) to 0x2 (Node Reboot Required)"
FAULT = "nvidia 0000:41:00.0: AMD-Vi: Event logged [IO_PAGE_FAULT domain=0x0018 address=0x4d7201180 flags=0x0020]"
SUPPRESSED = "amd_iommu_report_page_fault: 900 callbacks suppressed"
MESSAGES = [
    "Linux version 6.8.12-1-pve (build@x) #1 SMP",
    "pci 0000:41:00.0: Adding to iommu group 21",
    FAULT,
    SUPPRESSED,
    FAULT,
    XID79,
    XID154,
]


def one(said: Triage, signature: str) -> SignatureFinding:
    found = [f for f in said.findings if f.signature == signature]
    assert len(found) == 1, [(f.signature, f.device, f.boot_id) for f in said.findings]
    return found[0]


def ids(said: Triage) -> list[str]:
    return [f.signature for f in said.findings]


# ------------------------------------------------------------------------------------------------------- forms


def dmesg(messages: list[str]) -> str:
    return "".join(f"[{i + 0.000001:12.6f}] {m}\n" for i, m in enumerate(messages))


def short(messages: list[str]) -> str:
    return "".join(f"Mar 09 16:02:{i:02d} gpu01 kernel: {m}\n" for i, m in enumerate(messages))


def iso(messages: list[str]) -> str:
    return "".join(f"2026-03-09T16:02:{i:02d}+00:00 gpu01 kernel: {m}\n" for i, m in enumerate(messages))


def entry(i: int, message: str) -> dict[str, str]:
    return {
        "__CURSOR": f"s=1;i={i}",
        "__REALTIME_TIMESTAMP": str(1773072120000000 + i * 1000000),
        "__MONOTONIC_TIMESTAMP": str(i * 1000000),
        "_BOOT_ID": "ab" * 16,
        "_TRANSPORT": "kernel",
        "SYSLOG_IDENTIFIER": "kernel",
        "MESSAGE": message,
    }


def as_json(messages: list[str]) -> str:
    return "".join(json.dumps(entry(i, m)) + "\n" for i, m in enumerate(messages))


def export(messages: list[str]) -> str:
    return "\n".join("".join(f"{k}={v}\n" for k, v in entry(i, m).items()) for i, m in enumerate(messages))


FORMS: dict[str, Callable[[list[str]], str]] = {
    "dmesg": dmesg,
    "dmesg without times": lambda m: "\n".join(m),
    "dmesg -T": lambda m: "".join(f"[Mon Mar  9 16:02:{i:02d} 2026] {x}\n" for i, x in enumerate(m)),
    "journalctl short": short,
    "journalctl short-iso": iso,
    "journalctl json": as_json,
    "journalctl export": export,
    "CRLF": lambda m: dmesg(m).replace("\n", "\r\n"),
    "colours": lambda m: "".join(f"\x1b[32m[{i:5d}.000000] \x1b[0m\x1b[31m{x}\x1b[0m\n" for i, x in enumerate(m)),
    "quoted in a mail": lambda m: "".join(f"> {x}\n" for x in dmesg(m).splitlines()),
    "in a code fence": lambda m: f"what I see:\n```\n{dmesg(m)}```\n",
    "after a prompt": lambda m: f"root@gpu01:~# dmesg | tail -20\n{dmesg(m)}",
}


@pytest.mark.parametrize("form", FORMS)
def test_a_log_is_the_same_in_every_form(form: str) -> None:
    said = judge_paste(FORMS[form](MESSAGES))
    assert said.verdict is Verdict.FAIL
    assert said.unknown_lines == 0
    fault, lost, recovery = one(said, "amdvi-io-page-fault"), one(said, "xid-79"), one(said, "xid-154")
    assert (fault.device, fault.count, fault.at_least) == ("0000:41:00.0", 902, True)
    assert (lost.device, lost.root, lost.caused_by) == ("0000:41:00.0", True, None)
    assert (recovery.root, recovery.caused_by) == (False, "xid-79")
    assert not any("iommu group" in x for x in said.not_observable)


@pytest.mark.parametrize(
    ("name", "pack"),
    [
        ("a.log", lambda d: d),
        ("a.log.gz", gzip.compress),
        ("a.log.bz2", bz2.compress),
        ("a.log.xz", lzma.compress),
        ("utf16.txt", lambda d: d.decode().encode("utf-16")),
    ],
)
def test_files_are_read_compressed_or_not(tmp_path: Path, name: str, pack: Callable[[bytes], bytes]) -> None:
    path = tmp_path / name
    path.write_bytes(pack(dmesg(MESSAGES).encode()))
    assert "xid-79" in ids(triage([path]))


def test_a_compressed_file_that_breaks_off_says_so(tmp_path: Path) -> None:
    path = tmp_path / "nvidia-bug-report.log.gz"
    quiet = "".join(f"[{i:5d}.000000] usb 1-1: new device {i * 7919}\n" for i in range(20000))
    path.write_bytes(gzip.compress(quiet.encode())[:-2000])
    said = triage([path])
    assert said.verdict is Verdict.UNKNOWN
    assert any("breaks off" in x for x in said.not_observable)


def test_what_cannot_be_read_is_refused_with_a_way_out(tmp_path: Path) -> None:
    (tmp_path / "system.journal").write_bytes(b"LPKSHHRH" + bytes(300))
    for path, says in (
        (tmp_path / "nothing", "cannot be read"),
        (tmp_path, "folder"),
        (tmp_path / "system.journal", "binary journal"),
    ):
        with pytest.raises(BadParameter, match=says):
            triage([path])


def test_two_files_are_one_incident(tmp_path: Path) -> None:
    (tmp_path / "k").write_text(iso([XID79]))
    (tmp_path / "s").write_text(
        "2026-03-09T16:02:04+00:00 gpu01 python3[42]: RuntimeError: CUDA error: unspecified launch failure\n"
    )
    said = triage([tmp_path / "k", tmp_path / "s"])
    assert one(said, "cuda-launch-failure").caused_by == "xid-79"
    assert [first for _, first in said.sources] == [1, 2]


def test_the_same_log_twice_counts_once_and_as_a_lower_bound(tmp_path: Path) -> None:
    (tmp_path / "dmesg").write_text(dmesg(MESSAGES))
    (tmp_path / "journal").write_text(short(MESSAGES))
    finding = one(triage([tmp_path / "dmesg", tmp_path / "journal"]), "xid-79")
    assert (finding.count, finding.at_least) == (1, True)


def test_a_bug_report_is_many_logs() -> None:
    rule = "_" * 44
    report = f"Start of NVIDIA bug report log file.\n{rule}\n\n/bin/dmesg\n{dmesg(MESSAGES)}"
    report += f"{rule}\n\njournalctl -b\n{short(MESSAGES)}{rule}\n"
    said = judge_paste(report)
    assert (one(said, "xid-79").count, one(said, "xid-154").caused_by) == (1, "xid-79")
    assert said.boots == ()


# -------------------------------------------------------------------------------------------------- nothing to judge


@pytest.mark.parametrize(
    "text", ["", "\n\n", "The server was slow this morning, and then it was fine again.\n", "Architecture: x86_64\nCPU(s): 256\n"]
)
def test_what_nobody_knows_is_unknown_with_a_sentence(text: str) -> None:
    said = judge_paste(text)
    assert (said.verdict, said.exit_code, said.findings) == (Verdict.UNKNOWN, 4, ())
    assert said.sentence.startswith("Nothing can be told")
    assert said.sentence in said.not_observable


def test_a_quiet_log_passes() -> None:
    said = judge_paste(dmesg(["Linux version 6.8", "usb 1-1: new high-speed USB device number 2 using xhci_hcd"]))
    assert (said.verdict, said.exit_code) == (Verdict.PASS, 0)


def test_a_paragraph_that_quotes_messages_says_nothing_itself() -> None:
    paragraph = (
        "The absence of error messages is itself significant. There was no CUDA out of memory, no failure to load the draft "
        "model, no assertion from speculative decoding, and the line Uvicorn running on socket shows that the server listens, "
        "so that we may hope that all is well with it from now on.\n"
    )
    assert judge_paste(paragraph).verdict is Verdict.UNKNOWN
    assert judge_paste(paragraph + XID79).verdict is Verdict.FAIL


def test_prose_around_a_line_does_not_hide_it() -> None:
    assert ids(judge_paste(f"Hi, since noon we see this:\n\n    {XID79}\n\nAny idea?\n")) == ["xid-79"]


# ---------------------------------------------------------------------------------------------------- unknown lines


def test_an_unknown_error_of_the_driver_leaves_it_open() -> None:
    said = judge_paste(dmesg(["NVRM: fooBarQuux_GB202: something entirely new failed"]))
    assert (said.verdict, said.unknown_lines) == (Verdict.UNKNOWN, 1)


def test_unknown_words_of_the_driver_are_seen_and_spoil_nothing() -> None:
    said = judge_paste(dmesg(["NVRM: numa memblock size of zero found during device start"]))
    assert (said.verdict, said.unknown_lines) == (Verdict.PASS, 1)


def test_an_unknown_error_of_another_program_is_a_warning() -> None:
    said = judge_paste("Mar 09 16:02:27 gpu01 somed[42]: ERROR: cannot reach the weather service\n")
    assert (said.verdict, said.unknown_lines) == (Verdict.WARN, 1)


def test_an_unknown_error_of_the_inference_server_leaves_it_open() -> None:
    said = judge_paste("[2026-03-09 16:02:28 TP0] ERROR: nobody has seen this\n")
    assert (said.verdict, said.unknown_lines) == (Verdict.UNKNOWN, 1)


# ------------------------------------------------------------------------------------------------------------- boots


def test_each_boot_of_a_text_is_judged_by_itself() -> None:
    first = dmesg(["Linux version 6.8", "pci 0000:41:00.0: Adding to iommu group 21", XID79])
    said = judge_paste(first + dmesg(["Linux version 6.8", XID154]))
    assert said.boots == ("boot 1", "boot 2")
    assert one(said, "xid-154").caused_by is None
    assert one(said, "xid-79").boot_id == "boot 1"
    assert any(x.startswith("boot 2: IOMMU faults") for x in said.not_observable)


def test_journalctls_own_marks_part_boots() -> None:
    boots = ["0a" * 16, "0b" * 16]
    text = f"-- Boot {boots[0]} --\n{short([XID79])}-- Boot {boots[1]} --\n{short([XID154])}"
    said = judge_paste(text)
    assert said.boots == tuple(boots)
    assert one(said, "xid-154").root
    assert judge_paste(f"{short([XID79])}-- Reboot --\n{short([XID154])}").boots == ("boot 1", "boot 2")


def test_a_clock_that_falls_back_is_a_new_boot() -> None:
    said = judge_paste(f"[ 9000.000000] {XID79}\n[    3.000000] {XID154}\n")
    assert one(said, "xid-154").root


SYSTEMD = "Mar 09 16:02:27 gpu01 systemd[1]: Started sglang-qwen.service - SGLang server.\n"


def test_a_boot_that_ends_without_a_shutdown_leaves_it_open() -> None:
    reset = f"{SYSTEMD}-- Boot {'0b' * 16} --\n{SYSTEMD}"
    said = judge_paste(reset)
    assert (said.verdict, ids(said)) == (Verdict.UNKNOWN, ["boot-ended-unclean"])
    orderly = reset.replace("-- Boot", "Mar 09 17:00:00 gpu01 systemd[1]: Reached target reboot.target - System Reboot.\n-- Boot")
    assert judge_paste(orderly).verdict is Verdict.PASS


# --------------------------------------------------------------------------------------------------------- ports

PORT = "pcieport 0000:40:01.1: PCIe Bus Error: severity=Uncorrectable (Fatal), type=Transaction Layer, (Receiver ID)"


def test_the_port_above_a_gpu_is_its_cause() -> None:
    bridge = "pci 0000:40:01.1: PCI bridge to [bus 41-42]"
    said = judge_paste(dmesg(["Linux version 6.8", bridge, PORT, XID79, XID154]))
    assert (one(said, "xid-79").caused_by, one(said, "xid-154").caused_by) == ("aer-fatal", "xid-79")
    assert [f.signature for f in said.findings if f.root] == ["aer-fatal"]


def test_a_port_above_something_else_is_no_cause() -> None:
    other = "pci 0000:40:01.1: PCI bridge to [bus c1-c2]"
    said = judge_paste(dmesg(["Linux version 6.8", other, PORT, XID79]))
    assert one(said, "xid-79").root
    assert one(said, "aer-fatal").verdict is Verdict.WARN


def test_a_port_that_spoke_for_the_gpu_is_above_it() -> None:
    said = judge_paste(
        dmesg(
            [
                "pcieport 0000:00:01.1: AER: Uncorrectable (Fatal) error message received from 0000:41:00.0",
                PORT.replace("40:01", "00:01"),
                XID79,
            ]
        )
    )
    assert one(said, "xid-79").caused_by == "aer-fatal"


def test_without_any_word_of_the_topology_time_and_bus_number_decide_and_say_so() -> None:
    said = judge_paste(f"[  100.000000] {PORT}\n[  100.500000] {XID79}\n")
    assert one(said, "xid-79").caused_by == "aer-fatal"
    assert "taken from time and bus number" in one(said, "xid-79").reason
    late = judge_paste(f"[  100.000000] {PORT}\n" + "[  101.000000] usb 1-1: x\n" * 60 + f"[ 5000.500000] {XID79}\n")
    assert one(late, "xid-79").root


# ------------------------------------------------------------------------------------------------------ tools' answers

SMI_Q = """
==============NVSMI LOG==============

Driver Version                                         : 595.58.03

Attached GPUs                                          : 2
GPU 00000000:41:00.0
    Product Name                                       : NVIDIA RTX PRO 6000 Blackwell Server Edition
    GPU Recovery Action                                : {action}
    PCI
        GPU Link Info
            Link Width
                Max                                    : 16x
                Current                                : {width}x
    ECC Errors
        Volatile
            DRAM Uncorrectable                         : {ecc}
    Remapped Rows
        Pending                                        : {pending}
GPU 00000000:42:00.0
    Product Name                                       : NVIDIA RTX PRO 6000 Blackwell Server Edition
    GPU Recovery Action                                : None
"""
HEALTHY = {"action": "None", "width": "16", "ecc": "0", "pending": "No"}


def test_a_healthy_answer_of_nvidia_smi_passes() -> None:
    assert judge_paste(SMI_Q.format(**HEALTHY)).verdict is Verdict.PASS


@pytest.mark.parametrize(
    ("change", "signature", "verdict"),
    [
        ({"action": "Reset"}, "smi-requires-reset", Verdict.FAIL),
        ({"width": "8"}, "smi-link-width", Verdict.WARN),
        ({"width": "63"}, "lspci-not-answering", Verdict.FAIL),
        ({"ecc": "3"}, "smi-ecc-uncorrected", Verdict.FAIL),
        ({"pending": "Yes"}, "smi-row-remap", Verdict.WARN),
    ],
)
def test_a_block_of_nvidia_smi_names_its_gpu(change: dict[str, str], signature: str, verdict: Verdict) -> None:
    said = judge_paste(SMI_Q.format(**{**HEALTHY, **change}))
    assert (said.verdict, ids(said), said.findings[0].device) == (verdict, [signature], "0000:41:00.0")


def test_an_answer_with_fewer_gpus_than_attached_was_cut() -> None:
    cut = SMI_Q.format(**HEALTHY).partition("GPU 00000000:42")[0]
    said = judge_paste(cut)
    assert (said.verdict, ids(said)) == (Verdict.UNKNOWN, ["smi-fewer-than-attached"])


TABLE = """Mon Mar  9 16:02:27 2026
+-----------------------------------------------------------------------------------------+
| NVIDIA-SMI 595.58.03              Driver Version: 595.58.03      CUDA Version: 13.2     |
|-----------------------------------------+------------------------+----------------------+
|   0  NVIDIA RTX PRO 6000 Blac...    On  |   00000000:41:00.0 Off |                    0 |
| N/A   31C    P0            120W /  600W |     624MiB /  97887MiB |    {util}%      Default |
+-----------------------------------------+------------------------+----------------------+
| Processes:                                                                              |
|  No running processes found                                                             |
+-----------------------------------------------------------------------------------------+
"""


def test_a_busy_gpu_without_a_process_is_wedged() -> None:
    said = judge_paste(TABLE.format(util="100"))
    assert (ids(said), said.findings[0].device, said.verdict) == (["smi-busy-without-process"], "0000:41:00.0", Verdict.FAIL)
    assert judge_paste(TABLE.format(util="  0")).verdict is Verdict.PASS


LSPCI = """40:01.1 PCI bridge: Advanced Micro Devices, Inc. [AMD] Device 14ab
\tBus: primary=40, secondary=41, subordinate=41, sec-latency=0
\t\tLnkSta:\tSpeed 2.5GT/s (downgraded), Width x8 (downgraded)
41:00.0 3D controller: NVIDIA Corporation Device 2bb5 (rev {rev})
\tCapabilities: [60] Express (v2) Legacy Endpoint, MSI 00
\t\tLnkCap:\tPort #0, Speed 32GT/s, Width x16, ASPM L1
\t\tLnkSta:\tSpeed 2.5GT/s (downgraded), Width x{width}
"""


@pytest.mark.parametrize(
    ("rev", "width", "verdict", "signature"),
    [
        ("a1", "16", Verdict.PASS, ""),
        ("a1", "8 (downgraded)", Verdict.WARN, "lspci-width"),
        ("ff", "16", Verdict.FAIL, "lspci-not-answering"),
        ("a1", "63", Verdict.FAIL, "lspci-not-answering"),
    ],
)
def test_lspci_is_judged_for_gpus_alone(rev: str, width: str, verdict: Verdict, signature: str) -> None:
    said = judge_paste(LSPCI.format(rev=rev, width=width))
    assert said.verdict is verdict
    assert [(f.signature, f.device) for f in said.findings] == ([(signature, "0000:41:00.0")] if signature else [])


def test_a_units_status_names_the_unit() -> None:
    status = (
        "× sglang-qwen.service - SGLang server\n     Loaded: loaded (/etc/systemd/system/sglang-qwen.service; enabled)\n"
        "     Active: failed (Result: signal) since Mon 2026-03-09 16:02:28 UTC; 2min ago\n"
        "   Main PID: 15462 (code=killed, signal=KILL)\n\n"
        "Mar 09 16:02:27 llm-two python3[15462]: [2026-03-09 16:02:27 TP0] Scheduler hit an exception: Traceback (most recent "
        "call last):\n"
        "Mar 09 16:02:27 llm-two python3[15462]: ValueError: Unknown speculative algorithm name: MTP\n"
    )
    said = judge_paste(status)
    assert said.verdict is Verdict.FAIL
    assert one(said, "status-failed").unit == "sglang-qwen.service"
    active = "● sglang-qwen.service - SGLang server\n     Active: active (running) since Mon 2026-03-09 16:02:28 UTC; 2min ago\n"
    assert judge_paste(active).verdict is Verdict.PASS


MATRIX = """Unidirectional P2P=Enabled Bandwidth (P2P Writes) Matrix (GB/s)
   D\\D     0      1      2      3
     0 1488.10  55.57  55.57  {bad}
     1  55.57 1488.10  55.50  {slow}
     2  55.57  55.50 1488.10  {slow}
     3  {slow}  {slow}  {slow} 1375.60
"""


def test_a_matrix_tells_a_slow_gpu_and_an_impossible_figure() -> None:
    assert judge_paste(MATRIX.format(bad="55.50", slow="55.40")).verdict is Verdict.PASS
    slow = judge_paste(MATRIX.format(bad="50.20", slow="50.10"))
    assert (slow.verdict, ids(slow)) == (Verdict.WARN, ["p2p-one-slow-gpu"])
    impossible = judge_paste(MATRIX.format(bad="103.88", slow="55.40"))
    assert (impossible.verdict, ids(impossible)) == (Verdict.FAIL, ["p2p-impossible"])


def nccl_row(bus: str, wrong: int) -> str:
    return (
        f"   536870912     134217728     float     sum      -1    42915   12.51   {bus}    {wrong}   42866   12.52   {bus}    0"
    )


def test_nccl_tests_wrong_data_fails_and_slow_data_warns() -> None:
    tail = "\n# Out of bounds values : 0 OK\n# Avg bus bandwidth    : 7.48202\n"
    assert judge_paste(nccl_row("40.10", 0) + tail).verdict is Verdict.PASS
    assert judge_paste(nccl_row("18.79", 0) + tail).verdict is Verdict.WARN
    assert judge_paste(nccl_row("40.10", 7) + tail).verdict is Verdict.FAIL


# --------------------------------------------------------------------------------------------------------- damage


@pytest.mark.parametrize(
    ("tail", "cut"),
    [
        (b"a whole line\n", False),
        (b"x\n[  123.456789] NVRM: Xid (PCI:0000:4", True),
        (b"x\n[  123.456789] NVRM: Xid (PCI:0000:41:00): 79, GPU has fallen off the bus.", False),
        (b"x\n[  123.45", True),
        (b"x\nDecode batch, #running-req: 1, accept len:", True),
        (b'x\n{"MESSAGE": "abc', True),
        (b"x\nINFO: couldn't do that", False),
        (b"x\nInitialization failed. Please see the error messages above.", False),
    ],
)
def test_a_cut_is_told_by_how_the_last_line_reads(tail: bytes, cut: bool) -> None:
    assert bool(cut_off(tail)) is cut


def test_a_cut_log_without_a_fault_leaves_it_open() -> None:
    said = judge_paste(dmesg(["Linux version 6.8", "usb 1-1: x"]) + "[   99.000000] NVRM: Xid (PCI:0000")
    assert (said.verdict, ids(said)) == (Verdict.UNKNOWN, ["log-damaged"])
    assert any("middle of a line" in x for x in said.not_observable)


def test_a_missing_newline_is_no_damage() -> None:
    assert judge_paste("\n".join(f"[{i:5d}.000000] usb 1-1: device {i}" for i in range(50))).verdict is Verdict.PASS


def test_lost_messages_make_every_count_a_lower_bound() -> None:
    said = judge_paste(short([XID79]) + "Mar 09 16:03:00 gpu01 systemd-journald[400]: Missed 42 kernel messages\n")
    assert one(said, "xid-79").at_least


# ------------------------------------------------------------------------------------------------------- lines and kinds


@pytest.mark.parametrize(
    ("line", "kind"),
    [
        ("[    0.000000] Linux version 6.8", "dmesg"),
        ("Mar 09 16:02:27 gpu01 kernel: x", "journal"),
        ("2026-03-09T16:02:27+0000 gpu01 sshd[42]: x", "journal"),
        ('{"MESSAGE":"x"}', "journal-json"),
        ("MESSAGE=x", "journal-export"),
        ("[2026-03-09 16:02:27 TP0] Load weight end.", "sglang"),
        ("INFO:     Application startup complete.", "server"),
        ("GPU 00000000:41:00.0", "smi-q"),
        ("41:00.0 3D controller: NVIDIA Corporation Device 2bb5 (rev a1)", "lspci"),
        ("● a.service - A", "systemd"),
        ("Dear all, the server was slow.", ""),
        ("Architecture:                            x86_64", ""),
    ],
)
def test_a_line_is_of_a_kind(line: str, kind: str) -> None:
    assert kind_of(line) == kind


# ----------------------------------------------------------------------------------------------------- the command


def run(*arguments: str, stdin: str = "") -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "proofbook.cli", "triage", *arguments], input=stdin, capture_output=True, text=True
    )


def test_the_command_prints_one_json_value_last_and_exits_by_the_verdict() -> None:
    done = run("-", "--json", stdin=dmesg(MESSAGES))
    said = json.loads(done.stdout.splitlines()[-1])
    assert done.returncode == 1
    assert set(said) == {"verdict", "findings", "not_observable", "unknown_lines"}
    assert set(said["findings"][0]) == {
        "signature", "verdict", "device", "count", "at_least", "first", "last", "root", "caused_by", "reason", "action", "code",
        "lines",
    }  # fmt: skip
    assert run("-", stdin="prose").returncode == 4
    assert run("-", stdin="usb 1-1: new device").returncode == 0
    missing = run("/nonexistent/file")
    assert (missing.returncode, missing.stdout) == (2, "")
    assert "cannot be read" in missing.stderr


def test_the_command_shows_causes_gaps_and_unknown_lines_to_a_person() -> None:
    done = run("-", stdin=dmesg([*MESSAGES[2:], "NVRM: brandNew_GB202: this failed"]))
    for words in ("FAIL", "xid-79", "└ xid-154", "What this log cannot show", "does not begin at the boot", "brandNew_GB202"):
        assert words in done.stdout


# ----------------------------------------------------------------------------------------------------- size


def test_a_long_log_is_streamed(tmp_path: Path) -> None:
    path = tmp_path / "long.log"
    block = "".join(
        f"[{i:5d}.000000] usb 1-1: new high-speed USB device number {i} using xhci_hcd\n" for i in range(2000)
    ).encode()
    with path.open("wb") as file:
        for _ in range(100):
            file.write(block)
        file.write(f"[99999.000000] {XID79}\n".encode())
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    said = triage([path])
    grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024
    assert one(said, "xid-79").first.n == 200_001
    assert grown < 100, f"{grown:.0f} MiB for a log of {path.stat().st_size / 2**20:.0f} MiB"


def test_stretches_part_nothing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    data = dmesg(MESSAGES * 3).encode()
    whole = judge_paste(data)
    path = tmp_path / "x"
    path.write_bytes(data)
    monkeypatch.setattr(sources, "STRETCH", 200)
    small = triage([path])
    assert [(f.signature, f.count, f.caused_by) for f in small.findings] == [
        (f.signature, f.count, f.caused_by) for f in whole.findings
    ]


# ------------------------------------------------------------------------------------------------------- hostile text

EXAMPLES = [example for signature in load() for example in signature.examples]


@pytest.mark.parametrize("keep", [0.15, 0.4, 0.6, 0.8, 0.95])
def test_stumps_of_every_known_line_are_no_trouble(keep: float) -> None:
    stumps = [x[: int(len(x) * keep)] for x in EXAMPLES]
    said = judge_paste("\n".join(f"[{i:5d}.000000] {x}" for i, x in enumerate(stumps)))
    assert said.lines == len(stumps)
    assert judge_paste("\n".join(stumps)).lines == len(stumps)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.lists(st.one_of(st.sampled_from(EXAMPLES), st.text(max_size=60)), max_size=25), st.sampled_from(["\n", "\r\n", "\n\n"]))
def test_any_mixture_comes_to_a_verdict(lines: list[str], end: str) -> None:
    said = judge_paste(end.join(lines))
    json.dumps(said.as_json())
    assert said.verdict in (Verdict.PASS, Verdict.WARN, Verdict.UNKNOWN, Verdict.FAIL)
    assert {f.caused_by for f in said.findings} - {None} <= {f.signature for f in said.findings}
    assert all(f.root == (f.caused_by is None) for f in said.findings if f.kind != "gap")


@given(st.binary(max_size=400))
@settings(max_examples=60, deadline=None)
def test_any_bytes_come_to_a_verdict(data: bytes) -> None:
    judge_paste(data)


@pytest.mark.parametrize("sample", sorted((Path(__file__).parents[1] / "samples").glob("*.*")), ids=lambda p: p.name)
def test_answers_of_machines_are_read_to_their_end(sample: Path) -> None:
    said = triage([sample])
    broken = (
        "lost",
        "mismatch",
        "needs_reset",
        "vfio",
        "lspci_Dnnk",
    )  # a GPU for a virtual machine is "not called"; one reads ff
    assert (said.verdict is Verdict.FAIL) == any(word in sample.name for word in broken)


DOCKER = '{"log":"%s\\n","stream":"stderr","time":"2026-03-09T16:02:28.123456789Z"}\n'


def test_logs_of_containers_are_unwrapped() -> None:
    text = "[2026-03-09 16:02:28 TP0] Scheduler hit an exception: Traceback (most recent call last):"
    for wrapped in (DOCKER % text, f"2026-03-09T16:02:28.123456789Z {text}\n", f"sglang-1  | {text}\n"):
        assert ids(judge_paste(wrapped)) == ["sglang-scheduler-exception"]


XML = (
    '<?xml version="1.0" ?>\n<nvidia_smi_log>\n\t<attached_gpus>{attached}</attached_gpus>\n\t<gpu id="00000000:41:00.0">\n'
    "\t\t<gpu_recovery_action>None</gpu_recovery_action>\n\t</gpu>\n</nvidia_smi_log>\n"
)
TWO_GPUS = "".join(
    f"{bus}:00.0 VGA compatible controller: NVIDIA Corporation Device [10de:2bb5]\n\tKernel driver in use: {driver}\n"
    for bus, driver in (("41", "nvidia"), ("81", "{driver}"))
)


def test_a_gpu_that_the_driver_holds_and_nvidia_smi_does_not_list() -> None:
    said = judge_paste(TWO_GPUS.format(driver="nvidia") + "\n" + XML.format(attached=1))
    assert said.verdict is Verdict.UNKNOWN
    assert [(f.signature, f.device) for f in said.findings] == [("gpu-not-in-nvidia-smi", "0000:81:00.0")]
    assert judge_paste(TWO_GPUS.format(driver="vfio-pci") + "\n" + XML.format(attached=1)).verdict is Verdict.PASS
    other_machine = XML.format(attached=1).replace("41:00", "c1:00")
    assert judge_paste(TWO_GPUS.format(driver="nvidia") + "\n" + other_machine).findings == ()


def test_xml_with_fewer_gpus_than_attached_was_cut() -> None:
    assert ids(judge_paste(XML.format(attached=2))) == ["smi-fewer-than-attached"]


def test_xml_of_nvidia_smi_names_its_gpu() -> None:
    xml = (
        '<?xml version="1.0" ?>\n<nvidia_smi_log>\n\t<gpu id="00000000:41:00.0">\n'
        "\t\t<gpu_recovery_action>Reset</gpu_recovery_action>\n"
        "\t\t<max_link_width>16x</max_link_width>\n\t\t<current_link_width>8x</current_link_width>\n\t</gpu>\n</nvidia_smi_log>\n"
    )
    said = judge_paste(xml)
    assert {(f.signature, f.device) for f in said.findings} == {
        ("smi-requires-reset", "0000:41:00.0"),
        ("smi-link-width", "0000:41:00.0"),
    }
