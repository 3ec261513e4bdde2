"""The public names, pinned: what users import must not change unseen."""

from __future__ import annotations

import importlib
import pickle
import subprocess
import sys

import pytest

import qtrace
from qtrace import plugins
from tests.each import each_of

NAMES = {
    "QConfig",
    "QParams",
    "QScheme",
    "RuntimeHost",
    "QtraceError",
    "quiet",
    "fakequant",
    "graph",
    "observers",
    "qat",
    "recipes",
    "sensitivity",
}
NAMES |= {
    "bisect",
    "calibrate",
    "calibrate_to_folder",
    "compare",
    "convert",
    "explain",
    "export",
    "finetune",
    "from_onnx",
    "from_torch",
    "load",
    "load_recipe",
    "param_groups",
    "prepare",
    "quantize",
    "save",
    "set_phase",
    "to_torch_state",
}
NAMES |= {
    "FinetuneSettings",
    "TuneSettings",
    "bench",
    "check",
    "diagnose",
    "diff",
    "inspect",
    "split",
    "trace",
    "tune",
    "verify",
}


def test_public_names_are_these_and_resolve() -> None:
    assert set(qtrace.__all__) == NAMES
    for name in NAMES:
        assert getattr(qtrace, name) is not None
    assert set(dir(qtrace)) >= NAMES


def test_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no attribute 'quantise'"):
        _ = qtrace.quantise


def _run(code: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)


def test_names_that_need_megengine_load_it_quietly_and_the_others_do_not_load_it() -> None:
    run = _run(
        "import sys, qtrace\n"
        "light = [getattr(qtrace, n) for n in sorted(qtrace._WITHOUT_ENGINE)]\n"
        "print('megengine' in sys.modules)\n"
        "from qtrace import prepare\n"
        "print('megengine' in sys.modules)\n"
        "import qtrace.export.onnx, qtrace.verification, qtrace.calibration\n"
        "print(all(callable(getattr(qtrace, n)) for n in 'calibrate export verify trace'.split()))"
    )
    assert run.stdout.split() == ["False", "True", "True"]
    assert run.stderr == ""


def test_a_name_starts_no_thread_and_the_first_call_lets_them_sleep() -> None:
    """A process that has a name of qtrace may be forked, as `multiprocessing` and trainers do."""
    run = _run(
        "import multiprocessing, qtrace\n"
        "from qtrace import prepare\n"
        "from qtrace import process\n"
        "def work():\n"
        "    import megengine, numpy\n"
        "    print(float(megengine.Tensor(numpy.ones(3, 'float32')).sum()), flush=True)\n"
        "child = multiprocessing.get_context('fork').Process(target=work)\n"
        "child.start(); child.join()\n"
        "try: prepare(1)\n"
        "except qtrace.QtraceError: print(process._started)"
    )
    assert run.stdout.split() == ["3.0", "True"], run.stderr


OBSERVERS = {"MeanSquaredError", "MinMax", "MovingAverage", "Observer", "Percentile", "from_dict", "to_dict"}
FAKEQUANTS = {"FakeQuant", "FixedFakeQuant", "LSQFakeQuant", "Learn", "builtin", "scales"}


@pytest.mark.parametrize(("package", "names"), [("observers", OBSERVERS), ("fakequant", FAKEQUANTS)])
def test_a_plugin_package_exports_the_class_of_every_file(package: str, names: set[str]) -> None:
    room = getattr(qtrace, package)
    base = getattr(room, "Observer" if package == "observers" else "FakeQuant")
    resolved = {plugins.resolve(f"qtrace.{package}", n, base) for n in plugins.known(f"qtrace.{package}")}
    assert {getattr(room, cls.__name__) for cls in resolved} == resolved
    assert set(room.__all__) == names | {cls.__name__ for cls in resolved}
    assert set(dir(room)) >= set(room.__all__)
    starred: dict[str, object] = {}
    exec(f"from qtrace.{package} import *", starred)
    assert set(room.__all__) <= set(starred)


