"""What known log lines mean, and a judge that holds logs against them.

>>> from proofbook.signatures import LogLine, judge
>>> said = judge([LogLine("NVRM: Xid (PCI:0000:41:00): 79, GPU has fallen off the bus.")])
>>> [(f.signature, f.device, str(f.verdict), f.root) for f in said.findings]
[('xid-79', '0000:41:00.0', 'FAIL', True)]
"""

from proofbook.signatures.catalog import BadSignature, Signature, SignatureSet, load
from proofbook.signatures.judge import Judgement, LogContext, LogLine, Moment, SignatureFinding, judge

__all__ = [
    "BadSignature",
    "Judgement",
    "LogContext",
    "LogLine",
    "Moment",
    "Signature",
    "SignatureFinding",
    "SignatureSet",
    "judge",
    "load",
]
