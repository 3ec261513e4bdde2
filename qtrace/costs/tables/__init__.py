"""The packaged cost tables, one a runtime, written by ``qtrace bench --kernels``."""
