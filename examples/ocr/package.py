"""The trained networks, in the installed package ``rapidocr-onnxruntime``."""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path

RECOGNISER, DETECTOR = "ch_PP-OCRv4_rec_infer.onnx", "ch_PP-OCRv4_det_infer.onnx"
CLASSIFIER = "ch_ppocr_mobile_v2.0_cls_infer.onnx"  # of the orientation of a line

_PACKAGE = "rapidocr_onnxruntime"
_NOT_INSTALLED = "rapidocr-onnxruntime is not installed: run make ocr-demo, or pip install -e '.[ocr-demo]'."


class MissingModelsError(Exception):
    """The files of the networks are not where they should be."""


def models_folder() -> Path:
    """Returns the folder of the networks; OCR_MODELS may name another than that of the package.

    Raises:
        MissingModelsError: when the package is not installed, or the folder lacks a file.
    """
    named = os.environ.get("OCR_MODELS")
    if named:
        folder = Path(named)
    else:
        spec = importlib.util.find_spec(_PACKAGE)
        if spec is None or spec.origin is None:
            raise MissingModelsError(_NOT_INSTALLED)
        folder = Path(spec.origin).parent / "models"
    missing = [name for name in (RECOGNISER, DETECTOR) if not (folder / name).is_file()]
    if missing:
        raise MissingModelsError(
            f"{folder} has no {' and no '.join(missing)}: install rapidocr-onnxruntime, or set OCR_MODELS."
        )
    return folder


def check_client() -> None:
    """Checks that the public client can be run.

    Raises:
        MissingModelsError: when its package is not installed.
    """
    if importlib.util.find_spec(_PACKAGE) is None:
        raise MissingModelsError(_NOT_INSTALLED)
    if not (models_folder() / CLASSIFIER).is_file():
        raise MissingModelsError(f"{models_folder()} has no {CLASSIFIER}, which the client needs.")
