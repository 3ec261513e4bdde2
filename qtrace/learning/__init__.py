"""What every algorithm that learns by gradients shares: the engines, Adam, the loop, the choice of an engine.

``qat/`` has what your own training loop may use. ``finetune`` needs no labels. What learns by gradients,
here and in ``ptq/rounding/``, brings its loss and what a step moves: the loop, Adam and the engines,
MegEngine and torch, are here. In a run of ``finetune``, ``training.py`` takes the
steps, judges them on held-back data and keeps the time, and ``running.py`` writes the checkpoint.
"""
