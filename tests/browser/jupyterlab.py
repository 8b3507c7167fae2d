"""A real JupyterLab of one test's own, and a notebook in it as a person works with it in a browser."""

from __future__ import annotations

import json
import os
import re
import secrets
import shutil
import subprocess
import sys
import time
from pathlib import Path

from playwright.sync_api import Locator, Page, expect

PATIENCE_S = 90.0  # for a loaded machine; an idle one needs a few seconds


class JupyterLab:
    """``jupyter lab`` on a loopback port, with settings, workspaces and runtime files of its own."""

    def __init__(self, folder: Path, environment: dict[str, str]) -> None:
        self.notebooks = folder / "notebooks"
        self._runtime = folder / "runtime"
        self._log = folder / "jupyterlab.log"
        settings = folder / "config" / "labconfig" / "default_setting_overrides.json"
        for each in (self.notebooks, self._runtime, settings.parent, folder / "home"):
            each.mkdir(parents=True)
        settings.write_text(
            json.dumps(
                {
                    "@jupyterlab/apputils-extension:notification": {"fetchNews": "false", "checkForUpdates": False},
                    # WHY: a cell that is scrolled away stays in the page, where a test can read it.
                    "@jupyterlab/notebook-extension:tracker": {"windowingMode": "none"},
                }
            )
        )
        own = {
            "HOME": folder / "home",
            "IPYTHONDIR": folder / "ipython",
            "JUPYTER_CONFIG_DIR": folder / "config",
            "JUPYTER_DATA_DIR": folder / "data",
            "JUPYTER_RUNTIME_DIR": self._runtime,
            "JUPYTERLAB_SETTINGS_DIR": folder / "settings",
            "JUPYTERLAB_WORKSPACES_DIR": folder / "workspaces",
        }
        self._token = secrets.token_hex(16)
        arguments = [
            "--no-browser",
            "--allow-root",
            "--ServerApp.ip=127.0.0.1",
            "--ServerApp.port=0",
            f"--IdentityProvider.token={self._token}",
            f"--ServerApp.root_dir={self.notebooks}",
            "--LabApp.check_for_updates_class=jupyterlab.NeverCheckForUpdate",
            "--LabApp.news_url=None",
            "--LabApp.extension_manager=readonly",
        ]
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "jupyterlab", *arguments],
                stdout=log,
                stderr=subprocess.STDOUT,
                cwd=self.notebooks,
                env={**os.environ, **{name: str(path) for name, path in own.items()}, **environment},
            )
        self.url = self._where()

    def _where(self) -> str:
        """The server's address, from the file that it writes once it listens."""
        told = self._runtime / f"jpserver-{self._process.pid}.json"
        deadline = time.monotonic() + PATIENCE_S
        while time.monotonic() < deadline and self._process.poll() is None:
            try:
                return str(json.loads(told.read_text())["url"])
            except (FileNotFoundError, ValueError):
                time.sleep(0.05)
        self.stop()
        raise AssertionError(f"JupyterLab did not start:\n{self._log.read_text()[-4000:]}")

    def put(self, notebook: Path, name: str) -> str:
        """Copy a notebook into the server's folder; its address in the browser, in a workspace where nothing else is open."""
        shutil.copy(notebook, self.notebooks / name)
        return f"{self.url}lab/workspaces/{Path(name).stem}/tree/{name}?token={self._token}"

    def stop(self) -> None:
        """End the server and with it its kernels."""
        self._process.terminate()
        try:
            self._process.wait(timeout=20)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


class Notebook:
    """An open notebook: cells are counted from 0, the prose among them."""

    def __init__(self, page: Page, address: str) -> None:
        self.page = page
        # WHY: before the page has its kernel it already looks idle, and a cell that is run then is silently dropped.
        with page.expect_websocket(lambda socket: "/channels" in socket.url):
            page.goto(address)
        page.locator("#jupyterlab-splash").wait_for(state="detached")
        self._panel = page.locator(".jp-NotebookPanel:visible")
        expect(self._panel.locator(".jp-KernelName")).to_contain_text("Python 3")
        self.idle()

    def idle(self) -> None:
        """Wait until the kernel has nothing to do."""
        self._panel.locator(".jp-Notebook-ExecutionIndicator[data-status=idle]").wait_for()

    def code(self, words: str) -> Locator:
        """The one code cell whose source holds these words."""
        found = self._panel.locator(".jp-CodeCell").filter(has=self.page.locator(".jp-InputArea-editor", has_text=words))
        expect(found).to_have_count(1)
        return found

    def output(self, cell: Locator) -> Locator:
        return cell.locator(".jp-OutputArea-output")

    def replace(self, cell: Locator, source: str) -> None:
        """Type over a cell, as a person who edits the parameters."""
        cell.locator(".cm-content").click()
        self.page.keyboard.press("ControlOrMeta+a")
        self.page.keyboard.insert_text(source)

    def start(self, cell: Locator) -> None:
        """Shift+Enter in a cell, without waiting for its end."""
        cell.locator(".cm-content").click()
        self.page.keyboard.press("Shift+Enter")

    def run(self, cell: Locator) -> Locator:
        """Shift+Enter in a cell, to its end; its outputs."""
        prompt = cell.locator(".jp-InputArea-prompt")
        before = prompt.inner_text()
        self.start(cell)
        expect(prompt).not_to_have_text(before)
        expect(prompt).to_have_text(re.compile(r"\[\d+\]:"))
        self.idle()
        return self.output(cell)

    def run_all(self) -> None:
        """Run → Run All Cells, from the menu."""
        self.page.get_by_role("menuitem", name="Run", exact=True).click()
        self.page.get_by_role("menuitem", name="Run All Cells", exact=True).click()
