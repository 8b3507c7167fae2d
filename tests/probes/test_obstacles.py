"""What keeps root from writing a file."""

from __future__ import annotations

from proofbook.intent import ContainerSpec
from proofbook.probes.obstacles import Obstacles, typed

from .conftest import TalkingMachine

PATH = "/etc/systemd/system/x.service.d/50-mtp.conf"
FOLDER, ABOVE = "/etc/systemd/system/x.service.d", "/etc/systemd/system"
PLAIN = f"--------------e------- {ABOVE}\n"
INSIDE = ContainerSpec(name="llm-two", kind="pct", id="102")


def machine(attributes: str = PLAIN, mount: str = "/ ext4 rw,relatime\n", blocks: str = "", inodes: str = "") -> TalkingMachine:
    here = TalkingMachine().on("lsattr", "-d", stdout=attributes, status=1)
    for folder in (FOLDER, ABOVE):
        here.on("--target", folder, stdout=mount)
        here.on("-k", "--", folder, stdout=blocks or df(20511312, 12345)).on("-i", "--", folder, stdout=inodes or df(1310720, 9))
    return here


def df(size: int, free: int) -> str:
    return f"Filesystem 1024-blocks Used Available Capacity Mounted on\n/dev/vda1 {size} {size - free} {free} 9% /srv/a b\n"


def found(here: TalkingMachine) -> list[tuple[str, str]]:
    answer = here.ask(Obstacles((PATH,), INSIDE))
    assert answer.known, answer.unknown
    return [(one.what, typed(one, INSIDE)) for one in answer.value]


def test_nothing_in_the_way() -> None:
    here = machine()
    assert found(here) == []
    assert all(asked.argv[:4] == ("pct", "exec", "102", "--") and asked.root for asked in here.rounds[0])


def test_attributes() -> None:
    assert found(machine(f"----i---------e------- {PATH}\n{PLAIN}")) == [
        (f"{PATH} is immutable (chattr +i)", f"pct exec 102 -- chattr -i -- {PATH}")
    ]
    assert found(machine(f"-----a--------e------- {FOLDER}\n")) == [
        (f"{FOLDER} can only be appended to (chattr +a)", f"pct exec 102 -- chattr -a -- {FOLDER}")
    ]
    assert found(machine("lsattr: Inappropriate ioctl for device While reading flags on /etc/i\n")) == []


def test_a_file_system_that_is_read_only() -> None:
    assert found(machine(mount="/srv/a\\x20b xfs ro,relatime,errors=remount-ro\n")) == [
        ("the file system at /srv/a b (xfs) is read-only", "pct exec 102 -- mount -o remount,rw '/srv/a b'")
    ]
    assert found(machine(mount="/ ext4 rw,errors=remount-ro\n")) == [], "what it would do at an error is not what it is"


def test_a_file_system_that_is_full() -> None:
    assert found(machine(blocks=df(20511312, 0))) == [
        ("the file system at /srv/a b has no space left", "pct exec 102 -- df -h '/srv/a b'")
    ]
    assert found(machine(inodes=df(1310720, 0))) == [
        ("the file system at /srv/a b has no inodes left", "pct exec 102 -- df -i '/srv/a b'")
    ]
    assert found(machine(inodes=df(0, 0))) == [], "a file system that makes inodes as it needs them"


def test_tools_that_are_not_there_show_nothing() -> None:
    assert found(TalkingMachine()) == []
