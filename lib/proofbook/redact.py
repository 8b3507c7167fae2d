"""Secrets out, before anything reaches the disk; and a ledger of what was taken out.

A :class:`Redactor` knows two kinds of secrets: values that it was told (:meth:`Redactor.learn`), found again in every
usual encoding, and shapes (vendor tokens, ``Authorization`` headers, passwords in URLs, PEM private keys, JWTs, cookies, and the
values of variables, JSON keys and command line flags whose *name* says that they are secret).

What is taken out becomes ``[redacted:NAME]``, where NAME is the variable, flag or rule: a reader sees that something
was there, and which. Nothing of the value is kept, not even a prefix. The ledger counts it per rule and file.

The text on a GPU server is full of look-alikes: ``max_total_num_tokens=83412``, ``eos_token_id=2``, ``--tokenizer-path``,
UUIDs, sha256 sums, invocation ids, PCI addresses. They stay as they are: a record without them proves nothing.
"""

from __future__ import annotations

import base64
import binascii
import html
import json
import re
import threading
import urllib.parse
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

__all__ = ["Hit", "Redactor", "secret_name"]


@dataclass(frozen=True, slots=True)
class Hit:
    """A secret that was found where none may be: by which rule, in which file, how often. Never the secret itself."""

    rule: str
    where: str
    count: int


# ------------------------------------------------------------------------------------ names that mean a secret

_STRONG = re.compile(
    r"passw|passphrase|passcode|secret|credential|sshpass"
    r"|^api-ke?$"  # an option may be cut short: --api-k is --api-key
    r"|(?:api|access|private|signing|encryption|auth|master|account|shared|licen[cs]e|subscription|storage)[-_. ]?key"
)
_WORDS = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+|[0-9]+")
_TOKEN_PAIRS = {"api", "auth", "access", "refresh", "bearer", "bot", "secret"}

#: Last words that say "this is about the secret, but not the secret": a file name, a count, a policy.
_ABOUT = {
    "file", "files", "path", "paths", "dir", "directory", "name", "names", "id", "ids", "type", "expiry", "expires",
    "expired", "ttl", "age", "length", "len", "count", "policy", "rotation", "version", "algorithm", "enabled", "required",
    "authentication", "manager", "store", "provider", "map", "usage", "limit", "budget", "size", "rate", "ratio", "env",
    "var", "source", "backend", "helper", "num", "prefix", "suffix", "encrypted", "changed",
    "service", "socket", "timer", "target", "unit",
}  # fmt: skip

#: Words before "token" that make it a unit of text.
_TEXT_TOKEN = {
    "eos", "bos", "pad", "unk", "sep", "cls", "mask", "num", "max", "min", "new", "cached", "draft", "special", "added",
    "per", "next", "first", "last", "stop", "image", "audio", "video", "decode", "prefill", "input", "output", "running",
    "prompt", "completion", "accept", "accepted", "time", "generated", "total", "multi", "one", "each", "verify", "think",
    "begin", "end", "speculative", "implicit", "by", "the", "unexpected", "invalid",
}  # fmt: skip

_PASSWORD_WORDS = {"psk", "pwd", "pw", "creds"}
_NO_PASSWORD = {"pass", "bypass", "compass", "trespass", "surpass"}

_NOT_SECRET = {
    "pwd", "oldpwd", "loadcredential", "loadcredentialencrypted", "importcredential", "passwordauthentication",
    "permitemptypasswords",
}  # fmt: skip


_MARK = re.compile(r"\[redacted:[^\]\s]{1,80}\]")


@lru_cache(maxsize=4096)
def secret_name(name: str) -> bool:
    """Whether a variable, key or flag of this name holds a secret.

    >>> [secret_name(n) for n in ("HF_TOKEN", "--api-key", "db.password", "accessToken")]
    [True, True, True, True]
    >>> [secret_name(n) for n in ("max_total_num_tokens", "tokenizer_path", "eos_token_id", "PASSWORD_FILE", "PWD")]
    [False, False, False, False, False]
    """
    name = _MARK.sub("", name)  # what was taken out of a text does not make a name of it
    low = name.lower().strip("-_. ")
    words = [w.lower() for w in _WORDS.findall(name)]
    if not words or low in _NOT_SECRET or words[-1] in _ABOUT:
        return False
    if _STRONG.search(low) or not _PASSWORD_WORDS.isdisjoint(words):
        return True
    if name.isupper() and words[-1].endswith("pass") and words[-1] not in _NO_PASSWORD:
        return True
    if len(words) > 1 and (words[-1] == "pass" or (words[-1] == "auth" and name.isupper())):
        return True
    for at, word in enumerate(words):
        before = words[at - 1] if at else ""
        if word == "tokens" and before in _TOKEN_PAIRS:
            return True
        if word == "token" and before not in _TEXT_TOKEN:
            return True
        if word.endswith("token") and word != "token" and name.isupper():
            return True
    return False


