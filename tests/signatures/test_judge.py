"""What the judge makes of whole logs: causes and consequences, devices, counts, holes."""

from __future__ import annotations

import re
from collections.abc import Iterable
from datetime import UTC, datetime, timedelta

import pytest

from proofbook.model import Suggested, Verdict
from proofbook.signatures import Judgement, LogContext, LogLine, SignatureFinding, judge

NOON = datetime(2026, 3, 9, 12, 0, 0, tzinfo=UTC)


def kernel(*texts: str, context: LogContext | None = None) -> Judgement:
    return judge((LogLine(t, n=i) for i, t in enumerate(texts, 1)), context=context)


def service(*texts: str, unit: str = "sglang-qwen.service") -> Judgement:
    return judge(LogLine(t, source="systemd" if t.startswith(unit) else "service", unit=unit) for t in texts)


def one(judgement: Judgement, signature: str) -> SignatureFinding:
    found = [f for f in judgement.findings if f.signature == signature]
    assert len(found) == 1, [f.signature for f in judgement.findings]
    return found[0]


def chain(judgement: Judgement) -> dict[str, str | None]:
    return {f.signature: f.caused_by for f in judgement.findings}


def roots(judgement: Judgement) -> list[str]:
    return [f.signature for f in judgement.roots]


# ------------------------------------------------------------------------------------------ causes and consequences


def test_what_follows_a_lost_gpu_is_its_consequence() -> None:
    said = kernel(
        "NVRM: GPU at PCI:0000:41:00: GPU-00000000-1111-2222-3333-444444444444",
        "NVRM: Xid (PCI:0000:41:00): 79, pid='<unknown>', name=<unknown>, GPU has fallen off the bus.",
        "NVRM: GPU 0000:41:00.0: GPU has fallen off the bus.",
        "NVRM: Xid (PCI:0000:41:00): 154, GPU recovery action changed from 0x0 (None) to 0x2 (Node Reboot Required)",
        "NVRM: Xid (PCI:0000:41:00): 45, pid=4242, name=python3, Ch 00000008",
        "NVRM: Xid (PCI:0000:41:00): 119, Timeout after 6s of waiting for RPC response from GPU0 GSP!",
    )
    assert roots(said) == ["xid-79"]
    assert chain(said) == {
        "xid-79": None,
        "nvrm-gpu-lost": "xid-79",
        "xid-154": "xid-79",
        "xid-45": "xid-79",
        "xid-119": "xid-79",
    }
    assert one(said, "xid-154").action is Suggested.REBOOT
    assert {f.device for f in said.findings} == {"0000:41:00.0"}
    assert said.unknown_lines == 0


def test_another_gpu_is_no_consequence() -> None:
    said = kernel(
        "NVRM: Xid (PCI:0000:41:00): 79, GPU has fallen off the bus.",
        "NVRM: Xid (PCI:0000:42:00): 119, Timeout after 6s of waiting for RPC response from GPU1 GSP!",
    )
    assert roots(said) == ["xid-79", "xid-119"]


def test_a_cause_comes_first() -> None:
    said = kernel(
        "NVRM: Xid (PCI:0000:41:00): 119, Timeout after 6s of waiting for RPC response from GPU0 GSP!",
        "NVRM: Xid (PCI:0000:41:00): 79, GPU has fallen off the bus.",
        "NVRM: Xid (PCI:0000:41:00): 154, GPU recovery action changed from 0x0 (None) to 0x1 (GPU Reset Required)",
    )
    assert one(said, "xid-119").root
    assert one(said, "xid-154").caused_by == "xid-119"


def test_a_consequence_alone_is_the_root_and_says_that_its_cause_is_missing() -> None:
    finding = one(kernel("NVRM: Xid (PCI:0000:41:00): 45, pid=4242, name=python3, Ch 00000008"), "xid-45")
    assert finding.root
    assert "It follows something else" in finding.reason


def test_the_driver_may_name_the_cause_itself() -> None:
    said = kernel(
        "NVRM: Xid (PCI:0000:41:00): 92, pid=1, name=x, many errors",
        "NVRM: Xid (PCI:0000:41:00): 109, pid=1, name=x, Ch 00000008 caused by previous Xid 92",
    )
    assert one(said, "xid-109").caused_by == "xid-92"


