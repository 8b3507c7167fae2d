"""reset_attempt.py on a sysfs in a folder: in which order it writes, what it refuses, what a write that never returns does."""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from proofbook.errors import CannotTell
from proofbook.model import Result
from proofbook.remote.gpu_reset import RESET_ATTEMPT, RESET_S, ResetLog, parse_reset, reset_command
from proofbook.remote.reset_attempt import Attempt, Sysfs, _in_the_child, read_options

GPU = "0000:41:00.0"
DEVICE, DRIVER = f"sys/bus/pci/devices/{GPU}", "sys/bus/pci/drivers/nvidia"


class Kernel(Sysfs):
    """Plain files, and a kernel behind them that does something when they are written to.

    ``answers``: step to the errno of a write. ``vendor``: what the device is after a reset.
    """

    def __init__(self, root: Path, vendor: bytes = b"\xde\x10", **answers: int) -> None:
        super().__init__(str(root))
        self.folder, self.vendor, self.answers = root, vendor, answers
        (root / DEVICE).mkdir(parents=True)
        (root / DRIVER).mkdir(parents=True)
        for name, text in (("reset_method", "flr bus\n"), ("reset", ""), ("vendor", "0x10de\n")):
            (root / DEVICE / name).write_text(text)
        (root / DEVICE / "config").write_bytes(b"\xde\x10\xb5\x2b")
        (root / DEVICE / "driver").symlink_to("../../drivers/nvidia")
        for name in ("bind", "unbind"):
            (root / DRIVER / name).write_text("")

    def write(self, path: str, text: str) -> None:
        """WHY in files: each write happens in a child process, and what it changes must be seen by the next."""
        name = os.path.basename(path)
        with (self.folder / "asked").open("a") as asked:
            asked.write(f"{name} {text}\n")
        if number := self.answers.get(name):
            raise OSError(number, os.strerror(number))
        super().write(path, text)
        match name:
            case "unbind":
                (self.folder / DEVICE / "driver").unlink()
            case "bind":
                (self.folder / DEVICE / "driver").symlink_to("../../drivers/nvidia")
            case "reset_method":
                (self.folder / DEVICE / "reset_method").write_text(f"{text}\n")
            case "reset":
                (self.folder / DEVICE / "config").write_bytes(self.vendor * 2)

    @property
    def asked(self) -> list[str]:
        file = self.folder / "asked"
        return file.read_text().splitlines() if file.exists() else []


def result(lines: str, stderr: str = "", status: int | None = 0) -> Result:
    return Result(reset_command(GPU, "flr"), status, lines.encode(), stderr.encode(), datetime.now(UTC), 0.1)


def made(kernel: Sysfs, method: str = "flr", **options: Any) -> tuple[int, ResetLog]:
    events: list[str] = []
    given = read_options(json.dumps({"address": GPU, "method": method, **options}))
    status = Attempt(given, kernel, lambda event: events.append(json.dumps(event))).run()
    return status, parse_reset(result("\n".join(events)))


def test_a_reset_is_made_off_its_driver_and_everything_is_put_back(tmp_path: Path) -> None:
    kernel = Kernel(tmp_path)
    status, log = made(kernel, "bus")
    assert kernel.asked == [f"unbind {GPU}", "reset_method bus", "reset 1", "reset_method flr bus", f"bind {GPU}"]
    assert (status, log.done, log.errors) == (0, ("unbind", "method", "reset", "put-back", "bind"), {})
    assert (log.vendor_before, log.vendor_after, log.driver_before, log.driver) == ("0x10de", "0x10de", "nvidia", "nvidia")
    assert log.listed == log.listed_after == ("flr", "bus")
    assert log.ended and not log.lost


@pytest.mark.parametrize("vendor", [b"\xff\xff", b"\x01\x00"], ids=["all ones", "not ready yet"])
def test_a_device_that_does_not_answer_any_more_is_lost_and_not_given_back(tmp_path: Path, vendor: bytes) -> None:
    kernel = Kernel(tmp_path, vendor)
    status, log = made(kernel)
    assert (status, log.lost, log.driver) == (0, True, "")
    assert kernel.asked[-1] == "reset_method flr bus"  # put back, but not bound
    assert (tmp_path / DEVICE / "vendor").read_text() == "0x10de\n"  # sysfs goes on saying who it was


def test_a_reset_that_the_kernel_refuses_is_told_with_its_error(tmp_path: Path) -> None:
    kernel = Kernel(tmp_path, reset=errno.ENOTTY)
    _, log = made(kernel)
    assert log.errors == {"reset": "ENOTTY (Inappropriate ioctl for device)"}
    assert (log.vendor_after, log.driver, log.listed_after) == ("0x10de", "nvidia", ("flr", "bus"))


def test_a_driver_that_does_not_let_go_keeps_everything_as_it_is(tmp_path: Path) -> None:
    kernel = Kernel(tmp_path, unbind=errno.EBUSY)
    _, log = made(kernel)
    assert kernel.asked == [f"unbind {GPU}"]
    assert (log.errors, log.driver, log.lost) == ({"unbind": "EBUSY (Device or resource busy)"}, "nvidia", False)


def test_a_method_that_cannot_be_chosen_is_no_reset_and_the_driver_is_back(tmp_path: Path) -> None:
    kernel = Kernel(tmp_path, reset_method=errno.EINVAL)
    _, log = made(kernel)
    assert kernel.asked == [f"unbind {GPU}", "reset_method flr", f"bind {GPU}"]
    assert "reset" not in log.done and log.driver == "nvidia" and not log.lost


