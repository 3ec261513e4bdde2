"""The hash of arrays keeps its value: checkpoints and exported files of earlier versions hold it."""

from __future__ import annotations

import megengine.module as M
import numpy as np
from megengine import Parameter, Tensor

from qtrace.extras.finetune.data import Batch, Samples
from qtrace.preparation.model import graph_hash
from qtrace.storage.checkpoints import hash_arrays

A = np.arange(6, dtype=np.float32).reshape(2, 3)
SCALAR = np.array(3, np.int64)


class _Parameters(M.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w = Parameter(A)
        self.a = Parameter(np.float32(2.0).reshape(()))
        self.m = M.BatchNorm2d(2)
        self.qtrace_record = "{}"

    def forward(self, x: Tensor) -> Tensor:
        return x


def test_the_key_of_a_block_is_that_of_earlier_versions() -> None:
    arrays = [("", np.atleast_1d(a)) for a in (A, SCALAR, A.T)]
    expected = "91c3a0a309cbc2c237ad74cb351ffc6f607fcc1c5647ed1c9399774789c12d40"
    assert hash_arrays("lr=1 block", arrays, "{dtype}{shape}") == expected


def test_the_identity_of_samples_is_that_of_earlier_versions() -> None:
    apart = Samples({"x": 0}, (Batch(0, [A, SCALAR]),), False)
    joined = Samples(((0,), {}), (Batch(0, [A.T]),), True)
    assert apart.identity == "42c0333f3470995da0486a721d7a91d7444d4720c55270d632ad1e58c3daeec9"
    assert joined.identity == "3b5192740b9a2b456f030816a5acf1d52c517740d923c8ad6601c0dee7d6dd6f"


def test_the_hash_of_a_graph_is_that_of_earlier_versions() -> None:
    expected = "ad072637552db56c205815d4b76471b507470b024ddeddc9231421221154aa21"
    assert graph_hash(_Parameters()) == expected


def test_names_dtypes_shapes_values_and_text_count() -> None:
    others = [
        hash_arrays("t", [("a", A)]),
        hash_arrays("u", [("a", A)]),
        hash_arrays("t", [("b", A)]),
        hash_arrays("t", [("a", A.view(np.int32))]),
        hash_arrays("t", [("a", A.reshape(3, 2))]),
        hash_arrays("t", [("a", -A)]),
        hash_arrays("t", [("a", A), ("a", A)]),
    ]
    assert len(set(others)) == len(others)
    assert hash_arrays("t", [("a", np.asfortranarray(A))]) == others[0]
