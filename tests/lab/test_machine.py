"""One machine's life: what boots, services, the journal and a reboot look like, without SSH."""

from __future__ import annotations

import json
import pickle
import re
from collections.abc import Callable
from typing import Any

import pytest

from proofbook import remote
from proofbook.lab.sim.journalctl import JSON_THRESHOLD
from proofbook.model import command

UNIT = "sglang-qwen.service"


@pytest.fixture(scope="module")
def healthy() -> Any:
    from .conftest import Bench

    return Bench("healthy")


def entries(machine: Any, line: str) -> list[dict[str, str]]:
    return [json.loads(text) for text in machine.say(line).splitlines() if text.startswith("{")]


def shown(machine: Any, properties: str, prefix: str = "pct exec 102 -- ") -> dict[str, str]:
    text = machine.say(f"{prefix}systemctl show {UNIT} --property={properties}")
    return dict(line.split("=", 1) for line in text.splitlines())


def test_every_source_says_the_same_boot(healthy: Any) -> None:
    dashed = healthy.say("cat /proc/sys/kernel/random/boot_id").strip()
    plain = dashed.replace("-", "")
    assert healthy.say("journalctl --list-boots --no-pager").splitlines()[-1].split()[:2] == ["0", plain]
    assert {e["_BOOT_ID"] for e in entries(healthy, "journalctl -k -b 0 -o json --no-pager")} == {plain}
    assert healthy.say("pct exec 102 -- cat /proc/sys/kernel/random/boot_id").strip() == dashed
    assert healthy.say("pct exec 102 -- journalctl --list-boots --no-pager").splitlines()[-1].split()[1] == plain


def test_the_kernel_log_is_one(healthy: Any) -> None:
    ring = [re.sub(r"^\[ *[\d.]+\] ", "", line) for line in healthy.say("dmesg").splitlines()]
    assert [e["MESSAGE"] for e in entries(healthy, "journalctl -k -b 0 -o json --no-pager")] == ring
    assert ring[0].startswith("Linux version 6.17.13-1-pve")
    assert healthy.say("cat /proc/cmdline").strip() in "\n".join(ring)


def test_times_never_go_back_in_a_boot(healthy: Any) -> None:
    for where in ("", "pct exec 102 -- "):
        times = [int(e["__MONOTONIC_TIMESTAMP"]) for e in entries(healthy, f"{where}journalctl -b 0 -o json --no-pager")]
        assert times == sorted(times)
        assert times[0] >= 0


def test_a_journal_entry_has_the_fields_of_a_real_one(healthy: Any) -> None:
    invocation = shown(healthy, "InvocationID")["InvocationID"]
    line = f"pct exec 102 -- journalctl -o json --no-pager _SYSTEMD_INVOCATION_ID={invocation} + INVOCATION_ID={invocation}"
    found = entries(healthy, line)
    started, ready = found[0], found[-1]
    assert started["MESSAGE"] == f"Started {UNIT} - SGLang Qwen3.5-122B-A10B BF16."
    assert (started["_PID"], started["UNIT"], started["SYSLOG_IDENTIFIER"], started["_TRANSPORT"]) == (
        "1",
        UNIT,
        "systemd",
        "journal",
    )
    assert "_SYSTEMD_INVOCATION_ID" not in started
    assert ready["MESSAGE"].endswith("The server is fired up and ready to roll!")
    assert (ready["_SYSTEMD_UNIT"], ready["SYSLOG_IDENTIFIER"], ready["_TRANSPORT"]) == (UNIT, "sglang-qwen", "stdout")
    assert re.fullmatch(r"s=[0-9a-f]{32};i=[0-9a-f]+;b=[0-9a-f]{32};m=[0-9a-f]+;t=[0-9a-f]+;x=[0-9a-f]+", ready["__CURSOR"])
    assert all(isinstance(v, str) for v in ready.values())


def test_a_long_field_is_null_unless_all_is_asked_for(healthy: Any) -> None:
    healthy.life.on_kernel(6, "x" * JSON_THRESHOLD)
    healthy.life.machine.revision += 1
    assert entries(healthy, "journalctl -k -b 0 -n 1 -o json --no-pager")[0]["MESSAGE"] is None
    assert entries(healthy, "journalctl -k -b 0 -n 1 -o json --no-pager --all")[0]["MESSAGE"] == "x" * JSON_THRESHOLD


def test_the_boot_before_ended_orderly(healthy: Any) -> None:
    before = healthy.say("journalctl --list-boots --no-pager").splitlines()[-2].split()[1]
    last = [e["MESSAGE"] for e in entries(healthy, f"journalctl -b {before} -n 400 -o json --no-pager")]
    assert last[-1] == "Journal stopped"
    assert "Reached target reboot.target - System Reboot." in last
    assert last == [e["MESSAGE"] for e in entries(healthy, "journalctl -b -1 -n 400 -o json --no-pager")]


