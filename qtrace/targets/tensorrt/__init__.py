"""NVIDIA's TensorRT."""
