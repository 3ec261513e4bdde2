"""ONNX files: read once, with the tensors that they keep in other files, and run in onnxruntime.

`external_data` reads and writes files with the tensors next to them. `model` has the graph with constants,
producers and readers, and its editor. `local_session` and `sessions` run it, `kernels` knows onnxruntime's
integer kernels. `fragment` has a few nodes as they are in a file, `selecting` those that select.

All that reads or runs ONNX files does so through this room, which needs no MegEngine. The reader trusts
nothing that a file says of its size or of other files. A fault has one sentence, whoever met it. A target's
``contract.py`` has what it takes.
"""
