"""The contracts, one target a file, each with a constant ``CONTRACT``; the file name is its name."""

from __future__ import annotations

import importlib

from qtrace import plugins
from qtrace.errors import ExportError
from qtrace.onnxfile.contracts.base import Contract

__all__ = ["get", "known"]


def known() -> tuple[str, ...]:
    """Lists the names of all targets with a contract, sorted."""
    return plugins.packaged(__name__)


def get(name: str) -> Contract:
    """Returns the contract of a target.

    Raises:
        ExportError: when there is none; the message lists those that there are.
    """
    if name not in known():
        raise ExportError(f"there is no contract of a target {name!r}; known: {', '.join(known())}.")
    contract: Contract = importlib.import_module(f"{__name__}.{name}").CONTRACT
    return contract
