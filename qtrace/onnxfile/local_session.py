"""onnxruntime on CPU in this process: settings, values and errors, its memory and the layout of its kernels.

A session keeps what it has freed for itself and gives all of it back when it ends. Where many sessions follow
each other, most of the time of a short one may be spent on new memory, which the system fills with zeros. The
sessions of this process can share their memory.
"""

from __future__ import annotations

import abc
import functools
import importlib.util
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from qtrace.errors import ExportError, install
from qtrace.process import when_returning
from qtrace.runtimes import worker

if TYPE_CHECKING:
    from qtrace.runtimes.host import RuntimeHost

USE_SHARED_ARENA = "session.use_env_allocators"
"""The entry of a session's configuration that says "1" if it takes the shared memory."""

_SHRINK = "memory.enable_memory_arena_shrinkage"

_BLOCKED = "MaxPool AveragePool GlobalAveragePool Add Mul Concat Relu Sigmoid Tanh Resize BatchNormalization"
_INTO_CONV = frozenset({"LeakyRelu", "HardSigmoid"})
_OF_EQUAL_SHAPES = frozenset({"Add", "Mul"})


class SessionError(ExportError):
    """onnxruntime refuses a model or an input.

    Attributes:
        reason: what onnxruntime says, in one line and without a full stop.
    """

    def __init__(self, subject: str, error: Exception | str) -> None:
        self.reason = " ".join(str(error).split())[:300].rstrip(".")
        super().__init__(f"onnxruntime {subject}: {self.reason}.")


@dataclass(frozen=True)
class SessionSettings:
    """How onnxruntime runs a model.

    Attributes:
        optimize: whether ops are fused and laid out as in a deployment; else each computes on its own.
        threads: the number of threads of an op; None for all cores.
        fuse_integers: whether ops between roundings may run on integers, with other last bits than in float.
        as_megengine: whether denormal numbers are zero, as in MegEngine.
        spin: whether the threads wait actively between two runs, which takes the cores from others.
        profile: whether the times of nodes are recorded, for `OrtSession.end_profile`.
        optimized: whether the optimized model is kept, for `OrtSession.optimized`.
        shared: whether the session takes the memory that sessions of this process share.
        tensors: the folder of the external tensors of a model that is given as bytes.
        host: the interpreter or machine that has onnxruntime; None for this process.
    """

    optimize: bool = True
    threads: int | None = None
    fuse_integers: bool = True
    as_megengine: bool = False
    spin: bool = True
    profile: bool = False
    optimized: bool = False
    shared: bool = False
    tensors: Path | None = None
    host: RuntimeHost | None = None

    def request(self, tensors: str = "") -> dict[str, Any]:
        """Returns the settings as `worker.Onnxruntime` takes them.

        Args:
            tensors: the folder of the external tensors where the session runs.
        """
        entries = {
            "session.disable_quant_qdq": "" if self.fuse_integers else "1",
            "session.set_denormal_as_zero": "1" if self.as_megengine else "",
            "session.force_spinning_stop": "" if self.spin else "1",
            "session.model_external_initializers_file_folder_path": tensors,
        }
        return {
            "optimize": self.optimize,
            "threads": self.threads,
            "profile": self.profile,
            "optimized": self.optimized,
            "entries": {key: value for key, value in entries.items() if value},
        }


@dataclass(frozen=True)
class SessionValue:
    """An input or output of a session.

    Attributes:
        name: its name.
        type: its type as onnxruntime writes it, such as ``tensor(float)``.
        shape: its sizes; names, or None, for open ones.
    """

    name: str
    type: str
    shape: list[Any]


_DTYPES = {
    "tensor(float)": "float32",
    "tensor(float16)": "float16",
    "tensor(double)": "float64",
    "tensor(bool)": "bool",
    **{f"tensor({kind})": kind for kind in ("int8", "int16", "int32", "int64")},
    **{f"tensor({kind})": kind for kind in ("uint8", "uint16", "uint32", "uint64")},
}


def dtype_of(kind: str) -> np.dtype[Any] | None:
    """Returns the numpy dtype of a type as onnxruntime writes it; None if numpy lacks it."""
    name = _DTYPES.get(kind)
    return None if name is None else np.dtype(name)


class OrtSession(abc.ABC):
    """A model in onnxruntime, in this process or in a host's.

    Attributes:
        inputs: its inputs.
        outputs: its outputs.
        side: the runtime's version, the interpreter and the machine of a host; empty for this process.
    """

    side: Mapping[str, Any]

    def __init__(self, file: Any) -> None:
        self._file = file
        self.inputs = [SessionValue(**each) for each in file.facts["inputs"]]
        self.outputs = [SessionValue(**each) for each in file.facts["outputs"]]

    @abc.abstractmethod
    def run(self, names: Sequence[str] | None, feeds: Mapping[str, np.ndarray]) -> list[np.ndarray]:
        """Runs the model once.

        Args:
            names: the outputs; None for all of them.
            feeds: input -> its value.

        Raises:
            SessionError: when onnxruntime refuses the inputs.
            ExportError: when the process of a host does not survive them, or the connection is lost.
        """

    @abc.abstractmethod
    def time(self, feeds: Mapping[str, np.ndarray]) -> float:
        """Returns the seconds of a run, by the clock of the machine that it runs on.

        Args:
            feeds: input -> its value; a host takes those that the last run gave.

        Raises:
            SessionError: when onnxruntime refuses the inputs.
        """

    @abc.abstractmethod
    def memory(self) -> int | None:
        """Returns the bytes that the model added to the process of a host at most; None for this process."""

    def end_profile(self) -> bytes:
        """Ends the profile and returns it, as JSON."""
        content: bytes = self._file.profile()
        return content

    def optimized(self) -> bytes:
        """Returns the model as onnxruntime optimized it, without its large tensors."""
        content: bytes = self._file.optimized()
        return content


