from __future__ import annotations

from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any

import pytest

from proofbook.checks.p2p import PeerClaims
from proofbook.model import Finding, Observation, Probe, Seen, Verdict, worst
from proofbook.probes.iommu import IommuFacts, IommuGroups
from proofbook.probes.p2p import PeerConfig, PeerConfigFacts, Topology, TopologyFacts

from . import conftest as host
from .conftest import GPUS, PAIRS, A, B, D

PORTS = {pci: f"0000:{n:x}0:01.1" for n, pci in enumerate(GPUS)}
GOOD: dict[str, Any] = {
    "upstream": {pci: (port,) for pci, port in PORTS.items()},
    "acs": {port: frozenset({"SrcValid"}) for port in PORTS.values()},
    "bar1_mib": dict.fromkeys(GPUS, 131072),
    "framebuffer_mib": dict.fromkeys(GPUS, 97887),
}


def config(text: Mapping[str, str] | None = None, **running: str) -> PeerConfigFacts:
    said = text or {}
    return PeerConfigFacts(said, dict.fromkeys(said, "/etc/modprobe.d/nvidia.conf"), {"DmaRemapPeerMmio": "1", **running}, ())


def judged(
    topology: TopologyFacts | str | None = None, peers: PeerConfigFacts | str | None = None, iommu: IommuFacts | str | None = None
) -> list[Finding]:
    """The findings; a string is why that probe has no answer."""
    answers: dict[Probe[Any], Any] = {
        Topology(): topology or host.topology(**GOOD),
        PeerConfig(): peers or config(),
        IommuGroups(): iommu or host.iommu("identity"),
    }
    at = datetime(2026, 1, 1, tzinfo=UTC)
    seen = Seen(
        Observation(probe, None if isinstance(value, str) else value, value if isinstance(value, str) else "", at, host.BOOT)
        for probe, value in answers.items()
    )
    return list(PeerClaims().judge(seen))


def one(findings: list[Finding], word: str) -> Finding:
    (found,) = [f for f in findings if word in f.reason]
    return found


def test_nothing_stands_in_the_way() -> None:
    found = judged()
    assert worst(f.verdict for f in found) is Verdict.PASS
    assert len(found) == 5
    assert "driver's default" in one(found, "DmaRemapPeerMmio").reason


def test_what_the_driver_does_not_offer() -> None:
    status = {"r": dict.fromkeys(PAIRS, "OK"), "w": {**dict.fromkeys(PAIRS, "OK"), (A, D): "CNS"}}
    found = one(judged(host.topology(**GOOD, status=status)), "does not offer")
    assert (found.verdict, found.observed) == (Verdict.WARN, {f"{A} {D}": "CNS"})
    blind = one(judged(host.topology(**GOOD, status={}, problems={"status r": "nvidia-smi is not there"})), "nothing is claimed")
    assert (blind.verdict, "not there" in blind.reason) == (Verdict.UNKNOWN, True)


def test_a_bridge_that_redirects() -> None:
    acs = {**GOOD["acs"], PORTS[B]: frozenset({"SrcValid", "ReqRedir", "CmpltRedir"})}
    found = one(judged(host.topology(**{**GOOD, "acs": acs})), "root complex")
    assert found.verdict is Verdict.WARN
    assert found.reason.startswith(f"{PORTS[B]} sends")
    unread = judged(host.topology(**GOOD, problems={"acs": "`lspci` needs root"}))
    assert one(unread, "needs root").verdict is Verdict.UNKNOWN
    assert one(judged(host.topology(**{**GOOD, "upstream": {}})), "bridges").verdict is Verdict.UNKNOWN


def test_a_bar_that_is_too_small() -> None:
    found = one(judged(host.topology(**{**GOOD, "bar1_mib": {**GOOD["bar1_mib"], B: 256}})), "BAR1 has 256 MiB")
    assert (found.subject, found.verdict) == (B, Verdict.WARN)


@pytest.mark.parametrize(
    ("iommu", "verdict", "words"),
    [
        (host.iommu("DMA-FQ"), Verdict.WARN, "translates for the GPUs"),
        (host.iommu("identity", **{A: "DMA-FQ"}), Verdict.WARN, "translates for only some of the GPUs"),
        (host.iommu("identity"), Verdict.PASS, "not translated"),
        (IommuFacts({}, {}), Verdict.PASS, "no IOMMU is at work"),
        ("sysfs cannot be read", Verdict.UNKNOWN, "sysfs cannot be read"),
    ],
)
def test_what_the_iommu_does_for_the_gpus(iommu: IommuFacts | str, verdict: Verdict, words: str) -> None:
    assert one(judged(iommu=iommu), words).verdict is verdict


def test_a_file_that_did_not_take_effect() -> None:
    found = one(judged(peers=config({"NVreg_DmaRemapPeerMmio": "0"})), "DmaRemapPeerMmio")
    assert (found.verdict, found.expected, found.observed) == (Verdict.FAIL, "0", "1")
    assert "initramfs" in found.what_to_do
    right = one(judged(peers=config({"NVreg_DmaRemapPeerMmio": "1"})), "DmaRemapPeerMmio")
    assert (right.verdict, right.reason) == (Verdict.PASS, "DmaRemapPeerMmio is 1, as /etc/modprobe.d/nvidia.conf says")


def test_no_remapping_under_a_translating_iommu() -> None:
    peers = config(DmaRemapPeerMmio="0")
    assert one(judged(peers=peers, iommu=host.iommu()), "DmaRemapPeerMmio").verdict is Verdict.WARN
    assert one(judged(peers=peers), "DmaRemapPeerMmio").verdict is Verdict.PASS


def test_registry_overrides_are_told() -> None:
    found = one(judged(peers=config(RegistryDwords="ForceP2P=17")), "RegistryDwords")
    assert (found.verdict, found.observed) == (Verdict.WARN, "ForceP2P=17")


def test_one_gpu_has_no_pair_and_what_was_not_seen_is_unknown() -> None:
    alone = judged(TopologyFacts((A,)))
    assert one(alone, "there is no pair").verdict is Verdict.NOT_CHECKED
    blind = judged("nvidia-smi lists no GPU", "uname is not there", "no sysfs")
    assert [f.verdict for f in blind] == [Verdict.UNKNOWN] * 3
