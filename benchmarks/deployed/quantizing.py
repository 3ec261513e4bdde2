"""The variants of a network: files by qtrace's placements and by other tools, and the time that each took."""

from __future__ import annotations

import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import qtrace
from benchmarks.accuracy.peers import Peer, quantize_by_nncf, quantize_by_onnxruntime
from benchmarks.deployed.networks import Network
from benchmarks.deployed.rows import MINMAX, NNCF, ONNXRUNTIME, OWN_TIMES, PLACEMENTS
from qtrace.preparation.model import QuantizedModel

__all__ = ["Made", "config_of", "quantize", "quantize_by_peer"]

# NNCF takes means of the ranges of batches: it does better with some samples in each.
_NNCF_BATCH = 4


@dataclass(frozen=True)
class Made:
    """A file of qtrace.

    Attributes:
        file: the file.
        converted: the graph that it was exported from.
        seconds: the time of `prepare` and `calibrate`.
        mode: the placement that was chosen, "float" if nothing is quantized.
    """

    file: Path
    converted: Any
    seconds: float
    mode: str


def config_of(network: Network, variant: str, cost_table: Path | None = None) -> dict[str, Any]:
    """Returns the config of a variant: the default recipe, or `minmax` where outputs mean nothing.

    Args:
        network: the network.
        variant: the variant.
        cost_table: the times of this machine, for the variants that are placed by them.
    """
    config = qtrace.load_recipe("int8").to_dict()
    if variant == MINMAX or not network.trained:
        config = {"placement": "balanced", "observers": {"activation": "minmax", "weight": "minmax"}}
    if variant in PLACEMENTS:
        config["placement"] = variant
    if variant in OWN_TIMES:
        config.update(placement=OWN_TIMES[variant], cost_table=str(cost_table))
    return config


def quantize(network: Network, variant: str, file: Path, cost_table: Path | None = None) -> Made:
    """Writes ``file`` by one of qtrace's variants; see `config_of`."""
    batches = [network.calibration[i : i + 1] for i in range(len(network.calibration))]
    started = time.perf_counter()
    prepared = qtrace.prepare(network.traced, config_of(network, variant, cost_table), samples=batches)
    qtrace.calibrate(prepared, batches, progress=False)
    seconds = time.perf_counter() - started
    converted = qtrace.convert(prepared)
    qtrace.export(converted, file)
    annotation = QuantizedModel(prepared, "prepared").annotation
    mode = annotation.placement.mode if annotation.placement else "everything"
    return Made(file, converted, seconds, mode if annotation.sites else "float")


def quantize_by_peer(network: Network, model: Path, variant: str, folder: Path, nncf: str | None) -> Peer:
    """Quantizes the float file ``model`` by another tool, in an interpreter of its own."""
    if variant in ONNXRUNTIME:
        return quantize_by_onnxruntime(model, network.calibration, ONNXRUNTIME[variant], folder)
    (peer,) = quantize_by_nncf(
        model, network.calibration, folder, nncf or sys.executable, kinds=(NNCF[variant],), batch=_NNCF_BATCH
    )
    return peer
