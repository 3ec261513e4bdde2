"""ONNX models with their tensors in a file beside them: a protobuf file holds 2 GB at most."""

from __future__ import annotations

from typing import Any

__all__ = ["LIMIT", "move_out", "skeleton"]

# Bytes of tensors from which on they are stored outside; the rest of the file needs some of the 2 GB.
LIMIT = 2**31 - 2**24

# Smaller tensors stay inside: shapes and scales, which runtimes read while they load the graph.
_MIN_BYTES_OUTSIDE = 1024
_ALIGNMENT_BYTES = 4096  # so that a runtime can map the file into memory


def _large(model: Any) -> list[Any]:
    return [t for t in model.graph.initializer if len(t.raw_data) >= _MIN_BYTES_OUTSIDE]


def skeleton(model: Any) -> Any:
    """Copies a model for checks, with large tensors as inputs of the same name, type and shape."""
    import onnx

    copy = onnx.ModelProto()
    for field in ("ir_version", "producer_name", "producer_version"):
        setattr(copy, field, getattr(model, field))
    copy.opset_import.extend(model.opset_import)
    graph, large = copy.graph, {t.name for t in _large(model)}
    graph.name = model.graph.name
    graph.node.extend(model.graph.node)
    graph.input.extend(model.graph.input)
    graph.output.extend(model.graph.output)
    graph.initializer.extend(t for t in model.graph.initializer if t.name not in large)
    for tensor in _large(model):
        info = onnx.helper.make_tensor_value_info(tensor.name, tensor.data_type, list(tensor.dims))
        graph.input.append(info)
    return copy


def move_out(model: Any, location: str) -> bytes:
    """Moves the large tensors out of ``model``.

    Args:
        model: the model, which is changed in place.
        location: the name of the tensors' file, beside the model's.

    Returns:
        The content of that file.
    """
    import onnx

    data = bytearray()
    for tensor in _large(model):
        data.extend(bytes(-len(data) % _ALIGNMENT_BYTES))
        onnx.external_data_helper.set_external_data(tensor, location, len(data), len(tensor.raw_data))
        data += tensor.raw_data
        tensor.ClearField("raw_data")
    return bytes(data)
