"""What is wanted of a server: its speculation, as the flags and variables of the release that is installed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from proofbook.probes.sglang import release
from proofbook.probes.sglang_flags import FlagSet

__all__ = ["Speculation"]

#: SGLANG_ENABLE_SPEC_V2 exists and is off by itself in these releases; later ones have it on, and 0.5.14 removed it.
_SPEC_V2_OFF = ((0, 5, 5), (0, 5, 10))
#: Names that one flag had over the releases, the newest first.
_MAMBA_STRATEGY = ("--mamba-radix-cache-strategy", "--mamba-scheduler-strategy")


@dataclass(frozen=True)
class Speculation:
    """The speculation that a server should run with.

    ``num_draft_tokens`` 0 means ``num_steps + 1``, which is what the server itself makes of it with topk 1. "" and None are
    no opinion: what the unit says stays. ``more`` are further flags with their values (None for a switch).
    """

    algorithm: str = "NEXTN"
    num_steps: int = 5
    eagle_topk: int = 1
    num_draft_tokens: int = 0
    draft_model_path: str = ""
    mem_fraction_static: float | None = None
    max_running_requests: int | None = None
    mamba_strategy: str = "extra_buffer"
    more: tuple[tuple[str, str | None], ...] = ()
    environment: tuple[tuple[str, str], ...] = ()

    @property
    def draft_tokens(self) -> int:
        return self.num_draft_tokens or self.num_steps + 1

    @property
    def effective_draft_tokens(self) -> int:
        """What the server makes of it: with topk 1 always ``num_steps + 1``, whatever was asked."""
        return self.num_steps + 1 if self.eagle_topk == 1 else self.draft_tokens

    @property
    def stored_algorithm(self) -> str:
        """As the server stores and shows it: NEXTN becomes EAGLE."""
        name = self.algorithm.upper()
        return "EAGLE" if name == "NEXTN" else name

    def flags(self, known: FlagSet) -> dict[str, str | None]:
        """Flag to value (None: a switch), named as the installed release names them."""
        wanted: dict[str, str | None] = {
            "--speculative-algorithm": self.algorithm,
            "--speculative-num-steps": str(self.num_steps),
            "--speculative-eagle-topk": str(self.eagle_topk),
            "--speculative-num-draft-tokens": str(self.draft_tokens),
        }
        if self.draft_model_path:
            wanted["--speculative-draft-model-path"] = self.draft_model_path
        if self.mem_fraction_static is not None:
            wanted["--mem-fraction-static"] = f"{self.mem_fraction_static:g}"
        if self.max_running_requests is not None:
            wanted["--max-running-requests"] = str(self.max_running_requests)
        if self.mamba_strategy:
            name = next((n for n in _MAMBA_STRATEGY if n in known.flags), _MAMBA_STRATEGY[0])
            wanted[name] = self.mamba_strategy
        return wanted | dict(self.more)

    def variables(self, version: str) -> Mapping[str, str]:
        """The environment that this needs in a release. Raises CannotTell when the release is not known."""
        oldest, newest = _SPEC_V2_OFF
        needed = {"SGLANG_ENABLE_SPEC_V2": "1"} if oldest <= release(version)[:3] <= newest else {}
        return needed | dict(self.environment)
