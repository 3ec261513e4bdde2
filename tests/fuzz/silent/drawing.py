"""Draws random programs: a trunk of convolutions, one to three heads, and hazards in both."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from hypothesis import strategies as st

from tests.fuzz.silent.naming import NAMINGS
from tests.fuzz.silent.programs import Program, Recorder, Value

__all__ = ["programs"]

LOWEST = -3.4028234663852886e38
INFINITIES = (-1e4, -1e9, LOWEST, float("-inf"), -3e38, -65504.0)
_ACTIVATIONS = ("relu", "silu", "none", "relu", "gelu", "tanh")


@st.composite
def programs(draw: st.DrawFn, onnx: bool) -> Program:
    """A network of one image, of 3 channels and about 10 x 10, for MegEngine or as an ONNX file."""
    record = Recorder()
    batch, size = draw(st.sampled_from((2, 1, 3))), draw(st.sampled_from((8, 10)))
    shift, spread = draw(st.sampled_from(((0.0, 1.0), (0.0, 1.0), (0.0, 1e-3), (20.0, 1.0), (0.0, 50.0))))
    image = record.input("image", batch, 3, size, size, shift=shift, spread=spread)
    if draw(st.integers(0, 9)) == 9:
        record.input("image", batch, 2, 4, 4)
    x = record.scaled(image, 1 / spread, -shift / spread) if (shift, spread) != (0.0, 1.0) else image
    for _ in range(draw(st.integers(1, 2))):
        x = _stage(draw, record, x, onnx)
    outputs: list[Value] = []
    for _ in range(draw(st.sampled_from((1, 1, 2)))):
        outputs += draw(st.sampled_from(HEADS))(draw, record, x, onnx)
    outputs = _extras(draw, record, outputs)
    return Program(
        tuple(record.steps),
        tuple(outputs),
        draw(st.sampled_from(NAMINGS)),
        shift,
        spread,
        tuple(record.hazards),
    )


def _stage(draw: st.DrawFn, record: Recorder, x: Value, onnx: bool) -> Value:
    options = {"bias": draw(st.booleans()), "dead": draw(st.integers(0, 5)) == 5}
    x = record.conv(x, draw(st.sampled_from((4, 8, 6))), draw(st.sampled_from((3, 1))), **options)
    if draw(st.integers(0, 3)) == 3:
        x = record.conv(x, x.shape[1], parts=x.shape[1])
    if draw(st.booleans()):
        x = record.norm(x)
    if (kind := draw(st.sampled_from(_ACTIVATIONS))) != "none":
        x = record.unary(kind, x)
    pooling = draw(st.integers(0, 3))
    if pooling == 3 and min(x.shape[2:]) >= 4 and x.shape[2] % 2 == 0:
        x = _padded_pool(draw, record, x, onnx)
    return x


def _padded_pool(draw: st.DrawFn, record: Recorder, x: Value, onnx: bool) -> Value:
    kernel, stride = draw(st.sampled_from(((3, 2), (2, 1))))
    before, after = draw(st.sampled_from(((0, 1), (1, 0))))
    value = draw(st.sampled_from(INFINITIES))
    form = draw(st.sampled_from(("pads", "auto", "pad"))) if onnx else "pad"
    record.hazards.append(f"pool {form} {value:g}")
    x = record.pooled(x, kernel=kernel, stride=stride, before=before, after=after, value=value, form=form)
    return record.conv(x, draw(st.sampled_from((4, 8))))


def _masked(draw: st.DrawFn, record: Recorder, scores: Value) -> Value:
    form = draw(st.sampled_from(("add", "where", "multiply")))
    value = draw(st.sampled_from(INFINITIES if form != "multiply" else INFINITIES[:3]))
    place = draw(st.sampled_from(("constant", "buffer", "parameter", "input")))
    options = {"form": form, "value": value, "place": place}
    if place == "input":
        kind = "mask" if form == "add" else "keep"
        options["keep"] = record.input(
            kind, scores.shape[0], *[1] * (len(scores.shape) - 2), scores.shape[-1], value=value
        )
    return record.masked(scores, **options)


def _attention(draw: st.DrawFn, record: Recorder, x: Value, onnx: bool) -> list[Value]:
    tokens = _tokens(record, x)
    width, dense = tokens.shape[-1], draw(st.booleans())
    if draw(st.booleans()):
        tokens = record.add("layer_norm", [tokens], tokens.shape)
    bias = f"b{len(record.steps)}" if dense and draw(st.booleans()) else None
    q, k, v = (record.linear(tokens, width, bias=bias) for _ in range(3))
    scores = record.scaled(record.matmul(q, record.transpose(k, 0, 2, 1)), width**-0.5)
    scores = _masked(draw, record, scores)
    attended = record.matmul(record.unary("softmax", scores), v)
    if draw(st.booleans()):
        attended = record.binary("add", tokens, attended)
    return [record.linear(attended, draw(st.sampled_from((4, 5))))]


def _tokens(record: Recorder, x: Value) -> Value:
    batch, width, *size = x.shape
    return record.transpose(record.reshape(x, batch, width, size[0] * size[1]), 0, 2, 1)


def _boxes_and_scores(draw: st.DrawFn, record: Recorder, x: Value, order: Sequence[str]) -> list[Value]:
    """Boxes of up to hundreds, scores, and perhaps values of about 1."""
    if draw(st.booleans()):
        raw = [record.conv(x, n, 1) for n in (4, 3)]
    else:
        whole = record.conv(x, 7, 1)
        raw = [record.part(whole, 1, 0, 4), record.part(whole, 1, 4, 7)]
    parts = {
        "boxes": record.scaled(record.unary("exp", raw[0]), draw(st.sampled_from((64.0, 640.0, 16.0)))),
        "scores": record.unary("sigmoid", record.scaled(raw[1], 1.0, -3.0)),
    }
    if "others" in order:
        parts["others"] = record.conv(x, 2, 1)
    return [parts[name] for name in order]


def _detector(draw: st.DrawFn, record: Recorder, x: Value, onnx: bool) -> list[Value]:
    """One packed output, of one map or two, joined first or turned first."""
    record.hazards.append("join")
    turned = draw(st.booleans())
    maps, orders = [x], (("boxes", "scores"), ("scores", "boxes"), ("boxes", "others", "scores"))
    order = draw(st.sampled_from(orders))
    if draw(st.booleans()) and min(x.shape[2:]) >= 4:
        maps.append(record.unary("relu", record.conv(x, x.shape[1], 3, 2)))
    packed = []
    for each in maps:
        parts = _boxes_and_scores(draw, record, each, order)
        axis = 1
        if turned:
            parts, axis = [_tokens(record, part) for part in parts], 2
        how = draw(st.sampled_from(("concat", "nested", "assigned")))
        if how == "nested" and len(parts) > 2:
            joined = record.concat([record.concat(parts[:-1], axis), parts[-1]], axis)
        elif how == "assigned" and not onnx:
            joined = record.assigned(parts, axis)
        else:
            joined = record.concat(parts, axis)
        packed.append(joined if turned else _tokens(record, joined))
    whole = packed[0] if len(packed) == 1 else record.concat(packed, 1)
    ending = draw(st.sampled_from(("none", "transpose", "reshape")))
    if ending == "transpose":
        return [record.transpose(whole, 0, 2, 1)]
    if ending == "reshape":
        return [record.reshape(whole, whole.shape[0], whole.shape[1] * whole.shape[2])]
    return [whole]


def _middle(draw: st.DrawFn, record: Recorder, x: Value, onnx: bool) -> list[Value]:
    """A join of unlike ranges that a layer reads, with weights to which both parts matter."""
    record.hazards.append("join in the middle")
    wide, narrow = record.conv(x, 4, 1), record.unary("sigmoid", record.conv(x, 4, 1))
    wide, narrow = _tokens(record, wide), _tokens(record, narrow)
    factor = draw(st.sampled_from((64.0, 1000.0)))
    wide = record.scaled(wide, factor, exact=False)
    joined = record.concat([wide, narrow], 2)
    return [record.linear(joined, 4, divided=(0, 4, factor), exact=False)]


def _stacked(draw: st.DrawFn, record: Recorder, x: Value, onnx: bool) -> list[Value]:
    record.hazards.append("stack")
    values = record.reduced("mean", _tokens(record, record.conv(x, 3, 1)), 1)
    parts = [record.scaled(record.unary("exp", values), 64.0), record.unary("sigmoid", values)]
    whole = record.stack(parts, draw(st.sampled_from((1, 2))))
    return [record.reshape(whole, whole.shape[0], 6)] if draw(st.booleans()) else [whole]


def _classifier(draw: st.DrawFn, record: Recorder, x: Value, onnx: bool) -> list[Value]:
    """Logits with a mask, of which the largest are taken."""
    values = record.linear(record.reduced("mean", _tokens(record, x), 1), 6, bias=f"b{len(record.steps)}")
    kind = draw(st.sampled_from(("softmax", "max", "argmax", "topk", "topk_indices", "none")))
    if kind == "none":
        return [values]
    values = _masked(draw, record, values)
    if kind == "softmax":
        return [record.unary("softmax", values)]
    if kind in ("topk", "topk_indices"):
        return [record.add(kind, [values], (values.shape[0], 2), count=2)]
    return [record.reduced(kind, values, 1)]


def _shared(draw: st.DrawFn, record: Recorder, x: Value, onnx: bool) -> list[Value]:
    """Layers called twice, as in the heads of RetinaNet; or one BatchNorm behind two convolutions."""
    record.hazards.append("shared")
    width = x.shape[1]
    other = record.unary("relu", record.conv(x, width, 3, draw(st.sampled_from((1, 2)))))
    both = draw(st.booleans())
    bias = draw(st.booleans())
    outputs = []
    for number, each in enumerate((x, other)):
        layer = "shared" if both else f"own{number}"
        y = record.norm(record.conv(each, width, 3, layer=layer, bias=bias), "sharednorm")
        outputs.append(record.conv(record.unary("relu", y), 3, 1, layer="sharedlast"))
    return outputs


def _one_bias(draw: st.DrawFn, record: Recorder, x: Value, onnx: bool) -> list[Value]:
    """Two weights with one bias, or one weight with two."""
    record.hazards.append("one bias")
    tokens = _tokens(record, x)
    width = tokens.shape[-1]
    same = draw(st.booleans())
    first = record.linear(tokens, width, bias="onebias", layer="tied" if same else "first")
    first = record.unary(draw(st.sampled_from(("relu", "gelu"))), first)
    return [record.linear(first, width, bias="onebias", layer="tied" if same else "second")]


def _sliced_norm(draw: st.DrawFn, record: Recorder, x: Value, onnx: bool) -> list[Value]:
    tokens = record.linear(_tokens(record, x), 6)
    part = record.part(tokens, 1, 0, draw(st.sampled_from((1, 4))))
    return [record.linear(record.add("layer_norm", [part], part.shape), 4)]


Head = Callable[[st.DrawFn, Recorder, Value, bool], Sequence[Value]]
HEADS: tuple[Head, ...] = (
    _attention,
    _attention,
    _detector,
    _detector,
    _middle,
    _stacked,
    _classifier,
    _shared,
    _one_bias,
    _sliced_norm,
)


def _extras(draw: st.DrawFn, record: Recorder, outputs: list[Value]) -> list[Value]:
    """Gives one output twice, or an index, or a constant."""
    extra = draw(st.sampled_from(("none", "none", "none", "twice", "argmax", "constant", "uint8")))
    if extra == "twice":
        return [*outputs, record.add("same", outputs[:1], outputs[0].shape, outputs[0].groups)]
    if extra == "argmax" and record.steps[outputs[0].index].op not in ("argmax", "topk_indices", "max"):
        last = len(outputs[0].shape) - 1
        return [*outputs, record.reduced("argmax", outputs[0], last)]
    if extra == "uint8" and record.steps[outputs[0].index].op in ("linear", "conv", "softmax"):
        return [*outputs, record.add("uint8", outputs[:1], outputs[0].shape)]
    if extra == "constant":
        return [*outputs, record.add("constant", [], (3,))]
    return outputs
