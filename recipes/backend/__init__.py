"""Recipes for targets: schemes, observers, and what each target's rules add. They go first in ``imports``."""
