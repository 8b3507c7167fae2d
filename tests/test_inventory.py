"""The inventory: what it accepts, and that a refusal says what was wrong, what is allowed, and what to do."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from pydantic import ValidationError

from proofbook.errors import BadInventory, BadParameter
from proofbook.host import WallClock
from proofbook.intent import ServiceSpec
from proofbook.inventory import HostSpec, Inventory, api_key, connect, find_inventory, load_inventory, ssh_config_knows

GOOD = """
[hosts.gpu01]
address = "gpu01.example"
user = "root"
roles = ["gpu"]
console = "https://bmc-gpu01.example"

[[hosts.gpu01.gpus]]
pci = "41:00.0"
link_width = 16
[[hosts.gpu01.gpus]]
pci = "0000:C1:00.0"
driver = "vfio-pci"

[[hosts.gpu01.containers]]
name = "llm-two"
kind = "pct"
id = 102
devices = ["/dev/nvidia0", "/dev/nvidiactl"]

[[hosts.gpu01.services]]
name = "sglang-qwen.service"
container = "llm-two"
url = "http://127.0.0.1:30000/health"
args = ["--speculative-algorithm", "NEXTN", "--tokenizer-path", "/models/qwen"]
environment = { NCCL_P2P_DISABLE = "1", MAX_TOTAL_TOKENS = "4096" }

[hosts.vm1]
runs_on = "gpu01"
"""


@pytest.fixture(autouse=True)
def _nobodys_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No inventory and no ssh config of whoever runs the tests, and no name that happens to resolve."""
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.delenv("PROOFBOOK_INVENTORY", raising=False)
    monkeypatch.delenv("XDG_CONFIG_HOME", raising=False)
    (tmp_path / "home" / ".ssh").mkdir(parents=True)

    def only_localhost(name: str, *_args: object, **_more: object) -> list[str]:
        if name == "localhost":
            return ["127.0.0.1"]
        raise OSError("no such name")

    monkeypatch.setattr("socket.getaddrinfo", only_localhost)


def write(folder: Path, text: str) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "proofbook.toml"
    path.write_text(text)
    return path


def refusal(tmp_path: Path, text: str) -> str:
    path = write(tmp_path, text)
    with pytest.raises(BadInventory) as caught:
        load_inventory(path)
    said = str(caught.value)
    assert str(path) in said
    assert caught.value.hint
    return said


# ------------------------------------------------------------------------------------------------ the file


