"""The command line: what is printed where, exit codes, and outputs that appear whole or not at all."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from click.testing import CliRunner

import qtrace
from qtrace import cli
from qtrace.cli import outputs
from qtrace.cli.commands.calibrate import FILES
from qtrace.cli.options import ShapeType
from qtrace.errors import ConfigError, DataError, QtraceError
from qtrace.process.signals import undisturbed
from qtrace.storage import files

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
        monkeypatch.setattr("qtrace.cli.commands.calibrate._sites", lambda prepared: [{"site": "x"}])
        monkeypatch.setattr("qtrace.cli.commands.calibrate._collect", self.collect)
        monkeypatch.setattr("qtrace.cli.models.check_stage", lambda *args: None)
        monkeypatch.setattr("qtrace.cli.models.check_size", lambda *args: None)

    def trace(self, module, *example, method="forward", check=True):
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
        return SimpleNamespace(preprocess=None)

    def prepare(self, traced, qconfig):
        return f"{traced} prepared"

    def collect(self, prepared, source, where, folder, console, how):
        self.calls["collect"] = ([batch[0].shape for batch in source], how["engine"])
        if self.fail:
            raise self.fail
        chosen = SimpleNamespace(name="megengine", reason="as asked")
        statistics = SimpleNamespace(batches=dict.fromkeys(range(source.given)))
        collected = SimpleNamespace(statistics=statistics, chosen=chosen)
        return SimpleNamespace(collected=collected, skipped=tuple(source.skipped))

    def calibrate(self, prepared, batches, progress=True, statistics=None, state=None):
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

    def verify(self, path, model, batches, runtime=None):
        self.calls["verify"] = (path, model, len(list(batches)))
        return Table(self.passed)


@pytest.fixture
def fakes(monkeypatch):
    return Fakes(monkeypatch)


@pytest.fixture
def here(tmp_path, monkeypatch):
    """A current directory with a user's module, data and a model."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    name = f"user_{tmp_path.name}".replace("-", "_")
    (tmp_path / f"{name}.py").write_text(USER)
    np.save("x.npy", np.zeros((5, 4), np.float32))
    Path("float.mge").write_text("float")
    return SimpleNamespace(path=tmp_path, module=name, names=lambda: sorted(os.listdir(tmp_path)))


@pytest.fixture
def run(capsys):
    """Runs main in this process; gives code, stdout and stderr."""

    def call(*args):
        handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
        with pytest.raises(SystemExit) as caught:
            cli.main([str(arg) for arg in args])
        for number, handler in handlers.items():
            signal.signal(number, handler)
        captured = capsys.readouterr()
        return SimpleNamespace(code=caught.value.code, out=captured.out, err=captured.err)

    return call


def calibrate(*more):
    return ("calibrate", "float.mge", "-d", "x.npy", "-r", "good", "-o", "out", *more)


class TestHelp:
    @pytest.mark.parametrize(
        "args", [[], ["recipes"], ["recipes", "list"], ["recipes", "show"], *([c] for c in COMMANDS)]
    )
    def test_help_ends_with_an_example(self, args):
        result = CliRunner().invoke(cli.group, [*args, "--help"], prog_name="qtrace")
        assert result.exit_code == 0
        assert f"\nExample:\n  qtrace {args[0] if args else 'trace'} " in result.output

    def test_loads_nothing_heavy(self):
        """So that it answers at once: these are what takes time."""
        code = (
            "import sys\nfrom qtrace.cli import main\n"
            "heavy = {'megengine', 'cv2', 'numpy', 'scipy', 'pydantic', 'onnx', 'onnxruntime'}\n"
            "try: main(['--help'])\n"
            "finally: sys.exit(' '.join(heavy & set(sys.modules)) or None)"
        )
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
        assert (done.returncode, done.stderr) == (0, "")

    def test_version(self, run):
        result = run("--version")
        assert (result.code, result.out) == (0, f"qtrace {qtrace.__version__}\n")

    @pytest.mark.parametrize(
        "args",
        [
            ["nonsense"],
            ["trace"],
            ["trace", "a:b", "-o", "x", "--shape", "1xx3"],
            ["calibrate", "m"],
            ["--what"],
        ],
    )
    def test_usage_errors(self, run, args):
        result = run(*args)
        assert result.code == 2
        assert result.out == ""
        assert "Usage: qtrace" in result.err

    @pytest.mark.parametrize(
        "text", ["", "x", "0x3", "-1x3", "1x", "3.5", "1,3", "٣", "100000x100000", "9" * 30]
    )
    def test_no_shape(self, text):
        with pytest.raises(Exception, match="shape|values"):
            ShapeType().convert(text, None, None)

    def test_shape(self):
        assert ShapeType().convert("1x3X224x224", None, None) == (1, 3, 224, 224)


