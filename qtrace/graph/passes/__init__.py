"""Passes over a graph with a contract: dead code, common subexpressions, constants."""

from __future__ import annotations

from qtrace.graph.passes.base import FLAT, SOUND, Condition, GraphPass, PassReport, run_passes
from qtrace.graph.passes.cleaning import (
    CONSTANTS_FOLDED,
    NO_COMMON_SUBEXPRESSIONS,
    NO_DEAD_CODE,
    FoldConstants,
    MergeCommonSubexpressions,
    RemoveDeadCode,
)

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