def test_a_whole_inventory(tmp_path: Path) -> None:
    book = load_inventory(write(tmp_path, GOOD))
    gpu01 = book.resolve("gpu01")
    assert (gpu01.name, gpu01.target, gpu01.user, gpu01.port) == ("gpu01", "gpu01.example", "root", None)
    assert [(g.pci, g.driver, g.link_width) for g in gpu01.gpus] == [
        ("0000:41:00.0", "nvidia", 16),
        ("0000:c1:00.0", "vfio-pci", None),
    ]
    assert gpu01.container("llm-two").enter() == ("pct", "exec", "102", "--")
    assert gpu01.service("llm-two/sglang-qwen").args[:2] == ("--speculative-algorithm", "NEXTN")
    assert gpu01.source == str(tmp_path / "proofbook.toml")
    vm1 = book.resolve("vm1")
    assert vm1.target == "vm1"
    assert book.kernel_host(vm1) is gpu01
    assert book.kernel_host(gpu01) is gpu01


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("[hosts.a]\nadress = 'x'", ["hosts.a.adress: unknown key (did you mean address?)", "allowed: address, user, port"]),
        (
            "[[hosts.a.gpus]]\npci='41:00.0'\nlink_widht=16",
            ["hosts.a.gpus[0].link_widht: unknown key (did you mean link_width?)"],
        ),
        ("[[hosts.a.gpus]]\nuuid=''", ["hosts.a.gpus[0].pci: is missing"]),
        ("[[hosts.a.gpus]]\npci='gpu0'", ["hosts.a.gpus[0].pci: not a PCI address: 'gpu0'"]),
        ("[[hosts.a.gpus]]\npci='41:00.0'\nlink_width=12", ["hosts.a.gpus[0].link_width: 12 is not one of 1, 2, 4, 8, 16, 32"]),
        (
            "[[hosts.a.containers]]\nname='x'\nkind='dokcer'",
            ["hosts.a.containers[0].kind: 'dokcer' is not one of pct, lxc, incus, docker, podman, nspawn (did you mean docker?)"],
        ),
        ("[[hosts.a.containers]]\nname='x'\nkind='pct'", ["hosts.a.containers[0]: a pct container needs its number"]),
        ("[hosts.a]\nport = 70000", ["hosts.a.port: input should be less than or equal to 65535; it is 70000"]),
        ("[hosts.a]\nname = 'b'", ["hosts.a.name: unknown key"]),
        ("[hosts.a]\nlab = 'healthy'", ["hosts.a.lab: unknown key"]),
        ("[hosts.a]\naddress = '-oProxyCommand=x'", ["hosts.a.address: not usable"]),
        ("[hosts.a]\naddress = 'root@b'", ["hosts.a.address: not usable"]),
        ("[hosts.'lab:x']\nport=22", ["hosts.lab:x: not a host name"]),
        ("[hosts]\na = 1", ["hosts.a: must be a table"]),
        ("hosts = 1", ["hosts: must be tables"]),
        ("[host.a]\nport=22", ["host: unknown (did you mean hosts?)"]),
        (
            "[hosts.a]\nruns_on='gpu1'\n[hosts.gpu01]",
            ["hosts.a.runs_on: 'gpu1' is not a host of this file (did you mean gpu01?)"],
        ),
        ("[hosts.a]\nruns_on='b'\n[hosts.b]\nruns_on='a'", ["hosts.a.runs_on: goes round in a circle: a → b → a"]),
        ("[hosts.a]\nruns_on='a'", ["goes round in a circle: a → a"]),
        (
            "[[hosts.a.containers]]\nname='llm'\nkind='docker'\n[[hosts.a.services]]\nname='x'\ncontainer='lm'",
            ["x.service is in container 'lm', which is not declared here (did you mean llm?); containers: llm"],
        ),
        (
            "[[hosts.a.gpus]]\npci='41:00'\n[[hosts.a.gpus]]\npci='0000:41:00.0'",
            ["gpus: PCI address 0000:41:00.0 is there twice"],
        ),
        (
            "[[hosts.a.services]]\nname='x'\n[[hosts.a.services]]\nname='x.service'",
            ["services: service x.service is there twice"],
        ),
        ("[hosts.a\n", ["is not TOML", "line 1"]),
    ],
)
def test_what_is_wrong_is_said_with_its_place_and_what_is_allowed(tmp_path: Path, text: str, says: list[str]) -> None:
    said = refusal(tmp_path, text)
    for part in says:
        assert part in said


def test_every_problem_is_named_at_once(tmp_path: Path) -> None:
    said = refusal(tmp_path, "[hosts.a]\nadress='x'\nport='y'\n[[hosts.b.gpus]]\npci='?'")
    assert "3 problems" in said
    assert said.count("\n  - ") == 3


@pytest.mark.parametrize(
    "text",
    [
        "[hosts.a]\npassword = 'hunter2'",
        "[hosts.a]\nsudo_password = 'hunter2'",
        "[hosts.a]\napiKey = 'hunter2'",
        "[[hosts.a.services]]\nname='x'\nenvironment={HF_TOKEN='hunter2'}",
        "[[hosts.a.services]]\nname='x'\nargs=['--api-key', 'hunter2']",
        "[[hosts.a.services]]\nname='x'\nargs=['--api-key=hunter2']",
        "[hosts.a]\nconsole = 'https://admin:hunter2@bmc.example'",
        "[hosts.a]\nidentity_file = '-----BEGIN OPENSSH PRIVATE KEY-----hunter2'",
    ],
)
def test_secrets_are_refused_and_not_repeated(tmp_path: Path, text: str) -> None:
    said = refusal(tmp_path, text)
    assert "hosts.a" in said
    assert "hunter2" not in said


def test_a_host_may_be_called_token(tmp_path: Path) -> None:
    assert load_inventory(write(tmp_path, "[hosts.token]\nport = 22")).resolve("token").port == 22


def test_an_inventory_that_anybody_can_write_is_refused(tmp_path: Path) -> None:
    path = write(tmp_path, GOOD)
    path.chmod(0o666)
    with pytest.raises(BadInventory, match="writable by everyone") as caught:
        load_inventory(path)
    assert f"chmod o-w {path}" in caught.value.hint


# ---------------------------------------------------------------------------------------------- finding it


def test_the_search_goes_upwards_then_to_the_users_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    deep = tmp_path / "project" / "a" / "b"
    deep.mkdir(parents=True)
    assert find_inventory(deep) is None
    monkeypatch.chdir(deep)
    assert load_inventory() == Inventory()
    own = write(tmp_path / "home" / ".config" / "proofbook", GOOD)
    assert find_inventory(deep) == own
    above = write(tmp_path / "project", GOOD)
    assert find_inventory(deep) == above
    near = write(deep, GOOD)
    assert find_inventory(deep) == near
    monkeypatch.setenv("PROOFBOOK_INVENTORY", str(own))
    assert find_inventory(deep) == own


