"""onnxruntime on CPU."""
