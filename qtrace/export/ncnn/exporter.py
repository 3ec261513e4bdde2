"""ncnn: ``.param`` and ``.bin`` with convolutions and linear layers of 8 bits, the rest in float.

For modules that were prepared for backend ncnn: integers from -127 to 127, ties away from zero. Where a
value is rounded there is a blob ``SITE_int`` with its integers; a convolution whose result is only read as
integers gives them itself. A net computes one sample. Inputs have the names of the traced arguments, outputs
those of the nodes that compute them.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import numpy as np
from megengine import Tensor

from qtrace import ops
from qtrace.errors import ExportError
from qtrace.export.converted.allow_float import float_kinds, only_floats_read
from qtrace.export.converted.located import refusal, site_expr
from qtrace.export.converted.values import input_names, integer_values
from qtrace.export.ncnn.fuse import fuse_activations, fuse_roundings, sinks, split_branches
from qtrace.export.ncnn.ops import EMITTERS
from qtrace.export.ncnn.writer import Layer, NcnnWriter, Rounded, Weight
from qtrace.fakequant.base import FakeQuant
from qtrace.fakequant.following.bias import BiasQuant
from qtrace.graph.types import Constant, Expr, GetAttr, TensorNode, TracedModule
from qtrace.graph.walk import exprs, is_float_tensor, owner
from qtrace.numerics import dequantize, quantize
from qtrace.preparation.annotation import Site
from qtrace.preparation.passes.insert import CONTAINER
from qtrace.preparation.record import carried_qparams, read_record
from qtrace.scheme import QScheme

__all__ = ["COMPANIONS", "SUFFIXES", "files"]

SUFFIXES = (".param",)
COMPANIONS = (".bin",)


def files(converted: TracedModule, path: Path, allow_float: Iterable[str] = ()) -> dict[Path, bytes]:
    """The net and its weights.

    Args:
        converted: a module made by ``qtrace.convert``.
        path: the ``.param``; the weights stand beside it, with the suffix ``.bin``.
        allow_float: kinds of layers, such as ``conv2d``, that compute in float, with weights that the graph
            rounded: in any way, also one that ncnn's int8 layers cannot express.

    Raises:
        ExportError: when a node has no ncnn form or rounds in another way than ncnn, naming it.
    """
    if path.suffix == ".bin":
        raise ExportError(f"{path.name} is the name of the weights: name the net with the suffix .param.")
    writer = _Exporter(converted, float_kinds(allow_float)).run()
    return {path.with_suffix(".bin"): writer.bin(), path: writer.param()}


class _Exporter:
    def __init__(self, converted: TracedModule, floats: frozenset[str]) -> None:
        self.model, self.floats = converted, floats
        self.annotation = read_record(converted, "converted").annotation
        self.container = getattr(converted, CONTAINER)
        self.sites = {f"{s.name}_q": s for s in self.annotation.sites}
        self.carried = carried_qparams(converted, self.annotation)
        inputs = converted.graph.inputs[1:]
        self.writer = NcnnWriter(int(inputs[0].shape[0]) if inputs and inputs[0].shape else 1)

    def run(self) -> NcnnWriter:
        """The writer with all layers."""
        w = self.writer
        for node, name in zip(self.model.graph.inputs[1:], input_names(self.model), strict=True):
            w.shape(node)
            w.names[node] = w.layer("Input", [], name)
        for expr in exprs(self.model):
            self._emit(expr)
        outputs = self._outputs()
        w.layers += sinks(w.layers, outputs)
        w.layers = fuse_activations(w.layers, outputs)
        w.layers = fuse_roundings(w.layers, outputs)
        w.layers = split_branches(w.layers)
        return w

    def _emit(self, expr: Expr) -> None:
        w, node = self.writer, expr.outputs[0]
        if isinstance(expr, (GetAttr, Constant)):
            if isinstance(node, TensorNode):
                value = expr.interpret(self.model) if isinstance(expr, GetAttr) else (expr.value,)
                w.values[node] = value[0].numpy()
            return
        try:
            if isinstance(owner(expr), (FakeQuant, BiasQuant)):
                self._emit_site(node, expr.args[1], self.sites[node.name])
            elif any(is_float_tensor(n) for n in expr.outputs):
                self._emit_op(expr)
        except ExportError as error:
            about = site_expr(expr.args[1], node) if node.name in self.sites else expr
            raise refusal(f"{node.name}: {error}", about) from error

    def _emit_op(self, expr: Expr) -> None:
        w, call = self.writer, ops.read(expr)
        if call is None or call.kind not in EMITTERS:
            raise ExportError(
                "it has no ncnn form: end the graph before it, or write it with ops that have one"
            )
        w.moving = expr.outputs[0].name in self.carried
        EMITTERS[call.kind](w, call)
        w.moving = False
        for node in expr.outputs:
            qparams = self.carried.get(node.name)
            if qparams is not None:
                w.rounded[node] = Rounded(node.name, qparams)

    def _emit_site(self, out: TensorNode, source: TensorNode, site: Site) -> None:
        w, value = self.writer, self.writer.value(source)
        if site.sort == "bias":
            w.values[out] = self._bias(site, value)
            return
        module = getattr(self.container, site.group)
        if site.sort == "weight":
            if value is None:
                raise ExportError(
                    "its weight is computed, and ncnn stores weights in the file: set quantize: false "
                    "for its layer"
                )
            self._weight(out, site, module, value)
        elif value is not None:
            w.values[out] = dequantize(quantize(value, module.qparams()), module.qparams())
        else:
            _check(site.name, module.scheme, 8)
            w.names[out] = w.name(source)
            w.rounded[out] = Rounded(site.name, module.qparams())
            w.integer_blob(out)

    def _weight(self, out: TensorNode, site: Site, module: FakeQuant, value: np.ndarray) -> None:
        if only_floats_read(out, self.floats):
            self.writer.values[out] = module(Tensor(value)).numpy()
            return
        _check(site.name, module.scheme, module.scheme.bits, ", or name the kind of its layer in allow_float")
        qparams, axes = module.qparams(), site.channel_axes
        stored = integer_values(module, value).astype(np.int8)
        shape = [n if i in axes else 1 for i, n in enumerate(value.shape)]
        scale = qparams.scale.reshape(shape) if qparams.scale.ndim else qparams.scale
        means = (stored * scale).astype(np.float32)
        self.writer.weights[out] = Weight(stored, qparams.scale, means)
        self.writer.values[out] = means

    def _bias(self, site: Site, value: np.ndarray | None) -> np.ndarray:
        """What the graph adds: ncnn has biases in float, so the rounded one is exact enough."""
        if value is None:
            raise ExportError(
                "its bias is computed, and ncnn stores biases in the file: set quantize: false for its layer"
            )
        groups = (getattr(self.container, g) for g in (site.activation, site.weight))
        scale = getattr(self.container, site.group).scale(*groups)[0].numpy().astype(np.float64)
        steps = value.astype(np.float64) / scale
        return (np.sign(steps) * np.floor(np.abs(steps) + 0.5) * scale).astype(np.float32)

    def _outputs(self) -> set[str]:
        """Gives the outputs names of their own, in the order of the graph's."""
        w, taken = (
            self.writer,
            {top for layer in self.writer.layers if layer.kind == "Input" for top in layer.tops},
        )
        nodes = self.model.graph.outputs
        blobs = [w.name(node) for node in nodes]
        found: set[str] = set()
        for node, blob in zip(nodes, blobs, strict=True):
            site = self.sites.get(node.name)
            wanted = node.name if site is None else site.node
            if len(nodes) == 1 and blob == wanted and not any(blob in layer.bottoms for layer in w.layers):
                return {blob}
            wanted = f"{wanted}_output" if wanted in taken | found else wanted
            _rename(w.layers, wanted, f"{wanted}_float")
            blob = f"{wanted}_float" if blob == wanted else blob
            w.layers.append(Layer("Noop", [blob], [wanted]))
            found.add(wanted)
        return found


def _rename(layers: list[Layer], old: str, new: str) -> None:
    for layer in layers:
        layer.bottoms = [new if b == old else b for b in layer.bottoms]
        layer.tops = [new if t == old else t for t in layer.tops]


def _check(site: str, scheme: QScheme, bits: int, otherwise: str = "") -> None:
    """Refuses what ncnn's integers are not; ``otherwise`` is what else helps."""
    reason = ""
    if scheme.bits != bits or bits > 8:
        reason = "its integers have 8 bits"
    elif not scheme.symmetric or not scheme.signed:
        reason = "its integers are signed and symmetric"
    elif scheme.bits == 8 and not scheme.narrow:
        reason = "its integers begin at -127"
    elif scheme.rounding != "half_away":
        reason = "it rounds half away from zero"
    if reason:
        raise ExportError(
            f"site {site} is {scheme.describe()}, which ncnn does not compute ({reason}): prepare the module "
            f"with the recipe backend/ncnn{otherwise}"
        )