def test_plugin_packages_give_their_modules_and_name_what_they_have() -> None:
    from qtrace.observers import MinMax, minmax

    assert qtrace.observers.minmax is minmax
    assert qtrace.observers.base.Observer is qtrace.observers.Observer
    assert minmax.MinMax is MinMax
    with pytest.raises(AttributeError, match="no attribute 'MSEObserver': it has .*MeanSquaredError"):
        _ = qtrace.observers.MSEObserver
    with pytest.raises(AttributeError, match="no attribute '_missing'"):
        _ = qtrace.fakequant._missing


def test_config_data_and_observers_do_without_megengine() -> None:
    run = _run(
        "import sys, qtrace, qtrace.fakequant\n"
        "from qtrace import plugins\n"
        "from qtrace.config import QConfig\n"
        "QConfig(backend='megengine', fakequant='lsq', observers={'weight': 'mse'})\n"
        "print([m for m in ('megengine', 'scipy', 'yaml', 'cv2') if m in sys.modules])\n"
        "import qtrace.data\n"
        "dir(qtrace.observers), qtrace.observers.MinMax, hasattr(qtrace.fakequant, '__wrapped__')\n"
        "base = qtrace.observers.Observer\n"
        "[plugins.resolve('qtrace.observers', n, base) for n in plugins.known('qtrace.observers')]\n"
        "print([m for m in ('megengine', 'cv2') if m in sys.modules])"
    )
    assert run.stdout.split() == ["[]", "[]"]


@pytest.mark.quick(1)
@pytest.mark.parametrize("package", ["qtrace.graph", "qtrace.data", "qtrace.ptq"])
def test_the_names_of_a_package_are_loaded_when_they_are_used(package: str) -> None:
    run = _run(
        "import importlib, sys, types\n"
        f"package = importlib.import_module({package!r})\n"
        f"assert not [m for m in sys.modules if m.startswith({package!r} + '.')]\n"
        "homes = package._HOMES\n"
        "assert sorted(package.__all__) == sorted(n for names in homes.values() for n in names.split())\n"
        "assert {*package.__all__} <= {*dir(package)}\n"
        "for module in homes:\n"
        "    importlib.import_module(module)\n"  # some have the name of a function of theirs
        "for name in package.__all__:\n"
        "    assert not isinstance(getattr(package, name), types.ModuleType), name\n"
        "print(hasattr(package, 'of_no_such_name'))"
    )
    assert run.stdout == "False\n"


@each_of("name", ["graph", "data", "ptq"])
def test_a_package_is_sent_by_its_name(name: str) -> None:
    """As cloudpickle and Ray send the modules that a function uses."""
    package = importlib.import_module(f"qtrace.{name}")
    assert pickle.loads(pickle.dumps(package)) is package


def test_core_needs_no_package_of_an_extra() -> None:
    extras = ("onnx", "onnxruntime", "torch", "openvino", "ai_edge_litert", "ncnn", "pandas", "matplotlib")
    program = f"""
import sys
for name in {extras}: sys.modules[name] = None
import numpy as np, megengine.module as M, qtrace
x = np.random.default_rng(0).normal(size=(2, 3, 8, 8)).astype("float32")
prepared = qtrace.prepare(qtrace.trace(M.Sequential(M.Conv2d(3, 4, 3), M.ReLU()), x), "w8a8")
qtrace.calibrate(prepared, [x], progress=False)
print(qtrace.explain(qtrace.convert(prepared)).summary())
for name in ("quantize", "from_onnx", "check"):
    try:
        getattr(qtrace, name)
    except qtrace.QtraceError as error:
        print(error)
from qtrace.cli.program import main
sys.argv = ["qtrace", "check", sys.executable, "--target", "onnxruntime"]
sys.exit(main())
"""
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert result.returncode == 2, result.stderr
    assert "int" in result.stdout
    missing = "the package onnx is not installed: run pip install -e '.[onnx]' in the checkout of qtrace."
    assert result.stdout.count(missing) == 3
    assert result.stderr.endswith(f"error: {missing}\n")
