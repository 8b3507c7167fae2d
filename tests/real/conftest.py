"""Tests on real machines: a real systemd, journald, sshd and sudo in containers (``box``), a real kernel in VMs (``vm``).

They need root and Debian packages, and minutes: ``make test-vm`` asks for them with PROOFBOOK_REAL=1, ``make test`` does not.
When they are asked for, what is missing fails them; nothing is skipped in silence.
"""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from proofbook.errors import LabError
from proofbook.inventory import connect, load_inventory
from proofbook.lab.real import debian, topology
from proofbook.lab.real.box import Box
from proofbook.lab.real.places import Places
from proofbook.lab.real.vm import Vm
from proofbook.lab.sim import client
from proofbook.model import Command, Probe, Result, command
from proofbook.probes import Answer, drive
from proofbook.transports.ssh import SshTransport

from .contract import Said, Simulated, ask


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "box: needs root and systemd-nspawn; runs on a real systemd in a container")
    config.addinivalue_line("markers", "vm: needs root and QEMU; runs on a real kernel in a virtual machine")
    config.addinivalue_line("markers", "long: takes minutes on an emulated machine; `make test-vm` runs it, .ci/run does not")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if os.environ.get("PROOFBOOK_REAL"):
        return
    ours = [item for item in items if item.get_closest_marker("box") or item.get_closest_marker("vm")]
    if ours:
        config.hook.pytest_deselected(items=ours)
        items[:] = [item for item in items if item not in ours]


def until(true: Callable[[], Any], what: str, limit_s: float = 60.0) -> Any:
    """Wait for something that comes about by itself; what it returned. The limit is generous: machines are busy."""
    deadline = time.monotonic() + limit_s
    while time.monotonic() < deadline:
        if found := true():
            return found
        time.sleep(0.05)
    raise AssertionError(f"within {limit_s:.0f} s it did not come about that {what}")


class Machine:
    """A machine with hands: run something on it as root, ask it probes as any of its users."""

    def __init__(self, box: Any) -> None:
        self.box = box
        self._open: list[SshTransport] = []

    def transport(self, user: str = "root", **options: Any) -> SshTransport:
        endpoint = self.box.status()
        assert endpoint is not None
        transport = SshTransport(
            endpoint.address,
            port=endpoint.port,
            user=user,
            identity_file=endpoint.identity_file,
            known_hosts=endpoint.known_hosts,
            ssh_config=False,
            **options,
        )
        self._open.append(transport)
        return transport

    def close(self) -> None:
        while self._open:
            self._open.pop().close()

    def sh(self, script: str, *, user: str = "root", check: bool = True) -> str:
        """Run a script there by OpenSSH's own client: what a test does to a machine does not go the way that it tests."""
        argv = self.box.ssh_command("sh", "-s", user=user)
        done = subprocess.run(argv, input=script, capture_output=True, text=True, timeout=300, check=False)
        assert not check or done.returncode == 0, f"{script!r} ended with {done.returncode}: {done.stdout}{done.stderr}"
        return done.stdout.strip()

    def write(self, path: str, text: str) -> None:
        """Put a text file there; its folder is made."""
        self.sh(f"mkdir -p $(dirname {path}); cat > {path} <<'END'\n{text}END\n")

    def ask(self, probe: Probe[Any], *, user: str = "root") -> Answer[Any]:
        with self.transport(user) as transport:
            return drive([probe], transport.gather)[probe]

    def value(self, probe: Probe[Any], *, user: str = "root") -> Any:
        answer = self.ask(probe, user=user)
        assert answer.known, answer.unknown
        return answer.value

    def run(self, *argv: str, user: str = "root", **options: Any) -> Result:
        with self.transport(user) as transport:
            return transport.run(Command(tuple(argv), **options) if options else command(*argv))

    def booted(self) -> None:
        """Wait until its boot is done: before, ordinary users are refused and units are still starting."""
        done = subprocess.run(
            self.box.ssh_command("systemctl is-system-running --wait"), capture_output=True, text=True, timeout=300, check=False
        )
        assert done.stdout.strip() in ("running", "degraded"), done


#: An address that nobody mapped: the IOMMU stops a device that writes there.
UNMAPPED = "0x7f00000000"

#: Writes a word into a file of sysfs and says which error the kernel gave. WHY not a shell: dash calls every one "I/O error".
_WRITE = """\
import errno, os, sys
file = os.open(sys.argv[1], os.O_WRONLY)
try:
    os.write(file, sys.argv[2].encode())
except OSError as error:
    print(errno.errorcode[error.errno])
"""


