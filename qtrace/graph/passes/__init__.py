"""Passes over a graph with a contract: dead code, common subexpressions, constants."""

from __future__ import annotations

from qtrace.graph.passes.base import FLAT, SOUND, Condition, GraphPass, PassReport, run_passes
from qtrace.graph.passes.common_subexpressions import NO_COMMON_SUBEXPRESSIONS, MergeCommonSubexpressions
from qtrace.graph.passes.constants import CONSTANTS_FOLDED, FoldConstants
from qtrace.graph.passes.dead_code import NO_DEAD_CODE, RemoveDeadCode

__all__ = [
    "CONSTANTS_FOLDED",
    "FLAT",
    "NO_COMMON_SUBEXPRESSIONS",
    "NO_DEAD_CODE",
    "SOUND",
    "Condition",
    "FoldConstants",
    "GraphPass",
    "MergeCommonSubexpressions",
    "PassReport",
    "RemoveDeadCode",
    "run_passes",
]