class TestTrace:
    def test_by_shape(self, run, here, fakes):
        result = run(
            "trace", f"{here.module}:factory", "--shape", "2x4", "--shape", "1", "-o", "net.mge", "--no-check"
        )
        assert (result.code, result.out) == (0, "net.mge\n")
        assert "a print of the user's" in result.err
        assert fakes.calls["trace"] == ([(2, 4), (1,)], False)
        assert Path("net.mge").read_text() == "traced"

    def test_by_data(self, run, here, fakes):
        assert run("trace", f"{here.module}:Net", "-d", "x.npy", "-o", "net.mge").code == 0
        assert fakes.calls["trace"] == ([(1, 4)], True)

    def test_by_named_inputs(self, run, here, fakes):
        np.savez("d.npz", mask=np.zeros((2, 4)), x=np.zeros((2, 3)))
        result = run("trace", f"{here.module}:Net", "-d", "d.npz", "-o", "net.mge")
        assert result.code == 2
        assert "Net.forward takes x; name the arrays after" in result.err

    def test_named_inputs_go_by_the_names_of_forward(self, run, here, fakes):
        np.savez("d.npz", b=np.zeros((2, 4)), a=np.zeros((2, 3)))
        assert run("trace", f"{here.module}:Pair", "-d", "d.npz", "-o", "net.mge").code == 0
        assert fakes.calls["trace"] == ([(1, 3), (1, 4)], True)

    def test_replaces_an_older_file(self, run, here, fakes):
        Path("net.mge").write_text("old")
        assert run("trace", f"{here.module}:Net", "--shape", "2x4", "-o", "net.mge").code == 0
        assert Path("net.mge").read_text() == "traced"

    @pytest.mark.parametrize(
        ("attribute", "message"),
        [
            ("broken", r"broken: calling it without arguments raised KeyError: 'weights' at "),
            ("two", "is a int; name a function"),
            ("loader", "returned generator, not a megengine.module.Module"),
            ("nothing", "has no 'nothing'"),
        ],
    )
    def test_no_factory(self, run, here, fakes, attribute, message):
        before = here.names()
        result = run("trace", f"{here.module}:{attribute}", "--shape", "2x4", "-o", "net.mge")
        assert result.code == 2
        assert result.out == ""
        assert message in result.err
        assert result.err.count("\n") == 1
        assert [name for name in here.names() if name != "__pycache__"] == before

    def test_debug_shows_the_traceback_of_the_users_code(self, run, here, fakes):
        result = run("--debug", "trace", f"{here.module}:broken", "--shape", "2x4", "-o", "net.mge")
        assert result.code == 2
        assert 'return {}["weights"]' in result.err
        assert "Traceback" not in run("trace", f"{here.module}:broken", "--shape", "2x4", "-o", "net.mge").err

    @pytest.mark.parametrize("args", [[], ["--shape", "1", "-d", "x.npy"]])
    def test_shape_or_data(self, run, here, fakes, args):
        result = run("trace", f"{here.module}:Net", "-o", "net.mge", *args)
        assert result.code == 2
        assert "either --shape or --data" in result.err


