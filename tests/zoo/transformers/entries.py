"""The transformers of the zoo, and small nets in the ways that users write them."""

from __future__ import annotations

from typing import Any

import numpy as np

from tests.zoo.detectors.entry import Entry, Inputs, bounded, pictures, trained
from tests.zoo.transformers.pooled import ClipResNet, TextImage
from tests.zoo.transformers.swin import Swin
from tests.zoo.transformers.users import USERS, DictInput, SeveralInputs
from tests.zoo.transformers.vit import ResMlp, UniFormer, Vit

__all__ = ["TRANSFORMERS", "USER_NETS"]


def _with_tokens(count: int, seed: int, size: int) -> tuple[Any, ...]:
    tokens = np.random.default_rng(seed).integers(0, 20, (count, 6)).astype(np.int32)
    return bounded(count, seed, size), tokens


def _with_mask(count: int, seed: int, size: int) -> tuple[Any, ...]:
    return ({"image": bounded(count, seed, size), "mask": bounded(count, seed + 1, size, channels=1)},)


def _with_vector(count: int, seed: int, size: int) -> tuple[Any, ...]:
    vector = np.random.default_rng(seed).uniform(-1, 1, (count, 4)).astype(np.float32)
    return bounded(count, seed, size), vector


_INPUTS: dict[type, Inputs] = {DictInput: _with_mask, SeveralInputs: _with_vector}

TRANSFORMERS = (
    Entry("vit", "vit", lambda: trained(Vit()), sqnr=31, size=32, other_size=None, share=0.95),
    Entry("swin", "swin", lambda: trained(Swin()), sqnr=25, size=32, other_size=None, share=0.95),
    Entry(
        "clip_resnet", "clip", lambda: trained(ClipResNet()), sqnr=42, size=32, other_size=None, plain=True
    ),
    Entry(
        "clip",
        "clip",
        lambda: trained(TextImage()),
        sqnr=25,
        inputs=_with_tokens,
        size=32,
        other_size=None,
        plain=True,
    ),
    Entry("resmlp", "resmlp", lambda: trained(ResMlp()), sqnr=34, size=32, other_size=None, plain=True),
    Entry(
        "uniformer", "uniformer", lambda: trained(UniFormer()), sqnr=24, size=32, other_size=48, plain=True
    ),
)

# About 2 dB below what was measured, as everywhere in the zoo.
_FLOORS = {
    "CalledTwice": 43,
    "SharedNorm": 23,
    "DictInput": 30,
    "NestedOutput": 21,
    "SeveralInputs": 39,
    "Frozen": 35,
    "Idle": 40,
    "SqueezeExcite": 33,
    "MapAttention": 35,
}

USER_NETS = tuple(
    Entry(
        kind.__name__,
        "users",
        lambda kind=kind: trained(kind()),
        sqnr=_FLOORS[kind.__name__],
        inputs=_INPUTS.get(kind, pictures),
        size=16,
        other_size=24,
        plain=True,
    )
    for kind in USERS
)
