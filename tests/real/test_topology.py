"""The parts of the real lab that need no machine: topologies, archives, names, what is missing. Part of every test run."""

from __future__ import annotations

import lzma
import os
import socket
from pathlib import Path

import pytest

from proofbook.errors import BadParameter, LabError
from proofbook.lab import real
from proofbook.lab.real import debian, image, kernel, packages, settings, topology, vm
from proofbook.lab.real.guest.nvidia_smi import uuid
from proofbook.lab.real.kernel import _cpio, _uncompressed


def test_each_topology_says_where_its_gpus_are() -> None:
    assert topology.load("four-gpus").gpus() == ("0000:01:00.0", "0000:02:00.0", "0000:03:00.0", "0000:04:00.0")
    assert topology.load("shared-group").gpus() == ("0000:01:00.0", "0000:03:01.0", "0000:03:02.0")
    assert topology.load("nic-and-nvme").gpus() == ("0000:01:00.0",)
    assert topology.load("two-functions").gpus() == ("0000:01:00.0", "0000:02:00.0", "0000:02:00.1")


def test_functions_of_one_device_say_so_to_qemu() -> None:
    words = topology.load("two-functions").arguments()
    gpus = [word for word in words if word.startswith("edu,")]
    assert [word.split("addr=")[1].split(",dma_mask")[0] for word in gpus] == [
        "0x0.0",
        "0x0.0,multifunction=on",
        "0x0.1,multifunction=on",
    ]
    assert sum("pcie-root-port" in word for word in words) == 2


def test_what_is_unplugged_is_gone_and_its_port_stays() -> None:
    four = topology.load("four-gpus")
    whole, without = four.arguments(), four.arguments(["0000:03:00.0"])
    assert sum("edu," in word for word in whole) == 4
    assert sum("edu," in word for word in without) == 3
    assert not [word for word in without if "gpu3" in word]
    assert sum("pcie-root-port" in word for word in without) == 4


def test_names_are_hosts() -> None:
    from proofbook.inventory import load_inventory

    inventory = load_inventory()
    assert inventory.resolve("lab:box").gpus == ()
    vm = inventory.resolve("lab:vm-shared-group")
    assert [gpu.pci for gpu in vm.gpus] == list(topology.load("shared-group").gpus())
    assert all(gpu.uuid == uuid(gpu.pci) for gpu in vm.gpus)
    assert not real.knows("healthy")
    with pytest.raises(BadParameter, match="no machine 'vm-nine-gpus'"):
        inventory.resolve("lab:vm-nine-gpus")


def test_a_mirror_is_what_apt_says_and_nothing_else() -> None:
    rows = [
        ["https://somewhere/tools", "tools-bookworm", "main"],
        ["http://mirror/debian", "bookworm", "main"],
        ["http://mirror/debian", "bookworm", "contrib"],
        ["http://mirror/security", "bookworm-security", "main"],
    ]
    found = debian._mirror_of(rows)
    assert (found.site, found.security, found.known) == ("http://mirror/debian", "http://mirror/security", ("bookworm",))
    assert [line.split("] ")[1] for line in found.lines("trixie")] == [
        "http://mirror/debian trixie main",
        "http://mirror/security trixie-security main",
    ]
    with pytest.raises(LabError, match="no Debian release"):
        debian._mirror_of([["http://mirror/ubuntu", "noble", "main"]])


def test_what_is_missing_is_named_with_the_command_that_brings_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packages, "_PATH", "/nowhere")
    with pytest.raises(LabError) as refusal:
        packages.require(packages.BOX_TOOLS, "a box")
    for word in ("mmdebstrap", "systemd-nspawn", "apt-get install", "systemd-container"):
        assert word in str(refusal.value)
    with pytest.raises(LabError, match="apt-get install qemu-system-x86"):
        packages.tool("qemu-system-x86_64")


def test_another_recipe_is_another_build(monkeypatch: pytest.MonkeyPatch) -> None:
    before = kernel._digest("bookworm")
    assert before != kernel._digest("trixie")
    monkeypatch.setattr(kernel, "_LATER", (*kernel._LATER, "one_more"))
    assert kernel._digest("bookworm") != before


def test_an_archive_is_one_that_the_kernel_reads() -> None:
    data = b"".join(_cpio({"bin": (0o040755, b""), "bin/a": (0o100755, b"12345")}))
    names = []
    while data:
        assert data[:6] == b"070701"
        fields = [int(data[6 + 8 * n : 14 + 8 * n], 16) for n in range(13)]
        size, length = fields[6], fields[11]
        names.append(data[110 : 110 + length - 1].decode())
        at = (110 + length + 3) // 4 * 4
        data = data[at + (size + 3) // 4 * 4 :]
    assert names == ["bin", "bin/a", "TRAILER!!!"]


def test_a_kernel_comes_out_of_its_image_or_is_refused() -> None:
    def bzimage(payload: bytes) -> bytes:
        head = bytearray(1024)
        head[0x1F1] = 1
        head[0x248:0x24C] = (0).to_bytes(4, "little")
        head[0x24C:0x250] = len(payload).to_bytes(4, "little")
        return bytes(head) + payload

    assert _uncompressed(bzimage(lzma.compress(b"\x7fELF kernel"))) == b"\x7fELF kernel"
    with pytest.raises(LabError, match="no ELF"):
        _uncompressed(bzimage(lzma.compress(b"something else")))
    with pytest.raises(LabError, match="does not know"):
        _uncompressed(bzimage(b"123456789"))


def test_old_builds_go_unless_a_machine_uses_one(tmp_path: Path) -> None:
    oldest, used, newest = (tmp_path / f"kernel-bookworm-{name}" for name in ("a", "b", "c"))
    for folder in (oldest, used, newest):
        folder.mkdir()
    descriptor = image.use(used)
    image.remove_others(newest, "kernel-bookworm-*")
    assert [folder.exists() for folder in (oldest, used, newest)] == [False, True, True]
    os.close(descriptor)
    image.remove_others(newest, "kernel-bookworm-*")
    assert [path.name for path in tmp_path.iterdir()] == [newest.name]


def test_a_machine_keeps_its_port_and_none_is_the_kernels_to_give(tmp_path: Path) -> None:
    who = settings.identity(tmp_path)
    port = vm._free_port(who)
    assert port < int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    who.trust("127.0.0.1", port)
    assert vm._free_port(who) == port
    with socket.socket() as other:
        other.bind(("127.0.0.1", port))
        assert vm._free_port(who) != port
