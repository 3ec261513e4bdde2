"""What every algorithm that learns by gradients shares: the engines, Adam, the loop, the choice of an engine.

`reconstruct` and `adaround` (`ptq/rounding/`) and `finetune` (`extras/finetune/`) bring their loss.
"""
