"""The plugins that a config names, with their options."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator, Mapping
from typing import Annotated, Any

from pydantic import AfterValidator, Field, field_validator, model_validator

from qtrace import plugins
from qtrace.plugins.options import Loc, OptionModel, Text, hint, show

__all__ = ["AlgorithmSpec", "FakeQuantSpec", "ObserverSpec", "Spec", "specs"]

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
