"""What is meant to be on a machine: normalised, strict, hashable; and the prefix that enters a container."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import BaseModel, ValidationError

from proofbook.intent import ContainerSpec, GpuSpec, ServiceSpec, parse_service, unit_name

UUID = "GPU-0a1b2c3d-1111-2222-3333-444455556666"


@pytest.mark.parametrize("written", ["41:00", "41:00.0", "0000:41:00.0", "00000000:41:00.0", " 0000:41:00 "])
def test_every_way_to_write_a_pci_address_is_one_gpu(written: str) -> None:
    assert GpuSpec(pci=written) == GpuSpec(pci="0000:41:00.0")


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        ({"pci": "gpu0"}, "not a PCI address"),
        ({"pci": "41:00.0", "uuid": "0a1b2c3d"}, "nvidia-smi -L"),
        ({"pci": "41:00.0", "uuid": "MIG-0a1b2c3d-1111-2222-3333-444455556666"}, "not a GPU UUID"),
        ({"pci": "41:00.0", "driver": "nouveau"}, "vfio-pci"),
        ({"pci": "41:00.0", "link_width": 12}, "16"),
        ({"pci": "41:00.0", "iommu_type": "dma"}, "DMA-FQ"),
        ({"pci": "41:00.0", "index": 0}, "Extra inputs"),
    ],
)
def test_a_gpu_that_cannot_be_meant_is_refused(wrong: dict[str, object], says: str) -> None:
    with pytest.raises(ValidationError, match=says):
        GpuSpec.model_validate(wrong)


def test_a_uuid_has_one_spelling() -> None:
    assert GpuSpec(pci="41:00.0", uuid=UUID.upper()).uuid == UUID


def test_a_gpu_for_a_virtual_machine_is_known_as_such() -> None:
    assert GpuSpec(pci="41:00.0", driver="vfio-pci").passed_through
    assert not GpuSpec(pci="41:00.0").passed_through


@pytest.mark.parametrize(
    ("spec", "prefix"),
    [
        (ContainerSpec(name="llm", kind="pct", id="102"), ("pct", "exec", "102", "--")),
        (ContainerSpec(name="llm", kind="lxc"), ("lxc-attach", "--name", "llm", "--")),
        (ContainerSpec(name="llm", kind="incus", id="llm-two"), ("incus", "exec", "llm-two", "--")),
        (ContainerSpec(name="llm", kind="docker"), ("docker", "exec", "-i", "llm")),
        (ContainerSpec(name="llm", kind="podman"), ("podman", "exec", "-i", "llm")),
    ],
)
def test_the_words_that_enter_a_container(spec: ContainerSpec, prefix: tuple[str, ...]) -> None:
    assert spec.enter() == prefix


def test_a_number_is_a_fine_id_for_pct() -> None:
    assert ContainerSpec.model_validate({"name": "llm", "kind": "pct", "id": 102}).enter() == ("pct", "exec", "102", "--")


@pytest.mark.parametrize(
    "wrong", [{"name": "llm"}, {"name": "llm", "id": "llm"}, {"name": "llm", "id": "0102"}, {"name": "llm", "id": True}]
)
def test_pct_needs_a_number(wrong: dict[str, object]) -> None:
    with pytest.raises(ValidationError):
        ContainerSpec.model_validate({**wrong, "kind": "pct"})


@pytest.mark.parametrize("name", ["-rm", "a b", "a;b", "", "--help"])
def test_a_container_name_never_becomes_an_option_or_two_words(name: str) -> None:
    with pytest.raises(ValidationError):
        ContainerSpec(name=name, kind="docker")
    with pytest.raises(ValidationError):
        ContainerSpec(name="fine", kind="docker", id=name or " ; ")


@pytest.mark.parametrize("path", ["/etc/passwd", "nvidia0", "/dev/../etc/passwd"])
def test_devices_are_device_paths(path: str) -> None:
    with pytest.raises(ValidationError, match="not a device path"):
        ContainerSpec(name="llm", kind="docker", devices=(path,))


def tool(folder: Path, name: str, text: str) -> None:
    program = folder / name
    program.write_text(f"#!/bin/sh\n{text}\n")
    program.chmod(0o755)


def enter_nspawn(folder: Path, *argv: str) -> subprocess.CompletedProcess[str]:
    prefix = ContainerSpec(name="lab1", kind="nspawn").enter()
    environment = {**os.environ, "PATH": f"{folder}:{os.environ['PATH']}"}
    return subprocess.run([*prefix, *argv], capture_output=True, text=True, env=environment, check=False)


def test_nspawn_enters_the_leader_and_leaves_the_command_as_it_is(tmp_path: Path) -> None:
    tool(tmp_path, "machinectl", '[ "$*" = "show -p Leader --value lab1" ] && echo 4711')
    tool(tmp_path, "nsenter", 'printf "<%s>" "$@"; exit 3')
    done = enter_nspawn(tmp_path, "sh", "-c", 'echo "$HOME"; exit 3', "it's")
    assert done.stdout == """<--target><4711><--all><--root><--wd><--><sh><-c><echo "$HOME"; exit 3><it's>"""
    assert done.returncode == 3


