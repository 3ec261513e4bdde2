"""Contracts: what a target expects of a quantized ONNX file, checked without the target.

A contract is a list of rules, each with the document that states it. The file may be of any tool.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from qtrace.plugins import load_when_used

if TYPE_CHECKING:
    from qtrace.extras.contracts.checking import ContractReport, check_contract, check_file_for, fix_contract

load_when_used(
    __name__,
    {
        "qtrace.extras.contracts.checking": "ContractReport check_contract check_file_for fix_contract",
    },
)