class TestCalibrate:
    def test_writes_a_folder(self, run, here, fakes):
        result = run(*calibrate("--batch-size", 2, "--max-batches", 2, "--allow", "a:B", "--allow", "c:D"))
        assert result.code == 0
        assert result.out.splitlines() == [f"out/{name}" for name in FILES]
        assert sorted(os.listdir("out")) == sorted(FILES)
        assert not [name for name in here.names() if name.startswith(".")]
        assert fakes.calls["load"] == ("float.mge", ("a:B", "c:D"))
        assert fakes.calls["collect"] == ([(2, 4), (2, 4)], "auto")
        assert fakes.calls["calibrate"] == (2, False)
        assert Path("out/quantized.mge").read_text() == "float prepared converted"
        assert Path("out/explain.txt").read_text() == "a table\n"
        report = json.loads(Path("out/report.json").read_text())
        assert report["sites"] == [{"site": "x"}]
        assert (report["batches"], report["recipe"]) == (2, "good")
        assert Path("out").stat().st_mode & 0o777 == 0o777 & ~umask()

    def test_json(self, run, here, fakes):
        result = run(*calibrate("--json", "--quiet"))
        document = json.loads(result.out)
        assert document["files"] == [f"out/{name}" for name in FILES]
        assert document["engine"] == {"name": "megengine", "reason": "as asked"}
        assert result.err == ""

    def test_engine(self, run, here, fakes):
        result = run(*calibrate("--engine", "megengine"))
        assert fakes.calls["collect"][1] == "megengine"
        assert "engine megengine: as asked\n" in result.err
        assert run(*calibrate("--engine", "torch")).code == 2

    def test_forced_progress(self, run, here, fakes):
        run(*calibrate("--progress"))
        assert fakes.calls["calibrate"][1] is True

    def test_factory_is_traced_on_the_first_batch_and_prints_go_to_stderr(self, run, here, fakes):
        result = run(
            "calibrate",
            f"{here.module}:Net",
            "-d",
            f"{here.module}:loader",
            "-r",
            "good",
            "-o",
            "o",
            "--json",
        )
        assert result.code == 0
        assert json.loads(result.out)["batches"] == 2
        assert "loading" in result.err
        assert fakes.calls["trace"][0] == [(3, 4)]

    def test_skipped_images_are_reported(self, run, here, fakes, monkeypatch):
        how = SimpleNamespace(size=(3, 2, 2), mean=(0.0,) * 3, std=(1.0,) * 3, channels="bgr", scale=1.0)
        how.resize, how.interpolation = "stretch", "linear"
        monkeypatch.setitem(
            vars(qtrace), "load_recipe", lambda name, allow_code: SimpleNamespace(preprocess=how)
        )
        os.mkdir("images")
        Path("images/a.ppm").write_bytes(b"P6 2 2 255\n" + bytes(12))
        Path("images/b.png").write_bytes(b"nonsense")
        refused = run("calibrate", "float.mge", "-d", "images", "-r", "r", "-o", "out")
        assert refused.code == 2
        assert "images/b.png is not an image" in refused.err
        result = run("calibrate", "float.mge", "-d", "images", "-r", "r", "-o", "out", "--skip-bad", "--json")
        assert "1 unreadable images left out: images/b.png" in result.err
        assert json.loads(result.out)["skipped"] == ["images/b.png"]

    def test_labels_are_reported(self, run, here, fakes):
        np.savez("d.npz", x=np.zeros((5, 4)), y=np.zeros(5))
        result = run("calibrate", "float.mge", "-d", "d.npz", "-r", "good", "-o", "out")
        assert "taken for labels and left out: y" in result.err

    @pytest.mark.parametrize(
        ("change", "message"),
        [
            ({"-d": "gone.npy"}, "There is no file gone.npy"),
            ({"-d": "float.mge"}, "'float.mge' cannot be read as data"),
            ({"-d": "text.npy"}, "is not an array in NumPy's .npy format"),
            ({"-d": "cut.npz"}, "is not a whole .npz file"),
            ({"-d": "objects.npy"}, "holds Python objects"),
            ({"-d": "images"}, "a recipe with the key `preprocess` is needed"),
            ({"-d": "gone.module:loader"}, "there is no module 'gone'"),
            ({"-r": "bad"}, "error: there is no recipe 'bad': choose good."),
            ({"model": "gone.mge"}, "gone.mge cannot be read"),
            ({"-o": "float.mge"}, "float.mge is a file; name a folder"),
            ({"-o": "float.mge/out"}, "float.mge is a file, not a folder"),
            ({"-o": "/proc/out"}, "/proc/out cannot be written"),
            ({"-o": "images"}, "images exists and is not empty"),
        ],
    )
    def test_mistakes(self, run, here, fakes, change, message):
        Path("text.npy").write_text("1 2 3\n")
        np.savez("cut.npz", x=np.zeros((5, 4)))
        Path("cut.npz").write_bytes(Path("cut.npz").read_bytes()[:100])
        np.save("objects.npy", np.array([None, 1]), allow_pickle=True)
        os.mkdir("images")
        Path("images/notes.txt").write_text("")
        before = here.names()
        options = {"-d": "x.npy", "-r": "good", "-o": "out"} | change
        model = options.pop("model", "float.mge")
        result = run("calibrate", model, *(word for pair in options.items() for word in pair))
        assert result.code == 2
        assert result.out == ""
        assert message in result.err
        assert result.err.splitlines()[-1].startswith("error: ")
        assert "Traceback" not in result.err
        assert here.names() == before

    def test_failure_leaves_nothing(self, run, here, fakes):
        fakes.fail = QtraceError("batch 3 has\nNaN.")
        before = here.names()
        result = run(*calibrate())
        assert (result.code, result.err.splitlines()[-1]) == (2, "error: batch 3 has NaN.")
        assert here.names() == before

    def test_internal_error_keeps_its_traceback(self, run, here, fakes):
        fakes.fail = ZeroDivisionError("inside")
        result = run(*calibrate())
        assert result.code == 70
        assert "ZeroDivisionError: inside" in result.err
        assert not Path("out").exists()

    @pytest.mark.parametrize(
        ("error", "said"),
        [
            (OSError(28, "No space left on device", "/there/x"), "error: /there/x: No space left on device."),
            (OSError(24, "Too many open files"), "Too many open files."),
            (MemoryError(), "error: there is not enough memory; use smaller batches."),
        ],
    )
    def test_what_the_machine_lacks(self, run, here, fakes, error, said):
        before = here.names()
        fakes.fail = error
        result = run(*calibrate("-q"))
        assert (result.code, result.out) == (2, "")
        assert result.err.count("\n") == 1
        assert said in result.err
        assert here.names() == before

    def test_interrupt(self, run, here, fakes):
        fakes.fail = KeyboardInterrupt()
        before = here.names()
        result = run(*calibrate())
        assert result.code == 130
        assert "interrupted" in result.err
        assert here.names() == before

    def test_existing_folder(self, run, here, fakes):
        os.mkdir("out")
        assert run(*calibrate()).code == 0  # it was empty
        first = Path("out").stat().st_ino
        refused = run(*calibrate())
        assert refused.code == 2
        assert "--force" in refused.err
        fakes.fail = QtraceError("failed")
        assert run(*calibrate("--force")).code == 2
        assert Path("out").stat().st_ino == first
        assert sorted(os.listdir("out")) == sorted(FILES)
        fakes.fail = None
        assert run(*calibrate("--force")).code == 0
        assert Path("out").stat().st_ino != first
        assert not [name for name in here.names() if name.startswith(".")]

    def test_force_does_not_remove_the_users_files(self, run, here, fakes):
        assert run(*calibrate()).code == 0
        Path("out/thesis.tex").write_text("years of work")
        result = run(*calibrate("--force"))
        assert result.code == 2
        assert "thesis.tex" in result.err
        assert Path("out/thesis.tex").exists()


