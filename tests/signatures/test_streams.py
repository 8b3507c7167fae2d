"""Whole logs: the filter lets every line through that anything claims, in every format, by every engine."""

from __future__ import annotations

import io
import json
import random
from datetime import UTC, datetime
from importlib.util import find_spec
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from proofbook.model import Verdict
from proofbook.signatures import LogContext, LogLine, judge, load
from proofbook.signatures.formats import clean, message_text, read_journal_line, read_line
from proofbook.signatures.prefilter import ENGINES, chunks, engine, prefilter
from proofbook.signatures.streams import judge_journal_json, judge_text, read_stretches

SIGNATURES = load()
EXAMPLES = sorted({e for s in SIGNATURES for e in s.examples if "\n" not in e})
HERE = [e for e in ENGINES if e == "re" or find_spec(e)]
SAMPLES = Path(__file__).parents[1] / "samples"

noise = st.text(st.characters(codec="utf-8", exclude_characters="\n"), max_size=60)
mutated = st.builds(
    lambda line, at, extra, cut: (line[: at % (len(line) + 1)] + extra + line[at % (len(line) + 1) :])[: max(1, len(line) - cut)],
    st.sampled_from(EXAMPLES),
    st.integers(0, 400),
    noise,
    st.integers(0, 30),
)
line = st.one_of(noise, mutated, st.sampled_from(EXAMPLES))


@settings(max_examples=150, deadline=None)
@given(st.lists(line, max_size=30))
def test_the_filter_lets_through_every_line_that_something_claims(lines: list[str]) -> None:
    lines = [x for x in lines if "\r" not in x]
    data = "".join(x + "\n" for x in lines).encode("utf-8", "surrogatepass")
    claimed = {i for i, x in enumerate(lines) if any(m.match(x) for m in SIGNATURES.matchers)}
    for name in HERE:
        passed = {n for n, *_ in prefilter(SIGNATURES.anchors, name).lines(data)}
        assert claimed <= passed, name


@settings(max_examples=100, deadline=None)
@given(st.lists(line, max_size=20))
def test_all_engines_pass_the_same_lines(lines: list[str]) -> None:
    data = "".join(x + "\n" for x in lines).encode()
    assert len({tuple((n, s, e) for n, s, e, _ in prefilter(SIGNATURES.anchors, name).lines(data)) for name in HERE}) == 1


@pytest.mark.parametrize("name", HERE)
def test_anchors_that_an_engine_tells_are_all_of_the_lines(name: str) -> None:
    data = "".join(x + "\n" for x in EXAMPLES).encode()
    for _, start, end, anchors in prefilter(SIGNATURES.anchors, name).lines(data):
        if anchors is not None:
            text = data[start:end].decode()
            assert set(anchors) == {a for a in SIGNATURES.anchors if a in text}


def test_an_engine_that_is_not_installed_is_refused_by_name() -> None:
    with pytest.raises(ImportError):
        engine([b"abc"], "no_such_engine")


def test_the_lines_after_a_traceback_come_with_it() -> None:
    data = b"x\nTraceback (most recent call last):\n  File a\n    code\nOddThing\nlater\n"
    for name in HERE:
        assert [n for n, *_ in prefilter(SIGNATURES.anchors, name).lines(data)] == [1, 2, 3, 4, 5]


@given(st.lists(st.binary(max_size=12).map(lambda b: b.replace(b"\n", b"")), max_size=40), st.integers(1, 30))
def test_stretches_are_whole_lines_and_lose_nothing(lines: list[bytes], size: int) -> None:
    data = b"\n".join(lines)
    pieces = [piece for _, piece in chunks(data, size)]
    assert b"".join(pieces) == data
    assert all(p.endswith(b"\n") for p in pieces[:-1])
    assert b"".join(read_stretches(io.BytesIO(data), size)) == data


# ----------------------------------------------------------------------------------------------------- formats

