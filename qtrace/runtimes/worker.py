"""Runs files in a runtime for another process; see `child.py`. It is a script of its own.

It imports only numpy and the runtime, and runs in Python 3.8 to 3.14: in any interpreter, and on other
machines, where `tunnel.py` starts it. It begins with a line of JSON about this side; then
it answers requests:

- ``open`` names the runtime and how it loads the file, and takes the content of the file as an array of bytes
  where the runtime reads it from memory. It gives the number of the loaded file and facts about it.
- ``run`` takes that number and an array for each input, and gives an array for each output.
- ``time`` runs the file again on the same inputs and gives the seconds, of processor time where one thread
  computes. ``memory`` gives the bytes that loading and running it added to this process at most.
- ``optimized`` and ``profile`` give the content of a file that onnxruntime wrote.
- ``store`` appends bytes to a file of the folder that this process runs in, where the files are elsewhere.

A runtime's refusal is one line, which the other side begins with what it was about.
"""

from __future__ import annotations

import os
import sys

if __name__ == "__main__":  # neither the folder of this file nor the current one holds modules for a runtime
    sys.path[:] = [p for p in sys.path if p not in ("", os.path.dirname(os.path.abspath(__file__)))]

import json
import platform
import re
import shutil
import tempfile
import time
from collections.abc import Sequence
from typing import IO, Any

MARK = "qtrace-worker"  # the key of the first line

try:
    import numpy as np
except ImportError as absent:
    print(json.dumps({MARK: {}, "missing": "numpy", "reason": str(absent)}), flush=True)
    sys.exit(1)

_FLAGS = ("avx2", "avx_vnni", "avx512f", "avx512_vnni", "avx512_bf16", "amx_int8", "asimd", "asimddp", "i8mm")
_CPU_INFO = "/proc/cpuinfo"
_FATAL = 4  # onnxruntime's severity from which on messages are printed; errors are exceptions anyway


def _described(value: Any) -> dict[str, Any]:
    return {"name": value.name, "type": value.type, "shape": list(value.shape)}


class Onnxruntime:
    """An ONNX file, by ``path`` or content.

    Its settings are ``optimize``, ``threads``, ``entries`` of the session's configuration, and whether the
    files ``profile`` and ``optimized`` are written.
    """

    def __init__(self, request: dict[str, Any], arrays: Sequence[Any]) -> None:
        import onnxruntime as ort

        self.before, self.version = _kilobytes("VmRSS"), ort.__version__
        self.clock = _clock(request)
        self.folder: str | None = None
        options, levels = ort.SessionOptions(), ort.GraphOptimizationLevel
        options.graph_optimization_level = (
            levels.ORT_ENABLE_ALL if request["optimize"] else levels.ORT_DISABLE_ALL
        )
        options.intra_op_num_threads = request["threads"] or 0
        options.log_severity_level = _FATAL
        if request.get("profile") or request.get("optimized"):
            self.folder = tempfile.mkdtemp(prefix="qtrace-session-")
        if request.get("profile"):
            options.enable_profiling = True
            options.profile_file_prefix = os.path.join(str(self.folder), "run")
        if request.get("optimized"):
            options.optimized_model_filepath = os.path.join(str(self.folder), "optimized.onnx")
            # A protobuf file holds 2 GB at most.
            options.add_session_config_entry(
                "session.optimized_model_external_initializers_file_name", "tensors"
            )
        for key, value in request["entries"].items():
            options.add_session_config_entry(key, value)
        source = request["path"] if request.get("path") else _content(arrays[0])
        try:
            self.session = ort.InferenceSession(source, options, providers=["CPUExecutionProvider"])
        except BaseException:
            self.close()
            raise
        self.inputs = self.session.get_inputs()
        self.facts = {
            "inputs": [_described(value) for value in self.inputs],
            "outputs": [_described(value) for value in self.session.get_outputs()],
        }
        self.last: Any = None

    def run(self, arrays: Sequence[np.ndarray], request: dict[str, Any]) -> list[np.ndarray]:
        """Runs the file; the request lists the ``feeds`` that the arrays are of, and ``names`` of outputs."""
        self.last = (request["names"], dict(zip(request["feeds"], arrays)))
        return list(self.session.run(*self.last))

    def time(self) -> float:
        """Runs the file again on its inputs and returns the seconds."""
        start = self.clock()
        self.session.run(*self.last)
        return self.clock() - start

    def optimized(self) -> bytes:
        """Returns the file as onnxruntime optimized it, without its large tensors."""
        with open(os.path.join(str(self.folder), "optimized.onnx"), "rb") as file:
            return file.read()

    def profile(self) -> bytes:
        """Ends the profile and returns it."""
        with open(self.session.end_profiling(), "rb") as file:
            return file.read()

    def close(self) -> None:
        """Removes the files that onnxruntime wrote."""
        if self.folder is not None:
            shutil.rmtree(self.folder, ignore_errors=True)
            self.folder = None

    __del__ = close


