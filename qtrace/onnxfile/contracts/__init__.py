"""Contracts: what a target expects of a quantized ONNX file, checked without the target.

A contract is a list of rules, each with the document that states it. The file may be of any tool.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from qtrace.errors import ExportError
from qtrace.onnxfile.contracts.report import ContractReport
from qtrace.onnxfile.reading import load_model
from qtrace.runtimes.host import RuntimeHost

__all__ = ["ContractReport", "check_contract", "fix_contract"]

_FIXED = "qtrace.fixed_for"


def check_contract(path: Path, target: str, host: RuntimeHost | None = None) -> ContractReport:
    """Checks an ONNX file against the contract of a target.

    Args:
        path: the file.
        target: the name of the target, such as ``tensorrt``.
        host: the interpreter or machine whose onnxruntime is asked for its kernels; None for this one.

    Raises:
        ExportError: when the file cannot be read, lacks quantized ops, or the target lacks a contract.
    """
    return _checked(path, target, host)[0]


def fix_contract(path: Path, target: str, host: RuntimeHost | None = None) -> tuple[bytes, ContractReport]:
    """Repairs what is mechanical in an ONNX file, and checks the result.

    Args:
        path: the file, which is only read.
        target: the name of the target.
        host: see `check_contract`.

    Returns:
        The repaired file, and the report on it, which has what was repaired.

    Raises:
        ExportError: for what `check_contract` refuses, or when the result is no valid ONNX.
    """
    report, data = _checked(path, target, host, fixing=True)
    return data, report


def _checked(
    path: Path, target: str, host: RuntimeHost | None, fixing: bool = False
) -> tuple[ContractReport, bytes]:
    """Reads a file, repairs it if asked to, and reports on what is left."""
    if path.suffix.lower() != ".onnx":
        raise ExportError(f"{path} is not an ONNX file by its name: contracts are for files like model.onnx.")
    model, folder = load_model(path)
    if folder is not None:
        raise ExportError(
            f"{path} has more than 2 GiB of tensors, which a check cannot load: check a part of it."
        )
    # Below this, all modules need the package onnx, which `load_model` has looked for.
    from qtrace.onnxfile.contracts.checking import check_model, fix_model
    from qtrace.onnxfile.contracts.targets import get

    contract = get(target)
    fixed = fix_model(model, contract, path) if fixing else ()
    if fixing:
        _mark(model, target)
    return check_model(model, contract, path, fixed, host), model.SerializeToString() if fixing else b""


def _mark(model: Any, target: str) -> None:
    """Writes down that qtrace repaired the file, by which a later repair may replace it."""
    entries = [entry for entry in model.metadata_props if entry.key == _FIXED]
    entry = entries[0] if entries else model.metadata_props.add(key=_FIXED)
    entry.value = target
