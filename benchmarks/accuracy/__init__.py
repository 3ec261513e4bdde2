"""The accuracy that quantization costs, beside the tools that run on the same machine."""
