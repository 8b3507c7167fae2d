"""Which packages a server's Python would import: one JSON line. Nothing of them is imported, so no GPU is touched."""

import json
import platform
from importlib import metadata

NAMES = ("sglang", "torch", "transformers", "flashinfer-python", "sgl-kernel", "sglang-kernel", "xgrammar")


def version(name: str) -> "str | None":
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


print(json.dumps({"python": platform.python_version(), "packages": {name: version(name) for name in NAMES}}))
