"""known_hosts files as OpenSSH reads them; ssh-keygen -F is the measure where it knows the answer."""

from __future__ import annotations

import base64
import subprocess
from pathlib import Path

import pytest

from proofbook.errors import ChangedHostKey, UnknownHostKey
from proofbook.transports import known_hosts as trust

from .sshd import make_key


@pytest.fixture(scope="module")
def keys(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    folder = tmp_path_factory.mktemp("keys")
    return [" ".join(make_key(folder / str(n)).with_suffix(".pub").read_text().split()[:2]) for n in range(2)]


def key(text: str) -> trust.HostKey:
    kind, blob = text.split()
    return trust.HostKey(kind, base64.b64decode(blob))


@pytest.mark.parametrize(
    ("names", "host", "port", "found"),
    [
        ("gpu01", "gpu01", 22, True),
        ("GPU01,other", "Gpu01", 22, True),
        ("gpu01", "gpu01", 2222, True),  # the same key on another port is the same machine
        ("[gpu01]:2222", "gpu01", 2222, True),
        ("[gpu01]:2222", "gpu01", 22, False),
        ("[gpu01]:2222", "gpu01", 2223, False),
        ("*.cluster", "gpu01.cluster", 22, True),
        ("*.cluster,!gpu01.cluster", "gpu01.cluster", 22, False),
        ("gpu0?", "gpu01", 22, True),
        ("gpu0[1]", "gpu01", 22, False),
        ("[*]:2222", "gpu01", 2222, True),
        ("192.0.2.7", "192.0.2.7", 22, True),
    ],
)
def test_names_match_as_for_openssh(names: str, host: str, port: int, found: bool, keys: list[str], tmp_path: Path) -> None:
    file = tmp_path / "known_hosts"
    file.write_text(f"# comment\n\nnot a line\n{names} {keys[0]} a comment\n")
    if found:
        trust.verify(host, port, key(keys[0]), [str(file)])
    else:
        with pytest.raises(UnknownHostKey):
            trust.verify(host, port, key(keys[0]), [str(file)])
    if not (names == "gpu01" and port != 22):  # ssh-keygen -F does not look for the name without its port
        asked = trust.lookup_name(host, port)
        assert (subprocess.run(["ssh-keygen", "-F", asked, "-f", file], capture_output=True).returncode == 0) is found


def test_hashed_names(keys: list[str], tmp_path: Path) -> None:
    file = tmp_path / "known_hosts"
    file.write_text(f"gpu01 {keys[0]}\n[gpu02]:2222 {keys[1]}\n|1|broken {keys[1]}\n")
    subprocess.run(["ssh-keygen", "-H", "-f", file], check=True, capture_output=True)
    assert "gpu0" not in file.read_text()
    trust.verify("gpu01", 22, key(keys[0]), [str(file)])
    trust.verify("gpu02", 2222, key(keys[1]), [str(file)])
    with pytest.raises(ChangedHostKey):
        trust.verify("gpu01", 22, key(keys[1]), [str(file)])


def test_any_of_several_files_and_keys_will_do(keys: list[str], tmp_path: Path) -> None:
    one, two = tmp_path / "one", tmp_path / "two"
    one.write_text(f"gpu01 {keys[0]}\n")
    two.write_text(f"gpu01 {keys[1]}\n")
    for text in keys:
        trust.verify("gpu01", 22, key(text), [str(tmp_path / "no-such-file"), str(one), str(two)])


def test_a_revoked_key_is_worse_than_a_trusted_one_is_good(keys: list[str], tmp_path: Path) -> None:
    file = tmp_path / "known_hosts"
    file.write_text(f"gpu01 {keys[0]}\n@revoked * {keys[0]}\n")
    with pytest.raises(ChangedHostKey, match="revoked"):
        trust.verify("gpu01", 22, key(keys[0]), [str(file)])


def test_a_certificate_authority_is_not_taken_for_a_host_key(keys: list[str], tmp_path: Path) -> None:
    file = tmp_path / "known_hosts"
    file.write_text(f"@cert-authority * {keys[0]}\n")
    with pytest.raises(UnknownHostKey, match="certificate"):
        trust.verify("gpu01", 22, key(keys[0]), [str(file)])


def test_fingerprints_are_those_of_ssh_keygen(keys: list[str], tmp_path: Path) -> None:
    (tmp_path / "key.pub").write_text(keys[0] + "\n")
    said = subprocess.run(["ssh-keygen", "-lf", tmp_path / "key.pub"], capture_output=True, text=True, check=True).stdout
    assert key(keys[0]).fingerprint == said.split()[1]


def test_a_file_that_cannot_be_read_is_no_empty_file(keys: list[str], tmp_path: Path) -> None:
    with pytest.raises(UnknownHostKey, match="cannot be read"):
        trust.verify("gpu01", 22, key(keys[0]), [str(tmp_path)])
