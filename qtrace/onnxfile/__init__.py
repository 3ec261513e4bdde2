"""ONNX files: read once, with the tensors that they keep in other files, and run in onnxruntime.

`reading` opens a file, `external_data` reads and writes the tensors next to it, `model` has its graph with
constants, producers and readers, and `sessions` runs it. Nothing here needs MegEngine.
"""
