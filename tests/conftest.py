"""What holds for all tests."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import settings

from proofbook.lab.sim import client

from .nursery import Nursery

# jsonschema's checker of formats builds a grammar of IRIs when it is loaded, which takes seconds; no test asks it for one.
sys.modules["rfc3987_syntax"] = None  # type: ignore[assignment]

# No test has a stopwatch: a busy machine is no defect of the code. Speed is measured in benchmarks/.
settings.register_profile("proofbook", deadline=None)
settings.load_profile("proofbook")


@pytest.fixture(scope="session")
def fake_libcuda(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The stand-in for libcuda.so.1, compiled."""
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        pytest.skip("NOT TESTED: no C compiler here, so the stand-in for libcuda.so.1 cannot be built")
    built = tmp_path_factory.mktemp("fake-cuda") / "libcuda.so.1"
    source = Path(__file__).parent / "fake_cuda" / "libcuda.c"
    subprocess.run(
        [compiler, "-std=c11", "-O2", "-Wall", "-Wextra", "-Werror", "-shared", "-fPIC", "-o", built, source], check=True
    )
    return built


@pytest.fixture(scope="session")
def nursery() -> Iterator[None]:
    """Simulated machines are forked from a process that has loaded their code already."""
    born = Nursery()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(client, "_spawn", born.spawn)
        yield
    born.close()
