"""Our reading of unit files against what a real systemd makes of them: the very argv and environment that the process gets."""

from __future__ import annotations

import base64
import json
from dataclasses import dataclass, field

import pytest

from proofbook.errors import CannotTell
from proofbook.probes.unit_text import effective_unit, parse_environment_file, quote

from .conftest import Machine

pytestmark = pytest.mark.box

SAY = """#!/usr/bin/python3
import json, os, sys
said = {"argv": sys.argv, "environment": {k: v for k, v in os.environ.items() if k.startswith("T_")}}
unit = open("/proc/self/cgroup").read().strip().rpartition("/pb-")[2].removesuffix(".service")
with open("/run/said/" + unit, "a") as file:
    file.write(json.dumps(said) + "\\n")
"""


@dataclass(frozen=True)
class Case:
    """A unit's body below [Service], its drop-ins and its environment file; {say} is the program."""

    name: str
    body: str
    drop_ins: tuple[tuple[str, str], ...] = ()
    environment_file: str = ""
    refused: bool = False
    files: dict[str, str] = field(default_factory=dict, hash=False)


#: What must come through as it is when we write it.
WORDS = ("a b", "", "100%", "$T_A", "${{T_A}}", 'x"y', "it's", "\\n", ";", "é", "a\tb", "#", "{{'a': 1}}", "--x=%n")

CASES = (
    Case("plain", "ExecStart={say} --a 1 --b=2\n"),
    Case("continued", "ExecStart={say} \\\n  --a 1 \\\n\t--b 2\n"),
    Case("blank-after-backslash", "ExecStart={say} \\\n  --a 1 \\ \n  --b 2\n  --c=3\n"),
    Case("tab-after-backslash", "ExecStart={say} --a 1 \\\t\n  --b 2\n"),
    Case("comment-inside", "ExecStart={say} \\\n  --a 1 \\\n  # --b 2 \\\n  ; --c 3\n  --d 4\n"),
    Case("comment-with-backslash-between", "# a comment \\\nExecStart={say} --a 1\n"),
    Case("empty-line-inside", "ExecStart={say} \\\n  --a 1 \\\n\n  --b 2\n"),
    Case("backslash-at-the-end-of-the-file", "ExecStart={say} --a 1 \\"),
    Case("two-backslashes", "ExecStart={say} --a 1 \\\\\n"),
    Case("hash-behind-a-flag", "ExecStart={say} --a 1 # not a comment\n"),
    Case("quotes", "ExecStart={say} \"two words\" 'and \"these\"' mid\"dle of\"word \"\" '' \"a\\tb\"\n"),
    Case("quoted-over-lines", 'ExecStart={say} "one \\\n  two" three\n'),
    Case("unbalanced", 'ExecStart={say} "one two\n', refused=True),
    Case("escapes", "ExecStart={say} a\\x41b \\u00e9 \\101 tab\\there \\s \\q \\\\ it\\'s\n"),
    Case("json", "ExecStart={say} --config '{{\"a\": [1, 2]}}' --other {{\\\"b\\\":1}}\n"),
    Case("semicolon", "ExecStart={say} a \\; b \";\" c;d\n"),
    Case("two-in-one-line", "ExecStart={say} a ; {say} b\n"),
    Case("specifiers", "ExecStart={say} %n %N %p %% %t %S %E %h 100%% %T\n"),
    Case("unknown-specifier", "ExecStart={say} %Z\n", refused=True),
    Case("per-cent-at-the-end", "ExecStart={say} 50%\n"),
    Case("unknown-specifier-in-environment", "Environment=T_A=%Z T_B=2\nExecStart={say}\n"),
    Case(
        "variables",
        "Environment=T_A=1 \"T_B=two words\" T_C= 'T_D=%n'\n"
        "ExecStart={say} ${{T_A}} $T_A x$T_A ${{T_B}} $T_B [${{T_C}}] $T_C "
        "${{T_NONE}}end $T_NONE $$T_A $${{T_A}} a${{T_A}}b ${{T_D}}\n",
    ),
    Case("no-variables", "Environment=T_A=1\nExecStart=:{say} $T_A ${{T_A}} $$\n"),
    Case("dollar-odd", "Environment=T_A=1\nExecStart={say} $ a$ $T_A/x $T-A ${{T_A ${{}} $1\n"),
    Case("environment-reset", "Environment=T_A=1\nEnvironment=\nEnvironment=T_B=2\nExecStart={say}\n"),
    Case("environment-odd", "Environment=T_A=1 nonsense 9T=1 T_B=x=y T_C\nExecStart={say}\n"),
    Case("environment-twice", "Environment=T_A=1\nEnvironment=T_A=2 T_B=\\\n  T_C=3\nExecStart={say} ${{T_A}}\n"),
    Case(
        "environment-file",
        "Environment=T_A=unit T_KEEP=unit\nEnvironmentFile=/run/said-{name}.env\nExecStart={say} ${{T_A}} $T_LIST\n",
        environment_file=(
            "# comment\n; comment\nT_A=file\n"
            "T_B='single $T_A \\n quoted'\nT_C=\"double \\\"x\\\" \\$y \\z\"\nT_D=plain \\\n continued\n"
            "export T_E=1\nT_F=a\"b\"'c' d  \n"
            "T_G = spaced\nT_H\n  T_I=indented\nT_LIST=one two\n9X=1\nT_J=a#b # c\nT_K=\nT_L=back\\slash\n"
            "#comment \\\nT_M=hidden\nT_N=1\nT_O='one' # two\nT_P='a'\"b\"c'd'\n"
        ),
    ),
    Case("environment-file-missing-is-fine", "EnvironmentFile=-/run/nowhere.env\nExecStart={say} a\n"),
    Case("unset", "Environment=T_A=1 T_B=2 T_C=3\nUnsetEnvironment=T_A T_B=2 T_C=9\nExecStart={say}\n"),
    Case("drop-in-resets", "ExecStart={say} old\n", (("10-a.conf", "[Service]\nExecStart=\nExecStart={say} new\n"),)),
    Case("drop-in-adds", "ExecStart={say} old\n", (("10-a.conf", "[Service]\nExecStart={say} new\n"),)),
    Case(
        "drop-ins-in-order",
        "Environment=T_A=unit\nExecStart={say} unit\n",
        (
            ("50-b.conf", "[Service]\nEnvironment=T_A=b\nExecStart=\nExecStart={say} b\n"),
            ("9-c.conf", "[Service]\nEnvironment=T_A=c\nExecStart=\nExecStart={say} c\n"),
            ("10-a.conf", "[Service]\nEnvironment=T_A=a\nExecStart=\nExecStart={say} a\n"),
        ),
    ),
    Case("no-section", "ExecStart={say} a\n[Broken\n--flag\nUnknown=1\n", refused=True),
    Case("nonsense", "--flag\n--x=1\nUnknown=1\nX-Y=2\nExecStart={say} a\n"),
    Case("written-by-us", f"ExecStart={{say}} {' '.join(map(quote, WORDS))}\n"),
)  # fmt: skip


