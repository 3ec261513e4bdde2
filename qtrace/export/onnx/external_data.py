"""ONNX models whose tensors lie in a file beside them: a protobuf file holds 2 GB at most."""

from __future__ import annotations

from typing import Any

__all__ = ["LIMIT", "move_out", "skeleton"]

# Bytes of tensors from which on they lie outside; the rest of the file needs some of the 2 GB.
LIMIT = 2**31 - 2**24

# Smaller tensors stay inside: shapes and scales, which runtimes read while they load the graph.
_LEAST = 1024
_ALIGNED = 4096  # so that a runtime can map the file into memory


def _large(model: Any) -> list[Any]:
    return [t for t in model.graph.initializer if len(t.raw_data) >= _LEAST]


def skeleton(model: Any) -> Any:
    """A copy for checks, with large tensors as inputs of the same name, type and shape."""
    import onnx

    kept = onnx.ModelProto()
    for field in ("ir_version", "producer_name", "producer_version"):
        setattr(kept, field, getattr(model, field))
    kept.opset_import.extend(model.opset_import)
    graph, large = kept.graph, {t.name for t in _large(model)}
    graph.name = model.graph.name
    graph.node.extend(model.graph.node)
    graph.input.extend(model.graph.input)
    graph.output.extend(model.graph.output)
    graph.initializer.extend(t for t in model.graph.initializer if t.name not in large)
    for tensor in _large(model):
        info = onnx.helper.make_tensor_value_info(tensor.name, tensor.data_type, list(tensor.dims))
        graph.input.append(info)
    return kept


def move_out(model: Any, location: str) -> bytes:
    """Takes the large tensors out of ``model``.

    Args:
        model: changed in place.
        location: the name of the file that will hold them, beside the model's.

    Returns:
        What the file must hold.
    """
    import onnx

    data = bytearray()
    for tensor in _large(model):
        data.extend(bytes(-len(data) % _ALIGNED))
        onnx.external_data_helper.set_external_data(tensor, location, len(data), len(tensor.raw_data))
        data += tensor.raw_data
        tensor.ClearField("raw_data")
    return bytes(data)
