"""The roundings of a converted graph, which its document keeps as attributes of the nodes that read them.

``qparams_input_0`` and so on give the site, scheme, scale and zero point of a tensor. ``roundings`` says
where values are rounded to them: key of a tensor of the node -> the sites in order, each with the shape of
its scales, such as ``{"input_0": [["x", []]], "weight": [["conv_weight", [8, 1, 1, 1]]]}``.
"""

from __future__ import annotations

import json
import math
import re
from typing import Any

import numpy as np
from megengine import Tensor

from qtrace.errors import GraphError, SchemeError
from qtrace.fakequant.fixed import FixedFakeQuant
from qtrace.fakequant.following.bias import BiasQuant
from qtrace.graph.builder import GraphBuilder
from qtrace.graph.types import TensorNode
from qtrace.scheme import QParams, QScheme
from qtrace.targets.msc.document import MSCGraph, MSCNode

__all__ = ["BIAS_SCHEME", "Roundings"]

BIAS_SCHEME = "int32 sym"
"""The scheme of biases in documents: integers at the product of two scales."""

_CONTAINER = "qsites"
_WORDS = re.compile(
    r"(u?)int(\d{1,2}) (sym|affine)(?: per-channel\((-?\d{1,2})\))?( narrow)?( pow2)?(?: (half-\w+))?\Z"
)


class Roundings:
    """Puts the fake quants of a document into the graph that is built from it.

    Args:
        graph: the document.
        builder: builds the graph.
    """

    def __init__(self, graph: MSCGraph, builder: GraphBuilder) -> None:
        self._builder = builder
        self._parameters: dict[str, dict[str, Any]] = {}  # site -> its parameters in the document
        self._texts: dict[MSCNode, dict[str, Any]] = {}
        self._rounded: dict[tuple[TensorNode, str], TensorNode] = {}
        self._shapes: dict[str, tuple[int, ...]] = {}
        for node in graph.nodes:
            for key, text in node.attrs.items():
                if key.startswith("qparams_") and '"site"' in text:
                    self._remember(text)

    def _remember(self, text: str) -> None:
        try:
            parameters = json.loads(text)
            self._parameters.setdefault(parameters["site"], parameters)
        except (ValueError, LookupError, TypeError, RecursionError):  # where it is needed it is missed
            return

    def apply(self, node: MSCNode, key: str, value: TensorNode) -> TensorNode:
        """Returns the node of a value as ``node`` reads it: rounded, or as it is.

        Args:
            node: the reader.
            key: ``input_0`` and so on, the type of a weight, or ``graph_output_0`` and so on.
            value: the node of the value.

        Raises:
            GraphError: when the attributes do not say how it is rounded; the message is a clause.
        """
        for site, shape in self._steps(node, key):
            parameters = self._known(site)
            if parameters.get("scheme") == BIAS_SCHEME:
                continue  # `stored_value` has rounded it
            if (value, site) not in self._rounded:
                path = f"{_CONTAINER}.{site}"
                if site not in self._shapes:
                    self._builder.add_module(path, _fake_quant(site, parameters, shape))
                    self._shapes[site] = shape
                elif self._shapes[site] != shape:
                    raise GraphError(f"site {site} has scales of the shapes {self._shapes[site]} and {shape}")
                rounded = self._builder.call_module(path, None, value, name=f"{site}_q")
                self._rounded[value, site] = rounded
            value = self._rounded[value, site]
        return value

    def stored_value(self, node: MSCNode, key: str, value: np.ndarray) -> np.ndarray:
        """Returns a stored tensor as the module stores it: a bias that is rounded to integers is so already.

        Args:
            node: the reader.
            key: the type of the weight.
            value: the float value.

        Raises:
            GraphError: when the attributes do not say how it is rounded; the message is a clause.
        """
        for site, shape in self._steps(node, key):
            parameters = self._known(site)
            if parameters.get("scheme") != BIAS_SCHEME:
                continue
            scale = _numbers(parameters.get("scale"), site)
            fits = scale.ndim == 0 or scale.size == math.prod(shape)
            if value.dtype != np.float32 or not fits or value.shape != shape:
                raise GraphError(
                    f"site {site} has {scale.size} scales for a bias of shape {list(value.shape)}"
                )
            # As with one scale per tensor, or one per channel, of input and weight.
            ones = np.ones((1, 1) if scale.ndim else (), np.float32)
            product = scale.reshape(shape) if scale.ndim else scale
            value = BiasQuant(site, shape).quantize(Tensor(value), Tensor(product), Tensor(ones)).numpy()
            value = value.reshape(shape)
        return value

    def _known(self, site: str) -> dict[str, Any]:
        if site not in self._parameters:
            raise GraphError(f"it is rounded at site {site!r}, whose scale is nowhere in the document")
        return self._parameters[site]

    def _steps(self, node: MSCNode, key: str) -> list[tuple[str, tuple[int, ...]]]:
        if "roundings" not in node.attrs:
            return []
        try:
            if node not in self._texts:
                self._texts[node] = dict(json.loads(node.attrs["roundings"]))
            pairs = [(site, tuple(shape)) for site, shape in self._texts[node].get(key, [])]
            known = all(isinstance(s, str) and re.fullmatch(r"\w+", s) for s, _ in pairs)
        except (ValueError, TypeError, RecursionError) as error:
            raise GraphError(f"its attribute 'roundings' is damaged ({type(error).__name__})") from error
        if not known or any(type(n) is not int or n < 0 for _, shape in pairs for n in shape):
            raise GraphError("its attribute 'roundings' lacks sites with shapes")
        return pairs


def _fake_quant(site: str, parameters: dict[str, Any], shape: tuple[int, ...]) -> FixedFakeQuant:
    try:
        scheme = read_scheme(parameters.get("scheme"))
        zero_point = np.asarray(parameters.get("zero_point"))
        qparams = QParams(scheme, _numbers(parameters.get("scale"), site), zero_point)
        fake_quant = FixedFakeQuant(site, scheme, shape=shape)
        fake_quant.set_qparams(qparams)
    except (SchemeError, ValueError) as error:
        raise GraphError(str(error).rstrip(".")) from error
    fake_quant.phase = "quantize"
    return fake_quant


def _numbers(value: Any, site: str) -> np.ndarray:
    try:
        scale = np.asarray(value, np.float32)
    except (ValueError, TypeError):
        scale = np.zeros(0, np.float32)
    if scale.ndim > 1 or not scale.size or not np.all(np.isfinite(scale) & (scale > 0)):
        raise GraphError(f"site {site} lacks a scale of positive numbers")
    return scale


def read_scheme(words: Any) -> QScheme:
    """Reads what `QScheme.describe` writes.

    Raises:
        GraphError: when the words describe no scheme; the message is a clause.
    """
    match = _WORDS.match(words) if isinstance(words, str) else None
    if match is None:
        raise GraphError(f"{ascii(words)[:60]} describes no scheme")
    unsigned, bits, kind, axis, narrow, pow2, rounding = match.groups()
    try:
        return QScheme(
            bits=int(bits),
            signed=not unsigned,
            symmetric=kind == "sym",
            narrow=bool(narrow),
            axis=None if axis is None else int(axis),
            power_of_two=bool(pow2),
            rounding=(rounding or "half_even").replace("-", "_"),  # type: ignore[arg-type]
        )
    except SchemeError as error:
        raise GraphError(str(error).rstrip(".")) from error
