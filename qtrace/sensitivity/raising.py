"""What a raised layer becomes, and the recipe that says so."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from qtrace.config import QConfig, Rule
from qtrace.config.recipe import SCHEMA
from qtrace.config.tree import dump
from qtrace.errors import ConfigError
from qtrace.sensitivity.layers import Layer

__all__ = ["Raise", "patch_text"]

_BITS = re.compile(r"(?:w(?P<weight>\d+))?(?:a(?P<activation>\d+))?")


@dataclass(frozen=True)
class Raise:
    """What happens to a raised layer.

    Attributes:
        weight: the bits of its weight; None leaves them.
        activation: the bits of what it reads; None leaves them. With neither, the layer computes in float.
    """

    weight: int | None = None
    activation: int | None = None

    @classmethod
    def parse(cls, text: str) -> Raise:
        """From ``float``, ``a16``, ``w8`` or ``w8a16``.

        Raises:
            ConfigError: for anything else.
        """
        if text == "float":
            return cls()
        found = _BITS.fullmatch(text)
        bits = {key: int(value) for key, value in (found.groupdict() if found else {}).items() if value}
        if not bits or not all(2 <= n <= 16 for n in bits.values()):
            raise ConfigError(
                f"{text!r} is no way to raise a layer: give float, or bits such as a16 or w8a8."
            )
        return cls(**bits)

    def sides(self) -> dict[str, bool]:
        """Whether raising a layer concerns its weight, and what it reads, as arguments of a `Simulation`."""
        whole = self == Raise()
        return {
            "weights": whole or self.weight is not None,
            "activations": whole or self.activation is not None,
        }

    def simulated(self) -> str:
        """What of raised layers is in float while layers are searched."""
        if all(self.sides().values()):
            return "raised"
        return "raised weights" if self.weight is not None else "raised activations"

    def changes(self, layer: Layer) -> bool:
        """Whether raising makes a layer any different."""
        return self.bits(layer) != (layer.weight_bits, layer.activation_bits)

    def bits(self, layer: Layer) -> tuple[int, int]:
        """The bits of weight and activations of a raised layer."""
        if self == Raise():
            return 32, 32
        weight = self.weight if layer.weight else None
        return weight or layer.weight_bits, self.activation or layer.activation_bits

    def rule(self, layers: Sequence[Layer]) -> Rule:
        """The rule that raises some layers."""
        names = [name for layer in layers for name in layer.nodes]
        change: dict[str, Any] = {"match": {"name": names}}
        if self == Raise():
            return Rule.model_validate({**change, "quantize": False})
        if self.activation is not None:
            change["activation"] = {"bits": self.activation}
        if self.weight is not None:
            change["weight"] = {"bits": self.weight}
        return Rule.model_validate(change)

    def patched(self, qconfig: QConfig, layers: Sequence[Layer]) -> QConfig:
        """A config that raises some layers."""
        if not layers:
            return qconfig
        return qconfig.model_copy(update={"rules": (*qconfig.rules, self.rule(layers))})


def patch_text(base: str, how: Raise, layers: Sequence[Layer], comment: Sequence[str]) -> str:
    """A recipe file that imports another one and raises some layers.

    Args:
        base: name or path of the recipe to import.
        how: what they are raised to.
        layers: which ones.
        comment: lines that say why.
    """
    data: dict[str, Any] = {"schema": SCHEMA, "imports": [base]}
    if layers:
        data["rules"] = [how.rule(layers).to_dict()]
    return "".join(f"# {line}\n" for line in comment) + dump(data)
