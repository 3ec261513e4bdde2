"""Every refusal of an export names the op, the line of the user's code, and what to do."""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import megengine as mge
import megengine.functional as F
import megengine.module as M
import numpy as np
import pytest

import qtrace
import qtrace.export
from qtrace import QConfig
from qtrace.errors import ExportError
from qtrace.graph.types import TracedModule
from tests.nets import images, net

IMAGES = images(2, 3, 8, 8)
HERE = "test_refusals.py"


def _converted(forward: Callable[[Any, mge.Tensor], mge.Tensor], config: Any) -> TracedModule:
    module = net(forward, conv=M.Conv2d(3, 4, 3, padding=1), table=mge.Parameter(np.ones((4, 3, 1, 1), "f")))
    prepared = qtrace.prepare(qtrace.trace(module, IMAGES, check=False), config)
    return qtrace.convert(qtrace.calibrate(prepared, [IMAGES], progress=False))


def _inverse(self: Any, x: mge.Tensor) -> mge.Tensor:
    return F.matinv(self.conv(x))


def _values(self: Any, x: mge.Tensor) -> mge.Tensor:
    return F.svd(self.conv(x))[1]


def _bordered(self: Any, x: mge.Tensor) -> mge.Tensor:
    return F.nn.pad(self.conv(x), ((0, 0), (0, 0), (1, 1), (1, 1)), mode="replicate")


def _sine(self: Any, x: mge.Tensor) -> mge.Tensor:
    return F.sin(self.conv(x))


def _written_by_positions(self: Any, x: mge.Tensor) -> mge.Tensor:
    y = self.conv(x)
    places = F.argmax(y[0, 0], axis=1)
    y[:, :, places] = 0.0
    return y


def _computed_weight(self: Any, x: mge.Tensor) -> mge.Tensor:
    return F.conv2d(x, self.table * F.mean(x))


def _line(forward: Callable[..., Any], part: str) -> int:
    code = forward.__code__
    lines = Path(code.co_filename).read_text().splitlines()
    return next(n for n in range(code.co_firstlineno, len(lines)) if part in lines[n - 1])


# suffix, config, forward, begin of the message, source text of the line that the message names
REFUSED: dict[str, tuple[str, Any, Callable[..., Any], str, str]] = {
    "onnx": ("onnx", "backend/onnxruntime", _values, "svd_out", "F.svd"),
    "openvino": ("onnx", "backend/openvino", _inverse, "matinv_out: ", "F.matinv"),
    "generic": ("onnx", QConfig(backend="generic"), _inverse, "matinv_out: ", "F.matinv"),
    "tensorrt": ("onnx", "backend/tensorrt", _inverse, "matinv_out: ", "F.matinv"),
    "onnx, an index": ("onnx", "backend/onnxruntime", _written_by_positions, "setitem_out: ", "= 0.0"),
    "tflite": ("tflite", "backend/tflite", _bordered, "pad_out: ", "F.nn.pad"),
    "tflite, an index": ("tflite", "backend/tflite", _written_by_positions, "setitem_out: ", "= 0.0"),
    "ncnn": ("param", "backend/ncnn", _inverse, "matinv_out: ", "F.matinv"),
    "ncnn, a site": ("param", QConfig(backend="onnxruntime"), _sine, "", "self.conv"),
    "caffe": ("prototxt", "backend/tensorrt", _sine, "sin_out: F.sin cannot become Caffe: ", "F.sin"),
}


@pytest.mark.quick(2)
@pytest.mark.parametrize("case", REFUSED)
def test_a_refusal_names_op_line_and_remedy(case: str, tmp_path: Path) -> None:
    suffix, config, forward, begin, part = REFUSED[case]
    converted = _converted(forward, config)
    with pytest.raises(ExportError) as caught:
        qtrace.export(converted, tmp_path / f"m.{suffix}")
    message = str(caught.value)
    assert message.startswith(begin)
    assert re.search(rf"{re.escape(HERE)}:{_line(forward, part)}\)\.$", message), message
    assert ": " in message.removeprefix(begin) or begin.count(": ") > 1, message
    assert not list(tmp_path.iterdir())


def _scaled_by_means(self: Any, x: mge.Tensor) -> mge.Tensor:
    y = F.relu(self.conv(x))
    scale = F.mean(y, (2, 3), keepdims=True)
    return F.batch_norm(y, self.mean, self.var, scale, self.zero, training=False)


@pytest.mark.parametrize(("suffix", "backend"), [("param", "ncnn"), ("prototxt", "tensorrt")])
def test_a_batch_norm_with_a_computed_weight_is_refused(tmp_path: Path, suffix: str, backend: str) -> None:
    vector = np.ones((1, 4, 1, 1), np.float32)
    module = net(
        _scaled_by_means,
        conv=M.Conv2d(3, 4, 3),
        mean=mge.Tensor(vector),
        var=mge.Tensor(vector),
        zero=mge.Parameter(vector * 0),
    )
    prepared = qtrace.prepare(qtrace.trace(module, IMAGES[:1], check=False), f"backend/{backend}")
    converted = qtrace.convert(qtrace.calibrate(prepared, [IMAGES[:1]], progress=False))
    with pytest.raises(ExportError, match="batch_norm_out: its weight is computed"):
        qtrace.export(converted, tmp_path / f"m.{suffix}")
    assert not list(tmp_path.iterdir())


def test_the_line_is_known_after_a_file(tmp_path: Path) -> None:
    converted = _converted(_values, "backend/onnxruntime")
    qtrace.save(converted, tmp_path / "m.mge")
    with pytest.raises(ExportError, match=rf"{HERE}:{_line(_values, 'F.svd')}"):
        qtrace.export(qtrace.load(tmp_path / "m.mge"), tmp_path / "m.onnx")


# -- all sentences at once -----------------------------------------------------------------------------

_WHOLE = ("LocatedError", "refusal")  # they pass on a sentence that was raised elsewhere


def _text(node: ast.expr) -> str:
    if isinstance(node, ast.Constant):
        return str(node.value)
    if isinstance(node, ast.JoinedStr):
        return "".join(_text(v) for v in node.values)
    if isinstance(node, ast.BinOp):
        return _text(node.left) + _text(node.right)
    return "{}"


def _sentences() -> Iterator[tuple[str, str]]:
    """Yields the location of each export error in the source, and its text with {} for values."""
    package = Path(qtrace.__file__).parent
    writers = [p for p in (package / "targets").rglob("*.py") if p.stem not in ("runtime", "runner")]
    for path in sorted([*(package / "export").rglob("*.py"), *writers]):
        for node in ast.walk(ast.parse(path.read_text())):
            name = getattr(getattr(node, "func", None), "id", "")
            if isinstance(node, ast.Call) and name == "ExportError":
                yield f"{path}:{node.lineno}", _text(node.args[0])


def test_every_sentence_says_what_to_do() -> None:
    sentences = dict(_sentences())
    assert len(sentences) > 120
    bare = re.compile(r"^((site |input |output )?\{\}: )?(?P<rest>.*)$", re.DOTALL)
    without = {
        location: text
        for location, text in sentences.items()
        if text.strip("{}. :")
        and text not in ("site {}: {}.",)
        and not re.search(r": [^{]|\. [A-Z]|: \{\}", bare.match(text)["rest"])  # type: ignore[index]
    }
    assert without == {}
