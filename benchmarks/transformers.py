"""Transformers and networks that select, by qtrace's default and by other tools.

    python -m benchmarks.transformers --nncf VENV/bin/python        # all of them: some minutes each
    python -m benchmarks.transformers vit swin --only qtrace        # some networks, one tool

The networks are those of the tests, wide enough that integers may gain, with random weights that are spread
as trained ones are. 32 samples calibrate, 24 others are measured. All files run in onnxruntime with all
optimizations, one sample a run: dB is that of the worst output beside the float file's; speed is the time of
float / that of the file, in turns, by processor time. Rows that a network selects are matched first: a row of
a file is compared with the nearest row of float, and no row is taken twice; rows that are not near are left
out of the dB, and told as a share. "float" marks a file in float, which `qtrace.quantize` delivers where
integers gain no time.
"""

from __future__ import annotations

import argparse
import math
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

import qtrace
from qtrace.comparing.sums import sqnr_db

qtrace.quiet()  # before anything else loads MegEngine: it would print notes about a missing CUDA driver

import megengine as mge  # noqa: E402
import megengine.functional as F  # noqa: E402
import megengine.module as M  # noqa: E402
from megengine import Tensor  # noqa: E402
from scipy.optimize import linear_sum_assignment  # noqa: E402

from benchmarks.accuracy.peers import quantize_by_nncf, quantize_by_onnxruntime  # noqa: E402
from benchmarks.deployed.judging import File  # noqa: E402
from benchmarks.timing import run_interleaved  # noqa: E402
from benchmarks.weights import TextClassifier, randomized  # noqa: E402
from scripts.stored import RESULTS, ToolFile, ToolsRow, load, store, table, today  # noqa: E402
from tests import selecting_nets  # noqa: E402
from tests.zoo import convnext  # noqa: E402
from tests.zoo.detectors import detr  # noqa: E402
from tests.zoo.detectors.entry import bounded, trained  # noqa: E402
from tests.zoo.parts import settle  # noqa: E402
from tests.zoo.transformers import swin, vit  # noqa: E402

__all__ = ["NETWORKS", "Network", "main", "measure"]

_CALIBRATED, _TESTED, _BATCH = 32, 24, 4
_ROUNDS, _TURN_SECONDS = 15, 0.02


