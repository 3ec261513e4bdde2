"""Names of values and layers: plain ones, and those that trip Python or a scheme of suffixes."""

from __future__ import annotations

import keyword

__all__ = ["NAMINGS", "Names", "layer_seed"]

NAMINGS = ("plain", "colon", "clash", "suffix", "keyword", "unicode", "number", "dots")
_UNICODE = ("é", "输入", "a b", "x/y", "β-1", "q'", 'say "x"', "z\u00a0z", "ß", "Σ")
_SUFFIXES = ("q", "s", "w", "weight", "bias", "out", "in", "z", "fq", "scale")


class Names:
    """The names of one network.

    Args:
        naming: one of `NAMINGS`.
        python: whether layers and inputs must be attributes and arguments of Python.
    """

    def __init__(self, naming: str, python: bool) -> None:
        self.naming, self.python = naming, python

    def value(self, index: int, layer: str | None = None) -> str:
        """Names the result of a step, of the layer ``layer`` if it has one."""
        if self.python:
            return {"suffix": f"x{index}_q", "unicode": f"é{index}"}.get(self.naming, f"v{index}")
        if self.naming == "colon":
            return f"v{index}:0"
        if self.naming == "clash" and layer is not None and "shared" not in layer:
            return f"{self.layer(layer)}_{'weight' if index % 2 else 'bias'}"
        if self.naming == "suffix":
            return f"x{index // len(_SUFFIXES) or ''}_{_SUFFIXES[index % len(_SUFFIXES)]}"
        if self.naming == "keyword":
            return keyword.kwlist[index] if index < len(keyword.kwlist) else f"v{index}"
        if self.naming == "unicode":
            return f"{_UNICODE[index % len(_UNICODE)]}{index // len(_UNICODE) or ''}"
        if self.naming == "number":
            return str(index)
        if self.naming == "dots":
            return f"a.{index}" if index % 2 else f"a_{index + 1}"
        return f"v{index}"

    def layer(self, name: str) -> str:
        """Names a layer, which is an attribute of the module or the beginning of names of stored tensors."""
        if self.naming == "keyword":
            return (
                f"{keyword.kwlist[sum(map(ord, name)) % len(keyword.kwlist)]}_{name}" if self.python else name
            )
        if self.naming == "suffix":
            return f"{name}_weight"
        if self.naming == "unicode":
            return f"é{name}" if self.python else f"é {name}"
        if self.naming == "dots" and not self.python:
            return f"a.{name[-1]}.{name}"
        return name


def layer_seed(name: str) -> int:
    """Returns the seed of a layer's weights, the same in both forms of a network."""
    return sum(map(ord, name))
