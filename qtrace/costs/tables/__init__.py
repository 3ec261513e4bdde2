"""The packaged cost tables, written by ``python -m benchmarks.kernels``.

``RUNTIME.json`` holds for every processor; a fit to another one may begin at ``RUNTIME.PROCESSOR.json``.
"""
