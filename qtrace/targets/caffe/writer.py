"""Collects the layers of one Caffe net as protobuf messages: the net, and its weights.

The part of Caffe's protobuf schema that the exporter writes, built at run time: names, numbers, types.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import numpy as np

from qtrace.export.layer_net import LayerNetWriter
from qtrace.ops import OpCall


class CaffeWriter(LayerNetWriter):
    """Collects the layers of one Caffe net. Layers have the names of the blobs that they write."""

    runtime = "Caffe"

    def __init__(self, name: str) -> None:
        super().__init__()
        self.net = message("NetParameter")(name=name)
        self.weights = message("NetParameter")(name=name)

    def layer(
        self,
        kind: str,
        bottoms: Sequence[str],
        top: str,
        blobs: Sequence[np.ndarray] = (),
        **parameters: dict[str, Any],
    ) -> str:
        """Adds a layer with one output and returns the output's name.

        Args:
            kind: Caffe's name of the layer.
            bottoms: the blobs that it reads.
            top: the name of the layer and of the blob that it writes.
            blobs: the parameters of the layer.
            **parameters: the fields of the layer's settings, such as ``relu_param``.
        """
        self.layers(kind, bottoms, top, [top], blobs, **parameters)
        return top

    def layers(
        self,
        kind: str,
        bottoms: Sequence[str],
        name: str,
        tops: Sequence[str],
        blobs: Sequence[np.ndarray] = (),
        **parameters: dict[str, Any],
    ) -> None:
        """Adds a layer with several outputs."""
        self.net.layer.add(name=name, type=kind, bottom=bottoms, top=tops, **parameters)
        if blobs:
            layer = self.weights.layer.add(name=name, type=kind, bottom=bottoms, top=tops)
            for value in blobs:
                flat = np.ascontiguousarray(value, np.float32)
                layer.blobs.add(shape={"dim": flat.shape}, data=flat.reshape(-1))

    def emit(
        self,
        kind: str,
        call: OpCall,
        blobs: Sequence[np.ndarray] = (),
        bottoms: Sequence[str] = (),
        **parameters: dict[str, Any],
    ) -> None:
        """Adds a layer that computes an op; without ``bottoms``, it reads the first input of the op."""
        read = bottoms or [self.name(call.inputs[0])]
        self.names[call.out] = self.layer(kind, read, call.out.name, blobs, **parameters)


# Message -> "field number type", where types end with * if repeated and a capital letter begins a message.
_MESSAGES: dict[str, tuple[str, ...]] = {
    "BlobShape": ("dim 1 int64*",),
    "BlobProto": ("shape 7 BlobShape", "data 5 float*"),
    "NetParameter": ("name 1 string", "layer 100 LayerParameter*"),
    "InputParameter": ("shape 1 BlobShape*",),
    "ConvolutionParameter": (
        "num_output 1 uint32",
        "bias_term 2 bool",
        "pad_h 9 uint32",
        "pad_w 10 uint32",
        "kernel_h 11 uint32",
        "kernel_w 12 uint32",
        "group 5 uint32",
        "stride_h 13 uint32",
        "stride_w 14 uint32",
        "dilation 18 uint32*",
    ),
    "InnerProductParameter": ("num_output 1 uint32", "bias_term 2 bool", "axis 5 int32"),
    "PoolingParameter": (
        "pool 1 PoolMethod",
        "kernel_h 5 uint32",
        "kernel_w 6 uint32",
        "stride_h 7 uint32",
        "stride_w 8 uint32",
        "pad_h 9 uint32",
        "pad_w 10 uint32",
        "global_pooling 12 bool",
        "ceil_mode 13 bool",
    ),
    "EltwiseParameter": ("operation 1 EltwiseOp", "coeff 2 float*"),
    "ConcatParameter": ("axis 2 int32",),
    "SliceParameter": ("axis 3 int32", "slice_point 2 uint32*"),
    "ScaleParameter": ("axis 1 int32", "bias_term 4 bool"),
    "PowerParameter": ("power 1 float", "scale 2 float", "shift 3 float"),
    "ReLUParameter": ("negative_slope 1 float",),
    "PReLUParameter": ("channel_shared 2 bool",),
    "SoftmaxParameter": ("axis 2 int32",),
    "FlattenParameter": ("axis 1 int32", "end_axis 2 int32"),
    "ReshapeParameter": ("shape 1 BlobShape",),
    "PermuteParameter": ("order 1 uint32*",),
    "LayerParameter": (
        "name 1 string",
        "type 2 string",
        "bottom 3 string*",
        "top 4 string*",
        "blobs 7 BlobProto*",
        "concat_param 104 ConcatParameter",
        "convolution_param 106 ConvolutionParameter",
        "eltwise_param 110 EltwiseParameter",
        "flatten_param 135 FlattenParameter",
        "inner_product_param 117 InnerProductParameter",
        "input_param 143 InputParameter",
        "permute_param 148 PermuteParameter",
        "pooling_param 121 PoolingParameter",
        "power_param 122 PowerParameter",
        "prelu_param 131 PReLUParameter",
        "relu_param 123 ReLUParameter",
        "reshape_param 133 ReshapeParameter",
        "scale_param 142 ScaleParameter",
        "slice_param 126 SliceParameter",
        "softmax_param 125 SoftmaxParameter",
    ),
}
_ENUMS = {"PoolMethod": ("MAX", "AVE"), "EltwiseOp": ("PROD", "SUM", "MAX")}


def message(name: str) -> Any:
    """Returns the class of the message ``name`` of Caffe's schema."""
    return _classes()[name]


@functools.cache
def _classes() -> dict[str, Any]:
    from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

    file = descriptor_pb2.FileDescriptorProto(name="qtrace_caffe.proto", package="caffe", syntax="proto2")
    for name, fields in _MESSAGES.items():
        described = file.message_type.add(name=name)
        for text in fields:
            _add_field(described, *text.split())
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    types = (pool.FindMessageTypeByName(f"caffe.{name}") for name in _MESSAGES)
    return {t.name: message_factory.GetMessageClass(t) for t in types}


def _add_field(described: Any, name: str, number: str, kind: str) -> None:
    from google.protobuf import descriptor_pb2

    field = descriptor_pb2.FieldDescriptorProto
    bare = kind.rstrip("*")
    added = described.field.add(name=name, number=int(number), label=field.LABEL_OPTIONAL)
    if kind.endswith("*"):
        added.label = field.LABEL_REPEATED
        added.options.packed = bare in ("float", "int64")  # as Caffe's schema has it
    if bare in _ENUMS:
        # Values of an enum are names in the scope of the message: MAX exists in two of them.
        enum = described.enum_type.add(name=bare)
        for index, value in enumerate(_ENUMS[bare]):
            enum.value.add(name=value, number=index)
        added.type, added.type_name = field.TYPE_ENUM, f".caffe.{described.name}.{bare}"
    elif bare in _MESSAGES:
        added.type, added.type_name = field.TYPE_MESSAGE, f".caffe.{bare}"
    else:
        added.type = getattr(field, f"TYPE_{bare.upper()}")
