"""Programs that run on the far machine, one file each, and what goes there and comes back.

=================  ==========================================================================================
gather.sh          many read-only commands in one round trip; exec'ed as GATHER_COMMAND
run.sh             one command with its output as it comes; exec'ed as RUN_COMMAND
read_files.sh      text files by pattern; ``read_files`` / ``parse_files``
open_devices.sh    opens device nodes; ``open_devices`` / ``parse_open_devices``
cu_init.py         asks the CUDA driver library; ``cu_init`` / ``parse_cu_init``
put.sh             writes a file atomically; ``put_command``
guard.sh           files that change back by themselves unless somebody confirms; :mod:`proofbook.remote.guard`
lease.sh           who may change the machine, and which approvals were used; :mod:`proofbook.remote.lease`
detached.sh        a long step that outlives the connection; :mod:`proofbook.remote.detached`
iommu_identity.sh  sets the type of iommu groups at one boot; :mod:`proofbook.remote.iommu_identity`
reset_attempt.py   one reset of one PCI device; :mod:`proofbook.remote.gpu_reset`
p2p_probe.py       copies between all GPUs and compares; :mod:`proofbook.remote.p2p`
=================  ==========================================================================================

A simulated machine speaks the agents' wire format itself. It compares the exec'ed command line with GATHER_COMMAND and
RUN_COMMAND, collects standard input until ``read_gather_request`` or ``read_run_request`` returns a request instead of
None, and answers: with the bytes of ``write_gather_answer`` on stdout; or with those of ``write_run_start`` on both
streams, the output as it comes, and ``write_run_answer`` (stdout, stderr). Then exit status 0. Inside the commands it
recognises READ_FILES, OPEN_DEVICES, CU_INIT and PUT by their text.
The client sends no end of file on purpose: when it comes, nobody waits for the answer any more.
"""

from __future__ import annotations

from proofbook.remote.ask import (
    CU_INIT,
    OPEN_DEVICES,
    PUT,
    READ_FILES,
    CuInit,
    Files,
    _program,
    cu_init,
    open_devices,
    parse_cu_init,
    parse_files,
    parse_open_devices,
    put_command,
    read_files,
)
from proofbook.remote.wire import (
    GatherRequest,
    RunRequest,
    gather_request,
    parse_gather,
    read_gather_request,
    read_run_request,
    refusal,
    run_request,
    run_result,
    write_gather_answer,
    write_run_answer,
    write_run_start,
)

__all__ = [
    "CU_INIT",
    "GATHER",
    "GATHER_COMMAND",
    "OPEN_DEVICES",
    "PUT",
    "READ_FILES",
    "RUN",
    "RUN_COMMAND",
    "CuInit",
    "Files",
    "GatherRequest",
    "RunRequest",
    "cu_init",
    "gather_request",
    "open_devices",
    "parse_cu_init",
    "parse_files",
    "parse_gather",
    "parse_open_devices",
    "put_command",
    "read_files",
    "read_gather_request",
    "read_run_request",
    "refusal",
    "run_request",
    "run_result",
    "write_gather_answer",
    "write_run_answer",
    "write_run_start",
]


def _one_line(text: str) -> str:
    """A program without its comments and line ends; see the head of gather.sh for why."""
    lines = (line.strip() for line in text.splitlines())
    return " ".join(line for line in lines if line and not line.startswith("#"))


#: Text of gather.sh, and the constant command line that is exec'ed for it.
GATHER = _one_line(_program("gather.sh"))
GATHER_COMMAND = f"exec sh -c '{GATHER}' proofbook-gather"
#: Text of run.sh, and the constant command line that is exec'ed for it.
RUN = _one_line(_program("run.sh"))
RUN_COMMAND = f"exec sh -c '{RUN}' proofbook-run"
