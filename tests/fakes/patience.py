"""How long tests wait for what takes a moment on an idle machine."""

from __future__ import annotations

PATIENT_S = 300.0
"""Deadline of one call in tests that look at no clock: only what hangs takes so long. `scripts/test.sh` runs them at a
low priority with others, where a moment may become a minute."""
PATIENT_TEST_S = 1200.0
"""Deadline of such a test with its fixtures."""