class TestOthers:
    def test_explain(self, run, here, fakes):
        assert run("explain", "float.mge").out == "a table\n"
        document = json.loads(run("explain", "float.mge", "-r", "good", "--json").out)
        assert document == {"rows": [0.5], "ratio": None, "passed": True}
        assert fakes.calls["explain"][1] is not None

    def test_explain_a_factory(self, run, here, fakes):
        assert run("explain", f"{here.module}:Net", "--shape", "1x4").code == 0
        assert "give --shape" in run("explain", f"{here.module}:Net").err

    def test_export(self, run, here, fakes):
        result = run("export", "float.mge", "-o", "new/net.param", "--json")
        assert json.loads(result.out) == {"file": "new/net.param"}
        assert sorted(os.listdir("new")) == ["net.bin", "net.param"]

    def test_export_options(self, run, here, fakes):
        given = ["-O", "packed=true", "-O", "io-type=int8", "--allow-float", "softmax"]
        assert run("export", "float.mge", "-o", "net.onnx", "-f", "onnx", *given).code == 0
        wanted = {"packed": True, "io_type": "int8", "allow_float": ("softmax",)}
        assert fakes.calls["export"] == ("onnx", wanted)
        result = run("export", "float.mge", "-o", "net.onnx", "-O", "packed")
        assert result.code == 2
        assert "'packed' is not of the form NAME=VALUE" in result.err

    def test_export_options_are_read_as_in_a_recipe(self, run, here, fakes):
        given = ["-O", "a=yes", "-O", "b=1e-4", "-O", "c=010", "-O", "d=2024-01-01", "-O", "e=[1, x]"]
        assert run("export", "float.mge", "-o", "net.onnx", *given).code == 0
        assert fakes.calls["export"][1] == {"a": "yes", "b": 1e-4, "c": 10, "d": "2024-01-01", "e": [1, "x"]}

    @pytest.mark.parametrize(
        ("value", "reason"),
        [
            ("a={b: 1, b: 2}", "duplicate key 'b', first given in line 1."),
            ("a=!!set {b}", "the tag tag:yaml.org,2002:set is not supported"),
            ("a=" + "[" * 60 + "]" * 60, "more than 50 levels of nesting."),
            ("a=*b", "found undefined alias 'b'; quote text that begins with *."),
            ("a=", "it is empty: write null, or quotes for empty text."),
        ],
    )
    def test_export_options_that_cannot_be_read(self, run, here, fakes, value, reason):
        result = run("export", "float.mge", "-o", "net.onnx", "-O", value)
        assert result.code == 2
        assert f"the value of {value!r} cannot be read as YAML: " in " ".join(result.err.split())
        assert reason in " ".join(result.err.split())

    def test_failed_export_keeps_the_old_file(self, run, here, fakes):
        Path("net.onnx").write_text("old")
        fakes.fail = QtraceError("no")
        assert run("export", "float.mge", "-o", "net.onnx").code == 2
        assert Path("net.onnx").read_text() == "old"
        assert not [name for name in here.names() if name.startswith(".")]

    def test_export_takes_no_code(self, run, here, fakes):
        result = run("export", f"{here.module}:Net", "-o", "net.onnx")
        assert result.code == 2
        assert "takes a file" in result.err

    @pytest.mark.parametrize(("passed", "code"), [(True, 0), (False, 1)])
    def test_verify(self, run, here, fakes, passed, code):
        fakes.passed = passed
        result = run("verify", "net.onnx", "-m", "float.mge", "-d", "x.npy", "--batch-size", 2)
        assert (result.code, result.out) == (code, "a table\n")
        assert fakes.calls["verify"] == ("net.onnx", "float", 3)
        result = run("verify", "net.onnx", "-m", "float.mge", "-d", "x.npy", "--json", "--progress")
        assert "1/1" in result.err
        assert (result.code, json.loads(result.out)["passed"]) == (code, passed)


