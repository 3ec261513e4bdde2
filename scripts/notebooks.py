"""Runs the notebooks of the docs in a kernel of their own and stores what their cells show.

``make notebooks`` rewrites the outputs; `tests/site/test_notebooks.py` compares a run with what is stored.
"""

from __future__ import annotations

import argparse
import os
import re
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

__all__ = ["FOLDER", "VARIES", "execute", "main", "notebooks", "stable_text", "texts"]

ROOT = Path(__file__).resolve().parent.parent
FOLDER = ROOT / "docs" / "notebooks"
VARIES = "varies"  # the tag of a cell whose rows depend on measured values
_TIMEOUT = 900  # seconds for a cell; a notebook takes less than two minutes on a quiet core
_NUMBER = re.compile(r"[-+]?\d[\d.,]*(e[-+]?\d+)?")
_GAPS = re.compile(r"[\s\-]+")


def notebooks() -> list[Path]:
    """Returns the files of all notebooks."""
    return sorted(FOLDER.glob("*.ipynb"))


def execute(path: Path) -> Any:
    """Runs a notebook in an empty folder and returns it with its new outputs.

    Raises:
        nbclient.exceptions.CellExecutionError: when a cell fails.
    """
    import nbformat
    from nbclient import NotebookClient

    notebook = nbformat.read(path, as_version=4)
    variables = {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    with tempfile.TemporaryDirectory() as folder, mock.patch.dict(os.environ, variables):
        client = NotebookClient(
            notebook,
            timeout=_TIMEOUT,
            kernel_name="python3",
            resources={"metadata": {"path": folder}},
            record_timing=False,
        )
        client.execute()
    return notebook


def texts(cell: Any) -> Iterator[str]:
    """Yields what a code cell shows as text."""
    for output in cell.get("outputs", ()):
        if output["output_type"] == "stream":
            yield output["text"]
        elif "data" in output and "image/png" not in output["data"]:
            yield output["data"].get("text/plain", "")


def stable_text(cell: Any) -> str:
    """Returns what a cell shows without what another processor may compute otherwise.

    Numbers and the widths of columns are left out. Of a cell with the tag ``varies`` the first line and the
    verdict count.
    """
    text = "\n".join(texts(cell)).strip()
    if VARIES in cell.metadata.get("tags", ()):
        text = "\n".join([*text.splitlines()[:1], *re.findall(r"verdict +\w+", text)])
    return _GAPS.sub(" ", _NUMBER.sub("#", text)).strip()


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the notebooks that are named, or all, and stores their outputs."""
    import nbformat

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("files", nargs="*", type=Path, help="the notebooks; by default all")
    for path in parser.parse_args(arguments).files or notebooks():
        notebook = execute(path)
        notebook.metadata["language_info"] = {"name": "python"}
        nbformat.write(notebook, path)
        print(path)
    return 0


if __name__ == "__main__":
    sys.exit(main())
