"""Secrets out, look-alikes untouched."""

from __future__ import annotations

import base64
import json
import urllib.parse

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from proofbook.redact import Redactor, secret_name

HF = "hf_" + "AbCdEfGhIjKlMnOpQrStUvWxYz0123456789"[:34]
GH = "ghp_" + "a1B2" * 9
JWT = "eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiIxMjM0NTY3ODkwIn0.dozjgNryP4J3jVmNHl0w5N_XgL0n3I9PlFUP0THsR8U"
KEY_BODY = "b3BlbnNzaC1rZXktdjEAAAAABG5vbmUAAAAEbm9uZQ\nAAAAAAAAABAAAAMwAAAAtzc2gtZWQyNTUxOQ=="
PEM = f"-----BEGIN OPENSSH PRIVATE KEY-----\n{KEY_BODY}\n-----END OPENSSH PRIVATE KEY-----"
# put together here, so that scanners of this repository do not take them for real ones
GITLAB = "glpat-" + "AbCdEf0123456789xyzz"
SLACK = "xoxb-" + "123456789012-abcdefGHIJ"
PROJECT_KEY = "sk-proj-" + "Abc123Def456Ghi789"
NGC = "nvapi-" + "x1Y2z3" * 6

LEAKS = [
    # (text, secret, what stands there instead)
    (f"HF_TOKEN={HF}", HF, "HF_TOKEN=[redacted:HF_TOKEN]"),
    (f"pulling with {HF} from hub", HF, "pulling with [redacted:hugging-face-token] from hub"),
    (f"remote: {GH}", GH, "remote: [redacted:github-token]"),
    (f"key {GITLAB}", GITLAB, "key [redacted:gitlab-token]"),
    ("id AKIAIOSFODNN7EXAMPLE", "AKIAIOSFODNN7EXAMPLE", "id [redacted:aws-key-id]"),
    (SLACK, SLACK, "[redacted:slack-token]"),
    (f"using {PROJECT_KEY}", PROJECT_KEY, "using [redacted:api-key]"),
    (f"NGC {NGC}", NGC, "NGC [redacted:vendor-token]"),
    ("Authorization: Bearer abcdefgh", "abcdefgh", "Authorization: Bearer [redacted:authorization]"),
    ("curl -H 'Authorization: Token 0123'", "0123", "curl -H 'Authorization: Token [redacted:authorization]'"),
    ("got Bearer a1b2c3d4e5f6", "a1b2c3d4e5f6", "got Bearer [redacted:bearer]"),
    ("Basic dXNlcjpwYXNzd29yZA==", "dXNlcjpwYXNzd29yZA", "Basic [redacted:basic]"),
    ("git clone https://bob:hunter2@git.example/x", "hunter2", "git clone https://bob:[redacted:url-password]@git.example/x"),
    ("https://bob:p@ss@git.example/x", "p@ss", "https://bob:[redacted:url-password]@git.example/x"),
    (f"before\n{PEM}\nafter", "b3BlbnNzaC1rZXk", "before\n[redacted:private-key]\nafter"),
    (json.dumps({"key": PEM}), "b3BlbnNzaC1rZXk", '{"key": "[redacted:private-key]"}'),
    (f"session {JWT}", JWT, "session [redacted:jwt]"),
    ("Cookie: session=abc; theme=dark", "session=abc", "Cookie: [redacted:cookie]"),
    ("Environment=A=1 API_KEY=k9 B=2", "k9", "Environment=A=1 API_KEY=[redacted:API_KEY] B=2"),
    ('Environment="OPENAI_API_KEY=two words" B=2', "two words", 'Environment="OPENAI_API_KEY=[redacted:OPENAI_API_KEY]" B=2'),
    ("sglang --api-key k9 --tp 4", "k9", "sglang --api-key [redacted:api-key] --tp 4"),
    ("sglang --admin-api-key=k9 --tp 4", "k9", "sglang --admin-api-key=[redacted:admin-api-key] --tp 4"),
    (
        "argv[]=python3 --hf-token 'a b' ; ignore_errors=no",
        "a b",
        "argv[]=python3 --hf-token '[redacted:hf-token]' ; ignore_errors=no",
    ),
    ('["--api-key", "k 9", "--tp", "4"]', "k 9", '["--api-key", "[redacted:api-key]", "--tp", "4"]'),
    ("server_args=ServerArgs(api_key='k9', tp=4)", "k9", "server_args=ServerArgs(api_key='[redacted:api_key]', tp=4)"),
    ('{"MESSAGE": "said \\"api_key\\": \\"k9\\", ok"}', "k9", '{"MESSAGE": "said \\"api_key\\": \\"[redacted:api_key]\\", ok"}'),
    (
        "sqlalchemy.exc: (user='x', password='correct horse')",
        "correct horse",
        "sqlalchemy.exc: (user='x', password='[redacted:password]')",
    ),
    ("password: hunter2", "hunter2", "password: [redacted:password]"),
    ("x-api-key: k9", "k9", "x-api-key: [redacted:x-api-key]"),
    ("GET /v1?token=abcd1234&n=1", "abcd1234", "GET /v1?token=[redacted:token]&n=1"),
    ("machine h login bob password s3 macdef", " s3 ", "machine h login bob password [redacted:netrc] macdef"),
    ("SetCredential=hub:zzz", "zzz", "SetCredential=[redacted:SetCredential]"),
]

