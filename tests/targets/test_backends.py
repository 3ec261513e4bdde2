"""Every target: schemes that it runs, ops that exist, and the rules that its vendor documents."""

from __future__ import annotations

import importlib
from typing import Any

import numpy as np

from qtrace import ops
from qtrace.config import backends
from qtrace.config.backends import Backend
from qtrace.numerics import choose, quantize
from qtrace.ops import Role
from qtrace.plugins import installed
from tests.each import each_of

NAMES = backends.known()
INT_ROLES = {Role.COMPUTE, Role.ELEMENTWISE, Role.ACTIVATION, Role.NORM, Role.CONCAT}

# Target, sort of site, changes to its scheme, and how the reason begins; None where it runs.
CASES: list[tuple[str, str, dict[str, Any], str | None]] = [
    ("openvino", "activation", {"signed": True, "symmetric": True}, None),
    ("openvino", "activation", {"bits": 16}, "16 bits (it runs 8)"),
    ("openvino", "activation", {"narrow": True}, "narrow ranges"),
    ("openvino", "weight", {"axis": None}, None),
    ("openvino", "weight", {"axis": None, "symmetric": False}, "affine schemes"),
    ("tensorrt", "activation", {"symmetric": False}, "affine schemes"),
    ("tensorrt", "activation", {"signed": False}, "unsigned integers"),
    ("tensorrt", "activation", {"narrow": True}, "narrow ranges"),
    ("tensorrt", "activation", {"rounding": "half_away"}, "half_away rounding"),
    ("tensorrt", "weight", {"narrow": False}, None),
    ("tensorrt", "weight", {"bits": 16}, "16 bits"),
    ("tflite", "activation", {"symmetric": True}, None),
    ("tflite", "activation", {"signed": False}, "unsigned integers"),
    ("tflite", "activation", {"bits": 16, "symmetric": True}, None),
    ("tflite", "activation", {"bits": 16}, "affine schemes of 16 bits (it runs symmetric ones)"),
    ("tflite", "activation", {"bits": 12, "symmetric": True}, "12 bits (it runs 8, 16)"),
    ("tflite", "weight", {"axis": None}, None),
    ("tflite", "weight", {"narrow": False}, "full ranges"),
    ("tflite", "weight", {"axis": None, "symmetric": False}, "affine schemes"),
    ("megengine", "activation", {"narrow": True}, "narrow ranges"),
    ("megengine", "weight", {"narrow": True}, None),
    ("ncnn", "activation", {"narrow": False}, "full ranges"),
    ("ncnn", "activation", {"symmetric": False}, "affine schemes"),
    ("ncnn", "activation", {"rounding": "half_even"}, "half_even rounding"),
    ("ncnn", "weight", {"axis": None}, None),
    ("ncnn", "weight", {"bits": 4}, "4 bits (it runs 8)"),
    ("qnn", "activation", {"bits": 16}, None),
    ("qnn", "activation", {"signed": True}, "signed integers"),
    ("qnn", "weight", {"bits": 4}, None),
    ("qnn", "weight", {"signed": False, "symmetric": False, "narrow": False, "axis": None}, None),
    ("qnn", "weight", {"symmetric": False}, "per-channel scales with a zero point each"),
    ("qnn", "weight", {"bits": 16}, "16 bits (it runs 4, 8)"),
    ("ryzenai", "activation", {"bits": 16}, None),
    ("ryzenai", "activation", {"symmetric": False}, "affine schemes"),
    ("ryzenai", "activation", {"signed": False}, "unsigned integers"),
    ("ryzenai", "weight", {"bits": 4}, "4 bits (it runs 8)"),
    ("ryzenai_xint8", "weight", {"power_of_two": False}, "scales that are no powers of two"),
    ("ryzenai_xint8", "weight", {"axis": 0}, "per-channel scales"),
    ("esp_dl", "activation", {"power_of_two": False}, "scales that are no powers of two"),
    ("esp_dl", "activation", {"bits": 16}, "16 bits (it runs 8)"),
    ("esp_dl", "activation", {"rounding": "half_up"}, "half_up rounding (it rounds half_even)"),
    ("esp_dl", "weight", {"axis": 0}, None),
    ("esp_dl_s3", "activation", {"rounding": "half_even"}, "half_even rounding (it rounds half_up)"),
    ("generic", "activation", {"bits": 3, "axis": 1, "rounding": "half_away"}, None),
    ("generic", "activation", {"bits": 13, "signed": True, "narrow": True}, None),
    ("generic", "weight", {"bits": 2, "symmetric": False, "power_of_two": True}, None),
]


@each_of(("name", "sort", "changes", "reason"), CASES)
def test_runs_or_says_why_not(name: str, sort: str, changes: dict[str, Any], reason: str | None) -> None:
    backend = backends.get(name)
    problem = backend.problem(sort, getattr(backend, sort).replace(**changes))
    if reason is None:
        assert problem is None
    else:
        assert problem is not None
        assert problem.startswith(reason)


@each_of("name", NAMES)
def test_runs_its_own_schemes(name: str) -> None:
    backend = backends.get(name)
    assert backend.name == name
    assert backend.activation.axis is None
    for sort in ("activation", "weight"):
        assert backend.problem(sort, getattr(backend, sort)) is None
        assert getattr(backend, sort).rounding == backend.rounding


@each_of("name", NAMES)
def test_names_ops_that_can_run_on_integers(name: str) -> None:
    backend: Backend = backends.get(name)
    able = {rule.kind for rule in ops.rules() if rule.role in INT_ROLES}
    assert backend.ops <= able
    assert set(backend.fused) <= backend.ops
    for functions in backend.fused.values():
        assert functions <= able
    assert not backend.fused.keys() & {"concat", "stack"}


@each_of("name", NAMES)
def test_says_what_it_is(name: str) -> None:
    text = importlib.import_module(installed("qtrace.backends")[name].partition(":")[0]).__doc__
    assert text
    assert len(text) > 80


@each_of("name", ["tensorrt", "ncnn", "ryzenai"])
def test_symmetric_scales_are_the_largest_magnitude_by_127(name: str) -> None:
    params = choose(-3.0, 12.7, backends.get(name).activation)
    assert params.scale == np.float32(0.1)
    assert params.zero_point == 0


@each_of(
    ("name", "lowest", "ties"),
    [
        ("tensorrt", -128, 2),
        ("tflite", -128, 2),
        ("ncnn", -127, 3),
        ("megengine", -128, 3),
        ("esp_dl", -128, 2),
        ("esp_dl_s3", -128, 3),
    ],
)
def test_ends_and_ties(name: str, lowest: int, ties: int) -> None:
    scheme = backends.get(name).activation.replace(symmetric=True)
    params = choose(-127.0, 127.0, scheme)
    assert quantize(np.float32([-1000.0, 2.5, 1000.0]), params).tolist() == [lowest, ties, 127]


def test_only_where_a_concatenation_is_a_copy_it_ties() -> None:
    assert {name for name in NAMES if backends.get(name).ties_concat} == {
        "esp_dl",
        "esp_dl_s3",
        "megengine",
        "ryzenai",
        "ryzenai_xint8",
        "tensorrt",
        "tensorrt_10",
        "tflite",
    }
