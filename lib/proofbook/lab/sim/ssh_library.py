"""asyncssh, imported without its search for optional libraries.

WHY: while it is imported, asyncssh asks ``ctypes.util.find_library`` for liboqs and nettle, which starts ``ldconfig`` and a
compiler as child processes. A lab machine needs neither library, and is waited for by a person.
"""

from __future__ import annotations

import ctypes.util

_find_library = ctypes.util.find_library
ctypes.util.find_library = lambda name: None
try:
    import asyncssh
finally:
    ctypes.util.find_library = _find_library

__all__ = ["asyncssh"]
