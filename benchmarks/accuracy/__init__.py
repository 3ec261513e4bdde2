"""What quantization costs in accuracy, beside the tools that run on the same machine."""
