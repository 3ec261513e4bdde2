"""A plain traced module with qparams, read by MegEngine alone: numbers, grids, functions of qtrace."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import megengine.functional as F
import megengine.module as M
import numpy as np
import pytest
from megengine import Parameter, Tensor

import qtrace
from qtrace.errors import ExportError, GraphError
from qtrace.graph import functions
from qtrace.graph.types import TracedModule
from qtrace.graph.walk import exprs
from qtrace.preparation.model import QuantizedModel
from tests.nets import images, net

# Reads the file with qtrace out of reach, and fake-quantizes by MegEngine's own function.
_READER = """
import sys
sys.modules["qtrace"] = None
import json
import megengine as mge
import numpy as np
from megengine.quantization.utils import fake_quant_tensor

module = mge.load(sys.argv[1])
x = np.load(sys.argv[2])
nodes = [*module.graph.inputs[1:], *module.graph.nodes()]
qparams = {node.name: node.qparams for node in nodes if getattr(node, "qparams", None) is not None}
np.savez(
    sys.argv[3],
    output=module(mge.Tensor(x)).numpy(),
    rounded=fake_quant_tensor(mge.Tensor(x), qparams["x"]).numpy(),
    **{f"scale/{name}": q.scale.numpy() for name, q in qparams.items()},
)
dtypes = {name: [q.mode.name, q.dtype_meta.qmin, q.dtype_meta.qmax] for name, q in qparams.items()}
print(json.dumps({"dtypes": dtypes, "exprs": [str(e) for e in module.graph.exprs()]}))
"""


def _converted(module: M.Module, x: np.ndarray, config: Any = None) -> TracedModule:
    prepared = qtrace.prepare(qtrace.trace(module, x, check=False), config)
    return qtrace.convert(qtrace.calibrate(prepared, [x], progress=False))


def _read(file: Path, x: np.ndarray) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
    """Loads ``file`` in a process without qtrace; returns arrays and facts of what it read."""
    np.save(file.with_suffix(".npy"), x)
    command = [sys.executable, "-W", "ignore", "-c", _READER, str(file)]
    arrays = file.with_suffix(".npz")
    result = subprocess.run(
        [*command, str(file.with_suffix(".npy")), str(arrays)],
        capture_output=True,
        text=True,
        check=True,
        cwd=file.parent,
    )
    return dict(np.load(arrays)), json.loads(result.stdout.splitlines()[-1])


class _Functions(M.Module):
    """One call of each function that only qtrace has, between layers."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.bn, self.linear = M.Conv2d(4, 8, 3, padding=1), M.BatchNorm2d(8), M.Linear(8, 8)
        self.gain = Parameter(np.full(8, 1.5, np.float32))

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.bn(self.conv(x)))
        x = functions.channel_shuffle(x, 2) + functions.erf(x)
        x = functions.mish(x) + functions.gelu_tanh(x) + functions.hard_sigmoid(x, 0.1, 0.4)
        x = functions.scale_and_shift(x, self.gain.reshape(1, 8, 1, 1), self.gain.reshape(1, 8, 1, 1))
        x = functions.space_to_depth(x, 2).reshape(-1, 9, 32)
        x = functions.scaled_dot_product_attention(x, x, x)
        x = self.linear(x.reshape(-1, 36, 8))
        return functions.rms_norm(x, self.gain) + functions.rms_norm(x)


def test_megengine_reads_outputs_and_grids_without_qtrace(tmp_path: Path) -> None:
    x = images(2, 4, 6, 6)
    module = _Functions()
    module.eval()
    converted = _converted(module, x)
    arrays, facts = _read(qtrace.export(converted, tmp_path / "model.mge", format="traced"), x)
    expected = module(Tensor(x)).numpy()
    np.testing.assert_allclose(arrays["output"], expected, rtol=1e-4, atol=2e-4)
    for site in QuantizedModel(converted).sites:
        scale = site.bias_scale if site.sort == "bias" else site.qparams.scale
        np.testing.assert_array_equal(arrays[f"scale/{site.node.name}"].reshape(-1), scale.reshape(-1))
        if site.sort != "bias":
            scheme = site.qparams.scheme
            assert facts["dtypes"][site.node.name][1:] == [scheme.qmin, scheme.qmax]
    assert not [line for line in facts["exprs"] if "qsites" in line or "functions." in line]


@pytest.fixture(scope="module")
def pooled(tmp_path_factory: pytest.TempPathFactory) -> tuple[QuantizedModel, dict[str, np.ndarray]]:
    """A network whose pooling carries integers on, and what MegEngine reads of its file."""
    x, path = images(2, 4, 6, 6), tmp_path_factory.mktemp("pooled") / "model.mge"
    module = net(lambda self, x: F.flatten(F.max_pool2d(self.c(x), 2), 1), c=M.Conv2d(4, 6, 3))
    converted = _converted(module, x)
    return QuantizedModel(converted), _read(qtrace.export(converted, path, format="traced"), x)[0]


def test_megengines_own_fake_quant_rounds_as_the_site_does(
    pooled: tuple[QuantizedModel, dict[str, np.ndarray]],
) -> None:
    (model, arrays), x = pooled, images(2, 4, 6, 6)
    site = next(s for s in model.sites if s.node.name == "x")
    scale, zero = site.qparams.scale, site.qparams.zero_point
    ours = (site.integers(x) - zero) * scale
    # MegEngine rounds halves away from zero, the site to even: only a tie may differ.
    ties = np.abs(np.abs(x / scale) % 1.0 - 0.5) < 1e-4
    np.testing.assert_allclose(arrays["rounded"][~ties], ours[~ties], rtol=0, atol=1e-5)


def test_nodes_that_carry_integers_have_their_grid(
    pooled: tuple[QuantizedModel, dict[str, np.ndarray]],
) -> None:
    model, arrays = pooled
    carried = model.carried_qparams()
    assert carried
    for name, qparams in carried.items():
        np.testing.assert_array_equal(arrays[f"scale/{name}"], qparams.scale)


def test_the_converted_module_stays_as_it_was(tmp_path: Path) -> None:
    x = images(2, 4, 6, 6)
    module = _Functions()
    module.eval()
    converted = _converted(module, x)
    before = [str(e) for e in exprs(converted)], converted(Tensor(x)).numpy()
    qtrace.export(converted, tmp_path / "model.mge", format="traced")
    assert [str(e) for e in exprs(converted)] == before[0]
    np.testing.assert_array_equal(converted(Tensor(x)).numpy(), before[1])


def test_the_file_is_a_plain_traced_module_again(tmp_path: Path) -> None:
    x = images(2, 4, 6, 6)
    converted = _converted(net(lambda self, x: F.relu(self.c(x)), c=M.Conv2d(4, 6, 3)), x)
    plain = qtrace.load(qtrace.export(converted, tmp_path / "model.mge", format="traced"))
    with pytest.raises(GraphError, match="is not a converted module"):
        QuantizedModel(plain, "converted")
    again = qtrace.calibrate(qtrace.prepare(plain), [x], progress=False)
    assert len(QuantizedModel(again).sites) == len(QuantizedModel(converted).sites)


def test_a_plain_module_is_refused(tmp_path: Path) -> None:
    x = images(2, 4, 6, 6)
    traced = qtrace.trace(net(lambda self, x: F.relu(self.c(x)), c=M.Conv2d(4, 6, 3)), x, check=False)
    with pytest.raises(ExportError, match="format traced writes quantized modules"):
        qtrace.export(traced, tmp_path / "model.mge", format="traced")
    assert not list(tmp_path.iterdir())
