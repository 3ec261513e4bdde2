"""From a traced module to a prepared one: the passes, the phases, and the record that a model carries.

``prepare.py`` reads as three steps, each of which returns data: the float graph, what is quantized in it, and
the scales that the model brings (``passes/native.py``). Then it inserts. For the first step the graph is
copied flat. ``expand`` turns modules into functions, so that weights and biases are nodes. ``compose`` makes
one op of each activation function and norm that is written in pieces. The float algorithms of the config run
(``fuse_bn``, ``equalize``). In the second, ``annotate`` decides for every expr, from the config and the
backend, and writes down the rule that matched or the reason why it stays float. ``insert`` only executes that
annotation. A layer whose ``method`` is ``dynamic`` or ``weight_only`` is no part of a chain. It has a site at
its weight, gives floats, and reads floats or a ``DynamicQuant``, which ``Annotation.dynamic`` places. What
``prepare`` measures, the ranges of parts of values, takes a forward pass of a few samples
(``placement/reference.py``). A `Record` keeps its decisions in the model. ``QuantizedModel`` (``model.py``)
is a view of such a model: each public function builds it once, and its sites know their nodes, consumers and
fake quants.

Scales that a model brings come in by two doors, on purpose. Where the file says every rounding (a quantized
ONNX file, ``passes/quantized_file.py``), the roundings decide the sites: nothing is annotated, and no integer
may change. Where it has a scale only for a layer's result (MegEngine's own quantization,
``passes/native.py``), the config and the backend decide the sites as for any model. Each site takes the scale
that fits, or is calibrated. Both end in ``insert`` and ``set_qparams``; a common front would have to do
without the annotation in one and with it in the other.

Where a graph selects rows (top-k, arg-max, NMS, a mask), one finder and one tape serve every stage
(Networks that select): ``comparing/selections.py`` finds the ops, and replays what one run
picks in another. ``passes/mixed_ranges.py`` keeps scores, what gates decide by, and what follows the picked
rows in float. The choice on the calibrated graph, ``compare``, ``verify`` and the verdict measure rows
next to the same rows of float, and the share of right picks apart.
"""
