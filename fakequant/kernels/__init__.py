"""The quantize-dequantize operation, its gradients, and the programs that compute it."""
