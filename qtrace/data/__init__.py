"""Sources of calibration data: arrays in a file, a folder of images, or the user's own loader.

The public names are loaded when they are first used: who checks batches needs no reader of images.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from qtrace.plugins import load_when_used

if TYPE_CHECKING:
    from qtrace.data.arrays import blame, import_object, is_installed, is_object_name
    from qtrace.data.base import Batch, DataSource, SizedSource
    from qtrace.data.opening import open_data

_HOMES = {
    "qtrace.data.base": "Batch DataSource SizedSource",
    "qtrace.data.arrays": "blame import_object is_installed is_object_name",
    "qtrace.data.opening": "open_data",
}

load_when_used(__name__, _HOMES)
