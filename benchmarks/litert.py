"""qtrace's default for LiteRT beside ai-edge-quantizer: ``python -m benchmarks.litert --peer PYTHON``.

``PYTHON`` is an interpreter with ai-edge-quantizer. Further options are those of ``benchmarks.shipped``.
"""

from __future__ import annotations

import sys

from benchmarks.shipped.__main__ import main

if __name__ == "__main__":
    sys.exit(main(["--runtime", "litert", *sys.argv[1:]]))
