"""Plugins of other packages: found by entry points of real installed metadata, and by ``pkg.mod:NAME``."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterator
from importlib import metadata
from pathlib import Path

import click
import megengine.functional as F
import megengine.module as M
import numpy as np
import onnx
import pytest
from megengine.traced_module import wrap

import qtrace
from qtrace import cli, ops, plugins
from qtrace.benchmarking import runners
from qtrace.cli import program
from qtrace.config import backends
from qtrace.errors import ConfigError, ExportError, UnsafeFileError
from qtrace.export import formats
from qtrace.extras.contracts import check_contract
from qtrace.extras.contracts.base import CONTRACTS
from qtrace.graph import composites, exprs
from qtrace.observers.base import Observer
from qtrace.ops import OpRule, Role
from qtrace.ops.arguments import activation
from qtrace.ops.base import op_rule, typed
from qtrace.plugins import installed
from qtrace.verification import runtimes
from tests.each import each_of
from tests.extras.contracts.planted import FORMS, build
from tests.nets import images, net

MODULE = """
from qtrace.config.backends.base import Backend, Limits
from qtrace.export.format import Format
from qtrace.observers.minmax import MinMax
from qtrace.scheme import QScheme
from qtrace.verification.runtimes.base import Runtime

_LIMITS = Limits(bits=(8,), per_channel=False, affine=False, only_power_of_two=True)
_SCHEME = QScheme(signed=True, symmetric=True, power_of_two=True)
_BOTH = {"activation": _LIMITS, "weight": _LIMITS}
BACKEND = Backend("chip", _SCHEME, _SCHEME, frozenset({"conv2d"}), {}, False, _BOTH)
RUNTIME = Runtime("chip", package="numpy", extra="", suffixes=(".chip",), open=None)
NUMBER = 3


class Range(MinMax):
    pass


def files(converted, path, note=""):
    return {path: f"{len(converted.ops)} ops {note}".encode()}


FORMAT = Format("chip", files, suffixes=(".chip",), options=("note",))
"""
CONTRACT = """
from qtrace.extras.contracts.base import Contract, ContractRule, Violation


def _nodes(graph):
    return (Violation(node, "the chip takes no node", "leave it out") for node in graph.nodes())


_RULES = (ContractRule("no-nodes", "its data sheet", _nodes),)
CONTRACT = Contract("chip", "a chip", _RULES, frozenset(), frozenset(), frozenset())
NUMBER = 3
"""
OPS = """
import megengine.functional as F
from megengine.traced_module import wrap
from qtrace.ops import Role
from qtrace.ops.arguments import activation
from qtrace.ops.base import op_rule, typed


@wrap
def swish(x):
    return x * F.sigmoid(x)


@wrap
def other(x):
    return x * 2


