"""MegEngine: a dump for its own int8 kernels, and a plain traced module with quantization parameters."""
