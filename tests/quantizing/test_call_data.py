"""What of a batch is an input and what is a label, told by what the module gives."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import megengine.functional as F
import megengine.module as M
import numpy as np
import pytest

from qtrace.quantizing.call_data import labels_of
from tests.nets import net

RNG = np.random.default_rng(0)
X = RNG.normal(size=(4, 5, 8)).astype(np.float32)
MASK = (RNG.random((4, 5)) > 0.4).astype(np.int32)
CLASSES = np.arange(4, dtype=np.int32)


def _masked(self: Any, x: Any, mask: Any = None, labels: Any = None) -> Any:
    y = x if mask is None else x * F.expand_dims(mask.astype("float32"), -1)
    return y if labels is None else (F.mean(y), y)


def _points(self: Any, x: Any, point_coords: Any = None, point_labels: Any = None) -> Any:
    """Prompts of a segmentation, which are inputs whatever their name."""
    y = x if point_coords is None else x + F.expand_dims(point_coords, 1)
    return y if point_labels is None else y * F.expand_dims(point_labels.astype("float32"), -1)


def _diffusion(self: Any, x: Any, y: Any = None) -> Any:
    return x if y is None else x + y.astype("float32").reshape(-1, 1, 1)


def _detector(self: Any, x: Any, boxes: Any = None, gtClasses: Any = None) -> Any:
    """Boxes add a loss in training alone; the other argument is used only with them."""
    return x if boxes is None or gtClasses is None else {"out": x, "loss": F.mean(x) + F.mean(boxes)}


def _all_optional(self: Any, input_ids: Any = None, attention_mask: Any = None, labels: Any = None) -> Any:
    return _masked(self, input_ids, attention_mask, labels)


def _spans(
    self: Any, x: Any, mask: Any = None, start_positions: Any = None, end_positions: Any = None
) -> Any:
    y = _masked(self, x, mask)
    return y if start_positions is None or end_positions is None else (F.mean(y), y)


CASES: dict[str, tuple[Callable[..., Any], dict[str, np.ndarray], tuple[str, ...]]] = {
    "mask and labels": (_masked, {"x": X, "mask": MASK, "labels": CLASSES}, ("labels",)),
    "a mask of ones": (_masked, {"x": X, "mask": MASK * 0 + 1}, ()),
    "labels alone": (_masked, {"x": X, "labels": CLASSES}, ("labels",)),
    "point_labels": (_points, {"x": X, "point_coords": X[:, 0], "point_labels": MASK}, ()),
    "a class as y": (_diffusion, {"x": X, "y": CLASSES}, ()),
    "boxes": (_detector, {"x": X, "boxes": X[:, 0], "gtClasses": CLASSES}, ("boxes", "gtClasses")),
    "all optional": (
        _all_optional,
        {"input_ids": X, "attention_mask": MASK, "labels": CLASSES},
        ("labels",),
    ),
    "two labels for one loss": (
        _spans,
        {"x": X, "mask": MASK, "start_positions": CLASSES, "end_positions": CLASSES},
        ("start_positions", "end_positions"),
    ),
    "a name that forward has not": (_masked, {"x": X, "mask": MASK, "idx": CLASSES}, ("idx",)),
}


@pytest.mark.parametrize("case", CASES)
def test_labels_add_a_result_and_inputs_change_one(case: str) -> None:
    forward, batch, expected = CASES[case]
    assert labels_of(net(forward), batch) == expected


def test_the_module_stays_as_it_is() -> None:
    module = net(_masked, norm=M.BatchNorm1d(5))
    module.train()
    labels_of(module, {"x": X, "mask": MASK, "labels": CLASSES})
    assert module.training
    assert module.norm.training


def test_names_tell_of_a_module_that_does_not_run() -> None:
    def broken(self: Any, x: Any, mask: Any = None, labels: Any = None) -> Any:
        raise RuntimeError("no")

    assert labels_of(net(broken), {"x": X, "mask": MASK, "labels": CLASSES}) == ("labels",)