def test_the_real_thing(run, here):
    Path("here_model.py").write_text(
        "import megengine.module as M, megengine.functional as F\n"
        "class Net(M.Module):\n"
        "    def __init__(self):\n"
        "        super().__init__()\n"
        "        self.conv, self.fc = M.Conv2d(3, 4, 3), M.Linear(144, 2)\n"
        "    def forward(self, x):\n"
        "        return self.fc(F.flatten(F.relu(self.conv(x)), 1))\n"
    )
    x = np.random.default_rng(0).standard_normal((6, 3, 8, 8), np.float32)
    np.savez("d.npz", x=x, labels=np.arange(6))
    steps = [
        ("trace", "here_model:Net", "--shape", "2x3x8x8", "-o", "net.mge"),
        ("calibrate", "net.mge", "-d", "d.npz", "-r", "onnxruntime", "-o", "out", "--batch-size", "4"),
        ("explain", "out/quantized.mge", "-r", "onnxruntime"),
        ("export", "out/quantized.mge", "-o", "net.onnx"),
        ("verify", "net.onnx", "-m", "out/quantized.mge", "-d", "d.npz"),
    ]
    for step in steps:
        result = run(*step, "--json")
        assert result.code == 0, result.err
        assert json.loads(result.out)
    sites = {site["site"]: site for site in json.loads(Path("out/report.json").read_text())["sites"]}
    assert len(sites["conv_weight"]["scale"]) == 4
    assert sites["x"]["scale"] > 0
    assert "relu" in Path("out/explain.txt").read_text()


