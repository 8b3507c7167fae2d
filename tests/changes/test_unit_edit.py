"""Edits of unit files: what changes, what stays as it was written, and what is refused."""

from __future__ import annotations

import hashlib

import pytest

from proofbook.changes.unit_edit import DROP_IN, LAST_DROP_IN, edited, effective_of
from proofbook.errors import CannotTell
from proofbook.probes.sglang_flags import flags_of, with_flags
from proofbook.probes.unit_files import UnitFile, UnitFileSet
from proofbook.probes.unit_text import effective_unit

UNIT = "sglang-qwen.service"
MAIN = f"/etc/systemd/system/{UNIT}"
FOLDER = f"{MAIN}.d"
KNOWN = flags_of("0.5.9")
WANTED = {
    "--speculative-algorithm": "NEXTN",
    "--speculative-num-steps": "5",
    "--mem-fraction-static": "0.75",
}
PLAIN = """\
[Unit]
Description=Qwen, 100% local

[Service]
Environment=NCCL_P2P_DISABLE=1
# the server
ExecStart=/opt/venv/bin/python -m sglang.launch_server \\
  --model-path /models/qwen \\
  # --speculative-algorithm EAGLE \\
  --mem-fraction-static 0.85 \\
  --tp 4
Restart=on-failure

[Install]
WantedBy=multi-user.target
"""


def file(path: str, text: str, *, target: str = "") -> UnitFile:
    data = text.encode()
    return UnitFile(path, data, hashlib.sha256(data).hexdigest(), "root", "root", 0o644, target)


def unit(
    main: str = PLAIN,
    *drop_ins: tuple[str, str],
    path: str = MAIN,
    environment: dict[str, str | None] | None = None,
    target: str = "",
) -> UnitFileSet:
    return UnitFileSet(
        UNIT,
        file(path, main, target=target),
        tuple(file(f"{FOLDER}/{name}", text) for name, text in drop_ins),
        environment or {},
        {f"{FOLDER}/{DROP_IN}": None, f"{FOLDER}/{LAST_DROP_IN}": None},
    )


def change(
    now: UnitFileSet, style: str = "edit", wanted: dict[str, str | None] | None = None, **variables: str
) -> dict[str, str]:
    wishes: dict[str, str | None] = dict(WANTED) if wanted is None else wanted
    files = edited(now, wishes, variables, style, KNOWN)  # type: ignore[arg-type]
    return {path: data.decode() for path, data in files.items()}


def test_an_edit_changes_what_it_must_and_nothing_else() -> None:
    ((path, text),) = change(unit(), SGLANG_ENABLE_SPEC_V2="1").items()
    assert path == MAIN
    assert text == PLAIN.replace("0.85", "0.75").replace(
        "  --tp 4\n", "  --tp 4 \\\n  --speculative-algorithm NEXTN \\\n  --speculative-num-steps 5\n"
    ).replace("P2P_DISABLE=1\n", "P2P_DISABLE=1\nEnvironment=SGLANG_ENABLE_SPEC_V2=1\n")


def test_a_drop_in_says_the_whole_command_anew() -> None:
    ((path, text),) = change(unit(), "drop-in", SGLANG_ENABLE_SPEC_V2="1").items()
    assert path == f"{FOLDER}/{DROP_IN}"
    assert text.endswith(
        "[Service]\n"
        "Environment=SGLANG_ENABLE_SPEC_V2=1\n"
        "ExecStart=\n"
        "ExecStart=/opt/venv/bin/python -m sglang.launch_server \\\n"
        "    --model-path /models/qwen \\\n"
        "    --mem-fraction-static 0.75 \\\n"
        "    --tp 4 \\\n"
        "    --speculative-algorithm NEXTN \\\n"
        "    --speculative-num-steps 5\n"
    )
    assert "remove this file" in text


def test_a_second_edit_of_what_is_so_already_changes_nothing() -> None:
    now = unit()
    first = edited(now, dict(WANTED), {"A": "1"}, "edit", KNOWN)
    again = unit(first[MAIN].decode())
    assert edited(again, dict(WANTED), {"A": "1"}, "edit", KNOWN) == {}
    assert edited(again, dict(WANTED), {"A": "1"}, "drop-in", KNOWN) == {}


