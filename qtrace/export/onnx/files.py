"""The format ``onnx``: its options, and what is done to a written model before it is the content of files.

Types of weights are chosen by target and processor. OpenVINO computes layers with uint8 weights in float. It
computes a transposed convolution of an input whose zero point is 0 wrong: it leaves out the 128.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

from qtrace import ops
from qtrace.config import backends
from qtrace.errors import ExportError
from qtrace.export.converted import ConvertedGraph, PlainGraph, asks_float16, float_kinds
from qtrace.export.detections import Suppression
from qtrace.export.format import Content, Format
from qtrace.export.onnx.exporter import OnnxOptions, write_model
from qtrace.onnxfile import external_data
from qtrace.onnxfile.kernels import SAFE_BITS, has_large_signed_weights, products_saturate

SATURATING_FILE = (
    "the file is for no runtime in particular (backend generic), and its products of uint8 and int8 saturate "
    "in onnxruntime and OpenVINO on x86 processors without VNNI: prepare for the runtime that it is for, "
    "export with weights=uint8, or give weights 7 bits."
)
"""What is said of a file with 8-bit weights for an unknown processor."""

_LOG = logging.getLogger("qtrace")


def stores_unsigned(converted: ConvertedGraph, weights: str) -> bool:
    """Returns whether weights are stored as uint8.

    Raises:
        ExportError: when ``weights`` is no choice, or the target takes signed integers only.
    """
    if weights not in ("auto", "int8", "uint8"):
        raise ExportError(f"weights={weights!r} is no choice of the ONNX export: choose auto, int8 or uint8.")
    if weights == "int8" or isinstance(converted, PlainGraph):
        return False
    if weights == "auto":
        # A dynamic layer multiplies uint8, whatever type the other activations have.
        dynamic = "unsigned_weights" in _cures(converted) and bool(converted.annotation.dynamic)
        return (dynamic or _may_be_unsigned(converted)) and products_saturate()
    name, signed = converted.annotation.backend, _has_signed_activations(converted)
    if signed or backends.get(name).activation.signed:
        raise ExportError(
            f"weights=uint8 is no choice for backend {name} with signed activations, which no runtime "
            "multiplies by unsigned weights: leave it out."
        )
    return True


def _write_unsigned(converted: ConvertedGraph, model: Any, weights: str) -> None:
    """Stores weights as uint8: all of them, or by ``auto`` those whose products may saturate."""
    from qtrace.export.onnx.cures import UnsignedWeights

    slow, stored = "unsigned_in_float" in _cures(converted), UnsignedWeights(model)
    chosen = None
    if weights == "auto":
        chosen = stored.saturating_products()
        if _may_be_unsigned(converted):
            chosen |= stored.saturating(depthwise=not slow) | stored.after_joined_rows()
    if not stored.write(chosen) or weights != "auto":
        return
    if slow:
        _LOG.warning(
            "weights are stored as uint8, which OpenVINO computes in float, since its products of uint8 and "
            "int8 saturate on this processor: prepare with backend/openvino_avx2, whose weights of 7 bits "
            "run on integers. For a processor with VNNI or for ARM, export with weights=int8."
        )
        return
    _LOG.info(
        "weights are stored as uint8, since onnxruntime's products of uint8 and int8 saturate on "
        "this processor; for a processor with VNNI or for ARM, export with weights=int8."
    )


def write_weight_types(converted: ConvertedGraph, model: Any, weights: str, unsigned: bool) -> None:
    """Stores the weights of a model, which are int8, in their types.

    Args:
        converted: the graph of a converted module, or of a plain one.
        model: the model; it is changed in place.
        weights: the option of the export.
        unsigned: what `stores_unsigned` says.
    """
    from qtrace.export.onnx.cures import UnsignedWeights

    if unsigned:
        _write_unsigned(converted, model, weights)
    elif weights == "auto" and _may_be_unsigned(converted):
        stored = UnsignedWeights(model)
        stored.write(stored.after_joined_rows())
    _tell_of_saturation(converted, model, weights)


def _tell_of_saturation(converted: ConvertedGraph, model: Any, weights: str) -> None:
    """Says for which processors int8 weights are wrong that nobody has asked for."""
    if weights != "auto" or isinstance(converted, PlainGraph):
        return
    cures = _cures(converted)
    if cures.isdisjoint(("columns", "unsigned_weights")) or not has_large_signed_weights(model):
        return
    if "unsigned_weights" not in cures:
        _LOG.warning(SATURATING_FILE)
    elif not products_saturate():
        _LOG.info(
            "weights are stored as int8, whose products with uint8 do not saturate on this processor; for "
            "x86 without VNNI, export with weights=uint8."
        )


def kinds_in_float(converted: ConvertedGraph) -> frozenset[str]:
    """Returns the kinds of layers whose weights OpenVINO needs as floats, as it computes uint8 ones wrong."""
    if "unsigned_in_float" not in _cures(converted):
        return frozenset()
    kind = "conv_transpose2d"
    for site in converted.sites:
        if site.sort == "weight" and site.qparams.scheme.bits > SAFE_BITS:
            calls = [ops.read(expr) for expr in site.consumers]
            if any(call is not None and call.kind == kind for call in calls):
                return frozenset({kind})
    return frozenset()


def _may_be_unsigned(converted: ConvertedGraph) -> bool:
    """Returns whether the target of a converted module multiplies its activations by uint8 weights."""
    return "unsigned_weights" in _cures(converted) and not _has_signed_activations(converted)


def _cures(converted: ConvertedGraph) -> frozenset[str]:
    """Returns what the files of the graph's backend need; nothing for a float file."""
    if isinstance(converted, PlainGraph):
        return frozenset()
    return backends.get(converted.annotation.backend).cures