class LocalSession(OrtSession):
    """A model in onnxruntime, in this process.

    Args:
        model: a serialized model, or the path of a file.
        settings: how it runs; the host plays no part.
        subject: the model in words, for messages.

    Raises:
        SessionError: when onnxruntime cannot load the model.
        ExportError: when onnxruntime is not installed.
    """

    def __init__(self, model: bytes | Path, settings: SessionSettings, subject: str) -> None:
        if importlib.util.find_spec("onnxruntime") is None:
            raise ExportError(f"running ONNX files needs the package onnxruntime: run {install('onnx')}.")
        request = settings.request(str(settings.tensors or ""))
        if settings.shared and register_shared_arena():
            request["entries"][USE_SHARED_ARENA] = "1"
        path = "" if isinstance(model, bytes) else str(model)
        try:
            file = worker.Onnxruntime({**request, "path": path}, [model])
        except onnxruntime_errors() as error:
            raise SessionError(f"cannot run {subject}", error) from error
        self.side = {}
        super().__init__(file)

    def run(self, names: Sequence[str] | None, feeds: Mapping[str, np.ndarray]) -> list[np.ndarray]:
        """See `OrtSession.run`."""
        try:
            values: list[np.ndarray] = self._file.session.run(names, dict(feeds))
        except onnxruntime_errors() as error:
            raise SessionError("refused the input", error) from error
        # An output that is an input has the memory of the array that was given, and does not keep that alive.
        names = names or [output.name for output in self.outputs]
        return [value.copy() if name in feeds else value for name, value in zip(names, values, strict=True)]

    def time(self, feeds: Mapping[str, np.ndarray]) -> float:
        """See `OrtSession.time`."""
        start = time.perf_counter()
        self.run(None, feeds)
        return time.perf_counter() - start

    def memory(self) -> None:
        """See `OrtSession.memory`."""
        return None


def onnxruntime_errors() -> tuple[type[Exception], ...]:
    """Returns the exceptions that onnxruntime raises; its own derive only from `Exception`."""
    if importlib.util.find_spec("onnxruntime") is None:  # it may be in an interpreter of its own alone
        return (RuntimeError, ValueError)
    from onnxruntime.capi import onnxruntime_pybind11_state as state

    own = (t for t in vars(state).values() if isinstance(t, type) and issubclass(t, Exception))
    return (*own, RuntimeError, ValueError)


@functools.cache
def register_shared_arena() -> bool:
    """Makes the shared memory once, given back with other free memory; returns whether it is there."""
    if importlib.util.find_spec("onnx") is None:
        return False
    import onnxruntime as ort

    memory = ort.OrtMemoryInfo("Cpu", ort.OrtAllocatorType.ORT_ARENA_ALLOCATOR, 0, ort.OrtMemType.DEFAULT)
    ort.create_and_register_allocator(memory, None)
    when_returning(functools.partial(_run_smallest, shrink=True))
    _run_smallest()  # the first piece of the memory, which is as large as its first use, is never given back
    return True


def _run_smallest(shrink: bool = False) -> None:
    """Runs a model of one number.

    Args:
        shrink: whether the memory then gives back what it has free.
    """
    session, feeds, shrinking = _smallest_session()
    session.run(None, feeds, shrinking if shrink else None)


@functools.cache
def _smallest_session() -> tuple[Any, dict[str, Any], Any]:
    """Returns a session, its inputs, and the options of a run after which the memory gives back."""
    import numpy as np
    import onnxruntime as ort
    from onnx import TensorProto, helper

    ends = [helper.make_tensor_value_info(name, TensorProto.FLOAT, [1]) for name in ("x", "y")]
    graph = helper.make_graph([helper.make_node("Identity", ["x"], ["y"])], "shrink", ends[:1], ends[1:])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 11)], ir_version=7)
    options = ort.SessionOptions()
    options.intra_op_num_threads = options.inter_op_num_threads = 1
    options.add_session_config_entry(USE_SHARED_ARENA, "1")
    session = ort.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    shrinking = ort.RunOptions()
    shrinking.add_run_config_entry(_SHRINK, "cpu:0")
    return session, {"x": np.zeros(1, np.float32)}, shrinking


def stays_blocked(op: str, blocked: bool, after_conv: bool, equal_shapes: bool) -> bool:
    """Returns whether a float op reads and writes blocks of channels.

    Args:
        op: its ONNX op.
        blocked: whether all that it reads is in blocks.
        after_conv: whether it reads a convolution, which can take it in.
        equal_shapes: whether it reads computed tensors of only one shape.
    """
    if op in _INTO_CONV:
        return after_conv
    return op in _BLOCKED.split() and blocked and (equal_shapes or op not in _OF_EQUAL_SHAPES)