def test_an_all_ones_register_is_a_lost_link_not_a_firmware_that_refused() -> None:
    line = "NVRM: Xid (PCI:0000:41:00): 143, Error status 0x65 while polling for FSP boot complete, 0xffffffff, 0xffffffff"
    alone = kernel(line)
    assert roots(alone) == ["gpu-reads-all-ones"]
    assert one(alone, "xid-143").caused_by == "gpu-reads-all-ones"
    after = kernel("NVRM: Xid (PCI:0000:41:00): 79, GPU has fallen off the bus.", line)
    assert roots(after) == ["xid-79"]
    assert chain(after) == {"xid-79": None, "gpu-reads-all-ones": "xid-79", "xid-143": "xid-79"}


@pytest.mark.parametrize("code", ["0x177", "0x9f", "0x1e3", "0x33"])
def test_an_fsp_refusal_is_known_by_its_words_and_keeps_its_code(code: str) -> None:
    said = kernel(
        f"NVRM: GPU2 kfspFn_GH100: FSP response reported error. Task ID: 0x1 Command type: 0x14 Error code: {code}",
        "NVRM: GPU2 kfspDumpDebugState_GB100: NV_PFSP_FALCON_COMMON_SCRATCH_GROUP_2(0) = 0x9f",
        "NVRM: GPU2 kfspSendBootCommands_GH100: FSP boot cmds failed. RM cannot boot.",
        "NVRM: GPU2 RmInitAdapter: Cannot initialize GSP firmware RM",
        "NVRM: GPU 0000:c1:00.0: RmInitAdapter failed! (0x62:0x1a:1792)",
        "NVRM: GPU 0000:c1:00.0: rm_init_adapter failed, device minor number 2",
    )
    assert roots(said) == ["fsp-error-code"]
    refusal = one(said, "fsp-error-code")
    assert (refusal.code, refusal.device, refusal.action) == (code, "0000:c1:00.0", Suggested.POWER_CYCLE)
    assert {f.device for f in said.findings} == {"0000:c1:00.0"}, (
        "the index in GPU2 names nothing; the failed initialisation does"
    )
    assert one(said, "rm-init-adapter-failed").code == "0x62:0x1a", "the source line changes with each driver"


def test_two_indices_under_way_name_no_device() -> None:
    said = kernel(
        "NVRM: GPU0 kfspSendBootCommands_GH100: FSP boot cmds failed. RM cannot boot.",
        "NVRM: GPU1 kfspPollForResponse_IMPL: FSP command timed out",
        "NVRM: GPU 0000:c1:00.0: RmInitAdapter failed! (0x62:0x1a:1792)",
    )
    assert {f.device for f in said.findings if f.signature.startswith("fsp")} == {""}


def test_a_kill_after_a_traceback_is_the_servers_own() -> None:
    said = service(
        "[2026-03-09 16:02:28 TP0] Scheduler hit an exception: Traceback (most recent call last):",
        '  File "/opt/sglang/scheduler.py", line 3190, in run_scheduler_process',
        "    scheduler.event_loop_overlap()",
        "TypeError: 'NoneType' object cannot be interpreted as an integer",
        "",
        "[2026-03-09 16:02:28] Received sigquit from a child process. It usually means the child failed.",
        "sglang-qwen.service: Main process exited, code=killed, status=9/KILL",
        "sglang-qwen.service: Failed with result 'signal'.",
        "sglang-qwen.service: Scheduled restart job, restart counter is at 3.",
    )
    assert roots(said) == ["sglang-scheduler-exception"]
    assert set(chain(said).values()) == {None, "sglang-scheduler-exception"}
    assert one(said, "sglang-scheduler-exception").tail == "TypeError: 'NoneType' object cannot be interpreted as an integer"
    assert "oom" not in " ".join(chain(said))
    assert said.unknown_lines == 0


