"""The scales that a model brings from MegEngine's own quantization, as a record of its traced module.

The record is a plain attribute of the traced module, as JSON text, which ``flatten``, ``save`` and ``load``
keep. It names layers by their path, since paths survive changes of the graph.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from qtrace.graph.failures import parsing
from qtrace.graph.types import TracedModule
from qtrace.scheme import QParams

__all__ = ["LayerRanges", "NativeRanges", "drop_ranges", "read_ranges", "write_ranges"]

_ATTRIBUTE = "native_ranges"


@dataclass(frozen=True)
class LayerRanges:
    """The quantization parameters of one layer of MegEngine's own quantization.

    Attributes:
        kind: the class that the layer had, such as ``qat.ConvBnRelu2d``.
        activation: the parameters of its result; None if there are none.
        weight: the parameters of its weight; None if there are none.
        notes: a clause for each parameter that could not be taken over.
    """

    kind: str
    activation: QParams | None = None
    weight: QParams | None = None
    notes: tuple[str, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        """Returns the parameters as plain data."""
        sides = {"activation": self.activation, "weight": self.weight}
        parameters = {side: None if q is None else q.to_dict() for side, q in sides.items()}
        return {"kind": self.kind, "notes": list(self.notes), **parameters}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> LayerRanges:
        """Reads what `to_dict` returned.

        Raises:
            ValueError: for anything else.
        """
        if set(data) != {"kind", "notes", "activation", "weight"}:
            raise ValueError("its keys are others")
        sides = (None if data[k] is None else QParams.from_dict(data[k]) for k in ("activation", "weight"))
        texts = (data["kind"], *data["notes"])
        if not all(isinstance(text, str) for text in texts):
            raise ValueError("its kind or its notes are no text")
        activation, weight = sides
        if any(side is not None and side.scheme.per_channel for side in (activation, weight)):
            raise ValueError("it has a scale per channel")
        return cls(data["kind"], activation, weight, tuple(data["notes"]))


@dataclass(frozen=True)
class NativeRanges:
    """The quantization parameters that a model brings.

    Attributes:
        layers: path of a layer -> its parameters.
    """

    layers: Mapping[str, LayerRanges]

    def to_json(self) -> str:
        """Returns the record as JSON text."""
        return json.dumps({path: layer.to_dict() for path, layer in self.layers.items()}, sort_keys=True)

    @classmethod
    def from_json(cls, text: str) -> NativeRanges:
        """Reads what `to_json` wrote.

        Raises:
            GraphError: when the text is anything else.
        """
        with parsing("the scales that the model brings are", "trace it again"):
            document = json.loads(text)
            return cls({str(path): LayerRanges.from_dict(data) for path, data in document.items()})


def write_ranges(traced: TracedModule, ranges: NativeRanges) -> None:
    """Attaches ``ranges`` to ``traced``."""
    setattr(traced, _ATTRIBUTE, ranges.to_json())


def read_ranges(traced: TracedModule) -> NativeRanges | None:
    """Returns the scales that ``traced`` brings; None if its model was not quantized by MegEngine.

    Raises:
        GraphError: when they are damaged.
    """
    text = getattr(traced, _ATTRIBUTE, None)
    return None if text is None else NativeRanges.from_json(text)


def drop_ranges(traced: TracedModule) -> None:
    """Removes the scales that ``traced`` brings: `prepare` then treats it as any float model."""
    if hasattr(traced, _ATTRIBUTE):
        delattr(traced, _ATTRIBUTE)
