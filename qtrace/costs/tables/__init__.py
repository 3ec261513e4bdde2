"""The packaged cost tables, written by ``qtrace bench --kernels``.

``RUNTIME.json`` holds for every processor; a fit to another one may begin at ``RUNTIME.PROCESSOR.json``.
"""
