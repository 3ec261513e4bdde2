"""Recipe files: any text gives a config that can be written and read again, or mistakes with their lines."""

from __future__ import annotations

import re
from pathlib import Path

from hypothesis import strategies as st

from qtrace.config import QConfig
from qtrace.config.checking import mistakes
from qtrace.config.recipe import dump_recipe, load_recipe
from qtrace.config.rule import specs
from qtrace.errors import ConfigError
from tests.fuzz.mutation import mutated

PACKAGED = sorted((Path(__file__).parents[2] / "recipes").rglob("*.yaml"))
EVERYTHING = """\
schema: qtrace/1
preprocess: {size: [3, 8, 8], mean: [0, 0, 0], std: [57.375, 57.12, 58.395], channels: rgb, scale: 0.5}
activation: {bits: 8}
weight: {bits: 4, axis: null}
observers: {activation: {mse: {bins: 2048}}, weight: minmax}
rules:
  - {match: {op: conv2d, depthwise: true}, weight: {bits: 8, axis: 0}}
  - match: {op: [add, mul], subgraph: {from: a, to: b}, before_output: false}
    fakequant: fixed
ptq: [fuse_bn, {adaround: {iterations: 3}}]
qat: {fakequant: lsq, epochs: 10, lr: 1.0e-4, bn: {fold: true, freeze_after: 0.5}}
expect: {metric: top1, max_drop: 0.5}
"""
TOKENS = (
    *(
        "null",
        "~",
        "true",
        "-1",
        "0",
        "1e400",
        ".nan",
        ".inf",
        "9" * 20,
        "0x7fffffffffffffff",
        "''",
        "[]",
        "{}",
    ),
    *("[[]]", "{a: b}", "&a", "*a", "<<", "!!python/name:os.system", "|", ">-", "---", "...", "#", "\t", "é"),
    *("conv2d", "mse", "lsq", "antigravity:Egg", "backend/ncnn", "my.yaml", "../my.yaml", "2026-01-01"),
    "\u2028",
)


@st.composite
def _lines(draw: st.DrawFn, text: str) -> str:
    lines = text.splitlines()
    for _ in range(draw(st.integers(1, 5))):
        at = draw(st.integers(0, len(lines) - 1))
        kind = draw(st.integers(0, 4))
        if kind == 0:
            lines.insert(at, lines[draw(st.integers(0, len(lines) - 1))])
        elif kind == 1 and len(lines) > 1:
            del lines[at]
        elif kind == 2:
            lines[at] = " " * draw(st.integers(0, 6)) + lines[at].lstrip()
        else:
            words = re.findall(r"[\w./:-]+|\W", lines[at]) or [""]
            words[draw(st.integers(0, len(words) - 1))] = draw(st.sampled_from(TOKENS))
            lines[at] = "".join(words)
    return "\n".join(lines) + "\n"


def check(data: st.DataObject, folder: Path) -> None:
    seeds = [EVERYTHING, *(path.read_text(encoding="utf-8") for path in PACKAGED)]
    text = data.draw(st.sampled_from(seeds))
    if data.draw(st.booleans()):
        content = data.draw(_lines(text)).encode("utf-8", "surrogatepass")
    else:
        content = data.draw(mutated(text.encode()))
    path = folder / "my.yaml"
    path.write_bytes(content)
    try:
        config = load_recipe(path)
    except ConfigError as error:
        for line in str(error).split("\n"):
            assert re.match(r".*my\.yaml:(\d+:)? |qtrace/recipes/", line), line
        return
    assert not [spec for _, spec in specs(config) if ":" in spec.name]
    for sentence in mistakes(config):
        assert sentence
    again = folder / "again.yaml"
    again.write_text(dump_recipe(config), encoding="utf-8")
    assert load_recipe(again) == config == QConfig(**config.to_dict())
