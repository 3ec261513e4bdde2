"""Stand-ins for the library: models are text files, so that a command runs in milliseconds."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import numpy as np

import qtrace
from qtrace.errors import ConfigError, DataError
from qtrace.quantizing.judging import Judgement

COMMANDS = ("trace", "calibrate", "explain", "export", "verify")


USER = """
import numpy as np
import megengine.module as M

class Net(M.Module):
    def __init__(self):
        super().__init__()
        self.fc = M.Linear(4, 2)
    def forward(self, x):
        return self.fc(x)

def factory():
    print("a print of the user's")
    return Net()

def broken():
    return {}["weights"]

def loader():
    for _ in range(2):
        print("loading")
        yield np.ones((3, 4), "float32")

two = 2

class Pair(M.Module):
    def forward(self, a, b):
        return a + b
"""


class Table:
    """An Explanation or a report of verify."""

    ptq = ()
    annotation = SimpleNamespace(notes=(), sites=(), dynamic=())

    def __init__(self, passed=True):
        self.passed = passed

    def table(self, *args, **options):
        return "a table"

    def algorithms(self):
        return ["what they did"]

    def to_dict(self):
        return {"rows": [np.float32(0.5)], "ratio": float("inf"), "passed": self.passed}


class Fakes:
    """Stands in for the library: models are text files."""

    def __init__(self, monkeypatch):
        self.calls = {}
        self.passed = True
        self.fail = None
        for name in (*COMMANDS, "load", "save", "load_recipe", "prepare", "convert"):
            monkeypatch.setitem(vars(qtrace), name, getattr(self, name))  # setattr would load the real one
        for name in ("calibrate", "explain"):
            monkeypatch.setattr(f"qtrace.quantizing.stage.{name}", getattr(self, name))
        stage = {
            "prepare": lambda traced, qconfig, **options: self.prepare(traced, qconfig),
            "_collect": self.collect,
            "config_or_default": lambda recipe: recipe,
            "note_graph": lambda *args: {},
            "copy_float": lambda prepared: None,
            "conclude": lambda *args, **options: Judgement(),
        }
        for name, stand_in in stage.items():
            monkeypatch.setattr(f"qtrace.quantizing.stage.{name}", stand_in)
        sizes = "qtrace.quantizing.call_data.DataOpener._choose_size"
        monkeypatch.setattr(sizes, lambda opener, traced, size: (size, False))
        monkeypatch.setattr("qtrace.quantizing.call_data.EvaluationData.check", lambda *args: None)
        monkeypatch.setattr("qtrace.quantizing.reporting._sites", lambda prepared: [{"site": "x"}])
        monkeypatch.setattr("qtrace.graph.files.serialize.save", self.save)
        monkeypatch.setattr("qtrace.inspection.explanation.explain", self.explain)
        monkeypatch.setattr("qtrace.preparation.passes.convert.convert", self.convert)
        monkeypatch.setattr("qtrace.cli.files.note_file", lambda *args: {})
        for commands in ("files", "networks"):
            ends = {"inputs": [], "outputs": []}
            monkeypatch.setattr(f"qtrace.cli.{commands}.note_ends", lambda *args, ends=ends: ends)
        monkeypatch.setattr("qtrace.cli.models.check_stage", lambda *args: None)
        monkeypatch.setattr("qtrace.cli.models.check_size", lambda *args: None)

    def trace(self, module, *example, method="forward", check=True, allow_branch=()):
        self.calls["trace"] = ([array.shape for array in example], check)
        return "traced"

    def load(self, path, allow=()):
        self.calls["load"] = (path, tuple(allow))
        if not Path(path).is_file():
            raise DataError(f"{path} cannot be read: No such file or directory.")
        return Path(path).read_text()

    def save(self, module, path):
        Path(path).write_text(module)

    def load_recipe(self, name, allow_code=False):
        if name != "good":
            raise ConfigError(f"there is no recipe {name!r}:\nchoose good.")
        return SimpleNamespace(preprocess=None, expect=None)

    def prepare(self, traced, qconfig, samples=None):
        return f"{traced} prepared"

    def collect(self, prepared, calibration, reporter):
        source = calibration.source
        self.calls["collect"] = ([batch[0].shape for batch in source], calibration.settings.engine)
        if self.fail:
            raise self.fail
        chosen = SimpleNamespace(name="megengine", reason="as asked", everywhere=True)
        statistics = SimpleNamespace(batches=dict.fromkeys(range(source.given)))
        collected = SimpleNamespace(statistics=statistics, chosen=chosen)
        return SimpleNamespace(collected=collected, skipped=tuple(source.skipped))

    def calibrate(
        self,
        prepared,
        batches,
        progress=True,
        engine="auto",
        learning_engine="auto",
        held_back=(),
        prefer=None,
        statistics=None,
        state=None,
        threads=None,
    ):
        assert engine == "megengine"  # the one that collected the statistics
        assert learning_engine == "auto"
        self.calls["calibrate"] = (len(statistics.batches), progress)

    def convert(self, prepared):
        return f"{prepared} converted"

    def explain(self, model, qconfig=None, allow_code=False):
        self.calls["explain"] = (model, qconfig)
        return Table()

    def export(self, model, path, format=None, **options):
        self.calls["export"] = (format, options)
        Path(path).write_text("half")
        if self.fail:
            raise self.fail
        Path(path).with_suffix(".bin").write_text("weights")

    def verify(self, path, model, batches, float_model=None, runtime=None, runtime_host=None):
        self.calls["verify"] = (path, model, len(list(batches)), float_model)
        return Table(self.passed)


def calibrate_arguments(*more):
    """The arguments of a calibration of ``float.mge`` in the current folder."""
    return ("calibrate", "float.mge", "-d", "x.npy", "-r", "good", "-o", "out", *more)
