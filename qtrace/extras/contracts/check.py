"""Checks an ONNX file against the contract of a target, and repairs what is mechanical."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from qtrace.errors import ExportError
from qtrace.extras.contracts.base import CONTRACTS
from qtrace.extras.contracts.checking import ContractReport, check_model, fix_model
from qtrace.onnxfile.reading import load_model
from qtrace.plugins.options import check_arguments
from qtrace.runtimes.host import RuntimeHost
from qtrace.storage.outputs import output_file

__all__ = ["check_contract", "check_file_for", "fix_contract"]

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


@check_arguments
def check_file_for(
    file: str | os.PathLike[str],
    target: str,
    *,
    out: str | os.PathLike[str] | None = None,
    force: bool = False,
    runtime_host: RuntimeHost | None = None,
) -> ContractReport:
    """Checks whether a quantized ONNX file keeps the contract of a target, as ``qtrace check`` does.

    Args:
        file: an ONNX file with QuantizeLinear and DequantizeLinear nodes, of any tool.
        target: ``onnxruntime``, ``qnn``, ``ryzenai``, ``ryzenai_xint8`` or ``tensorrt``.
        out: where to write a copy in which all that is mechanical is repaired; None for no copy.
        force: whether ``out`` may replace a file of another tool.
        runtime_host: the interpreter or machine whose onnxruntime says which ops compute in float, for the
            target ``onnxruntime``; None for this one.

    Returns:
        The violations with their rules and cures, and the ops that compute in float.

    Raises:
        ExportError: for a file that cannot be read or is not quantized, or an unknown target.
        QtraceError: when ``out`` cannot be written.
    """
    if out is None:
        return check_contract(Path(file), target, runtime_host)
    data, report = fix_contract(Path(file), target, runtime_host)
    with output_file(Path(out), force=force) as partial:
        Path(partial).write_bytes(data)
    return report


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
    contract = CONTRACTS.get(target)
    fixed = fix_model(model, contract, path) if fixing else ()
    if fixing:
        _mark(model, target)
    return check_model(model, contract, path, fixed, host), model.SerializeToString() if fixing else b""


def _mark(model: Any, target: str) -> None:
    """Writes down that qtrace repaired the file, by which a later repair may replace it."""
    entries = [entry for entry in model.metadata_props if entry.key == _FIXED]
    entry = entries[0] if entries else model.metadata_props.add(key=_FIXED)
    entry.value = target
