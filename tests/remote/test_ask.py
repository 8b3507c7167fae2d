"""The programs that read files, open devices and ask CUDA, run as a machine would run them."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path

import pytest

from proofbook import remote
from proofbook.errors import CannotTell
from proofbook.model import Command, Result, command

SHELLS = [["dash"], ["bash", "--posix"], ["busybox", "sh"]]


@pytest.fixture(params=SHELLS, ids=lambda argv: argv[0])
def shell(request: pytest.FixtureRequest) -> list[str]:
    argv: list[str] = request.param
    if shutil.which(argv[0]) is None:
        pytest.skip(f"{argv[0]} is not installed")
    return argv


def done(asked: Command, shell: Sequence[str] = ("sh",), *, uid: int | None = None) -> Result:
    argv = [*shell, *asked.argv[1:]] if asked.argv[0] == "sh" else list(asked.argv)
    said = subprocess.run(argv, input=asked.stdin, capture_output=True, timeout=60, check=False, user=uid)
    return Result(asked, said.returncode, said.stdout, said.stderr, datetime.now(UTC), 0.0)


def answer(text: str) -> Result:
    return Result(remote.read_files("/x"), 0, text.encode(), b"", datetime.now(UTC), 0.0)


def test_files_links_folders_and_what_is_not_there(shell: list[str], tmp_path: Path) -> None:
    (tmp_path / "a").write_text("one\n  two\\n \n\nlast")
    (tmp_path / "b").write_text("|F /x\nN y\n")
    (tmp_path / "empty").write_text("")
    (tmp_path / "dir").mkdir()
    (tmp_path / "link").symlink_to("../some where")
    (tmp_path / "dangling").symlink_to("/no/such")
    os.mkfifo(tmp_path / "fifo")
    files = remote.parse_files(done(remote.read_files(f"{tmp_path}/*", f"{tmp_path}/none*", f"{tmp_path}/nothing"), shell))
    assert files.files == {f"{tmp_path}/a": "one\n  two\\n \n\nlast", f"{tmp_path}/b": "|F /x\nN y", f"{tmp_path}/empty": ""}
    assert files.links == {f"{tmp_path}/link": "../some where", f"{tmp_path}/dangling": "/no/such"}
    assert files.dirs == {f"{tmp_path}/dir"}
    assert files.unreadable == {f"{tmp_path}/fifo": "not a regular file"}
    assert files.absent == (f"{tmp_path}/none*", f"{tmp_path}/nothing")
    assert files.get(f"{tmp_path}/empty") == ""
    for path, why in [
        ("nothing", "does not exist"),
        ("fifo", "cannot be read"),
        ("link", "is a link to"),
        ("dir", "folder"),
        ("zz", "was not asked"),
    ]:
        with pytest.raises(CannotTell, match=why):
            files.get(f"{tmp_path}/{path}")


def test_every_text_byte_survives(shell: list[str], tmp_path: Path) -> None:
    text = bytes(b for b in range(1, 256)) + b"\n"
    (tmp_path / "bytes").write_bytes(text)
    result = done(remote.read_files(str(tmp_path / "bytes")), shell)
    assert result.stdout.split(b"\n", 1)[1] == b"|" + text[:9] + b"\n|" + text[10:]


def test_the_kernels_own_files(shell: list[str]) -> None:
    """/proc/sys ends after the first read of a byte for a shell that reads byte by byte."""
    files = remote.parse_files(
        done(remote.read_files("/proc/sys/kernel/pid_max", "/proc/version", "/proc/sys/kernel/rando*"), shell)
    )
    for path in ("/proc/sys/kernel/pid_max", "/proc/version"):
        assert files.get(path) == Path(path).read_text().rstrip("\n")
    assert "/proc/sys/kernel/random" in files.dirs
    assert "/proc/sys/kernel/randomize_va_space" in files.files


def test_a_read_error_is_not_an_empty_file(shell: list[str]) -> None:
    files = remote.parse_files(done(remote.read_files("/proc/self/mem"), shell))
    assert files.unreadable == {"/proc/self/mem": "Input/output error"}


def test_no_permission_is_not_absence(shell: list[str], tmp_path: Path) -> None:
    if os.geteuid() != 0:
        pytest.skip("needs root, to become somebody who may not")
    tmp_path.chmod(0o755)
    for parent in tmp_path.parents[:2]:
        parent.chmod(0o755)
    secret, closed = tmp_path / "secret", tmp_path / "closed"
    secret.write_text("x")
    secret.chmod(0o600)
    closed.mkdir(0o700)
    (closed / "in").write_text("x")
    asked = remote.read_files(str(secret), f"{closed}/in", f"{closed}/*", f"{closed}/deep/er")
    files = remote.parse_files(done(asked, shell, uid=65534))
    assert files.unreadable == dict.fromkeys(
        [str(secret), f"{closed}/in", f"{closed}/*", f"{closed}/deep/er"], "Permission denied"
    )
    assert files.absent == ()


@pytest.mark.parametrize("text", ["F /x\n|0x10de", "hello\n", "|0x10de\n", "X /y\n"])
def test_what_is_no_answer_is_not_taken_for_one(text: str) -> None:
    with pytest.raises(CannotTell):
        remote.parse_files(answer(text))


def test_devices_open_or_say_why(shell: list[str], tmp_path: Path) -> None:
    paths = ("/dev/null", "/dev/no-such", "/dev/tty", "/proc/version", str(tmp_path))
    opened = remote.parse_open_devices(done(remote.open_devices(*paths), shell))
    assert opened["/dev/null"] == "ok"
    assert opened["/dev/no-such"] == "absent"
    assert opened[str(tmp_path)] == "Is a directory"
    assert list(opened) == list(paths)
    if os.geteuid() == 0:
        opened = remote.parse_open_devices(done(remote.open_devices("/dev/mem"), shell, uid=65534))
        assert opened["/dev/mem"] in ("Permission denied", "absent")


def test_an_answer_for_other_devices_is_none() -> None:
    asked = remote.open_devices("/dev/nvidia0", "/dev/nvidiactl")
    for text in (b"ok /dev/nvidia0\n", b"ok /dev/nvidia0\nok /dev/nvidia1\n", b"what\nis this\n"):
        with pytest.raises(CannotTell):
            remote.parse_open_devices(Result(asked, 0, text, b"", datetime.now(UTC), 0.0))


# ------------------------------------------------------------------------------------------------- CUDA

FAKE_CUDA = """
#include <signal.h>
#include <stdlib.h>
#include <unistd.h>
int cuInit(unsigned flags) { if (getenv("DIE")) raise(SIGSEGV); return atoi(getenv("CODE")); }
int cuDeviceGetCount(int *n) { *n = 4; return 0; }
int cuGetErrorString(int code, const char **text) { *text = "no CUDA-capable device is detected"; return 0; }
"""


@pytest.fixture(scope="module")
def cuda(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A library that answers as libcuda does."""
    compiler = shutil.which("cc")
    if compiler is None:
        pytest.skip("needs a C compiler")
    folder = tmp_path_factory.mktemp("cuda")
    (folder / "cuda.c").write_text(FAKE_CUDA)
    subprocess.run([compiler, "-shared", "-fPIC", "-o", folder / "libcuda.so.1", folder / "cuda.c"], check=True)
    return folder