def test_an_unknown_exception_is_told_by_its_last_line_and_counted_as_unknown() -> None:
    said = service(
        "[2026-03-09 16:02:28 TP1] Scheduler hit an exception: Traceback (most recent call last):",
        '  File "x.py", line 1, in f',
        "FancyNewError: nobody has seen this",
    )
    assert one(said, "sglang-scheduler-exception").tail.startswith("FancyNewError")
    assert said.unknown_samples == ("FancyNewError: nobody has seen this",)


def test_out_of_host_memory_explains_the_kill_across_two_logs() -> None:
    said = judge(
        [
            LogLine(
                "Memory cgroup out of memory: Killed process 4242 (sglang::schedul) total-vm:1kB", time=NOON, source="kernel"
            ),
            LogLine(
                "Rank 2 scheduler died during initialization (exit code: -9). If exit code is -9 (SIGKILL), a common cause is …",
                time=NOON + timedelta(seconds=2),
                source="service",
                unit="a.service",
            ),
            LogLine(
                "a.service: Main process exited, code=killed, status=9/KILL",
                time=NOON + timedelta(seconds=4),
                source="systemd",
                unit="a.service",
            ),
        ]
    )
    assert roots(said) == ["oom-killed"]


def test_a_gpu_fault_explains_the_service_only_near_in_time() -> None:
    def with_gap(seconds: float) -> Judgement:
        return judge(
            [
                LogLine("NVRM: Xid (PCI:0000:41:00): 79, GPU has fallen off the bus.", time=NOON, source="kernel"),
                LogLine(
                    "CUDA error: unspecified launch failure",
                    time=NOON + timedelta(seconds=seconds),
                    source="service",
                    unit="a.service",
                ),
            ]
        )

    assert one(with_gap(3), "cuda-launch-failure").caused_by == "xid-79"
    assert one(with_gap(7200), "cuda-launch-failure").caused_by is None
    assert one(with_gap(-60), "cuda-launch-failure").caused_by is None


def test_one_boot_does_not_explain_the_next() -> None:
    said = judge(
        [
            LogLine("NVRM: Xid (PCI:0000:41:00): 79, GPU has fallen off the bus.", boot_id="a" * 32),
            LogLine("NVRM: Xid (PCI:0000:41:00): 154, GPU recovery action changed from 0x0 (None) to 0x1 (x)", boot_id="b" * 32),
        ]
    )
    assert one(said, "xid-154").root


# -------------------------------------------------------------------------------------------- devices and requesters

FAULT = "AMD-Vi: Event logged [IO_PAGE_FAULT domain=0x0018 address=0x4d7201180 flags=0x0020]"


@pytest.mark.parametrize("driver", ["mlx5_core", "ice", "nvme", "xhci_hcd", "snd_hda_intel"])
def test_a_fault_of_another_device_is_that_devices_own(driver: str) -> None:
    finding = one(kernel(f"{driver} 0000:c1:00.0: {FAULT}"), "amdvi-io-page-fault")
    assert (finding.verdict, finding.device) == (Verdict.WARN, "0000:c1:00.0")
    assert driver in finding.reason


def test_a_fault_of_a_gpu_fails() -> None:
    finding = one(kernel(f"nvidia 0000:41:00.0: {FAULT}"), "amdvi-io-page-fault")
    assert (finding.verdict, finding.fields["flags"], finding.fields["address"]) == (Verdict.FAIL, "0x0020", "0x4d7201180")


def test_an_old_line_without_a_driver_is_judged_by_what_the_log_knows_of_the_device() -> None:
    fault = "AMD-Vi: Event logged [IO_PAGE_FAULT device=c1:00.0 domain=0x0003 address=0x80000040 flags=0x0020]"
    nic = "pci 0000:c1:00.0: [8086:1592] type 00 class 0x020000 PCIe Endpoint"
    gpu = "pci 0000:c1:00.0: [10de:2bb5] type 00 class 0x030200 PCIe Legacy Endpoint"
    assert one(kernel(nic, fault), "amdvi-io-page-fault").verdict is Verdict.WARN
    assert one(kernel(gpu, fault), "amdvi-io-page-fault").verdict is Verdict.FAIL
    alone = one(kernel(fault), "amdvi-io-page-fault")
    assert alone.verdict is Verdict.FAIL
    assert "does not say what kind of device" in alone.reason
    known = one(kernel(fault, context=LogContext(gpus=frozenset({"0000:41:00.0"}))), "amdvi-io-page-fault")
    assert known.verdict is Verdict.WARN