XID = "NVRM: Xid (PCI:0000:41:00): 79, GPU has fallen off the bus."
FORMS = {
    "dmesg": f"[  123.456789] {XID}",
    "dmesg with caller": f"[  123.456789][ T4242] {XID}",
    "dmesg -T": f"[Mon Mar  9 16:02:27 2026] {XID}",
    "dmesg raw": f"<4>[  123.456789] {XID}",
    "dmesg iso": f"2026-03-09T16:02:27,123456+00:00 {XID}",
    "journalctl": f"Mar 09 16:02:27 gpu01 kernel: {XID}",
    "journalctl monotonic": f"[  123.456789] gpu01 kernel: {XID}",
    "journalctl iso": f"2026-03-09T16:02:27+00:00 gpu01 kernel: {XID}",
    "journalctl iso precise": f"2026-03-09T16:02:27.123456+0000 gpu01 kernel: {XID}",
    "journalctl full": f"Mon 2026-03-09 16:02:27 UTC gpu01 kernel: {XID}",
    "syslog with seconds": f"Mar  9 16:02:27 gpu01 kernel: [  123.456789] {XID}",
    "colour and CRLF": f"\x1b[31m[  123.456789] {XID}\x1b[0m\r",
    "program only": f"kernel: {XID}",
}


@pytest.mark.parametrize("form", FORMS)
def test_a_kernel_line_is_read_in_every_format(form: str) -> None:
    read = read_line(FORMS[form], year=2026)
    assert (read.text, read.source) == (XID, "kernel")
    said = judge_text((FORMS[form] + "\n").encode())
    assert [(f.signature, f.device) for f in said.findings] == [("xid-79", "0000:41:00.0")]


def test_times_are_utc_and_only_when_the_zone_is_known() -> None:
    assert read_line(FORMS["journalctl iso"]).time == datetime(2026, 3, 9, 16, 2, 27, tzinfo=UTC)
    assert read_line(FORMS["journalctl"], year=2026).time == datetime(2026, 3, 9, 16, 2, 27, tzinfo=UTC)
    assert read_line(FORMS["journalctl"]).time is None
    assert read_line("2026-03-09T18:02:27+0200 gpu01 kernel: x").time == datetime(2026, 3, 9, 16, 2, 27, tzinfo=UTC)
    assert read_line(FORMS["dmesg"]).monotonic_s == 123.456789


def test_programs_become_sources_and_units() -> None:
    systemd = read_line("Mar 09 16:02:27 gpu01 systemd[1]: a.service: Failed with result 'exit-code'.")
    assert (systemd.source, systemd.text) == ("systemd", "a.service: Failed with result 'exit-code'.")
    server = read_line("Mar 09 16:02:27 llm-two sglang-qwen[15462]: [2026-03-09 16:02:27 TP0] Load weight end.")
    assert (server.source, server.unit, server.text) == (
        "service",
        "sglang-qwen.service",
        "[2026-03-09 16:02:27 TP0] Load weight end.",
    )
    bare = read_line("[2026-03-09 16:02:27 TP0] Load weight end.")
    assert (bare.source, bare.text) == ("", "[2026-03-09 16:02:27 TP0] Load weight end.")


def test_escapes_go_and_text_stays() -> None:
    assert clean("\x1b[1;31mred\x1b[0m text\r") == "red text"
    assert clean("plain [drm] text") == "plain [drm] text"


def entry(message: object, **fields: object) -> bytes:
    base = {"__REALTIME_TIMESTAMP": "1773072147000000", "__MONOTONIC_TIMESTAMP": "123456789", "_BOOT_ID": "ab" * 16}
    return json.dumps({**base, "MESSAGE": message, **fields}).encode() + b"\n"