class Openvino:
    """A file by ``path`` or content; ``config`` has its settings.

    With ``reshape``, its open sizes come from the first run, before which it is not compiled.
    """

    def __init__(self, request: dict[str, Any], arrays: Sequence[Any]) -> None:
        import openvino

        self.before, self.version = _kilobytes("VmRSS"), openvino.__version__
        self.core, self.config = openvino.Core(), request["config"]
        # On one thread the time of other programs does not count, as with the other runtimes.
        self.clock = _clock({"threads": int(self.config.get("INFERENCE_NUM_THREADS", 0))})
        self.model = self.core.read_model(request["path"] if request.get("path") else _content(arrays[0]))
        self.reshape = request.get("reshape", False)
        self.last: list[np.ndarray] = []
        self.request: Any = None if self.reshape else self._compile()
        self.facts: dict[str, Any] = {
            # Where the processor has it, floats are bfloat16 unless a setting says otherwise.
            "bfloat16": "BF16" in self.core.get_property("CPU", "OPTIMIZATION_CAPABILITIES"),
            "inputs": [
                {
                    "name": port.get_any_name(),
                    "names": sorted(port.names),
                    "shape": [d.get_length() if d.is_static else None for d in port.partial_shape],
                    "dtype": np.dtype(port.element_type.to_dtype()).str,
                }
                for port in self.ports
            ],
        }

    @property
    def ports(self) -> Any:
        """The inputs that a run takes: those that nothing reads are gone after the model was compiled."""
        return self.model.inputs if self.request is None else self.compiled.inputs

    def _compile(self) -> Any:
        self.compiled = self.core.compile_model(self.model, "CPU", self.config)
        return self.compiled.create_infer_request()

    def run(self, arrays: Sequence[np.ndarray], request: dict[str, Any]) -> list[np.ndarray]:
        """Runs the file on an array for each input in the order of its facts."""
        if self.request is None:
            names = [port.get_any_name() for port in self.ports]
            self.model.reshape({name: list(a.shape) for name, a in zip(names, arrays)})
            self.request = self._compile()
            arrays = [arrays[names.index(self._name(port, names))] for port in self.ports]
        self.last = list(arrays)
        results = self.request.infer(self.last)
        return [np.array(results[i]) for i in range(len(self.compiled.outputs))]

    def _name(self, port: Any, names: Sequence[str]) -> str:
        return next(name for name in names if name in port.names)

    def time(self) -> float:
        """Runs the file again on its inputs and returns the seconds."""
        start = self.clock()
        self.request.infer(self.last)
        return self.clock() - start


class Litert:
    """A TFLite file; ``fuse`` says whether its kernels are fused, ``threads`` how many run."""

    def __init__(self, request: dict[str, Any], arrays: Sequence[Any]) -> None:
        interpreter, self.version = _litert()
        self.before, self.clock = _kilobytes("VmRSS"), _clock(request)
        options: dict[str, Any] = {"model_content": _content(arrays[0])}
        options["num_threads"] = request.get("threads")
        # Older packages always fuse; an op whose result is an output ends a fusion there, too.
        plain = {} if request["fuse"] else {"experimental_disable_delegate_node_fusion": True}
        try:
            self.loaded = interpreter(**options, **plain)
        except TypeError:
            if not plain:
                raise
            self.loaded = interpreter(**options)
        self.loaded.allocate_tensors()
        ends = {"inputs": self.loaded.get_input_details(), "outputs": self.loaded.get_output_details()}
        self.facts = {end: [_litert_facts(detail) for detail in details] for end, details in ends.items()}

    def time(self) -> float:
        """Runs the file again on its inputs and returns the seconds."""
        start = self.clock()
        self.loaded.invoke()
        return self.clock() - start

    def run(self, arrays: Sequence[np.ndarray], request: dict[str, Any]) -> list[np.ndarray]:
        """Runs the file and returns its outputs."""
        details = self.loaded.get_input_details()
        for number, detail in enumerate(details):
            if tuple(detail["shape"]) != arrays[number].shape:
                self.loaded.resize_tensor_input(detail["index"], arrays[number].shape)
        self.loaded.allocate_tensors()
        for number, detail in enumerate(details):
            self.loaded.set_tensor(detail["index"], arrays[number])
        self.loaded.invoke()
        return [self.loaded.get_tensor(detail["index"]) for detail in self.loaded.get_output_details()]


