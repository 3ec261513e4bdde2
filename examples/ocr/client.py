"""The public client ``rapidocr-onnxruntime``, as it is, with other files for its three networks."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from examples.ocr import package

# The client's name of a network -> the file of its package.
NETWORKS = {"det": package.DETECTOR, "cls": package.CLASSIFIER, "rec": package.RECOGNISER}


class Network:
    """A network of the client that keeps its inputs and counts its time.

    The time is that of the processor: other programs on a busy machine lengthen that of the clock. The client
    runs on one thread.

    Args:
        session: the client's own session.
        keeps: whether to keep the inputs.
    """

    def __init__(self, session: Any, keeps: bool) -> None:
        self._session, self._keeps = session, keeps
        self.inputs: list[np.ndarray] = []
        self.seconds = 0.0

    def __call__(self, batch: np.ndarray) -> Any:
        """Runs the client's session."""
        if self._keeps:
            self.inputs.append(batch)
        started = time.process_time()
        result = self._session(batch)
        self.seconds += time.process_time() - started
        return result

    def __getattr__(self, name: str) -> Any:
        return getattr(self._session, name)


class Client:
    """The client, on one thread.

    Args:
        files: the client's name of a network -> its file.
        keeps: whether to keep the inputs of the networks.

    Attributes:
        networks: the client's name of a network -> the network.
    """

    def __init__(self, files: Mapping[str, Path], keeps: bool = False) -> None:
        from rapidocr_onnxruntime import RapidOCR

        paths = {f"{name}_model_path": str(file) for name, file in files.items()}
        self._client = RapidOCR(intra_op_num_threads=1, inter_op_num_threads=1, **paths)
        detector, classifier, recogniser = self._client.text_det, self._client.text_cls, self._client.text_rec
        detector.infer = Network(detector.infer, keeps)
        classifier.infer = Network(classifier.infer, keeps)
        recogniser.session = Network(recogniser.session, keeps)
        self.networks = {"det": detector.infer, "cls": classifier.infer, "rec": recogniser.session}

    def read(self, page: np.ndarray) -> str:
        """Returns the text of a page (height x width x 3, uint8, blue first), without spaces.

        Whether a space or a new line stands between two words depends on a pixel between their boxes.
        """
        lines, _ = self._client(page)
        return "".join("".join(text.split()) for _, text, _ in lines or ())


def record_inputs(models: Path, pages: Sequence[np.ndarray]) -> dict[str, list[np.ndarray]]:
    """Returns the inputs that the client gives each network for some pages: batches of unlike sizes."""
    client = Client({name: models / file for name, file in NETWORKS.items()}, keeps=True)
    for page in pages:
        client.read(page)
    return {name: network.inputs for name, network in client.networks.items()}


def read_in_turns(
    clients: Mapping[str, Client], pages: Sequence[np.ndarray], passes: int
) -> tuple[dict[str, list[str]], dict[str, list[dict[str, float]]]]:
    """Reads pages by several clients in turns, so that a change of the machine's load meets all of them.

    Args:
        clients: the clients by their names.
        pages: the pages.
        passes: how often each client reads all pages.

    Returns:
        Client -> its texts; and client -> for each pass, network -> its seconds for all pages.
    """
    texts: dict[str, list[str]] = {name: [] for name in clients}
    seconds: dict[str, list[dict[str, float]]] = {name: [] for name in clients}
    for turn in range(passes):
        before = {name: _seconds(client) for name, client in clients.items()}
        for page in pages:
            for name, client in clients.items():
                text = client.read(page)
                if turn == 0:
                    texts[name].append(text)
        for name, client in clients.items():
            seconds[name].append({kind: t - before[name][kind] for kind, t in _seconds(client).items()})
    return texts, seconds


def _seconds(client: Client) -> dict[str, float]:
    return {kind: network.seconds for kind, network in client.networks.items()}
