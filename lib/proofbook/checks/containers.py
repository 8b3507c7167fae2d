"""Does every container run, and can its programs really use the GPUs?"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from proofbook.checks.looking import counted, join, tell, unseen
from proofbook.intent import ContainerSpec
from proofbook.model import Check, Finding, Probe, Seen, Suggested
from proofbook.probes.containers import ContainerFacts, ContainerState

__all__ = ["ContainerUp"]

_GPU_NODE = re.compile(r"/dev/nvidia\d+")
_NO_PYTHON = re.compile(r"not there|not found|no such file|failed to exec", re.IGNORECASE)


@dataclass(frozen=True)
class ContainerUp(Check):
    """It runs, every device node of it can be opened, and CUDA starts in it with the expected number of GPUs.

    WHY open them: the major number of nvidia-uvm is dynamic, so after a reboot the container's device rule may refuse a
    node that is there; nvidia-smi then works inside, and every CUDA program fails.
    """

    container: ContainerSpec
    name: ClassVar[str] = "containers.ContainerUp"
    title: ClassVar[str] = "Does this container run, with working GPUs?"

    def needs(self) -> tuple[Probe[Any], ...]:
        return (ContainerState(self.container),)

    def judge(self, seen: Seen) -> Sequence[Finding]:
        name = self.container.name
        facts, why = tell(seen, ContainerState(self.container)).pair
        if facts is None:
            return [unseen(self, why, name)]
        if not facts.running:
            return [
                self.failed(
                    f"it is {facts.status or 'not running'}",
                    subject=name,
                    expected="running",
                    observed=facts.status,
                    action=Suggested.RESTART_SERVICE,
                    what_to_do="Start it and read what its manager says; "
                    + ("it is not set to start at boot." if facts.starts_at_boot is False else "is it set to start at boot?"),
                )
            ]
        findings = [self.passed("running", subject=name, expected="running", observed=facts.status), *self._at_boot(facts)]
        if not self.container.devices:
            return [*findings, self.not_checked("no devices of it are declared, so none were tried", subject=name)]
        return [*findings, *(self._device(path, facts) for path in self.container.devices), self._cuda(facts)]

    def _at_boot(self, facts: ContainerFacts) -> list[Finding]:
        """What is to be said of the next boot; nothing where it is set to start then."""
        subject = f"{self.container.name} at boot"
        if facts.starts_at_boot:
            return []
        if "config" in facts.unknown:
            return [self.unknown(f"whether it is set to start at boot is not known: {facts.unknown['config']}", subject=subject)]
        if facts.starts_at_boot is None:
            return [self.not_checked(f"whether the next boot starts it is not asked of {facts.kind}", subject=subject)]
        return [
            self.warned(
                "it runs, but is not set to start at boot: somebody started it",
                subject=subject,
                action=Suggested.FIX_CONFIG,
                what_to_do=f"`pct set {facts.id} --onboot 1`, if it is meant to come by itself.",
            )
        ]

    def _device(self, path: str, facts: ContainerFacts) -> Finding:
        subject = f"{self.container.name}:{path}"
        how = facts.devices.get(path)
        if how is None:
            why = facts.unknown.get("devices", "there is no answer about it")
            return self.unknown(f"whether it can be opened is not known: {why}", subject=subject)
        if how == "ok":
            return self.passed("can be opened inside", subject=subject, expected="ok", observed=how)
        if how == "absent":
            return self.failed(
                "is not there inside",
                subject=subject,
                expected="ok",
                observed=how,
                action=Suggested.FIX_CONFIG,
                what_to_do="Did the node exist on the host when the container started? Load nvidia-uvm first "
                "(nvidia-modprobe -u), restart it.",
            )
        return self.failed(
            f"is there inside and cannot be opened: {how}",
            subject=subject,
            expected="ok",
            observed=how,
            action=Suggested.FIX_CONFIG,
            what_to_do="Compare the major number in /proc/devices with the container's device rule (lxc.cgroup2.devices.allow): "
            "nvidia-uvm gets another one at some boots. Correct the rule, restart the container.",
        )

    def _cuda(self, facts: ContainerFacts) -> Finding:
        subject = f"{self.container.name}: CUDA"
        nodes = [d for d in self.container.devices if _GPU_NODE.fullmatch(d)]
        why, cuda = facts.unknown.get("cuda", ""), facts.cuda
        if cuda is None:
            if "python3" in why and _NO_PYTHON.search(why) and "did not finish" not in why:
                return self.not_checked(f"there is no python3 inside to call cuInit with: {why}", subject=subject)
            return self.unknown(f"whether CUDA starts is not known: {why or 'it was not tried'}", subject=subject)
        about: dict[str, Any] = {
            "subject": subject,
            "expected": {"cuInit": 0, "devices": len(nodes)},
            "observed": {"cuInit": cuda.code, "devices": cuda.devices, "error": cuda.error or None},
        }
        look = "Try it inside by hand; compare the driver's version inside and outside, and the device nodes above."
        if cuda.code is None:
            if not cuda.library and "libcuda" in cuda.error:
                return self.unknown(f"the CUDA library was not found inside: {cuda.error}", what_to_do=look, **about)
            reason = f"cuInit gave no answer: {cuda.error or 'no reason given'}"
            return self.failed(reason, action=Suggested.LOOK, what_to_do=look, **about)
        if cuda.code != 0:
            said = f" ({cuda.error})" if cuda.error else ""
            reason = f"cuInit fails inside with {cuda.code}{said}: no CUDA program can work"
            return self.failed(reason, action=Suggested.FIX_CONFIG, what_to_do=look, **about)
        if cuda.devices is None:
            return self.unknown(f"cuInit works, but the number of GPUs is not known: {cuda.error}", **about)
        if not nodes:
            return self.not_checked(f"cuInit works and sees {counted(cuda.devices, 'GPU')}; none is declared for it", **about)
        if cuda.devices < len(nodes):
            reason = f"CUDA sees {cuda.devices} of {counted(len(nodes), 'GPU')} ({join(nodes)})"
            return self.failed(reason, action=Suggested.LOOK, what_to_do=look, **about)
        if cuda.devices > len(nodes):
            return self.warned(
                f"CUDA sees {counted(cuda.devices, 'GPU')}, {len(nodes)} are declared",
                action=Suggested.FIX_CONFIG,
                what_to_do="Declare all its devices in the inventory, or take the extra ones away.",
                **about,
            )
        return self.passed(f"cuInit works and sees {counted(cuda.devices, 'GPU')}", **about)
