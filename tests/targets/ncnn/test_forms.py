"""ncnn's layers for sequences and norms, products of activations, parts of tensors, and batches anywhere."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import megengine as mge
import megengine.functional as F
import megengine.module as M
import numpy as np
import pytest

import qtrace
from qtrace.errors import ExportError
from qtrace.graph import functions
from qtrace.runtimes.worker import Ncnn
from tests.each import each_of
from tests.nets import net, randomize

RECIPE = "backend/ncnn"
IMAGE = (3, 4, 6, 8)
TOKENS = (3, 10, 16)


def _input(shape: tuple[int, ...], seed: int) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def _verified(module: M.Module, shape: tuple[int, ...], folder: Path) -> Path:
    """Exports a module, and verifies the file on batches of three and of five samples."""
    batches = [_input(shape, seed) for seed in range(2)]
    prepared = qtrace.prepare(qtrace.trace(module, batches[0], check=False), RECIPE)
    converted = qtrace.convert(qtrace.calibrate(prepared, batches, progress=False))
    path = qtrace.export(converted, folder / "m.param")
    report = qtrace.verify(path, converted, [batches[0], _input((5, *shape[1:]), 9)], min_sqnr_db=60)
    assert report.passed, report.table()
    assert report.sqnr_db() > 60
    assert report.worst_lsb() <= 1
    return path


def _after(function: Callable[..., Any], **parts: Any) -> M.Module:
    """A convolution of 8 bits, then ``function``."""
    return randomize(net(lambda self, x: function(self.conv(x), self), conv=M.Conv2d(4, 6, 1), **parts), 0)


def _between(function: Callable[..., Any], **parts: Any) -> M.Module:
    """``function`` between two linear layers of 8 bits."""
    layers = {"a": M.Linear(16, 16), "b": M.Linear(16, 16)}
    return randomize(net(lambda self, x: self.b(function(self.a(x), self)), **layers, **parts), 0)


def _write(y: Any) -> Any:
    z = y * 1.0
    z[:, 1:4, :, 2:5] = y[:, :3, :, 5:] * 2.0
    z[..., -1:] = 0.5
    z[:, :2] = F.mean(y, 1, keepdims=True)
    return z


def _pattern(*order: int) -> Callable[..., Any]:
    return lambda y, self: F.transpose(y, order) * 1.5


TABLE = np.arange(96, dtype=np.float32).reshape(6, 16) / 50

IMAGES: dict[str, M.Module] = {
    "group_norm": _after(lambda y, self: self.norm(y), norm=M.GroupNorm(3, 6)),
    "group_norm_bare": _after(lambda y, self: self.norm(y), norm=M.GroupNorm(2, 6, affine=False)),
    "instance_norm": _after(lambda y, self: self.norm(y), norm=M.InstanceNorm(6)),
    "layer_norm_image": _after(lambda y, self: self.norm(y), norm=M.LayerNorm((6, 6, 8))),
    "layer_norm_two": _after(lambda y, self: self.norm(y), norm=M.LayerNorm((6, 8))),
    "normalize": _after(lambda y, self: F.normalize(y, axis=1)),
    "norm": _after(lambda y, self: F.norm(y, ord=1, axis=2, keepdims=False)),
    "max_min": _after(lambda y, self: F.max(y, 2) - F.min(y, 2)),
    "powers": _after(lambda y, self: y**2 + (0.3 * y) ** 3.0 - (y * y + 0.5) ** -2.0 + F.relu(y) ** 1.5),
    "prod": _after(lambda y, self: F.prod(y, 3, keepdims=True)),
    "slices": _after(lambda y, self: y[:, 1:5, 2:, :-1]),
    "number": _after(lambda y, self: y[:, 2] * y[..., -1:, :][:, 0]),
    "steps": _after(lambda y, self: F.concat([y[:, ::2, ::2, 1::2], y[:, 1::2, 1::2, ::2]], 1)),
    "steps_odd": _after(lambda y, self: y[:, ::4, 1::3, ::5]),
    "steps_back": _after(lambda y, self: y[:, ::-1]),
    "positions": _after(lambda y, self: y[:, [4, 5, 0, 2]]),
    "new_axis": _after(lambda y, self: y[:, None, :, 0] + 1.0),
    "rolled": _after(lambda y, self: F.roll(y, (2, -3), (2, 3))),
    "stacked": _after(lambda y, self: F.stack([y, y * 2.0], axis=2)),
    "stacked_last": _after(lambda y, self: F.stack([y[:, 0], y[:, 1]], axis=-1)),
    "tiled": _after(lambda y, self: F.tile(y, (1, 2, 1, 3))),
    "repeated": _after(lambda y, self: F.repeat(y, 3, axis=2)),
    "broadcast": _after(lambda y, self: F.broadcast_to(F.mean(y, (2, 3), keepdims=True), y.shape) + y),
    "shuffled": _after(
        lambda y, self: F.transpose(y.reshape(-1, 2, 3, 6, 8), (0, 2, 1, 3, 4)).reshape(y.shape)
    ),
    "six_axes": _after(
        lambda y, self: F.transpose(y.reshape(-1, 6, 2, 3, 2, 4), (0, 2, 4, 3, 5, 1)).reshape(-1, 4, 72)
    ),
    "windows": _after(
        lambda y, self: F.softmax(
            F.transpose(y.reshape(-1, 6, 2, 3, 2, 4), (0, 2, 4, 3, 5, 1)).reshape(-1, 12, 6), axis=-1
        )
    ),
    "padded_channels": _after(lambda y, self: F.nn.pad(y, ((0, 0), (1, 2), (0, 0), (0, 3)))),
    "split_odd": _after(lambda y, self: F.concat(F.split(y, [1, 4], axis=3)[::-1], 3)),
    "merged_batch": _after(lambda y, self: F.exp(y.reshape(-1, 6, 8)).reshape(-1, 6, 6, 8) + y),
    "weights_standardized": net(
        lambda self, x: F.conv2d(x, self.w - F.mean(self.w, (1, 2, 3), keepdims=True)),
        w=mge.Parameter(_input((5, 4, 3, 3), 1)),
    ),
    "pattern_0": _after(_pattern(0, 3, 2, 1)),
    "pattern_1": _after(_pattern(0, 2, 3, 1)),
    "pattern_2": _after(_pattern(0, 3, 1, 2)),
    "five_axes": _after(
        lambda y, self: F.transpose(y.reshape(-1, 2, 3, 2, 3, 8), (0, 5, 3, 1, 4, 2)).reshape(-1, 96, 3)
    ),
    "written": _after(lambda y, self: _write(y)),
}

SEQUENCES: dict[str, M.Module] = {
    "layer_norm": _between(lambda y, self: self.norm(y), norm=M.LayerNorm(16)),
    "layer_norm_bare": _between(lambda y, self: self.norm(y), norm=M.LayerNorm(16, affine=False)),
    "rms_norm": _between(
        lambda y, self: functions.rms_norm(y, self.gain, -1, 1e-5), gain=mge.Parameter(TABLE[1] + 1)
    ),
    "conv1d": _between(lambda y, self: F.relu(self.c(y)), c=M.Conv1d(10, 6, 3, 1, 1)),
    "conv1d_dilated": _between(
        lambda y, self: self.c(y)[:, :, :16], c=M.Conv1d(10, 7, 5, 1, 4, 2, bias=False)
    ),
    "matmul": _between(lambda y, self: F.matmul(F.matmul(y, y, transpose_b=True), y)),
    "matmul_flipped": _between(
        lambda y, self: F.matmul(
            F.matmul(y, F.exp(y), transpose_a=True), F.tanh(y), transpose_b=True
        ).transpose(0, 2, 1)
    ),
    "matmul_stored": _between(
        lambda y, self: F.matmul(y, self.table), table=mge.Parameter(_input((16, 16), 4))
    ),
    "attention": _between(lambda y, self: _attention(y)),
    "table_of_positions": _between(lambda y, self: y[:, :6] + self.table, table=mge.Parameter(TABLE)),
    "token_in_front": _between(
        lambda y, self: F.concat([F.broadcast_to(self.token, (y.shape[0], 1, 16)), y], axis=1),
        token=mge.Parameter(TABLE[None, :1]),
    ),
    "batch_second": _between(lambda y, self: F.softmax(F.transpose(y, (1, 0, 2)) * 0.5, axis=2)),
    "heads_in_batch": _between(
        lambda y, self: (
            F.transpose(y.reshape(-1, 10, 2, 8), (0, 2, 1, 3)).reshape(-1, 10, 8).reshape(-1, 10, 16)
        )
    ),
    "conv3d": _between(
        lambda y, self: F.flatten(self.d(F.relu(self.c(y.reshape(-1, 2, 5, 4, 4)))), 2)[:, :, :16],
        c=M.Conv3d(2, 6, 3, 1, (1, 1, 2)),
        d=M.Conv3d(6, 4, (2, 1, 3), (1, 2, 1), dilation=(2, 1, 1), groups=2, bias=False),
    ),
    "batch_inside": _between(
        lambda y, self: F.transpose(
            F.exp(F.transpose(y, (1, 0, 2)).reshape(-1, 16)).reshape(10, -1, 16), (1, 0, 2)
        )
    ),
    "padded_sequence": _between(lambda y, self: F.nn.pad(y, ((0, 0), (2, 1), (0, 0)))),
    "linear_on_four": _between(lambda y, self: y.reshape(-1, 2, 5, 16)),
}


def _attention(y: Any) -> Any:
    """Attention with queries, keys and values from one tensor of five axes."""
    length = y.shape[1]
    parts = F.transpose(y.reshape(-1, length, 2, 2, 4), (2, 0, 3, 1, 4))
    query, key = parts[0], parts[1]
    weight = F.softmax(F.matmul(query, F.transpose(key, (0, 1, 3, 2))) * 0.5, axis=-1)
    mixed = F.transpose(F.matmul(weight, key), (0, 2, 1, 3)).reshape(-1, length, 8)
    return F.concat([mixed, mixed], axis=2)


@pytest.mark.parametrize("name", IMAGES)
def test_images(name: str, tmp_path: Path) -> None:
    _verified(IMAGES[name], IMAGE, tmp_path)


@pytest.mark.parametrize("name", SEQUENCES)
def test_sequences(name: str, tmp_path: Path) -> None:
    _verified(SEQUENCES[name], TOKENS, tmp_path)


LOOK_UPS: dict[str, Callable[..., Any]] = {
    "an embedding": lambda self, t: self.table(t),
    "an index": lambda self, t: self.rows[t],
    "a flat index": lambda self, t: self.rows[t.reshape(-1)].reshape(t.shape[0], 7, 8),
}


@pytest.mark.parametrize("case", LOOK_UPS)
def test_a_look_up_reads_integers(case: str, tmp_path: Path) -> None:
    tokens = [np.random.default_rng(n).integers(0, 20, (3, 7)).astype(np.int32) for n in range(2)]
    rows, places = mge.Parameter(_input((20, 8), 3)), mge.Parameter(_input((7, 8), 5))
    parts = {"table": M.Embedding(20, 8), "rows": rows, "places": places, "fc": M.Linear(8, 4)}
    module = net(lambda self, t: self.fc(F.mean(LOOK_UPS[case](self, t) + self.places, 1)), **parts)
    prepared = qtrace.prepare(qtrace.trace(module, tokens[0], check=False), RECIPE)
    converted = qtrace.convert(qtrace.calibrate(prepared, tokens, progress=False))
    path = qtrace.export(converted, tmp_path / "m.param")
    report = qtrace.verify(path, converted, tokens, min_sqnr_db=60)
    assert report.passed, report.table()


PARTS: dict[str, Callable[..., Any]] = {
    "crop": lambda self, x: self.conv(x[:, :, 1:]),
    "channels": lambda self, x: self.conv(x[:, 1:4]),
    "concat": lambda self, x: self.conv(F.concat([x[:, 3:], x[:, :2]], 1)),
}


@pytest.mark.parametrize("case", PARTS)
def test_parts_of_an_input_whose_channels_are_no_multiple_of_16_bytes(case: str, tmp_path: Path) -> None:
    channels = 4 if case == "crop" else 3
    module = randomize(net(PARTS[case], conv=M.Conv2d(channels, 5, 3)), 0)
    _verified(module, (3, 4, 5, 5), tmp_path)


def _run(traced: Any, path: Path, x: np.ndarray) -> np.ndarray:
    (output,) = (node.name for node in traced.graph.outputs)
    request = {"param": str(path), "bin": str(path.with_suffix(".bin")), "optimize": False}
    return Ncnn(request | {"inputs": ["x"], "outputs": [output]}, []).run([x], {})[0]


@each_of("exponent", [0, 1, 2, 3, 8, 9, 10, 13, 40, -1, -2, -9, 0.5, 0.3, 1.5, 8.4, -0.5, -0.3, -9.5])
def test_powers_of_numbers_of_either_sign_and_of_0(exponent: float, tmp_path: Path) -> None:
    x = np.array([[-2.0, -1.5, -1.0, -0.3, 0.0, 0.4, 1.0, 1.1, 3.0, 40.0, 1e6]], np.float32)
    traced = qtrace.trace(net(lambda self, x: x**exponent), x, check=False)
    path = qtrace.export(traced, tmp_path / "m.param")
    values = _run(traced, path, x)
    with np.errstate(all="ignore"):
        expected = np.power(x, np.float32(exponent))
    if exponent < 0:
        expected[x == 0] = np.nan  # as ncnn divides
    np.testing.assert_allclose(values, expected, rtol=1e-4, atol=1e-30)


@each_of("part, kinds", [(slice(0, None, 2), "Crop"), (slice(1, None, 2), "Crop Crop Crop Concat")])
def test_groups_that_fit_into_the_axis_are_not_split(part: slice, kinds: str, tmp_path: Path) -> None:
    x = _input((1, 6, 8), 0)
    traced = qtrace.trace(net(lambda self, x: x[:, part]), x, check=False)
    path = qtrace.export(traced, tmp_path / "m.param")
    written = [line.split()[0] for line in path.read_text().splitlines()]
    assert [kind for kind in written if kind in ("Crop", "Concat")] == kinds.split()
    np.testing.assert_array_equal(_run(traced, path, x), x[:, part])


def test_inputs_of_unlike_batches_are_refused(tmp_path: Path) -> None:
    traced = qtrace.trace(
        net(lambda self, x, y: x + y), _input((2, 3, 4), 0), _input((1, 3, 4), 1), check=False
    )
    with pytest.raises(ExportError, match=r"y has shape \(1, 3, 4\).*leave axis 0 to the batch of 2"):
        qtrace.export(traced, tmp_path / "m.param")


NO_LOOK_UPS: dict[str, tuple[Callable[..., Any], tuple[int, ...], str]] = {
    "ids that others read": (
        lambda self, t: self.table(t) * F.expand_dims(t, 2),
        (3, 7),
        "is read by other ops",
    ),
    "ids of two axes": (
        lambda self, t: F.mean(self.table(t), 1),
        (3, 7, 2),
        "has 2 axes of int32 in a sample",
    ),
    "computed ids": (lambda self, t: self.table(t + 1), (3, 7), "its ids are computed"),
}


@each_of("case", NO_LOOK_UPS)
def test_other_look_ups_are_refused(case: str, tmp_path: Path) -> None:
    function, shape, problem = NO_LOOK_UPS[case]
    tokens = np.random.default_rng(0).integers(0, 20, shape).astype(np.int32)
    module = net(lambda self, t: self.fc(function(self, t)), table=M.Embedding(30, 8), fc=M.Linear(8, 4))
    prepared = qtrace.prepare(qtrace.trace(module, tokens, check=False), RECIPE)
    converted = qtrace.convert(qtrace.calibrate(prepared, [tokens], progress=False))
    with pytest.raises(ExportError, match=problem):
        qtrace.export(converted, tmp_path / "m.param")
    assert not list(tmp_path.iterdir())


def _mean_of_samples(y: Any, self: Any) -> Any:
    return y + F.mean(F.transpose(y, (1, 0, 2, 3)), 1, keepdims=True).reshape(1, 6, 6, 8)


def _written_sample(y: Any, self: Any) -> Any:
    z = y * 1.0
    z[:1] = 0.0
    return z


def _written_steps(y: Any, self: Any) -> Any:
    z = y * 1.0
    z[:, ::2] = 0.0
    return z


_BATCH = "the batch, which ncnn does not see: use another axis"
_AXES = "ncnn has blobs of 1 to 4: join some axes"
REFUSED: dict[str, tuple[Callable[..., Any], str]] = {
    "a mean of samples": (_mean_of_samples, f"mean_out: it works along {_BATCH}"),
    "a mean along a merged batch": (lambda y, self: F.mean(y.reshape(-1, 8), 0), f"mean_out: .*{_BATCH}"),
    "a softmax along samples": (lambda y, self: F.softmax(y, axis=0), f"softmax_out: .*{_BATCH}"),
    "the first sample": (lambda y, self: y[:1] * 2.0, f"getitem_out: it picks samples of {_BATCH}"),
    "one sample": (lambda y, self: y[0] + y, f"getitem_out: it picks samples of {_BATCH}"),
    "a written sample": (_written_sample, f"setitem_out: it writes samples of {_BATCH}"),
    "written steps": (_written_steps, "setitem_out: .*write at slices without a step"),
    "joined samples": (lambda y, self: F.concat([y, y], 0), f"concat_out: .*{_BATCH}"),
    "rolled samples": (lambda y, self: F.roll(y, 1, 0) + y, f"roll_out: it moves samples of {_BATCH}"),
    "repeated samples": (lambda y, self: F.repeat(y, 2, 0), f"repeat_out: it repeats samples of {_BATCH}"),
    "tiled samples": (lambda y, self: F.tile(y, (2, 1, 1, 1)), f"tile_out: it repeats samples of {_BATCH}"),
    "a sum of products over samples": (
        lambda y, self: F.matmul(y.reshape(-1, 8), y.reshape(-1, 8), transpose_a=True),
        f"matmul_out: it sums over {_BATCH}",
    ),
    "a convolution of frames": (
        lambda y, self: self.other(y.reshape(-1, 3, 6, 8)).reshape(y.shape),
        "other_out: .*sample by sample",
    ),
    "every pair of samples": (
        lambda y, self: F.matmul(F.flatten(y, 1), F.flatten(y, 1), transpose_b=True),
        "matmul_out: .*mixes samples",
    ),
    "a number of samples": (lambda y, self: F.relu(y.reshape(3, -1, 8, 6)), "reshape_out: .*mixes samples"),
    "a layer of all samples": (
        lambda y, self: F.linear(y.reshape(1, -1), self.rows),
        "numbers of its batch of 3.* with -1",
    ),
    "a mask": (
        lambda y, self: y[:, :, np.array([True] * 5 + [False])],
        "getitem_out: its index is a mask or a table",
    ),
    "many positions": (
        lambda y, self: F.repeat(y, 30, 3)[..., ::-1],
        "getitem_out: .*lacks look-up by positions",
    ),
    "a computed power": (lambda y, self: F.exp(y) ** y, "pow_out: .*write it as exp"),
    "a large exponent": (
        lambda y, self: F.sigmoid(y) ** 2000,
        "pow_out: it raises to 2000, .*from -1024 to 1024",
    ),
    "an infinite exponent": (
        lambda y, self: F.sigmoid(y) ** float("inf"),
        "pow_out: it raises to inf, .*to 1024",
    ),
    "six axes": (lambda y, self: F.exp(y.reshape(-1, 3, 2, 3, 2, 8)), _AXES),
    "a norm of order 3": (lambda y, self: F.norm(y, ord=3, axis=1), "norm_out: .*norms of order 1 and 2"),
}


@each_of("case", REFUSED)
def test_refused_by_name(case: str, tmp_path: Path) -> None:
    function, problem = REFUSED[case]
    parts = {"other": M.Conv2d(3, 3, 1), "rows": mge.Parameter(_input((2, 864), 1))}
    module, x = _after(function, **parts), _input(IMAGE, 0)
    prepared = qtrace.prepare(qtrace.trace(module, x, check=False), RECIPE)
    converted = qtrace.convert(qtrace.calibrate(prepared, [x], progress=False))
    with pytest.raises(ExportError, match=problem):
        qtrace.export(converted, tmp_path / "m.param")
    assert not list(tmp_path.iterdir())
