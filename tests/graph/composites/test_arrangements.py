"""Attention, channel shuffle and space to depth in pieces become one call; other arrangements do not."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import megengine as mge
import megengine.functional as F
import numpy as np
import pytest

from tests.each import each_of
from tests.graph.composites.spellings import Spelling, assert_composed, assert_refused, composed, labels

TOKENS = (np.random.default_rng(8).normal(size=(2, 3, 5, 4))).astype(np.float32)
ATTENTION = "qtrace.graph.functions.scaled_dot_product_attention"


def _turned(x: mge.Tensor) -> mge.Tensor:
    return x.transpose(0, 1, 3, 2)


def _attend(weigh: Callable[[Any, mge.Tensor, mge.Tensor], mge.Tensor]) -> Spelling:
    """Attention of a tensor to twice, and of values to three times itself."""
    rng = np.random.default_rng(2)
    mask = mge.Tensor(rng.normal(size=(5, 5)).astype(np.float32))
    return Spelling(
        lambda self, x: F.matmul(weigh(self, F.relu(x), F.sigmoid(x)), F.tanh(x)), {"mask": mask}, TOKENS
    )


SCORES: dict[str, Callable[[Any, mge.Tensor, mge.Tensor], mge.Tensor]] = {
    "pytorch by hand": lambda self, q, k: F.softmax(F.matmul(q, _turned(k)) / 2.0, axis=-1),
    "scaled query": lambda self, q, k: F.softmax(F.matmul(q * 0.5, F.transpose(k, (0, 1, 3, 2))), -1),
    "pytorch's function": lambda self, q, k: F.softmax(
        F.matmul(q * 0.70710678, _turned(k) * 0.70710678) + self.mask, 3
    ),
    "operators": lambda self, q, k: F.softmax(0.5 * (q @ _turned(k)) + self.mask, axis=-1),
    "transposed product": lambda self, q, k: F.softmax(F.matmul(q, k, transpose_b=True) * 0.5, axis=-1),
    "swapped axes": lambda self, q, k: F.softmax(F.matmul(q, F.swapaxes(k, 2, 3)), axis=-1),
    "softmax in pieces": lambda self, q, k: _softmax(F.matmul(q, _turned(k)) * 0.5 + self.mask),
}


def _softmax(x: mge.Tensor) -> mge.Tensor:
    powers = F.exp(x - x.max(-1, True))
    return powers / powers.sum(-1, True)


@pytest.mark.parametrize("name", SCORES)
def test_attention(name: str) -> None:
    before = ["F.relu", "F.sigmoid", "F.tanh"]
    result = composed(_attend(SCORES[name]))
    assert sorted(labels(result.traced)) == sorted([*before, ATTENTION]), result.results
    assert_composed(_attend(SCORES[name]), *labels(result.traced), applied="Attention")
    call = result.traced.graph.outputs[0].expr
    assert call.args[4] == pytest.approx(1.0 if name == "swapped axes" else 0.5, rel=1e-6)
    assert (call.args[3] is not None) == (name in MASKED)


MASKED = ("pytorch's function", "operators", "softmax in pieces")


def _windows(split: tuple[int, ...], joined: tuple[int, ...] = (-1, 3, 5, 5)) -> Spelling:
    """Swin's shifted windows: a bias for all, then a mask for each of two windows."""
    rng = np.random.default_rng(4)
    bias, mask = rng.normal(size=(3, 5, 5)).astype(np.float32), rng.normal(size=(2, 1, 5, 5))

    def forward(self: Any, x: mge.Tensor) -> mge.Tensor:
        scores = F.matmul(x * 0.5, F.relu(x).transpose(0, 1, 3, 2)) + self.bias
        scores = F.reshape(F.reshape(scores, split) + self.mask, joined)
        return F.matmul(F.softmax(scores, -1), F.tanh(x))

    stored = {"bias": mge.Tensor(bias), "mask": mge.Tensor(mask.astype(np.float32))}
    return Spelling(forward, stored, np.concatenate([TOKENS, TOKENS[::-1]]))


def test_attention_in_windows_has_a_bias_and_a_mask() -> None:
    spelling = _windows((-1, 2, 3, 5, 5))
    result = composed(spelling)
    assert sorted(labels(result.traced)) == ["F.relu", "F.reshape", "F.tanh", ATTENTION], result.results
    assert_composed(spelling, *labels(result.traced), applied="Attention")


