"""What is asked of an SGLang server and its machine, and what the answers become."""

from __future__ import annotations

import json
from typing import Any

import pytest

from proofbook.errors import CannotTell
from proofbook.intent import ContainerSpec
from proofbook.probes.memory import GpuMemory, GpuProcess, GpuProcesses, PageCache, start_time
from proofbook.probes.sglang import (
    Checkpoint,
    LauncherHelp,
    ModelInfo,
    PortOwner,
    Processes,
    ServedCheckpoint,
    ServerInfo,
    Version,
    launch_of,
    release,
)
from proofbook.probes.start_log import StartLines

UNIT = "sglang-qwen.service"
PYTHON = "/opt/sglang/venv/bin/python"
ARGV = f"{PYTHON}\0-m\0sglang.launch_server\0--model-path\0/models/qwen\0--tp\0004\0"
SHOWN = "LoadState=loaded\nActiveState=active\nMainPID=812\nRestart=always\nControlGroup=/system.slice/sglang-qwen.service\n"
PACKAGES = json.dumps({"python": "3.12.3", "packages": {"sglang": "0.5.9", "torch": "2.9.1"}}) + "\n"
URL = "http://127.0.0.1:30000"
STAT = "{pid} ({name}) S {parent} 812 812 0 -1 4194560 1 2 3 4 5 6 7 8 20 0 1 0 {ticks} 1 2 3"


@pytest.fixture
def server(machine: Any) -> Any:
    machine.on("systemctl", "show", UNIT, stdout=SHOWN)
    machine.on("cat", "/proc/812/cmdline", stdout=ARGV)
    machine.on("cat", "/proc/812/environ", stdout="PYTHONPATH=/opt/x\0HF_TOKEN=hf_secret\0")
    return machine


@pytest.mark.parametrize(
    ("argv", "python", "words"),
    [
        ("/v/bin/python -m sglang.launch_server --tp 4", "/v/bin/python", "/v/bin/python -m sglang.launch_server --help"),
        ("/v/bin/python3.12 -u -X dev -m sglang.launch_server", "/v/bin/python3.12", "/v/bin/python3.12 -u -X "
            "dev -m sglang.launch_server --help"),
        ("/v/bin/sglang serve --model m", "/v/bin/python", "/v/bin/sglang serve --help"),
        ("/v/bin/python /v/bin/sglang serve --model m", "/v/bin/python", "/v/bin/python /v/bin/sglang serve --help"),
    ],
)  # fmt: skip
def test_how_a_server_is_launched(argv: str, python: str, words: str) -> None:
    launch = launch_of(argv.split())
    assert (launch.python, launch.help) == (python, tuple(words.split()))


@pytest.mark.parametrize("argv", ["/bin/bash -c x", "docker run sglang", "", "/v/bin/python"])
def test_a_launch_that_cannot_be_read(argv: str) -> None:
    with pytest.raises(CannotTell):
        launch_of(argv.split())


def test_the_version_of_the_python_that_runs(server: Any) -> None:
    server.on(PYTHON, "-c", stdout=PACKAGES)
    version = server.value(Version(UNIT))
    assert (version.version, version.release, version.python, version.running) == ("0.5.9", (0, 5, 9), PYTHON, True)
    asked = next(c for c in server.asked() if "-c" in c.argv)
    assert asked.argv[:3] == ("env", "PYTHONPATH=/opt/x", PYTHON)
    assert not any("hf_secret" in word for word in asked.argv)


def test_a_service_of_another_user_is_asked_as_that_user(server: Any) -> None:
    server.on("systemctl", "show", UNIT, stdout=SHOWN + "User=llm\n")
    server.on(PYTHON, "-c", stdout=PACKAGES)
    server.value(Version(UNIT))
    assert next(c for c in server.asked() if "-c" in c.argv).argv[:4] == ("runuser", "-u", "llm", "--")


def test_no_package_and_no_version(server: Any) -> None:
    server.on(PYTHON, "-c", stdout=json.dumps({"python": "3", "packages": {"sglang": None}}))
    assert "no package sglang" in server.unknown(Version(UNIT))
    assert release("0.5.10.post1") == (0, 5, 10)
    with pytest.raises(CannotTell):
        release("")


def test_the_launchers_help(server: Any) -> None:
    server.on("-m", "sglang.launch_server", "--help", stdout="options:\n  --model-path P\n")
    assert "--model-path" in server.value(LauncherHelp(UNIT))
    asked = next(c for c in server.asked() if "--help" in c.argv)
    assert asked.argv == ("env", "PYTHONPATH=/opt/x", "COLUMNS=200", PYTHON, "-m", "sglang.launch_server", "--help")
    assert asked.timeout_s == 120
    server.on("-m", "sglang.launch_server", "--help", stdout="something else")
    assert "not the help" in server.unknown(LauncherHelp(UNIT))


CONFIG = {
    "architectures": ["Qwen3_5MoeForConditionalGeneration"],
    "text_config": {"mtp_num_hidden_layers": 1, "hidden_size": 3072},
}
INDEX = {"weight_map": {"model.layers.0.w": "a.safetensors", "mtp.layers.0.mlp.w": "b.safetensors", "mtpish.w": "a.safetensors"}}


