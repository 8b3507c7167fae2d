"""Unit files as systemd reads them. What a real systemd makes of these texts is shown in tests/real/test_box_units.py."""

from __future__ import annotations

import pytest

from proofbook.errors import CannotTell
from proofbook.probes.unit_text import effective_unit, parse_environment_file, parse_unit, quote, split_words

UNIT = "sglang-qwen.service"


def argv(body: str, environment: dict[str, str] | None = None) -> tuple[str, ...]:
    unit = effective_unit(UNIT, [("/u", f"[Service]\n{body}")])
    return unit.command.words_with(environment if environment is not None else unit.environment)


def troubles(body: str) -> list[str]:
    return [str(t) for t in effective_unit(UNIT, [("/u", f"[Service]\n{body}")]).troubles]


def test_a_command_over_several_lines_and_where_it_stands() -> None:
    text = "[Unit]\nDescription=x\n\n[Service]\nExecStart=/bin/a \\\n  --b 1 \\\n  --c 2\nRestart=no\n"
    (start,) = parse_unit(text).of("Service", "ExecStart")
    assert (start.line, start.last_line) == (5, 7)
    assert start.value.split() == ["/bin/a", "--b", "1", "--c", "2"]
    assert [text[place] for place in start.at[:6]] == list("/bin/a")
    assert text[start.at[start.value.index("--c")] :].startswith("--c 2\n")


def test_a_blank_behind_the_backslash_ends_the_command_there() -> None:
    body = "ExecStart=/bin/a --b 1 \\ \n  --c 2\n  --d=3\n"
    assert argv(body) == ("/bin/a", "--b", "1", "\\")
    said = troubles(body)
    assert any(":2: a blank after the backslash" in t for t in said)
    assert any(":3: ignored, it has no '='" in t for t in said)
    assert any(":4: ignored, '--d' is no setting" in t for t in said)
    assert len(effective_unit(UNIT, [("/u", f"[Service]\n{body}")]).harm) == 4


def test_a_comment_inside_a_continuation_takes_out_its_line_alone() -> None:
    body = "ExecStart=/bin/a \\\n  --b 1 \\\n  # --speculative-algorithm NEXTN \\\n  ; --x \\\n  --c 2\n"
    assert argv(body) == ("/bin/a", "--b", "1", "--c", "2")
    said = effective_unit(UNIT, [("/u", f"[Service]\n{body}")]).troubles
    assert [t.harm for t in said] == [False, False]
    assert "'# --speculative-algorithm NEXTN \\\\' is not in effect" in str(said[0])


def test_a_hash_behind_a_flag_is_an_argument() -> None:
    assert argv("ExecStart=/bin/a --b 1 # fast\n")[-2:] == ("#", "fast")
    assert any("no comment" in t for t in troubles("ExecStart=/bin/a --b 1 # fast\n"))


def test_a_second_command_is_refused_unless_the_first_was_taken_back() -> None:
    main = ("/etc/x.service", "[Service]\nExecStart=/bin/a\n")
    two = effective_unit(UNIT, [main, ("/d/1.conf", "[Service]\nExecStart=/bin/b\n")])
    assert "systemd refuses" in str(two.harm[0])
    with pytest.raises(CannotTell, match="2 commands"):
        _ = two.command
    one = effective_unit(UNIT, [main, ("/d/1.conf", "[Service]\nExecStart=\nExecStart=/bin/b\n")])
    assert one.command.words == ("/bin/b",)
    assert one.command.file == "/d/1.conf"
    oneshot = effective_unit(UNIT, [("/u", "[Service]\nType=oneshot\nExecStart=/bin/a\nExecStart=/bin/b\n")])
    assert oneshot.harm == ()


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ('"two words" one', ["two words", "one"]),
        ("'it''s' a\"b c\"d", ["its", "ab cd"]),
        (r"a\x41\101\u00e9\s\t", ["aAAé \t"]),
        (r"\q \\ \"x\"", ["\\q", "\\", '"x"']),
        ("\"\" ''", ["", ""]),
    ],
)
def test_words(source: str, words: list[str]) -> None:
    found, _ = split_words(source)
    assert [w.text for w in found] == words
    assert "".join(source[w.start : w.end] for w in found) == source.replace(" ", "") or " " in "".join(words)