def _text(case: Case, text: str) -> str:
    return text.replace("{{", "{").replace("}}", "}").replace("{say}", "/usr/local/bin/say").replace("{name}", case.name)


def _main(case: Case, kind: str) -> str:
    return f"[Unit]\nDescription={case.name}\n[Service]\nType={kind}\n" + _text(case, case.body)


def _write(path: str, text: str, mode: str = "644") -> str:
    folder = path.rpartition("/")[0]
    return f"mkdir -p {folder}; base64 -d > {path} <<'E'\n{base64.b64encode(text.encode()).decode()}\nE\nchmod {mode} {path}\n"


def _files(case: Case, kind: str) -> list[tuple[str, str]]:
    """The files of a case, as systemd applies them."""
    unit = f"/run/systemd/system/pb-{case.name}.service"
    drop_ins = sorted((f"{unit}.d/{name}", _text(case, text)) for name, text in case.drop_ins)
    return [(unit, _main(case, kind)), *drop_ins]


@pytest.fixture(scope="module")
def said(shared: Machine) -> dict[str, list[dict[str, object]]]:
    """What every case's process was given, by the name of the case; [] where nothing was started."""
    script = _write("/usr/local/bin/say", SAY, "755") + "rm -rf /run/said; mkdir /run/said\n"
    for case in CASES:
        for path, text in _files(case, "oneshot"):
            script += _write(path, text)
        if case.environment_file:
            script += _write(f"/run/said-{case.name}.env", case.environment_file)
    script += "systemctl daemon-reload\n"
    script += "".join(f"systemctl start pb-{case.name}.service 2>/dev/null; touch /run/said/{case.name}\n" for case in CASES)
    shared.sh(script + "true")
    text = shared.sh('cd /run/said; for f in *; do echo "= $f"; cat $f; done')
    found: dict[str, list[dict[str, object]]] = {}
    name = ""
    for line in text.splitlines():
        if line.startswith("= "):
            name = line[2:]
            found[name] = []
        elif line:
            found[name].append(json.loads(line))
    assert set(found) == {case.name for case in CASES}
    return found


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_the_process_gets_what_we_read(case: Case, said: dict[str, list[dict[str, object]]]) -> None:
    unit = effective_unit(f"pb-{case.name}.service", _files(case, "oneshot"))
    started = said[case.name]
    if case.refused:
        assert started == []
        assert unit.harm
        return
    path = f"/run/said-{case.name}.env"
    environment = unit.environment_with({path: case.environment_file or None, "/run/nowhere.env": None})
    assert [list(command.words_with(environment)) for command in unit.commands] == [one["argv"] for one in started]
    assert started, "nothing was started, so nothing is shown"
    assert {k: v for k, v in environment.items() if k.startswith("T_")} == started[-1]["environment"]


def test_a_second_command_makes_a_simple_service_refuse_and_we_say_so(shared: Machine) -> None:
    case = next(c for c in CASES if c.name == "drop-in-adds")
    files = [(path.replace("drop-in-adds", "refused"), text) for path, text in _files(case, "simple")]
    shared.sh("".join(_write(path, text) for path, text in files) + "systemctl daemon-reload")
    assert shared.sh("systemctl show pb-refused.service --property=LoadState --value").strip() == "bad-setting"
    unit = effective_unit("pb-refused.service", files)
    assert any("systemd refuses" in trouble.text for trouble in unit.harm)
    with pytest.raises(CannotTell, match="2 commands"):
        _ = unit.command


def test_the_environment_file_alone(said: dict[str, list[dict[str, object]]]) -> None:
    case = next(c for c in CASES if c.environment_file)
    ours = {k: v for k, v in parse_environment_file(case.environment_file).items() if k.startswith("T_")}
    theirs = said[case.name][-1]["environment"]
    assert isinstance(theirs, dict)
    assert ours == {k: v for k, v in theirs.items() if k != "T_KEEP"}
