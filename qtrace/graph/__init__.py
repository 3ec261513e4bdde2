"""The graph layer, on the internals of MegEngine's traced modules.

Its public names are loaded when they are first used: who edits a graph does not load the tracer and MSCGraph.

``trace`` runs MegEngine's tracer in eval mode, watches which values ``forward`` reads as Python values,
and compares the result with the module on other inputs. It reports what a trace cannot hold: values of the
data that Python reads, lost parameters, custom gradients. ``tracing/session.py`` is one such trace.
``running.py`` makes modules of functions, and ``tracer.py`` keeps calls whole. ``differences.py``
compares a batch with its samples. ``kernels.py`` refuses calls at which a kernel of MegEngine's ends the
process. ``graph/`` and what takes its graphs apart (``extras/source/``, ``extras/split/``,
``targets/msc/``) touch the internals of a TracedModule. Everything else works through its editor,
interpreter, patterns and tables. A shape that a node records is true, not marked as stale. The editor
infers the shapes after an edit when it commits (``inference.py``, ``renewal.py``), on variables without
values, and refuses an edit after which an op cannot run. Copies of a graph share the values of large
tensors until one side is written (``kernels.py``). ``builder.py`` infers the shapes of a new graph in the
same way: its kernels run only on constants and sizes. A change that passes no editor, such as a layer's
stride, is renewed by ``prepare`` and by ``PlainGraph``, and reported by ``lint``. ``opaque.py`` has the
leaf for nodes of an ONNX file that MegEngine lacks: a small ONNX model as bytes, which
``onnxfile/fragment.py`` runs and infers. ``recurrent.py`` has recurrent layers as functions, which
``prepare`` and the float exports write for MegEngine's modules. ``gradients/recurrent.py`` computes them
forwards and backwards. ``native.py`` puts float layers in the place of MegEngine's own quantized ones, and
keeps their scales for ``preparation/passes/native.py``. The graph of a prepared or converted module is edited
only by passes that renew its record. ``graph/files/`` saves models and reads them without running anything
that a file brings.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from qtrace.plugins import load_when_used

if TYPE_CHECKING:
    from qtrace.display import format_table
    from qtrace.extras.source import PythonSource, to_source
    from qtrace.extras.split.split import Composition, split
    from qtrace.graph.builder import GraphBuilder
    from qtrace.graph.composites import compose
    from qtrace.graph.differences import SampleDifference, SamplesReport, check_samples
    from qtrace.graph.edit import GraphEditor
    from qtrace.graph.files.serialize import load, save
    from qtrace.graph.flatten import add_submodule, delete_attribute, flatten, set_parameter
    from qtrace.graph.function_rule import AnyNumber, function_rule
    from qtrace.graph.interpreter import Interpreter, locate_failure
    from qtrace.graph.lint import LintProblem, check, lint
    from qtrace.graph.notes import meta
    from qtrace.graph.passes import FoldConstants, MergeCommonSubexpressions, RemoveDeadCode, run_passes
    from qtrace.graph.pattern import Anything, Const, Mismatch, Op, Param, PatternMatch, match
    from qtrace.graph.renewal import propagate_shapes, set_input_shapes
    from qtrace.graph.rewrite import RewriteRule, RuleResult, apply_rules
    from qtrace.graph.tracing.trace import trace
    from qtrace.graph.tracing.tracer import Tracer
    from qtrace.graph.transformer import Transformer
    from qtrace.graph.views import dot, find, table
    from qtrace.graph.walk import exprs, users
    from qtrace.targets.msc.document import MSCGraph, MSCNode, MSCPrim, MSCTensor, from_msc
    from qtrace.targets.msc.rebuild import to_traced

_HOMES = {
    "qtrace.display": "format_table",
    "qtrace.graph.builder": "GraphBuilder",
    "qtrace.graph.composites": "compose",
    "qtrace.graph.edit": "GraphEditor",
    "qtrace.graph.files.serialize": "load save",
    "qtrace.graph.flatten": "flatten add_submodule delete_attribute set_parameter",
    "qtrace.graph.function_rule": "AnyNumber function_rule",
    "qtrace.graph.interpreter": "Interpreter locate_failure",
    "qtrace.graph.lint": "LintProblem check lint",
    "qtrace.targets.msc.document": "MSCGraph MSCNode MSCPrim MSCTensor from_msc",
    "qtrace.targets.msc.rebuild": "to_traced",
    "qtrace.graph.notes": "meta",
    "qtrace.extras.split": "Composition split",
    "qtrace.graph.passes": "FoldConstants MergeCommonSubexpressions RemoveDeadCode run_passes",
    "qtrace.graph.pattern": "Anything Const Mismatch Op Param PatternMatch match",
    "qtrace.graph.renewal": "propagate_shapes set_input_shapes",
    "qtrace.graph.rewrite": "RewriteRule RuleResult apply_rules",
    "qtrace.graph.differences": "SampleDifference SamplesReport check_samples",
    "qtrace.extras.source": "PythonSource to_source",
    "qtrace.graph.views": "dot find table",
    "qtrace.graph.tracing.trace": "trace",
    "qtrace.graph.tracing.tracer": "Tracer",
    "qtrace.graph.transformer": "Transformer",
    "qtrace.graph.walk": "exprs users",
}

load_when_used(__name__, _HOMES)
