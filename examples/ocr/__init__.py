"""Trained networks that read text: imported from ONNX, quantized, fine-tuned, exported and measured."""

import os

# Several threads that wait for each other cost more than they bring on the small products of these networks.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