def _litert() -> Any:
    """Returns the interpreter of the first package that has one, and the version."""
    try:
        from ai_edge_litert.interpreter import Interpreter

        return Interpreter, _version("ai_edge_litert", "ai-edge-litert")
    except ImportError as absent:
        try:
            from tflite_runtime.interpreter import Interpreter as Smaller

            return Smaller, _version("tflite_runtime", "tflite-runtime") + " (tflite-runtime)"
        except ImportError:
            try:
                import tensorflow
            except ImportError:
                raise absent from None
            return tensorflow.lite.Interpreter, f"{tensorflow.__version__} (tensorflow)"


def _litert_facts(detail: dict[str, Any]) -> dict[str, Any]:
    scale, zero = detail["quantization"]
    return {
        "name": detail["name"],
        "shape": [int(n) for n in detail["shape"]],
        "signature": [int(n) for n in detail["shape_signature"]],
        "dtype": np.dtype(detail["dtype"]).str,
        "quantization": [float(scale), int(zero)],
    }


class Ncnn:
    """An ncnn net: the paths ``param`` and ``bin``, and the names of its ``inputs`` and ``outputs``.

    ``light`` says whether blobs are freed as soon as they are read, as ncnn does by default, and ``options``
    has further ones of ncnn by name. ``indices`` names the inputs that it reads as integers. With ``yields``,
    idle threads sleep: else they spin, and each small layer waits for a turn of the processor on a busy
    machine. A run may name fewer ``outputs``.
    """

    def __init__(self, request: dict[str, Any], arrays: Sequence[Any]) -> None:
        if request.get("yields"):
            os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # read as ncnn is loaded
        import ncnn

        self.before, self.version = _kilobytes("VmRSS"), _version("ncnn", "ncnn")
        self.facts: dict[str, Any] = {}
        self.clock = _clock(request)
        self.request, self.package, self.net = request, ncnn, ncnn.Net()
        self.last: Sequence[np.ndarray] = ()
        options = self.net.opt
        options.lightmode = request.get("light", False)  # without it, all blobs stay readable
        if request.get("threads"):
            options.num_threads = request["threads"]
        if not request["optimize"]:
            for name in dir(options):
                if name.startswith(("use_fp16", "use_bf16", "use_winograd", "use_sgemm", "use_packing")):
                    setattr(options, name, False)
        for name, value in request.get("options", {}).items():
            setattr(options, name, value)
        if self.net.load_param(request["param"]) or self.net.load_model(request["bin"]):
            raise ValueError("its two files are incomplete or of two nets.")

    def run(self, arrays: Sequence[np.ndarray], request: dict[str, Any]) -> list[np.ndarray]:
        """Runs the net on each sample, and returns the values of each output for all samples."""
        self.last = arrays
        outputs = request.get("outputs", self.request["outputs"])
        samples = [self._run_sample([array[i] for array in arrays], outputs) for i in range(len(arrays[0]))]
        return [np.stack([sample[n] for sample in samples]) for n in range(len(outputs))]

    def time(self) -> float:
        """Runs the net again on its inputs and returns the seconds."""
        start = self.clock()
        self.run(self.last, {})
        return self.clock() - start

    def _run_sample(self, values: list[np.ndarray], outputs: list[str]) -> list[np.ndarray]:
        extractor = self.net.create_extractor()
        extractor.set_light_mode(self.request.get("light", False))
        names, indices = self.request["inputs"], self.request.get("indices", ())
        dtypes = [np.int32 if name in indices else np.float32 for name in names]
        arrays = [np.ascontiguousarray(value, dtype) for value, dtype in zip(values, dtypes)]
        for number, name in enumerate(names):
            # A copy has each channel at 16 bytes, as ncnn's layers read it, and no layer writes to the array.
            if extractor.input(name, self.package.Mat(arrays[number]).clone()):
                raise ValueError(f"the net lacks input {name!r}.")
        results = []
        for name in outputs:
            code, blob = extractor.extract(name)
            if code:
                raise ValueError(f"it cannot compute {name!r} (code {code}): check the shapes of the inputs.")
            results.append(np.array(blob))
        return results


def _clock(request: dict[str, Any]) -> Any:
    """Returns the clock for runs: of the processor's time where one thread computes.

    In it, the turns of other programs on a busy machine do not count.
    """
    return time.process_time if request.get("threads") == 1 else time.perf_counter


_RUNTIMES = {"litert": Litert, "ncnn": Ncnn, "onnxruntime": Onnxruntime, "openvino": Openvino}


