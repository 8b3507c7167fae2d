"""What kind of text this is, line by line: enough to say what was read, and to refuse what nobody can judge."""

from __future__ import annotations

import re
from collections import Counter

from proofbook.signatures.formats import clean

__all__ = ["NAMES", "Recogniser", "kind_of"]

#: The kinds, as a person names them.
NAMES = {
    "dmesg": "kernel log (dmesg)",
    "kernel": "kernel log (without times)",
    "journal": "journal or syslog (text)",
    "journal-json": "journal (JSON)",
    "journal-export": "journal (export)",
    "sglang": "SGLang log",
    "server": "inference server or web server log",
    "nccl": "NCCL log",
    "systemd": "systemd status",
    "smi-table": "nvidia-smi table",
    "smi-q": "nvidia-smi -q",
    "smi-xml": "nvidia-smi -q -x",
    "lspci": "lspci",
    "bug-report": "nvidia-bug-report",
    "python": "Python traceback",
}

_KINDS = tuple(
    (kind, re.compile(pattern))
    for kind, pattern in (
        ("journal-json", r'\s*(?:data: )?\x1e?\{.*"(?:MESSAGE|__REALTIME_TIMESTAMP|log)" ?:'),
        (
            "dmesg",
            r"(?:<\d+>)?\[(?:\s*\d+\.\d{3,9}\]|\w{3} \w{3}\s+\d+ \d\d:\d\d:\d\d \d{4}\] )|"
            r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d,\d+[+-]",
        ),
        (
            "sglang",
            r".*\[\d{4}-\d\d-\d\d \d\d:\d\d:\d\d(?:\.\d+)?(?: [A-Z]{2}\d+)*\] |.*server_args=|.*\b(?:Decode|Prefill) batch[,.]",
        ),
        (
            "journal",
            r"(?:[A-Z][a-z]{2} +\d{1,2} \d\d:\d\d:\d\d(?:\.\d+)?|\w{3} \d{4}-\d\d-\d\d \d\d:\d\d:\d\d(?:\.\d+)? \S+|"
            r"\d{4}-\d\d-\d\d[T ]\d\d:\d\d:\d\d\S*) \S+ [^\s:]+(?:\[\d+\])?: "
            r"|-- (?:Boot [0-9a-f]{32}|Reboot|Logs begin|Journal begins)"
            r"|\w[\w.@-]*\[\d+\]: ",
        ),
        ("journal-export", r"(?:__CURSOR|__REALTIME_TIMESTAMP|_BOOT_ID|MESSAGE)="),
        (
            "smi-q",
            r"=+NVSMI LOG=+|Attached GPUs\s+: |GPU [0-9A-Fa-f]{8}:[0-9A-Fa-f]{2}:|    (?:GPU Recovery Action|Product Name)\s+: ",
        ),
        ("smi-xml", r"\s*<(?:nvidia_smi_log|gpu id=|gpu_recovery_action|driver_version)"),
        (
            "smi-table",
            r"\|? ?NVIDIA-SMI |\| +\d+ +NVIDIA |No devices were found|Failed to initialize NVML|"
            r"Unable to determine the device handle|\d+, (?:[0-9A-F]{8}:|NVIDIA )|GPU \d+: NVIDIA ",
        ),
        (
            "lspci",
            r"(?:[0-9a-f]{4}:)?[0-9a-f]{2}:[0-9a-f]{2}\.[0-7] [A-Z0-9][\w /.,()-]+(?: \[[0-9a-f]{4}\])?: |"
            r"\t+(?:LnkSta|LnkCap|UESta|DevSta):",
        ),
        ("systemd", r"\s*(?:●|○|×|↻)? ?[\w@.\\-]+\.(?:service|socket|mount|target|timer|scope) - |\s+(?:Active|Main PID): "),
        ("bug-report", r"nvidia-bug-report\.sh|Start of NVIDIA bug report log file|\*\*\* (?:/\S+|ls: )"),
        ("nccl", r".*\bNCCL (?:INFO|WARN|DEBUG|TRACE|version)\b|# (?:Out of bounds values|Avg bus bandwidth|nThread|nccl-tests)"),
        (
            "server",
            r"(?:INFO|WARNING|ERROR|CRITICAL|DEBUG)(?::    |:\s{1,}|:[\w.]+:| +\d\d-\d\d \d\d:| +\[)|(?:\(\w+ pid=\d+\)) ",
        ),
        ("python", r"Traceback \(most recent call last\):|(?:[a-z_]+\.)*[A-Z]\w*(?:Error|Exception): |(?:usage|[\w.-]+\.py): "),
        (
            "kernel",
            r"NVRM: |nvidia(?:-\w+)?(?: [0-9a-f]{4}:\S+)?: |AMD-Vi: |DMAR: |iommu[ :]|"
            r"[a-z][\w-]* [0-9a-f]{4}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-7]: |Linux version |(?:Kernel c|C)ommand line: |ACPI: |"
            r"usb \d+-[\d.]+: |EXT4-fs |BIOS-e820: |systemd\[1\]: |kernel: |watchdog: |INFO: task |Out of memory: |"
            r"arm-smmu-v3 |mce: |audit: |nvme nvme\d|sd \d+:\d+:",
        ),
    )
)


def kind_of(line: str) -> str:
    """The kind of one line, ``""`` when it is none that is known."""
    for kind, pattern in _KINDS:
        if pattern.match(line):
            return kind
    return ""


class Recogniser:
    """Counts kinds over a sample of the lines: the beginning of every stretch, and its end."""

    FIRST, LAST = 600, 200

    def __init__(self) -> None:
        self.kinds: Counter[str] = Counter()
        self.looked_at = 0

    def look(self, data: bytes) -> None:
        head = data[: 400 * self.FIRST]
        lines = head.split(b"\n", self.FIRST)[: self.FIRST]
        if len(data) > len(head):
            lines += data[-400 * self.LAST :].split(b"\n")[1:][-self.LAST :]
        for raw in lines:
            text = clean(raw.decode("utf-8", "replace"))
            if text.strip():
                self.looked_at += 1
                self.kinds[kind_of(text.removeprefix("> "))] += 1

    def names(self) -> list[str]:
        """The kinds that were found, most lines first."""
        return [NAMES[k] for k, _ in self.kinds.most_common() if k]