def _has_signed_activations(converted: ConvertedGraph) -> bool:
    """Returns whether an activation is signed: runtimes do not multiply those by unsigned weights."""
    return any(site.qparams.scheme.signed for site in converted.sites if site.sort == "activation")


@dataclass(frozen=True)
class FileOptions:
    """The options of an ONNX file that a user has.

    Attributes:
        packed: whether weights of 4 bits and less are stored two in a byte, which needs opset 21. Otherwise
            they are int8 values of a small range, for which runtimes have integer kernels.
        external: whether tensors are in a file of their own; None: if the model exceeds 2 GB, the most that
            one file holds.
        allow_float: kinds of layers, such as ``conv2d``, whose weights and biases are stored as floats, so
            that runtimes compute the layer in float. These are the floats that the graph rounded to.
        opset: the opset of the file, from 13 to 21. None for the opset of the imported file, or the lowest
            that its ops and types need. In a float file, LayerNorm is one node from opset 17 on, and
            GroupNorm from 21 on.
        input_names: names for all inputs of the file, in order; None for the traced arguments' names.
        output_names: names for all outputs of the file, in order; None for the nodes' names.
        preprocess: whether the file takes uint8 pixels (N, H, W, C) and normalizes them itself, as the recipe
            says. Images are resized before.
        nms: how the file of a detector chooses boxes, as a mapping of `Suppression`; None for only the
            outputs of the graph. The boxes are further outputs.
        weights: the type of the integers of weights: ``int8``; ``uint8`` with zero point 128, the same
            numbers, for which onnxruntime has exact kernels on every processor. Or ``auto``: ``uint8`` for
            weights of more than 7 bits if products of uint8 and int8 saturate on this processor (x86 without
            VNNI) in the target's runtime (onnxruntime, OpenVINO). Weights of
            `UnsignedWeights.after_joined_rows` are ``uint8``, too; others are ``int8``. With ``uint8``,
            openvino gets the weights of transposed convolutions as floats.
        amx: whether layers on integers get as many columns as onnxruntime 1.21 to 1.24 computes right on
            processors with AMX, as `write_whole_columns` does. None: for backends onnxruntime and generic, if
            such a version is installed here on such a processor.
        float: the type of what stays float: ``fp32``; ``fp16`` for float16 where the calibrated ranges allow
            it; None for what the recipe says. Inputs and outputs keep their types.
    """

    packed: bool = False
    external: bool | None = None
    allow_float: Iterable[str] = ()
    opset: int | None = None
    input_names: Iterable[str] | None = None
    output_names: Iterable[str] | None = None
    preprocess: bool = False
    nms: Any = None
    weights: str = "auto"
    amx: bool | None = None
    float: str | None = None

    def __post_init__(self) -> None:
        for name in ("packed", "external", "preprocess", "amx"):
            value = getattr(self, name)
            if not (isinstance(value, bool) or (name in ("external", "amx") and value is None)):
                raise ExportError(f"{name}={value!r} is no choice of the ONNX export: choose true or false.")
        if self.opset is not None and (type(self.opset) is not int or not 13 <= self.opset <= 21):
            raise ExportError(
                f"opset={self.opset!r} is no choice of the ONNX export: choose one from 13 to 21."
            )


