from __future__ import annotations

from hypothesis import settings

# No deadline: a loaded machine is not a bug.
settings.register_profile("qtrace", deadline=None)
settings.load_profile("qtrace")