def test_an_unknown_boot_is_an_error(healthy: Any) -> None:
    answer = healthy.run("journalctl -k -b 00000000000000000000000000000000 -o json --no-pager")
    assert answer.status == 1
    assert b"No such boot ID in journal" in answer.stderr


def test_systemctl_show_prints_in_its_own_order(healthy: Any) -> None:
    text = healthy.say(
        f"pct exec 102 -- systemctl show {UNIT} nothing.service --property=LoadState,ActiveState,ExecStart,MainPID,NRestarts"
    )
    first, second = text.split("\n\n")
    assert [line.partition("=")[0] for line in first.splitlines()] == [
        "MainPID",
        "NRestarts",
        "ExecStart",
        "LoadState",
        "ActiveState",
    ]
    assert re.search(
        r"ExecStart=\{ path=(\S+) ; argv\[\]=\1 -m sglang\.launch_server .* ; ignore_errors=no ; start_time=\[[^]]+UTC\] ; "
        r"stop_time=\[n/a\] ; pid=\d+ ; code=\(null\) ; status=0/0 \}",
        first,
    )
    assert "LoadState=not-found\nActiveState=inactive" in second


def test_the_process_is_the_one_that_systemd_shows(healthy: Any) -> None:
    pid = shown(healthy, "MainPID")["MainPID"]
    argv = healthy.argv("pct", "exec", "102", "--", "cat", f"/proc/{pid}/cmdline").stdout.split(b"\0")[:-1]
    assert argv[1:3] == [b"-m", b"sglang.launch_server"]
    environ = healthy.argv("pct", "exec", "102", "--", "cat", f"/proc/{pid}/environ").stdout
    assert b"NCCL_P2P_DISABLE=1\0" in environ
    assert f"INVOCATION_ID={shown(healthy, 'InvocationID')['InvocationID']}\0".encode() in environ
    assert f"0::/system.slice/{UNIT}\n" == healthy.say(f"pct exec 102 -- cat /proc/{pid}/cgroup")
    apps = healthy.say("nvidia-smi --query-compute-apps=pid,gpu_bus_id,process_name,used_memory --format=csv,noheader")
    host_pids = healthy.say("pgrep -f sglang::scheduler").split()
    assert sorted(line.split(",")[0] for line in apps.splitlines()) == sorted(host_pids)


def test_an_edited_unit_takes_effect_when_systemd_says_so(bench: Callable[[str], Any]) -> None:
    machine = bench("healthy")
    path = f"/etc/systemd/system/{UNIT}.d/10-x.conf"
    text = b"[Service]\nEnvironment=ADDED=1\n"
    put = remote.put_command(text, path, mode=0o644, backup=True, root=True)
    assert machine.argv("pct", "exec", "102", "--", *put.argv, stdin=text).status == 1  # the folder is not there yet
    machine.say(f"pct exec 102 -- mkdir -p /etc/systemd/system/{UNIT}.d")
    assert machine.argv("pct", "exec", "102", "--", *put.argv, stdin=text).status == 0
    assert shown(machine, "NeedDaemonReload,Environment") == {
        "Environment": "NCCL_P2P_DISABLE=1",
        "NeedDaemonReload": "yes",
    }
    machine.say("pct exec 102 -- systemctl daemon-reload")
    assert shown(machine, "NeedDaemonReload,Environment")["Environment"].endswith(" ADDED=1")
    pid = shown(machine, "MainPID")["MainPID"]
    assert b"ADDED=1" not in machine.argv("pct", "exec", "102", "--", "cat", f"/proc/{pid}/environ").stdout
    machine.say(f"pct exec 102 -- systemctl restart {UNIT}")
    pid = shown(machine, "MainPID")["MainPID"]
    assert b"ADDED=1" in machine.argv("pct", "exec", "102", "--", "cat", f"/proc/{pid}/environ").stdout
    assert f"# {path}" in machine.say(f"pct exec 102 -- systemctl cat {UNIT}")


def test_put_keeps_the_old_content(bench: Callable[[str], Any]) -> None:
    machine = bench("healthy")
    path = "/etc/modprobe.d/nvidia.conf"
    put = remote.put_command(b"new\n", path, mode=0o600, backup=True, root=True)
    said = machine.argv(*put.argv, stdin=b"new\n").stdout.decode().split()
    assert machine.say(f"cat {path}; stat -c %a {path}") == "new\n600\n"
    assert machine.say(f"cat {said[1]}").startswith("options nvidia")
    assert machine.argv(*put.argv, stdin=b"cut").status == 1


