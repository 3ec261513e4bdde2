"""Messages for names of files in the place of ``pkg.mod:factory``, and the inputs and outputs of a model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from qtrace.cli.console import Console

__all__ = [
    "CONVERTED",
    "MODEL_FILES",
    "PREPARED",
    "check_exported",
    "check_factory",
    "check_model",
    "note_ends",
]

PREPARED, CONVERTED = "prepared.mge", "quantized.mge"
MODEL_FILES = (PREPARED, CONVERTED)
"""The models in an output folder of `qtrace calibrate` and `qtrace finetune`."""

_FORMATS = {
    ".tflite": "a TFLite file",
    ".param": "an ncnn net",
    ".caffemodel": "a Caffe file",
    ".prototxt": "a Caffe file",
    ".pt": "a PyTorch file",
    ".pth": "a PyTorch file",
}
_WEIGHTS = (".pkl", ".pickle", ".npz", ".tar", ".ckpt")


def check_factory(name: str) -> None:
    """Raises UsageError when ``name`` names a file, or is not of the form ``pkg.mod:factory``."""
    from qtrace.data import is_object_name

    problem = _python_file(name) or _model_file(name)
    if not problem and not is_object_name(name):
        problem = f"{name!r} is not of the form pkg.mod:factory, such as models:resnet18."
    if problem:
        raise click.UsageError(problem)


def check_exported(path: Path) -> None:
    """Raises UsageError when ``path`` is a folder of `qtrace calibrate`, or one of its models."""
    models = [path / name for name in (CONVERTED, PREPARED) if (path / name).exists()]
    if not models and path.name in MODEL_FILES:
        models = [path]
    if models:
        what = "model" if models[0] == path else "folder with models"
        raise click.UsageError(
            f"{path} is a {what} of qtrace, and this command "
            f"takes an exported file: write one by `qtrace export {models[0]} -o model.onnx`, and give that."
        )


def check_model(name: str) -> None:
    """Raises UsageError when ``name`` names a Python file in place of ``pkg.mod:factory``."""
    problem = _python_file(name)
    if problem:
        raise click.UsageError(problem)


def _python_file(name: str) -> str:
    """Explains what to write in place of ``file.py:factory``; "" for other names."""
    file, _, factory = name.partition(":")
    if not file.endswith(".py") or "\0" in file or (factory and Path(name).exists()):
        return ""
    folder, module = str(Path(file).parent), Path(file).stem
    import_path = "" if folder == "." else f", from within the folder {folder} or with it in PYTHONPATH"
    return f"{name} names a Python file: name its module, {module}:{factory or 'FACTORY'}{import_path}."


def _model_file(name: str) -> str:
    """Explains what to write in place of the file of a model; "" for other names."""
    path = Path(name)
    if ":" in name or "\0" in name:
        return ""
    suffix = path.suffix.lower()
    code = "write a function that builds the Module, and name it as pkg.mod:function"
    if suffix == ".mge":
        return f"{name} is a file that was traced already: go on with `qtrace calibrate {name}`."
    if suffix == ".onnx":
        return f"{name} is an ONNX file: `qtrace import {name} -o float.mge` makes a traced model of it."
    if suffix in _FORMATS:
        return f"{name} is {_FORMATS[suffix]}, and a MegEngine Module is traced: {code}."
    if suffix in _WEIGHTS:
        return f"{name} holds weights or pickled objects: {code}; it may load the file with megengine.load."
    if path.is_file():
        return f"{name} is a file, and a MegEngine Module is traced: {code}."
    return ""


def note_ends(model: Any, path: Path, console: Console) -> dict[str, list[dict[str, Any]]]:
    """Notes name, type and shape of each input and output.

    Args:
        model: a traced module, of any stage.
        path: the file that was written; the names and types of an ONNX file are read from it.
        console: prints the note.

    Returns:
        The inputs and outputs as plain data; a free axis is the text that names it.
    """
    ends = _of_onnx(path) if path.suffix.lower() == ".onnx" else _of_graph(model)
    for kind, tensors in ends.items():
        shown = ", ".join(f"{t['name']} {t['dtype']} {'x'.join(map(str, t['shape']))}" for t in tensors)
        console.note(f"{kind}: {shown}")
    return ends


def _of_onnx(path: Path) -> dict[str, list[dict[str, Any]]]:
    import onnx

    from qtrace.onnxfile.external_data import read_model

    graph = read_model(path).graph
    ends: dict[str, list[dict[str, Any]]] = {}
    for kind, infos in (("inputs", graph.input), ("outputs", graph.output)):
        ends[kind] = [
            {
                "name": info.name,
                "dtype": onnx.helper.tensor_dtype_to_np_dtype(info.type.tensor_type.elem_type).name,
                "shape": [d.dim_param or d.dim_value for d in info.type.tensor_type.shape.dim],
            }
            for info in infos
        ]
    return ends


def _of_graph(model: Any) -> dict[str, list[dict[str, Any]]]:
    import numpy as np

    from qtrace.graph.types import TensorNode

    graph = model.graph
    return {
        kind: [
            {"name": n.name, "dtype": np.dtype(n.dtype).name, "shape": list(n.shape or ())}
            for n in nodes
            if isinstance(n, TensorNode)
        ]
        for kind, nodes in (("inputs", graph.inputs[1:]), ("outputs", graph.outputs))
    }
