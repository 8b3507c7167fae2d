"""The live gate without a front end: clicks, words typed, and that neither opens anything but the plan that it was for."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from proofbook.live import TRIES, LiveGate
from proofbook.model import Action, Identity, Plan

PLAN = Plan(
    change="reboot",
    title="Reboot gpu-hv1",
    host=Identity("gpu01", "gpu-hv1", "m" * 32, "b" * 32, "k", "root", 0),
    pre_state={},
    actions=(Action("ask systemd for an orderly reboot", ("systemctl", "reboot")),),
    undo=(),
    diff="",
    cannot_undo=("work that runs now is stopped",),
    expected_s=240,
)
OTHER = replace(PLAN, pre_state={"boot": "another"})

Typing = Callable[..., list[str]]


@pytest.fixture
def typing(monkeypatch: pytest.MonkeyPatch) -> Typing:
    """Answer input() with these words, in turn; the list of the questions that were asked."""

    def answer(*words: str) -> list[str]:
        left, asked = list(words), []

        def typed(prompt: str) -> str:
            asked.append(prompt)
            return left.pop(0)

        monkeypatch.setattr("builtins.input", typed)
        return asked

    return answer


def clicks(gate: LiveGate, plan: Plan, *, yes: bool) -> None:
    question = gate._questions[plan.digest]
    (question._approve if yes else question._stop).click()


def test_a_click_answers_and_nothing_is_asked(typing: Typing) -> None:
    asked = typing()
    gate = LiveGate("A. Engineer")
    gate.show(PLAN)
    clicks(gate, PLAN, yes=True)
    assert gate.ask(PLAN) == ("A. Engineer", "button")
    assert asked == []


def test_the_last_click_before_the_gate_counts(typing: Typing) -> None:
    gate = LiveGate("A. Engineer")
    gate.show(PLAN)
    clicks(gate, PLAN, yes=True)
    clicks(gate, PLAN, yes=False)
    assert gate.ask(PLAN) == ("", "button")


def test_a_click_is_for_its_plan_alone(typing: Typing) -> None:
    asked = typing("")
    gate = LiveGate("A. Engineer")
    gate.show(PLAN)
    gate.show(OTHER)
    clicks(gate, PLAN, yes=True)
    assert gate.ask(OTHER) == ("", "typed")
    assert len(asked) == 1


def test_a_click_that_comes_while_the_gate_asks_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    gate = LiveGate("A. Engineer")
    gate.show(PLAN)

    def clicked_meanwhile(_prompt: str) -> str:
        clicks(gate, PLAN, yes=True)
        return ""

    monkeypatch.setattr("builtins.input", clicked_meanwhile)
    assert gate.ask(PLAN) == ("", "typed")


@pytest.mark.parametrize(
    ("words", "approved"),
    [
        (["gpu-hv1"], True),
        ([" gpu-hv1 "], True),
        ([""], False),
        (["yes", "gpu-hv1"], True),
        (["gpu-hv2", ""], False),
        (["y", "yes", "approve"], False),
    ],
)
def test_only_the_name_of_the_machine_approves(typing: Typing, words: list[str], approved: bool) -> None:
    asked = typing(*words)
    assert gate_answer(LiveGate("A. Engineer")) == ("A. Engineer" if approved else "", "typed")
    assert len(asked) == len(words) <= TRIES


def gate_answer(gate: LiveGate) -> tuple[str, str]:
    gate.show(PLAN)
    return gate.ask(PLAN)


def test_an_answered_plan_that_is_shown_again_has_no_live_buttons(typing: Typing) -> None:
    typing("gpu-hv1")
    gate = LiveGate("A. Engineer")
    assert gate_answer(gate) == ("A. Engineer", "typed")
    gate.show(PLAN)
    question = gate._questions[PLAN.digest]
    assert question._approve.disabled and question._stop.disabled


def test_a_plan_that_changes_nothing_asks_nothing() -> None:
    gate = LiveGate("A. Engineer")
    gate.show(replace(PLAN, actions=()))
    assert gate._questions == {}