_BENIGN_WORDS = {
    "", "none", "null", "nil", "true", "false", "yes", "no", "on", "off", "enabled", "disabled", "unset", "set", "required",
    "optional", "present", "absent", "missing", "default", "undefined", "n/a", "-", "...", "str", "string", "bytes",
    "secretstr",
}  # fmt: skip
_REDACTED = re.compile(r"\[redacted:[^\]\s]{1,80}\][,;)\]}.]*")
_NUMBER = re.compile(r"[-+]?[0-9]+(?:\.[0-9]+)?(?:[eE][-+]?[0-9]+)?[%sx]?")
_HEAD = re.compile(r"[^,;)\]}]*")


def _benign(value: str, name: str) -> bool:
    """Values that are no secret even under a secret name: empty, ``None``, a file, a reference, already redacted."""
    value = value.strip()
    found = _HEAD.match(value)
    head = found[0].strip() if found else value
    if head.lower() in _BENIGN_WORDS or _REDACTED.fullmatch(value) or not value.strip("*•.x<>"):
        return True
    if value[0] in "/$%<" and (value[0] != "$" or re.fullmatch(r"\$\{?\w+\}?[,;)]*|\$\(.*", value)):
        return value[0] != "/" or "/" in value[1:] or len(value) < 24
    return "passw" not in name.lower() and "secret" not in name.lower() and bool(_NUMBER.fullmatch(head))


def _random_looking(value: str) -> bool:
    return len(value) >= 8 and not re.search(r"\s", value) and (any(c.isdigit() for c in value) or len(value) >= 24)


def _bare_token(name: str) -> bool:
    return name.lower().strip("-_. ") in ("token", "auth")


def _label(name: str) -> str:
    """A name that is safe inside ``[redacted:…]``."""
    return (re.sub(r"[^A-Za-z0-9_.-]", "", name).strip("-.") or "secret")[:64]


# ------------------------------------------------------------------------------------------------ shapes

# A token starts here: not inside a word, except after an escaped line end as JSON writes it ("…\nhf_…").
_START = r"(?:(?<![A-Za-z0-9_-])|(?<=\\n)|(?<=\\r)|(?<=\\t)|(?<=\x1b\[0m))"

_PRIVATE_KEY = re.compile(
    r"-----BEGIN [A-Z0-9 ]{0,40}PRIVATE KEY(?: BLOCK)?-----"
    r"(?:.{0,20000}?-----END [A-Z0-9 ]{0,40}PRIVATE KEY(?: BLOCK)?-----|[A-Za-z0-9+/=\s\\:,-]*)",
    re.DOTALL,
)