def test_attention_with_a_bias_and_a_mask() -> None:
    rng = np.random.default_rng(4)
    stored = {
        n: mge.Tensor(rng.normal(size=s).astype(np.float32)) for n, s in (("b", (3, 5, 5)), ("m", (5, 5)))
    }
    spelling = Spelling(
        lambda self, x: F.matmul(
            F.softmax(F.matmul(x, F.relu(x), transpose_b=True) * 0.5 + self.b + self.m, -1), F.tanh(x)
        ),
        stored,
        TOKENS,
    )
    result = assert_composed(spelling, "F.relu", "F.tanh", ATTENTION, applied="Attention")
    call = result.traced.graph.outputs[0].expr
    assert [call.args[i].name for i in (3, 5)] == ["m", "b"]


def test_keys_whose_transpose_moves_other_axes_too_keep_the_rest() -> None:
    def forward(self: Any, x: mge.Tensor) -> mge.Tensor:
        heads = F.reshape(x, (2, 3, 5, 2, 2))[:, :, :, :, 0]
        query, value = (h.transpose(0, 2, 1, 3) for h in (heads, F.relu(heads)))
        weights = F.softmax(F.matmul(query, heads.transpose(0, 2, 3, 1)), axis=-1)
        return F.matmul(weights, value)

    result = composed(Spelling(forward, x=TOKENS))
    called = labels(result.traced)
    assert called.count(ATTENTION) == 1
    assert called.count("F.transpose") == 1
    assert_composed(Spelling(forward, x=TOKENS), *called, applied="Attention")