def test_a_quote_that_stays_open_makes_systemd_refuse_the_line() -> None:
    with pytest.raises(CannotTell, match="not closed"):
        split_words('"one two')
    assert any("not closed" in t for t in troubles('ExecStart=/bin/a "b\n'))


def test_variables() -> None:
    environment = {"A": "1", "LIST": "one two", "EMPTY": ""}
    body = "ExecStart=/bin/a ${A} $A x$A $LIST ${LIST} $NONE ${NONE} $$A [${EMPTY}]\n"
    assert argv(body, environment) == ("/bin/a", "1", "1", "x$A", "one", "two", "one two", "", "$A", "[]")
    assert argv("ExecStart=:/bin/a $A ${A}\n", environment) == ("/bin/a", "$A", "${A}")
    unit = effective_unit(UNIT, [("/u", f"[Service]\n{body}")])
    assert unit.command.variables() == {"A", "LIST", "NONE", "EMPTY"}


def test_specifiers() -> None:
    unit = effective_unit("serve@two.service", [("/u", "[Service]\nExecStart=/bin/%p --i %i --n %n --pc 100%% --host %H\n")])
    assert unit.command.words == ("/bin/serve", "--i", "two", "--n", "serve@two.service", "--pc", "100%", "--host", "%H")
    assert unit.command.unresolved == ("%H",)
    assert any("no specifier" in t for t in troubles("ExecStart=/bin/a %Z\n"))


def test_environment_files_win_over_the_unit_and_the_last_one_wins() -> None:
    unit = effective_unit(
        UNIT,
        [
            (
                "/u",
                "[Service]\nEnvironment=A=unit B=unit "
                "C=unit\nEnvironmentFile=/etc/a\nEnvironmentFile=-/etc/b\nUnsetEnvironment=C\n",
            )
        ],
    )
    assert unit.environment_with({"/etc/a": "A=a\n", "/etc/b": "A=b\n"}) == {"A": "b", "B": "unit"}
    assert unit.environment_with({"/etc/a": "A=a\n", "/etc/b": None}) == {"A": "a", "B": "unit"}
    with pytest.raises(CannotTell, match="/etc/a does not exist"):
        unit.environment_with({"/etc/a": None, "/etc/b": None})
    with pytest.raises(CannotTell, match="was not read"):
        unit.environment_with({"/etc/b": None})


def test_an_environment_file() -> None:
    text = '# c \\\nHIDDEN=1\nA=1\nB=\'x $A\' # y\nC="a\\"b\\z"\nD=one \\\n two\nE=a"b"  \nF=\nexport G=1\nH\n'
    assert parse_environment_file(text) == {"A": "1", "B": "x $A# y", "C": 'a"b\\z', "D": "one  two", "E": 'a"b"', "F": ""}


def test_a_reset_forgets_what_was_before() -> None:
    unit = effective_unit(
        UNIT, [("/u", "[Service]\nEnvironment=A=1\nEnvironment=\nEnvironment=B=2\nEnvironmentFile=/a\nEnvironmentFile=\n")]
    )
    assert (unit.environment, unit.environment_files) == ({"B": "2"}, ())


@pytest.mark.parametrize(
    "word", ["--tp", "a b", "", "100%", "$HOME", "${X}", 'x"y', "it's", "\\n", ";", "é", "a\tb", '{"a": "%n"}']
)
def test_what_is_quoted_comes_back(word: str) -> None:
    assert argv(f"ExecStart=/bin/a {quote(word)}\n", {"HOME": "/root", "X": "1"}) == ("/bin/a", word)


def test_a_secret_is_never_in_a_complaint() -> None:
    said = troubles("Environment=A=1 9TOKEN=hf_secret\nhf_line=hf_secret\nExecStart=/bin/a\n")
    assert said
    assert "hf_secret" not in " ".join(said)
