"""What ``python3 -m sglang.launch_server`` runs inside the lab's machines: a stand-in for SGLang, with no GPU and no model.

It lies in the guest as ``sglang/launch_server.py`` beside the stand-in itself (``sglang/standin``), so that the process has a
real command line and a real version. See :mod:`proofbook.lab.standin.process` for its settings.
"""

from __future__ import annotations

import importlib

if __name__ == "__main__":
    importlib.import_module("sglang.standin.process").main()