def test_our_own_drop_in_is_changed_where_it_stands() -> None:
    first = change(unit(), "drop-in")[f"{FOLDER}/{DROP_IN}"]
    now = unit(PLAIN, (DROP_IN, first))
    ((path, text),) = change(now, "drop-in", {"--speculative-num-steps": "3"}).items()
    assert path == f"{FOLDER}/{DROP_IN}"
    assert text == first.replace("num-steps 5", "num-steps 3")


def test_words_that_stay_keep_their_quotes_specifiers_and_variables() -> None:
    main = (
        "[Service]\nEnvironment=PORT=30000\n"
        "ExecStart=-/opt/venv/bin/python -m sglang.launch_server --served-model-name '%p model' --port ${PORT} "
        '--x "a\\tb" $MORE\n'
    )
    text = change(unit(main), "drop-in", {"--tp-size": "4"})[f"{FOLDER}/{DROP_IN}"]
    assert "ExecStart=-/opt/venv/bin/python -m sglang.launch_server \\\n" in text
    assert "--served-model-name '%p model' \\\n" in text
    assert "--port ${PORT} \\\n" in text
    assert '--x "a\\tb" $MORE \\\n' in text


def test_what_is_written_anew_is_quoted_for_systemd() -> None:
    wanted: dict[str, str | None] = {"--json-model-override-args": '{"a": "50%"}', "--chat-template": "$x y"}
    now = unit()
    for style in ("drop-in", "edit"):
        files = edited(now, wanted, {"LABEL": "50% $HOME"}, style, KNOWN)  # type: ignore[arg-type]
        after = effective_of(now, files)
        argv = after.command.words_with(after.environment)
        assert argv[-4:] == ("--json-model-override-args", '{"a": "50%"}', "--chat-template", "$x y")
        assert after.environment["LABEL"] == "50% $HOME"


@pytest.mark.parametrize(
    ("before", "wanted", "after"),
    [
        ("--mem-fraction-static=0.9", {"--mem-fraction-static": "0.75"}, "--mem-fraction-static=0.75"),
        ("--mem-frac 0.9", {"--mem-fraction-static": "0.75"}, "--mem-fraction-static 0.75"),
        ("--speculative-algo EAGLE", {"--speculative-algorithm": "NEXTN"}, "--speculative-algorithm NEXTN"),
        ("--tp 2 --tensor-parallel-size 4", {"--tp-size": "8"}, "--tp-size 8"),
        ("--trust-remote-code", {"--trust-remote-code": None}, "--trust-remote-code"),
        ("--tp 4", {"--trust-remote-code": None}, "--tp 4 --trust-remote-code"),
        ("--mem-frac 0.9 --tp 4 --mem-frac 0.8", {"--mem-fraction-static": "0.8"}, "--tp 4 --mem-frac 0.8"),
        ("--mem-fraction-static", {"--mem-fraction-static": "0.8"}, "--mem-fraction-static 0.8"),
        ("--lora-paths a b --tp 4", {"--lora-paths": "c"}, "--lora-paths c --tp 4"),
    ],
)  # fmt: skip
def test_a_flag_that_is_there(before: str, wanted: dict[str, str | None], after: str) -> None:
    head = ("/v/bin/python", "-m", "sglang.launch_server")
    assert with_flags((*head, *before.split()), wanted, KNOWN) == (*head, *after.split())
    for style in ("edit", "drop-in"):
        now = unit(f"[Service]\nExecStart={' '.join(head)} {before}\nType=simple\n")
        files = edited(now, wanted, {}, style, KNOWN)  # type: ignore[arg-type]
        assert effective_of(now, files).command.words == (*head, *after.split())


def test_the_old_name_of_a_flag_gives_way_to_the_new_one() -> None:
    argv = ("python", "-m", "sglang.launch_server", "--mamba-scheduler-strategy", "no_buffer")
    assert with_flags(argv, {"--mamba-radix-cache-strategy": "extra_buffer"}, flags_of("0.5.15"))[3:] == (
        "--mamba-radix-cache-strategy",
        "extra_buffer",
    )


