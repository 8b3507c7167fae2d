"""Real machines to prove things on, without GPU, KVM or docker: containers in a second, virtual machines in half a minute.

``lab:box`` is a container with a real systemd, journald, sshd and sudo; it borrows this machine's kernel, and so shows neither a
kernel log nor a GPU. ``lab:vm`` and ``lab:vm-<topology>`` are virtual machines with a kernel, an IOMMU and a reboot of their own.
Both need root on Linux. Their GPUs, their driver, their nvidia-smi and their SGLang are stand-ins and say so; all else is real.
"""

from __future__ import annotations

from proofbook.lab.real.endpoint import Endpoint
from proofbook.lab.real.machines import ensure, host_table, knows, names

__all__ = ["Endpoint", "ensure", "host_table", "knows", "names"]
