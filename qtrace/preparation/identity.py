"""The hash by which a graph is known again: checkpoints and exported files hold it."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
from megengine import Tensor

from qtrace.graph.edit import RECORD_ATTRIBUTE
from qtrace.graph.tensors import read_array
from qtrace.graph.types import TracedModule
from qtrace.storage.checkpoints import hash_arrays

__all__ = ["graph_hash", "hash_tensors"]


def graph_hash(model: TracedModule) -> str:
    """Computes the SHA-256, in hex, of a graph's record and tensors: parameters, scales, zero points.

    A copy or a reloaded module has the same hash; another calibration gives another hash.
    """
    # Not by state_dict, whose time is quadratic in the number of modules.
    return hash_tensors(getattr(model, RECORD_ATTRIBUTE, ""), model.named_tensors())


def hash_tensors(text: str, tensors: Iterable[tuple[str, Tensor]]) -> str:
    """Computes the SHA-256, in hex, of a text and of named tensors, independent of their order."""
    ordered = sorted(tensors, key=lambda named: named[0])
    return hash_arrays(text, ((name, np.atleast_1d(read_array(tensor))) for name, tensor in ordered))
