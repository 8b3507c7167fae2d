"""Flags of SGLang's releases, and command lines held against them."""

from __future__ import annotations

import pytest

from proofbook.errors import CannotTell
from proofbook.probes.sglang_flags import check_argv, flags_of, parse_help, resolve_argv, server_words

HELP = """\
usage: launch_server.py [-h] --model-path MODEL_PATH [--tp-size N]

options:
  -h, --help            show this help message and exit
  --model-path MODEL_PATH, --model MODEL_PATH
                        The path of the model weights. See --tokenizer-path.
  --tensor-parallel-size TENSOR_PARALLEL_SIZE, --tp-size TENSOR_PARALLEL_SIZE
                        The tensor parallelism size.
  --speculative-algorithm {EAGLE,EAGLE3,NEXTN}
                        Speculative algorithm.
  --trust-remote-code   Whether or not to allow for custom models.
  --lora-paths [LORA_PATHS ...]
  --cuda-graph-bs CUDA_GRAPH_BS [CUDA_GRAPH_BS ...]
  -p, --port PORT       The port.
"""


def fatal(words: str, version: str, help_text: str | None = None) -> list[tuple[str, str]]:
    return [(p.kind, p.flag) for p in check_argv(words.split(), version, help_text) if p.fatal]


@pytest.mark.parametrize(
    ("words", "version", "expected"),
    [
        ("--speculative-draft-epsilon 0.2", "0.5.9", [("unknown", "--speculative-draft-epsilon")]),
        ("--speculative-draft-epsilon 0.2", "0.5.23", [("unknown", "--speculative-draft-epsilon")]),
        ("--mamba-scheduler-strategy extra_buffer", "0.5.13", []),
        ("--mamba-scheduler-strategy extra_buffer", "0.5.19", []),
        ("--mamba-scheduler-strategy extra_buffer", "0.5.20", [("renamed", "--mamba-scheduler-strategy")]),
        ("--mamba-radix-cache-strategy extra_buffer", "0.5.9", [("renamed", "--mamba-radix-cache-strategy")]),
        ("--cuda-graph-max-bs 8", "0.5.20", [("ambiguous", "--cuda-graph-max-bs")]),
        ("--cuda-graph-max-bs 8", "0.5.13", []),
        ("--speculative-algo NEXTN", "0.5.9", []),
        ("--speculative-num 6", "0.5.9", [("ambiguous", "--speculative-num")]),
        ("--speculative-adaptive", "0.5.9", [("not-yet", "--speculative-adaptive")]),
        ("--speculative-skip-dp-mlp-sync", "0.5.23", [("removed", "--speculative-skip-dp-mlp-sync")]),
        ("--speculative-algorithm MTP", "0.5.9", [("value", "--speculative-algorithm")]),
        ("--speculative-algorithm=MTP", "0.5.14", [("value", "--speculative-algorithm")]),
        ("--speculative-algorithm nextn", "0.5.14", []),
        ("--speculative-algorithm nextn", "0.5.9", [("value", "--speculative-algorithm")]),
        ("--speculative-num-steps 5a", "0.5.9", [("value", "--speculative-num-steps")]),
        ("--speculative-num-steps", "0.5.9", [("missing-value", "--speculative-num-steps")]),
        ("--mem-fraction-static 0,75", "0.5.9", [("value", "--mem-fraction-static")]),
        ("--tp 4 stray", "0.5.9", [("unknown", "stray")]),
    ],
)
def test_what_a_release_refuses(words: str, version: str, expected: list[tuple[str, str]]) -> None:
    assert fatal(words, version) == expected


def test_the_nearest_real_flags_are_named() -> None:
    (problem,) = check_argv(["--speculative-draft-epsilon", "0.2"], "0.5.9")
    assert problem.nearest == ("--speculative-accept-threshold-single", "--speculative-accept-threshold-acc")
    (problem,) = check_argv(["--cuda-graph-max-bs", "8"], "0.5.22")
    assert "since 0.5.14 it is --cuda-graph-max-bs-decode" in problem.text
    (problem,) = check_argv(["--speculative-num-stepz", "5"], "0.5.9")
    assert problem.nearest[0] == "--speculative-num-steps"


def test_what_is_not_fatal_is_said() -> None:
    kinds = {p.kind for p in check_argv(["--tp", "4", "--tp-size", "8", "--mamba-scheduler-strategy", "auto"], "0.5.15")}
    assert kinds == {"abbreviated", "repeated", "deprecated"}


def test_a_release_that_is_not_in_the_table_says_so() -> None:
    first = check_argv(["--tp-size", "4"], "0.5.10.dev12+gabc")[0]
    assert (first.kind, first.fatal) == ("unsure", False)
    assert flags_of("0.5.99").by == "the table of 0.5.23"
    assert flags_of("0.5.10.post1").exact
    with pytest.raises(CannotTell, match="not a version"):
        flags_of("main")


def test_the_launchers_own_help_decides() -> None:
    flags = parse_help(HELP)
    assert set(flags) == {
        "--model-path", "--model", "--tensor-parallel-size", "--tp-size", "--speculative-algorithm", "--trust-remote-code",
        "--lora-paths", "--cuda-graph-bs", "--port",
    }  # fmt: skip
    assert flags["--speculative-algorithm"].choices == ("EAGLE", "EAGLE3", "NEXTN")
    assert [flags[f].takes for f in ("--trust-remote-code", "--port", "--lora-paths", "--cuda-graph-bs", "--model")] == [
        "", "one", "many", "many", "one",
    ]  # fmt: skip
    assert fatal("--model m --tp 4 --trust-remote-code", "0.5.9", HELP) == []
    assert fatal("--model m --trust-remote-code yes", "0.5.9", HELP) == [("unknown", "yes")]
    assert fatal("--mem-fraction-static 0.8", "0.5.9", HELP) == [("unknown", "--mem-fraction-static")]
    with pytest.raises(CannotTell, match="names no flag"):
        parse_help("nothing")


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        ("/v/bin/python -u -m sglang.launch_server --tp 4", ["--tp", "4"]),
        ("/v/bin/sglang serve --tp 4", ["--tp", "4"]),
        ("/v/bin/python /v/bin/sglang serve --tp 4", ["--tp", "4"]),
        ("python3 /src/launch_server.py --tp 4", ["--tp", "4"]),
        ("--tp 4", ["--tp", "4"]),
    ],
)
def test_where_the_servers_own_words_begin(argv: str, words: list[str]) -> None:
    assert list(server_words(argv.split())[1]) == words


def test_flags_are_resolved_with_their_values() -> None:
    resolved, _ = resolve_argv(["--tp", "4", "--speculative-algo=NEXTN", "--trust-remote-code"], flags_of("0.5.9"))
    assert [(r.name, r.values) for r in resolved] == [
        ("--tp-size", ("4",)),
        ("--speculative-algorithm", ("NEXTN",)),
        ("--trust-remote-code", ()),
    ]
