"""The graph layer: the only room that touches the internals of MegEngine's traced modules."""

from __future__ import annotations

from qtrace.display import format_table
from qtrace.graph.builder import GraphBuilder
from qtrace.graph.composites import compose
from qtrace.graph.dot import dot
from qtrace.graph.edit import GraphEditor
from qtrace.graph.files.serialize import load, save
from qtrace.graph.find import find
from qtrace.graph.flatten import flatten
from qtrace.graph.function_rule import AnyNumber, function_rule
from qtrace.graph.interpreter import Interpreter, locate_failure
from qtrace.graph.lint import LintProblem, check, lint
from qtrace.graph.module_tree import add_submodule, delete_attribute, set_parameter
from qtrace.graph.msc import MSCGraph, MSCNode, MSCPrim, MSCTensor, from_msc, to_traced
from qtrace.graph.node_meta import meta
from qtrace.graph.parts import Composition, split
from qtrace.graph.passes import FoldConstants, MergeCommonSubexpressions, RemoveDeadCode, run_passes
from qtrace.graph.pattern import Anything, Const, Mismatch, Op, Param, PatternMatch, match
from qtrace.graph.propagate import propagate_shapes, set_input_shapes
from qtrace.graph.rewrite import RewriteRule, RuleResult, apply_rules
from qtrace.graph.samples import SampleDifference, SamplesReport, check_samples
from qtrace.graph.source import PythonSource, to_source
from qtrace.graph.table import table
from qtrace.graph.tracing.trace import trace
from qtrace.graph.tracing.tracer import Tracer
from qtrace.graph.transformer import Transformer
from qtrace.graph.walk import exprs, users

__all__ = [
    "AnyNumber",
    "Anything",
    "Composition",
    "Const",
    "FoldConstants",
    "GraphBuilder",
    "GraphEditor",
    "Interpreter",
    "LintProblem",
    "MSCGraph",
    "MSCNode",
    "MSCPrim",
    "MSCTensor",
    "MergeCommonSubexpressions",
    "Mismatch",
    "Op",
    "Param",
    "PatternMatch",
    "PythonSource",
    "RemoveDeadCode",
    "RewriteRule",
    "RuleResult",
    "SampleDifference",
    "SamplesReport",
    "Tracer",
    "Transformer",
    "add_submodule",
    "apply_rules",
    "check",
    "check_samples",
    "compose",
    "delete_attribute",
    "dot",
    "exprs",
    "find",
    "flatten",
    "format_table",
    "from_msc",
    "function_rule",
    "lint",
    "load",
    "locate_failure",
    "match",
    "meta",
    "propagate_shapes",
    "run_passes",
    "save",
    "set_input_shapes",
    "set_parameter",
    "split",
    "table",
    "to_source",
    "to_traced",
    "trace",
    "users",
]