def test_a_named_inventory_that_is_not_there_is_an_error_not_an_empty_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PROOFBOOK_INVENTORY", str(tmp_path / "gone.toml"))
    with pytest.raises(BadInventory, match=r"gone\.toml .*PROOFBOOK_INVENTORY.* cannot be read: No such file"):
        load_inventory()


# ---------------------------------------------------------------------------------------------- names


@pytest.mark.parametrize("name", ["", "  "])
def test_no_name_no_host(tmp_path: Path, name: str) -> None:
    with pytest.raises(BadParameter, match="no host was named") as caught:
        load_inventory(write(tmp_path, GOOD)).resolve(name)
    assert "gpu01, vm1, lab:<scenario>" in caught.value.hint


def test_a_near_miss_names_what_was_meant(tmp_path: Path) -> None:
    (tmp_path / "home/.ssh/config").write_text("Host gpu11 other\n  HostName 192.0.2.1\n")
    with pytest.raises(BadParameter, match=r"unknown host 'gpu1' \(did you mean .*gpu01"):
        load_inventory(write(tmp_path, GOOD)).resolve("gpu1")


def test_a_user_does_not_belong_to_the_name() -> None:
    with pytest.raises(BadParameter, match="a user and a host"):
        Inventory().resolve("root@gpu01")


@pytest.mark.parametrize("name", ["192.0.2.7", "2001:db8::7", "localhost"])
def test_an_address_is_a_host_with_defaults(name: str) -> None:
    spec = Inventory().resolve(name)
    assert (spec.name, spec.target, spec.source, spec.gpus) == (name, name, "address", ())


SSH_CONFIG = """
# Host commented
Host jump "quoted name"
  User root
Host gpu-? !gpu-9
HOST=equal
Include extra/*.conf
Include ~/.ssh/nowhere
Host *
  ServerAliveInterval 5
Match host matched
Host "unbalanced
"""


@pytest.mark.parametrize(
    ("name", "known"),
    [
        ("jump", True),
        ("quoted name", True),
        ("gpu-1", True),
        ("gpu-9", False),
        ("gpu-11", False),
        ("equal", True),
        ("included", True),
        ("nested", True),
        ("commented", False),
        ("anything", False),
        ("unbalanced", False),
    ],
)
def test_what_the_ssh_config_knows(tmp_path: Path, name: str, known: bool) -> None:
    config = tmp_path / "home/.ssh/config"
    config.write_text(SSH_CONFIG)
    (config.parent / "extra").mkdir()
    (config.parent / "extra/one.conf").write_text(f"Host included\nInclude {config.parent}/two\n")
    (config.parent / "two").write_text(f"Host nested\nInclude {config.parent}/two\n")
    assert ssh_config_knows(name) is known
    if known:
        assert Inventory().resolve(name).source == "~/.ssh/config"


# ---------------------------------------------------------------------------------------------- host parts


def test_an_undeclared_service_gets_defaults_but_not_an_undeclared_container(tmp_path: Path) -> None:
    gpu01 = load_inventory(write(tmp_path, GOOD)).resolve("gpu01")
    assert gpu01.service("nvidia-persistenced").spec == "nvidia-persistenced.service"
    assert gpu01.service("llm-two/other").ready_s == 600
    with pytest.raises(BadParameter, match=r"gpu01 has no container 'llm-tow' \(did you mean llm-two\?\); containers: llm-two"):
        gpu01.service("llm-tow/other")
    with pytest.raises(BadParameter, match="not a service"):
        gpu01.service("a/b/c")


# ---------------------------------------------------------------------------------------------- connecting


@dataclass
class FakeTransport:
    host: str
    options: dict[str, Any]


@pytest.fixture
def ssh(monkeypatch: pytest.MonkeyPatch) -> None:
    module = ModuleType("proofbook.transports.ssh")
    module.SshTransport = lambda host, **options: FakeTransport(host, options)  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "proofbook.transports.ssh", module)


@pytest.mark.usefixtures("ssh")
def test_connecting_hands_over_only_what_was_said(tmp_path: Path) -> None:
    transport: Any
    transport, clock = connect(HostSpec(name="gpu01"))
    assert isinstance(clock, WallClock)
    assert transport.host == "gpu01"
    assert set(transport.options.values()) == {None}, "~/.ssh/config decides what the inventory leaves open"
    transport, _ = connect(
        HostSpec(name="a", address="192.0.2.1", port=2222, user="me", identity_file="~/.ssh/k", known_hosts="~/kh")
    )
    home = tmp_path / "home"
    assert transport.host == "192.0.2.1"
    assert transport.options == {"port": 2222, "user": "me", "identity_file": f"{home}/.ssh/k", "known_hosts": f"{home}/kh"}


