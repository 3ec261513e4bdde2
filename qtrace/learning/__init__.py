"""What every algorithm that learns by gradients shares: the engines, Adam, the loop, the choice of an engine.

`reconstruct` and `adaround` (`qtrace.ptq.rounding`) and `finetune` (`qtrace.finetuning`) bring their loss.
"""
