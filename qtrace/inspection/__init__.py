"""What a quantized graph does and why: explanations, comparisons, and the float twin."""