def test_a_checkpoint_with_weights_for_drafts(server: Any) -> None:
    server.on("cat", "/models/qwen/config.json", stdout=json.dumps(CONFIG))
    server.on("cat", "/models/qwen/model.safetensors.index.json", stdout=json.dumps(INDEX))
    server.on("find", "-L", "/models/qwen", stdout="10 a.safetensors\n20 b.safetensors\n")
    found = server.value(ServedCheckpoint(UNIT))
    assert (found.path, found.tensors, found.mtp, found.size) == ("/models/qwen", 3, ("mtp.layers.0.mlp.w",), 30)
    assert (found.missing, found.mtp_layers, found.architecture) == ((), 1, "Qwen3_5MoeForConditionalGeneration")
    server.on("find", "-L", "/models/qwen", stdout="10 a.safetensors\n")
    assert server.value(Checkpoint("/models/qwen")).missing == ("b.safetensors",)


def test_a_checkpoint_without_an_index_and_one_that_is_a_name(server: Any) -> None:
    server.on("cat", "/m/config.json", stdout="{}")
    server.on("cat", "/m/model.safetensors.index.json", stderr="cat: …: No such file or directory\n", status=1)
    server.on("find", "-L", "/m", stdout="10 model.safetensors\n")
    assert not server.value(Checkpoint("/m")).index
    assert "name of a repository" in server.unknown(Checkpoint("Qwen/Qwen3.5"))
    server.on("cat", "/m/config.json", stdout="<html>")
    assert "no JSON" in server.unknown(Checkpoint("/m"))


INFO = {
    "version": "0.5.9", "speculative_algorithm": "EAGLE", "speculative_num_steps": 5, "max_running_requests": 48,
    "internal_states": [{"effective_max_running_requests_per_dp": 6, "avg_spec_accept_length": 4.1}],
}  # fmt: skip


def test_server_info_old_and_new(server: Any) -> None:
    server.on("curl", stdout="{}\n404").on(f"{URL}/get_server_info", stdout=json.dumps(INFO) + "\n200")
    info = server.value(ServerInfo(URL))
    assert (info.path, info.algorithm, info.effective_running, info.accept_length) == ("/get_server_info", "EAGLE", 6, 4.1)
    server.on(f"{URL}/server_info", stdout=json.dumps({"speculative_algorithm": None}) + "\n200")
    info = server.value(ServerInfo(URL))
    assert (info.path, info.algorithm, info.effective_running) == ("/server_info", "", None)


@pytest.mark.parametrize(
    ("said", "why"),
    [
        ({"status": 7, "stderr": "curl: (7) refused"}, "connection refused"),
        ({"status": 28, "stderr": "curl: (28) timed out"}, "no answer within 10 s"),
        ({"stdout": "\n401"}, "wants an API key"),
        ({"stdout": "not json\n200"}, "no JSON"),
        ({"status": 127, "stderr": "not found"}, "not there"),
    ],
)
def test_a_server_that_does_not_say(server: Any, said: dict[str, Any], why: str) -> None:
    server.on("curl", **said)
    assert why in server.unknown(ServerInfo(URL))
    assert why in server.unknown(ModelInfo(URL))


def test_the_processes_of_a_unit(server: Any) -> None:
    server.files["/sys/fs/cgroup/system.slice/sglang-qwen.service/cgroup.procs"] = "812\n813\n814\n815\n"
    for pid, name, parent, ticks in (
        (812, "python (x) y", 1, 4100),
        (813, "sglang::schedul", 812, 4200),
        (815, "gone", 812, 4300),
    ):
        server.files[f"/proc/{pid}/stat"] = STAT.format(pid=pid, name=name, parent=parent, ticks=ticks)
    server.files["/proc/815/stat"] = server.files["/proc/815/stat"].replace(" S ", " Z ")
    server.on("cat", "/proc/813/cmdline", stdout="sglang::scheduler_TP0\0\0\0")
    server.on("cat", "/proc/814/cmdline", stderr="No such process\n", status=1)
    server.on("cat", "/proc/815/cmdline", stdout="")
    table = server.value(Processes(UNIT))
    assert [(p.pid, p.parent, p.state, p.rank, p.started_s) for p in table.processes] == [
        (812, 1, "S", "", 41.0),
        (813, 812, "S", "TP0", 42.0),
        (815, 812, "Z", "", 43.0),
    ]
    assert [p.pid for p in table.schedulers] == [813]
    assert table.detokenizer is None


def test_a_unit_that_does_not_run_has_no_processes(server: Any) -> None:
    server.on("systemctl", "show", UNIT, stdout="LoadState=loaded\nRestart=no\nControlGroup=\n")
    assert server.value(Processes(UNIT)).processes == ()