_read = lambda expr: typed(expr, (activation(expr),))
RULE = op_rule("swish", Role.FLOAT, _read, swish, reason="it needs floats")
"""
X = images(1, 3, 6, 6)


@pytest.fixture
def chip(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., None]]:
    """A module `chip_target`; gives a function that installs packages which declare entry points."""
    (tmp_path / "chip_target.py").write_text(MODULE)
    monkeypatch.syspath_prepend(tmp_path)
    caches = (installed, ops.rules, ops._rules_by_target, composites.composite_rules)

    def install(package: str = "chip", **groups: str) -> None:
        info = tmp_path / f"{package}-1.0.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: 1.0\n")
        lines = [f"[qtrace.{group}]\n{entry}\n" for group, entry in groups.items()]
        (info / "entry_points.txt").write_text("\n".join(lines))
        for cache in caches:
            cache.cache_clear()

    for cache in caches:
        cache.cache_clear()
    yield install
    sys.modules.pop("chip_target", None)
    sys.modules.pop("chip_ops", None)
    sys.modules.pop("chip_rules", None)
    for cache in caches:
        cache.cache_clear()


def _conv() -> M.Module:
    return net(lambda self, x: self.conv(x), conv=M.Conv2d(3, 4, 3))


def _quantized(config: dict) -> qtrace.graph.types.TracedModule:
    prepared = qtrace.prepare(qtrace.trace(_conv(), X), config)
    return qtrace.convert(qtrace.calibrate(prepared, [X], progress=False))


def test_a_backend_by_its_name_and_by_its_entry_point(chip):
    model = _quantized({"backend": "chip_target:BACKEND"})
    assert "chip_target:BACKEND" in qtrace.explain(model).summary()
    chip(backends="chip = chip_target:BACKEND")
    assert "chip" in backends.known()
    scales = [
        site.qparams.scale
        for site in qtrace.preparation.model.QuantizedModel(_quantized({"backend": "chip"})).sites
        if site.plan
    ]
    assert scales
    assert all((np.frexp(scale)[0] == 0.5).all() for scale in scales)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"backend": "chip_target:NUMBER"}, "'chip_target:NUMBER' is of type int: define it as an object of"),
        ({"backend": "chip_target:NONE"}, "chip_target lacks NONE: define it there as an object of Backend"),
        ({"backend": "nowhere:X"}, "importing nowhere failed with ModuleNotFoundError"),
        ({"backend": "not a name:"}, "'not a name:' is not of the form pkg.mod:NAME"),
        ({"backend": "chip"}, "unknown backend 'chip'"),
        (
            {"backend": "chip_target:BACKEND", "weight": {"power_of_two": False}},
            "scales that are no powers of two",
        ),
    ],
)
def test_a_wrong_backend_is_one_sentence(chip, config, message):
    with pytest.raises(ConfigError, match=message):
        qtrace.prepare(qtrace.trace(_conv(), X), config)


def test_a_recipe_that_names_a_backend_of_code_needs_leave(chip, tmp_path):
    recipe = tmp_path / "npu.yaml"
    recipe.write_text("schema: qtrace/1\nbackend: chip_target:BACKEND\n")
    with pytest.raises(ConfigError, match=r"npu.yaml:2: backend names code, 'chip_target:BACKEND'"):
        qtrace.load_recipe(recipe)
    assert "chip_target" not in sys.modules
    assert qtrace.load_recipe(recipe, allow_code=True).backend == "chip_target:BACKEND"


def test_a_model_file_does_not_import_the_backend_that_it_names(chip, tmp_path):
    qtrace.save(_quantized({"backend": "chip_target:BACKEND"}), tmp_path / "model.mge")
    del sys.modules["chip_target"]
    loaded = qtrace.load(tmp_path / "model.mge")
    with pytest.raises(ConfigError, match="import chip_target first"):
        qtrace.explain(loaded)
    assert "chip_target" not in sys.modules
    import chip_target  # noqa: F401

    assert "chip_target:BACKEND" in qtrace.explain(loaded).summary()


def test_a_format_by_its_name_by_its_entry_point_and_by_its_suffix(chip, tmp_path):
    model = _quantized({"backend": "onnxruntime"})
    named = qtrace.export(model, tmp_path / "a.bin", format="chip_target:FORMAT", note="here")
    assert named.read_bytes() == b"1 ops here"
    with pytest.raises(ExportError, match="no format has the suffix '.chip'"):
        qtrace.export(model, tmp_path / "b.chip")
    chip(formats="chip = chip_target:FORMAT")
    assert "chip" in formats()
    assert qtrace.export(model, tmp_path / "b.chip").read_bytes() == b"1 ops "
    with pytest.raises(ExportError, match="format chip lacks option 'noise'; it knows: note"):
        qtrace.export(model, tmp_path / "b.chip", noise=1)
    with pytest.raises(ConfigError, match="'chip_target:files' is of type function: define it"):
        qtrace.export(model, tmp_path / "c.bin", format="chip_target:files")


def test_a_runtime_by_its_name_and_by_its_entry_point(chip):
    assert runtimes.get(Path("a.chip"), "chip_target:RUNTIME").name == "chip"
    with pytest.raises(ExportError, match="unknown runtime 'chip'"):
        runtimes.get(Path("a.chip"), "chip")
    chip(runtimes="chip = chip_target:RUNTIME")
    assert runtimes.get(Path("a.chip"), "chip") is runtimes.get(Path("a.chip"))


def test_a_contract_by_its_name_and_by_its_entry_point(chip, tmp_path):
    onnx.save(build(FORMS["qnn"]), tmp_path / "net.onnx")
    (tmp_path / "chip_rules.py").write_text(CONTRACT)
    findings = check_contract(tmp_path / "net.onnx", "chip_rules:CONTRACT").findings
    assert {finding.rule for finding in findings} == {"no-nodes"}
    with pytest.raises(ExportError, match="unknown contract 'chip'; known: .*tensorrt, or your own as"):
        check_contract(tmp_path / "net.onnx", "chip")
    with pytest.raises(ConfigError, match="'chip_rules:NUMBER' is of type int: define it as an object of"):
        check_contract(tmp_path / "net.onnx", "chip_rules:NUMBER")
    chip(contracts="chip = chip_rules:CONTRACT")
    assert "chip" in CONTRACTS.known()
    assert not check_contract(tmp_path / "net.onnx", "chip").passed


def test_an_observer_by_its_entry_point(chip):
    chip(observers="chip_range = chip_target:Range")
    assert "chip_range" in plugins.known("qtrace.observers")
    assert plugins.resolve("qtrace.observers", "chip_range", Observer).__name__ == "Range"
    assert _quantized({"observers": {"activation": "chip_range"}}) is not None


@pytest.fixture
def acme(chip, tmp_path: Path) -> np.ndarray:
    """An installed package with the target of the page own-target.md; gives samples for its networks."""
    page = (Path(__file__).parent.parent / "docs/guides/own-target.md").read_text()
    (tmp_path / "mynpu.py").write_text(re.search(r'title="mynpu.py"\n(.*?)```', page, re.DOTALL)[1])
    chip("acme", backends="acme=mynpu:BACKEND", formats="acme=mynpu:FORMAT", runtimes="acme=mynpu:RUNTIME")
    yield images(16, 3, 6, 6)
    sys.modules.pop("mynpu", None)


def test_the_one_call_writes_and_verifies_for_a_target_of_a_package(acme, tmp_path):
    result = qtrace.quantize(_conv(), acme, tmp_path / "q.mynpu", target="acme", progress=False)
    assert result.verify.passed
    assert result.verify.worst_lsb() == 0
    with np.load(tmp_path / "q.mynpu") as layers:
        assert layers["0.weight"].dtype.kind == "i"
    by_recipe = qtrace.quantize(
        _conv(), acme, tmp_path / "r.mynpu", recipe={"backend": "acme"}, progress=False
    )
    assert by_recipe.verify.passed
    with pytest.raises(ConfigError, match=r"q.onnx is no file for acme: name it q.mynpu, or give another"):
        qtrace.quantize(_conv(), acme, tmp_path / "q.onnx", target="acme")
    with pytest.raises(ConfigError, match=r"suffix .npu, which no target takes: .*\.mynpu \(acme\), "):
        qtrace.quantize(_conv(), acme, tmp_path / "q.npu")
    assert qtrace.split(qtrace.trace(_conv(), X), by_backend="acme") is not None


def test_the_command_writes_for_a_target_of_a_package(acme, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    qtrace.save(qtrace.trace(_conv(), X), "net.mge")
    np.save("x.npy", acme)
    for target in (["--target", "acme"], []):  # the suffix says it, too
        with pytest.raises(SystemExit) as ended:
            cli.main(["quantize", "net.mge", "--data", "x.npy", *target, "-o", "q.mynpu", "--force"])
        assert ended.value.code == 0
        assert "verified  every integer equals the graph's" in capsys.readouterr().err


def test_a_model_loads_the_plugins_of_a_package_and_nothing_else_of_it(chip, tmp_path):
    (tmp_path / "chip_ops.py").write_text(OPS)
    prepared = qtrace.prepare(qtrace.trace(_conv(), X), {"observers": {"activation": "chip_target:Range"}})
    import chip_ops

    for name, model in (
        ("class", prepared),
        ("function", qtrace.trace(lambda x: chip_ops.swish(x), X)),
        ("other", qtrace.trace(lambda x: chip_ops.other(x), X)),
    ):
        qtrace.save(model, tmp_path / f"{name}.mge")
        with pytest.raises(
            UnsafeFileError, match="is not on the allow-list; if you trust the file, allow it"
        ):
            qtrace.load(tmp_path / f"{name}.mge")
    chip(observers="range = chip_target:Range", op_rules="swish = chip_ops:RULE")
    assert "conv2d" in str(qtrace.explain(qtrace.load(tmp_path / "class.mge")))
    assert "it needs floats" in str(qtrace.explain(qtrace.load(tmp_path / "function.mge")))
    with pytest.raises(UnsafeFileError, match="would call the function chip_ops:other"):
        qtrace.load(tmp_path / "other.mge")


@each_of("version", [None, "an older one"])
def test_without_its_own_entry_points_qtrace_says_that_it_is_not_installed(chip, monkeypatch, version):
    older = metadata.EntryPoints([metadata.EntryPoint("check", "qtrace.contracts:check", "qtrace.commands")])
    monkeypatch.setattr(metadata, "entry_points", lambda: older if version else metadata.EntryPoints())
    installed.cache_clear()
    for call in (
        lambda: qtrace.load_recipe("w8a8"),
        lambda: plugins.load_object("qtrace.commands", "check", object),
    ):
        with pytest.raises(ConfigError, match=r"^the installed package qtrace is missing, or older .*pip"):
            call()


def test_names_that_clash_are_refused(chip):
    chip(backends="onnxruntime = chip_target:BACKEND")
    with pytest.raises(ConfigError, match="declare 'onnxruntime' .* of chip and as .* of qtrace: un"):
        backends.get("onnxruntime")


def test_two_packages_with_one_name_are_refused(chip):
    chip("one", backends="chip = chip_target:BACKEND")
    chip("two", backends="chip = chip_target:NUMBER")
    with pytest.raises(ConfigError, match="two installed packages declare 'chip'.* of one and as .* of two"):
        backends.known()


@wrap
def _swap(x):
    return F.concat([x[:, 1:], x[:, :1]], axis=1)


def _swap_rule() -> OpRule:
    return op_rule("swap", Role.FLOAT, lambda expr: typed(expr, (activation(expr),)), _swap, reason="a swap")


def test_an_op_that_carries_its_rule(monkeypatch):
    traced = qtrace.trace(net(lambda self, x: _swap(self.conv(x)), conv=M.Conv2d(3, 4, 3)), X)
    call = next(e for e in exprs(traced) if getattr(e, "func", None) is _swap)
    assert ops.unsupported(call) == "no rule for this op"
    monkeypatch.setattr(_swap, "qtrace_rule", _swap_rule(), raising=False)
    assert ops.read(call).kind == "swap"
    assert ops.read(call).rule.startswith("tests.test_plugins_installed:")
    assert "a swap" in str(qtrace.explain(qtrace.prepare(traced)))
    monkeypatch.setattr(_swap, "qtrace_rule", "swap")
    with pytest.raises(ConfigError, match="_swap.qtrace_rule is of type str: set an OpRule"):
        ops.read(call)


RULES = (_swap_rule(),)


def test_op_rules_and_composites_by_entry_points(chip):
    chip(op_rules=f"swap = {__name__}:RULES", composites="own = qtrace.graph.composites.norms:RULES")
    assert "swap" in ops.kinds()
    own = composites.norms.RULES
    assert composites.composite_rules()[: len(own)] == own


def test_an_op_rule_that_is_none_is_refused(chip):
    chip(op_rules="number = chip_target:NUMBER")
    with pytest.raises(
        ConfigError,
        match="'chip_target:NUMBER', which an installed package declares in qtrace.op_rules, is of type int",
    ):
        ops.rules()


def test_a_rule_for_an_op_that_has_one_is_refused(chip):
    chip(op_rules="conv = qtrace.ops.layers:RULES")
    with pytest.raises(ConfigError, match=r"two op rules read \w+: \w+ \(qtrace/ops/layers.py:\d+\)"):
        qtrace.prepare(qtrace.trace(_conv(), X))


def test_an_abstract_class_is_reported_what_it_lacks(chip, tmp_path):
    (tmp_path / "chip_half.py").write_text(
        "from qtrace.observers.base import Observer\nclass Half(Observer): pass\n"
    )
    with pytest.raises(
        ConfigError, match="is abstract: it has to implement _choose_range and .*Observer describes"
    ):
        plugins.resolve("qtrace.observers", "chip_half:Half", Observer)


def test_a_package_brings_commands_runners_and_parameter_files(chip, tmp_path, monkeypatch):
    (tmp_path / "chip_rules.py").write_text(
        "import click\n"
        "from qtrace.benchmarking.runners import Load\n"
        "from qtrace.export.parameters import ParameterFile\n"
        "LOAD = Load('chip', 'numpy', '', ('.chip',), open=None)\n"
        "TABLE = ParameterFile('a table', '.txt', lambda rows: 'sites: ' + str(len(rows)))\n"
        "hello = click.Command('hello')\n"
    )
    chip(
        commands="hello = chip_rules:hello",
        runners="chip = chip_rules:LOAD",
        parameters="table = chip_rules:TABLE",
    )
    assert "chip" in runners.known()
    model = _quantized({"backend": "onnxruntime"})
    qtrace.export(model, tmp_path / "m.onnx", format="onnx_float", params="table")
    assert (tmp_path / "m.txt").read_text().startswith("sites: ")
    monkeypatch.setattr(program, "group", click.Group("qtrace"))
    program._add_installed()
    assert {"hello", "tune", "finetune", "check", "diff", "split"} <= program.group.commands.keys()


def test_a_broken_command_of_a_package_is_named_and_stops_no_other(chip, monkeypatch, capsys):
    chip(commands="broken = nowhere:hello")
    monkeypatch.setattr(program, "group", click.Group("qtrace"))
    program._add_installed()
    assert "warning: 'nowhere:hello': importing nowhere failed" in capsys.readouterr().err
    assert {"tune", "check"} <= program.group.commands.keys()


def test_commands_that_clash_leave_the_program_its_own(chip, monkeypatch, capsys):
    chip(commands="tune = chip_target:BACKEND")
    monkeypatch.setattr(program, "group", click.Group("qtrace"))
    program._add_installed()
    assert "warning: two installed packages declare 'tune'" in capsys.readouterr().err
