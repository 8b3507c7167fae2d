"""What can go wrong on a simulated machine, by the ``kind`` of a scenario's ``[[faults]]``.

A fault changes the machine's state when a boot begins (``at_power_on``), or schedules what will happen in it
(``after_power_on``, ``after_container_start``). Everything else follows: no answer is faked anywhere.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from proofbook.errors import LabError
from proofbook.lab.sim import checkpoint, fault_lines, identity, units
from proofbook.lab.sim.os_state import Container, Endpoint, Fault, Machine, System
from proofbook.lab.sim.render_kernel import interface_name
from proofbook.lab.standin import faults as server_faults
from proofbook.lab.standin.engine import Server

if TYPE_CHECKING:
    from proofbook.lab.sim.life import Life

Parameters = dict[str, Any]


def at_power_on(life: Life) -> None:
    """Let the active faults take hold before the kernel starts."""
    for fault in life.machine.active_faults():
        if effect := _AT_POWER_ON.get(fault.kind):
            effect(life.machine, fault.parameters)


def after_power_on(life: Life) -> None:
    """Schedule what the active faults let happen in this boot."""
    for fault in life.machine.active_faults():
        if schedule := _AFTER_POWER_ON.get(fault.kind):
            schedule(life, fault.parameters)


def after_container_start(life: Life, container: Container) -> None:
    """Let the active faults take hold of a container's services before they start."""
    for fault in life.machine.active_faults():
        effect = _IN_CONTAINER.get(fault.kind)
        if effect and fault.parameters["container"] == container.id:
            effect(life, container, fault.parameters)


def at_reload(life: Life, system: System) -> None:
    """Somebody makes systemd reload its units: what another hand changes at that very time takes hold, once."""
    if f"reload {system.name}" in life.machine.happened:
        return
    life.machine.happened.add(f"reload {system.name}")
    for fault in life.machine.faults:
        if fault.when == "at-reload" and fault.parameters.get("container", "") == system.name:
            _AT_POWER_ON[fault.kind](life.machine, fault.parameters)


def port_is_free(life: Life, system: System, port: int) -> None:
    """A port of a userland has no owner any more: who waited for it takes it, once."""
    for fault in life.machine.active_faults():
        if fault.kind == "old-port-owner" and fault.parameters["container"] == system.name:
            life.at(life.now + 0.1, "port_taken", system.name, port, fault.parameters["unit"])


def known_kinds() -> frozenset[str]:
    return frozenset({*_AT_POWER_ON, *_AFTER_POWER_ON, *_IN_CONTAINER, *_ON_REBOOT, *BETWEEN_PEERS, *identity.KINDS})


def validate(fault: Fault) -> Fault:
    """Raises LabError for a kind or a time that does not exist."""
    if fault.kind not in known_kinds():
        raise LabError(f"no such fault: {fault.kind!r}", hint=f"the lab knows {', '.join(sorted(known_kinds()))}")
    if fault.when not in ("always", "after-reboot", "at-reload"):
        raise LabError(f"fault {fault.kind!r} has when = {fault.when!r}", hint='it is "always", "after-reboot" or "at-reload"')
    if fault.when == "at-reload" and fault.kind not in _FILES:
        raise LabError(f"fault {fault.kind!r} cannot come at a reload", hint=f"{', '.join(_FILES)} can")
    return fault


# --------------------------------------------------------------------------- the hardware, at power-on


def _gpu_missing(m: Machine, p: Parameters) -> None:
    m.hw.pci[p["pci"]].present = False


def _iommu_type(m: Machine, p: Parameters) -> None:
    m.hw.pci[p["pci"]].iommu_type = p["type"]


def _iommu_off(m: Machine, p: Parameters) -> None:
    m.hw.iommu_on = False
    m.boot.cmdline = f"{m.cmdline} amd_iommu=off iommu=off"
    for device in m.hw.pci.values():
        device.iommu_group = None


def _iommu_group_shared(m: Machine, p: Parameters) -> None:
    """The board's switch keeps no two functions apart below one port."""
    m.hw.pci[p["pci"]].iommu_group = m.hw.pci[p["with"]].iommu_group


def _command_line(m: Machine, p: Parameters) -> None:
    """The boot loader adds something; ``boot``: only at the n-th boot that somebody asked for, as a one-time entry does."""
    if m.requested_boots == p.get("boot", m.requested_boots):
        m.boot.cmdline = f"{m.cmdline} {p['adds']}"


def _vfio(m: Machine, p: Parameters) -> None:
    device = m.hw.pci[p["pci"]]
    device.driver, device.iommu_type = "vfio-pci", p.get("iommu_type", device.iommu_type)


def _link_width(m: Machine, p: Parameters) -> None:
    link = m.hw.pci[p["pci"]].link
    if link is None:
        raise LabError(f"fault link-width: {p['pci']} has no PCIe link")
    link.width = p["width"]


