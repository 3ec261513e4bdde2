"""Runtimes in another interpreter and behind a command, for which local scripts stand in."""

from __future__ import annotations

import os
import shlex
import sys
import textwrap
import time
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from qtrace.errors import ConfigError, ExportError
from qtrace.onnxfile.local_session import SessionError, SessionSettings
from qtrace.onnxfile.sessions import OpenvinoFile, open_session
from qtrace.runtimes import child, tunnel, worker
from qtrace.runtimes.child import RuntimeChild
from qtrace.runtimes.host import RuntimeHost, describe_side

_X = np.float32([[-1, 2], [3, -4]])

# A package that stands in for onnxruntime, and does what a broken one may do.
_BROKEN = """
    import os, signal, time
    __version__ = "9.9"
    class SessionOptions:
        def add_session_config_entry(self, key, value): pass
    class GraphOptimizationLevel:
        ORT_ENABLE_ALL = ORT_DISABLE_ALL = 0
    class InferenceSession:
        def __init__(self, source, options, providers):
            self.what = source.decode() if isinstance(source, bytes) else open(source).read()
        def get_inputs(self): return []
        def get_outputs(self): return []
        def run(self, names, feeds):
            if self.what == "abort": os.abort()
            if self.what == "leave": os._exit(3)
            if self.what == "hang": time.sleep(600)
            import tempfile
            open(os.path.join(tempfile.gettempdir(), "left behind"), "w").close()
            raise ValueError("no such luck\\nat all")
"""


def _model(weight: np.ndarray | None = None) -> bytes:
    nodes = [helper.make_node("Relu", ["x"], ["y"])]
    stored = []
    if weight is not None:
        nodes = [helper.make_node("Add", ["x", "w"], ["h"]), helper.make_node("Relu", ["h"], ["y"])]
        stored = [numpy_helper.from_array(weight, "w")]
    ends = [helper.make_tensor_value_info(name, TensorProto.FLOAT, ["n", 2]) for name in "xy"]
    graph = helper.make_graph(nodes, "g", ends[:1], ends[1:], stored)
    opset = [helper.make_opsetid("", 13)]
    return helper.make_model(graph, opset_imports=opset, ir_version=8).SerializeToString()


def _script(path: Path, text: str) -> Path:
    path.write_text(textwrap.dedent(text))
    path.chmod(0o755)
    return path


@pytest.fixture
def far(tmp_path: Path) -> Path:
    """The temporary folder of a far machine, which must be empty in the end."""
    folder = tmp_path / "far"
    folder.mkdir()
    return folder


def _runner(tmp_path: Path, far: Path, before: str = "", python: str = sys.executable) -> RuntimeHost:
    """A command that runs Python as a login elsewhere does: other folder, empty environment, a banner."""
    script = _script(
        tmp_path / "runner",
        f"""\
        #!/bin/sh
        cd {shlex.quote(str(far))}
        echo "Welcome to board 7"
        {before}
        exec env -i TMPDIR={shlex.quote(str(far))} {shlex.quote(python)} "$@"
        """,
    )
    return RuntimeHost(runner=shlex.quote(str(script)))


def _broken(tmp_path: Path, kind: str, far: Path) -> RuntimeHost:
    """A host whose onnxruntime is broken, in an interpreter or behind a command."""
    package = tmp_path / "packages"
    package.mkdir()
    (package / "onnxruntime.py").write_text(textwrap.dedent(_BROKEN))
    python = _script(
        tmp_path / "python",
        f"""\
        #!{sys.executable}
        import os, sys
        os.environ["PYTHONPATH"] = {str(package)!r}
        os.execv(sys.executable, [sys.executable, *(a for a in sys.argv[1:] if a != "-E")])
        """,
    )
    if kind == "python":
        return RuntimeHost(python)
    return _runner(tmp_path, far, python=str(python))