def test_a_word_alone_on_its_line() -> None:
    main = (
        "[Service]\nExecStart=/v/bin/python -m sglang.launch_server \\\n  --lora-paths \\\n  a \\\n  b \\\n  --tp-size \\\n  4\n"
        "Restart=always\n"
    )
    text = change(unit(main), "edit", {"--lora-paths": "c", "--tp-size": "8"})[MAIN]
    assert text == (
        "[Service]\nExecStart=/v/bin/python -m sglang.launch_server \\\n"
        "  --lora-paths c \\\n  --tp-size \\\n  8\nRestart=always\n"
    )


def test_a_file_without_a_final_newline_keeps_none() -> None:
    main = "[Service]\nExecStart=/v/bin/python -m sglang.launch_server --tp 4"
    assert change(unit(main), "edit", {"--tp-size": "8"})[MAIN] == main.replace("--tp 4", "--tp-size 8")


def test_a_later_drop_in_wins_so_ours_comes_last() -> None:
    other = "[Service]\nExecStart=\nExecStart=/v/bin/python -m sglang.launch_server --tp 2\n"
    now = unit(PLAIN, ("95-site.conf", other))
    ((path, text),) = change(now, "drop-in").items()
    assert path == f"{FOLDER}/{LAST_DROP_IN}"
    assert "--tp 2" in text
    ((path, _),) = change(now, "edit").items()
    assert path == f"{FOLDER}/95-site.conf"


@pytest.mark.parametrize(
    ("now", "style", "why"),
    [
        (unit(PLAIN.replace("--tp 4", "--tp 4 \\ \n  --x 1")), "edit", "not in effect"),
        (unit(PLAIN, ("10-x.conf", "[Service]\nExecStart=/bin/other\n")), "drop-in", "systemd refuses"),
        (unit("[Service]\nType=oneshot\n"), "edit", "no command"),
        (unit(PLAIN.replace("--tp 4", "--tp 4 --host %H")), "edit", "%H"),
        (unit(PLAIN, path=f"/usr/lib/systemd/system/{UNIT}"), "edit", "use a drop-in"),
        (unit(PLAIN, target="/srv/units/qwen.service"), "edit", "link to /srv"),
        (unit(PLAIN.replace("[Service]", "[Service]\nEnvironmentFile=/etc/qwen")), "edit", "was not read"),
    ],
)
def test_what_is_refused(now: UnitFileSet, style: str, why: str) -> None:
    with pytest.raises(CannotTell, match=why):
        change(now, style)


def test_an_environment_file_that_wins_is_found() -> None:
    main = PLAIN.replace("[Service]", "[Service]\nEnvironmentFile=/etc/qwen")
    now = unit(main, environment={"/etc/qwen": "SGLANG_ENABLE_SPEC_V2=0\n"})
    with pytest.raises(CannotTell, match="environment file sets it"):
        change(now, "edit", SGLANG_ENABLE_SPEC_V2="1")
    set_already = unit(main, environment={"/etc/qwen": "SGLANG_ENABLE_SPEC_V2=1\n"})
    assert "SPEC_V2" not in change(set_already, "edit", SGLANG_ENABLE_SPEC_V2="1")[MAIN]


def test_a_drop_in_that_is_there_and_not_loaded_is_not_written_over() -> None:
    now = unit()
    path = f"{FOLDER}/{DROP_IN}"
    there = UnitFileSet(UNIT, now.main, (), {}, {**now.also, path: file(path, "[Service]\n")})
    with pytest.raises(CannotTell, match="look what it is"):
        change(there, "drop-in")


def test_bytes_that_are_no_utf8_stay() -> None:
    data = b"[Service]\n# caf\xe9\nExecStart=/v/bin/python -m sglang.launch_server --tp 4\n"
    main = UnitFile(MAIN, data, "x", "root", "root", 0o644)
    now = UnitFileSet(UNIT, main, (), {}, {})
    assert edited(now, {"--tp-size": "8"}, {}, "edit", KNOWN)[MAIN] == data.replace(b"--tp 4", b"--tp-size 8")


def test_the_effective_unit_is_read_as_it_would_be_loaded() -> None:
    now = unit(PLAIN, ("50-b.conf", "[Service]\nEnvironment=A=b\n"))
    files = {f"{FOLDER}/10-a.conf": b"[Service]\nEnvironment=A=a\n"}
    assert effective_of(now, files).environment["A"] == "b"
    assert effective_unit(UNIT, [(MAIN, PLAIN)]).environment == {"NCCL_P2P_DISABLE": "1"}
