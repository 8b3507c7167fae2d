"""Many probes, few round trips; and what a broken answer costs."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import pytest

from proofbook.errors import CannotTell, ConnectionLost
from proofbook.intent import ContainerSpec
from proofbook.model import Command, Probe, Result, command
from proofbook.probes import drive
from proofbook.probes.base import inside, prefer_root, text_of


@dataclass(frozen=True)
class Chain(Probe[tuple[str, ...]]):
    """Asks one word after the other."""

    words: tuple[str, ...]
    name: ClassVar[str] = "test.Chain"

    def ask(self) -> Generator[Sequence[Command], Sequence[Result], tuple[str, ...]]:
        heard = []
        for word in self.words:
            (answer,) = yield [command("echo", word)]
            heard.append(answer.text)
        return tuple(heard)


@dataclass(frozen=True)
class Raises(Probe[None]):
    """Blows up while reading."""

    error: type[Exception]
    name: ClassVar[str] = "test.Raises"

    def ask(self) -> Generator[Sequence[Command], Sequence[Result], None]:
        yield [command("echo", "a")]
        raise self.error("no such luck")


@dataclass(frozen=True)
class WithoutCommands(Probe[int]):
    """Knows without asking, after an empty batch."""

    name: ClassVar[str] = "test.WithoutCommands"

    def ask(self) -> Generator[Sequence[Command], Sequence[Result], int]:
        nothing = yield []
        return len(nothing)


@dataclass(frozen=True)
class AsRoot(Probe[list[Result]]):
    """Asks as root, or without where sudo refuses."""

    name: ClassVar[str] = "test.AsRoot"

    def ask(self) -> Generator[Sequence[Command], Sequence[Result], list[Result]]:
        return (yield from prefer_root(command("dmesg", root=True), command("uname", "-r")))


@pytest.fixture
def echo(machine: Any) -> Any:
    for word in "abcd":
        machine.on("echo", word, stdout=word.upper())
    return machine


def test_a_round_is_one_gather_and_equal_commands_are_asked_once(echo: Any) -> None:
    probes = [Chain(("a", "b")), Chain(("a", "c", "d")), Chain(("a",))]
    answers = drive(probes, echo.gather)
    assert [answers[p].value for p in probes] == [("A", "B"), ("A", "C", "D"), ("A",)]
    assert [[c.argv[1] for c in batch] for batch in echo.rounds] == [["a"], ["b", "c"], ["d"]]
    assert answers[probes[0]].results[0] is answers[probes[1]].results[0]


def test_equal_probes_are_one_question(echo: Any) -> None:
    assert len(drive([Chain(("a",)), Chain(("a",))], echo.gather)) == 1


def test_a_probe_that_asks_nothing_costs_no_round_trip(echo: Any) -> None:
    assert drive([WithoutCommands()], echo.gather)[WithoutCommands()].value == 0
    assert echo.rounds == []
    assert drive([], echo.gather) == {}


@pytest.mark.parametrize("error", [TypeError, KeyError, ValueError, RecursionError, AttributeError])
def test_a_reader_that_breaks_costs_its_own_answer_and_names_the_error(echo: Any, error: type[Exception]) -> None:
    answers = drive([Raises(error), Chain(("a", "b"))], echo.gather)
    assert answers[Raises(error)].unknown.startswith(f"cannot read the answer: {error.__name__}: ")
    assert answers[Raises(error)].results[0].text == "A"
    assert answers[Chain(("a", "b"))].value == ("A", "B")


def test_cannot_tell_is_the_reason_as_it_is(echo: Any) -> None:
    assert drive([Raises(CannotTell)], echo.gather)[Raises(CannotTell)].unknown == "no such luck"


def test_a_lost_connection_is_not_an_answer(echo: Any) -> None:
    def lost(commands: Sequence[Command]) -> list[Result]:
        raise ConnectionLost("gone")

    with pytest.raises(ConnectionLost):
        drive([Chain(("a",))], lost)


def test_a_gather_that_loses_results_is_a_programming_error(echo: Any) -> None:
    with pytest.raises(ValueError):
        drive([Chain(("a",))], lambda commands: [])


@pytest.mark.parametrize(
    "refusal",
    [
        {"stderr": "sudo: a password is required\n", "status": 1},
        {"stderr": "sudo: a password is required\n", "status": None, "trouble": "it needs root, and `sudo -n` refuses: …"},
        {"stderr": "sh: 1: sudo: not found\n", "status": None, "trouble": "it needs root, and `sudo -n` refuses: …"},
    ],
)
def test_what_sudo_refuses_is_asked_again_without_root(machine: Any, refusal: dict[str, Any]) -> None:
    machine.on("uname", stdout="6.8").on("dmesg", **refusal)
    value = machine.value(AsRoot())
    assert [[(c.argv[0], c.root) for c in batch] for batch in machine.rounds] == [
        [("dmesg", True), ("uname", False)],
        [("dmesg", False)],
    ]
    assert [r.command.argv[0] for r in value] == ["dmesg", "uname"]


def test_what_root_could_not_finish_is_not_asked_again(machine: Any) -> None:
    machine.on("uname", stdout="6.8").on(
        "dmesg", status=None, trouble="it did not finish within 20 s and was ended", timed_out=True
    )
    machine.value(AsRoot())
    assert len(machine.rounds) == 1


def test_inside_a_container_only_root_may_go() -> None:
    spec = ContainerSpec(name="llm-two", kind="pct", id="102")
    wrapped = inside(spec, command("uname", "-r", timeout_s=7))
    assert wrapped.argv == ("pct", "exec", "102", "--", "uname", "-r")
    assert wrapped.root and wrapped.timeout_s == 7
    assert inside(None, command("uname")) == command("uname")


@pytest.mark.parametrize(
    ("said", "reason"),
    [
        ({"stderr": "sh: 1: frob: not found\n", "status": 127}, "`frob` is not there"),
        ({"stderr": "sudo: a password is required\n", "status": 1}, "needs root, and sudo refused"),
        ({"status": None, "trouble": "the connection was lost"}, "the connection was lost"),
        ({"timed_out": True}, "did not finish within 20 s"),
        ({"stdout": "abc", "lost": 5}, "5 bytes were not kept"),
        ({"stderr": "one\ntwo\n", "status": 3}, "exit status 3: two"),
    ],
)
def test_why_a_command_has_no_answer(machine: Any, said: dict[str, Any], reason: str) -> None:
    machine.on("frob", **said)
    (result,) = machine.gather([command("frob", root=True)])
    with pytest.raises(CannotTell, match=reason):
        text_of(result)


def test_a_reason_does_not_drown_in_a_long_word(machine: Any) -> None:
    machine.on("frob", status=3, stderr="no\n")
    (result,) = machine.gather([command("frob", "--property=" + "A," * 200, "x")])
    with pytest.raises(CannotTell) as why:
        text_of(result)
    assert len(str(why.value)) < 120 and str(why.value).endswith("… x` ended with exit status 3: no")