def _wait_until(condition: object) -> None:
    deadline = time.monotonic() + 600
    while not condition() and time.monotonic() < deadline:  # type: ignore[operator]
        time.sleep(0.01)
    assert condition()  # type: ignore[operator]


@pytest.mark.parametrize("kind", ["python", "runner"])
def test_a_session_elsewhere_computes_and_says_where(tmp_path: Path, far: Path, kind: str) -> None:
    where = RuntimeHost(sys.executable) if kind == "python" else _runner(tmp_path, far)
    session = open_session(_model(), SessionSettings(threads=1, optimized=True, host=where))
    assert [(i.name, i.type, i.shape) for i in session.inputs] == [("x", "tensor(float)", ["n", 2])]
    np.testing.assert_array_equal(session.run(None, {"x": _X})[0], np.maximum(_X, 0))
    large = np.random.default_rng(0).normal(size=(200_000, 2)).astype(np.float32)
    np.testing.assert_array_equal(session.run(["y"], {"x": large})[0], np.maximum(large, 0))
    assert session.time({}) > 0
    assert session.memory() > 0
    assert len(onnx.load_from_string(session.optimized()).graph.node) == 1
    with pytest.raises(SessionError, match=r"^onnxruntime refused the input: [^\n]+\.$"):
        session.run(None, {"x": _X.astype(np.int32)})
    line = describe_side(session.side)
    version = ".".join(map(str, sys.version_info[:3]))
    assert line.startswith(f"onnxruntime {session.side['version']}, Python {version}, numpy {np.__version__}")
    assert line.endswith(f"by {where}")
    del session
    _wait_until(lambda: not list(far.iterdir()))


def test_files_and_their_tensors_are_copied(tmp_path: Path, far: Path) -> None:
    model = onnx.load_from_string(_model(np.full((1, 2), 2, np.float32)))
    (tmp_path / "own").mkdir()
    path = tmp_path / "own" / "m.onnx"
    onnx.save(
        model,
        str(path),
        save_as_external_data=True,
        location="w.data",
        size_threshold=0,
        convert_attribute=True,
    )
    assert (tmp_path / "own" / "w.data").exists()
    session = open_session(path, SessionSettings(host=_runner(tmp_path, far)))
    np.testing.assert_array_equal(session.run(None, {"x": _X})[0], np.maximum(_X + 2, 0))
    bare = path.read_bytes()
    settings = SessionSettings(tensors=path.parent, host=_runner(tmp_path, far))
    np.testing.assert_array_equal(open_session(bare, settings).run(None, {"x": _X})[0], np.maximum(_X + 2, 0))
    (path.parent / "deep" / "er").mkdir(parents=True)
    (path.parent / "w.data").rename(path.parent / "deep" / "er" / "w.data")
    model = onnx.load_from_string(bare)
    next(e for e in model.graph.initializer[0].external_data if e.key == "location").value = "deep/er/w.data"
    result = open_session(model.SerializeToString(), settings).run(None, {"x": _X})[0]
    np.testing.assert_array_equal(result, np.maximum(_X + 2, 0))
    outside = SessionSettings(tensors=path.parent / "deep" / "er", host=settings.host)
    with pytest.raises(ExportError, match="w.data"):
        open_session(model.SerializeToString(), outside)


@pytest.mark.parametrize(("threads", "clock"), [("1", time.process_time), ("2", time.perf_counter)])
def test_openvino_on_one_thread_takes_the_time_of_the_processor(threads: str, clock: object) -> None:
    """As in the other runtimes, the turns of other programs do not count then."""
    pytest.importorskip("openvino")
    content = np.frombuffer(_model(), np.uint8)
    file = worker.Openvino({"config": {"INFERENCE_NUM_THREADS": threads}}, [content])
    file.run([_X], {})
    assert file.clock is clock
    assert 0 <= file.time() < 10
    assert worker.Openvino({"config": {}}, [content]).clock is time.perf_counter


