"""Every scenario loads, looks healthy before the reboot where it should, and shows its fault afterwards."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Any

import pytest

from proofbook import remote
from proofbook.errors import LabError
from proofbook.lab.sim import client, scenario

HEALTHY = ("healthy", "mtp-enabled", "idle-gen1", "eight-gpus", "secret-in-unit", "vfio-intended")
IN = "pct exec 102 -- "
HEALTH = IN + "curl -sS -m 10 -o /dev/null -w %{http_code} http://127.0.0.1:30000/health"
SHOW = IN + "systemctl show sglang-qwen.service --property="
KERNEL = "journalctl -k -b 0 -o cat --no-pager"

#: scenario: (line that is run after the reboot and eight minutes, what its output or complaint must hold)
FAULTS = {
    "gpu-missing": ("lspci -D -d 10de: | wc -l; nvidia-smi -L | grep -c 2c85f3e1", r"^3\n0\n"),
    "late-xid79": (KERNEL, r"Xid \(PCI:0000:41:00\): 79.*(?s:.)*Xid \(PCI:0000:41:00\): 154"),
    "page-fault-storm": (KERNEL, r"IO_PAGE_FAULT (?s:.)*10432 callbacks suppressed"),
    "nic-fault": (KERNEL, r"mlx5_core 0000:22:00.0: AMD-Vi: Event logged \[IO_PAGE_FAULT"),
    "iommu-type-changed": ("cat /sys/bus/pci/devices/0000:41:00.0/iommu_group/type", r"^identity\n"),
    "iommu-off-translated": (
        "ls /sys/kernel/iommu_groups | wc -l; dmesg | grep 'default domain\\|Default domain'",
        r"^0\n.*Translated",
    ),
    "crash-loop": (SHOW + "NRestarts,Result,ActiveState", r"Result=(signal|success)\nNRestarts=1\d\n"),
    "started-by-hand": (SHOW + "ActiveState,UnitFileState; " + HEALTH, r"ActiveState=inactive\nUnitFileState=enabled\n200$"),
    "not-enabled": (SHOW + "ActiveState,UnitFileState; " + HEALTH, r"ActiveState=active\nUnitFileState=disabled\n200$"),
    "not-answering": (SHOW + "ActiveState; " + HEALTH, r"ActiveState=active\n000"),
    "slow-boot": ("uptime -p", r"^up "),
    "journal-rotated": (
        KERNEL + " | head -1; dmesg | head -1; journalctl --list-boots --no-pager | wc -l",
        r"^(?!Linux version)(?:(?s:.)*\n)?2\n$",
    ),
    "journal-suppressed": (
        "journalctl -b 0 -o cat --no-pager _TRANSPORT=driver; dmesg | head -1",
        r"Missed 312 kernel messages\n(?!.*Linux version)",
    ),
    "journal-stopped": (
        "systemctl is-active systemd-journald.service systemd-journald.socket; journalctl -n 1 -o cat --no-pager; true",
        r"^inactive\ninactive\nJournal stopped\n",
    ),
    "undeclared-service-gone": ("systemctl is-active chrony.service ssh.service; true", r"^inactive\nactive\n"),
    "aer-firmware": (KERNEL, r"_OSC: platform does not support \[AER"),
    "driver-library-mismatch": ("nvidia-smi; true", r"Driver/library version mismatch"),
    "smi-error-row": (
        "nvidia-smi --query-gpu=index,pci.bus_id --format=csv,noheader; true",
        r"Unable to determine the device handle for GPU",
    ),
    "vfio-bound": ("readlink /sys/bus/pci/devices/0000:c1:00.0/driver", r"vfio-pci\n"),
    "vfio-intended": ("readlink /sys/bus/pci/devices/0000:c1:00.0/driver; " + HEALTH, r"vfio-pci\n200$"),
    "container-no-uvm": (SHOW + "Result; " + IN + "journalctl -b 0 -o cat --no-pager -u sglang-qwen", r"CUDA unknown error"),
    "link-x8": ("cat /sys/bus/pci/devices/0000:41:00.0/current_link_width", r"^8\n"),
    "mtp-silently-off": (SHOW + "Description,ExecStart", r"^ExecStart=\{ (?!.*speculative).*\nDescription=.*\(MTP enabled\)"),
    "unclean-shutdown": ("journalctl -b -1 -n 3 -o cat --no-pager", r"^(?!(?s:.)*Journal stopped)"),
    "secret-in-unit": (SHOW + "Environment", r"HF_TOKEN=hf_"),
    "idle-gen1": ("cat /sys/bus/pci/devices/0000:41:00.0/current_link_speed", r"^2\.5 GT/s PCIe\n"),
    "eight-gpus": ("nvidia-smi -L | wc -l; " + HEALTH, r"^8\n200$"),
    "mtp-enabled": (IN + "curl -s http://127.0.0.1:30000/server_info", r'"speculative_algorithm": "EAGLE"'),
    "healthy": ("systemctl is-system-running; " + HEALTH, r"^running\n200$"),
    "other-machine": ("cat /etc/machine-id", r"^5c1d7f0e93b24a6f8e0d4b7a2c9f6135\n"),
}

#: Scenarios whose fault is not seen in what the machine says: a test of its own below.
ELSEWHERE = {"did-not-reboot", "host-key-changed", "never-comes-back", "no-dmesg-permission"}


def test_each_scenario_has_a_look_at_its_fault() -> None:
    """Those that wait for what one runbook does are looked at when that has been done: see the tests named after them."""
    alone = ({"mtp-enablement"}, {"iommu-identity-experiment"}, {"p2p-pair-matrix"})
    here = {name for name in scenario.names() if scenario.load(name).expect.keys() not in alone}
    assert here == FAULTS.keys() | ELSEWHERE


@pytest.mark.parametrize("name", sorted(FAULTS))
def test_fault(bench: Callable[[str], Any], name: str) -> None:
    machine = bench(name)
    assert machine.run(HEALTH).stdout == b"200"  # a baseline before the reboot is a healthy one
    machine.reboot(14 + 95 + 480 + (600 if name == "slow-boot" else 0))
    line, pattern = FAULTS[name]
    answer = machine.run(line)
    assert re.search(pattern, (answer.stdout + answer.stderr).decode()), answer
    assert machine.unknown == []


def test_before_the_reboot_nothing_is_wrong(bench: Callable[[str], Any]) -> None:
    for name in ("gpu-missing", "link-x8", "vfio-bound", "iommu-off-translated", "mtp-silently-off"):
        machine = bench(name)
        assert machine.say("nvidia-smi -L | wc -l") == "4\n"
        assert machine.say("cat /sys/bus/pci/devices/0000:41:00.0/current_link_width") == "16\n"
        assert machine.say("cat /sys/bus/pci/devices/0000:c1:00.0/iommu_group/type") == "DMA-FQ\n"
        assert "--speculative-algorithm" in machine.say(SHOW + "ExecStart")


def test_a_container_reaches_the_gpus_that_it_was_given(bench: Callable[[str], Any]) -> None:
    machine = bench("vfio-intended")
    assert machine.say("nvidia-smi -L | wc -l") == "3\n"
    assert machine.say(IN + "nvidia-smi -L | wc -l") == "2\n"
    assert json.loads(machine.argv("pct", "exec", "102", "--", *remote.cu_init().argv).stdout)["devices"] == 2


def test_a_reboot_that_is_ignored(bench: Callable[[str], Any]) -> None:
    machine = bench("did-not-reboot")
    before = machine.say("cat /proc/sys/kernel/random/boot_id")
    machine.reboot(3600)
    assert machine.life.machine.reachable
    assert machine.say("cat /proc/sys/kernel/random/boot_id") == before
    assert machine.run("systemctl is-system-running").stdout == b"stopping\n"


def test_a_machine_that_never_comes_back(bench: Callable[[str], Any]) -> None:
    machine = bench("never-comes-back")
    machine.reboot(86400)
    assert not machine.life.machine.reachable


def test_another_key_is_shown_after_the_reboot_only(bench: Callable[[str], Any]) -> None:
    machine = bench("host-key-changed")
    assert machine.life.machine.host_key == "first"
    machine.reboot()
    assert machine.life.machine.host_key == "second"


@pytest.mark.parametrize("name", scenario.names())
def test_what_is_expected_never_reaches_the_machine(name: str) -> None:
    loaded = scenario.load(name)
    assert set(loaded.served()) == {"machine", "faults", "clock"}
    found = client.expectations(name)
    assert found and all(expected.verdict in ("PASS", "WARN", "FAIL", "UNKNOWN") for expected in found.values())
    if "reboot-verification" in found:
        assert (name in HEALTHY or name in ("slow-boot",)) == (found["reboot-verification"].verdict == "PASS")
    assert {g["pci"] for g in client.host_table(name)["gpus"]} <= {
        f"0000:{b}:00.0" for b in ("01", "21", "41", "61", "81", "a1", "c1", "e1")
    }


def test_an_unknown_scenario_names_the_nearest() -> None:
    with pytest.raises(LabError, match="late-xid79"):
        scenario.load("late-xid")
