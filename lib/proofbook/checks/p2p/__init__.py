"""Judging a run of the peer-to-peer probe: whose faults, how fast, which pairs, and what that means for serving.

::

    run = read_p2p(lines)                                           # proofbook.remote.p2p, of the stream or the state file
    matrix = judge_matrix(run, topology=…, iommu=…, baseline=…, boot_now=…)
    verdict = judge_p2p(matrix)                                     # allowed or not, and the fallback
    said = findings(matrix)                                         # the same as findings of a check
"""

from proofbook.checks.p2p.advertised import PeerClaims
from proofbook.checks.p2p.attribution import PairFault, WindowLog, attribute, logs_of
from proofbook.checks.p2p.bandwidth import Figure, Speed, class_of, figures_of, speeds
from proofbook.checks.p2p.conclusion import HYPOTHESIS, FallbackInEffect, concluded, fallback_rows
from proofbook.checks.p2p.matrix import Cell, P2pMatrix, State, changed, judge_matrix, state_changes
from proofbook.checks.p2p.room import GpusAreFree, GpusAreKnown, users_of
from proofbook.checks.p2p.usable import PairsUsable, bad_pairs, failed_in_short, usable, weighed
from proofbook.checks.p2p.validity import LeftAsItWas, ValidlyRun
from proofbook.checks.p2p.verdict import FALLBACK, P2pVerdict, findings, judge_p2p, prove_transport, serve_without

__all__ = [
    "FALLBACK",
    "HYPOTHESIS",
    "Cell",
    "FallbackInEffect",
    "Figure",
    "GpusAreFree",
    "GpusAreKnown",
    "LeftAsItWas",
    "P2pMatrix",
    "P2pVerdict",
    "PairFault",
    "PairsUsable",
    "PeerClaims",
    "Speed",
    "State",
    "ValidlyRun",
    "WindowLog",
    "attribute",
    "bad_pairs",
    "changed",
    "class_of",
    "concluded",
    "failed_in_short",
    "fallback_rows",
    "figures_of",
    "findings",
    "judge_matrix",
    "judge_p2p",
    "logs_of",
    "prove_transport",
    "serve_without",
    "speeds",
    "state_changes",
    "usable",
    "users_of",
    "weighed",
]
