"""One JupyterLab and one Chromium for the module; records and the simulated lab in temporary folders."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from playwright.sync_api import Browser, Page, Route, expect, sync_playwright

from proofbook.lab.sim import client

from .jupyterlab import PATIENCE_S, JupyterLab


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Simulated machines of this module's own."""
    folder = tmp_path_factory.mktemp("lab")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PROOFBOOK_LAB_DIR", str(folder))
        yield folder
        client.stop()


@pytest.fixture(scope="module")
def outputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("outputs")


@pytest.fixture(scope="module")
def jupyterlab(tmp_path_factory: pytest.TempPathFactory, lab: Path, outputs: Path) -> Iterator[JupyterLab]:
    environment = {"PROOFBOOK_LAB_DIR": str(lab), "PROOFBOOK_OUTPUTS": str(outputs)}
    server = JupyterLab(tmp_path_factory.mktemp("jupyterlab"), environment)
    yield server
    server.stop()


@pytest.fixture(scope="module")
def chromium() -> Iterator[Browser]:
    found = next((path for name in ("chromium", "chromium-browser", "google-chrome") if (path := shutil.which(name))), None)
    if found is None:
        pytest.skip("there is no Chromium on this machine")
    flags = ["--no-sandbox"] if os.geteuid() == 0 else []
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=found, args=flags)
        yield browser
        browser.close()


@pytest.fixture
def page(chromium: Browser) -> Iterator[Page]:
    """A page of a fresh browser profile; nothing but this machine can be reached from it, and nothing else is asked for."""
    context = chromium.new_context(viewport={"width": 1400, "height": 1000})
    outside: list[str] = []

    def refuse(route: Route) -> None:
        outside.append(route.request.url)
        route.abort()

    context.route(lambda url: not url.startswith(("http://127.0.0.1:", "http://localhost:", "data:", "blob:")), refuse)
    page = context.new_page()
    page.set_default_timeout(PATIENCE_S * 1000)
    expect.set_options(timeout=PATIENCE_S * 1000)
    yield page
    context.close()
    assert outside == []