def describe_machine() -> dict[str, Any]:
    """Returns the processor, its features that decide the speed of integers, and the number of its cores."""
    facts: dict[str, str] = {}
    try:
        with open(_CPU_INFO, encoding="utf-8", errors="replace") as lines:
            for name, _, value in (line.partition(":") for line in lines):
                facts.setdefault(name.strip(), value.strip())
    except OSError:
        pass
    flags = (facts.get("flags") or facts.get("Features") or "").split()
    return {
        "processor": facts.get("model name") or platform.processor() or platform.machine(),
        "flags": [flag for flag in _FLAGS if flag in flags],
        "cores": os.cpu_count(),
    }


def describe_side() -> dict[str, Any]:
    """Returns the versions and the machine of this process, to stand next to a runtime's version."""
    versions = {"python": platform.python_version(), "numpy": np.__version__}
    return {**versions, "system": f"{platform.system()} {platform.machine()}", **describe_machine()}


class _Answers:
    """Answers requests with the files that are loaded."""

    def __init__(self) -> None:
        self.files: list[Any] = []

    def answer(self, request: dict[str, Any], arrays: list[np.ndarray]) -> Any:
        """Returns the value and the arrays of an answer."""
        command = request["command"]
        if command == "open":
            file: Any = _RUNTIMES[request["runtime"]](request, arrays)
            self.files.append(file)
            return {"number": len(self.files) - 1, "version": file.version, **file.facts}, []
        if command == "store":
            os.makedirs(os.path.dirname(request["path"]), exist_ok=True)
            with open(request["path"], "ab") as stored:
                stored.write(arrays[0].tobytes())
            return os.path.abspath(request["path"]), []
        file = self.files[request["number"]]
        if command == "close":
            self.files[request["number"]] = None
            return None, []
        if command == "memory":
            return (_kilobytes("VmHWM") - file.before) * 1024, []
        if command == "time":
            return file.time(), []
        if command in ("optimized", "profile"):
            return None, [np.frombuffer(getattr(file, command)(), np.uint8)]
        return None, file.run(arrays, request)


def main() -> None:
    """Answers requests until stdin ends."""
    requests, answers = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what a runtime prints is no answer
    answers.write(json.dumps({MARK: describe_side()}).encode() + b"\n")
    answers.flush()
    answering = _Answers()
    for line in iter(requests.readline, b""):
        request = json.loads(line)
        arrays = [_read(requests, dtype, shape) for dtype, shape in request["arrays"]]
        results: list[np.ndarray] = []
        try:
            value, results = answering.answer(request, arrays)
            header: dict[str, Any] = {"value": value}
        except ImportError as error:
            header = {"refused": str(error), "missing": error.name or ""}
        except Exception as error:  # the caller cannot see it otherwise
            header = {"refused": _one_line(error)}
        results = [np.asarray(result, order="C") for result in results]
        header["arrays"] = [(result.dtype.str, result.shape) for result in results]
        answers.write(json.dumps(header).encode() + b"\n")
        for result in results:
            answers.write(result.tobytes())
        answers.flush()


def _content(value: Any) -> bytes:
    """Returns the content of a file that came as bytes or as an array of them."""
    return value if isinstance(value, bytes) else value.tobytes()


def _read(stream: IO[bytes], dtype: str, shape: Sequence[int]) -> np.ndarray:
    kind = np.dtype(dtype)
    count = kind.itemsize * int(np.prod(shape, dtype=np.int64))
    return np.frombuffer(stream.read(count), kind).reshape(shape)


def _version(module: str, distribution: str) -> str:
    """Returns the version of a package whose module may not tell it."""
    own = getattr(sys.modules.get(module), "__version__", "")
    if own:
        return str(own)
    from importlib import metadata

    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return "of unknown version"


def _kilobytes(name: str) -> int:
    """Returns a line of this process's status, the memory in use or its peak; 0 if the system lacks it."""
    try:
        with open("/proc/self/status", encoding="ascii", errors="replace") as status:
            return int(re.findall(rf"^{name}:\s*(\d+) kB", status.read(), re.MULTILINE)[0])
    except (OSError, IndexError):
        return 0


def _one_line(error: BaseException) -> str:
    """Returns a runtime's message in one line, and another error's with its type.

    All of its lines count: OpenVINO has the reason in the last one.
    """
    line = " ".join(str(error).split())[:600] or type(error).__name__
    kind = type(error)
    own = kind.__module__.startswith("onnxruntime") or isinstance(error, (RuntimeError, ValueError))
    return line if own else f"{kind.__name__}: {line}"


if __name__ == "__main__":
    main()
