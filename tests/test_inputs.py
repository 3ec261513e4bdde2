"""Faulty inputs that need more than a file: names, sizes, ways to call, models from elsewhere."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import megengine as mge
import megengine.functional as F
import megengine.module as M
import numpy as np
import pytest

import qtrace
from qtrace.data import open_data
from qtrace.errors import CalibrationError, ConfigError, GraphError, QtraceError, TraceError
from qtrace.graph.types import TracedModule
from qtrace.preparation.model import QuantizedModel
from qtrace.storage import files
from tests import faulty
from tests.each import each_of
from tests.nets import images, net
from tests.test_bad_input import refused, run

X = images(2, 3, 8, 8)


def _network(side: int = 8) -> TracedModule:
    """One convolution, and a linear layer that fits one size."""
    linear = M.Linear(4 * side * side, 2)
    module = net(
        lambda self, x: self.linear(F.flatten(self.conv(x), 1)),
        conv=M.Conv2d(3, 4, 3, padding=1),
        linear=linear,
    )
    return qtrace.trace(module, images(2, 3, side, side), check=False)


@pytest.fixture(scope="module")
def traced() -> TracedModule:
    return _network()


@pytest.fixture(scope="module")
def quantized(traced: TracedModule) -> TracedModule:
    return qtrace.convert(qtrace.calibrate(qtrace.prepare(traced), [X], progress=False))


def test_an_npz_of_many_arrays_is_opened_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "many.npz"
    path.write_bytes(faulty.npz(**{f"a{i}": np.full((5, 2), i, np.float32) for i in range(50)}))
    opened = []
    real = zipfile.ZipFile.__init__

    def count(self: zipfile.ZipFile, *args: Any, **options: Any) -> None:
        opened.append(args)
        real(self, *args, **options)

    monkeypatch.setattr(zipfile.ZipFile, "__init__", count)
    source = open_data(str(path), batch_size=2)
    assert len(opened) == 1  # for the headers
    batches = list(source)
    assert len(opened) == 2  # and for the values
    assert [batch["a7"].tolist() for batch in batches] == [[[7, 7]] * 2, [[7, 7]] * 2, [[7, 7]]]


def test_nested_folders_of_images_are_read_at_any_depth(tmp_path: Path) -> None:
    preprocess = qtrace.QConfig(
        preprocess={"size": [3, 6, 4], "mean": [0, 0, 0], "std": [1, 1, 1]}
    ).preprocess
    start, depth = os.getcwd(), 1200
    try:
        os.chdir(tmp_path)
        for _ in range(depth):
            os.mkdir("d")
            os.chdir("d")
        Path("a.png").write_bytes(faulty.png(faulty.picture()))
        assert len(list(open_data(str(tmp_path), preprocess=preprocess))) == 1
        os.unlink("a.png")
        for _ in range(depth):  # neither pytest nor shutil gets so deep
            os.chdir("..")
            os.rmdir("d")
    finally:
        os.chdir(start)


SURROGATE = "\ud800"
NAMES: dict[str, Callable[[TracedModule, TracedModule, str], Any]] = {
    "load": lambda traced, quantized, name: qtrace.load(f"{name}.mge"),
    "save": lambda traced, quantized, name: qtrace.save(traced, f"{name}.mge"),
    "export": lambda traced, quantized, name: qtrace.export(quantized, f"{name}.onnx"),
    "recipe": lambda traced, quantized, name: qtrace.load_recipe(f"{name}.yaml"),
    "data": lambda traced, quantized, name: open_data(f"{name}.npy"),
}


@each_of("call", NAMES)
@each_of("name", [SURROGATE, "a\0b"])
def test_names_that_no_file_has(name: str, call: str, traced: TracedModule, quantized: TracedModule) -> None:
    with pytest.raises(QtraceError, match="cannot be the name of a file|There is no file") as caught:
        NAMES[call](traced, quantized, name)
    assert "damaged" not in str(caught.value)


CALLS = {
    "load": "qtrace.load('float.mge')",
    "trace": "qtrace.trace(module, x)",
    "prepare": "qtrace.prepare(traced)",
    "export": "qtrace.export(quantized, 'new.onnx')",
    "save": "qtrace.save(traced, 'new.mge')",
}
PROGRAM = """
import os, threading
import numpy as np
import megengine.module as M
import qtrace
x = np.zeros((2, 3, 8, 8), np.float32)
module, traced, quantized = M.Conv2d(3, 4, 3), qtrace.load("float.mge"), qtrace.load("quantized.mge")
def attempt(how):
    for call in {calls!r}:
        try:
            eval(call)
            print(how, "passed", flush=True)
        except qtrace.errors.QtraceError as error:
            print(how, error, flush=True)