def test_nspawn_says_that_the_machine_does_not_run(tmp_path: Path) -> None:
    tool(tmp_path, "machinectl", "echo")
    tool(tmp_path, "nsenter", "echo entered the wrong thing")
    done = enter_nspawn(tmp_path, "true")
    assert (done.returncode, done.stdout, done.stderr) == (125, "", "machine lab1 is not running\n")


# ------------------------------------------------------------------------------------------------ services


@pytest.mark.parametrize(
    ("written", "container", "unit"),
    [
        ("sglang-qwen.service", "", "sglang-qwen.service"),
        ("sglang-qwen", "", "sglang-qwen.service"),
        ("llm-two/sglang-qwen.service", "llm-two", "sglang-qwen.service"),
        (" llm-two/sglang@qwen ", "llm-two", "sglang@qwen.service"),
        ("nvidia-persistenced.socket", "", "nvidia-persistenced.socket"),
        ("a.b", "", "a.b.service"),
    ],
)
def test_services_as_people_name_them(written: str, container: str, unit: str) -> None:
    service = parse_service(written)
    assert (service.container, service.name) == (container, unit)
    assert parse_service(service.spec) == service


@pytest.mark.parametrize("wrong", ["", "/", "a/", "/x.service", "a/b/c.service", "a b", "-x", ".service", "x;reboot", "a\nb"])
def test_what_is_no_service_is_refused(wrong: str) -> None:
    with pytest.raises(ValueError, match="not a s"):
        parse_service(wrong)


@given(st.text(max_size=40))
def test_a_unit_name_is_stable_or_refused(text: str) -> None:
    try:
        once = unit_name(text)
    except ValueError:
        return
    assert unit_name(once) == once
    assert not once.startswith("-")
    assert not set(once) & set(" \t\n/;$'\"")


def test_arguments_are_text_as_in_a_process() -> None:
    assert ServiceSpec.model_validate({"name": "x", "args": ["--tp", 2, "--mem", 0.75]}).args == ("--tp", "2", "--mem", "0.75")
    with pytest.raises(ValidationError):
        ServiceSpec.model_validate({"name": "x", "args": ["--flag", True]})


@pytest.mark.parametrize("url", ["ftp://x/health", "127.0.0.1:30000", "http://me:secret@127.0.0.1/health", "http://a b/"])
def test_a_health_address_is_http_and_holds_no_login(url: str) -> None:
    with pytest.raises(ValidationError, match="not a usable health address"):
        ServiceSpec(name="x", url=url)


@pytest.mark.parametrize("seconds", [0, -1, float("nan"), float("inf"), 90_000])
def test_a_service_gets_a_sane_time_to_be_ready(seconds: float) -> None:
    with pytest.raises(ValidationError):
        ServiceSpec(name="x", ready_s=seconds)


@pytest.mark.parametrize(
    "spec",
    [
        GpuSpec(pci="41:00.0", uuid=UUID),
        ContainerSpec(name="a", kind="docker", devices=("/dev/nvidia0",)),
        ServiceSpec(name="a", environment={"NCCL_P2P_DISABLE": "1", "A": "b"}),
    ],
)
def test_values_are_frozen_and_can_be_keys(spec: BaseModel) -> None:
    """Probes hold them, and equal probes are asked once."""
    again = type(spec).model_validate(spec.model_dump())
    assert {spec: 1}[again] == 1
    with pytest.raises(ValidationError):
        spec.name = "other"  # type: ignore[attr-defined]
