"""Cost tables: exact at measured points, growing with every size, and clear about what they do not know."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from qtrace.config import backends
from qtrace.costs import FLOAT, INTEGER, LOOKUP, CostTable, Machine, Measurement, OpShape, families
from qtrace.errors import ConfigError
from tests.each import each_of

MACHINE = Machine("onnxruntime", "1.0", "a processor", ("avx2",), 1, "2026-01-01")


def conv(inputs: int, outputs: int, side: int, kernel: int = 1, groups: int = 1, stride: int = 1) -> OpShape:
    return OpShape(
        "conv2d",
        ((1, inputs, side * stride, side * stride),),
        ((1, outputs, side, side),),
        weight=(outputs, inputs // groups, kernel, kernel),
        stride=(stride, stride),
        groups=groups,
    )


def unary(kind: str, size: int) -> OpShape:
    return OpShape(kind, ((1, size),), ((1, size),))


POINTS = [
    Measurement(conv(i, o, s), FLOAT, 1e-6 + 1e-11 * i * o * s * s)
    for i in (16, 64, 256)
    for o in (16, 64, 256)
    for s in (4, 16, 64)
]
POINTS += [Measurement(unary("relu", n), FLOAT, 1e-6 + n * 1e-10) for n in (100, 10000)]
TABLE = CostTable(MACHINE, POINTS, per_run=1e-5)


def test_measured_points_are_exact():
    for point in POINTS:
        assert TABLE.seconds(point.op, point.form) == pytest.approx(point.seconds, rel=1e-9)


def test_time_grows_with_channels_and_pixels():
    places = (8, 16, 17, 40, 64, 100, 256, 300, 2000)
    for fixed in (16, 30, 256):
        for axis in range(3):
            sizes = [[fixed, fixed, fixed] for _ in places]
            for size, place in zip(sizes, places, strict=True):
                size[axis] = place
            times = [TABLE.seconds(conv(*size), FLOAT) for size in sizes]
            assert times == sorted(times)


def test_changes_of_layout_of_whole_pages_are_points_of_their_own():
    shapes = (1, 64, 30, 30), (1, 64, 32, 32), (1, 64, 33, 33)
    ops = [OpShape("reorder", (shape,), (shape,)) for shape in shapes]
    points = [Measurement(op, FLOAT, seconds) for op, seconds in zip(ops, (9e-6, 4e-5, 1e-5), strict=True)]
    table = CostTable(MACHINE, points)
    for point in points:
        assert table.seconds(point.op, FLOAT) == pytest.approx(point.seconds)
    without = CostTable(MACHINE, [points[0], points[2]])
    assert 9e-6 < without.seconds(ops[1], FLOAT) < 1e-5


def test_an_input_pixel_of_a_transposed_layer_gives_the_outputs_of_its_kernel_in_each_group() -> None:
    shapes = {"inputs": ((2, 6, 5, 5),), "outputs": ((2, 4, 10, 10),), "weight": (2, 3, 2, 2, 3), "groups": 2}
    (family,) = families(OpShape("conv_transpose2d", **shapes))
    assert family.at == (6 // 2, 4 // 2 * 2 * 3, 2 * 5 * 5)


@each_of("places", [(300,), (300, 1), (300, 1, 1)])
def test_convolutions_along_any_number_of_axes_cost_what_they_multiply(places):
    sizes, kernel = (1, 64, *places), tuple(min(size, 9) for size in places)
    op = OpShape(f"conv{len(places)}d", (sizes,), (sizes,), (64, 64, *kernel), (1,) * len(places))
    exact = OpShape("conv2d", ((1, 64, 300, 1),), ((1, 64, 300, 1),), (64, 64, 9, 1), (1, 1))
    assert TABLE.seconds(op, FLOAT) == TABLE.seconds(exact, FLOAT)
    # As nodes of an ONNX file, whose kind is the same for any number of axes.
    assert families(replace(op, kind="conv2d")) == families(exact)


def test_a_transposed_layer_along_three_axes_takes_as_long_as_one_along_two():
    shapes = (
        ((1, 8, 16, 16), (1, 4, 32, 64), (8, 4, 2, 4)),
        ((1, 8, 4, 4, 16), (1, 4, 8, 8, 32), (8, 4, 2, 2, 2)),
    )
    ops = [OpShape(f"conv_transpose{len(w) - 2}d", (x,), (y,), w) for x, y, w in shapes]
    times = [CostTable.load("onnxruntime").seconds(op, FLOAT) for op in ops]
    assert times[0] == times[1] is not None


@each_of(
    "op",
    [
        OpShape("conv2d", ((),), ((),), weight=(4, 4, 3, 3)),
        OpShape("conv2d", ((1, 4, 8, 8),), ((4,),), weight=(4, 4, 3, 3)),
        OpShape("conv2d", ((1, 4, 8, 8),), ((1, 4, 8, 8),), weight=(4, 4, 3, 3), groups=0),
        OpShape("conv2d", ((1, 4),), ((1, 4),), weight=(4, 4)),
        OpShape("conv_transpose2d", ((8,),), ((1, 4, 8, 8),), weight=(4, 4, 2, 2)),
    ],
)
def test_shapes_that_are_none_of_a_layer_have_no_time(op):
    assert families(op) == ()
    assert TABLE.seconds(op, FLOAT) is None


def test_time_between_points_is_between_theirs():
    low, middle, high = (TABLE.seconds(conv(64, 64, side), FLOAT) for side in (16, 32, 64))
    assert low < middle < high
    assert middle == pytest.approx((low * high) ** 0.5)  # 32 is in the middle of 16 and 64 by ratio


def test_beyond_the_largest_point_the_time_is_proportional():
    assert TABLE.seconds(conv(256, 256, 128), FLOAT) == pytest.approx(
        4 * TABLE.seconds(conv(256, 256, 64), FLOAT)
    )
    assert TABLE.seconds(conv(256, 512, 64), FLOAT) == pytest.approx(
        2 * TABLE.seconds(conv(256, 256, 64), FLOAT)
    )


def test_below_the_smallest_point_the_time_is_constant():
    assert TABLE.seconds(unary("relu", 1), FLOAT) == TABLE.seconds(unary("relu", 100), FLOAT)


def test_channels_that_do_not_fill_a_block_take_as_long_as_the_block_if_none_were_measured():
    assert TABLE.seconds(conv(60, 250, 16), FLOAT) == TABLE.seconds(conv(64, 256, 16), FLOAT)


def test_combinations_that_were_not_measured_are_filled_between_their_neighbours():
    missing = conv(256, 16, 64)
    table = CostTable(MACHINE, [p for p in POINTS if p.op != missing])
    below, above = table.seconds(conv(64, 16, 64), FLOAT), table.seconds(conv(256, 64, 64), FLOAT)
    assert below <= table.seconds(missing, FLOAT) <= above


def test_a_smaller_op_that_took_longer_was_disturbed():
    disturbed = [Measurement(unary("relu", n), FLOAT, t) for n, t in ((10, 5e-6), (100, 2e-6), (1000, 9e-6))]
    table = CostTable(MACHINE, disturbed)
    assert table.seconds(unary("relu", 10), FLOAT) == pytest.approx(2e-6)


def test_unknown_kind_and_form_are_none():
    assert TABLE.seconds(unary("no_such_op", 100), FLOAT) is None
    assert TABLE.seconds(unary("relu", 100), INTEGER) is None
    assert TABLE.forms("no_such_op") == ()


def test_forms_of_a_kind():
    sigmoid = [Measurement(unary("sigmoid", 10), form, 1e-6) for form in (LOOKUP, FLOAT)]
    assert CostTable(MACHINE, sigmoid).forms("sigmoid") == (FLOAT, LOOKUP)


def test_a_kind_like_a_measured_one_in_float_has_no_integer_form():
    add = OpShape("add", ((1, 8), (1, 8)), ((1, 8),))
    table = CostTable(MACHINE, [Measurement(add, form, 1e-6) for form in (FLOAT, INTEGER)])
    assert table.forms("add") == (FLOAT, INTEGER)
    assert table.forms("sub") == (FLOAT,)
    assert table.seconds(replace(add, kind="sub"), FLOAT) == pytest.approx(1e-6)


def test_json_keeps_everything(tmp_path):
    path = tmp_path / "table.json"
    path.write_text(TABLE.to_json(), encoding="utf-8")
    table = CostTable.read(path)
    assert (table.machine, table.per_run) == (MACHINE, 1e-5)
    assert [(m.op, m.form) for m in table.measurements] == [(m.op, m.form) for m in POINTS]
    assert [m.seconds for m in table.measurements] == pytest.approx([m.seconds for m in POINTS], rel=1e-3)


def test_an_unknown_runtime_is_an_error_that_lists_the_known_ones():
    with pytest.raises(
        ConfigError, match=r"no cost table for 'tpu'; known: litert, ncnn, onnxruntime, openvino"
    ):
        CostTable.load("tpu")


def test_cost_table_refuses_paths_as_runtime():
    with pytest.raises(ConfigError, match="no cost table"):
        CostTable.load("../tables/onnxruntime")


def _damage(path, change):
    data = json.loads(TABLE.to_json())
    change(data)
    path.write_text(json.dumps(data), encoding="utf-8")


@each_of(
    "change",
    [
        lambda data: data.pop("measurements"),
        lambda data: data.pop("machine"),
        lambda data: data["machine"].update(cores=2),
        lambda data: data["measurements"][0].update(seconds="fast"),
        lambda data: data["measurements"][0].update(seconds=float("nan")),
        lambda data: data["measurements"][0].update(seconds=-1),
        lambda data: data["measurements"][0].update(form="binary"),
        lambda data: data["measurements"][0].update(inputs=[[1, "x"]]),
        lambda data: data["measurements"][0].update(inputs=[]),
        lambda data: data["measurements"][0].update(weight=[-1]),
        lambda data: data["measurements"].append(3),
        lambda data: data.update(per_run=None),
    ],
)
def test_a_damaged_table_is_one_sentence(tmp_path, change):
    path = tmp_path / "table.json"
    _damage(path, change)
    with pytest.raises(ConfigError, match=r"table\.json is damaged .*measure it again\.$"):
        CostTable.read(path)


@each_of(
    ("text", "message"),
    [
        ("{", "damaged"),
        ("[]", "no cost table"),
        ('{"schema": "qtrace-costs/9"}', "no cost table"),
        ("\xff", "damaged"),
    ],
)
def test_another_file_is_one_sentence(tmp_path, text, message):
    path = tmp_path / "table.json"
    path.write_bytes(text.encode("latin-1"))
    with pytest.raises(ConfigError, match=message):
        CostTable.read(path)


def test_a_missing_table_is_one_sentence(tmp_path):
    with pytest.raises(ConfigError, match="cannot be read: No such file"):
        CostTable.read(tmp_path / "none.json")


@each_of("runtime", CostTable.known())
def test_packaged_tables_know_convolutions_in_float_and_integers(runtime):
    table = CostTable.load(runtime)
    assert table.forms("conv2d") == (FLOAT, INTEGER)
    assert table.machine.runtime == runtime
    assert table.seconds(conv(128, 128, 20, 3), INTEGER) < table.seconds(conv(128, 128, 20, 3), FLOAT)


def test_kernels_of_another_sort_are_another_family():
    """Fewer than 16 output channels may take longer than 16, in integer kernels."""
    slow = Measurement(conv(64, 8, 16), FLOAT, 1.0)
    table = CostTable(MACHINE, [*POINTS, slow])
    assert table.seconds(conv(64, 8, 16), FLOAT) == pytest.approx(1.0)
    assert table.seconds(conv(64, 16, 16), FLOAT) == TABLE.seconds(conv(64, 16, 16), FLOAT)


def test_onnxruntime_has_tables_of_an_intel_and_of_an_amd():
    tables = CostTable.packaged("onnxruntime")
    assert CostTable.known() == ("litert", "ncnn", "onnxruntime", "openvino")
    assert tables["onnxruntime"] is CostTable.load("onnxruntime")
    processors = [table.machine.processor.split()[0] for table in tables.values()]
    assert processors == ["Intel(R)", "AMD"]
    shapes = [{(m.op, m.form) for m in table.measurements} for table in tables.values()]
    assert len(shapes[0] ^ shapes[1]) < 0.1 * len(shapes[0])


def test_a_machine_has_the_table_of_its_processor():
    tables = CostTable.packaged("onnxruntime")
    for table in tables.values():
        assert CostTable.for_machine(table.machine) is table
        newer = replace(table.machine, version="9.9", date="2100-01-01")
        assert CostTable.for_machine(newer) is table
        assert not table.machine.runs_like(newer)
    other = replace(MACHINE, runtime="onnxruntime", processor="another")
    assert CostTable.for_machine(other) is CostTable.load("onnxruntime")


def test_a_packaged_table_is_read_once():
    assert CostTable.load("onnxruntime") is CostTable.load("onnxruntime")


@each_of(
    ("runtime", "name"),
    [(runtime, name) for runtime in CostTable.known() for name in CostTable.packaged(runtime)],
)
def test_every_packaged_table_has_both_forms_of_layers_and_names_its_processor(runtime: str, name: str):
    table = CostTable.packaged(runtime)[name]
    assert table.machine.runtime == runtime
    assert "avx512_vnni" in table.machine.flags
    assert table.machine.threads == 1
    for kind in ("conv2d", "linear"):
        assert {FLOAT, INTEGER} <= set(table.forms(kind))
    for kind in ("quantize", "dequantize", "softmax", "silu", "add", "div"):
        assert FLOAT in table.forms(kind)
    assert INTEGER not in table.forms("div")
    op = conv(256, 256, 20, 3)
    assert table.seconds(op, INTEGER) < table.seconds(op, FLOAT)
    assert (INTEGER in table.forms("add")) == (runtime != "ncnn")


@each_of(
    ("backend", "runtime"),
    [("onnxruntime", "onnxruntime"), ("openvino", "openvino"), ("tflite", "litert"), ("ncnn", "ncnn")],
)
def test_what_a_backend_computes_on_integers_is_in_its_table(backend: str, runtime: str):
    target = backends.get(backend)
    assert target.cost_table == runtime
    table = CostTable.load(runtime)
    for kind in target.float_results | {"conv2d"}:
        assert INTEGER in table.forms(kind)
        assert kind in target.ops
