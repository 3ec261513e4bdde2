"""Passes over the layers of an ncnn net: fuse activation functions and roundings, copy branching blobs."""

from __future__ import annotations

from collections import Counter
from typing import Any

from qtrace.export.ncnn.writer import NcnnLayer

__all__ = ["fuse_activations", "fuse_roundings", "sink_unread", "split_branches"]

_LAYERS = ("Convolution", "ConvolutionDepthWise", "Deconvolution", "DeconvolutionDepthWise", "InnerProduct")
_ACTIVATION, _ARGUMENTS, _INT8 = 9, -23310, 8
# Activation function -> ncnn's number for it inside of a layer.
_CODES = {"ReLU": 1, "Clip": 3, "Sigmoid": 4, "HardSwish": 6}
_LEAKY_RELU = 2


def fuse_activations(layers: list[NcnnLayer], outputs: set[str]) -> list[NcnnLayer]:
    """Moves an activation function into the layer before it if nothing else reads that layer."""
    return _fuse(layers, outputs, _take_activation)


def fuse_roundings(layers: list[NcnnLayer], outputs: set[str]) -> list[NcnnLayer]:
    """Lets a convolution of 8 bits write integers if its result is only rounded."""
    return _fuse(layers, outputs, _take_rounding)


def _fuse(layers: list[NcnnLayer], outputs: set[str], take: Any) -> list[NcnnLayer]:
    readers = Counter(b for layer in layers for b in layer.bottoms)
    producers = {layer.tops[0]: layer for layer in layers}
    unfused: list[NcnnLayer] = []
    for layer in layers:
        blob = layer.bottoms[0] if len(layer.bottoms) == 1 else ""
        before = producers.get(blob)
        alone = readers[blob] == 1 and blob not in outputs
        if before is not None and alone and take(before, layer, readers):
            before.tops = list(layer.tops)
            producers[layer.tops[0]] = before
        else:
            unfused.append(layer)
    return unfused


def _take_activation(before: NcnnLayer, layer: NcnnLayer, readers: Counter[str]) -> bool:
    if before.kind not in _LAYERS or _ACTIVATION in before.params or layer.kind not in _CODES:
        return False
    arguments = [v for v in layer.params.values() if layer.kind != "ReLU" or v]
    leaky = layer.kind == "ReLU" and bool(arguments)
    before.params[_ACTIVATION] = _LEAKY_RELU if leaky else _CODES[layer.kind]
    if arguments:
        before.params[_ARGUMENTS] = arguments
    return True


def _take_rounding(before: NcnnLayer, layer: NcnnLayer, readers: Counter[str]) -> bool:
    integer = before.kind in ("Convolution", "ConvolutionDepthWise") and before.params.get(_INT8, 0) in (1, 2)
    # Unread integers are in the file for inspection only: the layer's result is read as floats.
    if layer.kind != "Quantize" or not integer or not readers[layer.tops[0]]:
        return False
    before.params[_INT8] += 100
    before.weights += layer.weights
    return True


def sink_unread(layers: list[NcnnLayer], outputs: set[str]) -> list[NcnnLayer]:
    """Returns Noop layers for the blobs that no layer reads: ncnn takes unread blobs for outputs.

    Such blobs are inputs, parts of a split, and integers that are in the file for inspection.
    """
    read = {blob for layer in layers for blob in layer.bottoms} | outputs
    return [NcnnLayer("Noop", [top], []) for layer in layers for top in layer.tops if top not in read]


def split_branches(layers: list[NcnnLayer]) -> list[NcnnLayer]:
    """Copies every blob that several layers read: an ncnn blob has one reader."""
    readers = Counter(b for layer in layers for b in layer.bottoms)
    copied: Counter[str] = Counter()
    result: list[NcnnLayer] = []
    for layer in layers:
        for index, blob in enumerate(layer.bottoms):
            if readers[blob] > 1:
                layer.bottoms[index] = f"{blob}_copy{copied[blob]}"
                copied[blob] += 1
        result.append(layer)
        for top in layer.tops:
            if readers[top] > 1:
                copies = [f"{top}_copy{i}" for i in range(readers[top])]
                result.append(NcnnLayer("Split", [top], copies))
    return result