HARMLESS = [
    "GPU-5c2d1f3e-0b1a-4c55-9a6e-1f2e3d4c5b6a",
    "sha256:9aa1db523707b87c19f59fa6955dd49a7524d3d7ea51c567c440b7b4b1d8f5b1",
    "0000:c1:00.0 is in iommu group 14",
    "INVOCATION_ID=3f1c9a52d0b84e6f9a1177c2e05d4b38 BOOT_ID=7be2951d0f3a4c68b5d1e2f3a4b5c6d7",
    "max_total_num_tokens=83412, max_prefill_tokens=16384, context_len=32768",
    "Decode batch. #running-req: 3, #token: 12034, token usage: 0.12, gen throughput (token/s): 88.30, #queue-req: 0",
    "Prefill batch. #new-seq: 1, #new-token: 12, #cached-token: 0, cache hit rate: 0.00%",
    "eos_token_id=[151643, 151645], bos_token='<s>', pad_token=None, speculative_num_draft_tokens=6",
    "HF_HUB_OFFLINE=1 HF_HUB_DISABLE_IMPLICIT_TOKEN=1 TOKENIZERS_PARALLELISM=false",
    "--tokenizer-path Qwen/Qwen3 --speculative-num-draft-tokens 6 --tokenizer-mode auto",
    "api_key=None, hf_token=None, skip_tokenizer_init=False",
    "LoadCredential=hub:/etc/credstore/hub CREDENTIALS_DIRECTORY=/run/credentials/x",
    "PWD=/root OLDPWD=/ SSH_AUTH_SOCK=/tmp/ssh-XXXX/agent.1",
    "Accepted publickey for root from 192.0.2.7 port 40112 ssh2: ED25519 SHA256:VQpn1nVYk2yTw0b7mJr3y8pN0a5u6c9dE1fG2hI3jK4",
    "[sudo] password for ops: ",
    "Failed password for invalid user admin from 192.0.2.9 port 22",
    "task-1234567890abcdef disk-0123456789abcdef",
    "basic information about bearer channels",
    "http://127.0.0.1:30000/health 192.0.2.7:22 user@host:/path",
    "docker run --user 1000:1000 -u root",
    '{"token": "Hello", "logprob": -0.12}',
    "API_KEY: differs from the last kept run",
    "kernel: Freeing initrd memory key 14; keyboard: AT Translated Set 2",
    "-----BEGIN CERTIFICATE-----\nMIIB\n-----END CERTIFICATE-----",
]


@pytest.mark.parametrize(("text", "secret", "instead"), LEAKS, ids=[t[2][:40] for t in LEAKS])
def test_takes_out_the_secret_and_says_which(text: str, secret: str, instead: str) -> None:
    redactor = Redactor()
    assert redactor.text(text, "f") == instead
    assert secret not in redactor.text(text, "f")
    assert redactor.count("f") == 2


@pytest.mark.parametrize("text", HARMLESS)
def test_leaves_look_alikes(text: str) -> None:
    redactor = Redactor()
    assert redactor.text(text, "f") == text
    data = text.encode()
    assert redactor.data(data, "f") is data
    assert redactor.ledger == {}


def test_environ_and_cmdline_end_values_at_nul() -> None:
    redactor = Redactor()
    environ = b"A=1\0DB_PASSWORD=two words\nand a line\0HF_HUB_OFFLINE=1\0"
    assert redactor.data(environ, "e") == b"A=1\0DB_PASSWORD=[redacted:DB_PASSWORD]\0HF_HUB_OFFLINE=1\0"
    assert redactor.data(b"python3\0--api-key\0k 9\0--tp\x004\0", "c") == b"python3\0--api-key\0[redacted:api-key]\0--tp\x004\0"
    assert redactor.ledger == {"flag": {"c": 1}, "variable": {"e": 1}}


