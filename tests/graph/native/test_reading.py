"""Scale and zero point of MegEngine's observers, fake quants and integer types."""

from __future__ import annotations

from functools import partial

import megengine as mge
import megengine.module as M
import numpy as np
from megengine.core.tensor import dtype as types
from megengine.core.tensor.dtype import QuantDtypeMeta
from megengine.module import qat as Q
from megengine.quantization import QConfig, easyquant_qconfig, min_max_fakequant_qconfig, tqt_qconfig
from megengine.quantization.fake_quant import LSQ, TQT, FakeQuantize
from megengine.quantization.observer import HistogramObserver, MinMaxObserver, PassiveObserver
from megengine.quantization.quantize import reset_qconfig
from megengine.quantization.utils import QuantMode, create_qparams

from qtrace.graph.native import read_dtype, read_fake_quant
from qtrace.scheme import QParams, QScheme
from tests.each import each_of
from tests.native_nets import images

LSQ_QCONFIG = QConfig(None, None, partial(LSQ, dtype="qint8_narrow"), partial(LSQ, dtype="qint8"))


def layer(qconfig: QConfig, steps: int = 1) -> Q.Conv2d:
    module = Q.Conv2d.from_float_module(M.Conv2d(3, 4, 1))
    module.weight[...] = images(1, 4, 3, 1, 1)
    module.set_qconfig(qconfig)
    for step in range(steps):
        module(mge.Tensor(images(step, 2, 3, 4, 4)))
    return module


def given(module: Q.QATModule, side: str) -> QParams:
    qparams = read_fake_quant(module, side)
    assert isinstance(qparams, QParams), qparams
    return qparams


def rounded(qparams: QParams, x: np.ndarray) -> np.ndarray:
    scheme, zero = qparams.scheme, int(qparams.zero_point)
    q = np.clip(np.round(x / qparams.scale) + zero, scheme.qmin, scheme.qmax)
    return ((q - zero) * qparams.scale).astype(np.float32)


@each_of("qconfig", [tqt_qconfig, easyquant_qconfig, LSQ_QCONFIG], ids=["tqt", "easy", "lsq"])
def test_fake_quants_that_learn_their_scale(qconfig: QConfig) -> None:
    module = reset_qconfig(layer(min_max_fakequant_qconfig), qconfig)
    for side, kept in (("weight", module.weight), ("act", mge.Tensor(images(5, 2, 4, 4, 4)))):
        fake = module.apply_quant_weight if side == "weight" else module.apply_quant_activation
        qparams = given(module, side)
        assert qparams.scheme.narrow == (side == "weight")
        np.testing.assert_allclose(rounded(qparams, kept.numpy()), fake(kept).numpy(), atol=1e-6)


@each_of("name", ["quint8", "qint8", "quint4"])
def test_zero_points(name: str) -> None:
    options = {"dtype": name, "mode": QuantMode.ASYMMERTIC}
    act = partial(MinMaxObserver, **options), partial(FakeQuantize, dtype=name)
    qconfig = QConfig(partial(MinMaxObserver, dtype="qint8_narrow"), act[0], None, act[1])
    module = layer(qconfig)
    qparams = given(module, "act")
    x = mge.Tensor(images(5, 2, 4, 4, 4))
    assert not qparams.scheme.symmetric
    assert int(qparams.zero_point) != 0
    module.act_observer.disable()
    np.testing.assert_allclose(
        rounded(qparams, x.numpy()), module.apply_quant_activation(x).numpy(), atol=1e-6
    )


def test_types_of_tensors() -> None:
    half_away = QScheme(signed=True, symmetric=True, rounding="half_away")
    assert read_dtype(types.qint8(0.5)) == QParams(half_away, np.float32(0.5), np.int32(0))
    affine = read_dtype(types.quint8(0.5, 3))
    assert isinstance(affine, QParams)
    assert (affine.scheme.describe(), int(affine.zero_point)) == ("uint8 affine half-away", 3)
    four = read_dtype(types.qint4(0.5))
    assert isinstance(four, QParams)
    assert four.scheme.bits == 4
    assert read_dtype(None) == "its type has no scale"
    assert read_dtype(types.qint32(0.5)) == "qtrace has no scheme for its type QuantizedS32"


class Custom(MinMaxObserver):
    """An observer that returns whatever it was given."""

    def __init__(self, scale: object, zero: object = None, **options: object) -> None:
        super().__init__(**options)
        self.min_val, self.max_val = mge.Tensor(-1.0), mge.Tensor(1.0)
        self.returned = create_qparams(
            QuantMode.SYMMERTIC if zero is None else QuantMode.ASYMMERTIC,
            self.dtype,
            mge.Tensor(scale, dtype="float32"),
            None if zero is None else mge.Tensor(zero, dtype="float32"),
        )

    def get_qparams(self) -> object:
        return self.returned


ODD = QuantDtypeMeta("odd", None, "int8", -3, 90)


@each_of(
    ("observer", "reason"),
    [
        (None, "it has neither an observer nor a fake quant that knows a scale"),
        (partial(MinMaxObserver, dtype="qint8"), "its MinMaxObserver has seen no finite value"),
        (partial(HistogramObserver, dtype="qint8"), "its HistogramObserver has seen no finite value"),
        (partial(PassiveObserver, dtype="qint8"), "its PassiveObserver was given no scale"),
        (partial(Custom, [1.0, 2.0]), "it has 2 scales, and qtrace takes over one for each tensor"),
        (partial(Custom, 0.0), "its scale 0 and zero point 0 are impossible"),
        (partial(Custom, 1.0, 0.5), "its zero point 0.5 is no integer"),
        (partial(Custom, 1.0, dtype=ODD), "qtrace has no scheme for integers from -3 to 90"),
        (partial(Custom, 1.0, dtype="qint1"), "qtrace has no scheme for integers from 0 to 1"),
    ],
)
def test_what_cannot_be_read_says_why(observer: object, reason: str) -> None:
    module = layer(QConfig(None, observer, None, None), steps=0)
    assert read_fake_quant(module, "act") == reason
    assert "neither" in str(read_fake_quant(module, "weight"))


def test_an_infinite_range_says_why() -> None:
    module = layer(QConfig(None, partial(MinMaxObserver, dtype="qint8"), None, None), steps=0)
    module(mge.Tensor(np.full((1, 3, 2, 2), np.inf, np.float32)))
    assert read_fake_quant(module, "act") == "its MinMaxObserver has seen no finite value"


def test_tqt_learns_a_logarithm() -> None:
    module = layer(QConfig(None, None, partial(TQT, dtype="qint8"), partial(TQT, dtype="qint8")), steps=0)
    module.act_fake_quant.scale[...] = -3.0
    assert float(given(module, "act").scale) == 0.125