def cuda_says(monkeypatch: pytest.MonkeyPatch, **env: str) -> remote.CuInit:
    for name, value in env.items():
        monkeypatch.setenv(name, value)
    asked = remote.cu_init()
    said = subprocess.run([sys.executable, *asked.argv[1:]], capture_output=True, timeout=60, check=False)
    return remote.parse_cu_init(Result(asked, said.returncode, said.stdout, said.stderr, datetime.now(UTC), 0.0))


def test_cuda_with_its_devices(cuda: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    said = cuda_says(monkeypatch, LD_LIBRARY_PATH=str(cuda), CODE="0")
    assert said == remote.CuInit(f"{cuda}/libcuda.so.1", 0, 4, None)


def test_cuda_that_fails_or_dies(cuda: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    said = cuda_says(monkeypatch, LD_LIBRARY_PATH=str(cuda), CODE="100")
    assert (said.code, said.devices, said.error) == (100, None, "no CUDA-capable device is detected")
    said = cuda_says(monkeypatch, DIE="1")
    assert said == remote.CuInit(None, None, None, "the process that called cuInit died of signal 11")


def test_no_cuda_library(monkeypatch: pytest.MonkeyPatch) -> None:
    said = cuda_says(monkeypatch, LD_LIBRARY_PATH="")
    if said.library is not None:
        pytest.skip("this machine has a CUDA driver")
    assert said.code is None
    assert "libcuda.so.1" in (said.error or "")


def test_a_machine_without_python_cannot_tell() -> None:
    with pytest.raises(CannotTell, match="127"):
        remote.parse_cu_init(Result(command("python3"), 127, b"", b"python3: not found\n", datetime.now(UTC), 0.0))
    with pytest.raises(CannotTell, match="not an answer"):
        remote.parse_cu_init(Result(command("python3"), 0, b"[]\n", b"", datetime.now(UTC), 0.0))
