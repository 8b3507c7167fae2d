"""What a machine that cannot run real machines is told. Needs neither root nor a package."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from proofbook import cli
from proofbook.errors import LabError, NotEquipped, Refused
from proofbook.lab.real import packages


@pytest.fixture
def bare(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder that holds every program there is, as far as this process knows; at first none."""
    monkeypatch.setattr(packages, "_PATH", str(tmp_path))
    monkeypatch.setattr(packages, "KEYRING", str(tmp_path / "keyring.gpg"))
    return tmp_path


def bring(folder: Path, *programs: str) -> None:
    for name in programs:
        (folder / name).write_text("#!/bin/sh\n")
        (folder / name).chmod(0o755)


def test_what_is_missing_is_named_with_the_one_line_that_brings_it(bare: Path) -> None:
    bring(bare, *(name for name in packages.BOX_TOOLS if name not in ("systemd-nspawn", "mmdebstrap")))
    with pytest.raises(NotEquipped) as said:
        packages.require(packages.BOX_TOOLS, "a box")
    assert f"missing here: {bare / 'keyring.gpg'}, mmdebstrap, systemd-nspawn" in str(said.value)
    line = "apt-get install --no-install-recommends debian-archive-keyring mmdebstrap systemd-container"
    assert said.value.hint.startswith(line)


def test_nothing_is_said_where_nothing_is_missing(bare: Path) -> None:
    bring(bare, *packages.BOX_TOOLS, "keyring.gpg")
    packages.require(packages.BOX_TOOLS, "a box")
    assert packages.missing(packages.BOX_TOOLS) == {}


def test_one_program_that_is_missing_names_its_package(bare: Path) -> None:
    with pytest.raises(NotEquipped) as said:
        packages.tool("systemd-nspawn")
    assert said.value.hint == "apt-get install systemd-container"


def test_an_ordinary_user_is_told_why_it_needs_root(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    with pytest.raises(NotEquipped, match="a box needs root: it makes namespaces"):
        packages.require_root("a box")


@pytest.mark.parametrize("words", [("box", "up"), ("vm", "build")])
def test_it_is_refused_as_what_never_reached_a_machine(
    words: tuple[str, str], bare: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert issubclass(NotEquipped, Refused) and issubclass(NotEquipped, LabError)
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    monkeypatch.setattr(sys, "argv", ["proofbook", "lab", *words])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    assert ended.value.code == 2
    assert "apt-get install" in capsys.readouterr().err


def test_the_missing_packages_can_be_listed_before_there_is_an_environment() -> None:
    """The Python of the system, with nothing but the checkout, as on a bare machine."""
    argv = [sys.executable, "-S", "-c", "from proofbook.lab.real.packages import tell_missing; tell_missing()"]
    env = {"PYTHONPATH": str(Path(packages.__file__).parents[3]), "PATH": "/nowhere"}
    done = subprocess.run(argv, env=env, capture_output=True, text=True, check=True)
    assert done.stderr == ""
    assert set(done.stdout.split()) <= {*packages.BOX_TOOLS.values(), *packages.VM_TOOLS.values(), packages.KEYRING_PACKAGE}
