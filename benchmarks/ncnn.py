"""Measures qtrace's default for ncnn beside float, with 16 bits and without: ``python -m benchmarks.ncnn``.

Options are those of ``benchmarks.shipped``.
"""

from __future__ import annotations

import sys

from benchmarks.shipped.__main__ import main

if __name__ == "__main__":
    sys.exit(main(["--runtime", "ncnn", *sys.argv[1:]]))
