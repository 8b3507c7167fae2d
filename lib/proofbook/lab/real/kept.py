"""What every machine of the real lab is: a folder with an identity that it keeps, and a keeper process while it is up."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import time
from abc import ABC, abstractmethod
from dataclasses import dataclass
from datetime import datetime
from importlib import resources
from pathlib import Path
from typing import Any, ClassVar

from proofbook.errors import BadParameter, LabError
from proofbook.lab.real import packages, settings
from proofbook.lab.real.endpoint import Endpoint
from proofbook.lab.real.places import Places, held, locked
from proofbook.lab.real.processes import Process, started

__all__ = ["KeptMachine"]

_NAME = re.compile(r"[a-z0-9][a-z0-9-]{0,40}")
#: How long a machine may take until it is dark (seconds); a busy computer takes its time to bury processes.
_DARK_S = 30.0


@dataclass(frozen=True)
class KeptMachine(ABC):
    """One machine of the lab in ``<state>/<kind>/<name>``, up or not. Its kinds say how it is started and what befalls it."""

    name: str
    places: Places

    #: As a word of the command line, of its folder and of its keeper's announcement; and as people call it.
    kind: ClassVar[str]
    called: ClassVar[str]
    keeper: ClassVar[str]  # the module that keeps it
    keeper_s: ClassVar[float]  # how long that may take until it announces the machine
    logs: ClassVar[tuple[str, ...]]  # where it is said why a machine did not start

    def __post_init__(self) -> None:
        if not _NAME.fullmatch(self.name):
            hint = f"small letters, digits and '-', e.g. {self.kind} or {self.kind}-two"
            raise BadParameter(f"not a {self.called}'s name: {self.name!r}", hint=hint)

    @property
    def home(self) -> Path:
        return self.places.state / self.kind / self.name

    @property
    def identity(self) -> settings.Identity:
        return settings.Identity(self.home / "identity")

    def down(self) -> bool:
        """End it and clear up, also what a killed keeper left; whether it was up."""
        if not self.home.exists():
            return False
        with locked(self.home / "lock"):
            about = self.alive()
            if about:
                Process(about["pid"], about["pid_started"]).end()
            self.clear()
        return about is not None

    @abstractmethod
    def clear(self) -> None:
        """Remove what belongs to one life of the machine; its identity stays."""

    @property
    def off(self) -> bool:
        """Whether its plug is pulled: it is kept, and does not run."""
        return self.alive() is not None and (self.home / "power-off").exists()

    def refuse_if_off(self) -> None:
        """Raises LabError when its plug is pulled."""
        if self.off:
            hint = f"`proofbook lab {self.kind} power {self.name} on` puts it back"
            raise LabError(f"{self.name} is off: its plug was pulled", hint=hint)

    def power_on(self) -> None:
        """Put the plug back; it boots, and answers when its sshd does."""
        (self.home / "power-off").unlink(missing_ok=True)

    def await_dark(self) -> None:
        """Wait until nothing of it runs any more. Raises LabError."""
        deadline = time.monotonic() + _DARK_S
        while not (self.home / "dark").exists():
            if time.monotonic() > deadline:
                raise LabError(f"{self.name} did not go dark", hint=f"see {self.home / self.logs[-1]}")
            time.sleep(0.01)

    def status(self) -> Endpoint | None:
        """How to reach it; None when it is not up."""
        about = self.alive()
        return self.endpoint(about, reused=True) if about else None

    def ssh_command(self, *words: str, user: str = "") -> list[str]:
        """The argv of an OpenSSH client that logs in, or runs ``words`` there. Raises LabError when it is not up."""
        return self.endpoint(self.about(), reused=True).ssh_command(*words, user=user)

    def alive(self) -> dict[str, Any] | None:
        """What its keeper announced, if that very process still runs."""
        try:
            about: dict[str, Any] = json.loads((self.home / f"{self.kind}.json").read_text())
        except (OSError, ValueError):
            return None
        if started(about["pid"]) != about["pid_started"] or not held(self.home / "alive"):
            return None
        return about

    def about(self) -> dict[str, Any]:
        """The same. Raises LabError when it is not up."""
        about = self.alive()
        if about is None:
            raise LabError(f"{self.name} is not up", hint=f"proofbook lab {self.kind} up {self.name}")
        return about

    def endpoint(self, about: dict[str, Any], *, reused: bool) -> Endpoint:
        return Endpoint(
            name=self.name,
            address="127.0.0.1",
            port=about["port"],
            user="root",
            identity_file=str(self.identity.client_key),
            known_hosts=str(self.identity.known_hosts),
            state_dir=self.home,
            reused=reused,
            started_at=datetime.fromisoformat(about["started_at"]),
        )

    def start_keeper(self) -> dict[str, Any]:
        """Start the process that keeps the machine, by the plan in its folder; what it announces. Raises LabError."""
        library = str(Path(str(resources.files("proofbook"))).parent)
        with (self.home / "keeper.log").open("wb") as log:
            keeper = subprocess.Popen(
                [sys.executable, "-m", self.keeper, str(self.home)],
                stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True, cwd="/",
                env={"PATH": packages.search_path(), "PYTHONPATH": library, "LANG": "C.UTF-8"},
            )  # fmt: skip
        deadline = time.monotonic() + self.keeper_s
        while time.monotonic() < deadline:
            if about := self.alive():
                return about
            if keeper.poll() is not None:
                break
            time.sleep(0.01)
        raise self.failed("its keeper ended")

    def failed(self, why: str) -> LabError:
        """The error for a machine that did not come up, with the last words of its logs."""
        said: list[str] = []
        for log in self.logs:
            if (self.home / log).exists():
                said += (self.home / log).read_text(errors="replace").strip().splitlines()[-3:]
        hint = f"see the logs in {self.home}"
        return LabError(f"{self.called} {self.name} is not reachable: {why}: {' / '.join(said)[-800:]}", hint=hint)