def _firmware_aer(m: Machine, p: Parameters) -> None:
    m.hw.os_controls_aer = False


def _library_mismatch(m: Machine, p: Parameters) -> None:
    """The package was upgraded, the initramfs was not: the old module was loaded, the library and the disk are new."""
    m.hw.nvidia.library_version = m.hw.nvidia.disk_version = p["library"]
    m.hw.nvidia.disk_srcversion = p["srcversion"]


def _smi_error_row(m: Machine, p: Parameters) -> None:
    gpu = m.hw.gpus[p["pci"]]
    index = sorted(m.hw.gpus).index(p["pci"])
    m.hw.nvidia.smi_noise.append((gpu.pci, f"Unable to determine the device handle for GPU{index}: {gpu.pci}: Unknown Error"))
    gpu.condition = "lost"


def _device_denied(m: Machine, p: Parameters) -> None:
    m.containers[p["container"]].devices[p["path"]] = p.get("errno", "EPERM")


def _other_machine(m: Machine, p: Parameters) -> None:
    m.host.machine_id = p["machine_id"]


def _host_key_changed(m: Machine, p: Parameters) -> None:
    m.host_key = "second"


def _write_file(m: Machine, p: Parameters) -> None:
    units.write(m.system(p.get("container", "")), p["path"], p["text"])


def _remove_file(m: Machine, p: Parameters) -> None:
    m.system(p.get("container", "")).files[p["path"]] = None


def _package_upgraded(m: Machine, p: Parameters) -> None:
    """Another release of a package lies on the disk; what runs does not change by that."""
    m.containers[p["container"]].packages[p.get("package", "sglang")] = p["version"]


def _no_mtp_tensors(m: Machine, p: Parameters) -> None:
    """The checkpoint was converted by somebody who left the draft's tensors out."""
    container = m.containers[p["container"]]
    container.files |= checkpoint.files(p["path"], mtp=False)


#: The kinds that are a change of a file, which may come at any time.
_FILES = ("write-file", "remove-file", "package-upgraded")

_AT_POWER_ON: dict[str, Callable[[Machine, Parameters], None]] = {
    "gpu-missing": _gpu_missing,
    "iommu-type": _iommu_type,
    "iommu-off": _iommu_off,
    "iommu-group-shared": _iommu_group_shared,
    "command-line": _command_line,
    "vfio": _vfio,
    "link-width": _link_width,
    "firmware-aer": _firmware_aer,
    "library-mismatch": _library_mismatch,
    "smi-error-row": _smi_error_row,
    "device-denied": _device_denied,
    "other-machine": _other_machine,
    "host-key-changed": _host_key_changed,
    "write-file": _write_file,
    "remove-file": _remove_file,
    "package-upgraded": _package_upgraded,
    "no-mtp-tensors": _no_mtp_tensors,
}


# ------------------------------------------------------------------------------- what happens later


def _kernel_lines(life: Life, p: Parameters) -> None:
    for i, text in enumerate(p["lines"]):
        life.at(life.now + p["after_s"] + i * p.get("every_s", 0.001), "kernel", p.get("priority", 4), text)


def _gpu_lost(life: Life, p: Parameters) -> None:
    life.at(life.now + p["after_s"], "gpu_lost", p["pci"])


def _page_faults(life: Life, p: Parameters) -> None:
    """Bursts of ten lines in five seconds, as the kernel's rate limit lets them through, and what it says of the rest."""
    device = life.machine.hw.pci[p["pci"]]
    driver, domain = p.get("driver") or device.driver or "pci", (device.iommu_group or 0) + 2
    for burst in range(p.get("bursts", 1)):
        start = life.now + p["after_s"] + burst * 5.0
        lines = fault_lines.suppressed(p["suppressed"]) if burst and p.get("suppressed") else []
        for i in range(p.get("lines", 10)):
            address = 0x4D7201180 + 0x1000 * (burst * 64 + i)
            lines += fault_lines.io_page_fault(driver, device.address, domain, address, write=p.get("write", True))
        for i, line in enumerate(lines):
            life.at(start + 0.0001 * i, "kernel", line.priority, line.text)


def _nic_fault(life: Life, p: Parameters) -> None:
    """A network card's own page fault; no GPU has a part in it."""
    device = life.machine.hw.pci[p["pci"]]
    lines = fault_lines.nic_fault(
        device.driver, device.address, interface_name(device), (device.iommu_group or 0) + 2, 0xFFF2A000
    )
    for i, line in enumerate(lines):
        life.at(life.now + p["after_s"] + 0.0001 * i, "kernel", line.priority, line.text)


def _edited(life: Life, p: Parameters) -> None:
    """Somebody edits a file while everything runs, and leaves it at that: no reload, no restart."""
    if life.machine.boot.number < 1:
        return  # the boot before the present one is history, and the present one began with the file as it was
    life.at(life.now + p["after_s"], "edited", p.get("container", ""), p["path"], p["text"])


