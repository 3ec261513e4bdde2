"""Weights alone and dynamic inputs beside onnxruntime's tools: noise, time and size.

``python -m benchmarks.weights`` prints a table for two transformers with random weights, whose LayerNorms
have gains of a wide spread, as trained ones do: noise at the outputs on data that no tool has seen, time
of the processor in one thread, all files in turns, and the size of the file.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import megengine.functional as F
import megengine.module as M
import numpy as np
import onnx
import onnxruntime
from megengine import Parameter, Tensor

import qtrace
from benchmarks.timing import run_interleaved
from qtrace.comparing.sums import sqnr_db

__all__ = ["TextClassifier", "main", "randomized"]

RECIPES = ("int8", "w8", "w4", "w8a8_dynamic")
_SPREAD = 0.6  # of the logarithms of gains


class _Attention(M.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads, self.size = heads, width // heads
        self.q, self.k, self.v, self.out = (M.Linear(width, width) for _ in range(4))

    def _split(self, x: Tensor) -> Tensor:
        return F.transpose(x.reshape(x.shape[0], x.shape[1], self.heads, self.size), (0, 2, 1, 3))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (self._split(layer(x)) for layer in (self.q, self.k, self.v))
        scores = F.softmax(F.matmul(q, k, transpose_b=True) * self.size**-0.5, axis=-1)
        mixed = F.transpose(F.matmul(scores, v), (0, 2, 1, 3))
        return self.out(mixed.reshape(x.shape[0], x.shape[1], self.heads * self.size))


class _Block(M.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.first, self.attention, self.second = (
            M.LayerNorm(width),
            _Attention(width, heads),
            M.LayerNorm(width),
        )
        self.up, self.down = M.Linear(width, 4 * width), M.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.first(x))
        return x + self.down(F.gelu(self.up(self.second(x))))


class TextClassifier(M.Module):
    """An encoder of words with the layers of BERT, and a class for the text."""

    def __init__(self, width: int, depth: int, words: int = 2000, length: int = 64) -> None:
        super().__init__()
        self.words, self.places = (
            M.Embedding(words, width),
            Parameter(np.zeros((1, length, width), np.float32)),
        )
        self.blocks = M.Sequential(*(_Block(width, width // 64) for _ in range(depth)))
        self.norm, self.head = M.LayerNorm(width), M.Linear(width, 16)

    def forward(self, x: Tensor) -> Tensor:
        x = self.blocks(self.words(x) + self.places)
        return self.head(F.mean(self.norm(x), axis=1))


class Vit(M.Module):
    """A vision transformer on patches of 8 pixels, and a class for the image."""

    def __init__(self, width: int, depth: int, size: int = 64) -> None:
        super().__init__()
        self.patches = M.Conv2d(3, width, 8, 8)
        self.places = Parameter(np.zeros((1, (size // 8) ** 2, width), np.float32))
        self.blocks = M.Sequential(*(_Block(width, width // 64) for _ in range(depth)))
        self.norm, self.head = M.LayerNorm(width), M.Linear(width, 16)

    def forward(self, x: Tensor) -> Tensor:
        x = F.transpose(F.flatten(self.patches(x), 2), (0, 2, 1)) + self.places
        return self.head(F.mean(self.norm(self.blocks(x)), axis=1))


def randomized(net: M.Module) -> M.Module:
    """Gives ``net`` random weights, with norms whose gains have a wide spread, in eval mode."""
    rng = np.random.default_rng(0)
    for name, parameter in net.named_parameters():
        shape = tuple(int(n) for n in parameter.shape)
        if "norm" in name.lower() or "first" in name or "second" in name:
            value = (
                np.exp(_SPREAD * rng.normal(size=shape))
                if name.endswith("weight")
                else rng.normal(size=shape) / 5
            )
        else:
            fan = int(np.prod(shape[1:])) if len(shape) > 1 else 25
            value = rng.normal(size=shape) / np.sqrt(1.0 if "words" in name else fan)
        parameter._reset(Parameter(value.astype(np.float32)))
    net.eval()
    return net


def _peers(float_file: Path, folder: Path) -> dict[str, Path]:
    """Writes the files of onnxruntime's own tools."""
    from onnxruntime.quantization import QuantType, quantize_dynamic
    from onnxruntime.quantization.matmul_nbits_quantizer import MatMulNBitsQuantizer

    files = {
        "onnxruntime quantize_dynamic": folder / "ort_dynamic.onnx",
        "onnxruntime MatMulNBits": folder / "ort_w4.onnx",
    }
    dynamic, blocks = files.values()
    quantize_dynamic(
        float_file, dynamic, weight_type=QuantType.QUInt8, op_types_to_quantize=["MatMul", "Gemm"]
    )
    quantizer = MatMulNBitsQuantizer(
        onnx.load(float_file), block_size=32, is_symmetric=True, accuracy_level=1
    )
    quantizer.process()
    quantizer.model.save_model_to_file(str(blocks))
    return files


