"""Exit codes of the command line next to 0, 1 (a check fails) and 2 (an error of the user)."""

from __future__ import annotations

__all__ = ["INTERNAL_ERROR", "INTERRUPTED"]

INTERNAL_ERROR = 70  # EX_SOFTWARE: Python's own 1 would look like a failed check
INTERRUPTED = 130