#: (rule, hints: one of these must occur in the lower-cased data, pattern).
#: The group ``keep``, if any, stays in front, ``after`` behind.
_SHAPES: tuple[tuple[str, tuple[str, ...], re.Pattern[str]], ...] = (
    ("private-key", ("age-secret-key-",), re.compile(r"AGE-SECRET-KEY-1[A-Z0-9]{20,}")),
    (
        "hugging-face-token",
        ("hf_", "api_org_"),
        re.compile(rf"hf_[A-Za-z0-9]{{20,}}|{_START}hf_(?=[A-Za-z]*[0-9])[A-Za-z0-9]{{8,}}|api_org_[A-Za-z0-9]{{20,}}"),
    ),
    (
        "github-token",
        ("ghp_", "gho_", "ghu_", "ghs_", "ghr_", "github_pat_"),
        re.compile(r"gh[pousr]_[A-Za-z0-9]{20,}|github_pat_[A-Za-z0-9_]{20,}"),
    ),
    (
        "gitlab-token",
        ("glpat-", "gldt-", "glrt-", "glcbt-", "glptt-", "glsoat-"),
        re.compile(r"gl(?:pat|dt|rt|cbt|ptt|soat)-[A-Za-z0-9_-]{16,}"),
    ),
    ("aws-key-id", ("akia", "asia"), re.compile(r"(?<![A-Za-z0-9/+])(?:AKIA|ASIA)[0-9A-Z]{16}(?![A-Za-z0-9])")),
    ("slack-token", ("xox", "xapp-"), re.compile(r"xox[abeoprs]-[A-Za-z0-9-]{10,}|xapp-[A-Za-z0-9-]{10,}")),
    ("api-key", ("sk-",), re.compile(rf"{_START}sk-(?=[A-Za-z_-]*[0-9])[A-Za-z0-9_-]{{12,}}")),
    (
        "vendor-token",
        ("nvapi-", "aiza", "npm_", "dckr_pat_", "tskey-", "hvs.", "gsk_", "pypi-age", "dapi"),
        re.compile(
            rf"nvapi-[A-Za-z0-9_-]{{20,}}|AIza[0-9A-Za-z_-]{{35}}|{_START}npm_[A-Za-z0-9]{{30,}}|dckr_pat_[A-Za-z0-9_-]{{20,}}"
            rf"|tskey-[A-Za-z0-9-]{{16,}}|{_START}hvs\.[A-Za-z0-9_-]{{20,}}|{_START}gsk_[A-Za-z0-9]{{30,}}|pypi-AgE[A-Za-z0-9_-]{{20,}}"
            rf"|{_START}dapi[a-f0-9]{{32}}"
        ),
    ),
    ("jwt", ("eyj",), re.compile(r"eyJ[A-Za-z0-9_-]{8,}\.eyJ[A-Za-z0-9_-]{4,}\.[A-Za-z0-9_-]{8,}")),
    (
        "authorization",
        ("authorization",),
        re.compile(
            r"(?P<keep>authorization\\?[\"']?\s*[:=]\s*\\?[\"']?(?:b[\"'])?(?:(?:basic|bearer|token|negotiate|digest|apikey)\s+)?)"
            r"(?!\[redacted:|(?:basic|bearer|token|negotiate|digest|apikey)\s)[^\s\"'\\,;]{4,}",
            re.IGNORECASE,
        ),
    ),
    (
        "bearer",
        ("bearer",),
        re.compile(
            rf"(?P<keep>{_START}bearer[ :=]{{1,3}})(?=[A-Za-z._~+/-]*[0-9]|[A-Za-z._~+/-]{{24}})[A-Za-z0-9._~+/-]{{8,}}=*",
            re.IGNORECASE,
        ),
    ),
    (
        "url-password",
        ("://",),
        re.compile(r"(?P<keep>://[^\s/@:\"'<>\\]{0,80}:)(?!\[redacted:)[^\s/\"'<>\\]{1,200}(?P<after>@)"),
    ),
    (
        "url-signature",
        ("sig=", "signature="),
        re.compile(
            r"(?P<keep>[?&](?:amp;)?(?:sig|signature|x-amz-signature|x-goog-signature)=)(?!\[redacted:)[^\s&\"'<>\\]{16,}", re.I
        ),
    ),
    (
        "webhook",
        ("hooks.slack.com/", "/api/webhooks/", "webhook.office.com/"),
        re.compile(
            r"(?P<keep>hooks\.slack\.com/(?:services|workflows|triggers)/|discord(?:app)?\.com/api/webhooks/|webhook\.office\.com/)"
            r"(?!\[redacted:)[^\s\"'<>\\]{16,}",
            re.IGNORECASE,
        ),
    ),
    (
        "database-password",
        ("mysql", "mariadb"),
        re.compile(r"(?P<keep>\b(?:mysql|mariadb)[a-z_-]*\s(?:[^\n|;&]*\s)?-p)(?!\[redacted:)[^\s\"'\\-][^\s\"'\\]*"),
    ),
    ("url-token", ("://",), re.compile(r"(?P<keep>://)(?=[A-Za-z_-]*[0-9])[A-Za-z0-9_-]{20,}(?P<after>@)")),
    (
        "cookie",
        ("cookie",),
        re.compile(
            r"(?P<keep>\b(?:set-)?cookie\\?[\"']?[ \t]*:[ \t]*\\?[\"']?)(?!\[redacted:)(?=[^\s\"'=;]+=)[^\r\n\"'\\\x00]+",
            re.IGNORECASE,
        ),
    ),
    ("netrc", ("login ",), re.compile(r"(?P<keep>\blogin\s+\S+\s+password\s+)(?!\[redacted:)\S+")),
    (
        "user-password",
        (" -u", " --user", "--proxy-user", "sshpass", '"-u"'),
        re.compile(
            r"(?P<keep>(?:(?<=\s)|(?<=\"))(?:-u|--user|--proxy-user)(?:[ =]|\",\s*\")[\"']?[A-Za-z_][^\s:\"']*:)"
            r"(?!\[redacted:|[0-9]+(?![^\s\"']))[^\s\"'/][^\s\"']*"
            r"|(?P<keep2>\bsshpass\s+-p\s*)(?!\[redacted:)\S+"
        ),
    ),
)

_BASIC = re.compile(rf"(?P<keep>{_START}basic\s+)(?P<blob>[A-Za-z0-9+/]{{6,}}={{0,2}})", re.IGNORECASE)

