"""One reset of a GPU: the command that makes it, and what its program tells as a value.

The events, one JSON object a line, in the order in which they come:

``refused``  why                                          it was not begun: not listed, nobody answers, it cannot be read
``begin``    address, method, listed, vendor, driver      from here on the device is touched
``step``     step, error                                  unbind · method · reset · put-back · bind; error "": the kernel took it
``vendor``   vendor, error                                who the device is after the reset, by its configuration space
``listed``   listed                                       its reset methods after they were put back
``blocked``  step                                         this has not returned in its time; nothing more was touched
``end``      driver                                       what it is bound to now, "" for nothing
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from proofbook.errors import CannotTell
from proofbook.model import Command, Result, pci_address
from proofbook.remote.ask import _program
from proofbook.remote.reset_attempt import DEFAULTS

__all__ = ["RESET_ATTEMPT", "RESET_S", "ResetLog", "parse_reset", "reset_command"]

#: Text of reset_attempt.py.
RESET_ATTEMPT = _program("reset_attempt.py")
#: The longest that one attempt takes, in seconds: each of its steps until it counts as blocked.
RESET_S = sum(float(DEFAULTS[name]) for name in ("unbind_s", "reset_s", "bind_s")) + 5 * float(DEFAULTS["read_s"])


def reset_command(address: str, method: str) -> Command:
    """Take the driver off, reset the device by ``method`` if the kernel lists it, give the device back to the driver."""
    options = json.dumps({"address": pci_address(address), "method": method}, sort_keys=True, separators=(",", ":"))
    return Command(("python3", "-c", RESET_ATTEMPT, options), timeout_s=RESET_S + 30.0, root=True)


@dataclass(frozen=True, slots=True)
class ResetLog:
    """What one attempt came to.

    ``refused``: why it was not begun and nothing was touched, "" when it was. Vendor ids are ``0x10de``, ``0xffff`` when nobody
    answers, "" when they cannot be read; None: not told. ``errors``: step to the kernel's error, of the steps that it did not
    take; ``done``: those that it took. ``blocked``: the step that did not return. ``driver``: bound in the end; None: not told.
    """

    refused: str = ""
    listed: tuple[str, ...] = ()
    listed_after: tuple[str, ...] | None = None
    vendor_before: str = ""
    vendor_after: str | None = None
    driver_before: str = ""
    driver: str | None = None
    done: tuple[str, ...] = ()
    errors: Mapping[str, str] = field(default_factory=dict)
    blocked: str = ""

    @property
    def lost(self) -> bool:
        """Whether it does not answer as what it was: all ones, the id of "not ready yet" (0x0001), nothing that can be read."""
        return self.vendor_after is not None and self.vendor_after != self.vendor_before

    @property
    def ended(self) -> bool:
        """Whether the program told everything."""
        return bool(self.refused or self.blocked) or self.driver is not None


def parse_reset(result: Result) -> ResetLog:
    """Read the program's events. Raises CannotTell when it did not run, or said something else."""
    events = []
    for line in result.text.splitlines():
        try:
            event = json.loads(line)
            events.append((str(event.pop("event")), event))
        except (ValueError, TypeError, KeyError, AttributeError):
            raise CannotTell(f"the program that resets said something else: {line[:120]!r}") from None
    if not events:
        said = (result.error_text.strip() or result.trouble or f"exit status {result.exit_status}").splitlines()
        raise CannotTell(f"the program that resets did not run: {said[-1][:200]}")
    log: dict[str, Any] = {"done": (), "errors": {}}
    try:
        for name, facts in events:
            _take(log, name, facts)
    except KeyError as missing:
        raise CannotTell(f"the program that resets left out {missing}") from None
    return ResetLog(**log)


def _take(log: dict[str, Any], name: str, facts: Mapping[str, Any]) -> None:
    match name:
        case "refused":
            log["refused"] = str(facts["why"])
        case "begin":
            log |= {"listed": tuple(facts["listed"]), "vendor_before": facts["vendor"], "driver_before": facts["driver"]}
        case "step" if facts["error"]:
            log["errors"][facts["step"]] = facts["error"]
        case "step":
            log["done"] = (*log["done"], facts["step"])
        case "vendor":
            log["vendor_after"] = facts["vendor"]
        case "listed":
            log["listed_after"] = tuple(facts["listed"])
        case "blocked":
            log["blocked"] = facts["step"]
        case "end":
            log["driver"] = facts["driver"]
        case _:
            raise CannotTell(f"the program that resets has an event {name!r} that this version does not know")
