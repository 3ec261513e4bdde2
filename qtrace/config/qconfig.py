"""QConfig: all settings of ``prepare``."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, Field, PrivateAttr, field_validator, model_validator

from qtrace.config import backends
from qtrace.config.rule import (
    AlgorithmSpec,
    FakeQuantSpec,
    FloatType,
    Method,
    Observers,
    Placement,
    Rule,
    SchemePatch,
    Spec,
    known_backend,
)
from qtrace.display import Displayed
from qtrace.plugins.options import Bool, Float, Int, OptionModel, Text, Texts, show

MOST_PIXELS = 2**28
"""268 million pixels, 0.75 GiB in colour; a PNG of a few kilobytes can ask for a thousand times as much."""
_NUMBERED = re.compile(r"rules\[\d+\]")


def _none_as_list(value: Any) -> Any:
    return () if value is None else value  # `rules:` with every rule commented out


def _none_as_mapping(value: Any) -> Any:
    return {} if value is None else value


# The mean of ImageNet's training images, blue first.
_IMAGENET_BGR = (103.53, 116.28, 123.675)


def _positive(values: Iterable[float]) -> Any:
    values = tuple(values)
    if not all(value > 0 for value in values):
        raise ValueError("every number must be greater than 0.")
    return values


class Preprocess(OptionModel):
    """The conversion of an image's pixels to the model's input: ``(pixel * scale - mean) / std``.

    Pixels are 0 to 255, in the order of ``channels``; mean and std are in that order too.

    Attributes:
        size: channels (1 for grey, or 3), height and width of the input.
        mean: one number per channel.
        std: one number per channel.
        channels: the model's order of channels; images are decoded as bgr.
        scale: factor for the pixels; ``0.00392156862745098`` (1/255) if mean and std assume pixels up to 1.
        resize: ``stretch`` resizes to height and width. ``center_crop`` keeps the aspect: it resizes the
            image until it just covers height and width divided by ``crop_fraction``, and cuts out the middle.
            ``letterbox`` keeps the aspect, too: it resizes the image until it just fits in, and fills up the
            rest.
        crop_fraction: for ``center_crop``; 0.875 is 224 of 256.
        fill: for ``letterbox``, the value of the pixels that are filled up, 0 to 255.
        fill_at: for ``letterbox``, where they are: on both sides, ``around`` the image, or at its ``end``, to
            the right and below, as YOLOX has it.
        interpolation: the interpolation of resizing, as in OpenCV.
        layout: the axes of uint8 arrays of pixels: ``nchw``, or ``nhwc`` for channels last.

    Example:
        ```yaml
        size: [3, 224, 224]
        mean: [123.675, 116.28, 103.53]
        std: [58.395, 57.12, 57.375]
        channels: rgb
        scale: 1.0
        resize: center_crop
        crop_fraction: 0.875
        interpolation: linear
        ```

        ```yaml
        size: [3, 416, 416]
        mean: [0, 0, 0]
        std: [1, 1, 1]
        resize: letterbox
        fill: 114
        fill_at: end
        layout: nhwc
        ```
    """

    size: Annotated[tuple[Int, ...], AfterValidator(_positive)]
    mean: tuple[Float, ...]
    std: Annotated[tuple[Float, ...], AfterValidator(_positive)]
    channels: Literal["bgr", "rgb"] = "bgr"
    scale: Annotated[Float, Field(gt=0)] = 1.0
    resize: Literal["stretch", "center_crop", "letterbox"] = "stretch"
    crop_fraction: Annotated[Float, Field(gt=0, le=1)] = 0.875
    fill: Annotated[Int, Field(ge=0, le=255)] = 114
    fill_at: Literal["around", "end"] = "around"
    interpolation: Literal["nearest", "linear", "cubic", "area"] = "linear"
    layout: Literal["nchw", "nhwc"] = "nchw"

    @model_validator(mode="after")
    def _agree(self) -> Preprocess:
        if len(self.size) != 3 or self.size[0] not in (1, 3):
            raise ValueError("size must be [channels, height, width] with 1 or 3 channels.")
        if self.size[1] * self.size[2] > MOST_PIXELS:
            raise ValueError(f"size asks for more than {MOST_PIXELS >> 20} million pixels.")
        for name in ("mean", "std"):
            count = len(getattr(self, name))
            if count != self.size[0]:
                raise ValueError(f"{name} has {count} numbers for {self.size[0]} channels.")
        for name, resize in (
            ("crop_fraction", "center_crop"),
            ("fill", "letterbox"),
            ("fill_at", "letterbox"),
        ):
            if name in self.model_fields_set and self.resize != resize:
                raise ValueError(f"{name} does nothing with resize: {self.resize}.")
        return self

    def describe(self) -> str:
        """Returns in a sentence without its end what becomes of a pixel and of an image."""
        mean, std = (", ".join(f"{n:g}" for n in numbers) for numbers in (self.mean, self.std))
        channels = "grey" if self.size[0] == 1 else self.channels
        scale = "" if self.scale == 1 else f" * {self.scale:g}"
        text = (
            f"(pixel{scale} - [{mean}]) / [{std}], {channels}, {self.resize} to {self.size[1]}x{self.size[2]}"
        )
        if self.channels == "bgr" and self.mean == _IMAGENET_BGR and self.scale == 1:
            text += ", which is BGR ImageNet, as MegEngine's own classifiers were trained"
        return text


class Bn(OptionModel):
    """The treatment of batch normalization in training.

    Attributes:
        fold: fold it into the weights before training.
        freeze_after: the fraction of the training (0 to 1) after which its statistics stay, for
            ``qtrace.qat.Schedule``; None for never.

    Example:
        ```yaml
        fold: false
        freeze_after: 0.5
        ```
    """

    fold: Bool = True
    freeze_after: Annotated[Float, Field(ge=0, le=1)] | None = None


class Qat(OptionModel):
    """Quantization-aware training.

    Attributes:
        fakequant: the fake quant that trains.
        epochs: number of epochs.
        lr: learning rate at the start.
        bn: treatment of batch normalization.

    Example:
        ```yaml
        fakequant: lsq
        epochs: 10
        lr: 0.001
        bn: {fold: true}
        ```
    """

    fakequant: FakeQuantSpec | None = None
    epochs: Annotated[Int, Field(gt=0)] | None = None
    lr: Annotated[Float, Field(gt=0)] | None = None
    bn: Bn = Bn()


class Expect(OptionModel):
    """What the quantized model must reach; `calibrate`, `export` and `bench` check it.

    Attributes:
        metric: name of the metric, such as ``top1``.
        max_drop: the largest drop below the float model, in the metric's unit.
        min_sqnr: the least SQNR of any column group of the outputs against the float model, in dB.
        max_megabytes: the largest size of the parameters, or of the exported file; a MB is 2**20 bytes.
        max_milliseconds: the longest time of one run, predicted or measured.

    Example:
        ```yaml
        metric: top1
        max_drop: 0.5
        min_sqnr: 20
        max_megabytes: 4
        max_milliseconds: 2.5
        ```
    """

    metric: Text | None = None
    max_drop: Annotated[Float, Field(ge=0)] | None = None
    min_sqnr: Float | None = None
    max_megabytes: Annotated[Float, Field(gt=0)] | None = None
    max_milliseconds: Annotated[Float, Field(gt=0)] | None = None

    @model_validator(mode="after")
    def _whole(self) -> Expect:
        if (self.metric is None) != (self.max_drop is None):
            raise ValueError("metric and max_drop belong together: give both, or none of them.")
        if all(value is None for value in vars(self).values()):
            raise ValueError(f"it lacks a limit: give {', '.join(type(self).model_fields)}.")
        return self


class Region(OptionModel):
    """The part of the graph that is quantized; the rest stays float.

    Attributes:
        inputs: glob patterns for the nodes or modules where it begins, which lie inside; None for the
            graph's inputs.
        outputs: glob patterns for the nodes or modules where it ends, which lie inside; None for the
            graph's outputs.

    Example:
        ```yaml
        inputs: backbone
        outputs: [head.cls, head.reg]
        ```
    """

    inputs: Texts | None = None
    outputs: Texts | None = None


class QConfig(Displayed, OptionModel):
    """The settings of a quantization. Without arguments: the recipe ``int8``, for onnxruntime.

    Nested values may be given as plain data: ``QConfig(observers={"activation": "mse"}, fakequant="lsq")``.

    Attributes:
        name: a name for reports.
        description: a sentence about it.
        backend: the target, whose schemes the other settings change.
        preprocess: conversion of images to inputs.
        activation: changes to the backend's scheme of activations, for every op.
        weight: changes to the backend's scheme of weights, for every op.
        observers: the observers of activations and weights.
        fakequant: the fake quant that is inserted.
        rules: changes for some ops; a later rule wins, and one that matches nothing is an error in `prepare`.
        region: the part of the graph that is quantized; None for all of it.
        placement: which ops run on integers where the backend has measured times: ``everything`` that can,
            the ``fastest`` choice, or the ``balanced`` one, which weighs time against noise at the outputs.
            The last two never spoil an output, and leave in float what gains neither time nor size.
        method: how a layer with a weight is quantized: ``static`` rounds what it reads by scales of the
            calibration; ``dynamic`` rounds it by the range of each batch, and ``weight_only`` rounds only the
            weight. With the last two, everything but the layers stays in float. None for ``static``.
        float: the type of what stays float in ONNX files: ``fp32``, or ``fp16``, which is float16 where the
            ranges of the calibration allow it. None for ``fp32``.
        cost_table: the file of times that ``placement`` goes by, which ``python -m benchmarks.kernels``
            measures on the device; its path is relative to the recipe. None for the backend's packaged table.
        ptq: algorithms applied after training, with their options, in order; None for fuse_bn.
        qat: settings of the training.
        expect: the accuracy, size and time that the result must reach.

    Example:
        ```yaml
        name: mine
        description: ResNet for faces
        backend: onnxruntime
        preprocess: {size: [3, 224, 224], mean: [0, 0, 0], std: [1, 1, 1]}
        activation: {bits: 8}
        weight: {bits: 4, axis: 0}
        observers: {activation: mse, weight: minmax}
        fakequant: lsq
        rules: [{match: {position: first}, weight: {bits: 8}}]
        region: {outputs: head}
        placement: balanced
        method: static
        float: fp16
        cost_table: device.json
        ptq: [fuse_bn, bias_correction]
        qat: {epochs: 10}
        expect: {metric: top1, max_drop: 0.5}
        ```

    Raises:
        ConfigError: with a line for each mistake.
    """

    name: Text | None = None
    description: Text | None = None
    backend: Annotated[Text, AfterValidator(known_backend)] = "onnxruntime"
    preprocess: Preprocess | None = None
    activation: SchemePatch | None = None
    weight: SchemePatch | None = None
    observers: Annotated[Observers, BeforeValidator(_none_as_mapping)] = Observers()
    fakequant: FakeQuantSpec | None = None
    rules: Annotated[tuple[Rule, ...], BeforeValidator(_none_as_list)] = ()
    region: Region | None = None
    placement: Placement | None = None
    method: Method | None = None
    float: FloatType | None = None
    cost_table: Text | None = None
    ptq: tuple[AlgorithmSpec, ...] | None = None
    qat: Qat | None = None
    expect: Expect | None = None
    _origin: str = PrivateAttr("QConfig")
    _places: dict[str, str] = PrivateAttr(default_factory=dict)
    _sources: Any = PrivateAttr(None)

    @property
    def origin(self) -> str:
        """The file of the config, or ``QConfig``; it does not count for equality."""
        return self._origin

    @property
    def activation_observer(self) -> Spec:
        """The observer of activations; ``mse`` unless given."""
        return self.observers.activation or Spec(name="mse")

    @property
    def weight_observer(self) -> Spec:
        """The observer of weights; ``minmax`` unless given."""
        return self.observers.weight or Spec(name="minmax")

    @property
    def effective_fakequant(self) -> Spec:
        """The fake quant, from ``fakequant`` or ``qat.fakequant``; ``fixed`` unless given."""
        trained = self.qat.fakequant if self.qat is not None else None
        return self.fakequant or trained or Spec(name="fixed")

    @property
    def effective_placement(self) -> Placement:
        """The placement of ops that no rule changes; ``everything`` unless given."""
        return self.placement or "everything"

    @property
    def effective_method(self) -> Method:
        """The method for layers that no rule changes; ``static`` unless given."""
        return self.method or "static"

    @property
    def effective_float(self) -> FloatType:
        """The type of what stays float; ``fp32`` unless given."""
        return self.float or "fp32"

    @property
    def ptq_entries(self) -> tuple[tuple[int, Spec], ...]:
        """The algorithms with their indices in ``ptq``, without fuse_bn if ``qat.bn.fold`` is false."""
        listed = (Spec(name="fuse_bn"),) if self.ptq is None else self.ptq
        folds = self.qat is None or self.qat.bn.fold
        return tuple((i, spec) for i, spec in enumerate(listed) if folds or spec.name != "fuse_bn")

    def _text(self, max_width: int | None) -> str:
        """Returns what is set, as a recipe writes it."""
        from qtrace.config.tree import dump  # here: it loads yaml

        settings = self.to_dict()
        origin = "" if self._origin == type(self).__name__ else f" of {self._origin}"
        text = dump(settings, flow=None) if settings else "as the backend has it"
        return f"{type(self).__name__}{origin}\n{text}"

    def __str__(self) -> str:
        return repr(self)

    def place(self, *keys: str) -> str:
        """Returns ``FILE:LINE`` of the first of ``keys`` that a file has, else `origin`.

        Args:
            *keys: dotted keys, such as ``observers.activation``.
        """
        return next((self._places[key] for key in keys if key in self._places), self._origin)

    def option_place(self, *keys: str) -> str:
        """Returns the place of a plugin's option, else of the plugin.

        Args:
            *keys: dotted keys that may lead to the plugin, and last the name of the option.
        """
        *leading, option = keys
        return self.place(*(f"{key}.{option}" for key in leading), *leading)

    @property
    def weight_bits(self) -> int:
        """The bits of weights of which no rule says others."""
        own = None if self.weight is None else self.weight.bits
        return own or backends.get(self.backend).weight.bits

    def without_placement(self) -> QConfig:
        """Returns a copy of the config that quantizes everything that can run on integers."""
        rules = tuple(rule.model_copy(update={"placement": None}) for rule in self.rules)
        placed = (new.with_origin(rule.origin) for new, rule in zip(rules, self.rules, strict=True))
        changes = {"placement": None, "cost_table": None, "rules": tuple(placed)}
        config = self.model_copy(update=changes)
        config._places = dict(self._places)
        return config

    def with_region(self, region: Region, places: Mapping[str, str]) -> QConfig:
        """Returns a copy of the config with another region.

        Args:
            region: the region.
            places: the places of ``region.inputs`` and ``region.outputs``, for `place`.
        """
        config = self.model_copy(update={"region": region})
        config._places = {**self._places, **places}
        return config

    def with_origin(
        self, origin: str, rules: Iterable[str], places: Mapping[str, str] | None = None
    ) -> QConfig:
        """Returns a copy of the config with the places of a file; its paths no longer depend on the file.

        Args:
            origin: the file.
            rules: ``FILE:LINE`` of each rule.
            places: ``FILE:LINE`` by dotted key, for `place`.
        """
        placed = tuple(rule.with_origin(place) for rule, place in zip(self.rules, rules, strict=True))
        changes: dict[str, Any] = {"rules": placed} if placed else {}
        if self.cost_table is not None and "cost_table" in (places or {}):
            file = (places or {})["cost_table"].rpartition(":")[0]
            changes["cost_table"] = os.path.abspath(os.path.join(os.path.dirname(file), self.cost_table))
        config = self.model_copy(update=changes)
        config._origin, config._places = origin, dict(places or {})
        return config

    @property
    def sources(self) -> Any:
        """What the config was read from, for `qtrace.config.written`; None for one made in Python."""
        return self._sources

    def with_sources(self, sources: Any) -> QConfig:
        """Returns a copy of the config that keeps what it was read from."""
        config = self.model_copy()
        config._sources = sources
        return config

    @classmethod
    def _unnamed(cls, value: Any) -> str:
        return (
            f"QConfig({show(value)}): values are given by name, such as QConfig(backend='onnxruntime'); "
            "a recipe is read by qtrace.load_recipe."
        )

    @field_validator("rules", mode="after")
    @classmethod
    def _number(cls, rules: tuple[Rule, ...]) -> tuple[Rule, ...]:
        """Numbers the rules that come from no file."""
        return tuple(
            rule.with_origin(f"rules[{i}]") if _NUMBERED.fullmatch(rule.origin) else rule
            for i, rule in enumerate(rules)
        )

    @model_validator(mode="after")
    def _one_fakequant(self) -> QConfig:
        trained = self.qat.fakequant if self.qat is not None else None
        if self.fakequant is not None and trained is not None and self.fakequant != trained:
            raise ValueError(
                f"fakequant is {self.fakequant.to_dict()!r} but qat.fakequant is {trained.to_dict()!r}: give "
                "one of them."
            )
        return self

    @model_validator(mode="after")
    def _costs_of_a_choice(self) -> QConfig:
        placements = {self.effective_placement, *(rule.placement or "everything" for rule in self.rules)}
        if self.cost_table is not None and placements == {"everything"}:
            raise ValueError(
                "cost_table does nothing, as everything is quantized: set placement to balanced or fastest."
            )
        return self

    def __eq__(self, other: object) -> bool:
        return isinstance(other, QConfig) and self.__dict__ == other.__dict__

    def __hash__(self) -> int:
        return hash(tuple(self.__dict__.values()))