def test_a_gpu_that_is_meant_for_another_driver_is_no_fault() -> None:
    line = "NVRM: The NVIDIA probe routine was not called for 1 device(s)."
    assert kernel(line).verdict is Verdict.FAIL
    assert kernel(line, context=LogContext(passthrough=frozenset({"0000:01:00.0"}))).verdict is Verdict.PASS


def test_addresses_are_normalised() -> None:
    said = kernel(
        "NVRM: Xid (PCI:00000000:C1:00): 79, GPU has fallen off the bus.",
        "NVRM: Xid (PCI:0000:c1:00): 79, GPU has fallen off the bus.",
    )
    assert [(f.device, f.count) for f in said.findings] == [("0000:c1:00.0", 2)]


# ------------------------------------------------------------------------------------------ messages over several lines


def test_the_three_line_message_is_one_finding() -> None:
    said = kernel(
        "NVRM: The NVIDIA GPU 0000:41:00.0",
        "NVRM: (PCI ID: 10de:2bb5) installed in this system has",
        "e1000e 0000:00:1f.6 eno1: NIC Link is Up",
        "NVRM: fallen off the bus and is not responding to commands.",
        "nvidia: probe of 0000:41:00.0 failed with error -1",
        "NVRM: The NVIDIA probe routine failed for 1 device(s).",
        "NVRM: None of the NVIDIA devices were initialized.",
    )
    assert roots(said) == ["nvrm-fallen-off-bus"]
    assert one(said, "nvrm-fallen-off-bus").device == "0000:41:00.0"
    assert said.unknown_lines == 0


def test_the_same_first_line_may_mean_the_wrong_driver() -> None:
    said = kernel(
        "NVRM: The NVIDIA GPU 0000:41:00.0 (PCI ID: 10de:1b80)",
        "NVRM: installed in this system is not supported by open",
        "NVRM: nvidia.ko because it does not include the required GPU",
        "NVRM: System Processor (GSP).",
        "NVRM: Please see the 'Open Linux Kernel Modules' and 'GSP",
        "NVRM: Firmware' sections in the driver README, available on",
    )
    assert [(f.signature, f.action) for f in said.findings] == [("nvrm-not-supported", Suggested.FIX_SOFTWARE)]
    assert said.unknown_lines == 0


def test_a_message_that_was_cut_is_unknown() -> None:
    assert kernel("NVRM: The NVIDIA GPU 0000:41:00.0", "NVRM: (PCI ID: 10de:2bb5) installed in this").verdict is Verdict.UNKNOWN


def test_a_device_table_dump_belongs_to_its_event() -> None:
    said = kernel(
        "iommu ivhd0: AMD-Vi: Event logged [ILLEGAL_DEV_TABLE_ENTRY device=0000:01:00.0 address=0xff8000000 flags=0x0a00]",
        "AMD-Vi: DTE[0]: 6b90000000000003",
        "AMD-Vi: DTE[1]: 0000100100080000",
    )
    assert [(f.signature, f.device) for f in said.findings] == [("amdvi-illegal-device-table-entry", "0000:01:00.0")]
    assert said.unknown_lines == 0


def test_an_event_whose_device_stands_in_the_next_line() -> None:
    said = kernel("AMD-Vi: Event logged [Device not attached to domain properly]", "AMD-Vi:   device=0000:41:00.0 domain=0x0000")
    assert one(said, "amdvi-not-attached").device == "0000:41:00.0"


# --------------------------------------------------------------------------------------------------- counts


def test_suppressed_lines_make_the_count_a_lower_bound_of_the_device_that_speaks_next() -> None:
    said = kernel(
        f"nvidia 0000:41:00.0: {FAULT}",
        f"nvidia 0000:42:00.0: {FAULT}",
        "amd_iommu_report_page_fault: 10432 callbacks suppressed",
        f"nvidia 0000:42:00.0: {FAULT}",
    )
    counts = {f.device: (f.count, f.at_least) for f in said.findings}
    assert counts == {"0000:41:00.0": (1, False), "0000:42:00.0": (10434, True)}


