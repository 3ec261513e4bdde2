"""A rule of a config: the ops that it matches, the settings that it changes, the plugins that it names."""

from __future__ import annotations

import copy
import dataclasses
import math
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Annotated, Any, Literal, get_args

from pydantic import AfterValidator, Field, PrivateAttr, field_validator, model_validator

from qtrace import plugins
from qtrace.plugins.options import Bool, Int, Loc, OptionModel, Text, Texts, hint, known_keys, show

if TYPE_CHECKING:
    from qtrace.scheme import QScheme

# The plugins that a config names, with their options.

# Names of plugins in other tools, and in qtrace.
_ALSO_CALLED = {
    "easyquant": "cosine",
    "ema": "moving_average",
    "entropy": "kl",
    "hist": "mse",
    "histogram": "mse",
    "pow2": "power_of_two",
    "quantile": "percentile",
    "ste": "fixed",
    "brecq": "reconstruct",
    "cle": "equalize",
    "cross_layer_equalization": "equalize",
    "qdrop": "reconstruct",
}


class Spec(OptionModel):
    """A plugin and its options: written ``mse``, ``{mse: {bins: 2048}}`` or ``pkg.mod:Class``.

    Attributes:
        name: the plugin's file name, or ``pkg.mod:Class``.
        options: keyword arguments, plain data.
    """

    name: Text
    options: dict[str, Any] = Field(default_factory=dict)

    @model_validator(mode="before")
    @classmethod
    def _short(cls, value: Any) -> Any:
        if isinstance(value, str):
            return {"name": value}
        if isinstance(value, Spec):
            return value
        if not isinstance(value, Mapping):
            raise ValueError(
                f"give a name such as mse, or a mapping such as {{mse: {{bins: 2048}}}}, not {show(value)}."
            )
        if "name" not in value:
            if len(value) != 1:
                raise ValueError(f"give one name, with options under it, not {len(value)} keys.")
            ((name, options),) = value.items()
            value = {"name": name, "options": {} if options is None else options}
        return value

    @field_validator("options", mode="before")
    @classmethod
    def _options(cls, value: Any) -> Any:
        if not isinstance(value, Mapping):
            raise ValueError(f"options are a mapping such as {{bins: 2048}}, not {show(value)}.")
        return _json(value)

    def to_dict(self) -> str | dict[str, Any]:
        """Returns the short form: the name, or the name and its options."""
        return {self.name: copy.deepcopy(self.options)} if self.options else self.name

    def __hash__(self) -> int:
        return hash(self.name)  # options may hold lists


def specs(model: OptionModel, loc: Loc = ()) -> Iterator[tuple[Loc, Spec]]:
    """Yields the plugins that a config names, with their locations in the config."""
    for key in type(model).model_fields:
        value = getattr(model, key)
        items = enumerate(value) if isinstance(value, tuple) else [(None, value)]
        for index, item in items:
            item_loc = (*loc, key) if index is None else (*loc, key, index)
            if isinstance(item, Spec):
                yield item_loc, item
            elif isinstance(item, OptionModel):
                yield from specs(item, item_loc)