def test_what_algorithms_did_is_told_and_written(run, here):
    rng = np.random.default_rng(0)
    np.savez("d.npz", x=rng.normal(size=(4, 4)).astype("float32"))
    Path("lin.py").write_text(
        "import megengine.module as M\n"
        "class Net(M.Module):\n"
        "    def __init__(self):\n"
        "        super().__init__()\n"
        "        self.fc = M.Linear(4, 2)\n"
        "    def forward(self, x):\n"
        "        return self.fc(x)\n"
    )
    Path("r.yaml").write_text(
        "schema: qtrace/1\nptq: [fuse_bn, {adaround: {iterations: 3}}, bias_correction]\n"
    )
    done = run("calibrate", "lin:Net", "-d", "d.npz", "-r", "r.yaml", "-o", "out")
    assert done.code == 0, done.err
    assert "bias_correction: 1 changed, 0 left" in done.err
    assert "outputs: fc_out " in done.err
    reports = json.loads(Path("out/report.json").read_text())["ptq"]
    assert [r["algorithm"] for r in reports] == ["fuse_bn", "adaround", "bias_correction"]
    assert reports[1]["options"] == {"iterations": 3}
    assert "Post-training algorithms:" in Path("out/explain.txt").read_text()
    assert sorted(os.listdir("out")) == sorted(FILES)


def test_an_interrupted_calibration_is_resumed_and_a_second_one_is_refused(run, here):
    Path("net_here.py").write_text(
        "import pathlib, numpy as np, megengine.module as M\n"
        "class Net(M.Module):\n"
        "    def __init__(self):\n"
        "        super().__init__()\n"
        "        self.fc = M.Linear(4, 2)\n"
        "    def forward(self, x):\n"
        "        return self.fc(x)\n"
        "def batches():\n"
        "    for i in range(5):\n"
        "        if i == 3 and pathlib.Path('bad').exists(): raise OSError('disk gone')\n"
        "        yield np.full((3, 4), i + 1, 'float32')\n"
    )
    assert run("trace", "net_here:Net", "--shape", "3x4", "-o", "net.mge").code == 0
    command = ("calibrate", "net.mge", "-d", "net_here:batches", "-r", "onnxruntime", "-o")
    assert run(*command, "whole").code == 0
    Path("bad").touch()
    stopped = run(*command, "out")
    assert stopped.code == 2
    assert "making batch 3 raised OSError: disk gone" in stopped.err
    assert "what was done is kept in out: go on with --resume" in stopped.err
    assert os.listdir("out") == [outputs.WORK]
    again = run(*command, "out")
    assert again.code == 2
    assert "go on with --resume, or begin anew with --force" in again.err
    Path("bad").unlink()
    Path("out", outputs.WORK, "lock").write_text(json.dumps({"pid": 1, "host": "elsewhere"}))
    assert "out was locked by process 1 on elsewhere" in run(*command, "out", "--resume").err
    Path("out", outputs.WORK, "lock").unlink()
    other = run(*command, "out", "--resume", "--batch-size", "2", "--engine", "onnxruntime")
    assert "belongs to another calibration" in other.err
    assert "go on with --resume" not in other.err
    resumed = run(*command, "out", "--resume", "--json")
    assert resumed.code == 0, resumed.err
    assert "3 batches were observed before" in resumed.err
    assert json.loads(resumed.out)["batches"] == 5
    assert sorted(os.listdir("out")) == sorted(FILES)
    assert Path("out/report.json").read_bytes() == Path("whole/report.json").read_bytes()
    assert not [name for name in here.names() if name.startswith(".")]


