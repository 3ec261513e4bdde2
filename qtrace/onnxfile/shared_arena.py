"""Memory that sessions of onnxruntime share in this process.

A session keeps what it has freed for itself and gives all of it back when it ends. Where many sessions follow
each other, most of the time of a short one may be spent on new memory, which the system fills with zeros.
"""

from __future__ import annotations

import functools
import importlib.util
from typing import Any

__all__ = ["USE_SHARED_ARENA", "register_shared_arena", "shrink_shared_arena"]

USE_SHARED_ARENA = "session.use_env_allocators"
"""The entry of a session's configuration that says "1" if it takes the shared memory."""

_SHRINK = "memory.enable_memory_arena_shrinkage"


@functools.cache
def register_shared_arena() -> bool:
    """Makes the shared memory once; returns whether sessions may take it."""
    if importlib.util.find_spec("onnx") is None:
        return False
    import onnxruntime as ort

    memory = ort.OrtMemoryInfo("Cpu", ort.OrtAllocatorType.ORT_ARENA_ALLOCATOR, 0, ort.OrtMemType.DEFAULT)
    ort.create_and_register_allocator(memory, None)
    _run_smallest()  # the first piece of the memory, which is as large as its first use, is never given back
    return True


def shrink_shared_arena() -> None:
    """Gives what the shared memory has free back to the system, if it is in use."""
    if register_shared_arena.cache_info().currsize and register_shared_arena():
        _run_smallest(shrink=True)


def _run_smallest(shrink: bool = False) -> None:
    """Runs a model of one number.

    Args:
        shrink: whether the memory then gives back what it has free.
    """
    session, feeds, shrinking = _smallest_session()
    session.run(None, feeds, shrinking if shrink else None)


@functools.cache
def _smallest_session() -> tuple[Any, dict[str, Any], Any]:
    """Returns a session, its inputs, and the options of a run after which the memory gives back."""
    import numpy as np
    import onnxruntime as ort
    from onnx import TensorProto, helper

    ends = [helper.make_tensor_value_info(name, TensorProto.FLOAT, [1]) for name in ("x", "y")]
    graph = helper.make_graph([helper.make_node("Identity", ["x"], ["y"])], "shrink", ends[:1], ends[1:])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 11)], ir_version=7)
    options = ort.SessionOptions()
    options.intra_op_num_threads = options.inter_op_num_threads = 1
    options.add_session_config_entry(USE_SHARED_ARENA, "1")
    session = ort.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    shrinking = ort.RunOptions()
    shrinking.add_run_config_entry(_SHRINK, "cpu:0")
    return session, {"x": np.zeros(1, np.float32)}, shrinking