#: Rules whose hits are never a matter of judgement: they also hold for rendered files (HTML, Markdown, XML).
_NEEDS_CONTEXT = {"authorization", "bearer", "cookie", "user-password", "netrc", "api-key", "database-password", "url-signature"}
_CERTAIN = frozenset({rule for rule, _, _ in _SHAPES} - _NEEDS_CONTEXT) | {"learned", "private-key"}

#: A name that means a secret holds one of these (``key`` only behind one of the words of ``_STRONG``).
_KEYWORDS = (
    "token", "secret", "passw", "passphrase", "passcode", "credential", "creds", "sshpass", "pass", "pwd", "_pw", "psk", "_auth",
    "key",
)  # fmt: skip
#: Where none of these stands in lower-cased text, no rule but those of its form (NUL, arrays, private keys) can match.
_EACH_HINT = {*(hint for _, hints, _ in _SHAPES for hint in hints), *_KEYWORDS, "basic"}
_HINTS = tuple(sorted(h for h in _EACH_HINT if not any(shorter in h for shorter in _EACH_HINT - {h})))
_HINT_BYTES = tuple(hint.encode() for hint in _HINTS)
_KEY_BEFORE = re.compile(
    r"(?:api|access|private|signing|encryption|auth|master|account|shared|licen[cs]e|subscription|storage)[-_.]?$"
)
_NAME_CHARS = frozenset("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789_-.")
_NAME_REST = re.compile(r"[A-Za-z0-9_.\-]{0,60}")
_TAIL = re.compile(r"(?P<close>\\{0,3}[\"']?\]?)(?P<sep>[ \t]*(?:=>|:=|=|:)[ \t]*)(?P<open>[bru]?\\{0,3}[\"'])?")
_FLAG_SEP = re.compile(r"(?P<sep>=|[ \t]+|\\?[\"'],\s*(?=\\?[\"']))(?P<open>\\{0,3}[\"'])?")
_UNQUOTED = re.compile(r"(?:[^\s\"'\x00\\]|\\(?![\"'\\]))*")
_BYTE_ARRAY = re.compile(r"\[(?:[0-9]{1,3},\s?){7,}[0-9]{1,3}\]")


def _ascii_lower(text: str) -> str:
    """Lower case for searching: as long as ``text``, so that positions agree (``str.lower`` may change the length)."""
    return text.encode("ascii", "replace").lower().decode("ascii")


def _keywords(low: str) -> list[tuple[int, str]]:
    """Where keywords of secret names stand in lower-cased text, in order."""
    found: list[tuple[int, str]] = []
    for keyword in _KEYWORDS:
        at = low.find(keyword)
        while at >= 0:
            if keyword != "key" or _KEY_BEFORE.search(low, max(0, at - 16), at):
                found.append((at, keyword))
            at = low.find(keyword, at + len(keyword))
    found.sort()
    return found


def _in_lines(text: str, hints: Sequence[str], shape: re.Pattern[str], replace: Callable[[re.Match[str]], str]) -> str:
    """``shape.sub(replace, text)`` in only those lines in which a hint occurs: a search for a fixed string is far cheaper."""
    low = _ascii_lower(text)
    spans: set[tuple[int, int]] = set()
    for hint in hints:
        at = low.find(hint)
        while at >= 0:
            start, end = text.rfind("\n", 0, at) + 1, text.find("\n", at)
            end = len(text) if end < 0 else end
            spans.add((start, end))
            at = low.find(hint, max(end, at + 1))
    out: list[str] = []
    done = 0
    for start, end in sorted(spans):
        out += [text[done:start], shape.sub(replace, text[start:end])]
        done = end
    return "".join([*out, text[done:]]) if out else text


def _quoted_end(text: str, start: int, opener: str) -> int:
    """Where the string ends that ``opener`` (a quote, and the backslashes before it) began before ``start``; -1: nowhere."""
    quote, slashes = opener[-1], opener.count("\\")
    at = start
    while True:
        at = text.find(quote, at)
        if at < 0:
            return -1
        back = at
        while back > start and text[back - 1] == "\\":
            back -= 1
        run = at - back
        # an inner quote carries more backslashes than the opener did
        if run == slashes or (slashes == 0 and run % 2 == 0):
            return at - slashes
        if "\n" in text[start:at] and at - start > 4096:
            return -1
        at += 1


# ---------------------------------------------------------------------------------------------- redactor


