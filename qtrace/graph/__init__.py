"""The graph layer: the only room that touches the internals of MegEngine's traced modules."""

from __future__ import annotations

from qtrace.graph.edit import GraphEditor, add_submodule, delete_attribute, set_parameter
from qtrace.graph.files.serialize import load, save
from qtrace.graph.flatten import flatten
from qtrace.graph.interpreter import Interpreter
from qtrace.graph.lint import LintProblem, check, lint
from qtrace.graph.pattern import Anything, Const, Mismatch, Op, Param, PatternMatch, match
from qtrace.graph.rewrite import RewriteRule, RuleResult, apply_rules
from qtrace.graph.table import format_table, table
from qtrace.graph.tracing.trace import trace
from qtrace.graph.walk import exprs, users

__all__ = [
    "Anything",
    "Const",
    "GraphEditor",
    "Interpreter",
    "LintProblem",
    "Mismatch",
    "Op",
    "Param",
    "PatternMatch",
    "RewriteRule",
    "RuleResult",
    "add_submodule",
    "apply_rules",
    "check",
    "delete_attribute",
    "exprs",
    "flatten",
    "format_table",
    "lint",
    "load",
    "match",
    "save",
    "set_parameter",
    "table",
    "trace",
    "users",
]
