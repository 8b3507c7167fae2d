"""The fixed prompts: the same texts in every arm, and a digest that says so."""

from __future__ import annotations

import hashlib
import json
import random
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cache
from importlib.resources import files
from itertools import count, islice
from typing import Any

__all__ = ["Prompt", "PromptSet", "load"]

#: Orders each round; another number would be another experiment.
_SEED = 20260309


@dataclass(frozen=True, slots=True)
class Prompt:
    """One text to be asked, and how it is to be answered. ``wrap`` is the template that it is put into."""

    id: str
    kind: str
    text: str
    wrap: str
    max_tokens: int
    temperature: float = 0.0
    top_p: float = 1.0
    json_schema: str = ""
    must_agree: bool = False

    def body(self) -> dict[str, Any]:
        """The body of ``POST /generate``.

        WHY no ``ignore_eos``: what a model says after its end is degenerate, and degenerate text is accepted like no other.
        """
        sampling: dict[str, Any] = {"temperature": self.temperature, "max_new_tokens": self.max_tokens}
        if self.top_p != 1.0:
            sampling["top_p"] = self.top_p
        if self.json_schema:
            sampling["json_schema"] = self.json_schema
        return {"text": self.wrap.replace("{text}", self.text), "sampling_params": sampling, "stream": False}


@dataclass(frozen=True)
class PromptSet:
    """All prompts under one template. ``digest`` (sha256, hex) changes with any text or setting."""

    template: str
    digest: str
    warm_up: Prompt
    timing: tuple[Prompt, ...]
    control: Mapping[str, Prompt]

    def endless(self) -> Iterator[tuple[int, Prompt]]:
        """Every timing prompt once in each round, as (round from 0, prompt), in an order that never changes.

        WHY each round says its number first: equal prefixes of two rounds would be answered from the prefix cache.
        """
        order = random.Random(_SEED)
        for number in count():
            shuffled = list(self.timing)
            order.shuffle(shuffled)
            yield from ((number, replace(prompt, text=f"Exercise {number + 1}.\n{prompt.text}")) for prompt in shuffled)

    def rounds(self, number: int) -> list[tuple[int, Prompt]]:
        """The first ``number`` rounds of it."""
        return list(islice(self.endless(), number * len(self.timing)))

    def burst(self, number: int) -> list[Prompt]:
        """``number`` prompts that differ in a number."""
        base = self.control["burst"]
        return [replace(base, text=base.text.replace("{number}", str(4100 + n))) for n in range(number)]


@cache
def load(template: str = "chatml") -> PromptSet:
    """The prompt set under ``template`` (a name in ``[templates]``). Raises ValueError for a template that there is not."""
    data = tomllib.loads(files("proofbook.measures").joinpath("prompts.toml").read_text("utf-8"))
    if template not in data["templates"]:
        raise ValueError(f"there is no prompt template {template!r}; there are {', '.join(sorted(data['templates']))}")
    wrap = data["templates"][template]
    longest = data["max_tokens"]
    canonical = json.dumps([template, data], sort_keys=True, separators=(",", ":"))
    return PromptSet(
        template=template,
        digest=hashlib.sha256(canonical.encode()).hexdigest(),
        warm_up=_prompt({"id": "warm-up", "kind": "short", **data["warm_up"]}, wrap, longest),
        timing=tuple(_prompt(entry, wrap, longest) for entry in data["timing"]),
        control={name: _prompt(entry, wrap, longest) for name, entry in data["control"].items()},
    )


def _prompt(entry: Mapping[str, Any], wrap: str, longest: int) -> Prompt:
    fields = {name: value for name, value in entry.items() if not name.startswith("filler")}
    lines = (entry["filler"].replace("{n}", str(n + 1)) for n in range(entry["filler_lines"])) if "filler" in entry else ()
    text = entry["text"].strip("\n").replace("{filler}", "\n".join(lines))
    return Prompt(**{"max_tokens": longest, **fields, "text": text, "wrap": wrap})
