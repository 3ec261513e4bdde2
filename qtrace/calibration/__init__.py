"""Calibration: engines that run a prepared graph, statistics of its sites, and parameters from them.

An engine runs the graph in float and shows the values of the watched nodes to observers. Observers are
numpy and merge exactly, so one worker, many workers and a resumed run give the same qparams. ``running.py``
makes the jobs of its workers (``workers/``) and says what a worker does with one. ``data/`` reads the
batches. The algorithms of ``ptq/`` that need data run at the end. ``gptq`` goes through both graphs once:
``ptq/layers/statistics.py`` stops before each layer and collects sums over sampled positions. Only they
decide what the layer becomes. onnxruntime runs each batch on one thread,
several batches at once. Products of matrices that decide use one thread of BLAS, several of
them at once (``process.py``). The bytes are the same for any number of threads.
"""
