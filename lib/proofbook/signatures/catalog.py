"""What known log lines mean, as data: the TOML files of this folder, read, checked and compiled.

A file holds three kinds of tables::

    [[signature]]            one message, known by one pattern
    [[family]]               messages that share one pattern and differ by a number in it (the Xids): the number picks
                             the signature; a number that nobody published becomes the family's ``unknown`` one
    [[join]]                 a message that its writer split over several lines

``pattern`` is searched (not anchored) in the message, without time, host and program name. Its named groups are data:
``pci`` becomes the device, ``code`` the code (an error code is never part of a signature), ``count`` a count that the
line itself states. ``anchors`` are literals of which every matching line contains at least one: the pre-filter looks for
these only, so they hold no character that JSON escapes, and no word that also stands in the journal's other fields.

Field by field: see :class:`Signature`.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import lru_cache
from importlib.resources import files
from typing import Any, Literal, cast

from proofbook.model import Suggested, Verdict

Kind = Literal["fault", "consequence", "detail", "gap", "fact", "benign"]
KINDS: tuple[Kind, ...] = ("fault", "consequence", "detail", "gap", "fact", "benign")
SOURCES = ("kernel", "service", "systemd", "journald", "tool")


#: Literals that the judge itself needs to see, whatever the signatures say: counts of what was left out, repeats, tracebacks.
ALWAYS = (
    " callbacks suppressed",
    "message repeated ",
    "Traceback (most recent call last)",
    "-- Boot ",
    "-- Reboot --",
    "PCI bridge to [bus",
)


class BadSignature(ValueError):
    """A signature file cannot be used as it stands; the message names the file and the signature."""


@dataclass(frozen=True, slots=True)
class Variant:
    """Words in the line that change the verdict or the action."""

    text: re.Pattern[str]
    verdict: Verdict | None
    action: Suggested | None


@dataclass(frozen=True, slots=True)
class Signature:
    """One known message.

    ``kind``: ``fault`` can be the first of its chain · ``consequence`` follows something else; alone, its cause is not in
    the log · ``detail`` accompanies one of ``detail_of`` and speaks for itself only when that is missing · ``gap`` says
    that the log has a hole · ``fact`` is knowledge for judging the others · ``benign`` looks bad and is not.
    ``caused_by`` holds ids and ``#tags``: an earlier one of these, on the same device, is the cause.
    ``requester``: the line names whoever asked the IOMMU or the link; when that is no GPU, it is that device's own fault.
    """

    id: str
    pattern: re.Pattern[str]
    anchors: tuple[str, ...]
    meaning: str
    verdict: Verdict
    kind: Kind
    action: Suggested
    what_to_do: str
    sources: frozenset[str]
    tags: frozenset[str]
    caused_by: tuple[str, ...]
    detail_of: tuple[str, ...]
    overlaps: frozenset[str]
    requester: bool
    init: bool  # printed without a device while a GPU is initialised; the next "RmInitAdapter failed" names the device
    origin: str  # where the text is from
    versions: str  # where texts differ by version: which ones say it so
    examples: tuple[str, ...]
    file: str
    variants: tuple[Variant, ...] = ()

    def read(self, text: str) -> Signature:
        """This signature as the words of one line turn it: the last variant whose text is in the line."""
        out = self
        for variant in self.variants:
            if variant.text.search(text):
                out = replace(self, verdict=variant.verdict or self.verdict, action=variant.action or self.action)
        return out

    def match(self, text: str) -> tuple[Signature, re.Match[str]] | None:
        found = self.pattern.search(text)
        return (self, found) if found else None


@dataclass(frozen=True, slots=True)
class Family:
    """Signatures that share one pattern; the group ``code`` picks the member."""

    name: str
    pattern: re.Pattern[str]
    anchors: tuple[str, ...]
    sources: frozenset[str]
    members: Mapping[str, Signature]
    unknown: Signature

    def match(self, text: str) -> tuple[Signature, re.Match[str]] | None:
        found = self.pattern.search(text)
        return (self.members.get(found["code"], self.unknown), found) if found else None


@dataclass(frozen=True, slots=True)
class Join:
    """A message over several lines: ``starts`` opens it, lines that match ``continues`` belong to it, at most ``lines``."""

    id: str
    starts: re.Pattern[str]
    continues: re.Pattern[str]
    anchors: tuple[str, ...]
    lines: int
    strip: re.Pattern[str]  # what each further line repeats, and the joined text leaves out


@dataclass(frozen=True, slots=True)
class Suppression:
    """``<function>: N callbacks suppressed`` stands for N more lines of these signatures."""

    function: str
    of: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Suspicion:
    """What an error of this program looks like; a line like that which no signature claims is reported as unknown.

    ``serious``: which of these lines read as an error of what is judged here; only they leave the whole log UNKNOWN.
    ``otherwise``: what the others are worth.
    """

    id: str
    pattern: re.Pattern[str]
    anchors: tuple[str, ...]
    sources: frozenset[str]
    serious: re.Pattern[str]
    otherwise: Verdict

    def worth(self, text: str) -> Verdict:
        return Verdict.UNKNOWN if self.serious.search(text) else self.otherwise


Matcher = Signature | Family


@dataclass(frozen=True)
class SignatureSet:
    """All signatures, compiled. ``match`` is the exact answer; ``anchors`` is what the pre-filter needs."""

    signatures: Mapping[str, Signature]
    matchers: tuple[Matcher, ...]
    joins: tuple[Join, ...]
    suppressions: Mapping[str, Suppression]
    suspicions: tuple[Suspicion, ...]
    anchors: tuple[str, ...] = field(default=())
    #: for each anchor, which matchers it can mean
    by_anchor: Mapping[str, tuple[Matcher, ...]] = field(default_factory=dict)

    def __getitem__(self, signature_id: str) -> Signature:
        return self.signatures[signature_id]

    def __iter__(self) -> Iterator[Signature]:
        return iter(self.signatures.values())

    def __len__(self) -> int:
        return len(self.signatures)

    def match(self, text: str, source: str = "", hint: Iterable[str] | None = None) -> list[tuple[Signature, re.Match[str]]]:
        """Every signature that claims this message. ``hint``: the anchors known to be in it (None: look for them here)."""
        if hint is None:
            hint = [a for a in self.anchors if a in text]
        tried: set[int] = set()
        found = []
        for anchor in hint:
            for matcher in self.by_anchor.get(anchor, ()):
                if id(matcher) in tried:
                    continue
                tried.add(id(matcher))
                if source and matcher.sources and source not in matcher.sources:
                    continue
                one = matcher.match(text)
                if one:
                    found.append(one)
        return found

    def expand(self, names: Iterable[str]) -> frozenset[str]:
        """Ids for a list of ids and ``#tags``."""
        out: set[str] = set()
        for name in names:
            if name.startswith("#"):
                out |= {s.id for s in self if name[1:] in s.tags}
            else:
                out.add(name)
        return frozenset(out)


