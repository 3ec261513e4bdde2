"""``--help``: each page ends with an example, and appears at once."""

from __future__ import annotations

import subprocess
import sys

import pytest
from click.testing import CliRunner

from qtrace import cli
from tests.cli.fakes import COMMANDS


@pytest.mark.parametrize(
    "args", [[], ["recipes"], ["recipes", "list"], ["recipes", "show"], *([c] for c in COMMANDS)]
)
def test_help_ends_with_an_example(args):
    result = CliRunner().invoke(cli.group, [*args, "--help"], prog_name="qtrace")
    assert result.exit_code == 0
    assert f"\nExample:\n  qtrace {args[0] if args else 'trace'} " in result.output


def test_loads_nothing_heavy():
    """So that it answers at once: these are what takes time."""
    code = (
        "import sys\nfrom qtrace.cli import main\n"
        "heavy = {'megengine', 'cv2', 'numpy', 'scipy', 'pydantic', 'onnx', 'onnxruntime'}\n"
        "try: main(['--help'])\n"
        "finally: sys.exit(' '.join(heavy & set(sys.modules)) or None)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
