"""MTP enablement: give a server speculation under a guard, prove that drafts are accepted, keep it only if it pays.

The cells of ``runbooks/mtp-enablement.ipynb`` say these compositions in one line each. As soon as a rung of the ladder is
known to fail, the steps behind it are left out: an outage is not prolonged for the sake of a number.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from difflib import get_close_matches
from typing import Any, Literal

from pydantic import Field, ValidationError, field_validator

from proofbook.changes.nothing import NotToBeMade
from proofbook.changes.unit_edit import UnitEdit
from proofbook.changes.unit_file import EnableMTP, argv_digest
from proofbook.checks.held import HeldByNobody
from proofbook.checks.looking import counted
from proofbook.checks.mtp import accepted as accepted_checks
from proofbook.checks.mtp.asked import CanBeAsked
from proofbook.checks.mtp.effect import took_effect
from proofbook.checks.mtp.fit import KEY, FitToChange
from proofbook.checks.mtp.holds import Holds
from proofbook.checks.mtp.kept import KeptBefore
from proofbook.checks.mtp.ladder import NEEDED, NOTHING_TO_DO
from proofbook.checks.mtp.ladder import decide as climb
from proofbook.checks.mtp.nothing import NOT_ASKED, NothingToChange
from proofbook.checks.mtp.speculation import Speculation
from proofbook.checks.mtp.start import read_start
from proofbook.checks.mtp.worth import NotDrift, WorthIt
from proofbook.errors import BadParameter, CannotTell
from proofbook.intent import ContainerSpec, ServiceSpec
from proofbook.inventory import HostSpec
from proofbook.measures.control import ControlPrompts
from proofbook.measures.prompts import load as prompts
from proofbook.measures.said import ServerSays
from proofbook.measures.serving import Baseline, Gain, GainAgain
from proofbook.measures.stability import Stability
from proofbook.model import Applied, Change, Check, Decision, Finding, Measure, Measurement, Verdict
from proofbook.probes.change_state import GuardState
from proofbook.probes.journal import UnitJournal
from proofbook.probes.sglang import Version
from proofbook.probes.systemd import UnitProcess
from proofbook.probes.unit_files import UnitFiles
from proofbook.procedures.base import PlanDigest, Procedure, ProcedureParameters, refuse_nameless
from proofbook.redact import secret_name
from proofbook.run import Findings, Run
from proofbook.view import Picture, accept_chart, gain_chart, start_chart

#: Minutes that the questions of a guarded change take beside start and stability window.
_QUESTIONS_MIN = 25.0
#: Minutes that the third arm takes beside its two starts: the old configuration's prompts, and a look at the new one again.
_AGAIN_MIN = 15.0
#: A fall of the requests at once, or of the cache, beyond this share is a limit of what is decided.
_NOTABLE_FALL = 0.10
#: How the fact begins that says what the memory of drafts takes away from requests.
_ROOM = "requests at once: "
#: Under what name, in which form, a run stores that it kept a speculation.
_KEPT, _KEPT_SCHEMA = "mtp.kept", 1
#: The look in which the process that would stay is asked, once the change was suspended.
IN_EFFECT_AGAIN = "in effect again"


class Parameters(ProcedureParameters):
    host: str = Field(description="a name from proofbook.toml or ~/.ssh/config, or lab:<scenario>; no default on purpose")
    unit: str = Field("", description="the server's systemd unit, [container/]unit; empty: the inventory's only service")
    algorithm: str = Field(
        "NEXTN", min_length=1, max_length=40, description="speculative algorithm, as the installed release names it"
    )
    num_steps: int = Field(5, ge=1, le=16, description="draft steps, 1-16")
    eagle_topk: int = Field(1, ge=1, le=32, description="branches of a draft step, 1-32")
    num_draft_tokens: int = Field(0, ge=0, le=256, description="draft tokens of a verify step; 0: num_steps + 1")
    draft_model_path: str = Field("", description="a draft model of its own; empty: the layers that the checkpoint brings")
    mem_fraction_static: float = Field(
        0.0, ge=0, lt=1, description="share of GPU memory for weights and caches, 0-1; 0: as the unit has it"
    )
    max_running_requests: int = Field(0, ge=0, le=4096, description="requests that run at once; 0: as the unit has it")
    mamba_strategy: str = Field(
        "extra_buffer", description="state strategy of hybrid models, named as the release names it; empty: as the unit has it"
    )
    environment: str = Field("", description="further variables, NAME=value separated by commas; never secrets")
    style: Literal["drop-in", "edit"] = Field("drop-in", description="drop-in, or edit: change the file that holds the command")
    kill_leftovers: bool = Field(False, description="true kills what outlives the stop, inside the unit's control group only")
    api_key_env: str = Field("", description="the variable, here, that holds the server's API key; empty: as the inventory says")
    api_key_file: str = Field("", description="or the file, here, mode 600, that holds it")
    concurrency: str = Field("1,2,4,8", description="requests at once that are compared, separated by commas")
    must_gain_at: str = Field("", description="concurrencies that must gain, separated by commas; empty: any one")
    stability_minutes: float = Field(10.0, gt=0, le=240, description="how long it must hold under load, minutes")
    measure_again: bool = Field(
        False, description="true measures the old configuration once more after the change (A-B-A): two more restarts"
    )
    guard_minutes: float = Field(
        90.0, gt=0, le=1440, description="the machine takes the change back by itself after so many minutes unless it is kept"
    )
    approver: str = Field("", max_length=200, description="who approves the change (headless)")
    approved: PlanDigest = Field("", description="the digest of the plan that was read; empty stops at the gate")

    @field_validator("concurrency", "must_gain_at")
    @classmethod
    def _levels_are_numbers(cls, value: str) -> str:
        for text in filter(None, (t.strip() for t in value.split(","))):
            if not text.isdigit() or not 1 <= int(text) <= 256:
                raise ValueError(f"{text!r} is no number of requests (1-256)")
        return value

    @field_validator("environment")
    @classmethod
    def _variables(cls, value: str) -> str:
        for text in filter(None, (t.strip() for t in value.split(","))):
            name, equals, _ = text.partition("=")
            if not equals or not name.isidentifier():
                raise ValueError(f"{text!r} is not NAME=value")
            if secret_name(name):
                raise ValueError(
                    f"{name} is the name of a secret, whose value would stand in the plan; give it to the unit (EnvironmentFile=)"
                )
        return value

    @property
    def levels(self) -> tuple[int, ...]:
        return tuple(sorted({int(t) for t in self.concurrency.split(",") if t.strip()}))

    @property
    def wanted_levels(self) -> tuple[int, ...]:
        return tuple(sorted({int(t) for t in self.must_gain_at.split(",") if t.strip()}))

    @property
    def speculation(self) -> Speculation:
        pairs = [t.strip().partition("=") for t in self.environment.split(",") if t.strip()]
        return Speculation(
            algorithm=self.algorithm,
            num_steps=self.num_steps,
            eagle_topk=self.eagle_topk,
            num_draft_tokens=self.num_draft_tokens,
            draft_model_path=self.draft_model_path,
            mem_fraction_static=self.mem_fraction_static or None,
            max_running_requests=self.max_running_requests or None,
            mamba_strategy=self.mamba_strategy,
            environment=tuple((name, value) for name, _, value in pairs),
        )


def accepts(parameters: Parameters, spec: HostSpec) -> None:
    """Refuse, before any contact, what cannot come out well on this host."""
    service = _service(parameters, spec)
    if not parameters.levels:
        raise BadParameter("concurrency names no level", hint="e.g. concurrency=1,2,4,8")
    if not set(parameters.wanted_levels) <= set(parameters.levels):
        raise BadParameter(
            "must_gain_at names a concurrency that is not measured", hint=f"concurrency is {parameters.concurrency}"
        )
    needed = 2 * service.ready_s / 60 + parameters.stability_minutes + _QUESTIONS_MIN
    if parameters.measure_again:
        needed += 2 * service.ready_s / 60 + _AGAIN_MIN
    if parameters.guard_minutes < needed:
        raise BadParameter(
            f"guard_minutes={parameters.guard_minutes:g} is too short: it would be over while the change is looked at",
            hint=f"starts, questions and stability window need about {needed:.0f} minutes",
        )
    refuse_nameless(parameters)


def _service(parameters: Parameters, spec: HostSpec) -> ServiceSpec:
    found = _declared(parameters, spec)
    if not parameters.api_key_env and not parameters.api_key_file:
        return found
    named = {"api_key_env": parameters.api_key_env, "api_key_file": parameters.api_key_file}
    try:
        return ServiceSpec(**(found.model_dump() | named))
    except ValidationError as error:
        why = str(error.errors()[0]["msg"]).removeprefix("Value error, ")
        raise BadParameter(f"api_key_env or api_key_file is not usable: {why}", hint=KEY) from None


def _declared(parameters: Parameters, spec: HostSpec) -> ServiceSpec:
    if parameters.unit:
        found = spec.service(parameters.unit)
        if spec.services and found not in spec.services:
            raise _undeclared(parameters.unit, found, spec)
        return found
    if len(spec.services) != 1:
        named = ", ".join(s.spec for s in spec.services) or "none"
        raise BadParameter(
            f"which server of {spec.name}? its inventory declares {named}", hint="say unit=[container/]<name>.service"
        )
    return spec.services[0]


def _undeclared(text: str, asked: ServiceSpec, spec: HostSpec) -> BadParameter:
    """A name that the inventory does not know, with the nearest that it does: the same unit elsewhere, or one spelt alike."""
    names = [s.spec for s in spec.services]
    same = [s.spec for s in spec.services if s.name == asked.name]
    near = same or get_close_matches(asked.spec, names, n=1) or names
    return BadParameter(
        f"unit={text}: the inventory of {spec.name} declares no such service, but {', '.join(names)}",
        hint=f"say unit={near[0]}, or declare it in proofbook.toml",
    )


PROCEDURE = Procedure(
    name="mtp-enablement",
    title="MTP enablement",
    purpose="Give a serving unit multi-token prediction under a guard, prove that drafts are accepted, keep it only if it pays.",
    changes_host=True,
    undo="the guard on the machine, or `proofbook rollback`: the old files byte for byte, and the old command serving again",
    takes="40 to 90 minutes; the service is down for one start, or two when it is taken back; two more with measure_again",
    parameters=Parameters,
    accepts=accepts,
    lease_s=lambda parameters: float(parameters.guard_minutes) * 60,
    services=lambda parameters, spec: (_service(parameters, spec),),
)

# ----------------------------------------------------------------------------------------- compositions


def service(run: Run) -> ServiceSpec:
    return _service(run.parameters, run.intent)


def container(run: Run) -> ContainerSpec | None:
    name = service(run).container
    return next((c for c in run.intent.containers if c.name == name), None)


def fit(run: Run) -> tuple[Check, ...]:
    """Everything that can be known before anything is changed; of a change that was kept before, only that it was."""
    if _kept_before(run):
        return (KeptBefore(service(run), container(run), run.origin, run.earlier_decision),)
    parameters = run.parameters
    need = max(parameters.wanted_levels, default=0)
    fits = FitToChange(service(run), container(run), parameters.speculation, need)
    return (fits,) if run.resuming else (HeldByNobody(container(run)), fits)


def baseline(run: Run, ready: Findings) -> Measure | None:
    """How fast it answers today. Not measured on a server that is not fit to be changed."""
    if _kept_before(run):
        return None
    if _failed(run, ready):
        _left_out(run, "the baseline", "this server is not fit to be changed as it stands")
        return None
    if _is_there(run):
        _left_out(run, "the baseline", "it has this speculation already, and nothing will be changed")
        return None
    return Baseline(service(run), container(run), concurrency=run.parameters.levels)


def asked(run: Run, before: Measurement | None) -> tuple[Check, ...]:
    """Whether the server answers us at all."""
    return (CanBeAsked(before, service(run)),) if before is not None else ()


def change(run: Run, ready: Findings, asked: Findings, before: Measurement | None) -> Change:
    """The change, or none when one of the first questions was answered with no."""
    reasons = tuple(f.reason for f in (*ready, *asked) if f.verdict is Verdict.FAIL)
    if reasons and not run.resuming:
        return NotToBeMade(f"Speculation of {service(run).spec}", reasons)
    parameters = run.parameters
    return EnableMTP(
        service(run),
        container(run),
        parameters.speculation,
        parameters.style,
        parameters.guard_minutes,
        parameters.kill_leftovers,
        parameters.measure_again,
        before.took_s if before is not None else 0.0,
        kept_only_if(parameters),
        _room(ready, before),
    )


def kept_only_if(parameters: Parameters) -> str:
    """By what it will be decided whether the change stays. It is part of the plan: an approval is for this rule."""
    wanted = ", ".join(map(str, parameters.wanted_levels)) or "any one of these"
    again = ", also over the old configuration measured again" if parameters.measure_again else ""
    load = counted(_load(parameters), "request")
    return (
        f"the control prompts (set {prompts().digest[:12]}) show accepted drafts and right answers; it holds for "
        f"{parameters.stability_minutes:g} min under load, {load} at once; it is measured at concurrency "
        f"{', '.join(map(str, parameters.levels))} and gains at {wanted}, the whole 95 % interval above 1{again}"
    )


def _load(parameters: Parameters) -> int:
    """Requests at once in the stability window."""
    return min(4, max(parameters.levels))


def _room(ready: Iterable[Finding], before: Measurement | None) -> tuple[str, ...]:
    """How many requests run at once and how much is cached, now and with the drafts; nothing where no estimate was possible."""
    told = next(
        (f.observed for f in ready if f.check == FitToChange.name and isinstance(f.observed, dict) and "now" in f.observed), None
    )
    now: dict[str, Any] | None = told["now"] if told is not None else None
    if told is None or now is None:
        return ()
    said = before.value.get("config", {}).get("effective_max_running") if before is not None else None
    running, tokens = said or now["running"], now["tokens"]
    known = "" if said else "about "
    requests = f"{known}{running} now → about {told['running']}{_fall(running, told['running'])}"
    return (f"{_ROOM}{requests}; KV cache: about {tokens} tokens now → about {told['tokens']}{_fall(tokens, told['tokens'])}",)


def _fall(now: float, then: float) -> str:
    """`` (46 % less)``; empty unless it falls by more than is taken for nothing."""
    share = 1 - then / now if now else 0.0
    return f" ({share:.0%} less)".replace("%", " %") if share > _NOTABLE_FALL else ""


def _is_there(run: Run) -> bool:
    """Whether the unit has the wanted speculation, so that a plan would be empty; what is not known is not there."""
    if run.resuming:
        return False
    unit, inside = service(run).name, container(run)
    try:
        now, version = run.seen.value(UnitFiles(unit, inside)), run.seen.value(Version(unit, inside))
        return not UnitEdit(unit, inside, run.parameters.speculation, run.parameters.style).files(now, version.version)
    except CannotTell:
        return False


def _kept_by(run: Run) -> str:
    """The run that kept the command that runs now, as far as the archive knows; "" otherwise."""
    stored = run.memory.last_stored(run.host.identity.machine_id, PROCEDURE.name, _KEPT)
    if stored is None:
        return ""
    by, kept = stored[0], stored[1]["value"]
    try:
        running = argv_digest(run.seen.value(UnitProcess(service(run).name, container(run))).argv)
    except CannotTell:
        return ""
    return by if (kept["service"], kept["argv_sha256"]) == (service(run).spec, running) else ""


def said(run: Run, applied: Applied | None) -> Measure | None:
    """What the server says of itself, where only a client with its key gets an answer; elsewhere the checks ask it themselves."""
    if applied is None or _refused(applied) or applied.outcome == "failed" or not service(run).has_key:
        return None
    return ServerSays(service(run), container(run))


def effect(run: Run, applied: Applied, said: Measurement | None) -> tuple[Check, ...]:
    """Did it take effect? Not asked when nothing may be changed; of a plan without actions, why it has none."""
    if applied.plan.empty and applied.plan.change == EnableMTP.name:
        return (NothingToChange(service(run), applied.plan, _there(applied), _kept_by(run) if _there(applied) else ""),)
    if _refused(applied):
        return ()
    asked = took_effect(service(run), container(run), run.parameters.speculation, applied, said)
    if len(asked) == 1:
        _left_out(run, "what runs now, against the plan", "it did not come up, and it will be taken back")
    return asked


def control(run: Run, before: Measurement | None, applied: Applied, effect: Findings) -> Measure | None:
    if _refused(applied):
        return None
    if _failed(run, effect):
        _left_out(run, "the control prompts", "it did not take effect, and it will be taken back")
        return None
    return ControlPrompts(service(run), container(run), before=before)


def accepted(run: Run, control: Measurement | None) -> tuple[Check, ...]:
    """What the control prompts showed."""
    if control is None:
        return ()
    about = service(run).spec
    return (
        accepted_checks.SpeculationWasUsed(control, about),
        accepted_checks.DraftsAreAccepted(control, about),
        accepted_checks.AnswersAreRight(control, about),
        accepted_checks.LivedThrough(control, about),
    )


def stability(run: Run, applied: Applied, *so_far: Findings) -> Measure | None:
    if _refused(applied):
        return None
    if _failed(run, *so_far):
        _left_out(run, "the stability window", "an earlier question was answered with no, and it will be taken back")
        return None
    parameters = run.parameters
    return Stability(service(run), container(run), minutes=parameters.stability_minutes, concurrency=_load(parameters))


def holds(run: Run, window: Measurement | None) -> tuple[Check, ...]:
    return (Holds(service(run), container(run), window),) if window is not None else ()


def gain(run: Run, before: Measurement | None, applied: Applied, *so_far: Findings) -> Measure | None:
    if _refused(applied):
        return None
    if before is None:
        _left_out(run, "the gain", "there is no baseline to compare with")
        return None
    if _failed(run, *so_far):
        _left_out(run, "the gain", "an earlier question was answered with no, and it will be taken back")
        return None
    return Gain(service(run), container(run), before=before)


def worth(run: Run, gain: Measurement | None) -> tuple[Check, ...]:
    if gain is None:
        return ()
    return (WorthIt(gain, service(run).spec, run.parameters.wanted_levels, again_follows=run.parameters.measure_again),)


# The third arm. From here to the decision the machine goes back and, perhaps, forth once more under the same guard; at every
# point in between, whatever ends this run, the guard brings it to the old state.


def to_suspend(run: Run, applied: Applied, *so_far: Findings) -> Applied | None:
    """The change, when the old configuration is to be measured again: it was asked for, and so far the change would be kept."""
    if not run.parameters.measure_again or _refused(applied):
        return None
    decision = climb(f for found in so_far for f in found)
    if not decision.keep:
        _left_out(run, "the old configuration a second time", f"the change will be taken back ({decision.rung})")
        return None
    return applied


def gain_again(run: Run, suspended: Applied | None, before: Measurement | None, gain: Measurement | None) -> Measure | None:
    """The second A of A-B-A."""
    if suspended is None or suspended.outcome != "suspended" or before is None or gain is None:
        return None
    return GainAgain(service(run), container(run), before=before, gain=gain)


def not_drift(run: Run, suspended: Applied | None, gain: Measurement | None, again: Measurement | None) -> tuple[Check, ...]:
    if suspended is None or gain is None:
        return ()
    return (NotDrift(suspended, gain, again, service(run).spec, run.parameters.wanted_levels),)


def to_reinstate(suspended: Applied | None, drift: Findings) -> Applied | None:
    """The suspended change, when it is worth being put in effect again; otherwise the machine stays with what it has now."""
    doubted = any(f.verdict in (Verdict.FAIL, Verdict.UNKNOWN) for f in drift)
    return suspended if suspended is not None and suspended.outcome == "suspended" and not doubted else None


def effect_again(run: Run, reinstated: Applied | None, said: Measurement | None) -> tuple[Check, ...]:
    """The process that would stay is a new one: nothing that was seen of the first one is taken for granted."""
    return effect(run, reinstated, said) if reinstated is not None else ()


def control_again(run: Run, before: Measurement | None, reinstated: Applied | None, effect: Findings) -> Measure | None:
    return control(run, before, reinstated, effect) if reinstated is not None else None


def pictures(run: Run, control: Measurement | None, gain: Measurement | None) -> None:
    """What a reader of the record sees first: the start, the accept length, the gain."""
    with_start = _start(run)
    if with_start is not None:
        run.picture("start", "How the server started", with_start.png, with_start.alt)
    if control is not None:
        drawn = accept_chart(control.value)
        run.picture("accept-length", "How many tokens each verify step gave", drawn.png, drawn.alt)
    if gain is not None:
        drawn = gain_chart(gain.value)
        run.picture("gain", "How much faster each request became", drawn.png, drawn.alt)


def picture_again(run: Run, again: Measurement | None) -> None:
    if again is not None:
        title = "How much faster than the old configuration measured again"
        drawn = gain_chart({"levels": again.value["against_second"]}, title=title)
        run.picture("gain-again", title, drawn.png, drawn.alt)


def _start(run: Run) -> Picture | None:
    probe = UnitJournal(service(run).name, container(run))
    try:
        log = run.seen.value(probe)
    except CannotTell:
        return None
    start = read_start(log.entries, log.unit).start
    return start_chart(start) if start is not None else None


def decide(run: Run, applied: Applied, *findings: Findings) -> Decision:
    """Keep it, or take it back, by the ladder; what was decided before stands, and the first *no* decides."""
    earlier = run.earlier_decision
    if earlier is not None and (_kept(applied) or not earlier.keep):
        return earlier
    if _there(applied):
        limits = tuple(f.reason for found in findings for f in found if f.check == NothingToChange.name)
        return Decision(True, NOTHING_TO_DO, limits[0] if limits else applied.summary, (f"not verified: {NOT_ASKED}",))
    told = [f for found in findings for f in found]
    spec = run.parameters.speculation
    scope = (
        f"{service(run).spec} on {run.host.identity.hostname}",
        f"SGLang {applied.plan.settings.get('version', 'of a release that was not told')}",
        f"{spec.algorithm} with {spec.num_steps} steps, {spec.draft_tokens} draft tokens",
        f"concurrency {run.parameters.concurrency}, the prompts of this release of proofbook, at temperature 0 for timing",
        *(f"a server with less room, {price}" for price in _price(applied)),
    )
    not_verified = ["real traffic: the prompts are a fixed set", "longer than the stability window"]
    needed = [*NEEDED]
    if run.parameters.measure_again:
        needed.append(NotDrift.name)
    if any(f.look == IN_EFFECT_AGAIN for f in told):
        not_verified.append("the process that stays, under load: it was started after the stability window")
    decision = climb(told, scope=scope, not_verified=not_verified, needed=needed)
    if decision.keep:
        decision = replace(decision, because="; ".join([decision.because, *(f"the price: {price}" for price in _price(applied))]))
    if decision.keep and applied.outcome == "done":
        kept = {"service": service(run).spec, "argv_sha256": applied.plan.settings["argv_sha256"]}
        run.value(_KEPT, _KEPT_SCHEMA, kept)
    return decision


def _price(applied: Applied) -> list[str]:
    """How much room the drafts took, where that is more than is taken for nothing; told when what was "now" is over."""
    falls = [fact for fact in applied.plan.facts if fact.startswith(_ROOM) and "% less" in fact]
    return [fact.replace(" now →", " before →") for fact in falls]


def _there(applied: Applied) -> bool:
    """Nothing was to be done, since the wanted speculation is there."""
    return applied.plan.empty and bool(applied.plan.settings.get("there"))


def _refused(applied: Applied) -> bool:
    """Nothing may be changed, or it was taken back or kept before: asking whether it took effect would be asking for nothing."""
    return applied.outcome in ("rolled-back", "nothing-to-do")


def _kept(applied: Applied) -> bool:
    """A plan with actions, of which none was left to be done: the run that this one goes on with had kept it."""
    return applied.outcome == "nothing-to-do" and not applied.plan.empty


def _kept_before(run: Run) -> bool:
    """Whether the machine says so, of a run that goes on with another one. The journal may lack the last word of a dead run."""
    if not run.resuming:
        return False
    probe = GuardState(run.origin, container(run))
    run.observe(probe, look="what became of it", title="What became of the change that was begun?")
    try:
        status = run.seen.value(probe)
    except CannotTell:
        return False
    return status.state in ("none", "confirmed") and "confirmed" in (status.state, status.outcome)


def _failed(run: Run, *findings: Findings) -> bool:
    return any(found.verdict is Verdict.FAIL for found in findings if found)


def _left_out(run: Run, what: str, why: str) -> None:
    run.note(f"{what}: not measured, since {why}.", kind="not-verified", title=what)


__all__ = [
    "PROCEDURE",
    "Parameters",
    "accepted",
    "asked",
    "baseline",
    "change",
    "control",
    "control_again",
    "decide",
    "effect",
    "effect_again",
    "fit",
    "gain",
    "gain_again",
    "holds",
    "kept_only_if",
    "not_drift",
    "picture_again",
    "pictures",
    "said",
    "stability",
    "to_reinstate",
    "to_suspend",
    "worth",
]
