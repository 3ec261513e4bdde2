"""MegEngine's hub loads what downloads files when it downloads one."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path


def _run(code: str, *arguments: str) -> list[str]:
    done = subprocess.run(
        [sys.executable, "-c", f"import sys, qtrace; {code}", *arguments],
        capture_output=True,
        text=True,
        check=True,
    )
    return done.stdout.split()


def test_qtrace_loads_megengine_without_it_and_a_download_of_the_hub_loads_it(tmp_path: Path) -> None:
    source, target = tmp_path / "source", tmp_path / "target"
    source.write_bytes(b"weights")
    code = (
        "qtrace.prepare; print('megengine' in sys.modules, 'megfile' in sys.modules); "
        "from megengine.utils.http_download import download_from_url; "
        "download_from_url(*sys.argv[1:]); import megfile; print(megfile.smart_getsize(sys.argv[2]))"
    )
    assert _run(code, str(source), str(target)) == ["True", "False", "7"]
    assert target.read_bytes() == b"weights"


def test_a_program_that_has_loaded_it_keeps_it() -> None:
    code = (
        "import megfile; qtrace.prepare; from megengine.utils import http_download; "
        "print(sys.modules['megfile'] is megfile, http_download.smart_copy is megfile.smart_copy)"
    )
    assert _run(code) == ["True", "True"]