def _session(path: Path) -> onnxruntime.InferenceSession:
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    options.log_severity_level = 3
    return onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])


def _measure(net: M.Module, draw: Callable[[int, int], np.ndarray], samples: int, repeats: int) -> list[str]:
    """Returns a line of the table for each file."""
    seen, unseen, single = draw(samples, 1), draw(samples, 2), draw(1, 3)
    traced = qtrace.trace(net, Tensor(single))
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        files: dict[str, Path] = {"float": folder / "float.onnx"}
        qtrace.export(traced, files["float"])
        for recipe in RECIPES:
            prepared = qtrace.prepare(traced, recipe, samples=[seen[:4]])
            converted = qtrace.convert(
                qtrace.calibrate(prepared, np.split(seen, samples // 8), progress=False)
            )
            files[recipe] = folder / f"{recipe}.onnx"
            qtrace.export(converted, files[recipe])
        files |= _peers(files["float"], folder)
        sessions = {side: _session(path) for side, path in files.items()}
        feed = sessions["float"].get_inputs()[0].name
        # One sample a run, as it is deployed: the range of a batch is that of its samples.
        outputs = {
            side: np.concatenate([s.run(None, {feed: row[None]})[0] for row in unseen])
            for side, s in sessions.items()
        }
        runs: dict[str, Any] = {side: lambda s=s: s.run(None, {feed: single}) for side, s in sessions.items()}
        times = run_interleaved(runs, repeats, 3)
        sizes = {side: path.stat().st_size / 2**20 for side, path in files.items()}
    noise = {side: f"{sqnr_db(outputs['float'], outputs[side]):.1f}" for side in files if side != "float"}
    return [
        f"| {side} | {noise.get(side, '')} | {times.seconds(side, 1e-3).cpu:.1f} "
        f"| {times.ratio('float', side).cpu:.2f} | {sizes[side]:.2f} |"
        for side in files
    ]


def main(arguments: list[str] | None = None) -> int:
    """The command; returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.weights", description=__doc__)
    parser.add_argument(
        "--quick", action="store_true", help="networks so small that the figures mean nothing"
    )
    quick = parser.parse_args(arguments).quick
    width, depth, samples, repeats = (64, 1, 8, 2) if quick else (256, 2, 32, 15)
    cases = {
        "text classifier": (
            TextClassifier(width, depth),
            lambda n, seed: np.random.default_rng(seed).integers(0, 2000, (n, 64)).astype(np.int32),
        ),
        "ViT": (
            Vit(width, depth),
            lambda n, seed: np.random.default_rng(seed).normal(size=(n, 3, 64, 64)).astype(np.float32),
        ),
    }
    for name, (net, draw) in cases.items():
        print(f"\n{name}, width {width}, {depth} blocks\n")
        print("| file | dB | ms | x float | MB |\n| --- | --- | --- | --- | --- |")
        print("\n".join(_measure(randomized(net), draw, samples, repeats)), flush=True)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
