"""How probes are asked: many generators, few round trips; and the small helpers that their answers are read with."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Generic, TypeVar

from proofbook.errors import CannotTell
from proofbook.intent import ContainerSpec
from proofbook.model import Command, Probe, Result

__all__ = ["Answer", "Gather", "drive", "inside", "prefer_root", "said", "text_of"]

T = TypeVar("T")

#: Runs a batch of commands and gives their results in the same order (``Transport.gather``).
Gather = Callable[[Sequence[Command]], Sequence[Result]]


@dataclass(frozen=True, slots=True)
class Answer(Generic[T]):
    """What a probe came to: a value, or why it is unknown (``unknown`` is "" when the value is known).

    ``results`` are all results that the probe was given, in order. Two probes that asked an equal command in the same
    round hold the very same :class:`Result` object, so evidence can be kept once by identity.
    """

    value: T | None
    unknown: str
    results: tuple[Result, ...]

    @property
    def known(self) -> bool:
        return not self.unknown


def drive(probes: Iterable[Probe[Any]], gather: Gather) -> dict[Probe[Any], Answer[Any]]:
    """Ask many probes together.

    All generators advance in rounds: the batches of one round become one ``gather`` call in which equal commands are
    asked once. A probe that cannot know its answer, or whose reading of it blows up, is unknown with the reason; the
    others go on. What ``gather`` itself raises (ConnectionLost, …) passes through.
    """
    asked = {probe: _Asking(probe) for probe in probes}
    try:
        while waiting := [a for a in asked.values() if a.answer is None]:
            wanted = list(dict.fromkeys(command for a in waiting for command in a.batch))
            results = dict(zip(wanted, gather(wanted), strict=True)) if wanted else {}
            for asking in waiting:
                asking.advance([results[command] for command in asking.batch])
        return {probe: asking.answer for probe, asking in asked.items() if asking.answer is not None}
    finally:
        for asking in asked.values():
            asking.generator.close()


class _Asking:
    """One probe's generator on its way: the batch that it waits for, or its answer."""

    def __init__(self, probe: Probe[Any]) -> None:
        self.generator: Generator[Sequence[Command], Sequence[Result], Any] = probe.ask()
        self.batch: tuple[Command, ...] = ()
        self.results: list[Result] = []
        self.answer: Answer[Any] | None = None
        self._step(lambda: next(self.generator))

    def advance(self, results: Sequence[Result]) -> None:
        self.results += results
        self._step(lambda: self.generator.send(results))

    def _step(self, move: Callable[[], Sequence[Command]]) -> None:
        try:
            self.batch = tuple(move())
        except StopIteration as done:
            self.answer = Answer(done.value, "", tuple(self.results))
        except CannotTell as why:
            self.answer = Answer(None, str(why), tuple(self.results))
        except Exception as error:  # a machine can say anything: an answer that breaks the reader costs this answer, not the run
            self.answer = Answer(None, f"cannot read the answer: {type(error).__name__}: {error}", tuple(self.results))


def inside(container: ContainerSpec | None, asked: Command) -> Command:
    """``asked`` as it is on the host, or wrapped so that it runs in ``container`` (only root may enter one)."""
    if container is None:
        return asked
    return replace(asked, argv=(*container.enter(), *asked.argv), root=True)


def prefer_root(*commands: Command) -> Generator[Sequence[Command], Sequence[Result], list[Result]]:
    """Ask ``commands``, and those that sudo refuses once more without root.

    WHY: a login in the group systemd-journal or adm reads the whole journal without being root. What it may not see, the
    program says itself then.
    """
    results = list((yield commands))
    refused = [n for n, result in enumerate(results) if result.command.root and _sudo_refused(result)]
    if refused:
        again = yield [replace(results[n].command, root=False) for n in refused]
        for n, result in zip(refused, again, strict=True):
            results[n] = result
    return results


def _sudo_refused(result: Result) -> bool:
    """sudo said no, or is not there: as the transport found out, or by sudo's own word."""
    if result.exit_status is None:
        return result.command.root and "sudo" in result.trouble
    return result.exit_status != 0 and result.error_text.startswith("sudo:")


def said(result: Result) -> str:
    """The last line that a failed command said, stderr first; "" when it said nothing."""
    lines = (result.error_text.strip() or result.text.strip()).splitlines()
    return lines[-1].strip()[:300] if lines else ""


def text_of(result: Result, *allowed: int) -> str:
    """``Result.expect`` that also says what a missing program or a refused sudo looks like. Raises CannotTell."""
    program = result.command.argv[0]
    if _sudo_refused(result):
        raise CannotTell(f"`{program}` needs root, and sudo refused: {said(result)}")
    if result.exit_status == 127:
        raise CannotTell(f"`{program}` is not there: {said(result) or 'exit status 127'}")
    # A reason quotes the command: a program or a list of forty properties as one of its words would drown it.
    words = tuple(word if len(word) <= 60 else f"{word[:40]}…" for word in result.command.argv)
    return replace(result, command=replace(result.command, argv=words)).expect(*allowed)