def test_a_late_summary_belongs_to_whoever_spoke_last() -> None:
    said = kernel(f"nvidia 0000:41:00.0: {FAULT}", "amd_iommu_report_page_fault: 7 callbacks suppressed")
    assert [(f.count, f.at_least) for f in said.findings] == [(8, True)]


def test_a_summary_without_any_line_of_its_kind_is_a_hole() -> None:
    assert "suppressed 7 messages" in kernel("amd_iommu_report_page_fault: 7 callbacks suppressed").not_observable[0]
    assert any("nobody_knows" in g for g in kernel("nobody_knows: 7 callbacks suppressed").not_observable)


def test_repeats_that_syslog_folded_are_counted() -> None:
    said = kernel("message repeated 5 times: [ NVRM: Xid (PCI:0000:41:00): 31, pid=1, name=x, MMU Fault]")
    assert one(said, "xid-31").count == 5


def test_a_flood_keeps_a_handful_of_lines() -> None:
    def flood() -> Iterable[str]:
        for i in range(5000):
            yield f"NVRM: GPU0 gpuSanityCheck_GH100: Possible bad register read: addr: 0x{i:x},  regvalue: 0xbadf5620"

    finding = one(kernel(*flood()), "nvrm-register-flood")
    assert finding.count == 5000
    assert len(finding.lines) == 6
    assert finding.lines[0] != finding.lines[-1]


# ------------------------------------------------------------------------------------- what cannot be seen, and scope


def test_a_log_that_starts_late_says_so() -> None:
    said = judge([LogLine("NVRM: Xid (PCI:0000:41:00): 31, pid=1", monotonic_s=4711.0)])
    assert (
        said.not_observable[0]
        == "the log does not begin at the boot (its first line is 4711 s after the boot): what came before cannot be seen"
    )
    assert (
        judge(
            [LogLine("Linux version 6.8.12-1-pve (x)", monotonic_s=0.0), LogLine("iommu: Adding to iommu group 3")]
        ).not_observable
        == ()
    )
    assert kernel("x", context=LogContext(since_s=10.0)).not_observable == ()


def test_without_translation_no_fault_can_be_logged() -> None:
    def about(context: LogContext) -> str:
        return " ".join(kernel("Linux version 6.8", "iommu: Default domain type: Translated", context=context).not_observable)

    assert "no device was added to an iommu group" in about(LogContext())
    assert "there are no iommu groups" in about(LogContext(iommu={}))
    identity = about(LogContext(gpus=frozenset({"0000:41:00.0"}), iommu={"0000:41:00.0": "identity"}))
    assert "IOMMU faults of 0000:41:00.0: an identity domain translates nothing" in identity
    assert about(LogContext(gpus=frozenset({"0000:41:00.0"}), iommu={"0000:41:00.0": "DMA-FQ"})) == ""
    passthrough = kernel(
        "Linux version 6.8", "iommu: Default domain type: Passthrough (set via kernel command line)"
    ).not_observable
    assert "default domain type is Passthrough" in passthrough[0]


def test_aer_that_firmware_keeps_is_not_observable() -> None:
    no = "acpi PNP0A08:00: _OSC: platform does not support [AER LTR DPC]"
    yes = "acpi PNP0A08:00: _OSC: OS now controls [PCIeHotplug PME AER PCIeCapability]"
    assert any("AER" in x for x in kernel(no).not_observable)
    assert not any("AER" in x for x in kernel(yes).not_observable)
    assert any("does not own AER" in x for x in kernel(yes, context=LogContext(aer_native=False)).not_observable)


def test_holes_in_the_journal_are_findings_and_reasons() -> None:
    said = judge([LogLine("Suppressed 1234 messages from sglang-qwen.service", source="journald")])
    assert said.verdict is Verdict.UNKNOWN
    assert "1234" in said.not_observable[0]


def test_speculation_without_a_decode_line_is_not_yet_observable() -> None:
    args = "server_args=ServerArgs(model_path='/m', speculative_algorithm='EAGLE', speculative_num_steps=5)"
    off = "server_args=ServerArgs(model_path='/m', speculative_algorithm=None, speculative_num_steps=None)"
    decode = "Decode batch, #running-req: 1, accept len: 3.10, accept rate: 0.52, gen throughput (token/s): 96.10, #queue-req: 0"
    assert any("no Decode line" in x for x in service(args).not_observable)
    assert service(args, decode).not_observable == ()
    assert service(off).not_observable == ()


