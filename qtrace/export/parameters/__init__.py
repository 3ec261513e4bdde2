"""Files of quantization parameters, one kind a file."""