_SIGNATURE_KEYS = {
    "id", "pattern", "anchors", "meaning", "verdict", "kind", "action", "what_to_do", "sources", "tags", "caused_by", "detail_of",
    "overlaps", "requester", "init", "origin", "versions", "example", "examples", "variants",
}  # fmt: skip
_FAMILY_KEYS = {"name", "pattern", "anchors", "sources", "origin", "example", "tags", "caused_by", "unknown", "member"}
#: Words of a line that reports a failure, whoever wrote it.
_READS_AS_ERROR = (
    r"(?i)fail|error|\berr\b|unable|cannot|can't|could not|couldn't|time[d ]*out|invalid|illegal|assert|\blost\b|stuck|hang|hung|"
    r"refus|denied|not ready|not respond|corrupt|fault|violat|abort|fatal|\bdead|unexpected|overflow|mismatch|missing|exception|"
    r"halt|brok|bad[ _]|event logged|retr(?:y|ies)|giving up|disabled due"
)
_ANCHOR = re.compile(r"^[\x20-\x7e]{3,}$")


def _anchors(where: str, table: Mapping[str, Any]) -> tuple[str, ...]:
    anchors = tuple(table.get("anchors", ()))
    if not anchors:
        raise BadSignature(f"{where}: no anchors")
    for anchor in anchors:
        if not _ANCHOR.match(anchor) or set(anchor) & {'"', "\\"}:
            raise BadSignature(
                f"{where}: the anchor {anchor!r} must be 3 or more printable ASCII characters, no quote, no backslash"
            )
    return anchors


