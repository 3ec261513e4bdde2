"""A run of the program: exit codes, streams, signals, and the whole road on a small model."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import warnings
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

import qtrace
from qtrace import cli
from qtrace.cli import program
from qtrace.errors import DataError
from tests.cli.fakes import calibrate_arguments


def test_version(run):
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
def test_usage_errors(run, args):
    result = run(*args)
    assert result.code == 2
    assert result.out == ""
    assert "Usage: qtrace" in result.err


def test_nan_is_no_number_of_any_option(run):
    data = ("net.onnx", "--data", "x.npy")
    for command, option in (
        (("quantize", *data, "-o", "q.onnx"), "--at-least"),
        (("sensitivity", *data), "--max-drop"),
        (("bench", "net.onnx"), "--seconds"),
    ):
        result = run(*command, option, "nan")
        assert result.code == 2
        assert f"Invalid value for '{option}': NaN passes every bound: give a number." in result.err


def test_a_deleted_working_folder_is_named(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    os.rmdir(tmp_path)
    with pytest.raises(SystemExit) as end:
        cli.main(["recipes", "list"])
    assert end.value.code == 2
    assert "error: the working folder is deleted: change to another one." in capsys.readouterr().err


@pytest.mark.filterwarnings("error")
def test_warnings_of_other_packages_are_no_faults(monkeypatch, capsys):
    def show(*_, **__):
        warnings.warn_explicit("old", DeprecationWarning, "a.py", 1, module="pkg_resources")
        warnings.warn_explicit("odd", UserWarning, "a.py", 2, module="numpy.core.getlimits")
        warnings.warn_explicit("own", UserWarning, "a.py", 3, module="qtrace.cli")

    monkeypatch.setattr(program.group, "main", show)
    with warnings.catch_warnings(record=True) as caught, pytest.raises(SystemExit) as end:
        cli.main(["recipes"])
    assert [str(warning.message) for warning in caught] == ["odd"]
    assert end.value.code == 70
    assert "UserWarning: own" in capsys.readouterr().err


def test_program_traces_calibrates_and_exports_a_users_model(run, here):
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


def test_an_interrupt_that_c_code_made_another_error_of(run, monkeypatch):
    def command(*args, **kwargs):
        try:  # by its handler: a signal may end a worker in which other tests have left threads
            signal.getsignal(signal.SIGINT)(signal.SIGINT, None)
        except KeyboardInterrupt:
            raise DataError("m.mge is damaged (ImportError: initialization failed).") from None

    monkeypatch.setattr(cli.group, "main", command)
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # background jobs ignore it
    try:
        result = run("export", "m.mge")
    finally:
        signal.signal(signal.SIGINT, before)
    assert (result.code, result.err) == (130, "interrupted: no result was written.\n")


class TestProcess:
    """Exit codes and streams of a real process, with MegEngine's own behaviour."""

    FAKES = """
import signal, sys, time, pathlib, types
signal.signal(signal.SIGINT, signal.default_int_handler)  # the background jobs of a shell ignore it
signal.signal(signal.SIGHUP, signal.SIG_DFL)  # nohup ignores it
import qtrace
from qtrace.cli import main
import qtrace.process
qtrace.process.quiet()
import qtrace.cli.models as models
import qtrace.graph.files.serialize as serialize
import qtrace.inspection.explanation as explanation
import qtrace.preparation.passes.convert as conversion
import qtrace.quantizing.reporting as folder
import qtrace.quantizing.call_data as call_data
import qtrace.quantizing.stage as stage
from qtrace.quantizing.judging import Judgement
models.check_stage = lambda *args: None
def pause(*_):
    print("calibrating", file=sys.stderr, flush=True)
    time.sleep(600)
def poison(*_):
    import megengine as mge, numpy as np
    mge.Tensor(np.zeros(4, "float32"))[mge.Tensor(np.array([9], "int32"))]
qtrace.load = lambda path, allow=(): "model"
qtrace.load_recipe = lambda name, allow_code=False: types.SimpleNamespace(preprocess=None, expect=None)
call_data.DataOpener._choose_size = lambda opener, traced, size: (size, False)
stage.prepare = lambda traced, qconfig, **options: "prepared"
stage.config_or_default = lambda recipe: recipe
class Result:
    class collected:
        class statistics: batches = {0: 0}
        class chosen: name, reason, everywhere = "megengine", "as asked", True
    skipped = ()
def collect(*_):
    {"pause": pause, "poison": poison}.get(sys.argv[1], lambda: None)()
    return Result
stage._collect = collect
stage.calibrate = lambda *a, **k: None
conversion.convert = lambda prepared: "converted"
serialize.save = lambda module, path: pathlib.Path(path).write_text(module)
class Table:
    passed = sys.argv[1] != "fail"
    ptq = ()
    annotation = types.SimpleNamespace(notes=(), sites=(), dynamic=())
    def algorithms(self): return []
    def table(self, *args, **options): return "table\\n" * 100000
    def to_dict(self): return {}
qtrace.explain = lambda model, qconfig=None, allow_code=False: Table()
explanation.explain = stage.explain = qtrace.explain
qtrace.verify = lambda path, model, batches, **options: Table()
folder._sites = lambda prepared: []
stage.note_graph = lambda *args: {}
stage.copy_float = lambda prepared: None
stage.conclude = lambda *args, **options: Judgement()
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
        out, err = process.communicate(timeout=600)
        return SimpleNamespace(code=process.returncode, out=out, err=err)

    def test_streams_of_success(self, here):
        result = self.finish("ok", *calibrate_arguments("--json", "-q"))
        assert result.code == 0
        assert json.loads(result.out)["files"]
        assert result.err == ""  # not even MegEngine's note about CUDA

    def test_error_in_a_kernel_is_no_success(self, here):
        result = self.finish("poison", *calibrate_arguments())
        assert result.code == 70
        assert "out of bounds" in result.err
        assert result.out == ""
        assert not Path("out").exists()

    def test_verify_of_a_file_that_differs_ends_with_1(self, here):
        assert self.finish("fail", "verify", "f", "-m", "float.mge", "-d", "x.npy").code == 1

    @pytest.mark.quick(1)
    @pytest.mark.parametrize(
        ("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGHUP, 129)]
    )
    def test_signals_leave_nothing_behind(self, here, number, code):
        process = self.start("pause", *calibrate_arguments("-q"))
        assert process.stderr.readline() == "calibrating\n"
        assert any(name.startswith(".out.") for name in here.names())
        process.send_signal(number)
        process.communicate(timeout=600)
        assert process.returncode == code
        assert not any("out" in name for name in here.names())

    def test_closed_pipe(self, here):
        process = self.start("ok", "explain", "float.mge")
        process.stdout.readline()
        process.stdout.close()
        assert process.wait(timeout=600) == 141
        assert process.stderr.read() == "precision: no layers\n"
        process.stderr.close()

    @pytest.mark.quick(2)
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
            command, shell=True, timeout=600, env=environment, stderr=subprocess.PIPE, text=True
        )
        assert (done.returncode, done.stderr) == (code, told)
