"""May this host use peer-to-peer? Only if every pair passes every path; otherwise what to serve with, and how to prove it."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from proofbook.checks.looking import counted, join
from proofbook.checks.p2p.matrix import BROKEN, Cell, P2pMatrix, State
from proofbook.model import Finding, Suggested, Verdict

__all__ = ["FALLBACK", "Fallback", "P2pVerdict", "findings", "judge_p2p", "prove_transport", "serve_without"]

CHECK = "p2p.PairMatrix"


@dataclass(frozen=True)
class Fallback:
    """How to serve without peer-to-peer. WHY more than one setting: NCCL's variable binds NCCL alone; the servers' own all-reduce
    kernels load from peers themselves."""

    environment: Mapping[str, str]
    sglang: tuple[str, ...]
    vllm: tuple[str, ...]
    vllm_environment: Mapping[str, str]
    warnings: tuple[str, ...]
    proof: tuple[str, ...]


FALLBACK = Fallback(
    environment={"NCCL_P2P_DISABLE": "1", "NCCL_CUMEM_ENABLE": "0"},
    sglang=("--disable-custom-all-reduce",),
    vllm=("--disable-custom-all-reduce",),
    vllm_environment={"VLLM_ENABLE_PCIE_ALLREDUCE": "0"},
    warnings=(
        "llama.cpp: GGML_CUDA_P2P counts by being there; unset it, since =0 enables. NCCL's variables do nothing there.",
        "Any all-reduce that shares memory between processes by itself (FlashInfer's among them) must be off too.",
    ),
    proof=(
        "Start the server with NCCL_DEBUG=INFO: its log has lines `via SHM/…` (or `via NET/…`), and none with `via P2P/`.",
        "The running process carries the variables and the argument (read /proc/<pid>/environ and cmdline, not the unit file).",
        "It becomes ready and answers a fixed prompt right.",
        "No new fault in the kernel's log from its start to that answer.",
    ),
)


@dataclass(frozen=True)
class P2pVerdict:
    """``allowed`` None: it cannot be told (or there is no pair). ``fallback`` None: none is needed."""

    allowed: bool | None
    verdict: Verdict
    reason: str
    limits: tuple[str, ...]  # what was not verified, and what this holds for
    fallback: Fallback | None


def judge_p2p(matrix: P2pMatrix) -> P2pVerdict:
    """The verdict on a host, by rule: allowed only if every ordered pair passes every path, alone and together with others."""
    limits = _limits(matrix)
    if len(matrix.gpus) < 2 and not matrix.problems and not any(matrix.locals.values()):
        reason = f"{counted(len(matrix.gpus), 'GPU')}: there is no pair to test"
        return P2pVerdict(None, Verdict.NOT_CHECKED, reason, limits, None)
    broken = _broken(matrix)
    missing = _missing(matrix)
    if broken:
        return P2pVerdict(False, Verdict.FAIL, join(broken, 4), limits, FALLBACK)
    if missing:
        reason = f"not every pair was tested to the end: {join(missing, 4)}"
        return P2pVerdict(None, Verdict.UNKNOWN, reason, limits, FALLBACK)
    slow = [f"{a} to {b}: {cell.slow[0]}" for (a, b), cell in matrix.cells.items() if cell.slow]
    reason = f"all {counted(len(matrix.cells), 'ordered pair')} pass every path, alone and together"
    if slow:
        # WHY allowed even when one fails: its data is right, and the way through host memory would be slower still.
        worst = Verdict.FAIL if any(map(_far_too_slow, matrix.cells.values())) else Verdict.WARN
        reason = f"{reason}; {counted(len(slow), 'pair is', 'pairs are')} slow: {join(slow, 3)}"
        return P2pVerdict(True, worst, reason, limits, None)
    return P2pVerdict(True, Verdict.PASS, reason, limits, None)


def _far_too_slow(cell: Cell) -> bool:
    return any(speed.verdict is Verdict.FAIL and not speed.invalid for speed in cell.speeds.values())


def _broken(matrix: P2pMatrix) -> list[str]:
    """What shows that peer-to-peer cannot be trusted here."""
    counts = {state: n for state, n in matrix.counts().items() if State(state) in BROKEN}
    said = [f"{n} of {counted(len(matrix.cells), 'ordered pair')}: {state}" for state, n in counts.items()]
    said += [f"{pci} does not copy by itself ({why})" for pci, why in matrix.locals.items() if why]
    at_once = {(t.phase, t.pair, t.state) for t in matrix.together if t.state in BROKEN}
    for phase in sorted({phase for phase, _, _ in at_once}):
        states = sorted({str(state) for p, _, state in at_once if p == phase})
        said.append(f"{phase}: {join(states)} in {counted(len({pair for p, pair, _ in at_once if p == phase}), 'pair')}")
    said += [f"a fault of one of {len(fault.pairs)} pairs: {fault.told}" for fault in matrix.shared]
    said += [
        f"{f.signature} of {f.device}, for which no pair can be blamed: {f.why}"
        for f in matrix.foreign
        if f.device in matrix.gpus and f.verdict is Verdict.FAIL
    ]
    said += [p for p in matrix.problems if "restarted" in p or "stopped" in p or "left alone" in p or "no longer moves" in p]
    return said


def _missing(matrix: P2pMatrix) -> list[str]:
    counts = {state: n for state, n in matrix.counts().items() if State(state) in (State.NOT_RUN, State.ADVERTISED)}
    said = [f"{n} of {counted(len(matrix.cells), 'ordered pair')} {state}" for state, n in counts.items()]
    not_run = {(t.phase, t.pair) for t in matrix.together if t.state is State.NOT_RUN}
    for phase in sorted({phase for phase, _ in not_run}):
        said.append(f"{phase}: {counted(sum(p == phase for p, _ in not_run), 'pair')} not run")
    said += list(matrix.problems)
    said += [f"{f.signature} names no device" for f in matrix.foreign if not f.device]
    if not matrix.cells:
        said.append("no pair is known")
    return said


def _limits(matrix: P2pMatrix) -> tuple[str, ...]:
    limits = []
    silences = {cell.silence for cell in matrix.cells.values() if cell.silence}
    if silences:
        limits.append(f"a clean kernel log proves nothing here: {join(sorted(silences), 2)}")
    if matrix.cells and {t.phase for t in matrix.together} != {"both-directions", "all-at-once"}:
        tried = {t.phase for t in matrix.together}
        untried = [p for p in ("both-directions", "all-at-once") if p not in tried]
        if untried != ["all-at-once"] or len(matrix.gpus) > 2:  # with two GPUs, both directions are all there is
            limits.append(f"not tried: {join(untried)}")
    limits.append("passing copies are not a serving load: an all-reduce of the serving stack may still fail or reset the host")
    limits.append("holds for this boot, driver, kernel command line and firmware setup")
    return tuple(limits)


def findings(matrix: P2pMatrix) -> list[Finding]:
    """The verdict and what it stands on as findings: the host, each pair that did not pass, and faults of others."""
    said = judge_p2p(matrix)
    what = "" if said.fallback is None else serve_without(said.fallback)
    action = Suggested.FIX_CONFIG if said.fallback is not None else Suggested.NONE
    out = [Finding(CHECK, said.verdict, said.reason, action=action, what_to_do=what, observed=matrix.counts())]
    for (src, dst), cell in matrix.cells.items():
        if not cell.passed:
            verdict = Verdict.FAIL if cell.state in BROKEN else Verdict.UNKNOWN
            lines = tuple(line for fault in cell.faults for line in fault.lines)[:6]
            reason = f"{cell.state}: {cell.reason}"
            out.append(Finding(CHECK, verdict, reason, subject=f"{src} to {dst}", observed=cell.advertised, lines=lines))
        elif cell.slow:
            worst = Verdict.FAIL if _far_too_slow(cell) else Verdict.WARN
            out.append(
                Finding(CHECK, worst, join(cell.slow, 3), subject=f"{src} to {dst}", action=Suggested.CHECK_HARDWARE,
                        what_to_do="Read both links' width and speed under load, and what else shares the switch.")
            )  # fmt: skip
    for foreign in matrix.foreign:
        reason = f"{counted(foreign.count, 'line')} {foreign.signature} in window {foreign.window}: {foreign.why}"
        verdict = foreign.verdict if not foreign.device or foreign.device in matrix.gpus else Verdict.WARN
        out.append(
            Finding(CHECK, verdict, reason, subject=foreign.device, count=foreign.count, at_least=foreign.at_least,
                    signature=foreign.signature, lines=foreign.lines[:6])
        )  # fmt: skip
    out += [Finding(CHECK, Verdict.NOT_CHECKED, limit) for limit in said.limits]
    return out


def serve_without(fallback: Fallback) -> str:
    """The fallback in one line, and how to see that it took effect."""
    both = " ".join(f"{k}={v}" for k, v in fallback.environment.items())
    vllm = " ".join(f"{k}={v}" for k, v in fallback.vllm_environment.items())
    return (
        f"Serve without peer-to-peer: {both}; SGLang {' '.join(fallback.sglang)}; vLLM {' '.join(fallback.vllm)} with {vllm}. "
        f"Then prove it: {fallback.proof[0]}"
    )


_VIA = re.compile(r"\bvia (P2P|SHM|NET)/")


def prove_transport(lines: Iterable[str]) -> tuple[Verdict, str]:
    """Did the fallback take effect, by NCCL's own lines (NCCL_DEBUG=INFO)? PASS, FAIL, or UNKNOWN where it says nothing.

    ``NCCL INFO Channel 00 : 1[1] -> 0[0] via SHM/direct/direct``. It says nothing of a server's own all-reduce kernels.
    """
    counts = {"P2P": 0, "SHM": 0, "NET": 0}
    for line in lines:
        if found := _VIA.search(line):
            counts[found[1]] += 1
    if counts["P2P"]:
        return Verdict.FAIL, f"{counted(counts['P2P'], 'channel')} of NCCL still go via P2P"
    if counts["SHM"] or counts["NET"]:
        return Verdict.PASS, f"no channel via P2P; {counts['SHM']} via SHM, {counts['NET']} via NET"
    return Verdict.UNKNOWN, "no line of NCCL says which way its channels go: start it with NCCL_DEBUG=INFO"