def test_bytes_that_are_no_text_survive() -> None:
    data = b"\xff\xfe HF_TOKEN=" + HF.encode() + b" \x80\x81"
    assert Redactor().data(data, "f") == b"\xff\xfe HF_TOKEN=[redacted:HF_TOKEN] \x80\x81"


def test_journal_byte_arrays_are_read() -> None:
    message = f"\x1b[31mlogin with {HF}\x1b[0m"
    line = json.dumps({"MESSAGE": list(message.encode())}, separators=(",", ":"))
    told = json.loads(Redactor().text(line, "f"))
    assert bytes(told["MESSAGE"]).decode() == "\x1b[31mlogin with [redacted:hugging-face-token]\x1b[0m"
    assert bytes(Redactor().value({"MESSAGE": list(message.encode())}, "f")["MESSAGE"]).count(b"redacted") == 1


def test_values_under_secret_keys_go_whole() -> None:
    value = {
        "environment": {"HF_TOKEN": "x y", "NCCL_DEBUG": "INFO"},
        "argv": ["python3", "--api-key", "k9", "--port", "30000"],
        "env": [{"name": "API_KEY", "value": "k9"}, {"name": "PORT", "value": "1"}],
        "credentials": {"user": "u1", "deep": ["p1"]},
        "rows": [["HF_TOKEN", "abc12345", "–"], ["PORT", "30000", "30001"]],
        "password": 1234,
        "api_key": None,
        "num_tokens": 5,
        "token": "Hello",
    }
    assert Redactor().value(value, "f") == {
        "environment": {"HF_TOKEN": "[redacted:HF_TOKEN]", "NCCL_DEBUG": "INFO"},
        "argv": ["python3", "--api-key", "[redacted:api-key]", "--port", "30000"],
        "env": [{"name": "API_KEY", "value": "[redacted:API_KEY]"}, {"name": "PORT", "value": "1"}],
        "credentials": {"user": "[redacted:credentials]", "deep": ["[redacted:credentials]"]},
        "rows": [["HF_TOKEN", "[redacted:HF_TOKEN]", "–"], ["PORT", "30000", "30001"]],
        "password": "[redacted:password]",
        "api_key": None,
        "num_tokens": 5,
        "token": "Hello",
    }


def test_a_random_value_is_recognised_later_without_its_name() -> None:
    redactor = Redactor()
    redactor.data(b"HUB_TOKEN=q8Zr71mPx0Lw\0", "environ")
    assert redactor.text("401 for q8Zr71mPx0Lw", "log") == "401 for [redacted:HUB_TOKEN]"


def test_short_and_empty_values_are_not_learned() -> None:
    redactor = Redactor()
    assert not redactor.learn("x", "abc")
    assert not redactor.learn("x", "true")
    assert redactor.text("abc true", "f") == "abc true"


def test_a_key_file_is_found_line_by_line() -> None:
    redactor = Redactor()
    redactor.learn("deploy-key", "first-line-of-the-key-file\nsecond-line-of-the-key-file\n")
    assert redactor.text("x second-line-of-the-key-file y", "f") == "x [redacted:deploy-key] y"


def test_scan_counts_and_leaves_the_ledger() -> None:
    redactor = Redactor()
    hits = redactor.scan(f'{{"a": "HF_TOKEN={HF}"}}\n{{"b": 1}}\n'.encode(), "journal.jsonl")
    assert [(h.rule, h.where, h.count) for h in hits] == [("variable", "journal.jsonl", 1)]
    assert HF not in repr(hits)
    assert redactor.ledger == {}
    assert redactor.scan(b"<td>api_key</td><td>x</td> password: is asked", "record.html", rendered=True) == []
    assert [h.rule for h in redactor.scan(f"<b>{HF}</b>".encode(), "record.html", rendered=True)] == ["hugging-face-token"]


def test_what_a_name_means() -> None:
    secret = (
        "HF_TOKEN",
        "hf_token",
        "--api-key",
        "accessToken",
        "client_secret",
        "PGPASSWORD",
        "MYSQL_PWD",
        "DB_PASS",
        "REDISCLI_AUTH",
        "API_TOKENS",
        "DBPASS",
        "IPMI_PW",
        "CREDS",
    )
    other = (
        "tokens",
        "max_new_tokens",
        "tokenizer",
        "token_id",
        "eos_token",
        "SECRET_FILE",
        "key",
        "keyboard",
        "secretary_id",
        "PWD",
        "pass",
        "auth_url",
        "auth-token.service",
        "NCCL_BYPASS",
    )
    assert [n for n in secret if not secret_name(n)] == []
    assert [n for n in other if secret_name(n)] == []