def files(converted: ConvertedGraph, path: Path, **options: Any) -> dict[Path, Content]:
    """Returns a module as an ONNX file and, if it is large, a file with its tensors.

    Args:
        converted: the graph of a converted module, or of a plain one, which is written in float.
        path: the path of the model; the file of its tensors has that name with ``.data`` after it.
        **options: fields of `FileOptions`.

    Raises:
        ExportError: when ONNX cannot express a node or rounds in another way, naming it, an option is
            an unknown value, or onnx is not installed.
    """
    chosen = FileOptions(**options)
    writing = OnnxOptions(
        chosen.packed,
        float_kinds(chosen.allow_float),
        chosen.opset,
        (chosen.input_names, chosen.output_names),
        chosen.preprocess,
        None if chosen.nms is None else Suppression.of(chosen.nms),
        float16=asks_float16(converted, chosen.float),
    )
    return files_with(writing, converted, path, chosen.weights, chosen.external, chosen.amx)


def files_with(
    options: OnnxOptions,
    converted: ConvertedGraph,
    path: Path,
    weights: str = "auto",
    external: bool | None = None,
    amx: bool | None = None,
) -> dict[Path, Content]:
    """Returns what `files` does, by options of the exporter that users do not all have."""
    unsigned = stores_unsigned(converted, weights)
    if unsigned:
        options = replace(options, floats=options.floats | kinds_in_float(converted))
    exporter, model = write_model(converted, options)
    from qtrace.export.onnx.cures import cure
    from qtrace.export.onnx.finished import write_computed, write_integer_tables

    cures = _cures(converted)
    cure(model, cures, amx)
    if exporter.writer.version_change:
        _LOG.info(exporter.writer.version_change)
    write_weight_types(converted, model, weights, unsigned)
    cure(model, cures, amx, after="types")
    if options.float16:
        from qtrace.export.onnx.finished import write_float16

        write_float16(model, exporter.writer.float16_tensors, exporter.tensor_types())
    cure(model, cures, amx, after="floats")
    opened = "held_floats" in cures  # by onnxruntime
    write_computed(model, exporter, integers=opened)
    if opened or isinstance(converted, PlainGraph):
        write_integer_tables(model)
    check(model)
    return contents_of(model, path, external)


def contents_of(model: Any, path: Path, external: bool | None = None) -> dict[Path, Content]:
    """Returns a model as the contents of its files.

    Args:
        model: the model, which must not be changed until the files are written.
        path: its path; the file of its tensors has that name with ``.data`` after it.
        external: whether its large tensors are in a file of their own; None: if one file cannot hold them.

    Raises:
        ExportError: when the model is too large for one file, and ``external`` is False.
    """
    import onnx

    size, beside = external_data.tensor_bytes(model), path.with_name(f"{path.name}.data")
    too_large = external is None and size >= external_data.LIMIT
    if external is False and size > onnx.checker.MAXIMUM_PROTOBUF:
        raise ExportError(
            f"{path.name} would have {size / 1e9:.1f} GB of tensors, more than one ONNX file holds: leave "
            "out external=false."
        )
    if external or too_large:
        light, pieces = external_data.split_off(model, beside.name)
        if light is not model:
            if external is None:
                _LOG.warning(
                    f"{path.name} has {size / 1e9:.1f} GB of tensors, more than one ONNX file holds: "
                    f"they are in {beside.name}, which stays next to it. A copy of {path.name} reads the "
                    f"{beside.name} next to the copy: copy both into a folder of their own, since another "
                    f"export to {path.name} changes what a copy here computes."
                )
            return {beside: pieces, path: bytes(light.SerializeToString())}
    return {path: bytes(model.SerializeToString())}


FORMAT = Format(
    "onnx",
    files,
    suffixes=(".onnx",),
    options=tuple(field.name for field in fields(FileOptions)),
    float_options=("external", "opset", "input_names", "output_names", "nms"),
    has_composites=True,
    float_types=("fp32", "fp16"),
)


def check(model: Any) -> None:
    """Refuses a model that is not valid ONNX.

    Raises:
        ExportError: with the first line of the checker's message.
    """
    import onnx

    skeleton, full = external_data.skeleton(model), True
    for value in skeleton.graph.output:
        if not value.type.tensor_type.HasField("shape"):  # values decide the number of axes
            value.type.tensor_type.shape.SetInParent()
            full = False
    try:
        onnx.checker.check_model(skeleton, full_check=full)
    except (onnx.checker.ValidationError, onnx.shape_inference.InferenceError) as error:
        line = str(error).strip().splitlines()[0]
        raise ExportError(
            f"the graph makes no valid ONNX model: {line}. End the graph before the op that it names."
        ) from error
