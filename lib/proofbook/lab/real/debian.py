"""Where this machine gets Debian packages from. Read from its own apt configuration: a mirror is never written down here."""

from __future__ import annotations

import subprocess
from collections.abc import Iterable
from dataclasses import dataclass

from proofbook.errors import NotEquipped
from proofbook.lab.real.packages import KEYRING

__all__ = ["SUITES", "Mirror", "apt_options", "default_suite", "mirror"]

#: The Debian releases that the lab is made for, oldest first, and the kernel series of each.
SUITES = {"bookworm": "6.1", "trixie": "6.12"}


@dataclass(frozen=True, slots=True)
class Mirror:
    """``security`` is "" where apt knows no security archive."""

    site: str
    security: str
    known: tuple[str, ...]  # the releases that apt is configured for

    def lines(self, suite: str) -> list[str]:
        """The sources.list of a release."""
        signed = f"[signed-by={KEYRING}]"
        lines = [f"deb {signed} {self.site} {suite} main"]
        if self.security:
            lines.append(f"deb {signed} {self.security} {suite}-security main")
        return lines


def mirror() -> Mirror:
    """What apt is configured for on this machine. Raises NotEquipped when that is not Debian."""
    try:
        done = subprocess.run(
            ["apt-get", "indextargets", "--format", "$(SITE) $(RELEASE) $(COMPONENT)", "Created-By: Packages"],
            capture_output=True,
            text=True,
            check=True,
        )
    except (OSError, subprocess.CalledProcessError) as error:
        raise NotEquipped(
            f"apt does not say where packages come from: {error}", hint="the real lab is built on Debian"
        ) from error
    return _mirror_of(line.split() for line in done.stdout.splitlines())


def _mirror_of(rows: Iterable[list[str]]) -> Mirror:
    sites: dict[str, str] = {}
    for row in rows:
        if len(row) == 3 and row[2] == "main":
            sites.setdefault(row[1], row[0])
    known = tuple(suite for suite in SUITES if suite in sites)
    if not known:
        raise NotEquipped(
            f"apt is configured for no Debian release that the lab knows ({', '.join(SUITES)})",
            hint="add a Debian mirror of bookworm or trixie to apt's sources and run apt-get update",
        )
    security = next((sites[f"{suite}-security"] for suite in SUITES if f"{suite}-security" in sites), "")
    return Mirror(sites[known[0]], security, known)


def default_suite() -> str:
    """The newest release that apt is configured for here."""
    return mirror().known[-1]


def apt_options() -> list[str]:
    """apt's own proxy settings, so that a build goes the way that apt goes here."""
    options = []
    for key in ("Acquire::http::Proxy", "Acquire::https::Proxy"):
        done = subprocess.run(["apt-config", "shell", "value", key], capture_output=True, text=True, check=False)
        value = done.stdout.strip().removeprefix("value='").removesuffix("'")
        if value:
            options.append(f'{key} "{value}";')
    return options
