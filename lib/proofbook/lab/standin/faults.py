"""What can be wrong with a stand-in server, by name, with its parameters and their defaults.

A fault bites only a server that runs with speculation, as the faults of an enablement do, unless its ``always`` is true.
What is the machine's business (an old owner of the port, a leftover process, a lost drop-in, a journal that drops lines)
is not here: whoever runs the engine carries it out.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

#: Name: defaults of its parameters.
KNOWN: Mapping[str, Mapping[str, Any]] = {
    "silently-off": {},  # the arguments are echoed, no draft is loaded and none is used
    "draft-weights-missing": {},  # the draft loads without a word, and none of its tokens is accepted
    "draft-oom": {"other_gib": 23.0},  # somebody else takes memory before the draft is loaded
    "not-enough-memory": {"extra_gib": 3.5},  # the weights take more than they should
    "out-of-memory": {},  # the start ends while the weights are loaded
    "hang-at-graphs": {},  # the graphs are never captured; the port never opens
    "crash-on-first-request": {},
    "crash-on-structured": {},
    "crash-on-nth": {"n": 17},
    "crash-after-minutes": {"minutes": 4.0},
    "zombie-scheduler": {"n": 3, "rank": 2},  # a rank is gone, the main process stays
    "hang-health-200": {"n": 3},  # generation never ends; the health address stays well
    "slow-start": {"factor": 8.0},
    "p2p-hang": {},  # NCCL waits for ever at the start, unless NCCL_P2P_DISABLE=1 is in the environment
    "slower-than-before": {"overhead": 4.2},
    "grown-slow": {"factor": 1.8, "after_hours": 24.0},  # what has run for long decodes slower, until it is started anew
    "gain-only-low-concurrency": {"slope": 0.55},
    "wrong-after-cache-hit": {},
}


def taken(wanted: Mapping[str, Mapping[str, Any]], *, speculative: bool) -> dict[str, dict[str, Any]]:
    """The faults that bite, with their parameters. Raises ValueError for a name or parameter that does not exist."""
    bite = {}
    for name, given in wanted.items():
        if name not in KNOWN:
            raise ValueError(f"no such fault of the server: {name!r}; there are {', '.join(sorted(KNOWN))}")
        if strange := set(given) - set(KNOWN[name]) - {"always"}:
            raise ValueError(f"fault {name!r} has no {', '.join(sorted(strange))}")
        if speculative or given.get("always"):
            bite[name] = {**KNOWN[name], **{k: v for k, v in given.items() if k != "always"}}
    return bite