def test_a_reboot_takes_its_time_and_leaves_its_traces(bench: Callable[[str], Any]) -> None:
    machine = bench("healthy")
    before = machine.say("cat /proc/sys/kernel/random/boot_id")
    identity = machine.say("cat /etc/machine-id")
    machine.say("systemctl reboot")
    assert machine.say("cat /proc/sys/kernel/random/boot_id") == before
    assert machine.run("systemctl is-system-running").stdout == b"stopping\n"
    machine.wait(1.0)
    assert not machine.life.machine.reachable
    machine.wait(14 + 95 + 25)
    assert machine.life.machine.reachable
    assert machine.say("cat /proc/sys/kernel/random/boot_id") != before
    assert machine.say("cat /etc/machine-id") == identity
    assert machine.run("systemctl is-system-running").stdout == b"starting\n"
    curl = "pct exec 102 -- curl -sS -m 10 -o /dev/null -w %{http_code} http://127.0.0.1:30000/health"
    machine.wait(20)
    answer = machine.run(curl)
    assert (answer.status, answer.stdout) == (7, b"000")
    machine.wait(32)
    assert machine.run(curl).stdout == b"503"
    machine.wait(10)
    assert machine.run(curl).stdout == b"200"
    assert machine.say("systemctl is-system-running") == "running\n"
    assert len(machine.say("journalctl --list-boots --no-pager").splitlines()) == 4
    assert "sglang-qwen[" in machine.say("pct exec 102 -- journalctl -b -1 -n 40 --no-pager -u sglang-qwen")
    assert machine.say("pct exec 102 -- journalctl -b -1 -n 1 -o cat --no-pager") == "Journal stopped\n"


def test_a_machine_that_is_saved_goes_on_alike(bench: Callable[[str], Any]) -> None:
    machine = bench("late-xid79")
    machine.reboot(150)
    twin = bench("late-xid79")
    twin.life.machine = pickle.loads(pickle.dumps(machine.life.machine))
    twin.life.now = machine.life.now
    for each in (machine, twin):
        each.wait(400)
    assert "Xid (PCI:0000:41:00): 79" in twin.say("dmesg")
    assert twin.say("journalctl -o json --no-pager") == machine.say("journalctl -o json --no-pager")


def test_the_agents_programs_are_answered_from_the_state(healthy: Any) -> None:
    asked = remote.read_files(
        "/sys/bus/pci/devices/0000:41:00.0/vendor", "/sys/bus/pci/devices/0000:41:00.0/driver", "/sys/nothing/*", "/etc"
    )
    text = healthy.argv(*asked.argv).stdout.decode()
    assert "F /sys/bus/pci/devices/0000:41:00.0/vendor\n|0x10de\n" in text
    assert "L /sys/bus/pci/devices/0000:41:00.0/driver\n|" in text
    assert "N /sys/nothing/*\n" in text
    assert "D /etc\n" in text
    devices = remote.open_devices("/dev/nvidia0", "/dev/nvidia9")
    assert healthy.argv(*devices.argv).stdout == b"ok /dev/nvidia0\nabsent /dev/nvidia9\n"
    inside = healthy.argv("pct", "exec", "102", "--", *remote.cu_init().argv).stdout
    assert json.loads(inside)["devices"] == 4


def test_the_shapes_that_probes_ask_are_all_known(healthy: Any) -> None:
    shapes = [
        command("uname", "-r"),
        command("id", "-u"),
        command("hostname"),
        command("systemctl", "list-units", "--failed", "--plain", "--no-legend", "--no-pager"),
        command("systemctl", "list-units", "--type=service", "--state=running", "--plain", "--no-legend", "--no-pager"),
        command("systemctl", "is-enabled", "ssh.service"),
        command("nvidia-smi", "-q", "-x"),
        command("modinfo", "-F", "version", "nvidia"),
        command("modinfo", "-F", "srcversion", "nvidia"),
        command("lspci", "-Dnnk"),
        command("pct", "list"),
        command("pct", "status", "102"),
        command("pct", "config", "102"),
        command("who"),
        command("ls", "-l", "/dev/nvidia0", "/dev/nvidiactl"),
        command("journalctl", "-u", "ssh", "-b", "0", "-o", "json", "--no-pager"),
        command(
            "nvidia-smi",
            "--query-gpu=index,pci.bus_id,uuid,name,driver_version,vbios_version,pstate,pcie.link.gen.current,pcie.link.gen.max,"
            "pcie.link.width.current,pcie.link.width.max",
            "--format=csv,noheader",
        ),
    ]
    for one in shapes:
        answer = healthy.argv(*one.argv)
        assert answer.status == 0, (one.argv, answer)
    assert healthy.unknown == []