thread = threading.Thread(target=attempt, args=("thread",))
thread.start()
thread.join()
child = os.fork()
if not child:
    attempt("fork")
    os._exit(0)
os.waitpid(child, 0)
os._exit(0)
"""


def test_calls_on_another_thread_and_after_a_fork_say_so(
    tmp_path: Path, traced: TracedModule, quantized: TracedModule
) -> None:
    qtrace.save(traced, tmp_path / "float.mge")
    qtrace.save(quantized, tmp_path / "quantized.mge")
    program = PROGRAM.replace("{calls!r}", repr(list(CALLS.values())))
    command = [sys.executable, "-W", "ignore", "-c", program]
    process = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, timeout=600)
    sentences = [line for line in process.stdout.splitlines() if line.startswith(("thread", "fork"))]
    assert len(sentences) == 2 * len(CALLS), process.stdout + process.stderr
    for line, name in zip(sentences, [*CALLS, *CALLS], strict=True):
        how = line.split()[0]
        reason = "on a thread on which MegEngine cannot compute" if how == "thread" else "in a forked process"
        assert line.startswith(f"{how} {name} was called {reason}"), line
    assert sorted(os.listdir(tmp_path)) == ["float.mge", "quantized.mge"]


def _killed(folder: Path, code: str) -> None:
    """Runs code that makes something temporary and is killed then."""
    program = f"import os, signal\nfrom pathlib import Path\nfrom qtrace.storage import files\n{code}\n"
    command = [sys.executable, "-c", program + "os.kill(os.getpid(), signal.SIGKILL)"]
    assert subprocess.run(command, cwd=folder, timeout=600).returncode == -signal.SIGKILL


def test_leftovers_of_killed_exports_are_swept_and_those_at_work_are_not(
    tmp_path: Path, quantized: TracedModule, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    file = "files.claim(Path('model.onnx').resolve(), lambda new: new.touch())"
    folder = "files.claim(Path('model.onnx').resolve(), Path.mkdir)[0].joinpath('half').touch()"
    other = "files.claim(Path('other.onnx').resolve(), lambda new: new.touch())"
    _killed(tmp_path, "\n".join((file, folder, other)))
    assert len(os.listdir(tmp_path)) == 3
    working, lock = files.claim(tmp_path / "model.onnx", Path.mkdir)
    qtrace.export(quantized, "model.onnx")
    (left,) = [name for name in os.listdir(tmp_path) if name.startswith(".other")]
    assert sorted(os.listdir(tmp_path)) == sorted([left, working.name, "model.onnx"])
    os.close(lock)
    qtrace.save(quantized, "model.onnx")
    assert sorted(os.listdir(tmp_path)) == sorted([left, "model.onnx"])


def test_the_command_line_sweeps_what_a_killed_one_left(
    tmp_path: Path, quantized: TracedModule, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    qtrace.save(quantized, "quantized.mge")
    _killed(tmp_path, "files.claim(Path('m.onnx').resolve(), Path.mkdir)[0].joinpath('half').touch()")
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGHUP)}
    try:
        code, _, err = run("export", "quantized.mge", "-o", "m.onnx")
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    assert code == 0, err
    assert sorted(os.listdir(tmp_path)) == ["m.onnx", "quantized.mge"]


def test_an_interrupt_while_commands_are_imported_shows_no_traceback(tmp_path: Path) -> None:
    (tmp_path / "click.py").write_text("raise KeyboardInterrupt\n")
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), *filter(None, sys.path)])}
    for module in ("qtrace", "qtrace.cli"):
        command = [sys.executable, "-m", module, "--help"]
        process = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=600)
        assert (process.returncode, process.stderr) == (130, "interrupted: no result was written.\n")


class Holder(M.Module):
    """A prepared module beside a layer of its own."""

    def __init__(self, part: M.Module) -> None:
        super().__init__()
        self.part = part
        self.head = M.Linear(2, 2)

    def forward(self, x: mge.Tensor) -> mge.Tensor:
        return self.head(self.part(x))


def test_set_phase_takes_a_module_that_holds_prepared_ones(traced: TracedModule) -> None:
    prepared = qtrace.calibrate(qtrace.prepare(traced), [X], progress=False)
    holder = Holder(prepared)
    for phase in ("float", "quantize"):
        qtrace.set_phase(holder, phase)
        assert {child.phase for child in prepared.qsites.children()} == {phase}
    with pytest.raises(CalibrationError, match="lack quantization parameters"):
        qtrace.set_phase(Holder(qtrace.prepare(traced)), "quantize")
    with pytest.raises(GraphError, match="Holder is not a prepared module"):
        qtrace.set_phase(Holder(M.Linear(2, 2)), "float")
    with pytest.raises(GraphError, match="converted, not prepared"):
        qtrace.set_phase(Holder(qtrace.convert(prepared)), "float")


def test_a_model_with_end_points_is_refused(traced: TracedModule, tmp_path: Path) -> None:
    moved = qtrace.trace(traced)
    (node,) = [n for n in moved.graph.nodes() if n._name == "conv_out"]
    moved.set_end_points(node)
    with pytest.raises(GraphError, match="set_end_points moved its outputs to conv_out.*reset_outputs"):
        qtrace.prepare(moved)
    with pytest.raises(TraceError, match="cannot be copied: set_end_points moved"):
        qtrace.trace(moved)
    with pytest.raises(GraphError, match="cannot be saved: set_end_points moved"):
        qtrace.save(moved, tmp_path / "moved.mge")
    moved.clear_end_points()
    assert qtrace.prepare(moved) is not None


def test_a_model_with_watch_points_is_refused(traced: TracedModule, tmp_path: Path) -> None:
    watched = qtrace.trace(traced)
    watched.set_watch_points(watched.graph.outputs[0])
    advice = r"set_watch_points keeps the values of .*call traced.clear_watch_points\(\) first"
    with pytest.raises(TraceError, match=advice):
        qtrace.trace(watched)
    with pytest.raises(GraphError, match=advice):
        qtrace.prepare(watched)
    with pytest.raises(GraphError, match=advice):
        qtrace.save(watched, tmp_path / "watched.mge")
    assert not list(tmp_path.iterdir())
    watched.clear_watch_points()
    assert qtrace.prepare(watched) is not None


def test_a_calibration_without_a_site_is_an_error(
    traced: TracedModule, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    nothing = {"rules": [{"match": {"name": "*"}, "quantize": False}]}
    with pytest.raises(CalibrationError, match="the graph lacks sites: not one of its ops is quantized"):
        qtrace.calibrate(qtrace.prepare(traced, nothing), [X], progress=False)
    monkeypatch.chdir(tmp_path)
    qtrace.save(traced, "float.mge")
    np.save("x.npy", X)
    Path("none.yaml").write_text("schema: qtrace/1\nrules: [{match: {name: '*'}, quantize: false}]\n")
    refused(
        "the graph lacks sites", "calibrate", "float.mge", "-d", "x.npy", "-r", "none.yaml", "-q", "-o", "new"
    )
    assert sorted(os.listdir(tmp_path)) == ["float.mge", "none.yaml", "x.npy"]


def test_a_wrong_region_argument_is_blamed_with_the_nearest_names(traced: TracedModule) -> None:
    with pytest.raises(ConfigError) as caught:
        qtrace.prepare(traced, "resnet50", outputs=["conv_ouz"])
    message = str(caught.value)
    assert message.startswith("argument outputs names 'conv_ouz', which is no node or module here; ")
    near = message.partition("the nearest names are ")[2].rstrip(".").split(", ")
    assert near[0] == "conv_out"
    assert len(near) == 5
    assert "resnet50" not in message
    with pytest.raises(ConfigError, match=r"^argument inputs names 'nowhere'"):
        qtrace.prepare(traced, inputs="nowhere")
    with pytest.raises(ConfigError, match=r"^QConfig: region\.outputs names 'nowhere'"):
        qtrace.prepare(traced, {"region": {"outputs": "nowhere"}})


def test_imports_belong_in_a_file_or_a_mapping(traced: TracedModule) -> None:
    with pytest.raises(ConfigError, match="'imports' belongs in a recipe file or in a mapping: .* the name"):
        qtrace.QConfig(imports=["backend/generic"])
    prepared = qtrace.prepare(traced, {"imports": ["backend/generic"]})
    assert QuantizedModel(prepared).config.backend == "generic"


OWN = (
    "from qtrace.fakequant import FixedFakeQuant, builtin\n@builtin\nclass Soft(FixedFakeQuant):\n    pass\n"
)


def test_code_of_a_recipe_and_of_a_model_is_found_in_the_current_folder(
    tmp_path: Path, traced: TracedModule, monkeypatch: pytest.MonkeyPatch
) -> None:
    qtrace.save(traced, tmp_path / "float.mge")
    np.save(tmp_path / "x.npy", X)
    (tmp_path / "own_fake_quant.py").write_text(OWN)
    (tmp_path / "r.yaml").write_text("schema: qtrace/1\nfakequant: own_fake_quant:Soft\n")
    script = (
        tmp_path / "elsewhere" / "qtrace_command.py"
    )  # Python searches this folder, as with an installed one
    script.parent.mkdir()
    script.write_text("from qtrace.cli import main\nmain()\n")

    def command(*args: str) -> subprocess.CompletedProcess[str]:
        environment = {**os.environ, "PYTHONPATH": str(Path(qtrace.__file__).parents[1])}
        return subprocess.run(
            [sys.executable, "-W", "ignore", script, *args],
            cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=600,
        )  # fmt: skip

    recipe = ("-r", "r.yaml", "--allow-code")
    process = command("calibrate", "float.mge", "-d", "x.npy", *recipe, "-q", "-o", "new")
    assert process.returncode == 0, process.stderr
    monkeypatch.chdir(tmp_path)
    refused("allow it with --allow own_fake_quant:Soft, in Python with load", "explain", "new/prepared.mge")
    process = command("explain", "new/prepared.mge", "--allow", "own_fake_quant:Soft")
    assert process.returncode == 0, process.stderr


def test_sizes_of_recipe_and_trace_are_compared_before_images_are_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, traced: TracedModule
) -> None:
    monkeypatch.chdir(tmp_path)
    qtrace.save(traced, "d.mge")
    Path("pictures").mkdir()
    Path("pictures/a.png").write_bytes(b"not read")
    Path("r.yaml").write_text(faulty.RECIPE.replace("8, 8", "16, 16"))
    sentence = r"makes images 3x16x16, and d\.mge, which was traced with 3x8x8, does not take them"
    refused(sentence, "calibrate", "d.mge", "-d", "pictures", "-r", "r.yaml", "-q", "-o", "new")
    anywhere = net(lambda self, x: self.conv(x), conv=M.Conv2d(3, 4, 3))
    qtrace.save(qtrace.trace(anywhere, X, check=False), "any.mge")
    refused(
        "a.png is not an image", "calibrate", "any.mge", "-d", "pictures", "-r", "r.yaml", "-q", "-o", "new"
    )


def test_what_architecture_tells_to_use_can_be_imported() -> None:
    from qtrace.config.backends import Backend
    from qtrace.fakequant import FakeQuant, Learn, builtin
    from qtrace.observers import Observer
    from qtrace.ops import OpRule
    from qtrace.ptq import CalibratedAlgorithm, CalibratedTask, FloatAlgorithm, FloatTask, Report
    from qtrace.verification.runtimes import Runtime

    classes = (
        Backend,
        FakeQuant,
        Learn,
        Observer,
        OpRule,
        CalibratedAlgorithm,
        CalibratedTask,
        FloatAlgorithm,
    )
    assert all(isinstance(cls, type) for cls in (*classes, FloatTask, Report, Runtime))
    assert callable(builtin)