def _encodings(value: str) -> set[str]:
    """The forms in which one value turns up: as it is, JSON- and HTML-escaped, URL-quoted, base64, hex, repr."""
    raw = value.encode("utf-8", "surrogateescape")
    json_form = json.dumps(value)[1:-1]
    forms = {
        value,
        json_form,
        json.dumps(json_form)[1:-1],
        json.dumps(value, ensure_ascii=False)[1:-1],
        json_form.replace("/", "\\/"),
        html.escape(value),
        html.escape(value).replace("&#x27;", "&#39;").replace("&quot;", "&#34;"),
        repr(value)[1:-1],
        value.replace("'", "'\\''"),
    }
    if len(raw) >= 6:
        quoted = urllib.parse.quote(raw, safe="")
        forms |= {
            quoted,
            re.sub(r"%[0-9A-F]{2}", lambda m: m[0].lower(), quoted),
            urllib.parse.quote(raw),
            urllib.parse.quote_plus(raw),
            base64.b64encode(raw).decode(),
            base64.b64encode(raw).decode().rstrip("="),
            base64.urlsafe_b64encode(raw).decode(),
            base64.urlsafe_b64encode(raw).decode().rstrip("="),
            raw.hex(),
            raw.hex().upper(),
        }
    if len(raw) >= 8:
        forms |= _inside_base64(raw)
    return {form for form in forms if len(form) >= _SHORTEST}