def test_the_context_restricts_what_is_judged() -> None:
    lines = [
        LogLine("NVRM: Xid (PCI:0000:41:00): 31, pid=1", boot_id="aaaa", monotonic_s=5.0, time=NOON),
        LogLine("NVRM: Xid (PCI:0000:41:00): 79, x", boot_id="bbbb", monotonic_s=50.0, time=NOON + timedelta(minutes=1)),
    ]

    def ids(**context: object) -> list[str]:
        return [f.signature for f in judge(lines, context=LogContext(**context)).findings]  # type: ignore[arg-type]

    assert ids(boot_id="bb-bb") == ["xid-79"]
    assert ids(until_s=10.0) == ["xid-31"]
    assert ids(since=NOON + timedelta(seconds=30)) == ["xid-79"]


def test_lines_of_another_boot_alone_say_nothing() -> None:
    assert judge([LogLine("quiet", boot_id="aaaa")], context=LogContext(boot_id="bbbb")).verdict is Verdict.UNKNOWN


def test_a_message_with_newlines_is_judged_line_by_line() -> None:
    said = judge([LogLine("first\nValueError: Unknown speculative algorithm name: MTP", source="service", n=7)])
    assert [(f.signature, f.first.n) for f in said.findings] == [("sglang-unknown-algorithm", 7)]


def test_an_error_that_nobody_knows_is_reported() -> None:
    said = kernel("NVRM: quantumFluxAssert: something new broke", "AMD-Vi: Event logged [BRAND_NEW_EVENT device=0000:41:00.0]")
    assert said.unknown_lines == 2
    assert said.verdict is Verdict.UNKNOWN
    assert service("[2026-03-09 16:02:28 TP0] ERROR: nobody has seen this").unknown_lines == 1


def test_nothing_is_unknown_and_harmless_is_pass() -> None:
    assert judge([]).verdict is Verdict.UNKNOWN
    assert kernel("usb 1-1: new high-speed USB device number 2 using xhci_hcd").verdict is Verdict.PASS


SCARY = [
    "nvidia: module verification failed: signature and/or required key missing - tainting kernel",
    "nvidia 0000:75:00.0: [drm] No compatible format found",
    "nvidia 0000:75:00.0: [drm] Cannot find any crtc or sizes",
    "pci 0000:70:01.1: bridge window [io  size 0x5000]: can't assign; no space",
    "pci 0000:72:02.0: bridge window [mem size 0x00200000]: can't assign; no space",
    "pci 0000:72:02.0: bridge window [mem size 0x00200000]: failed to assign",
    "pci 0000:72:02.0: BAR 13: no space for [io  size 0x1000]",
    "    Display Mode                                       : Requested functionality has been deprecated",
    "Using default MoE kernel config. Performance might be sub-optimal! Config file not found at x",
    "Max running requests is reset to 48 for speculative decoding.",
    "Gracefully exiting... Remaining number of requests 0",
]


@pytest.mark.parametrize("line", SCARY)
def test_scary_but_benign_stays_benign(line: str) -> None:
    said = judge([LogLine(line, source="")])
    assert (said.findings, said.unknown_lines) == ((), 0)
    assert sum(said.benign.values()) == 1


def test_a_gpu_that_misses_its_large_bar_fails_where_a_small_window_does_not() -> None:
    assert kernel("pci 0000:41:00.0: BAR 1 [mem size 0x2000000000 64bit pref]: can't assign; no space").verdict is Verdict.FAIL


def test_counts_do_not_depend_on_the_source_of_numbers() -> None:
    said = judge(LogLine("NVRM: Xid (PCI:0000:41:00): 31, pid=1") for _ in range(3))
    finding = one(said, "xid-31")
    assert (finding.count, finding.first.n, finding.last.n) == (3, 1, 3)
    assert re.match(r"0000:41:00\.0: .*\(3 lines, code 31\)", finding.reason)
