"""proofbook: Jupyter runbooks and investigation notebooks for GPU servers.

Importing the package is cheap on purpose: pandas, matplotlib, papermill and ipywidgets are imported only when used.
"""

from __future__ import annotations

from typing import Any

__version__ = "0.1.0"

__all__ = ["__version__", "open_run"]


def __getattr__(name: str) -> Any:
    if name == "open_run":
        from proofbook.notebook import open_run

        return open_run
    raise AttributeError(f"module 'proofbook' has no attribute {name!r}")
