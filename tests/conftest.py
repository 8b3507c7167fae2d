"""What holds for all tests."""

from __future__ import annotations

from hypothesis import settings

# No test has a stopwatch: a busy machine is no defect of the code. Speed is measured in benchmarks/.
settings.register_profile("proofbook", deadline=None)
settings.load_profile("proofbook")