def _json(value: Any) -> Any:
    """Copies a value to the types of JSON."""
    if isinstance(value, Mapping):
        wrong = next((key for key in value if not isinstance(key, str)), None)
        if wrong is not None:
            raise ValueError(f"the option {wrong!r} must be text.")
        return {str(key): _json(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_json(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        raise ValueError(f"the option value {value!r} is not a finite number.")
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    raise ValueError(
        f"the option value {show(value)} is not plain data: text, numbers, lists and mappings are."
    )


def _known_plugin(package: str) -> AfterValidator:
    def check(spec: Spec) -> Spec:
        if ":" in spec.name:
            if plugins.OWN_CLASS.fullmatch(spec.name):
                return spec
            raise ValueError(f"{spec.name!r} is not of the form pkg.mod:Class.")
        names = plugins.known(package)
        if spec.name not in names:
            kind = "algorithm" if package == "qtrace.ptq" else package.rpartition(".")[2].removesuffix("s")
            raise ValueError(f"unknown {kind} {spec.name!r}{_resembling(spec.name, names)}")
        return spec

    return AfterValidator(check)


def _resembling(name: str, known: tuple[str, ...]) -> str:
    """Lists the known names, and first the one that ``name`` resembles."""
    other = _ALSO_CALLED.get(name.lower())
    near = f"; did you mean {other!r}?" if other in known else hint(name, known)
    return near if near.startswith("; known") else f"{near} Known: {', '.join(known)}."


ObserverSpec = Annotated[Spec, _known_plugin("qtrace.observers")]
FakeQuantSpec = Annotated[Spec, _known_plugin("qtrace.fakequant")]
AlgorithmSpec = Annotated[Spec, _known_plugin("qtrace.ptq")]


# A rule of a config: the ops that it matches, and the settings that it changes.


def known_backend(name: str) -> str:
    """Returns ``name`` if a backend is called so, or if it has the form ``pkg.mod:NAME``.

    Raises:
        ValueError: otherwise, listing the backends.
    """
    from qtrace.config import backends  # here: it loads numpy

    if plugins.OWN_CLASS.fullmatch(name):
        return name
    if ":" in name:
        raise ValueError(f"{name!r} is not of the form pkg.mod:NAME.")
    if name not in (known := backends.known()):
        raise ValueError(f"unknown backend {name!r}{hint(name, known)}")
    return name


class SchemePatch(OptionModel):
    """Changes to a `QScheme`; other fields stay. A `QScheme` in its place changes all fields.

    Attributes:
        bits: width, 2 to 16.
        signed: signed integers rather than unsigned ones.
        symmetric: the zero point is fixed.
        narrow: the lowest integer is not used.
        axis: the axis of the channels with a scale each; None for one scale per tensor.
        power_of_two: scales are powers of two.
        rounding: the direction of ties.
        block: for weights of linear layers, the number of neighbours along the inputs that share a scale;
            None for one scale for each output channel.

    Example:
        ```yaml
        bits: 4
        block: 32
        signed: true
        symmetric: true
        narrow: true
        axis: 0
        power_of_two: false
        rounding: half_even
        ```
    """

    bits: Annotated[Int, Field(ge=2, le=16)] | None = None
    signed: Bool | None = None
    symmetric: Bool | None = None
    narrow: Bool | None = None
    axis: Int | None = None
    power_of_two: Bool | None = None
    rounding: Literal["half_even", "half_away", "half_up"] | None = None
    block: Annotated[Int, Field(ge=2)] | None = None

    @model_validator(mode="before")
    @classmethod
    def _whole(cls, value: Any) -> Any:
        if isinstance(value, (Mapping, SchemePatch)):
            return value
        from qtrace.scheme import QScheme  # here: it loads numpy

        return value.to_dict() if isinstance(value, QScheme) else value

    @property
    def changes(self) -> dict[str, Any]:
        """The attributes that change; an axis or a block of None counts if it was set."""
        fields = ((name, getattr(self, name)) for name in _PATCHED if name in self.model_fields_set)
        return {name: value for name, value in fields if value is not None or name in ("axis", "block")}

    def apply(self, scheme: QScheme) -> QScheme:
        """Returns ``scheme`` with the changes."""
        return dataclasses.replace(scheme, **self.changes)

    def to_dict(self) -> dict[str, Any]:
        """Returns the changes."""
        return self.changes

    def __eq__(self, other: object) -> bool:
        return isinstance(other, SchemePatch) and self.changes == other.changes

    def __hash__(self) -> int:
        return hash(tuple(self.changes.items()))


_PATCHED = tuple(SchemePatch.model_fields)


class Observers(OptionModel):
    """The observers that collect statistics.

    Attributes:
        activation: the observer of activations.
        weight: the observer of weights.

    Example:
        ```yaml
        activation: {percentile: {percentile: 99.9}}
        weight: minmax
        ```
    """

    activation: ObserverSpec | None = None
    weight: ObserverSpec | None = None


class Subgraph(OptionModel):
    """The ops on the paths from one node to another, including both.

    Attributes:
        from_: name of the node where it begins; written ``from``.
        to: name of the node where it ends.

    Example:
        ```yaml
        from: stem_out
        to: pool_out
        ```
    """

    from_: Text = Field(alias="from")
    to: Text


class Match(OptionModel):
    """The conditions of a rule, all of which an op must meet. The empty one, ``{}``, matches every op.

    Attributes:
        op: kinds of op, such as ``conv2d``; one or a list of alternatives.
        name: glob patterns for the module path or the node name, or for the node or tensor in the ONNX file
            that the network comes from, as Netron shows them. One or a list of alternatives.
        depthwise: convolutions with one input channel per group, or those with more.
        position: the first or last ops that compute (several if the graph branches), or the ``tail``. The
            tail is the ops after the last ones that are not fused into them, such as the decoding of a
            detector, means of distributions (DFL) included.
        before_output: whether the op's result leaves the graph.
        feeds: kinds of op that read the result, through moves, activations and scalar arithmetic.
        follows: kinds of op that give the input, through the same ops.
        gate: whether the result scales the channels of another tensor (squeeze and excitation).
        shared: whether the weight serves several calls, as in a head that is called for every level.
        subgraph: the ops between two nodes.

    Example:
        ```yaml
        op: [conv2d, linear]
        name: "head.*"
        depthwise: true
        position: first
        before_output: true
        feeds: silu
        follows: concat
        gate: true
        shared: true
        subgraph: {from: stem_out, to: pool_out}
        ```
    """

    op: Texts | None = None
    name: Texts | None = None
    depthwise: Bool | None = None
    position: Literal["first", "last", "tail"] | None = None
    before_output: Bool | None = None
    feeds: Texts | None = None
    follows: Texts | None = None
    gate: Bool | None = None
    shared: Bool | None = None
    subgraph: Subgraph | None = None

    def to_dict(self) -> dict[str, Any]:
        """Returns the conditions that were set; a list of one as its item."""
        data: dict[str, Any] = super().to_dict()
        return {k: v[0] if isinstance(v, list) and len(v) == 1 else v for k, v in data.items()}


# Everything that can run on integers, or what gains by it: for the least time, or for time and accuracy both;
# "small" is "balanced", with a file whose size counts, too.
Placement = Literal["everything", "balanced", "fastest", "small"]

# Where the scales of what a layer with a weight reads come from: calibration, each batch, or nowhere, as only
# its weight is rounded.
Method = Literal["static", "dynamic", "weight_only"]

# The type of what stays float, in files of formats that have both.
FloatType = Literal["fp32", "fp16"]
FLOAT_TYPES: tuple[str, ...] = get_args(FloatType)

_CHANGES = ("activation", "weight", "output", "observers", "fakequant")


class Rule(OptionModel):
    """Changes to the settings of the ops that match; a later rule wins.

    Attributes:
        match: the ops.
        quantize: False keeps them in float; True quantizes around an op that stays float by default.
        activation: changes to the scheme of their inputs, and of their result unless a consumer decides it.
        weight: changes to the scheme of their weights.
        output: changes to the scheme of their result, whatever its consumers want; consumers that want the
            same scheme still choose the observer.
        quantize_output: False leaves their result in float.
        observers: other observers.
        fakequant: another fake quant.
        share: True makes the calls of one module (a head called for every level) share the parameters of
            their inputs, and of their results.
        placement: which of them run on integers, as ``placement`` of the config says for all ops.
        method: how their layers with a weight are quantized, as ``method`` of the config says for all ops.
        backends: the targets that the rule is for; None for all.
        optional: True if the rule may match nothing, as in a recipe for a whole family.

    Example:
        ```yaml
        match: {op: softmax}
        quantize: true
        activation: {bits: 16}
        weight: {bits: 8}
        output: {bits: 16}
        quantize_output: true
        observers: {activation: minmax}
        fakequant: fixed
        share: true
        placement: everything
        method: static
        backends: [onnxruntime, tflite]
        optional: true
        ```
    """

    match: Match
    quantize: Bool | None = None
    activation: SchemePatch | None = None
    weight: SchemePatch | None = None
    output: SchemePatch | None = None
    quantize_output: Bool | None = None
    observers: Observers | None = None
    fakequant: FakeQuantSpec | None = None
    share: Bool | None = None
    placement: Placement | None = None
    method: Method | None = None
    backends: Annotated[Texts, AfterValidator(lambda names: tuple(map(known_backend, names)))] | None = None
    optional: Bool = False
    _origin: str = PrivateAttr("rules[0]")

    @property
    def origin(self) -> str:
        """The place of the rule, ``FILE:LINE`` or ``rules[2]``; it does not count for equality."""
        return self._origin

    def with_origin(self, origin: str) -> Rule:
        """Returns a copy of the rule with another `origin`."""
        rule = self.model_copy()
        rule._origin = origin
        return rule

    @model_validator(mode="after")
    def _changes_something(self) -> Rule:
        changes = [name for name in _CHANGES if _content(self, name)]
        settings = (self.quantize, self.quantize_output, self.share, self.placement, self.method)
        flags = [value for value in settings if value is not None]
        if not flags and not changes:
            keys = [key for key in known_keys(Rule) if key not in ("match", "backends", "optional")]
            raise ValueError(f"the rule changes nothing: give it one of {', '.join(keys)}.")
        if self.quantize is False and changes:
            raise ValueError(f"with quantize: false the ops stay float, so {changes[0]} does nothing.")
        if self.quantize is False and self.method is not None:
            raise ValueError("with quantize: false the ops stay float, so method does nothing.")
        if self.method in ("dynamic", "weight_only"):
            unread = next((name for name in ("activation", "output") if _content(self, name)), "")
            if unread:
                raise ValueError(
                    f"with method: {self.method} no activation is rounded by a scheme of the config, so "
                    f"{unread} does nothing: leave it out."
                )
        if self.quantize_output is False and _content(self, "output"):
            raise ValueError("with quantize_output: false the result stays float, so output does nothing.")
        return self

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Rule) and self.__dict__ == other.__dict__

    def __hash__(self) -> int:
        return hash(tuple(self.__dict__.values()))


def _content(rule: Rule, name: str) -> bool:
    """Whether a field of ``rule`` changes something, unlike ``weight: {}``."""
    value = getattr(rule, name)
    return value is not None and bool(value.to_dict())
