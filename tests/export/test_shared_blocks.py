"""Blocks that are called twice, at two sizes: every file holds the shapes of each call, or is refused."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import megengine as mge
import megengine.functional as F
import megengine.module as M
import pytest

import qtrace
from qtrace.errors import ExportError
from qtrace.graph.types import TracedModule
from tests.nets import images, net, randomize

Tensor = mge.Tensor
# Form of the file -> the recipe of its target and the name of the file.
FORMS = {
    "onnx": ("backend/onnxruntime", "m.onnx"),
    "tflite": ("backend/tflite", "m.tflite"),
    "ncnn": ("backend/ncnn", "m.param"),
    "megengine": ("backend/megengine", "m.mge"),
}


def _squeeze(x: Tensor) -> Tensor:
    return F.mean(x, axis=(2, 3), keepdims=True)


def _tokens(x: Tensor) -> Tensor:
    return F.transpose(F.flatten(x, 2), (0, 2, 1))


def _attend(self: Any, x: Tensor) -> Tensor:
    tokens = self.proj(_tokens(x))
    scores = F.softmax(F.matmul(tokens, tokens, transpose_b=True) * 0.25, axis=-1)
    mixed = F.transpose(F.matmul(scores, tokens), (0, 2, 1))
    return F.reshape(mixed, x.shape)


def _shuffle(self: Any, x: Tensor) -> Tensor:
    left, right = F.split(x, 2, axis=1)
    x = F.concat([self.conv(left), right], axis=1)
    n, c, h, w = x.shape
    x = F.transpose(F.reshape(x, (n, 2, c // 2, h, w)), (0, 2, 1, 3, 4))
    return F.reshape(x, (n, c, h, w))


def _focus(self: Any, x: Tensor) -> Tensor:
    corners = [x[:, :, i::2, j::2] for j in (0, 1) for i in (0, 1)]
    return self.conv(F.concat(corners, axis=1))


def _normalized(x: Tensor) -> Tensor:
    centered = x - F.mean(x, axis=1, keepdims=True)
    return centered / F.sqrt(F.mean(centered * centered, axis=1, keepdims=True) + 1e-3)


def _conv(inside: int = 4, outside: int = 4, kernel: int = 3) -> M.Module:
    return M.Conv2d(inside, outside, kernel, padding=kernel // 2)


def _inner() -> M.Module:
    return net(lambda self, x: F.vision.interpolate(self.conv(x), scale_factor=2), conv=_conv())


def _outer() -> M.Module:
    inner = _inner()
    return net(
        lambda self, x: F.avg_pool2d(self.inner(self.inner(x)), 4) + x,
        inner=inner,
    )


# Name -> builds the block that is called at 8x8 and at 4x4; it has 4 channels.
BLOCKS: dict[str, Callable[[], M.Module]] = {
    "conv": lambda: net(lambda self, x: F.relu(self.conv(x)), conv=_conv()),
    "linear": lambda: net(lambda self, x: self.fc(_tokens(x)), fc=M.Linear(4, 6)),
    "upsample by factor": lambda: net(lambda self, x: F.vision.interpolate(x, scale_factor=2)),
    "upsample bilinear": lambda: net(
        lambda self, x: F.vision.interpolate(x, scale_factor=2, mode="bilinear", align_corners=False)
    ),
    "upsample to a size": lambda: net(
        lambda self, x: x + F.vision.interpolate(self.conv(F.max_pool2d(x, 2)), size=x.shape[2:]),
        conv=_conv(),
    ),
    "reshape": lambda: net(
        lambda self, x: self.fc(F.transpose(F.reshape(x, (x.shape[0], 4, -1)), (0, 2, 1))), fc=M.Linear(4, 3)
    ),
    "reshape and back": lambda: net(
        lambda self, x: F.reshape(F.relu(F.reshape(self.conv(x), (x.shape[0], -1))), x.shape), conv=_conv()
    ),
    "flatten": lambda: net(lambda self, x: F.flatten(self.conv(x), 1), conv=_conv()),
    "pooling of the whole": lambda: net(
        lambda self, x: self.conv(F.avg_pool2d(x, (x.shape[2], x.shape[3]))), conv=_conv(kernel=1)
    ),
    "max pooling": lambda: net(lambda self, x: self.conv(F.max_pool2d(x, 3, 2, 1)), conv=_conv()),
    "adaptive pooling": lambda: net(lambda self, x: self.conv(F.adaptive_avg_pool2d(x, 2)), conv=_conv()),
    "concat": lambda: net(lambda self, x: F.concat([self.conv(x), x], axis=1), conv=_conv()),
    "silu": lambda: net(lambda self, x: F.silu(self.conv(x)), conv=_conv()),
    "hswish": lambda: net(lambda self, x: F.hswish(self.conv(x)), conv=_conv()),
    "squeeze and excite": lambda: net(
        lambda self, x: x * F.sigmoid(self.b(F.relu(self.a(_squeeze(x))))),
        a=_conv(4, 2, 1),
        b=_conv(2, 4, 1),
    ),
    "batch norm": lambda: net(
        lambda self, x: F.relu(self.bn(self.conv(x))), conv=_conv(), bn=M.BatchNorm2d(4)
    ),
    "layer norm": lambda: net(
        lambda self, x: self.fc(self.norm(_tokens(x))), fc=M.Linear(4, 4), norm=M.LayerNorm(4)
    ),
    "norm by parts": lambda: net(lambda self, x: self.conv(_normalized(x)), conv=_conv()),
    "attention": lambda: net(_attend, proj=M.Linear(4, 4)),
    "transposed conv": lambda: net(lambda self, x: self.up(x), up=M.ConvTranspose2d(4, 4, 2, stride=2)),
    "pixel shuffle": lambda: net(lambda self, x: F.pixel_shuffle(self.conv(x), 2), conv=_conv(4, 16)),
    "pad": lambda: net(
        lambda self, x: self.conv(F.nn.pad(x, ((0, 0), (0, 0), (1, 2), (1, 2)))), conv=_conv()
    ),
    "focus": lambda: net(_focus, conv=_conv(16, 4)),
    "split and shuffle": lambda: net(_shuffle, conv=_conv(2, 2)),
    "broadcast_to": lambda: net(
        lambda self, x: self.conv(x) + F.broadcast_to(self.conv(_squeeze(x)), x.shape), conv=_conv()
    ),
    "mean": lambda: net(lambda self, x: self.fc(F.mean(x, axis=(2, 3))), fc=M.Linear(4, 3)),
    "repeat": lambda: net(
        lambda self, x: self.conv(F.repeat(F.repeat(x, 2, axis=2), 2, axis=3)), conv=_conv()
    ),
    "block in a block": _outer,
    "masked": lambda: net(lambda self, x: self.conv(F.where(x > 0, x, x * 0.5)), conv=_conv()),
}
# Forms without an op for what a block computes, however often the block is called.
MAY_BE_REFUSED = {
    *((name, "ncnn") for name in ("layer norm", "attention", "focus", "split and shuffle", "broadcast_to")),
    *((name, "ncnn") for name in ("repeat", "masked")),
    *(("pooling of the whole", form) for form in ("onnx", "tflite", "ncnn")),
}
QUICK = {"upsample by factor", "reshape and back", "flatten", "block in a block"}


def _twice(block: M.Module) -> M.Module:
    """Calls ``block`` on 8x8 and on 4x4 values."""

    def forward(self: Any, x: Tensor) -> tuple[Tensor, Tensor]:
        x = F.relu(self.stem(x))
        return self.block(x), self.block(F.max_pool2d(x, 2))

    return net(forward, stem=M.Conv2d(3, 4, 3, padding=1), block=block)


def _converted(model: M.Module, recipe: str, batch: int = 2) -> TracedModule:
    prepared = qtrace.prepare(qtrace.trace(model, images(batch, 3, 8, 8), check=False), recipe)
    batches = [images(batch, 3, 8, 8, seed=s) for s in range(2)]
    return qtrace.convert(qtrace.calibrate(prepared, batches, progress=False))


def _check_file(model: M.Module, form: str, folder: Path, refusable: bool = False) -> None:
    """Exports ``model`` and compares the file with the graph in its runtime."""
    recipe, file = FORMS[form]
    converted = _converted(model, recipe)
    refusal = ""
    try:
        path = qtrace.export(converted, folder / file, format=form)
    except ExportError as error:
        if not refusable:
            raise
        refusal = str(error)
    if refusal:
        assert refusal.startswith("block")
        assert not list(folder.iterdir())
        return
    report = qtrace.verify(path, converted, [images(2, 3, 8, 8, seed=9)], min_sqnr_db=20)
    assert report.worst_lsb() <= 1, report.table()
    assert report.passed, report.table()


def _marks(name: str, form: str) -> Any:
    """MegEngine traces the calls of its own dump: the quick blocks show that."""
    if name in QUICK:
        return ()
    return pytest.mark.long if form == "megengine" else pytest.mark.slow


@pytest.mark.quick(2)
@pytest.mark.parametrize(
    ("name", "form"), [pytest.param(n, f, marks=_marks(n, f)) for n in BLOCKS for f in FORMS]
)
def test_a_block_at_two_sizes(name: str, form: str, tmp_path: Path) -> None:
    model = _twice(randomize(BLOCKS[name]()))
    _check_file(model, form, tmp_path, (name, form) in MAY_BE_REFUSED)


@pytest.mark.quick(2)
@pytest.mark.parametrize("form", FORMS)
def test_a_block_that_is_given_a_size(form: str, tmp_path: Path) -> None:
    """Calls a block twice with tensors of one shape and different numbers."""
    block = net(lambda self, x, size: F.vision.interpolate(self.conv(x), size=size), conv=_conv())

    def forward(self: Any, x: Tensor) -> tuple[Tensor, Tensor]:
        x = F.relu(self.stem(x))
        small, large = F.max_pool2d(x, 2), F.vision.interpolate(x, scale_factor=2)
        return self.block(small, x.shape[2:]), self.block(small, large.shape[2:]) + large

    _check_file(net(forward, stem=M.Conv2d(3, 4, 3, padding=1), block=block), form, tmp_path)


@pytest.mark.quick(1)
@pytest.mark.parametrize("form", ["onnx", "tflite", "ncnn"])
def test_a_size_that_depends_on_values_is_refused(form: str, tmp_path: Path) -> None:
    def best(self: Any, x: Tensor) -> Tensor:
        scores = F.flatten(self.conv(x))
        return F.cond_take(scores > 0, scores)[0]

    recipe, file = FORMS[form]
    model = _twice(net(best, conv=_conv()))
    prepared = qtrace.prepare(qtrace.trace(model, images(2, 3, 8, 8), check=False), recipe)
    converted = qtrace.convert(qtrace.calibrate(prepared, [images(2, 3, 8, 8)], progress=False))
    sizes = "block_cond_take_out_2: its shape is not known, because 'block' is called with several sizes"
    with pytest.raises(ExportError, match=sizes):
        qtrace.export(converted, tmp_path / file, format=form)
    assert not list(tmp_path.iterdir())