class _AttentionBlock(M.Module):
    """Norm, MegEngine's own attention, norm, perceptron."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = M.LayerNorm(width), M.LayerNorm(width)
        self.attn, self.mlp = M.MultiHeadAttention(width, heads), vit.Mlp(width)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm1(x)
        x = x + self.attn(y, y, y)[0]
        return x + self.mlp(self.norm2(x))


def _with_megengines_attention(size: int, patch: int, width: int, depth: int) -> M.Module:
    module = vit.Vit(size, patch, width, depth)
    module.blocks = M.Sequential(*(_AttentionBlock(width, width // 32) for _ in range(depth)))
    return module


class _Bert(M.Module):
    """Post-norm blocks behind embeddings with a norm; a mask hides padded words; the first word is read."""

    def __init__(self, width: int, depth: int, words: int = 500, length: int = 64) -> None:
        super().__init__()
        self.words, self.heads = M.Embedding(words, width), width // 32
        self.places = M.Embedding(length, width)
        self.norm = M.LayerNorm(width)
        self.layers = [detr.EncoderLayer(width, width // 32) for _ in range(depth)]
        self.masked = [_MaskedAttention(width, width // 32) for _ in range(depth)]
        self.pool, self.head = M.Linear(width, width), M.Linear(width, 8)
        self.length = length

    def forward(self, ids: Tensor) -> Tensor:
        hidden = F.expand_dims(F.equal(ids, 0).astype("float32") * -1e4, (1, 2))
        x = self.norm(self.words(ids) + self.places(F.arange(self.length).astype("int32")))
        for layer, attention in zip(self.layers, self.masked, strict=True):
            x = layer.norm1(x + attention(x, hidden))
            x = layer.norm2(x + layer.ffn.linear2(F.gelu(layer.ffn.linear1(x))))
        return self.head(F.tanh(self.pool(x[:, 0])))


class _MaskedAttention(detr.Attention):
    def forward(self, x: Tensor, hidden: Tensor) -> Tensor:  # type: ignore[override]
        q, k, v = self.split(self.q_proj(x)), self.split(self.k_proj(x)), self.split(self.v_proj(x))
        scores = F.matmul(q, k.transpose(0, 1, 3, 2)) / math.sqrt(q.shape[-1]) + hidden
        mixed = F.matmul(F.softmax(scores, axis=-1), v).transpose(0, 2, 1, 3)
        return self.out_proj(F.flatten(mixed, 2))


def _words(count: int, seed: int, known: int = 500, length: int = 64) -> np.ndarray:
    """Texts of unlike lengths, padded with 0."""
    rng = np.random.default_rng(seed)
    words = rng.integers(1, known, (count, length)).astype(np.int32)
    words[np.arange(length)[None] >= rng.integers(length // 4, length + 1, (count, 1))] = 0
    return words


@dataclass(frozen=True)
class Network:
    """A network with its data.

    Attributes:
        build: makes the module with its weights.
        draw: number of samples, seed -> inputs.
        rows: whether it selects rows, the second axis of each output.
    """

    build: Callable[[], M.Module]
    draw: Callable[[int, int], np.ndarray]
    rows: bool = False


def _images(size: int) -> Callable[[int, int], np.ndarray]:
    return lambda count, seed: bounded(count, seed, size)


def _selecting(name: str) -> Network:
    return Network(lambda: selecting_nets.build(name), selecting_nets.pictures, rows=True)


NETWORKS = {
    "vit": Network(lambda: trained(vit.Vit(64, 8, 128, 4)), _images(64)),
    "vit_mha": Network(lambda: trained(_with_megengines_attention(64, 8, 128, 4)), _images(64)),
    "convnext": Network(lambda: settle(convnext.ConvNeXt(64), 3, 64, 64), _images(64)),
    "swin": Network(lambda: trained(swin.Swin(64, 64)), _images(64)),
    "detr": Network(lambda: trained(detr.Detr(128, 4, 16)), _images(128)),
    "text": Network(lambda: randomized(TextClassifier(128, 2)), lambda n, s: _words(n, s, 2000)),
    "bert": Network(lambda: trained(_Bert(128, 3)), _words),
    "rt_detr": _selecting("rt_detr"),
    "yolov10": _selecting("yolov10"),
    "centernet": _selecting("centernet"),
}


def _match(reference: list[np.ndarray], outputs: list[np.ndarray]) -> tuple[list[np.ndarray], float]:
    """Puts the rows of one sample's outputs in the order of the nearest rows of float.

    Returns:
        The outputs, zeros at the places of rows that float lacks, and the share of rows that float has.
    """
    both = [
        np.concatenate([v.reshape(v.shape[1], -1).astype(np.float64) for v in values], 1)
        for values in (reference, outputs)
    ]
    spread = np.maximum(both[0].std(axis=0), 1e-3)
    apart = np.linalg.norm((both[0][:, None] - both[1][None]) / spread, axis=2) / math.sqrt(len(spread))
    _, places = linear_sum_assignment(apart)
    right = apart[np.arange(len(places)), places] < 0.5  # of the columns' spread
    matched = [np.where(right.reshape(1, -1, *[1] * (v.ndim - 2)), v[:, places], 0) for v in outputs]
    return matched, float(right.mean())


def _noise(exact: File, file: File, test: np.ndarray, rows: bool) -> tuple[float, float | None]:
    """Returns the SQNR of the worst output of floats, and the share of rows that are float's."""
    pairs: dict[int, list[tuple[np.ndarray, np.ndarray]]] = {}
    shares = []
    for sample in test:
        reference, outputs = exact(sample[None]), file(sample[None])
        if rows:
            outputs, share = _match(reference, outputs)
            shares.append(share)
            reference = [np.where(_kept(v), r, 0) for r, v in zip(reference, outputs, strict=True)]
        for i, pair in enumerate(zip(reference, outputs, strict=True)):
            if pair[0].dtype == np.float32:
                pairs.setdefault(i, []).append(pair)
    worst = min(
        sqnr_db(*(np.concatenate([pair[side].ravel() for pair in own]) for side in (0, 1)))
        for own in pairs.values()
    )
    return worst, float(np.mean(shares)) if rows else None


def _kept(output: np.ndarray) -> np.ndarray:
    """Returns which rows of an output are not blanked."""
    axes = tuple(range(2, output.ndim))
    return (output != 0).any(axis=axes, keepdims=True) if axes else output != 0


