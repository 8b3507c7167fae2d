from __future__ import annotations

from typing import Any

import pytest

from proofbook.intent import ContainerSpec
from proofbook.probes.containers import ContainerState, CudaFacts

DEVICES = ("/dev/nvidia0", "/dev/nvidia-uvm")
PCT = ContainerSpec(name="llm-two", kind="pct", id="102", devices=DEVICES)
CONFIG = "arch: amd64\nlxc.cgroup2.devices.allow: c 195:* rwm\nlxc.cgroup2.devices.allow: c 511:* rwm\nonboot: 1\n"
OPENED = "ok /dev/nvidia0\nerror /dev/nvidia-uvm Operation not permitted\n"
CUDA = '{"library": "/usr/lib/libcuda.so.595.58.03", "cuInit": 0, "devices": 2, "error": null}\n'


@pytest.fixture
def proxmox(machine: Any) -> Any:
    machine.on("pct", "status", "102", stdout="status: running\n").on("pct", "config", "102", stdout=CONFIG)
    return machine.on("proofbook-open-devices", stdout=OPENED).on("python3", stdout=CUDA)


def test_a_running_container(proxmox: Any) -> None:
    facts = proxmox.value(ContainerState(PCT))
    assert (facts.running, facts.status, facts.starts_at_boot, facts.id) == (True, "running", True, "102")
    assert facts.devices == {"/dev/nvidia0": "ok", "/dev/nvidia-uvm": "Operation not permitted"}
    assert facts.cuda == CudaFacts("/usr/lib/libcuda.so.595.58.03", 0, 2, "") and facts.cuda.ok
    assert facts.config["lxc.cgroup2.devices.allow"] == ("c 195:* rwm", "c 511:* rwm")
    assert facts.unknown == {}
    assert all(c.root for c in proxmox.asked())
    assert proxmox.rounds[1][0].argv[:4] == ("pct", "exec", "102", "--")


def test_a_stopped_one_is_not_entered(proxmox: Any) -> None:
    facts = proxmox.on("pct", "status", "102", stdout="status: stopped\n").value(ContainerState(PCT))
    assert (facts.running, facts.status, facts.devices, facts.cuda) == (False, "stopped", {}, None)
    assert len(proxmox.rounds) == 1


def test_one_that_does_not_start_by_itself(proxmox: Any) -> None:
    assert proxmox.on("pct", "config", "102", stdout="arch: amd64\n").value(ContainerState(PCT)).starts_at_boot is False


def test_without_expected_devices_cuda_is_not_asked(proxmox: Any) -> None:
    facts = proxmox.value(ContainerState(ContainerSpec(name="web", kind="pct", id="102")))
    assert facts.cuda is None and facts.unknown == {} and len(proxmox.rounds) == 1


def test_cuda_that_fails_is_an_answer_and_cuda_that_cannot_be_asked_is_not(proxmox: Any) -> None:
    failed = '{"library": "libcuda.so.1", "cuInit": 999, "devices": null, "error": "unknown error"}\n'
    cuda = proxmox.on("python3", stdout=failed).value(ContainerState(PCT)).cuda
    assert (cuda.ok, cuda.code, cuda.error) == (False, 999, "unknown error")
    proxmox.on("python3", stderr='lxc-attach: Failed to exec "python3"\n', status=127)
    facts = proxmox.value(ContainerState(PCT))
    assert facts.cuda is None
    assert "cuInit could not be tried inside" in facts.unknown["cuda"]
    assert facts.devices  # the other answer stays


def test_devices_that_could_not_be_tried(proxmox: Any) -> None:
    facts = proxmox.on("proofbook-open-devices", stdout="ok /dev/nvidia0\n").value(ContainerState(PCT))
    assert facts.devices == {}
    assert "1 answers for 2 device nodes" in facts.unknown["devices"]


@pytest.mark.parametrize(
    ("kind", "words", "said", "running", "status"),
    [
        ("lxc", ("lxc-info",), {"stdout": "RUNNING\n"}, True, "RUNNING"),
        ("lxc", ("lxc-info",), {"stderr": "lxc-info: c1: Failed: c1 doesn't exist\n", "status": 1}, False, "absent"),
        ("incus", ("incus", "list"), {"stdout": "RUNNING\n"}, True, "RUNNING"),
        ("incus", ("incus", "list"), {"stdout": ""}, False, "absent"),
        ("docker", ("docker", "inspect"), {"stdout": "running\n"}, True, "running"),
        ("docker", ("docker", "inspect"), {"stdout": "exited\n"}, False, "exited"),
        ("podman", ("podman", "inspect"), {"stderr": "Error: no such object: c1\n", "status": 125}, False, "absent"),
        ("nspawn", ("machinectl", "show"), {"stdout": "running\n"}, True, "running"),
        (
            "nspawn",
            ("machinectl", "show"),
            {"stderr": "Could not get path to machine: No machine 'c1' known\n", "status": 1},
            False,
            "stopped",
        ),
    ],
)
def test_other_managers(
    machine: Any, kind: Any, words: tuple[str, ...], said: dict[str, Any], running: bool, status: str
) -> None:
    facts = machine.on(*words, **said).value(ContainerState(ContainerSpec(name="c1", kind=kind)))
    assert (facts.running, facts.status, facts.starts_at_boot) == (running, status, None)


@pytest.mark.parametrize(
    ("said", "reason"),
    [
        ({"status": 127, "stderr": "sh: 1: pct: not found\n"}, "`pct` is not there"),
        ({"status": 1, "stderr": "sudo: a password is required\n"}, "sudo refused"),
        ({"stdout": "???\n"}, "gave no state of llm-two"),
        ({"stdout": ""}, "gave no state of llm-two"),
    ],
)
def test_a_manager_that_gives_no_state(proxmox: Any, said: dict[str, Any], reason: str) -> None:
    assert reason in proxmox.on("pct", "status", "102", **said).unknown(ContainerState(PCT))


def test_a_container_that_proxmox_does_not_know(proxmox: Any) -> None:
    missing = {"stderr": "Configuration file 'nodes/hv1/lxc/102.conf' does not exist\n", "status": 2}
    facts = proxmox.on("pct", "status", "102", **missing).on("pct", "config", "102", **missing).value(ContainerState(PCT))
    assert (facts.running, facts.status, facts.starts_at_boot) == (False, "absent", None)


def test_a_configuration_that_cannot_be_read_costs_only_itself(proxmox: Any) -> None:
    facts = proxmox.on("pct", "config", "102", stderr="ipcc_send_rec failed\n", status=255).value(ContainerState(PCT))
    assert facts.running and facts.devices
    assert "named no setting" in proxmox.on("pct", "config", "102", stdout="\n").value(ContainerState(PCT)).unknown["config"]
    assert facts.starts_at_boot is None and "ipcc_send_rec failed" in facts.unknown["config"]
