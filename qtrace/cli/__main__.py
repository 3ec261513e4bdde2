"""``python -m qtrace.cli``."""

from __future__ import annotations

from qtrace.cli import main

main()