def measure(name: str, tools: Sequence[str], nncf: str | None) -> dict[str, ToolFile]:
    """Quantizes a network by each tool and measures the files."""
    network = NETWORKS[name]
    calibration, test = network.draw(_CALIBRATED, 1), network.draw(_TESTED, 2)
    traced = qtrace.trace(network.build(), Tensor(calibration[:1]), check=False)
    rows: dict[str, ToolFile] = {}
    files: dict[str, File] = {}
    with tempfile.TemporaryDirectory() as folder:
        exact = File(qtrace.export(traced, Path(folder) / "float.onnx"))
        for tool in tools:
            rows[tool], path = _quantize(tool, traced, calibration, Path(folder), nncf)
            if path is not None:
                files[tool] = File(path)
                db, share = _noise(exact, files[tool], test, network.rows)
                rows[tool] = replace(rows[tool], db=db, rows=share)
        runs = _runs_in_a_turn(exact, test[:1])
        sides = {tool: _turn(file, test[:1], runs) for tool, file in {"float": exact, **files}.items()}
        samples = run_interleaved(sides, _ROUNDS, warm_up=3)
        for tool in files:
            rows[tool] = replace(rows[tool], speed=samples.ratio("float", tool).cpu)
    return rows


def _runs_in_a_turn(file: File, sample: np.ndarray) -> int:
    file.run(sample)
    start = time.process_time()
    file.run(sample)
    return max(1, math.ceil(_TURN_SECONDS / max(time.process_time() - start, 1e-5)))


def _turn(file: File, sample: np.ndarray, runs: int) -> Callable[[], None]:
    def run() -> None:
        for _ in range(runs):
            file.run(sample)

    return run


def _quantize(
    tool: str, traced: Any, calibration: np.ndarray, folder: Path, nncf: str | None
) -> tuple[ToolFile, Path | None]:
    float_file, out = folder / "float.onnx", folder / f"{tool}.onnx"
    if tool == "onnxruntime":
        peer = quantize_by_onnxruntime(float_file, calibration, "MinMax", folder)
        return ToolFile(note=peer.reason), peer.file
    if tool == "nncf":
        if nncf is None:
            return ToolFile(note="not run"), None
        kinds = ("transformer",)
        (peer,) = quantize_by_nncf(float_file, calibration, folder, nncf, kinds=kinds, batch=_BATCH)
        return ToolFile(note=peer.reason), peer.file
    batches = np.split(calibration, len(calibration) // _BATCH)
    everything = {**qtrace.load_recipe("int8").to_dict(), "placement": "everything"}
    options: dict[str, Any] = {"keep": True, "recipe": everything} if tool == "everything" else {}
    try:
        made = qtrace.quantize(traced, batches, out, progress=False, allow_broken=True, **options)
    except qtrace.QtraceError as error:
        return ToolFile(note=" ".join(str(error).split())[:200]), None
    macs = made.explain().to_dict()["summary"]["macs"]
    share = 0.0 if made.delivery.in_float else 1.0 - macs["float"] / sum(macs.values())
    return ToolFile(share=share), out


def main(arguments: Sequence[str] | None = None) -> int:
    """The command; returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.transformers", description=__doc__)
    parser.add_argument("network", nargs="*", help=f"of {', '.join(NETWORKS)}; all without")
    parser.add_argument("--only", action="append", choices=ToolsRow.TOOLS, help="one tool; may be repeated")
    parser.add_argument("--nncf", metavar="PYTHON", help="an interpreter that has NNCF")
    parser.add_argument("--folder", type=Path, default=RESULTS, help="the folder of the stored rows")
    parser.add_argument("--table", action="store_true", help="only print the stored rows")
    options = parser.parse_args(arguments)
    mge.config.async_level = 0  # F.gather races in a queue
    path = options.folder / ToolsRow.FILE
    for name in () if options.table else options.network or NETWORKS:
        stored = {row.network: row.files for row in (load(ToolsRow, options.folder) if path.exists() else ())}
        files = {t: asdict(f) for t, f in measure(name, options.only or ToolsRow.TOOLS, options.nncf).items()}
        row = ToolsRow(name, {**stored.get(name, {}), **files}, today())
        store([row], ToolsRow, options.folder)
        print(f"| {' | '.join(row.cells())} |", flush=True)
    if options.table:
        print(table(load(ToolsRow, options.folder), ToolsRow))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