# ---------------------------------------------------------------------------------------------- the lab


# ----------------------------------------------------------------------------------------------- a service's key

KEY = "sk-Zq4vX9sKd2mWz8fRt7"


def test_a_key_is_read_from_where_its_entry_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert api_key(ServiceSpec(name="x.service")) == ""
    monkeypatch.setenv("SGLANG_KEY", KEY)
    assert api_key(ServiceSpec(name="x.service", api_key_env="SGLANG_KEY")) == KEY
    file = tmp_path / "key"
    file.write_text(KEY + "\n")
    file.chmod(0o600)
    assert api_key(ServiceSpec(name="x.service", api_key_file=str(file))) == KEY
    text = "[[hosts.a.services]]\nname='x'\napi_key_env='SGLANG_KEY'"
    (service,) = load_inventory(write(tmp_path, text)).resolve("a").services
    assert (service.has_key, KEY in repr(service)) == (True, False)


@pytest.mark.parametrize("mode", (0o644, 0o640, 0o602))
def test_a_key_that_others_may_read_is_refused(tmp_path: Path, mode: int) -> None:
    file = tmp_path / "key"
    file.write_text(KEY)
    file.chmod(mode)
    with pytest.raises(BadInventory, match="not its owner's alone") as refused:
        api_key(ServiceSpec(name="x.service", api_key_file=str(file)))
    assert f"chmod 600 {file}" in str(refused.value)
    assert KEY not in str(refused.value)


@pytest.mark.parametrize("text", ("tiny", "two words of a key", "", f"{KEY}\nand more", "kéy-of-this-server", "x" * 5000))
def test_what_cannot_be_a_key_is_refused_and_not_shown(tmp_path: Path, text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "key"
    file.write_text(text)
    file.chmod(0o600)
    monkeypatch.setenv("SGLANG_KEY", text)
    for service in (
        ServiceSpec(name="x.service", api_key_file=str(file)), ServiceSpec(name="x.service", api_key_env="SGLANG_KEY")
    ):  # fmt: skip
        with pytest.raises(BadInventory) as refused:
            api_key(service)
        assert not text or text not in str(refused.value)


def test_a_key_that_is_not_there_says_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(BadInventory, match="the variable SGLANG_KEY that api_key_env names is not set here"):
        api_key(ServiceSpec(name="x.service", api_key_env="SGLANG_KEY"))
    with pytest.raises(BadInventory, match="cannot be read: No such file"):
        api_key(ServiceSpec(name="x.service", api_key_file=str(tmp_path / "gone")))


def test_a_key_in_the_place_of_its_name_is_never_shown(tmp_path: Path) -> None:
    for mistaken in ("sk-Zq4vX9sKd2mWz8fRt7", "Zq4vX9sKd2mWz8fRt7"):
        try:
            with pytest.raises(BadInventory) as refused:
                api_key(ServiceSpec(name="x.service", api_key_env=mistaken))
        except ValidationError as error:
            assert "not the name of a variable" in error.errors()[0]["msg"]
            shown = refusal(tmp_path, f"[[hosts.a.services]]\nname='x'\napi_key_env='{mistaken}'")
        else:
            shown = str(refused.value)
        assert mistaken not in shown
    assert "both given" in refusal(tmp_path, "[[hosts.a.services]]\nname='x'\napi_key_env='A'\napi_key_file='/b'")


def test_the_lab_has_its_own_names() -> None:
    from proofbook.lab.sim import client

    names = [info.scenario for info in client.scenarios()]
    spec = Inventory().resolve(f"lab:{names[0]}")
    assert (spec.name, spec.lab, spec.source) == (f"lab:{names[0]}", names[0], "lab")
    assert spec.gpus
    with pytest.raises(BadParameter, match=rf"no scenario '{names[0]}x' \(did you mean {names[0]}") as caught:
        Inventory().resolve(f"lab:{names[0]}x")
    assert "lab list" in caught.value.hint


def test_every_scenario_declares_a_usable_host() -> None:
    from proofbook.lab.sim import client

    resolved = [Inventory().resolve(f"lab:{info.scenario}") for info in client.scenarios()]
    assert resolved
    assert all(spec.gpus for spec in resolved)
