"""Values of options: the shapes that ``--shape`` takes and refuses."""

from __future__ import annotations

import pytest

from qtrace.cli.options import ShapeType


@pytest.mark.parametrize("text", ["", "x", "0x3", "-1x3", "1x", "3.5", "1,3", "٣", "100000x100000", "9" * 30])
def test_no_shape(text):
    with pytest.raises(Exception, match="shape|values"):
        ShapeType().convert(text, None, None)


def test_shape():
    assert ShapeType().convert("1x3X224x224", None, None) == (1, 3, 224, 224)