def umask():
    value = os.umask(0)
    os.umask(value)
    return value


def test_an_interrupt_that_c_code_made_another_error_of(run, monkeypatch):
    def command(*args, **kwargs):
        try:
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(5)
        except KeyboardInterrupt:
            raise DataError("m.mge is damaged (ImportError: initialization failed).") from None

    monkeypatch.setattr(cli.group, "main", command)
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # background jobs ignore it
    try:
        result = run("export", "m.mge")
    finally:
        signal.signal(signal.SIGINT, before)
    assert (result.code, result.err) == (130, "interrupted: no result was written.\n")


def test_tidying_up_is_not_cut_short():
    before = signal.getsignal(signal.SIGINT)
    with undisturbed():
        os.kill(os.getpid(), signal.SIGINT)
        os.kill(os.getpid(), signal.SIGTERM)
    assert signal.getsignal(signal.SIGINT) is before


def test_missing_folders_are_made_and_taken_back(tmp_path):
    with pytest.raises(ZeroDivisionError), outputs.output_file(tmp_path / "a" / "b" / "c.txt"):
        raise ZeroDivisionError
    assert os.listdir(tmp_path) == []
    with outputs.output_file(tmp_path / "a" / "b" / "c.txt") as partial:
        partial.write_text("whole")
    assert (tmp_path / "a" / "b" / "c.txt").read_text() == "whole"


def test_a_folder_that_cannot_be_replaced_is_put_back(tmp_path, monkeypatch):
    target = tmp_path / "out"
    target.mkdir()
    (target / "a").write_text("old")
    real, calls = os.rename, []

    def rename(source, to):
        calls.append(to)
        if len(calls) == 2:
            raise OSError(28, "No space left on device")
        real(source, to)

    monkeypatch.setattr(outputs.os, "rename", rename)
    monkeypatch.setattr(files, "_exchange", lambda first, second: False)  # as on other systems
    with (
        pytest.raises(QtraceError, match="cannot be replaced: No space left"),
        outputs.output_folder(target, names=("a",), force=True) as folder,
    ):
        (folder / "a").write_text("new")
    assert (target / "a").read_text() == "old"
    assert os.listdir(tmp_path) == ["out"]


