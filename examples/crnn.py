"""A CRNN that reads lines of digits: a float training, int8, fine-tuning, and an ONNX file, in one script.

Its convolutions and its head run on integers, its LSTM in float. Run it with ``python -m examples.crnn``.
"""

from __future__ import annotations

import tempfile
import time
from pathlib import Path

import cv2
import megengine as mge
import megengine.functional as F
import megengine.module as M
import numpy as np
import onnxruntime
from megengine.autodiff import GradManager
from megengine.optimizer import Adam

import qtrace
from qtrace.gradients import fast_gradients

HEIGHT, SLOT, DIGITS = 16, 12, 5  # pixels of a line, of the place of a digit, and digits
_STEPS = SLOT // 4  # of the network for each digit


class Crnn(M.Module):
    """Two convolutions, an LSTM over the columns that they leave, and a class for each column."""

    def __init__(self, hidden: int = 32) -> None:
        super().__init__()
        self.conv1, self.bn1 = M.Conv2d(1, 8, 3, stride=2, padding=1), M.BatchNorm2d(8)
        self.conv2, self.bn2 = M.Conv2d(8, 16, 3, stride=2, padding=1), M.BatchNorm2d(16)
        self.lstm = M.LSTM(16 * HEIGHT // 4, hidden, bidirectional=True)
        self.head = M.Linear(2 * hidden, 10)

    def forward(self, x: mge.Tensor) -> mge.Tensor:
        x = F.relu(self.bn1(self.conv1(x)))
        x = F.relu(self.bn2(self.conv2(x)))
        columns = F.transpose(F.reshape(x, (x.shape[0], 16 * HEIGHT // 4, -1)), (2, 0, 1))
        return F.transpose(self.head(self.lstm(columns)[0]), (1, 0, 2))


def lines(count: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Renders lines of digits in several fonts, sizes and slants, with noise; returns them and the digits."""
    random = np.random.default_rng(seed)
    images = np.empty((count, 1, HEIGHT, SLOT * DIGITS), np.float32)
    digits = random.integers(0, 10, (count, DIGITS)).astype(np.int32)
    fonts = (cv2.FONT_HERSHEY_SIMPLEX, cv2.FONT_HERSHEY_DUPLEX, cv2.FONT_HERSHEY_COMPLEX_SMALL)
    for image, line in zip(images, digits, strict=True):
        canvas = np.zeros((HEIGHT, SLOT * DIGITS), np.uint8)
        face, size = fonts[random.integers(3)], float(random.uniform(0.38, 0.52))
        for place, digit in enumerate(line):
            at = SLOT * place + int(random.integers(0, 4)), int(random.integers(11, 15))
            cv2.putText(canvas, str(digit), at, face, size, 255, 1, cv2.LINE_AA)
        image[0] = canvas / np.float32(255) + random.normal(0, 0.1, canvas.shape)
    return images, digits


def accuracy(scores: np.ndarray, digits: np.ndarray) -> float:
    """Returns the share of digits that are read right."""
    places = scores.reshape(len(scores), DIGITS, _STEPS, 10).sum(axis=2)
    return float((places.argmax(axis=2) == digits).mean())


def train(network: M.Module, images: np.ndarray, digits: np.ndarray, epochs: int, rate: float) -> None:
    """Trains on the digit of each column."""
    parameters = list(network.parameters())
    manager, optimizer = GradManager().attach(parameters), Adam(parameters, lr=rate)
    random = np.random.default_rng(0)
    for epoch in range(epochs):
        for group in optimizer.param_groups:
            group["lr"] = rate * (1 - epoch / epochs)
        for picks in np.array_split(random.permutation(len(images)), len(images) // 32):
            labels = mge.Tensor(np.repeat(digits[picks], _STEPS, axis=1).reshape(-1))
            with manager:
                scores = network(mge.Tensor(images[picks]))
                manager.backward(F.nn.cross_entropy(F.reshape(scores, (-1, 10)), labels))
            optimizer.step().clear_grad()


def run(folder: Path, training: int = 1200, epochs: int = 6, unseen: int = 1000) -> dict[str, float]:
    """Trains, quantizes, fine-tunes, exports and verifies; returns the accuracies and times of both files."""
    mge.config.async_level = 0  # at which MegEngine's gradients on CPU are right
    mge.random.seed(0)
    (images, digits), (others, truth) = lines(training, 1), lines(unseen, 2)
    network = Crnn()
    network.train()
    with fast_gradients(network):
        train(network, images, digits, epochs, 6e-3)
    network.eval()
    traced = qtrace.trace(network, images[:2])
    prepared = qtrace.prepare(traced, {"placement": "everything"})
    qtrace.calibrate(prepared, [images[i : i + 32] for i in range(0, 320, 32)], progress=False)
    results = {}
    quantized = qtrace.export(qtrace.convert(prepared), folder / "calibrated.onnx")
    results["calibrated"] = accuracy(_read(quantized, others), truth)
    qtrace.set_phase(prepared, "train")
    train(prepared, images, digits, 1, 2e-4)
    qtrace.set_phase(prepared, "quantize")
    converted = qtrace.convert(prepared)
    files = {"float": qtrace.export(traced, folder / "float.onnx")}
    files["int8"] = qtrace.export(converted, folder / "int8.onnx")
    for name, path in files.items():
        results[name] = accuracy(_read(path, others), truth)
    results["verified"] = float(qtrace.verify(files["int8"], converted, [others[:16]]).passed)
    return results | times(files, others[:1])


def _read(path: str | Path, images: np.ndarray) -> np.ndarray:
    return np.asarray(_session(path).run(None, {"x": images})[0])


def _session(path: str | Path) -> onnxruntime.InferenceSession:
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    return onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])


def times(files: dict[str, str | Path], image: np.ndarray) -> dict[str, float]:
    """Returns the least CPU time of a run of each file in ms, measured in turns."""
    sessions = {name: _session(path) for name, path in files.items()}
    least = dict.fromkeys(files, float("inf"))
    for _ in range(300):
        for name, session in sessions.items():
            start = time.process_time()
            session.run(None, {"x": image})
            least[name] = min(least[name], time.process_time() - start)
    return {f"{name} ms": 1e3 * value for name, value in least.items()}


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as temporary:
        for title, figure in run(Path(temporary)).items():
            print(f"{title:12} {figure:.4f}")
