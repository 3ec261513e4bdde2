"""A device that is not here: test vectors that go to it, and the tensors that come back, as a runtime."""

from qtrace.extras.device.dumped import dumped_tensors
from qtrace.extras.device.vectors import write_vectors

__all__ = ["dumped_tensors", "write_vectors"]
