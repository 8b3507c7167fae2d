"""The virtual file system."""

from __future__ import annotations

import errno

import pytest

from proofbook.lab.sim.vfs import FileNode, Tree, device, directory, file, link


def tree(uid: int = 0) -> Tree:
    return Tree(
        [
            {
                "/etc/hosts": file("127.0.0.1 localhost\n"),
                "/etc/secret": file("s\n", 0o600),
                "/a/b/c": file(lambda: b"made when read\n"),
                "/up": link("a/b"),
                "/loop": link("/loop"),
                "/gone": link("/nowhere"),
                "/broken": file(b"", error="EIO"),
                "/dev/nvidia-uvm": device(511, 0, error="EPERM"),
                "/closed": directory(0o700),
            },
            {"/etc/hosts": None, "/etc/new": file("new\n")},
        ],
        uid,
    )


def test_links_are_followed_on_the_way_and_at_the_end_only_when_asked() -> None:
    t = tree()
    assert t.read("/up/c") == b"made when read\n"
    assert t.lookup("/up")[0] == "/a/b"
    assert t.lookup("/up", follow=False)[1].target == "a/b"
    assert t.read("../up/c", cwd="/etc") == b"made when read\n"


@pytest.mark.parametrize(
    ("path", "number"),
    [
        ("/nowhere", errno.ENOENT),
        ("/gone", errno.ENOENT),
        ("/loop", errno.ELOOP),
        ("/etc/new/x", errno.ENOTDIR),
        ("/etc", errno.EISDIR),
        ("/broken", errno.EIO),
        ("/etc/hosts", errno.ENOENT),
    ],
)
def test_reading_fails_as_linux_does(path: str, number: int) -> None:
    with pytest.raises(OSError) as failed:
        tree().read(path)
    assert failed.value.errno == number
    assert failed.value.filename == path


def test_permissions_bind_everybody_but_root() -> None:
    assert tree().read("/etc/secret") == b"s\n"
    with pytest.raises(PermissionError):
        tree(uid=1000).read("/etc/secret")
    with pytest.raises(PermissionError):
        tree(uid=1000).listdir("/closed")


def test_a_later_layer_hides_and_deletes() -> None:
    assert tree().listdir("/etc") == ["new", "secret"]


def test_globs_match_like_a_shell() -> None:
    t = tree()
    assert t.glob("/etc/*") == ["/etc/new", "/etc/secret"]
    assert t.glob("/*/[a-c]") == ["/a/b", "/up/c"]
    assert t.glob("/nothing/*") == []
    assert t.glob("/etc/new") == ["/etc/new"]


def test_a_node_reads_what_it_is_made_of() -> None:
    assert FileNode("file", b"x").read() == b"x"


def test_a_tree_below_is_shared_and_what_is_deleted_in_it_is_gone_from_this_one_alone() -> None:
    bus = Tree([{"/sys/bus/a/x": file("1\n"), "/sys/bus/b": link("a"), "/sys/power": file("p\n")}])
    t = Tree([{"/sys/bus/a/y": file("2\n"), "/etc/new": file("n\n")}], base=bus)
    assert t.listdir("/sys/bus/b") == ["x", "y"]
    assert t.read("/sys/bus/b/x") + t.read("/sys/bus/b/y") == b"1\n2\n"
    assert t.glob("/sys/bus/*/*") == ["/sys/bus/a/x", "/sys/bus/a/y", "/sys/bus/b/x", "/sys/bus/b/y"]
    for deleted, left in (("/sys/bus/a/x", ["y"]), ("/sys/bus/a", None)):
        without = Tree([{"/sys/bus/a/y": file("2\n")}, {deleted: None}], base=bus)
        assert without.exists("/sys/power")
        assert without.exists("/sys/bus/a") == (left is not None)
        if left is not None:
            assert without.listdir("/sys/bus/b") == left
    assert bus.listdir("/sys/bus/a") == ["x"]
    assert not bus.exists("/etc/new")
