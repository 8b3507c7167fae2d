"""Read-only questions to a machine, one module a subsystem; their values; and the driver that asks many in few round trips."""

from proofbook.probes.base import Answer, drive

__all__ = ["Answer", "drive"]
