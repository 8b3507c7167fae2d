"""What a pair matrix shows about the hypothesis that peer-to-peer works here, by rule, and what to serve with."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from proofbook.checks.looking import counted, join
from proofbook.checks.p2p.matrix import CONTROL, REFUTES, State
from proofbook.checks.p2p.verdict import FALLBACK, prove_transport
from proofbook.errors import CannotTell
from proofbook.intent import ContainerSpec, ServiceSpec
from proofbook.model import Check, Finding, Measurement, Probe, Seen, Suggested, Verdict
from proofbook.probes.journal import UnitJournal
from proofbook.probes.systemd import UnitProcess

__all__ = ["HYPOTHESIS", "FallbackInEffect", "concluded", "fallback_rows"]

HYPOTHESIS = "Every GPU of this machine reaches every other's memory: by every path, with the right data, alone and together."


def concluded(measured: Measurement | None, *, why_not: str, scope: str) -> dict[str, Any]:
    """The conclusion: {hypothesis, outcome, scope, because, peer_to_peer}.

    supported: every pair passed everything · refuted: at least one pair did not, and its control did · blocked: it could not be
    tried · inconclusive: what was tried shows neither (a control that fails, figures that cannot be true, a run cut off).
    """
    if measured is None:
        return _said("blocked", f"not tried: {why_not}", scope)
    value = measured.value
    if len(value["gpus"]) < 2:
        return _said("blocked", f"{counted(len(value['gpus']), 'GPU')}: there is no pair to try it on", scope)
    refuting = _refuting(value)
    if refuting:
        return _said("refuted", join(refuting, 4), scope)
    if value["judged"]["allowed"]:
        return _said("supported", value["judged"]["reason"], scope)
    return _said("inconclusive", value["judged"]["reason"], scope)


def _said(outcome: str, because: str, scope: str) -> dict[str, Any]:
    advice = "may be used" if outcome == "supported" else "stays off: serve with the fallback"
    told = f"{because}. Peer-to-peer {advice}."
    return {
        "hypothesis": HYPOTHESIS,
        "outcome": outcome,
        "because": told,
        "scope": scope,
        "peer_to_peer": "allowed" if outcome == "supported" else "off",
    }


def _refuting(value: Mapping[str, Any]) -> list[str]:
    """What was shown wrong, as sentences; of pairs only where the control through host memory was right."""
    wrong = [c for c in value["cells"] if c["state"] in REFUTES and _control_held(c)]
    counts = {state: sum(c["state"] == state for c in wrong) for state in dict.fromkeys(c["state"] for c in wrong)}
    said = [f"{n} of {counted(len(value['cells']), 'ordered pair')}: {state}" for state, n in counts.items()]
    if faulted := sum(bool(c["faults"]) for c in wrong):
        said.append(f"the kernel's log has faults of {faulted} of these pairs")
    alone = {(c["src"], c["dst"]) for c in wrong}
    for phase in dict.fromkeys(t["phase"] for t in value["together"]):
        pairs = {(t["src"], t["dst"]) for t in value["together"] if t["phase"] == phase and t["state"] in REFUTES} - alone
        if pairs:
            states = sorted({t["state"] for t in value["together"] if t["phase"] == phase and (t["src"], t["dst"]) in pairs})
            said.append(f"{phase}: {join(s for s in states if s in REFUTES)} in {counted(len(pairs), 'pair')} that passed alone")
    if value["run"]["restarted"]:
        said.append("the machine restarted in the middle of it")
    return said


def _control_held(cell: Mapping[str, Any]) -> bool:
    return CONTROL not in cell["paths"] or cell["paths"][CONTROL]["state"] in (State.VERIFIED, State.NOT_RUN)


def fallback_rows() -> list[tuple[str, str]]:
    """What to serve with, and how to prove that it took effect: (where, what)."""
    both = " ".join(f"{k}={v}" for k, v in FALLBACK.environment.items())
    vllm = " ".join(f"{k}={v}" for k, v in FALLBACK.vllm_environment.items())
    return [
        ("NCCL, in the unit's environment", both),
        ("SGLang, in its arguments", " ".join(FALLBACK.sglang)),
        ("vLLM, in its arguments", " ".join(FALLBACK.vllm)),
        ("vLLM, in its environment too", vllm),
        *(("beware", text) for text in FALLBACK.warnings),
        *(("proof", text) for text in FALLBACK.proof),
    ]


@dataclass(frozen=True)
class FallbackInEffect(Check):
    """The running server carries the fallback, by its own process; and NCCL's lines, where it printed any, say the same.

    A unit file shows nothing: an older process, a drop-in, a wrapper may run without it.
    """

    service: ServiceSpec
    container: ContainerSpec | None = None
    name: ClassVar[str] = "p2p.FallbackInEffect"
    title: ClassVar[str] = "Does the server run without peer-to-peer?"

    def needs(self) -> tuple[Probe[Any], ...]:
        unit = self.service.name
        return UnitProcess(unit, self.container), UnitJournal(unit, self.container)

    def judge(self, seen: Seen) -> Sequence[Finding]:
        process = seen.value(UnitProcess(self.service.name, self.container))
        missing = [flag for flag in FALLBACK.sglang if flag not in process.argv]
        missing += [f"{name}={value}" for name, value in _required() if process.variable(name) != value]
        about = self.service.spec
        if missing:
            carried = self.warned(
                f"the running process does not carry {join(missing)}",
                subject=about,
                action=Suggested.FIX_CONFIG,
                what_to_do="Put them into the unit and restart it. Until then it may copy between GPUs directly.",
                observed=missing,
            )
        else:
            carried = self.passed(
                f"its process carries {join([*FALLBACK.sglang, *(f'{n}={v}' for n, v in _required())])}", subject=about
            )
        return [carried, self._transport(seen)]

    def _transport(self, seen: Seen) -> Finding:
        try:
            log = seen.value(UnitJournal(self.service.name, self.container))
        except CannotTell as why:
            return self.not_checked(f"NCCL's own lines could not be read: {why}", subject=self.service.spec)
        verdict, reason = prove_transport(entry.text for entry in log.entries)
        if verdict is Verdict.UNKNOWN:
            return self.not_checked(reason, subject=self.service.spec)
        if verdict is Verdict.FAIL:
            return self.warned(reason, subject=self.service.spec, action=Suggested.FIX_CONFIG)
        return self.passed(reason, subject=self.service.spec)


def _required() -> list[tuple[str, str]]:
    """NCCL_CUMEM_ENABLE is needed by some reports only, so its absence is no finding."""
    return [(name, value) for name, value in FALLBACK.environment.items() if name == "NCCL_P2P_DISABLE"]