def _shuffled(groups: int, *space: int) -> Callable[[mge.Tensor], mge.Tensor]:
    def forward(x: mge.Tensor) -> mge.Tensor:
        y = x.reshape(2, groups, 6 // groups, *space)
        order = (0, 2, 1, *range(3, 3 + len(space)))
        return F.transpose(y, order).reshape(2, 6, 4, 8)

    return forward


@each_of("forward", [_shuffled(2, 4, 8), _shuffled(3, 4, 8), _shuffled(2, 32), _shuffled(3, -1)])
def test_channel_shuffle(forward: Callable[..., Any]) -> None:
    assert_composed(forward, "qtrace.graph.functions.channel_shuffle", applied="ChannelShuffle")


def _blocks(*order: int) -> Callable[[mge.Tensor], mge.Tensor]:
    def forward(x: mge.Tensor) -> mge.Tensor:
        y = F.transpose(F.reshape(x, (2, 6, 2, 2, 4, 2)), (0, *order, 2, 4))
        return F.reshape(y, (2, 24, 2, 4))

    return forward


@each_of("order", [(3, 5, 1), (1, 3, 5), (5, 3, 1), (1, 5, 3)])
def test_space_to_depth(order: tuple[int, ...]) -> None:
    assert_composed(_blocks(*order), "qtrace.graph.functions.space_to_depth", applied="SpaceToDepth")


def _nested(x: mge.Tensor) -> mge.Tensor:
    """As PyTorch exports it: a slice of rows, then one of columns."""
    parts = [x[:, :, r::2][:, :, :, c : 2**31 - 1 : 2] for c in (0, 1) for r in (0, 1)]
    return F.concat(parts, axis=1)


FOCUS: dict[str, Callable[[mge.Tensor], mge.Tensor]] = {
    "yolox": lambda x: F.concat(
        [x[..., ::2, ::2], x[..., 1::2, ::2], x[..., ::2, 1::2], x[..., 1::2, 1::2]], axis=1
    ),
    "by rows": lambda x: F.concat(
        [x[:, :, ::2, ::2], x[:, :, ::2, 1::2], x[:, :, 1::2, ::2], x[:, :, 1::2, 1::2]], axis=1
    ),
    "slices of slices": _nested,
}


@each_of("name", FOCUS)
def test_focus(name: str) -> None:
    assert_composed(FOCUS[name], "qtrace.graph.functions.space_to_depth", applied="Focus")


ROLLED: dict[str, Any] = {
    "rows": lambda x: F.concat([x[:, :, 1:], x[:, :, :1]], 2),
    "the last axis": lambda x: F.concat([x[..., 5:], x[..., :5]], -1),
    "from the end": lambda x: F.concat([x[:, :, -2:], x[:, :, :-2]], axis=2),
}


@each_of("name", ROLLED)
def test_roll(name: str) -> None:
    assert_composed(ROLLED[name], "F.roll", applied="Roll")


PICKED: dict[str, Any] = {
    "squeezed": lambda x: F.squeeze(x[:, 2:3], 1),
    "the last place": lambda x: F.squeeze(x[..., -1:], -1),
}


@pytest.mark.parametrize("name", PICKED)
def test_pick(name: str) -> None:
    assert_composed(PICKED[name], "Tensor.__getitem__", applied="Pick")


def _widened(self: Any, x: mge.Tensor) -> mge.Tensor:
    weights = F.softmax(F.matmul(x, F.relu(x), transpose_b=True) + self.mask, -1)
    return F.matmul(weights, F.concat([x, x], 0))


NEAR_MISSES: dict[str, tuple[Any, str, str]] = {
    "softmax over the queries": (
        _attend(lambda self, q, k: F.softmax(F.matmul(q, _turned(k)), axis=2)),
        "Attention",
        "its softmax is over the axis 2, that of attention is the last",
    ),
    "keys that are not transposed": (
        Spelling(
            lambda self, x: F.matmul(F.softmax(F.matmul(x, F.relu(x)), -1), F.tanh(x)), x=TOKENS[..., :4, :]
        ),
        "Attention",
        "its keys are not transposed",
    ),
    "transposed values": (
        Spelling(
            lambda self, x: F.matmul(
                F.softmax(F.matmul(x, F.relu(x), transpose_b=True), -1), F.tanh(x), False, True
            ),
            x=TOKENS[..., :4, :],
        ),
        "Attention",
        "its values are transposed",
    ),
    "a mask that widens": (
        Spelling(_widened, {"mask": mge.Tensor(np.zeros((2, 1, 5, 5), np.float32))}, TOKENS[:1]),
        "Attention",
        "its mask has the shape (2, 1, 5, 5), that of the scores is (1, 3, 5, 5)",
    ),
    "windows across heads": (
        _windows((1, 2, 6, 5, 5)),
        "Attention",
        "its scores are reshaped to (1, 2, 6, 5, 5), which does not split (4, 3, 5, 5) into windows",
    ),
    "parts in their order": (
        lambda x: F.concat([x[:, :, :1], x[:, :, 1:]], 2),
        "Roll",
        "are not the end and the beginning of one axis",
    ),
    "parts of another axis": (
        lambda x: F.concat([x[..., 4:], x[..., :4]], 2),
        "Roll",
        "its constants change the shape",
    ),
    "parts with a step": (
        lambda x: F.concat([x[:, :, 1::2], x[:, :, ::2]], 2),
        "Roll",
        "are not the end and the beginning of one axis",
    ),
    "one place of another axis": (
        lambda x: F.squeeze(F.reshape(x, (2, 6, 1, 32))[:, 2:3], 2),
        "Pick",
        "is no slice of length 1 along the axis that is squeezed",
    ),
    "places by numbers": (
        lambda x: F.squeeze(F.reshape(x, (2, 6, 1, 32))[:, 2], 1),
        "Pick",
        "is no slice of length 1 along the axis that is squeezed",
    ),
    "a shuffle of places": (
        lambda x: x.reshape(2, 6, 4, 2, 4).transpose(0, 1, 2, 4, 3).reshape(2, 6, 4, 8),
        "ChannelShuffle",
        "it transposes by (0, 1, 2, 4, 3), a shuffle exchanges the axes 1 and 2",
    ),
    "a shuffle of channels and rows": (
        lambda x: x.reshape(2, 3, 8, 8).transpose(0, 2, 1, 3).reshape(2, 6, 4, 8),
        "ChannelShuffle",
        "its first reshape, to (2, 3, 8, 8), does not split the 6 channels",
    ),
    "blocks that are no squares": (
        lambda x: x.reshape(2, 6, 2, 2, 2, 4).transpose(0, 3, 5, 1, 2, 4).reshape(2, 48, 2, 2),
        "SpaceToDepth",
        "does not split height and width into square blocks",
    ),
    "another order": (
        lambda x: x.reshape(2, 6, 2, 2, 4, 2).transpose(0, 3, 5, 1, 4, 2).reshape(2, 24, 4, 2),
        "SpaceToDepth",
        "it transposes by (0, 3, 5, 1, 4, 2), which does not move the blocks",
    ),
    "slices out of order": (
        lambda x: F.concat([x[..., 1::2, ::2], x[..., ::2, ::2], x[..., ::2, 1::2], x[..., 1::2, 1::2]], 1),
        "Focus",
        "in the order [(1, 0), (0, 0), (0, 1), (1, 1)], not by rows or by columns",
    ),
    "slices with step 4": (
        lambda x: F.concat([x[..., ::4], x[..., 1::4], x[..., 2::4], x[..., 3::4]], 1),
        "Focus",
        "is no slice of every second row and column",
    ),
    "slices along the batch": (
        lambda x: F.concat([x[..., ::2, ::2], x[..., 1::2, ::2], x[..., ::2, 1::2], x[..., 1::2, 1::2]], 0),
        "Focus",
        "it joins 4 axes along the axis 0",
    ),
}


@each_of("name", NEAR_MISSES)
def test_near_misses_of_arrangements_stay_uncomposed(name: str) -> None:
    assert_refused(*NEAR_MISSES[name])
