"""What every procedure has: a name, a purpose, and typed parameters that are validated before any host is contacted."""

from __future__ import annotations

import difflib
import math
import re
import types
import typing
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Annotated, Any

from pydantic import AfterValidator, BaseModel, ConfigDict, ValidationError

from proofbook.errors import BadParameter
from proofbook.intent import ServiceSpec

_SECRET_NAME = re.compile(r"token|secret|passw|api_?key|credential|private", re.I)


def _plan_digest(value: str) -> str:
    digits = value.removeprefix("sha256:")
    if value and (len(digits) != 64 or digits == value or any(c not in "0123456789abcdef" for c in digits)):
        raise ValueError("a plan's digest is sha256: and 64 hex digits, as the gate printed it")
    return value


#: The digest of a plan that somebody read, or "".
PlanDigest = Annotated[str, AfterValidator(_plan_digest)]


def refuse_nameless(parameters: Any) -> None:
    """An approval without a name opens nothing: refused before any host is contacted."""
    if parameters.approved and not parameters.approver:
        raise BadParameter(
            "approved is given without approver", hint="say who approves: --approver YOUR-NAME (in a notebook: approver)"
        )


class ProcedureParameters(BaseModel):
    """Base of a procedure's parameters: strict types, no unknown names, frozen."""

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True, allow_inf_nan=False)

    host: str


@dataclass(frozen=True)
class Procedure:
    """One runbook: what it is for, and what it takes."""

    name: str
    title: str
    purpose: str
    changes_host: bool
    undo: str
    takes: str
    parameters: type[ProcedureParameters]
    accepts: Callable[[Any, Any], None]  # (parameters, host spec): raises Refused for what does not fit together
    lease_s: Callable[[Any], float] = lambda _parameters: 3600.0  # how long a change may take until it is kept, seconds
    #: (parameters, host spec): the services that the runbook speaks to, whose API keys it needs
    services: Callable[[Any, Any], tuple[ServiceSpec, ...]] = lambda _parameters, _spec: ()

    def describe(self) -> dict[str, Any]:
        """As ``proofbook runbooks --json`` gives it."""
        return {
            "name": self.name,
            "title": self.title,
            "purpose": self.purpose,
            "changes_the_host": self.changes_host,
            "undo": self.undo,
            "takes": self.takes,
            "parameters": [
                {
                    "name": name,
                    "type": type_name(field.annotation),
                    "required": field.is_required(),
                    "default": None if field.is_required() else field.default,
                    "help": field.description or "",
                }
                for name, field in self.parameters.model_fields.items()
            ],
        }

    # --------------------------------------------------------------------------------------- parameters

    def validate(self, given: Mapping[str, Any]) -> Any:
        """Typed values → the procedure's parameters. Raises BadParameter: what was wrong, what is allowed, what to do."""
        known = list(self.parameters.model_fields)
        for name in given:
            if name not in known:
                raise BadParameter(f"{self.name} has no parameter {name!r}", hint=_nearest(name, known))
        missing = [n for n, f in self.parameters.model_fields.items() if f.is_required() and given.get(n) in (None, "")]
        if missing:
            raise BadParameter(
                f"{self.name} needs {', '.join(missing)}; there is no default on purpose",
                hint="say which machine: a name from proofbook.toml or ~/.ssh/config, or lab:<scenario> (`proofbook lab list`)"
                if "host" in missing
                else f"give -p {missing[0]}=…",
            )
        try:
            return self.parameters.model_validate({k: self._widen(k, v) for k, v in given.items()})
        except ValidationError as error:
            first = error.errors()[0]
            name = str(first["loc"][0]) if first["loc"] else "?"
            field = self.parameters.model_fields.get(name)
            wanted = type_name(field.annotation) if field else "?"
            why = first["msg"].removeprefix("Value error, ")
            raise BadParameter(
                f"{self.name}: {name}={first.get('input')!r} is not usable: {why}",
                hint=f"{name} is {wanted}: {field.description if field else ''}",
            ) from None

    def _widen(self, name: str, value: Any) -> Any:
        """An int where a float is wanted, and a bool written out, are no mistakes; everything else stays as it came."""
        field = self.parameters.model_fields.get(name)
        if field is None:
            return value
        if field.annotation is float and type(value) is int:
            return float(value)
        if field.annotation is bool and isinstance(value, str) and value.strip().lower() in ("true", "false"):
            return value.strip().lower() == "true"  # what plain papermill makes of `-p reboot true`
        return value

    def from_text(self, given: Mapping[str, str]) -> dict[str, Any]:
        """``-p name=value`` texts → typed values by the declared types, never guessed: ``0012`` stays text for a str."""
        typed: dict[str, Any] = {}
        for name, text in given.items():
            field = self.parameters.model_fields.get(name)
            if field is None:
                raise BadParameter(
                    f"{self.name} has no parameter {name!r}", hint=_nearest(name, list(self.parameters.model_fields))
                )
            typed[name] = _typed(self.name, name, text, field.annotation, field.description or "")
        return typed


def type_name(annotation: Any) -> str:
    """A type as people write it: ``bool``, ``float``, ``str``, ``int | None``."""
    if typing.get_origin(annotation) is typing.Literal:
        return " | ".join(map(str, typing.get_args(annotation)))
    if isinstance(annotation, types.UnionType) or typing.get_origin(annotation) is typing.Union:
        return " | ".join(type_name(a) for a in typing.get_args(annotation))
    if annotation is type(None):
        return "None"
    return getattr(annotation, "__name__", str(annotation))


def _typed(procedure: str, name: str, text: str, annotation: Any, help_text: str) -> Any:
    def refuse(allowed: str) -> BadParameter:
        return BadParameter(
            f"{procedure}: {name}={text!r} is not {allowed}", hint=f"{name} is {type_name(annotation)}: {help_text}"
        )

    if annotation is bool:
        words = {"true": True, "yes": True, "1": True, "false": False, "no": False, "0": False}
        if text.strip().lower() not in words:
            raise refuse("true or false")
        return words[text.strip().lower()]
    if annotation is int:
        if not re.fullmatch(r"[+-]?\d+", text.strip()):
            raise refuse("a whole number")
        return int(text)
    if annotation is float:
        try:
            number = float(text)
        except ValueError:
            raise refuse("a number") from None
        if not math.isfinite(number):
            raise refuse("a finite number")
        return number
    return text


def _nearest(name: str, known: list[str]) -> str:
    near = difflib.get_close_matches(name, known, n=1)
    meant = f"did you mean {near[0]!r}? " if near else ""
    return f"{meant}its parameters are: {', '.join(known)}"


def refuse_secrets(names: Mapping[str, Any]) -> None:
    """Parameters are saved with the run: a secret must never be one."""
    for name in names:
        if _SECRET_NAME.search(name):
            raise BadParameter(
                f"parameter {name!r} looks like a secret, and parameters are saved with every run",
                hint="leave it out; secrets are read where they are used, from the machine's own files",
            )