def _inside_base64(raw: bytes) -> set[str]:
    """What stands for ``raw`` in the base64 of something longer, in both alphabets, wherever it begins there.

    Base64 turns three bytes into four characters, so there are three ways; the characters at the edges depend on the neighbours
    and are left out.
    """
    forms = set()
    for offset in range(3):
        encoded = base64.b64encode(b"\0" * offset + raw)
        first = -(-offset * 4 // 3)  # the first character that holds none of the bytes before
        last = (offset + len(raw)) * 8 // 6  # behind the last one that holds none of the bytes after
        form = encoded[first:last].decode()
        forms |= {form, form.replace("+", "-").replace("/", "_")}
    return forms


#: Shorter values cannot be searched for without destroying unrelated text.
_SHORTEST = 4

#: How many strings, and up to which length, are remembered as holding no secret.
_REMEMBERED, _REMEMBERED_LENGTH = 50_000, 400
_CLEAN_TO_ALL: set[str] = set()


class Redactor:
    """Takes secrets out of text, bytes and JSON values, and keeps count. Safe to use from several threads.

    ``where`` names the file that the data goes to; it only serves the ledger.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._ledger: dict[str, dict[str, int]] = {}
        self._learned: dict[str, str] = {}  # encoded form -> name
        self._learned_first: tuple[tuple[str, str], ...] = ()  # the same, longest form first
        # WHY: the same short strings (verdicts, paths, argv) come by at every event, rendering and final scan of a run
        self._known_clean = _CLEAN_TO_ALL  # until something is learned, all redactors hold the same for clean

    @property
    def ledger(self) -> dict[str, dict[str, int]]:
        """How often which rule took something out of which file: ``{rule: {file: count}}``."""
        with self._lock:
            return {rule: dict(files) for rule, files in sorted(self._ledger.items())}

    def count(self, where: str) -> int:
        """How many secrets were taken out of one file."""
        with self._lock:
            return sum(files.get(where, 0) for files in self._ledger.values())

    def learn(self, name: str, value: str) -> bool:
        """Register a known secret: from now on it is found in every usual encoding. False if too short to be searched for."""
        if len(value) < _SHORTEST or _benign(value, "password"):
            return False
        pieces = [value]
        if "\n" in value:  # a key file: each line may turn up alone
            pieces += [line.strip() for line in value.splitlines() if len(line.strip()) >= 16 and not line.startswith("-----")]
        if value.strip() != value and len(value.strip()) >= _SHORTEST:
            pieces.append(value.strip())
        with self._lock:
            before = len(self._learned)
            for piece in pieces:
                for form in _encodings(piece):
                    self._learned.setdefault(form, _label(name))
            if len(self._learned) != before:
                self._known_clean = set()
                self._learned_first = tuple(sorted(self._learned.items(), key=lambda item: -len(item[0])))
        return True

    def text(self, text: str, where: str) -> str:
        """The same text without secrets."""
        return self._clean(text, _Tally(self, where))

    def data(self, data: bytes, where: str) -> bytes:
        """The same bytes without secrets (the same object if there are none); bytes that are no UTF-8 stay as they are."""
        text = self._suspicious(data)
        if text is None:
            return data
        cleaned = self._clean(text, _Tally(self, where))
        return data if cleaned == text else cleaned.encode("utf-8", "surrogateescape")

    def value(self, value: Any, where: str) -> Any:
        """The same JSON-like value without secrets: strings are cleaned; what stands under a secret key is taken out whole."""
        tally, before = _Tally(self, where), self._learned_first
        cleaned = self._clean_value(value, tally)
        return cleaned if self._learned_first is before else self._clean_value(cleaned, tally)

    def scan(self, data: bytes, where: str, *, rendered: bool = False) -> list[Hit]:
        """What would still be taken out of ``data``; the ledger stays as it is.

        JSON and JSON lines are read first, since escaping hides secrets. For ``rendered`` files (HTML, Markdown, XML: made
        from values that were cleaned before) only rules that need no context count, on the unescaped text.
        """
        tally = _Tally(None, where)
        if rendered:
            text = html.unescape(data.decode("utf-8", "surrogateescape"))
            self._clean(text, tally)
            return [hit for hit in tally.hits() if hit.rule in _CERTAIN]
        decoded = _as_json(data)
        if decoded is not None:
            for item in decoded:
                self._clean_value(item, tally)
        else:
            text = self._suspicious(data) or ""
            self._clean(text, tally)
        return tally.hits()

    # -- how

    def _suspicious(self, data: bytes) -> str | None:
        """The text of data in which a rule could match, else None. A plain substring search costs little even on many MB."""
        low = data.lower()
        hit = any(map(low.__contains__, _HINT_BYTES))
        hit = hit or any(form.encode("utf-8", "surrogateescape") in data for form, _ in self._learned_first)
        hit = hit or bool(re.search(rb"\[[0-9]{1,3},\s?[0-9]{1,3},\s?[0-9]{1,3},", data))
        return data.decode("utf-8", "surrogateescape") if hit else None

    def _clean(self, text: str, tally: _Tally) -> str:
        known = self._known_clean  # a set of its own for each state of what is learned: a stale one is never added to by mistake
        if not text or text in known:
            return text
        before = self._learned_first
        cleaned = self._clean_anew(text, tally)
        if (
            self._learned_first is not before
        ):  # what was learned from the end of a text may stand at its beginning, without its name
            cleaned = self._clean_learned(cleaned, tally)
        if cleaned == text and len(text) <= _REMEMBERED_LENGTH and len(known) < _REMEMBERED:
            known.add(text)
        return cleaned

    def _clean_anew(self, text: str, tally: _Tally) -> str:
        text = self._clean_learned(text, tally)
        if "\0" in text:
            return self._clean_nul_separated(text, tally)
        low = _ascii_lower(text)
        if "private key" in low:  # whole blocks first: they hold line ends
            text = _PRIVATE_KEY.sub(lambda _: tally.took("private-key", "private-key"), text)
        if any(map(low.__contains__, _HINTS)):
            if any(map(low.__contains__, _KEYWORDS)):  # then by name, since the name says most to a reader
                text = self._clean_names(text, tally)
            for rule, hints, shape in _SHAPES:
                if any(map(low.__contains__, hints)):
                    text = _in_lines(text, hints, shape, _replacer(rule, tally))
            if "basic" in low:
                text = _in_lines(text, ("basic",), _BASIC, lambda m: _basic(m, tally))
        if "[" in text and _BYTE_ARRAY.search(text):
            text = _BYTE_ARRAY.sub(lambda m: self._clean_byte_array(m[0], tally), text)
        return text

    def _clean_learned(self, text: str, tally: _Tally) -> str:
        """Known values, in all their encodings; the longest first, since one may hold another."""
        for form, name in self._learned_first:
            if form in text:
                for _ in range(text.count(form)):
                    replacement = tally.took("learned", name)
                text = text.replace(form, replacement)
        return text

    def _clean_nul_separated(self, text: str, tally: _Tally) -> str:
        """``/proc/PID/environ`` and ``cmdline``: a value ends at NUL and may hold anything else."""
        pieces = text.split("\0")
        for at, piece in enumerate(pieces):
            name, equals, value = piece.partition("=")
            if equals and re.fullmatch(r"[A-Za-z0-9_.-]+", name) and secret_name(name):
                pieces[at] = f"{name}={self._replace(value, name, tally)}"
            elif at and _takes_secret(pieces[at - 1]) and not piece.startswith("--"):
                pieces[at] = self._replace(piece, pieces[at - 1], tally, rule="flag")
            else:
                pieces[at] = self._clean(piece, tally)
        return "\0".join(pieces)

    def _clean_names(self, text: str, tally: _Tally) -> str:
        """``NAME=value``, ``"name": "value"``, ``X-Api-Key: value``, ``--api-key value`` for names that mean a secret.

        Walks from keyword to keyword and reads the name around it, so that the time stays linear in the text.
        """
        out: list[str] = []
        done = 0
        for at, keyword in _keywords(_ascii_lower(text)):
            if at < done:
                continue
            left = self._name_start(text, at, done)
            rest = _NAME_REST.match(text, at + len(keyword))
            right = rest.end() if rest else at + len(keyword)
            name = text[left:right]
            if not secret_name(name) or text.endswith("[redacted:", 0, left):
                continue
            span = self._flag_value(text, name, right) or self._named_value(text, name, left, right)
            if span is None:
                continue
            start, end, rule = span
            out += [text[done:start], self._replace(text[start:end], name, tally, rule=rule)]
            done = end
        return "".join([*out, text[done:]]) if out else text

    @staticmethod
    def _name_start(text: str, at: int, floor: int) -> int:
        left = at
        while left > floor and at - left < 80 and text[left - 1] in _NAME_CHARS:
            left -= 1
        if left > floor and text[left - 1] == "\\" and text[left] in "nrt":
            left += 1  # the n of an escaped line end is not part of the name
        return left

    @staticmethod
    def _flag_value(text: str, name: str, right: int) -> tuple[int, int, str] | None:
        """Where the value of ``--name value`` stands, in a command line or in a JSON or Python list of arguments."""
        sep = _FLAG_SEP.match(text, right) if name.startswith("-") else None
        if sep is None:
            return None
        start = sep.end()
        end = _quoted_end(text, start, sep["open"]) if sep["open"] else -1
        if end < 0:
            unquoted = _UNQUOTED.match(text, start)
            end = unquoted.end() if unquoted else start
        value = text[start:end]
        if not value or (value.startswith("-") and not sep["open"] and sep["sep"] != "="):
            return None
        return start, end, "flag"

    def _named_value(self, text: str, name: str, left: int, right: int) -> tuple[int, int, str] | None:
        """Where the value of ``NAME=value`` or ``name: value`` stands."""
        tail = _TAIL.match(text, right)
        if tail is None:
            return None
        start, end = tail.end(), self._value_end(text, left, name, tail)
        last_on_line = not text[end : end + 200].partition("\n")[0].strip()
        if start == end or not self._believable(name, text[start:end], tail, last_on_line=last_on_line):
            return None
        return start, end, "variable"

    @staticmethod
    def _value_end(text: str, left: int, name: str, tail: re.Match[str]) -> int:
        start = tail.end()
        if tail["open"]:
            end = _quoted_end(text, start, tail["open"].lstrip("bru"))
            if end >= 0:
                return end
        elif name.isupper() and left and text[left - 1] in "\"'" and not tail["close"]:
            # "NAME=a value with spaces": the quote stands before the name, as systemd and docker write it
            slashes = len(text[: left - 1][-3:]) - len(text[: left - 1][-3:].rstrip("\\"))
            end = _quoted_end(text, start, "\\" * slashes + text[left - 1])
            if end >= 0:
                return end
        unquoted = _UNQUOTED.match(text, start)
        end = unquoted.end() if unquoted else start
        if left and text[left - 1] in "?&":
            cut = re.search(r"[&#]", text[start:end])
            end = start + cut.start() if cut else end
        return end

    @staticmethod
    def _believable(name: str, value: str, tail: re.Match[str], *, last_on_line: bool) -> bool:
        """Prose says "token: …" about other things than secrets."""
        quoted = bool(tail["open"])
        plausible = _random_looking(value.rstrip(",;)]}")) or (quoted and len(value) >= 8 and " " not in value)
        if _bare_token(name) and not plausible:
            return name.isupper() and "=" in tail["sep"]
        if ":" in tail["sep"] and not quoted:
            if "token" in name.lower() or tail["sep"] == ":":
                return _random_looking(value)
            # "API_KEY: differs from …" is prose; "password: hunter" at the end of a line is not
            return bool(re.search(r"[^a-z,.]", value)) or len(value) >= 16 or last_on_line
        return True

    def _replace(self, value: str, name: str, tally: _Tally, *, rule: str = "variable") -> str:
        """What stands for the value of a secret name, punctuation behind it kept; a value that looks random is learned."""
        if _benign(value, name):
            return value
        core = value.rstrip(",;)]}") if not _REDACTED.match(value) else value
        if not core:
            return value
        if len(core) >= 12 and re.search(r"[0-9]", core) and re.search(r"[A-Za-z]", core) and not re.search(r"[\s\[]", core):
            tally.learn(name, core)
        return tally.took(rule, name) + value[len(core) :]

    def _clean_byte_array(self, text: str, tally: _Tally) -> str:
        """The journal exports a field with control characters as an array of byte values, in which a secret is still readable."""
        try:
            raw = bytes(int(n) for n in text[1:-1].split(","))
        except ValueError:
            return text
        before = raw.decode("utf-8", "surrogateescape")
        after = self._clean(before, tally)
        return text if after == before else "[" + ",".join(str(b) for b in after.encode("utf-8", "surrogateescape")) + "]"

    def _clean_value(self, value: Any, tally: _Tally) -> Any:
        if isinstance(value, str):
            return self._clean(value, tally)
        if value is None or isinstance(value, int | float):
            return value
        if isinstance(value, Mapping):
            return self._clean_mapping(value, tally)
        if isinstance(value, list | tuple):
            return self._clean_list(value, tally)
        return value

    def _clean_mapping(self, value: Mapping[Any, Any], tally: _Tally) -> dict[Any, Any]:
        named = value.get("name", value.get("key")) if len(value) <= 4 else None
        out: dict[Any, Any] = {}
        for key, item in value.items():
            if isinstance(key, str) and secret_name(key):
                out[key] = self._take_whole(item, key, tally)
            elif key == "value" and isinstance(named, str) and secret_name(named):
                out[key] = self._take_whole(item, named, tally)
            else:
                out[self._clean(key, tally) if isinstance(key, str) else key] = self._clean_value(item, tally)
        return out

    def _take_whole(self, item: Any, name: str, tally: _Tally) -> Any:
        if isinstance(item, str):
            if _bare_token(name) and (len(item) < 8 or re.search(r"\s", item)):
                return self._clean(item, tally)  # {"token": " the"} is a piece of text with its log-probability
            return self._replace(item, name, tally, rule="key")
        if isinstance(item, Mapping):
            names = {key: str(key) if secret_name(str(key)) else name for key in item}
            return {key: self._take_whole(inner, names[key], tally) for key, inner in item.items()}
        if isinstance(item, list | tuple):
            return [self._take_whole(inner, name, tally) for inner in item]
        if isinstance(item, int | float) and not isinstance(item, bool) and not _benign(str(item), name):
            return tally.took("key", name)
        return item

    def _clean_list(self, items: Sequence[Any], tally: _Tally) -> list[Any]:
        if len(items) >= 8 and all(isinstance(i, int) and not isinstance(i, bool) and 0 <= i <= 255 for i in items):
            return list(json.loads(self._clean_byte_array(json.dumps(list(items)), tally)))
        out: list[Any] = []
        for at, item in enumerate(items):
            before = items[at - 1] if at else None
            if isinstance(item, str) and isinstance(before, str) and _takes_secret(before):
                out.append(item if item.startswith("--") else self._replace(item, before, tally, rule="flag"))
            elif isinstance(item, str) and at and _is_variable(items[0]) and _random_looking(item):
                out.append(self._replace(item, items[0], tally))  # a table row: name, value, value
            else:
                out.append(self._clean_value(item, tally))
        return out


def _takes_secret(flag: str) -> bool:
    """Whether the argument after this one is a secret: ``--api-key``, but not ``--api-key=x``."""
    return flag.startswith("-") and "=" not in flag and secret_name(flag)


def _is_variable(item: Any) -> bool:
    return isinstance(item, str) and bool(re.fullmatch(r"[A-Z][A-Z0-9_]{3,60}", item)) and secret_name(item)


def _as_json(data: bytes) -> list[Any] | None:
    """One JSON document, or JSON lines; None for anything else."""
    head = data.lstrip()[:1]
    if head not in (b"{", b"["):
        return None
    try:
        return [json.loads(data)]
    except ValueError:
        pass
    try:
        return [json.loads(line) for line in data.splitlines() if line.strip()]
    except ValueError:
        return None


def _replacer(rule: str, tally: _Tally) -> Callable[[re.Match[str]], str]:
    def replace(found: re.Match[str]) -> str:
        groups = found.groupdict()
        kept = groups.get("keep") or groups.get("keep2") or ""
        return kept + tally.took(rule, rule) + (groups.get("after") or "")

    return replace


def _basic(found: re.Match[str], tally: _Tally) -> str:
    """``Basic dXNlcjpwYXNz`` only when it decodes to ``user:password``: "basic information" is prose."""
    blob = found["blob"]
    try:
        plain = base64.b64decode(blob + "=" * (-len(blob) % 4), validate=True)
    except (binascii.Error, ValueError):
        return found[0]
    if b":" not in plain or not all(32 <= byte < 127 for byte in plain):
        return found[0]
    return found["keep"] + tally.took("basic", "basic")


class _Tally:
    """Counts what one call takes out, into the redactor's ledger or, for a scan, only here."""

    def __init__(self, redactor: Redactor | None, where: str) -> None:
        self._redactor = redactor
        self._where = where
        self._counts: dict[str, int] = {}

    def took(self, rule: str, name: str) -> str:
        self._counts[rule] = self._counts.get(rule, 0) + 1
        if self._redactor is not None:
            with self._redactor._lock:
                files = self._redactor._ledger.setdefault(rule, {})
                files[self._where] = files.get(self._where, 0) + 1
        return f"[redacted:{_label(name)}]"

    def learn(self, name: str, value: str) -> None:
        if self._redactor is not None:
            self._redactor.learn(name, value)

    def hits(self) -> list[Hit]:
        return [Hit(rule, self._where, count) for rule, count in sorted(self._counts.items())]
