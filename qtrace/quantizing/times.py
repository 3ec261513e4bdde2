"""Measured times as a file, by which another machine takes the same decisions."""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass, field
from pathlib import Path

from qtrace.benchmarking.fitting import ProcessorFit
from qtrace.benchmarking.turns import Speed
from qtrace.config import QConfig
from qtrace.errors import ConfigError
from qtrace.graph.signature import list_inputs
from qtrace.graph.types import TensorNode, TracedModule
from qtrace.graph.walk import exprs, op_label
from qtrace.storage.files import parse_document, replacing

__all__ = ["SCHEMA", "MeasuredLabelling", "Times"]

SCHEMA = "qtrace-times/1"
_SCHEMES = ("activation", "weight", "output", "method", "quantize", "quantize_output")
"""What decides by which kernels an op runs."""


@dataclass(frozen=True)
class MeasuredLabelling:
    """One labelling as it was measured.

    Attributes:
        name: how it came into question: ``predicted``, ``everything``, ``fastest``, ``between`` or ``float``.
        integers: the ops on integers.
        predicted_seconds: the time that the cost table predicts.
        predicted_db: the predicted SQNR of the outputs, a sum over single roundings.
        speed: its speed beside the predicted choice.
        noise: for each half of the samples, the noise power at the outputs relative to theirs.
        structure: what the time of its file depends on, see `hash_structure`; "" if that is not known.
        weight_bits: the bits of weights of which no rule says others.
        centred: whether layers read no zero point other than 0, see `SearchOutcome`.
    """

    name: str
    integers: tuple[str, ...]
    predicted_seconds: float
    predicted_db: float
    speed: Speed
    noise: tuple[float, ...]
    structure: str = ""
    weight_bits: int = 8
    centred: bool = False


@dataclass
class Times:
    """What was measured, or is to be taken as measured.

    Attributes:
        path: the file; None if nothing is written.
        labellings: the labellings of the placement.
        left_out: which labellings were not measured, and why; "" if all were.
        files: the speed of the float file and of the quantized one; () if they were not measured.
        fixed: whether the times were read, so that nothing is measured.
        integers: the ops that are placed on integers; None if nothing was placed by measured times.
        weight_bits: the bits of their weights of which no rule says others.
        network: what the times were measured of: a hash of ops, shapes, target and placement.
        fit: the fit of the packaged cost table by which times were predicted; None for the table as it is.
    """

    path: Path | None = None
    labellings: tuple[MeasuredLabelling, ...] = ()
    files: tuple[Speed, ...] = ()
    fixed: bool = field(default=False)
    integers: tuple[str, ...] | None = None
    network: str = ""
    fit: ProcessorFit | None = None
    left_out: str = ""
    weight_bits: int = 8

    @classmethod
    def open(cls, path: Path | None) -> Times:
        """Reads ``path`` if it exists; else the times are measured, and `write` writes them there.

        Raises:
            ConfigError: when the file cannot be read, or holds no times.
        """
        if path is None or not path.exists():
            return cls(path)
        try:
            data = parse_document(path.read_bytes())
            if data["schema"] != SCHEMA:
                raise ValueError(f"its schema is not {SCHEMA}")
            labellings = tuple(
                MeasuredLabelling(
                    **{
                        **entry,
                        "speed": Speed(**entry["speed"]),
                        "integers": tuple(map(str, entry["integers"])),
                        "noise": tuple(map(float, entry["noise"])),
                    }
                )
                for entry in data["labellings"]
            )
            files = tuple(Speed(**entry) for entry in data["files"])
            integers = None if data["integers"] is None else tuple(map(str, data["integers"]))
            # Files of earlier versions have no fit, left nothing out, and have weights of 8 bits.
            fit = None if data.get("fit") is None else ProcessorFit.from_dict(data["fit"])
            left_out = str(data.get("left_out", ""))
            bits = int(data.get("weight_bits", 8))
            return cls(path, labellings, files, True, integers, str(data["network"]), fit, left_out, bits)
        except OSError as error:
            raise ConfigError(f"the times {path} cannot be read: {error.strerror}.") from error
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise ConfigError(
                f"{path} holds no times that qtrace has measured ({error}): give the name of a new file to "
                "measure them."
            ) from error

    def bind(self, traced: TracedModule, config: QConfig) -> None:
        """Notes the network that is measured, or refuses times that were read and are of another one.

        Args:
            traced: the float network.
            config: the config, whose target counts.

        Raises:
            ConfigError: when the times are of another network or target.
        """
        network = _fingerprint(traced, config)
        if self.fixed and self.network != network:
            raise ConfigError(
                f"{self.path} has the times of another network, other shapes, another target or placement, "
                "or other bits: give the name of a new file to measure them."
            )
        self.network = network

    def forget_placement(self) -> None:
        """Drops what was measured of labellings, where the file is another one."""
        self.labellings, self.left_out, self.integers, self.weight_bits = (), "", None, 8

    def write(self) -> None:
        """Writes the file, if there is one and it was not read.

        Raises:
            ConfigError: when it cannot be written.
        """
        if self.path is None or self.fixed or (self.integers is None and not self.files):
            return
        data = {
            "schema": SCHEMA,
            "network": self.network,
            "fit": None if self.fit is None else self.fit.to_dict(),
            "integers": None if self.integers is None else list(self.integers),
            "weight_bits": self.weight_bits,
            "labellings": [asdict(labelling) for labelling in self.labellings],
            "left_out": self.left_out,
            "files": [asdict(speed) for speed in self.files],
        }
        try:
            with replacing(self.path) as (stream,):
                stream.write((json.dumps(data, indent=1) + "\n").encode())
        except OSError as error:
            raise ConfigError(f"the times {self.path} cannot be written: {error.strerror}.") from error


def _fingerprint(traced: TracedModule, config: QConfig) -> str:
    """Returns a hash of a network and of what its config says of target, placement and schemes."""
    ops = [
        (type(expr).__name__, op_label(expr), [(node.name, list(node.shape or ())) for node in expr.outputs])
        for expr in exprs(traced)
        if expr.outputs and all(isinstance(node, TensorNode) for node in expr.outputs)
    ]
    inputs = [(name, list(shape)) for name, shape in list_inputs(traced)]
    told = config.to_dict()
    schemes = [told.get(key) for key in _SCHEMES]
    rules = [[rule["match"], *map(rule.get, _SCHEMES)] for rule in told.get("rules", ())]
    kinds = [config.backend, config.effective_placement, schemes, rules]
    text = json.dumps([*kinds, inputs, ops], default=str, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:32]
