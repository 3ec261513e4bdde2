"""Networks where they run: int8 files beside float, and beside the files of other tools, in onnxruntime."""

from benchmarks.deployed.rows import RESULTS

__all__ = ["RESULTS"]
