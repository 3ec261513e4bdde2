"""``python -m qtrace``."""

from __future__ import annotations

from qtrace.cli import main

main()