def _missed(life: Life, p: Parameters) -> None:
    life.at(life.now + p["after_s"], "missed", p["count"])


def _journal_stopped(life: Life, p: Parameters) -> None:
    """Somebody stops journald of a userland; nothing else happens."""
    life.at(life.now + p["after_s"], "journal_stopped", p.get("container", ""))


def _rotated(life: Life, p: Parameters) -> None:
    life.at(life.now + p["after_s"], "vacuum", p["keep_from_s"])


_AFTER_POWER_ON: dict[str, Callable[[Life, Parameters], None]] = {
    "kernel-lines": _kernel_lines,
    "gpu-lost": _gpu_lost,
    "page-faults": _page_faults,
    "nic-fault": _nic_fault,
    "edited-by-hand": _edited,
    "kernel-messages-missed": _missed,
    "journal-rotated": _rotated,
    "journal-stopped": _journal_stopped,
}


# ---------------------------------------------------------------------------- services in a container


def _crash_loop(life: Life, container: Container, p: Parameters) -> None:
    container.units[p["unit"]].server_faults["out-of-memory"] = {"always": True}


def _not_answering(life: Life, container: Container, p: Parameters) -> None:
    container.units[p["unit"]].server_faults["hang-at-graphs"] = {"always": True}


def _of_server(kind: str) -> Callable[[Life, Container, Parameters], None]:
    """A fault of the server itself, by its name there; what it knows of parameters goes along."""

    def take(life: Life, container: Container, p: Parameters) -> None:
        given = {k: v for k, v in p.items() if k not in ("container", "unit")}
        container.units[p["unit"]].server_faults[kind] = given

    return take


def _leftover(life: Life, container: Container, p: Parameters) -> None:
    """A scheduler hangs in the driver when its service stops, and keeps its GPU's memory for a while."""
    container.units[p["unit"]].leftover = {"rank": p.get("rank", 1), "lets_go_after_s": p["lets_go_after_s"]}


def _suppressed(life: Life, container: Container, p: Parameters) -> None:
    """journald's rate limit drops what the service says between two seconds of its start."""
    container.units[p["unit"]].suppressed = (float(p["from_s"]), float(p["until_s"]))


def take_port(life: Life, system: System, port: int, unit_name: str) -> None:
    """An old instance that somebody once started by hand, and that tried its port again and again, has it now.

    Its schedulers are long dead: its health address answers, and nothing else does. After a while it is gone too.
    """
    if port in system.endpoints or system.state != "running" or "old-port-owner" in life.machine.happened:
        return
    life.machine.happened.add("old-port-owner")
    unit = system.units[unit_name]
    fault = next(f for f in life.machine.active_faults() if f.kind == "old-port-owner")
    process = life.by_hand(system, unit.exec_start, {**unit.environment, "SGLANG_ENABLE_HEALTH_ENDPOINT_GENERATION": "0"})
    process.started_at -= float(fault.parameters.get("age_s", 86400.0))
    server = Server(tuple(process.argv), process.environ, system.packages.get("sglang", "0.5.10"), seed=life.machine.seed)
    server.stuck = True
    system.servers[process.pid] = server
    system.endpoints[port] = Endpoint(port, process.pid)
    life.at(life.now + float(fault.parameters["lets_go_after_s"]), "lets_go", system.name, process.pid, process.serial)


def _not_enabled(life: Life, container: Container, p: Parameters) -> None:
    """Not enabled; a person starts it after the boot."""
    units.disable(container, p["unit"])
    life.at(life.now + p["started_after_s"], "start_by_hand", container.id, p["unit"])


def _started_by_hand(life: Life, container: Container, p: Parameters) -> None:
    """systemd skips it at boot (its models are not mounted yet); a person runs its command from a shell."""
    container.units[p["unit"]].behaviour = "skipped"
    life.at(life.now + p["started_after_s"], "nohup", container.id, p["unit"])


_IN_CONTAINER: dict[str, Callable[[Life, Container, Parameters], None]] = {
    "crash-loop": _crash_loop,
    "not-answering": _not_answering,
    "not-enabled": _not_enabled,
    "started-by-hand": _started_by_hand,
    "leftover-gpu-process": _leftover,
    "service-lines-suppressed": _suppressed,
    **{kind: _of_server(kind) for kind in server_faults.KNOWN},
}

#: Read where they matter: where a reboot is played, and where a port becomes free.
_ON_REBOOT = frozenset({"reboot-ignored", "never-comes-back", "slow-boot", "unclean-shutdown", "old-port-owner"})

#: What copies between GPUs meet; read where the peer-to-peer probe is played (:mod:`proofbook.lab.sim.p2p`).
BETWEEN_PEERS = frozenset(
    {"pair-page-faults", "pair-lost-writes", "pair-hangs", "pair-resets-host", "pair-speed", "foreign-fault"}
)
