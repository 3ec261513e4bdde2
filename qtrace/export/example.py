"""A short script that runs an exported file, for the people who deploy it."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from qtrace.errors import ExportError
from qtrace.storage.outputs import WRITTEN

_HEAD = '''"""Runs {file} on {source}: python {script}{arguments}"""
# {written}.

import sys

{imports}

'''

_IMAGE = """image = cv2.imread(sys.argv[1], {flag})
image = cv2.resize(image, ({width}, {height})).reshape({height}, {width}, {channels}){order}
"""

_NORMALIZED = """x = (image.astype(np.float32) * {scale} - np.float32({mean})) / np.float32({std})
x = np.ascontiguousarray(x.transpose(2, 0, 1)[None])
"""

_PIXELS = "x = np.ascontiguousarray(image[None])  # the file normalizes pixels itself\n"

_RUNS = {
    ".onnx": """session = onnxruntime.InferenceSession("{file}")
outputs = session.run(None, {{{feeds}}})
for info, value in zip(session.get_outputs(), outputs):
    place = np.unravel_index(value.argmax(), value.shape) if value.size else "nowhere"
    print(info.name, value.dtype, value.shape, "largest at", place)
""",
    ".tflite": """interpreter = Interpreter("{file}")
interpreter.allocate_tensors()
for detail, value in zip(interpreter.get_input_details(), [{values}]):
    if list(detail["shape"]) != list(value.shape):  # channels last
        value = value.transpose(0, 2, 3, 1)
    interpreter.set_tensor(detail["index"], value)
interpreter.invoke()
for detail in interpreter.get_output_details():
    value = interpreter.get_tensor(detail["index"])
    place = np.unravel_index(value.argmax(), value.shape) if value.size else "nowhere"
    print(detail["name"], value.dtype, value.shape, "largest at", place)
""",
}
SUFFIXES = tuple(_RUNS)
"""The suffixes of files that have an example."""

_IMPORTS = {".onnx": "import onnxruntime", ".tflite": "from ai_edge_litert.interpreter import Interpreter"}


def example_path(file: Path) -> Path:
    """Returns the path of the script that runs an exported file, next to the file."""
    return file.with_name(f"{file.stem}_example.py")


def write_example(
    file: Path,
    inputs: Sequence[tuple[str, str, Sequence[int]]],
    preprocess: Any = None,
    embedded: bool = False,
) -> tuple[Path, str]:
    """Writes the text of a script that runs an exported file once.

    With preprocessing and one input, the script reads an image, else arrays from .npy files.

    Args:
        file: the exported file.
        inputs: name, numpy type and shape of each input of the file.
        preprocess: the `Preprocess` of the recipe; None if there is none.
        embedded: whether the file normalizes pixels itself.

    Returns:
        The path of the script next to the file, and its text.

    Raises:
        ExportError: for a file of another format than ONNX and TFLite.
    """
    if file.suffix not in SUFFIXES:
        raise ExportError(f"{file.name}: examples are written for .onnx and .tflite files. Leave it out.")
    script = example_path(file)
    image = preprocess is not None and len(inputs) == 1 and (embedded or len(inputs[0][2]) == 4)
    imports = ["import cv2"] if image else []
    imports += ["import numpy as np", _IMPORTS[file.suffix]]
    head = _HEAD.format(
        file=file.name,
        source="an image" if image else "arrays",
        script=script.name,
        written=WRITTEN,
        arguments=" image.png" if image else "".join(f" {name}.npy" for name, *_ in inputs),
        imports="\n".join(imports),
    )
    values = ["x"] if image else [f"np.load(sys.argv[{number}])" for number in range(1, len(inputs) + 1)]
    body = _reading(preprocess, embedded) if image else ""
    feeds = ", ".join(
        f"{json.dumps(name)}: {value}" for (name, *_), value in zip(inputs, values, strict=True)
    )
    run = _RUNS[file.suffix].format(file=file.name, feeds=feeds, values=", ".join(values))
    return script, head + body + run


def _reading(preprocess: Any, embedded: bool) -> str:
    """Returns the lines that read an image as the recipe does, stretched to its size."""
    channels, height, width = preprocess.size
    flag = "cv2.IMREAD_COLOR" if channels == 3 else "cv2.IMREAD_GRAYSCALE"
    order = "[..., ::-1]  # red first" if preprocess.channels == "rgb" else ""
    facts: Mapping[str, Any] = {"flag": flag, "height": height, "width": width, "channels": channels}
    text = _IMAGE.format(**facts, order=order)
    if preprocess.resize != "stretch":
        text = f"# The recipe resizes by {preprocess.resize}; this example stretches.\n" + text
    if embedded:
        return text + _PIXELS
    numbers = {"scale": preprocess.scale, "mean": list(preprocess.mean), "std": list(preprocess.std)}
    return text + _NORMALIZED.format(**numbers)