class VirtualMachine(Machine):
    """A virtual machine with hands."""

    def __init__(self, vm: Vm) -> None:
        super().__init__(vm)
        self.vm = vm
        self.saved = True

    def fault(self, pci: str) -> None:
        """Let a stand-in write where it must not."""
        self.sh(f"echo {UNMAPPED} > /sys/bus/pci/devices/{pci}/stand_in_dma")

    def unbind(self, *addresses: str) -> None:
        """Take devices from their driver."""
        self.sh("\n".join(f"echo {pci} > /sys/bus/pci/devices/{pci}/driver/unbind" for pci in addresses))

    def refusal(self, path: str, word: str) -> str:
        """The name of the error with which the kernel refuses a word in a file of sysfs; "" when it takes it."""
        return self.sh(f"python3 - {path} {word} <<'END'\n{_WRITE}END\n")

    def group(self, pci: str) -> str:
        """The folder of a device's IOMMU group."""
        return self.sh(f"readlink -f /sys/bus/pci/devices/{pci}/iommu_group")


class Kept:
    """The virtual machines of this session, by name and release of Debian.

    Each is booted once and its state saved, where it can be; whoever needs it later begins there. Nobody runs it meanwhile: an
    idle machine under emulation costs a busy one its time.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._cache = Places.default().cache  # what was built is the user's own, and built once
        self._machines: dict[tuple[str, str], VirtualMachine] = {}

    @contextmanager
    def ready(self, name: str = "vm", suite: str = "") -> Iterator[VirtualMachine]:
        """One that serves; ``lab:<name>`` leads to it. Its topology is what its name says."""
        suite = suite or debian.default_suite()
        folder = self._folder / f"{name}-{suite}"
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("PROOFBOOK_LAB_DIR", str(folder))
            machine = self._machines.get((name, suite))
            if machine is not None and not machine.saved:
                machine.vm.down()
            if machine is None or machine.vm.status() is None:
                folder.mkdir(exist_ok=True)
                if not (folder / "cache").exists():
                    (folder / "cache").symlink_to(self._cache)
                machine = self._machines[name, suite] = _boot(name, suite)
            else:
                machine.vm.restore()
            try:
                yield machine
            finally:
                machine.close()
                if machine.vm.status() is not None:
                    machine.vm.freeze()

    def down(self) -> None:
        while self._machines:
            self._machines.popitem()[1].vm.down()


def _boot(name: str, suite: str) -> VirtualMachine:
    vm = Vm(name, Places.default(), name.removeprefix("vm-") if name != "vm" else topology.DEFAULT)
    machine = VirtualMachine(vm)
    try:
        vm.up(suite=suite, owner=os.getpid())
        machine.booted()
        asked = "curl -s -o /dev/null -w '%{http_code}' http://127.0.0.1:30000/health || true"
        until(lambda: machine.sh(asked) == "200", "it serves", 300)
        machine.sh("nvidia-smi; sync")  # Python keeps what it compiled
        try:
            vm.save()
        except LabError as why:  # QEMU's NVMe controller has a state that cannot be saved: such a machine is booted each time
            if "non-migratable" not in str(why):
                raise
            machine.saved = False
    except BaseException:
        vm.down()
        raise
    return machine


@pytest.fixture(scope="session")
def kept(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Kept]:
    found = Kept(tmp_path_factory.mktemp("kept"))
    try:
        yield found
    finally:
        found.down()


@contextmanager
def machine_in(folder: Path, name: str) -> Iterator[Machine]:
    # The cache is the user's own, so that the file system is built once; the machines are this test's alone.
    places = Places(folder, Places.default().cache)
    machine = Machine(Box(name, places))
    try:
        machine.box.up(owner=os.getpid())
        machine.booted()
        yield machine
    finally:
        machine.close()
        machine.box.down()


@pytest.fixture(scope="session")
def simulated(tmp_path_factory: pytest.TempPathFactory) -> Simulated:
    """What simulated machines say: to ``root``, and to an ``ordinary`` login that has logged in before."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PROOFBOOK_LAB_DIR", str(tmp_path_factory.mktemp("simulated")))
        try:
            return {"root": _asked("healthy", root=True), "ordinary": _asked("no-dmesg-permission", root=False)}
        finally:
            client.stop()


def _asked(scenario: str, *, root: bool) -> Said:
    transport, _ = connect(load_inventory().resolve(f"lab:{scenario}"))
    transport.open()
    transport.close()  # the first login is on record when the second one asks
    transport.reopen()
    try:
        return ask(transport.gather, simulated=True, root=root)
    finally:
        transport.close()


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Machine]:
    """A box for tests that leave it as they found it."""
    with machine_in(tmp_path_factory.mktemp("lab"), "shared") as machine:
        yield machine


@pytest.fixture
def fresh(tmp_path: Path) -> Iterator[Machine]:
    """A box of the test's own, to do anything to."""
    with machine_in(tmp_path, "fresh") as machine:
        yield machine
