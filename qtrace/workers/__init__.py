"""Work that is shared out: to processes of this machine (`processes.py`) or to a Ray cluster (`ray.py`).

`calibrate` and `tune` bring their `Job`; nothing here knows what it does.
"""
