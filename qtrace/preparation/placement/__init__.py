"""Placement: which ops run on integers, by the time of the runtime and the noise of rounding.

``prepare`` puts sites wherever the target can take them and a table of costs says that integers gain time
(``passes/place.py``); it rounds nothing. ``calibrate`` sets ranges and runs the algorithms for all of them.
Then the choice is made on the calibrated graph. A backward pass on a few samples that were held back says
which roundings its noise comes from (``placement/trials.py``). Minimum cuts give the labelling with the best
price of time and noise, and a run of the graph with the others switched off measures it
(``placement/trials.py``). Three rows, fastest, balanced and float, are kept in the record. Switching off
removes sites, by the annotation of the same graph for fewer ops on integers, and gives layers in float the
weights of the network back. Nothing here reads a clock: times come from the packaged table of the kind of
processor (``costs/``).
"""