def test_who_owns_a_port(server: Any) -> None:
    server.on(
        "ss", "-ltnpH",
        stdout='LISTEN 0 2048 0.0.0.0:30000 0.0.0.0:* users:(("python",pid=812,fd=73),("sglang::det",pid=815,fd=73))\n'
        "LISTEN 0 128 [::]:22 [::]:*\n",
    )  # fmt: skip
    (one,) = server.value(PortOwner(30000))
    assert (one.address, one.owners) == ("0.0.0.0", ((812, "python"), (815, "sglang::det")))
    assert server.value(PortOwner(3000)) == ()
    (ssh,) = server.value(PortOwner(22))
    assert ssh.owners == ()
    server.on("ss", "-ltnpH", stdout="Netid State\n")
    assert "no listening socket" in server.unknown(PortOwner(30000))


def test_memory_of_gpus(machine: Any) -> None:
    machine.on("nvidia-smi", stdout="0, 00000000:41:00.0, GPU-x, NVIDIA RTX PRO 6000, 97887, 91320, 5940\n")
    (row,) = machine.value(GpuMemory())
    assert (row.pci, row.free_mib, round(row.free_gib, 2)) == ("0000:41:00.0", 5940, 5.8)
    machine.on("nvidia-smi", stdout="0, 00000000:41:00.0, GPU-x, NVIDIA, [Unknown Error], 1, 2\n")
    assert "without numbers" in machine.unknown(GpuMemory())
    machine.on("nvidia-smi", stdout="")
    assert "no GPU" in machine.unknown(GpuMemory())


def test_whose_a_gpu_process_is(machine: Any) -> None:
    machine.on("nvidia-smi", stdout="4711, 00000000:41:00.0, sglang::scheduler_TP0, 91234 MiB\n")
    machine.files["/proc/4711/cgroup"] = "0::/lxc/102/ns/system.slice/sglang-qwen.service\n"
    machine.files["/proc/4711/status"] = "Name:\tsglang\nNSpid:\t4711\t813\n"
    machine.files["/proc/4711/stat"] = STAT.format(pid=4711, name="x", parent=1, ticks=500)
    (process,) = machine.value(GpuProcesses())
    assert (process.inner_pid, process.started_s, process.used_mib) == (813, 5.0, 91234)
    container = ContainerSpec(name="llm-two", kind="pct", id="102")
    assert process.of_unit(UNIT, container)
    assert not process.of_unit(UNIT, None)
    assert not process.of_unit("other.service", container)
    assert not process.of_unit(UNIT, ContainerSpec(name="llm-one", kind="pct", id="101"))


@pytest.mark.parametrize(
    ("cgroup", "container", "ours"),
    [
        (f"/system.slice/{UNIT}", None, True),
        (f"/system.slice/{UNIT}/workers", None, True),
        ("/user.slice/user-0.slice/session-4.scope", None, False),
        (f"/lxc.payload.llm-two/system.slice/{UNIT}", ContainerSpec(name="llm-two", kind="lxc"), True),
        (f"/machine.slice/systemd-nspawn@two.service/p/system.slice/{UNIT}", ContainerSpec(name="two", kind="nspawn"), True),
        (f"/system.slice/docker-3f2a.scope/system.slice/{UNIT}", ContainerSpec(name="llm-two", kind="docker"), True),
        ("", None, False),
    ],
)  # fmt: skip
def test_control_groups(cgroup: str, container: ContainerSpec | None, ours: bool) -> None:
    assert GpuProcess(1, "0000:41:00.0", "x", 1, cgroup, None, None).of_unit(UNIT, container) is ours


def test_a_checkpoint_in_the_page_cache(machine: Any) -> None:
    machine.on("find", stdout="100 a.safetensors\n300 b.safetensors\n")
    machine.files["/proc/meminfo"] = "MemTotal:       1000 kB\nCached:          500 kB\n"
    machine.on("fincore", stdout="100 100 /m/a.safetensors\n200 300 /m/b.safetensors\n")
    cache = machine.value(PageCache("/m"))
    assert (cache.size, cache.resident, cache.share, cache.at_most) == (400, 300, 0.75, 512000)
    machine.on("fincore", status=127, stderr="not found")
    cache = machine.value(PageCache("/m"))
    assert (cache.resident, cache.share) == (None, None)
    assert "not there" in cache.why_not
    machine.on("find", stdout="")
    assert "no *.safetensors" in machine.unknown(PageCache("/m"))


def test_start_times() -> None:
    assert start_time(STAT.format(pid=1, name="a b) c", parent=1, ticks=123)) == 1.23
    assert start_time("") is None


def test_lines_of_a_start_and_where_to_go_on(machine: Any, entry: Any) -> None:
    machine.on("journalctl", stdout=entry(5, "one") + entry(6, "two") + "-- cursor: s=1;i=2\n")
    more = machine.value(StartLines(UNIT, None, "ab" * 16))
    assert ([e.text for e in more.entries], more.cursor) == (["one", "two"], "s=1;i=2")
    machine.on("journalctl", stdout="-- No entries --\n")
    more = machine.value(StartLines(UNIT, None, "ab" * 16, "s=1;i=2"))
    assert (more.entries, more.cursor) == ((), "s=1;i=2")
    assert "--after-cursor=s=1;i=2" in machine.asked()[-1].argv
