"""ONNX files: read once, with the tensors that they keep in other files, and run in onnxruntime.

`reading` opens a file, `external_data` reads and writes the tensors next to it, `model` has its graph with
constants, producers and readers, and its editor, and `sessions` runs it. Nothing here needs MegEngine.

Whoever reads or runs such a file does it through this room, which needs no MegEngine. These are the importer,
the exporter's tensors next to a file, ``verify``, ``check``, ``diff``, predicted times, the engine of
``calibrate``, the nodes that a graph keeps of a file. The reader trusts nothing that a file says of its
size or of other files. A fault has one sentence, whoever met it. ``kernel_layouts.py`` knows the layouts of
onnxruntime's kernels. ``benchmarking/prediction.py`` follows them through a file,
``preparation/placement/layouts.py`` through a graph. A target's ``contract.py`` has what it takes.
"""