def _pattern(where: str, text: str) -> re.Pattern[str]:
    try:
        return re.compile(text)
    except re.error as error:
        raise BadSignature(f"{where}: {error} in {text!r}") from None


def _sources(where: str, table: Mapping[str, Any], default: Iterable[str]) -> frozenset[str]:
    sources = frozenset(table.get("sources", default))
    if not sources <= set(SOURCES):
        raise BadSignature(f"{where}: unknown sources {sorted(sources - set(SOURCES))}; allowed: {', '.join(SOURCES)}")
    return sources


def _signature(file: str, table: Mapping[str, Any], defaults: Mapping[str, Any]) -> Signature:
    table = {**defaults, **table}
    where = f"{file}: {table.get('id', '(no id)')}"
    unknown = set(table) - _SIGNATURE_KEYS
    if unknown:
        raise BadSignature(f"{where}: unknown fields {sorted(unknown)}; allowed: {', '.join(sorted(_SIGNATURE_KEYS))}")
    for needed in ("id", "pattern", "meaning", "origin"):
        if not table.get(needed):
            raise BadSignature(f"{where}: {needed} is missing")
    kind = table.get("kind", "fault")
    if kind not in KINDS:
        raise BadSignature(f"{where}: kind {kind!r}; allowed: {', '.join(KINDS)}")
    quiet = kind in ("benign", "fact")
    try:
        verdict = Verdict(table.get("verdict", "PASS" if quiet else "UNKNOWN" if kind == "gap" else "FAIL"))
        action = Suggested(table.get("action", "none" if quiet else "look-closer"))
    except ValueError as error:
        raise BadSignature(f"{where}: {error}") from None
    examples = tuple(table.get("examples", ())) or ((table["example"],) if "example" in table else ())
    if not examples:
        raise BadSignature(f"{where}: example is missing")
    return Signature(
        id=table["id"],
        pattern=_pattern(where, table["pattern"]),
        anchors=_anchors(where, table),
        meaning=table["meaning"],
        verdict=verdict,
        kind=cast(Kind, kind),
        action=action,
        what_to_do=table.get("what_to_do", ""),
        sources=_sources(where, table, ("kernel",)),
        tags=frozenset(table.get("tags", ())),
        caused_by=tuple(table.get("caused_by", ())),
        detail_of=tuple(table.get("detail_of", ())),
        overlaps=frozenset(table.get("overlaps", ())),
        requester=bool(table.get("requester", False)),
        init=bool(table.get("init", False)),
        origin=table["origin"],
        versions=table.get("versions", ""),
        examples=examples,
        file=file,
        variants=tuple(_variant(where, v) for v in table.get("variants", ())),
    )


def _variant(where: str, table: Mapping[str, Any]) -> Variant:
    try:
        return Variant(
            _pattern(where, table["text"]),
            Verdict(table["verdict"]) if "verdict" in table else None,
            Suggested(table["action"]) if "action" in table else None,
        )
    except (KeyError, ValueError) as error:
        raise BadSignature(f"{where}: a variant is {table!r}: {error}") from None


def _family(file: str, table: Mapping[str, Any]) -> Family:
    where = f"{file}: family {table.get('name', '(no name)')}"
    unknown_keys = set(table) - _FAMILY_KEYS
    if unknown_keys:
        raise BadSignature(f"{where}: unknown fields {sorted(unknown_keys)}")
    shared = {k: table[k] for k in ("pattern", "anchors", "sources", "origin") if k in table}

    def member(entry: Mapping[str, Any], code: str) -> Signature:
        own = {k: v for k, v in entry.items() if k not in ("codes", "text")}
        own.setdefault("id", f"{table['name']}-{code}")
        own.setdefault("example", table["example"].format(code=code, text=entry.get("text", "an example")))
        own["tags"] = [*table.get("tags", ()), *entry.get("tags", ())]
        own["caused_by"] = [*table.get("caused_by", ()), *entry.get("caused_by", ())]
        return _signature(file, own, shared)

    members: dict[str, Signature] = {}
    for entry in table.get("member", ()):
        for code in entry["codes"]:
            if str(code) in members:
                raise BadSignature(f"{where}: {code} stands there twice")
            members[str(code)] = member(entry, str(code))
    unknown = member(table["unknown"], table["unknown"]["codes"][0])
    return Family(
        name=table["name"],
        pattern=_pattern(where, table["pattern"]),
        anchors=_anchors(where, table),
        sources=_sources(where, table, ("kernel",)),
        members=members,
        unknown=unknown,
    )