def test_openvino_elsewhere_has_the_tensors_and_says_its_reason(tmp_path: Path, far: Path) -> None:
    pytest.importorskip("openvino")
    host = _runner(tmp_path, far)
    path = tmp_path / "m.onnx"
    model = onnx.load_from_string(_model(np.full((1, 2), 2, np.float32)))
    onnx.save(model, str(path), save_as_external_data=True, location="w.data", size_threshold=0)
    np.testing.assert_array_equal(OpenvinoFile(path, {}, path, host).run([_X])[0], np.maximum(_X + 2, 0))
    model = onnx.load_from_string(_model(np.ones((1, 2), np.float32)))  # saving took its tensors
    model.graph.node[0].op_type = "NoSuchOp"
    with pytest.raises(ExportError, match="NoSuchOp") as caught:
        OpenvinoFile(model.SerializeToString(), {}, path, host)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("kind", ["python", "runner"])
@pytest.mark.parametrize(
    ("what", "sentence"),
    [
        ("abort", r"by signal SIGABRT: the runtime does not survive this file or its inputs"),
        ("leave", r"ended its process with code 3: please report it"),
        ("hang", r"gave no answer in 0\.5 s and was ended"),
        ("refuse", r"^onnxruntime refused the input: no such luck at all$"),
    ],
)
def test_a_broken_runtime_is_one_sentence_and_leaves_nothing(
    tmp_path: Path, far: Path, kind: str, what: str, sentence: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TMPDIR", str(far))
    monkeypatch.setattr("tempfile.tempdir", None)
    where = _broken(tmp_path, kind, far)
    started = RuntimeChild("onnxruntime", "onnxruntime", "m.onnx", where)
    request = {"optimize": True, "threads": 1, "entries": {}}
    file, _ = started.open([np.frombuffer(what.encode(), np.uint8)], **request)
    started._child.idle = 0.5 if what == "hang" else 60.0
    with pytest.raises(ExportError, match=sentence) as caught:
        file.run([], feeds=[], names=None)
    assert "\n" not in str(caught.value)
    started.close()
    _wait_until(lambda: not list(far.iterdir()))


@pytest.mark.parametrize(
    ("before", "timeout", "sentence"),
    [
        (
            "echo 'ssh: connect to host board: timed out' >&2; exit 255",
            600,
            r"code 255 \(ssh: connect to host",
        ),
        (
            "echo python9: not found >&2; exit 127",
            600,
            r"lost its connection: the command .*python9: not found",
        ),
        ("exec sleep 600", 0.5, r"gave no answer in 0\.5 s and was ended"),
        ("while read x; do :; done", 0.5, r"gave no answer in 0\.5 s and was ended"),
    ],
)
def test_a_command_that_starts_no_python_is_one_sentence(
    tmp_path: Path, far: Path, before: str, timeout: float, sentence: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(child, "_SIGN_SECONDS", 0.1)
    where = RuntimeHost(runner=_runner(tmp_path, far, before).runner, timeout=timeout)
    with pytest.raises(ExportError, match=sentence) as caught:
        open_session(_model(), SessionSettings(host=where))
    assert "\n" not in str(caught.value)


def test_a_connection_that_is_lost_is_one_sentence_and_leaves_nothing(tmp_path: Path, far: Path) -> None:
    # As ssh does, the command stands between both sides, and its end is that of the connection.
    runner = _runner(tmp_path, far).runner
    between = _script(
        tmp_path / "between",
        f"""\
        #!{sys.executable}
        import os, subprocess, sys, threading
        end = subprocess.Popen([{runner!r}, *sys.argv[1:]], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        def copy(source, target):
            while part := os.read(source, 65536):
                os.write(target, part)
        threading.Thread(target=copy, args=(0, end.stdin.fileno()), daemon=True).start()
        copy(end.stdout.fileno(), 1)
        """,
    )
    session = open_session(_model(), SessionSettings(host=RuntimeHost(runner=str(between))))
    assert list(far.iterdir())
    session._file._child._child._process.kill()  # type: ignore[union-attr]
    with pytest.raises(ExportError, match="lost its connection: the command .* ended with code -9") as caught:
        session.run(None, {"x": _X})
    assert "\n" not in str(caught.value)
    _wait_until(lambda: not list(far.iterdir()))


def test_a_far_end_that_is_reported_to_end_says_so(tmp_path: Path, far: Path) -> None:
    session = open_session(_model(), SessionSettings(host=_runner(tmp_path, far)))
    session._file._child._child._process.terminate()  # type: ignore[union-attr]
    with pytest.raises(ExportError, match=r"runner: a signal ended it\.$"):
        session.run(None, {"x": _X})
    _wait_until(lambda: not list(far.iterdir()))


def test_missing_package_of_a_host_is_one_sentence(tmp_path: Path, far: Path) -> None:
    blocked = tmp_path / "blocked"
    blocked.mkdir()
    for package in ("numpy", "onnxruntime"):
        (blocked / f"{package}.py").write_text(f"raise ImportError('No module named {package}')\n")
        python = _script(
            tmp_path / f"without-{package}",
            f"""\
            #!/bin/sh
            shift
            PYTHONPATH={shlex.quote(str(blocked))} exec {shlex.quote(sys.executable)} "$@"
            """,
        )
        with pytest.raises(
            ExportError, match=rf"the Python of .*without-{package} .*pip install .*onnxruntime"
        ) as e:
            open_session(_model(), SessionSettings(host=RuntimeHost(python)))
        assert "\n" not in str(e.value)
        (blocked / f"{package}.py").unlink()
    with pytest.raises(ExportError, match="'/nowhere/python' does not start: No such file"):
        open_session(_model(), SessionSettings(host=RuntimeHost("/nowhere/python")))
    old = _script(tmp_path / "old", "#!/bin/sh\necho '@qtrace python 3.6.15'\nexec cat > /dev/null\n")
    with pytest.raises(ExportError, match=r"is Python 3\.6\.15: a runtime is run by Python 3\.8 or later"):
        open_session(_model(), SessionSettings(host=RuntimeHost(runner=str(old))))
    old = _script(tmp_path / "older", "#!/bin/sh\n[ $1 = -c ] && echo 2.7.18 && exit\nexit 1\n")
    with pytest.raises(ExportError, match=r"is Python 2\.7\.18: a runtime is run by Python 3\.8 or later"):
        open_session(_model(), SessionSettings(host=RuntimeHost(str(old))))


def test_host_takes_python_or_runner_but_not_both() -> None:
    assert RuntimeHost("~/bin/python").command == [os.path.expanduser("~/bin/python")]
    assert RuntimeHost(runner="ssh 'my board' python3").command == ["ssh", "my board", "python3"]
    for python, runner, timeout in [("", "", 1), ("a", "b", 1), ("", " ", 1), ("", "a 'b", 1), ("a", "", 0)]:
        with pytest.raises(ConfigError):
            RuntimeHost(python, runner, timeout)
    with pytest.raises(ConfigError, match="timeout"):
        RuntimeHost("a", timeout=float("nan"))


@pytest.mark.parametrize("module", [worker, tunnel])
def test_what_runs_elsewhere_needs_no_qtrace(module: object) -> None:
    import ast

    tree = ast.parse(Path(module.__file__).read_text(), feature_version=(3, 8))  # type: ignore[attr-defined]
    names = [a.name for n in ast.walk(tree) if isinstance(n, ast.Import) for a in n.names]
    names += [n.module or "" for n in ast.walk(tree) if isinstance(n, ast.ImportFrom)]
    runtimes = {"numpy", "onnxruntime", "openvino", "ncnn", "ai_edge_litert", "tflite_runtime", "tensorflow"}
    tops = {name.split(".")[0] for name in names}
    assert tops <= set(sys.stdlib_module_names) | (runtimes if module is worker else set())
