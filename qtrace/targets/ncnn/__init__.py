"""ncnn: an int8 or float net, ``.param`` and ``.bin``."""
