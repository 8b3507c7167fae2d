"""What the machine claims of peer-to-peer, and what stands in its way: read before anything is copied. Claims are no evidence."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from proofbook.checks.looking import counted, join, tell, unseen
from proofbook.model import Check, Finding, Probe, Seen, Suggested
from proofbook.probes.iommu import IommuFacts, IommuGroups
from proofbook.probes.p2p import PeerConfig, PeerConfigFacts, Topology, TopologyFacts

__all__ = ["PeerClaims"]

_REMAP = "NVreg_DmaRemapPeerMmio"
#: Access control services that send a peer's requests up to the root complex instead of straight across the switch.
_REDIRECTS = frozenset({"ReqRedir", "CmpltRedir"})
_TRANSLATED = frozenset({"DMA", "DMA-FQ"})


@dataclass(frozen=True)
class PeerClaims(Check):
    """What is claimed of the pairs, and each thing that is known to break or slow peer-to-peer.

    PASS means that nothing known stands in the way, not that it works: on machines where every call said yes, data was lost.
    """

    name: ClassVar[str] = "p2p.PeerClaims"
    title: ClassVar[str] = "What does the machine claim of peer-to-peer, and what stands in its way?"

    def needs(self) -> tuple[Probe[Any], ...]:
        return (Topology(), PeerConfig(), IommuGroups())

    def judge(self, seen: Seen) -> Sequence[Finding]:
        topology, no_topology = tell(seen, Topology()).pair
        config, no_config = tell(seen, PeerConfig()).pair
        iommu, no_iommu = tell(seen, IommuGroups()).pair
        out = [unseen(self, no_topology)] if topology is None else self._topology(topology)
        translated = _translated(topology, iommu) if topology is not None and iommu is not None else ()
        if iommu is None:
            out.append(unseen(self, no_iommu))
        elif topology is not None:
            out.append(self._iommu(topology, iommu, translated))
        out += [unseen(self, no_config)] if config is None else self._config(config, translated)
        return out

    def _topology(self, topology: TopologyFacts) -> list[Finding]:
        if len(topology.gpus) < 2:
            return [self.not_checked(f"{counted(len(topology.gpus), 'GPU')}: there is no pair")]
        return [self._claims(topology), self._acs(topology), *self._bar1(topology)]

    def _claims(self, topology: TopologyFacts) -> Finding:
        pairs = [(a, b) for a in topology.gpus for b in topology.gpus if a != b]
        said = {c: topology.status.get(c, {}) for c in ("r", "w")}
        unknown = [pair for pair in pairs if any(pair not in status for status in said.values())]
        if unknown:
            why = join((text for name, text in topology.problems.items() if name.startswith("status")), 1)
            return self.unknown(f"nothing is claimed of {counted(len(unknown), 'ordered pair')}{f': {why}' if why else ''}")
        denied = {pair: status[pair] for status in said.values() for pair in pairs if status[pair] != "OK"}
        if denied:
            shown = join((f"{a} to {b} {text}" for (a, b), text in denied.items()), 4)
            return self.warned(
                f"the driver does not offer it to {len(denied)} of {counted(len(pairs), 'ordered pair')}: {shown}",
                action=Suggested.LOOK,
                what_to_do="CNS is the chipset, GNS the GPU, TNS the topology, DR a registry key. Serve without peer-to-peer "
                "unless a copy test shows otherwise.",
                observed={f"{a} {b}": text for (a, b), text in denied.items()},
            )
        return self.passed(f"reads and writes are claimed for all {counted(len(pairs), 'ordered pair')}; only a copy shows more")

    def _acs(self, topology: TopologyFacts) -> Finding:
        if "acs" in topology.problems:
            return unseen(self, topology.problems["acs"])
        bridges = sorted({bridge for gpu in topology.gpus for bridge in topology.upstream.get(gpu, ())})
        if not bridges:
            return self.unknown("which bridges are above the GPUs is not known, so neither is what they redirect")
        redirecting = [b for b in bridges if topology.acs.get(b, frozenset()) & _REDIRECTS]
        if not redirecting:
            return self.passed(f"none of {counted(len(bridges), 'bridge')} above the GPUs redirects a peer's requests")
        return self.warned(
            f"{join(redirecting)} {'sends' if len(redirecting) == 1 else 'send'} peers' requests up to the root complex (ACS): "
            "slower, and through the IOMMU",
            action=Suggested.FIX_CONFIG,
            what_to_do="Turn ACS off in the firmware's setup if no virtual machine needs the isolation. setpci does it until the "
            "next boot only.",
            observed={b: sorted(topology.acs[b]) for b in redirecting},
        )

    def _bar1(self, topology: TopologyFacts) -> list[Finding]:
        out = []
        for gpu in topology.gpus:
            bar1, memory = topology.bar1_mib.get(gpu), topology.framebuffer_mib.get(gpu)
            if bar1 is None or memory is None:
                out.append(self.unknown("the size of its BAR1 is not known", subject=gpu))
            elif bar1 < memory:
                out.append(
                    self.warned(
                        f"BAR1 has {bar1} MiB and its memory {memory} MiB: not all of it can be reached by a peer at once",
                        subject=gpu,
                        action=Suggested.FIX_CONFIG,
                        what_to_do="Turn on above-4G decoding and resizable BAR in the firmware's setup.",
                    )
                )
        return out or [self.passed(f"BAR1 covers the memory of all {counted(len(topology.gpus), 'GPU')}")]

    def _iommu(self, topology: TopologyFacts, iommu: IommuFacts, translated: Sequence[str]) -> Finding:
        if not iommu.on:
            return self.passed("no IOMMU is at work: nothing is translated, and no fault will ever be logged")
        types = {gpu: iommu.by_device.get(gpu, "no group") for gpu in topology.gpus}
        shown = join(f"{gpu} {kind}" for gpu, kind in types.items())
        if not translated:
            return self.passed(f"the GPUs are not translated ({shown}), so no fault will be logged either", observed=types)
        mixed = "" if len(translated) == len(topology.gpus) else "only some of "
        return self.warned(
            f"the IOMMU translates for {mixed}the GPUs: {shown}",
            action=Suggested.LOOK,
            what_to_do="NVIDIA does not support peer-to-peer over PCIe on bare metal while an IOMMU translates: writes may be "
            "lost with every call saying success. Trust the copy test alone.",
            observed=types,
        )

    def _config(self, config: PeerConfigFacts, translated: Sequence[str]) -> list[Finding]:
        if "running" in config.problems:
            return [self.unknown(config.problems["running"])]
        out = [self._remap(config, translated)]
        if dwords := config.running.get("RegistryDwords", ""):
            out.append(
                self.warned(
                    f"RegistryDwords overrides the driver's own choices: {dwords}",
                    action=Suggested.LOOK,
                    what_to_do="ForceP2P and PeerMappingOverride make calls say yes where the platform may drop the copies.",
                    observed=dwords,
                )
            )
        return out

    def _remap(self, config: PeerConfigFacts, translated: Sequence[str]) -> Finding:
        running = config.running.get("DmaRemapPeerMmio")
        asked, source = config.text.get(_REMAP), config.sources.get(_REMAP, "")
        if running is None:
            return self.unknown("this driver does not say DmaRemapPeerMmio")
        if asked is not None and asked != running:
            image = "not known" if config.initramfs is None else join(config.initramfs) or "no file of /etc/modprobe.d"
            return self.failed(
                f"{source} says DmaRemapPeerMmio={asked}, the running module has {running}",
                expected=asked,
                observed=running,
                action=Suggested.FIX_CONFIG,
                what_to_do=f"The module was loaded without it (in the initramfs: {image}). Rebuild the initramfs and boot.",
            )
        if running == "0" and translated:
            return self.warned(
                "DmaRemapPeerMmio is 0 while the IOMMU translates: peers are given addresses that it does not know",
                observed=running,
                action=Suggested.FIX_CONFIG,
                what_to_do="Take the setting away (1 is the default), or serve without peer-to-peer.",
            )
        why = f"as {source} says" if asked is not None else "the driver's default: that shows of no file that it took effect"
        return self.passed(f"DmaRemapPeerMmio is {running}, {why}", observed=running)


def _translated(topology: TopologyFacts, iommu: IommuFacts) -> tuple[str, ...]:
    return tuple(gpu for gpu in topology.gpus if iommu.by_device.get(gpu, "") in _TRANSLATED)
