"""A machine that says what a test wrote down, and the readers' view of it."""

from __future__ import annotations

import fnmatch
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from proofbook.model import Command, Probe, Result
from proofbook.probes import Answer, drive

SAMPLES = Path(__file__).parents[1] / "samples" / "probes"
NOW = datetime(2026, 4, 8, 15, 10, 15, tzinfo=UTC)
BOOT = "7c0e2c5b3f0e4f0a9c550a4b1d2e3f40"


@dataclass
class Said:
    """What one command answers. ``lost``: bytes of stdout that were not kept."""

    stdout: str | bytes = ""
    stderr: str = ""
    status: int | None = 0
    trouble: str = ""
    timed_out: bool = False
    lost: int = 0

    def result(self, command: Command) -> Result:
        out = self.stdout.encode() if isinstance(self.stdout, str) else self.stdout
        return Result(command, self.status, out, self.stderr.encode(), NOW, 0.01, self.timed_out, self.lost, trouble=self.trouble)


@dataclass
class TalkingMachine:
    """Answers by the words that a command holds in a row, the rule that was written last first; files from a table."""

    files: dict[str, str] = field(default_factory=dict)
    links: dict[str, str] = field(default_factory=dict)
    unreadable: dict[str, str] = field(default_factory=dict)
    directories: list[str] = field(default_factory=list)
    rules: list[tuple[tuple[str, ...], Said]] = field(default_factory=list)
    as_root: dict[str, Any] = field(default_factory=dict)  # when given, what every question as root answers
    rounds: list[tuple[Command, ...]] = field(default_factory=list)

    def on(self, *words: str, **said: Any) -> TalkingMachine:
        self.rules.insert(0, (words, Said(**said)))
        return self

    def gather(self, commands: Sequence[Command]) -> list[Result]:
        self.rounds.append(tuple(commands))
        return [self._answer(command).result(command) for command in commands]

    def _answer(self, command: Command) -> Said:
        if command.root and self.as_root:
            return Said(**self.as_root)
        for words, said in self.rules:
            if any(command.argv[i : i + len(words)] == words for i in range(len(command.argv))):
                return said
        if "proofbook-read-files" in command.argv:
            at = command.argv.index("proofbook-read-files") + 1
            return Said("".join(self._match(pattern) for pattern in command.argv[at:]))
        return Said(stderr=f"sh: 1: {command.argv[0]}: not found\n", status=127)

    def _match(self, pattern: str) -> str:
        def fits(path: str) -> bool:
            return path.count("/") == pattern.count("/") and fnmatch.fnmatchcase(path, pattern)

        text = "".join(
            f"F {p}\n" + "".join(f"|{line}\n" for line in body.splitlines()) for p, body in self.files.items() if fits(p)
        )
        text += "".join(f"L {p}\n|{target}\n" for p, target in self.links.items() if fits(p))
        text += "".join(f"E {p}\n|{why}\n" for p, why in self.unreadable.items() if fits(p))
        text += "".join(f"D {path}\n" for path in self.directories if fits(path))
        everything = [*self.files, *self.links, *self.unreadable]
        if not text and any(p.startswith(pattern + "/") for p in everything):
            return f"D {pattern}\n"
        return text or f"N {pattern}\n"

    def ask(self, probe: Probe[Any]) -> Answer[Any]:
        return drive([probe], self.gather)[probe]

    def value(self, probe: Probe[Any]) -> Any:
        answer = self.ask(probe)
        assert answer.known, answer.unknown
        return answer.value

    def unknown(self, probe: Probe[Any]) -> str:
        answer = self.ask(probe)
        assert not answer.known, answer.value
        assert answer.value is None
        return answer.unknown

    def asked(self) -> list[Command]:
        return [command for batch in self.rounds for command in batch]


@pytest.fixture
def machine() -> TalkingMachine:
    return TalkingMachine()


@pytest.fixture
def sample() -> Any:
    """Text of a file in tests/samples/probes."""
    return lambda name: (SAMPLES / name).read_text(encoding="utf-8")


@pytest.fixture
def boot() -> str:
    """The id of the boot that :func:`entry` and the machines of these tests are on."""
    return BOOT


@pytest.fixture
def entry() -> Any:
    """``entry(seconds, text, **fields)``: one line of ``journalctl -o json``, received when it was written."""

    def make(seconds: float, message: Any, *, boot_id: str = BOOT, **fields: Any) -> str:
        booted = int(NOW.timestamp() * 1e6) - 3600 * 1_000_000
        known: Mapping[str, Any] = {
            "__REALTIME_TIMESTAMP": str(booted + int(seconds * 1e6)),
            "__MONOTONIC_TIMESTAMP": str(int(seconds * 1e6)),
            "_BOOT_ID": boot_id,
            "PRIORITY": "6",
            "MESSAGE": message,
        }
        return json.dumps({**known, **fields}) + "\n"

    return make


@pytest.fixture
def kernel_entry(entry: Any) -> Any:
    """A kernel line as journald keeps it: with the kernel's own stamp beside the moment of its arrival."""

    def make(seconds: float, text: Any, **fields: Any) -> str:
        kernel = {"_TRANSPORT": "kernel", "SYSLOG_IDENTIFIER": "kernel", "_SOURCE_MONOTONIC_TIMESTAMP": str(int(seconds * 1e6))}
        return str(entry(max(seconds, 4.0), text, **{**kernel, **fields}))

    return make
