"""Measures the kernels of a runtime over a grid of shapes and writes a cost table, which takes some minutes.

python -m benchmarks.kernels -o table.json
python -m benchmarks.kernels --runtime openvino -o openvino.json

Run it on an idle machine. `cost_table: table.json` in a recipe reads it, and so does `bench --predict`.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from benchmarks.kernels.tables import SUPPORTED, measure_table
from qtrace.display import progress_bar
from qtrace.storage.outputs import output_file


def main() -> None:
    """Measures the table that the command line asks for."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.kernels", description=__doc__)
    parser.add_argument("--runtime", choices=SUPPORTED, default="onnxruntime")
    parser.add_argument("-o", "--out", type=Path, required=True, help="the file to write")
    parser.add_argument("--force", action="store_true", help="replace a file of another tool")
    options = parser.parse_args()
    with (
        output_file(options.out, force=options.force) as partial,
        progress_bar(desc="kernels", unit="measurement", disable=False) as bar,
    ):

        def advance(count: int, whole: int) -> None:
            bar.total = whole
            bar.update(count)

        table = measure_table(options.runtime, advance)
        partial.write_text(table.to_json(), encoding="utf-8")
    print(options.out)


if __name__ == "__main__":
    main()