def _join(file: str, table: Mapping[str, Any]) -> Join:
    where = f"{file}: join {table.get('id', '(no id)')}"
    return Join(
        id=table["id"],
        starts=_pattern(where, table["starts"]),
        continues=_pattern(where, table["continues"]),
        anchors=_anchors(where, table),
        lines=int(table.get("lines", 8)),
        strip=_pattern(where, table.get("strip", r"^\s+")),
    )


def compile_tables(tables: Mapping[str, Mapping[str, Any]]) -> SignatureSet:
    """Build a :class:`SignatureSet` from parsed TOML files (name to content). Raises BadSignature."""
    signatures: dict[str, Signature] = {}
    matchers: list[Matcher] = []
    joins: list[Join] = []
    suppressions: dict[str, Suppression] = {}
    suspicions: list[Suspicion] = []

    def add(one: Signature) -> None:
        if one.id in signatures:
            raise BadSignature(f"{one.file}: the id {one.id} is taken by {signatures[one.id].file}")
        signatures[one.id] = one

    for file, content in sorted(tables.items()):
        defaults = dict(content.get("defaults", {}))
        for table in content.get("signature", ()):
            one = _signature(file, table, defaults)
            add(one)
            matchers.append(one)
        for table in content.get("family", ()):
            family = _family(file, table)
            for member in [*family.members.values(), family.unknown]:
                add(member)
            matchers.append(family)
        joins += [_join(file, table) for table in content.get("join", ())]
        for table in content.get("suppression", ()):
            suppressions[table["function"]] = Suppression(table["function"], tuple(table["of"]))
        for table in content.get("suspicion", ()):
            where = f"{file}: suspicion {table['id']}"
            suspicions.append(
                Suspicion(
                    id=table["id"],
                    pattern=_pattern(where, table["pattern"]),
                    anchors=_anchors(where, table),
                    sources=_sources(where, table, ()),
                    serious=_pattern(where, table.get("serious", _READS_AS_ERROR)),
                    otherwise=Verdict(table.get("otherwise", "PASS")),
                )
            )
    _check_names(signatures, suppressions)
    by_anchor: dict[str, tuple[Matcher, ...]] = {}
    for matcher in matchers:
        for anchor in matcher.anchors:
            by_anchor[anchor] = (*by_anchor.get(anchor, ()), matcher)
    for anchor in [a for j in joins for a in j.anchors] + [a for s in suspicions for a in s.anchors] + list(ALWAYS):
        by_anchor.setdefault(anchor, ())
    return SignatureSet(signatures, tuple(matchers), tuple(joins), suppressions, tuple(suspicions), tuple(by_anchor), by_anchor)


def _check_names(signatures: Mapping[str, Signature], suppressions: Mapping[str, Suppression]) -> None:
    tags = {tag for s in signatures.values() for tag in s.tags}
    for one in signatures.values():
        for name in (*one.caused_by, *one.detail_of, *one.overlaps):
            known = name[1:] in tags if name.startswith("#") else name in signatures
            if not known:
                raise BadSignature(f"{one.file}: {one.id} names {name!r}, which is no signature and no tag")
    for suppression in suppressions.values():
        for name in suppression.of:
            if name not in signatures:
                raise BadSignature(f"the suppression of {suppression.function} names {name!r}, which is no signature")


@lru_cache(maxsize=1)
def load() -> SignatureSet:
    """The signatures that come with proofbook, compiled once. Raises BadSignature when a file is damaged."""
    folder = files("proofbook.signatures")
    tables: dict[str, Mapping[str, Any]] = {}
    for entry in folder.iterdir():
        if entry.name.endswith(".toml"):
            try:
                tables[entry.name] = tomllib.loads(entry.read_text(encoding="utf-8"))
            except tomllib.TOMLDecodeError as error:
                raise BadSignature(f"{entry.name}: {error}") from None
    return compile_tables(tables)