# ------------------------------------------------------------------------------------------- properties

ALPHABET = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789"
SECRETS = st.text(ALPHABET + "!%&/()=?+*~#-_.:,;<>|$ üß\"'\\", min_size=8, max_size=40).map(lambda s: "Q7" + s.strip() + "x9Z")
TEXTS = st.text(st.characters(codec="utf-8"), max_size=60)


@given(secret=SECRETS, before=TEXTS, after=TEXTS)
def test_a_learned_value_never_survives_in_any_encoding(secret: str, before: str, after: str) -> None:
    redactor = Redactor()
    assert redactor.learn("THE_SECRET", secret)
    raw = secret.encode()
    for form in (
        secret,
        json.dumps(secret),
        json.dumps(json.dumps(secret)),
        json.dumps(secret, ensure_ascii=False),
        repr(secret),
        urllib.parse.quote(secret),
        urllib.parse.quote_plus(secret),
        base64.b64encode(raw).decode(),
        base64.urlsafe_b64encode(raw).decode(),
        *(base64.b64encode(b"x" * n + raw + b'", "more": 1}').decode() for n in range(8)),
        *(base64.urlsafe_b64encode(b"?>" * n + raw + b"??").decode() for n in range(4)),
        raw.hex(),
    ):
        text = f"{before} {form} {after}"
        told = redactor.text(text, "f")
        assert "[redacted:" in told
        assert form.strip("\"'").rstrip("=") not in told
        assert redactor.data(text.encode(), "f").decode() == told


@given(
    st.one_of(
        TEXTS,
        st.lists(st.sampled_from([t for t, _, _ in LEAKS] + HARMLESS + ["\n", '"', "\\", ", ", "\0"]), max_size=6).map(" ".join),
    )
)
@settings(max_examples=300)
def test_a_second_pass_changes_nothing(text: str) -> None:
    redactor = Redactor()
    once = redactor.text(text, "f")
    assert Redactor().text(once, "f") == once
    assert Redactor().scan(once.encode("utf-8", "surrogatepass"), "f") == []


JSON_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.sampled_from([t for t, _, _ in LEAKS]) | TEXTS,
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(
            st.sampled_from(["token", "api_key", "argv", "name", "value", "reason", "x"]) | TEXTS, inner, max_size=4
        )
    ),
    max_leaves=12,
)


@given(JSON_VALUES)
def test_values_keep_their_shape_and_are_clean_after_one_pass(value: object) -> None:
    once = Redactor().value(value, "f")
    assert Redactor().value(once, "f") == once
    assert json.loads(json.dumps(once)) == once
    assert type(once) is type(value)


@given(st.binary(max_size=200))
def test_any_bytes_come_through(data: bytes) -> None:
    redactor = Redactor()
    cleaned = redactor.data(data, "f")
    assert cleaned == data or b"[redacted:" in cleaned


@pytest.mark.parametrize(
    ("text", "rule"),
    [
        ("curl 'https://acc.blob.example/c?sv=2024-01-01&sig=AbCdEfGhIjKlMnOpQrSt%3D'", "url-signature"),
        ("notify https://hooks.slack.com/services/T0AB/B0CD/EfGhIjKlMnOpQrSt", "webhook"),
        ("mysqldump -u backup -pS3cretWord llm", "database-password"),
    ],
)
def test_what_a_url_or_a_database_client_carries_is_taken_out(text: str, rule: str) -> None:
    redactor = Redactor()
    assert f"[redacted:{rule}]" in redactor.text(text, "x")
    assert (
        redactor.text("docker run -p8080:80 mysql:8.4 ; PASS: 3 passed", "x") == "docker run -p8080:80 mysql:8.4 ; PASS: 3 passed"
    )


def test_what_is_learned_at_the_end_of_a_text_is_taken_out_of_its_beginning() -> None:
    secret = "q7Rz2Lm9Xw4Kd8Vb"
    redactor = Redactor()
    assert secret not in redactor.text(f"started with {secret}\nDB_PASSWORD={secret}\n", "x")
    value = {"argv": ["serve", "q8Rz2Lm9Xw4Kd8Vb"], "environment": {"API_TOKEN": "q8Rz2Lm9Xw4Kd8Vb"}}
    assert "q8Rz2Lm9Xw4Kd8Vb" not in str(redactor.value(value, "y"))