def test_a_journal_line_has_its_message_in_any_shape() -> None:
    assert message_text("x") == "x"
    assert message_text([104, 105, 255]) == "hi\\xff"
    assert message_text(["a", "b"]) == "a\nb"
    assert message_text(None) is None
    read = read_journal_line(entry(XID, _TRANSPORT="kernel"))
    assert read == LogLine(XID, 123.456789, datetime(2026, 3, 9, 16, 2, 27, tzinfo=UTC), None, "ab" * 16, None, "kernel")
    about = read_journal_line(entry("a.service: x", SYSLOG_IDENTIFIER="systemd", UNIT="a.service", INVOCATION_ID="cd" * 16))
    assert about is not None
    assert (about.source, about.unit, about.invocation) == ("systemd", "a.service", "cd" * 16)
    with pytest.raises(ValueError, match="malformed"):
        read_journal_line(b"no json")


@pytest.mark.parametrize("name", HERE)
def test_journal_json_finds_messages_in_any_shape(name: str) -> None:
    data = b"".join(
        [
            entry("Linux version 6.8", _TRANSPORT="kernel"),
            entry("iommu: Adding to iommu group 1", _TRANSPORT="kernel"),
            *(
                entry(f"quiet line {i}", _CMDLINE="python -m sglang.launch_server --speculative-algorithm EAGLE")
                for i in range(50)
            ),
            entry(list(XID.encode()), _TRANSPORT="kernel"),
            entry('error loading module "nvidia": key was rejected by service', SYSLOG_IDENTIFIER="systemd-modules-load"),
            entry(None),
        ]
    )
    said = judge_journal_json(data, engine=name)
    assert {f.signature for f in said.findings} == {"xid-79", "nvrm-module-rejected"}
    assert said.lines == 55
    assert said.not_observable == ("1 messages were too large for this output and are missing (journalctl --all shows them)",)


def test_a_damaged_journal_line_is_a_hole() -> None:
    data = entry("Linux version 6.8", _TRANSPORT="kernel") + b'{"MESSAGE":"NVRM: Xid (PCI:0000:41:00): 79, cut'
    assert any("no whole journal entries" in x for x in judge_journal_json(data).not_observable)


def test_filtered_and_unfiltered_judgement_are_the_same() -> None:
    random.seed(7)
    lines = [random.choice([*EXAMPLES, "quiet", "x: y", "usb 1-1: new device"]) for _ in range(600)]
    whole = judge(LogLine(x, source="", n=i) for i, x in enumerate(lines, 1))
    for name in HERE:
        filtered = judge_text("".join(x + "\n" for x in lines).encode(), engine=name)
        assert filtered.findings == whole.findings
        assert filtered.unknown_lines == whole.unknown_lines
        assert filtered.benign == whole.benign


def test_small_stretches_give_the_same_judgement_as_one_buffer() -> None:
    data = "".join(x + "\n" for x in EXAMPLES * 3).encode()
    whole = judge_text(data)
    streamed = judge_text(read_stretches(io.BytesIO(data), 700))
    assert streamed.lines == whole.lines
    assert [(f.signature, f.device, f.count) for f in streamed.findings] == [
        (f.signature, f.device, f.count) for f in whole.findings
    ]


@pytest.mark.parametrize(
    ("tail", "says"),
    [(b"[  9.000000] NVRM: loading NVID", "ends in the middle of a line"), (b"\x00" * 64, "zero bytes")],
)
def test_a_log_that_was_cut_says_so(tail: bytes, says: str) -> None:
    data = b"[    0.000000] Linux version 6.8\n" + b"[    1.000000] quiet\n" * 30 + tail
    assert any(says in x for x in judge_text(data).not_observable)


def test_an_empty_log_is_unknown() -> None:
    assert judge_text(b"").verdict is Verdict.UNKNOWN
    assert judge_journal_json(b"").verdict is Verdict.UNKNOWN


def test_a_healthy_boot_gives_no_finding() -> None:
    for sample in sorted(SAMPLES.glob("*dmesg*boot*.txt")):
        passthrough = frozenset({"0000:01:00.0"}) if "vfio" in sample.name else frozenset()
        said = judge_text(sample.read_bytes(), context=LogContext(passthrough=passthrough))
        assert (said.verdict, said.findings, said.unknown_samples) == (Verdict.PASS, (), ()), sample.name
