"""Kinds of files with quantization parameters by tensor name, and the float model that they belong to."""