class TestProcess:
    """Exit codes and streams of a real process, with MegEngine's own behaviour."""

    FAKES = """
import signal, sys, time, pathlib
signal.signal(signal.SIGINT, signal.default_int_handler)  # the background jobs of a shell ignore it
import qtrace
from qtrace.cli import main
import qtrace.cli.commands.calibrate as command
import qtrace.cli.models as models
models.check_stage = lambda *args: None
def pause(*_):
    print("calibrating", file=sys.stderr, flush=True)
    time.sleep(60)
def poison(*_):
    import megengine as mge, numpy as np
    mge.Tensor(np.zeros(4, "float32"))[mge.Tensor(np.array([9], "int32"))]
qtrace.load = lambda path, allow=(): "model"
qtrace.load_recipe = lambda name, allow_code=False: None
qtrace.prepare = lambda traced, qconfig: "prepared"
class Result:
    class collected:
        class statistics: batches = {0: 0}
        class chosen: name, reason = "megengine", "as asked"
    skipped = ()
def collect(*_):
    {"pause": pause, "poison": poison}.get(sys.argv[1], lambda: None)()
    return Result
command._collect = collect
qtrace.calibrate = lambda *a, **k: None
qtrace.convert = lambda prepared: "converted"
qtrace.save = lambda module, path: pathlib.Path(path).write_text(module)
class Table:
    passed = sys.argv[1] != "fail"
    ptq = ()
    def algorithms(self): return []
    def table(self, *args, **options): return "table\\n" * 100000
    def to_dict(self): return {}
qtrace.explain = lambda model, qconfig=None, allow_code=False: Table()
qtrace.verify = lambda path, model, batches, **options: Table()
command._sites = lambda prepared: []
main(sys.argv[2:])
"""

    def start(self, mode, *args):
        return subprocess.Popen(
            [sys.executable, "-W", "ignore", "-c", self.FAKES, mode, *args],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            # Unbuffered, Python takes a partial write to a closed pipe for a whole one.
            env={name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"},
        )

    def finish(self, mode, *args):
        process = self.start(mode, *args)
        out, err = process.communicate(timeout=120)
        return SimpleNamespace(code=process.returncode, out=out, err=err)

    def test_streams_of_success(self, here):
        result = self.finish("ok", *calibrate("--json", "-q"))
        assert result.code == 0
        assert json.loads(result.out)["files"]
        assert result.err == ""  # not even MegEngine's note about CUDA

    def test_error_in_a_kernel_is_no_success(self, here):
        result = self.finish("poison", *calibrate())
        assert result.code == 70
        assert "out of bounds" in result.err
        assert result.out == ""
        assert not Path("out").exists()

    @pytest.mark.parametrize(("mode", "code"), [("ok", 0), ("fail", 1)])
    def test_verify(self, here, mode, code):
        assert self.finish(mode, "verify", "f", "-m", "float.mge", "-d", "x.npy").code == code

    def test_mistake(self, here):
        result = self.finish("ok", "verify", "f", "-m", "float.mge", "-d", "gone.npy")
        assert (result.code, result.out) == (2, "")
        assert result.err.startswith("error: There is no file gone.npy")
        assert result.err.count("\n") == 1

    @pytest.mark.parametrize(
        ("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGHUP, 129)]
    )
    def test_signals_leave_nothing_behind(self, here, number, code):
        process = self.start("pause", *calibrate("-q"))
        assert process.stderr.readline() == "calibrating\n"
        assert any(name.startswith(".out.") for name in here.names())
        process.send_signal(number)
        process.communicate(timeout=60)
        assert process.returncode == code
        assert not any("out" in name for name in here.names())

    def test_closed_pipe(self, here):
        process = self.start("ok", "explain", "float.mge")
        process.stdout.readline()
        process.stdout.close()
        assert process.wait(timeout=60) == 141
        assert process.stderr.read() == ""
        process.stderr.close()

    @pytest.mark.parametrize("unbuffered", ["", "1"])
    @pytest.mark.parametrize(
        ("args", "streams", "code", "told"),
        [
            ("nonsense", "2>/dev/full", 2, ""),
            ("recipes show nonsense", "2>&-", 2, ""),
            ("--help", ">/dev/full 2>/dev/full", 2, ""),
            ("--help", "<&- >&- 2>&-", 0, ""),
            ("--help", ">/dev/full", 2, "error: No space left on device.\n"),
            ("recipes show int8", ">/dev/full", 2, "error: No space left on device.\n"),
        ],
    )
    def test_streams_that_cannot_be_written(self, args, streams, code, told, unbuffered):
        """The exit code is right where nobody can be told; Python's own at its end would be 120."""
        command = f'"{sys.executable}" -W ignore -m qtrace.cli {args} {streams}'
        environment = {**os.environ, "PYTHONUNBUFFERED": unbuffered}
        done = subprocess.run(
            command, shell=True, timeout=60, env=environment, stderr=subprocess.PIPE, text=True
        )
        assert (done.returncode, done.stderr) == (code, told)
