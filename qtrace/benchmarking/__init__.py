"""Measured time of whole files side by side.

``costs/`` says how long an op takes in a runtime, by shape and form, from a packaged table of times.
``benchmarks/kernels/``, outside the package, measures such tables. ``benchmarking/`` times whole files in
turns and watches the load of the machine (``files.py``), shows profiles, and predicts the time of a
file from a table.
"""
