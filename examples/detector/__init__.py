"""A small detector on generated shapes: trained, quantized, exported and measured."""

import os

# Several threads that wait for each other cost more than they bring on the small products of this network.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