def test_a_driver_that_does_not_take_it_back_is_told(tmp_path: Path) -> None:
    _, log = made(Kernel(tmp_path, bind=errno.ENODEV))
    assert log.errors == {"bind": "ENODEV (No such device)"} and log.driver == "" and not log.lost


def test_without_a_driver_there_is_none_to_take_off_or_give_back(tmp_path: Path) -> None:
    kernel = Kernel(tmp_path)
    (tmp_path / DEVICE / "driver").unlink()
    _, log = made(kernel)
    assert kernel.asked == ["reset_method flr", "reset 1", "reset_method flr bus"]
    assert (log.driver_before, log.driver, log.lost) == ("", "", False)


REFUSED: dict[str, tuple[str, Callable[[Path], object], str]] = {
    "not listed": ("cxl_bus", lambda folder: None, "cxl_bus is not in its reset_method (flr bus)"),
    "nothing listed": ("flr", lambda folder: (folder / "reset_method").write_text(""), "flr is not in its reset_method (empty)"),
    "no list": ("flr", lambda folder: (folder / "reset_method").unlink(), "lists no reset method for it: ENOENT"),
    "dead already": ("flr", lambda folder: (folder / "config").write_bytes(b"\xff" * 4), "reads as all ones already"),
    "no configuration space": ("flr", lambda folder: (folder / "config").unlink(), "cannot be read: ENOENT"),
    "an empty one": ("flr", lambda folder: (folder / "config").write_bytes(b""), "cannot be read: EIO"),
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_is_refused_touches_nothing(tmp_path: Path, what: str) -> None:
    method, breaks, why = REFUSED[what]
    kernel = Kernel(tmp_path)
    breaks(tmp_path / DEVICE)
    status, log = made(kernel, method)
    assert (status, kernel.asked) == (1, [])
    assert why in log.refused and log.ended


# --------------------------------------------------------------------------------------- the program as it is sent


@pytest.fixture
def stuck(tmp_path: Path) -> Iterator[Path]:
    """A sysfs whose ``reset`` takes nothing: who writes to it waits in the kernel, until this fixture lets it go."""
    Kernel(tmp_path)
    reset = tmp_path / DEVICE / "reset"
    reset.unlink()
    os.mkfifo(reset)
    yield tmp_path
    os.close(os.open(reset, os.O_RDONLY | os.O_NONBLOCK))


def run(root: Path, text: str) -> subprocess.CompletedProcess[bytes]:
    environment = {"PATH": os.environ["PATH"], "PROOFBOOK_TEST_ROOT": str(root)}
    argv = [sys.executable, "-c", RESET_ATTEMPT, text]
    return subprocess.run(argv, env=environment, capture_output=True, check=False)


def test_a_write_that_never_returns_is_left_behind_and_nothing_more_is_touched(stuck: Path) -> None:
    # subprocess.run ends although the stuck child lives: it holds none of our streams.
    came = run(stuck, json.dumps({"address": GPU, "method": "flr", "reset_s": 0.3}))
    log = parse_reset(result(came.stdout.decode()))
    assert (came.returncode, came.stderr, log.blocked, log.done) == (2, b"", "reset", ("unbind", "method"))
    assert log.vendor_after is None and not log.lost and log.ended
    assert (stuck / DRIVER / "bind").read_text() == ""


def test_a_write_that_returns_when_nobody_waits_any_more_does_not_go_on() -> None:
    reading, writing = os.pipe()
    os.close(reading)
    child = os.fork()
    if child == 0:
        try:
            _in_the_child(lambda: b"", writing)
        except OSError:  # what it says reaches nobody
            os._exit(7)
        os._exit(8)
    os.close(writing)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def test_the_command_runs_the_program_as_root_and_waits_longer_than_all_its_steps(tmp_path: Path) -> None:
    command = reset_command("41:00.0", "flr")
    assert command.root and command.timeout_s > RESET_S
    Kernel(tmp_path)
    came = run(tmp_path, command.argv[-1])
    log = parse_reset(result(came.stdout.decode()))
    assert (came.returncode, came.stderr) == (0, b"")
    # plain files: what was written is there, and the driver's link with it
    assert (tmp_path / DRIVER / "unbind").read_text() == (tmp_path / DRIVER / "bind").read_text() == GPU
    assert (tmp_path / DEVICE / "reset").read_text() == "1"
    assert log.done == ("unbind", "method", "reset", "put-back", "bind")


@pytest.mark.parametrize("text", ["{", '{"address": 1, "speed": "fast"}'])
def test_options_that_make_no_sense_are_refused(tmp_path: Path, text: str) -> None:
    came = run(tmp_path, text)
    assert came.returncode == 64 and parse_reset(result(came.stdout.decode())).refused


# ------------------------------------------------------------------------------------------------- what it tells


@pytest.mark.parametrize(
    ("said", "why"),
    [
        ("", "did not run"),
        ("Traceback (most recent call last):", "said something else"),
        ('{"event":"begin"}', "left out 'listed'"),
        ('{"event":"surprise"}', "does not know"),
        ("[1]", "said something else"),
    ],
)
def test_what_is_not_its_answer_is_not_read_as_one(said: str, why: str) -> None:
    with pytest.raises(CannotTell, match=why):
        parse_reset(result(said, stderr="sh: 1: python3: not found", status=127))


def test_an_answer_that_was_cut_off_did_not_end_and_lost_nothing() -> None:
    begin = {"event": "begin", "address": GPU, "method": "flr", "listed": ["flr"], "vendor": "0x10de", "driver": "nvidia"}
    log = parse_reset(result(json.dumps(begin) + '\n{"event":"step","step":"unbind","error":""}\n', status=None))
    assert not log.ended and not log.lost and log.done == ("unbind",)
