"""Quantization-aware training and post-training quantization for MegEngine, on its traced graph.

Names are loaded when they are first used, so that ``qtrace --help`` does not wait for MegEngine. The first
name that needs MegEngine imports it without its messages, and the first call starts its threads.
"""

from __future__ import annotations

import importlib
import threading
from typing import TYPE_CHECKING, Any

from qtrace.display import shorten_modules
from qtrace.errors import missing_package
from qtrace.process import paused_collector

if TYPE_CHECKING:
    from qtrace import fakequant, graph, observers, qat, recipes, sensitivity
    from qtrace.benchmarking.files import bench
    from qtrace.calibration.calibrate import calibrate
    from qtrace.config import QConfig
    from qtrace.config.recipe import load_recipe
    from qtrace.errors import QtraceError
    from qtrace.export import export
    from qtrace.extras.contracts import check_file_for as check
    from qtrace.extras.diff.models import diff
    from qtrace.extras.finetune import FinetuneSettings, finetune
    from qtrace.extras.split.partition import split
    from qtrace.extras.torch import from_torch, to_torch_state
    from qtrace.extras.tune import TuneSettings, tune
    from qtrace.graph.files.serialize import load, save
    from qtrace.graph.tracing.trace import trace
    from qtrace.importing.onnx import from_onnx
    from qtrace.inspection.analysis import analyze as inspect
    from qtrace.inspection.comparison import compare
    from qtrace.inspection.explanation import explain
    from qtrace.preparation.passes.convert import convert
    from qtrace.preparation.phases import set_phase
    from qtrace.preparation.prepare import prepare
    from qtrace.process import quiet
    from qtrace.qat import param_groups
    from qtrace.quantizing.quantize import quantize
    from qtrace.quantizing.stage import calibrate_to_folder
    from qtrace.runtimes.host import RuntimeHost
    from qtrace.scheme import QParams, QScheme
    from qtrace.sensitivity.diagnosis import diagnose
    from qtrace.verification.bisect import bisect
    from qtrace.verification.verify import verify

__all__ = [
    "FinetuneSettings",
    "QConfig",
    "QParams",
    "QScheme",
    "QtraceError",
    "RuntimeHost",
    "TuneSettings",
    "bench",
    "bisect",
    "calibrate",
    "calibrate_to_folder",
    "check",
    "compare",
    "convert",
    "diagnose",
    "diff",
    "explain",
    "export",
    "fakequant",
    "finetune",
    "from_onnx",
    "from_torch",
    "graph",
    "inspect",
    "load",
    "load_recipe",
    "observers",
    "param_groups",
    "prepare",
    "qat",
    "quantize",
    "quiet",
    "recipes",
    "save",
    "sensitivity",
    "set_phase",
    "split",
    "to_torch_state",
    "trace",
    "tune",
    "verify",
]

_HOME = {
    "QConfig": "config",
    "QParams": "scheme",
    "QScheme": "scheme",
    "RuntimeHost": "runtimes.host",
    "QtraceError": "errors",
    "FinetuneSettings": "extras.finetune",
    "TuneSettings": "extras.tune",
    "bench": "benchmarking.files",
    "bisect": "verification.bisect",
    "calibrate": "calibration.calibrate",
    "calibrate_to_folder": "quantizing.stage",
    "check": "extras.contracts:check_file_for",
    "compare": "inspection.comparison",
    "convert": "preparation.passes.convert",
    "diagnose": "sensitivity.diagnosis",
    "diff": "extras.diff.models",
    "explain": "inspection.explanation",
    "export": "export",
    "finetune": "extras.finetune",
    "from_onnx": "importing.onnx",
    "inspect": "inspection.analysis:analyze",
    "from_torch": "extras.torch",
    "load": "graph.files.serialize",
    "load_recipe": "config.recipe",
    "param_groups": "qat",
    "prepare": "preparation.prepare",
    "quantize": "quantizing.quantize",
    "quiet": "process",
    "save": "graph.files.serialize",
    "set_phase": "preparation.phases",
    "split": "extras.split.partition",
    "to_torch_state": "extras.torch",
    "trace": "graph.tracing.trace",
    "tune": "extras.tune",
    "verify": "verification.verify",
}

_WITHOUT_ENGINE = {
    "QConfig",
    "QParams",
    "QScheme",
    "QtraceError",
    "RuntimeHost",
    "bench",
    "check",
    "fakequant",
    "observers",
    "quiet",
    "recipes",
}
"""The names that do not load MegEngine."""


def __getattr__(name: str) -> Any:
    try:
        with paused_collector():
            value = _load(name)
    except ModuleNotFoundError as error:
        raise missing_package(error) from None
    globals()[name] = value
    return value


def _load(name: str) -> Any:
    if name in __all__ and name not in _WITHOUT_ENGINE:
        _load_engine()
    if name == "__version__":
        from importlib.metadata import version

        value: Any = version("qtrace")
    elif name in _HOME:
        module, _, other = _HOME[name].partition(":")
        value = getattr(importlib.import_module(f"qtrace.{module}"), other or name)
    elif name in __all__:
        value = importlib.import_module(f"qtrace.{name}")
    else:
        raise AttributeError(f"module 'qtrace' has no attribute {name!r}")
    return value


def _load_engine() -> None:
    """Imports MegEngine without its messages, if this is the main thread: on another it could not compute."""
    if threading.current_thread() is threading.main_thread():
        from qtrace.process import load

        load()


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__, "__version__"})


def _describe(module: Any) -> str:
    from qtrace.inspection.analysis import describe_graph

    return describe_graph(module)


shorten_modules(_describe)
