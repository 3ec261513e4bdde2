"""How layers are raised, and the recipe that raises them."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from qtrace.config import QConfig, Rule
from qtrace.config.recipe import SCHEMA
from qtrace.config.tree import dump
from qtrace.errors import ConfigError
from qtrace.sensitivity.layers import RaisableLayer
from qtrace.storage.ownership import WRITTEN

__all__ = ["Raise", "patch_text"]

_BITS = re.compile(r"(?:w(?P<weight>\d+))?(?:a(?P<activation>\d+))?")


@dataclass(frozen=True)
class Raise:
    """The bits of a raised layer.

    Attributes:
        weight: the bits of the layer's weight; None leaves them.
        activation: the bits of the layer's inputs; None leaves them. If both are None, the layer computes in
            float.
    """

    weight: int | None = None
    activation: int | None = None

    @classmethod
    def parse(cls, text: str) -> Raise:
        """Parses ``float``, ``a16``, ``w8`` or ``w8a16``.

        Raises:
            ConfigError: for any other text.
        """
        if text == "float":
            return cls()
        match = _BITS.fullmatch(text)
        bits = {key: int(value) for key, value in (match.groupdict() if match else {}).items() if value}
        if not bits or not all(2 <= n <= 16 for n in bits.values()):
            raise ConfigError(
                f"{text!r} is no way to raise a layer: give float, or bits such as a16 or w8a8."
            )
        return cls(**bits)

    def sides(self) -> dict[str, bool]:
        """Returns the arguments of a `Simulation` that say what raising a layer puts in float."""
        to_float = self == Raise()
        return {
            "weights": to_float or self.weight is not None,
            "activations": to_float or self.activation is not None,
        }

    def simulated(self) -> str:
        """Says which part of the raised layers is in float during the search."""
        if all(self.sides().values()):
            return "raised"
        return "raised weights" if self.weight is not None else "raised activations"

    def changes(self, layer: RaisableLayer) -> bool:
        """Whether raising changes the bits of a layer."""
        return self.bits(layer) != (layer.weight_bits, layer.activation_bits)

    def bits(self, layer: RaisableLayer) -> tuple[int, int]:
        """Returns the bits of weight and activations of a raised layer."""
        if self == Raise():
            return 32, 32
        weight = self.weight if layer.weight else None
        return weight or layer.weight_bits, self.activation or layer.activation_bits

    def rule(self, layers: Sequence[RaisableLayer]) -> Rule:
        """Returns the rule that raises ``layers``."""
        names = [name for layer in layers for name in layer.nodes]
        change: dict[str, Any] = {"match": {"name": names}}
        if self == Raise():
            return Rule.model_validate({**change, "quantize": False})
        if self.activation is not None:
            change["activation"] = {"bits": self.activation}
        if self.weight is not None:
            change["weight"] = {"bits": self.weight}
        return Rule.model_validate(change)

    def patched(self, qconfig: QConfig, layers: Sequence[RaisableLayer]) -> QConfig:
        """Returns ``qconfig`` with a rule that raises ``layers``."""
        if not layers:
            return qconfig
        return qconfig.model_copy(update={"rules": (*qconfig.rules, self.rule(layers))})


def patch_text(base: str, how: Raise, layers: Sequence[RaisableLayer], comment: Sequence[str]) -> str:
    """Returns a recipe file that imports another one and raises ``layers``.

    Args:
        base: name or path of the recipe to import.
        how: the bits of raised layers.
        layers: the layers to raise.
        comment: the lines of the comment at the top.
    """
    data: dict[str, Any] = {"schema": SCHEMA, "imports": [base]}
    if layers:
        data["rules"] = [how.rule(layers).to_dict()]
    return "".join(f"# {line}\n" for line in (f"{WRITTEN}.", *comment)) + dump(data)
