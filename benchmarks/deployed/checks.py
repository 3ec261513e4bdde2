"""The targets of the benchmark, computed from the rows."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from benchmarks.deployed.rows import (
    ONNXRUNTIME,
    OWN_TIMES,
    PEERS,
    PLACEMENTS,
    TIMED,
    TRAINED,
    TRAINED_NETS,
    Row,
)
from qtrace.display import format_table

__all__ = ["MET", "MISSED", "UNKNOWN", "Check", "check", "dominated", "render"]

MET, MISSED, UNKNOWN = "met", "missed", "not measured"

_MIN_SPEED = {
    "recogniser": 1.3,
    "detector": 1.25,
    "ResNet-18 96": 3.5,
    "MobileNetV2 96": 1.65,
    "YOLOX-nano 96": 1.1,
    "YOLOX-nano 256": 1.6,
    "YOLOX-tiny 416": 2.8,
}
# Network -> metric -> the largest loss against float; a negative one is the largest increase.
_MAX_LOSS = {
    "recogniser": {"line accuracy": 0.3, "character error rate": -0.05},
    "classifier": {"accuracy": 0.2},
    "shapes detector": {"mAP": 0.2},
}
_MIN_IOU = 0.988
_ORT_MINMAX = next(iter(ONNXRUNTIME))
_NNCF_FULL = "NNCF, full bias correction"


@dataclass(frozen=True)
class Check:
    """A target with what was measured.

    Attributes:
        name: what is checked.
        target: the target in words.
        measured: the measured value in words; "" if there is none.
        met: whether the target is met; None if rows are missing.
    """

    name: str
    target: str
    measured: str = ""
    met: bool | None = None

    @property
    def verdict(self) -> str:
        """The verdict in words."""
        return {True: MET, False: MISSED, None: UNKNOWN}[self.met]


class _Rows:
    """The rows by network and variant."""

    def __init__(self, rows: Iterable[Row]) -> None:
        rows = list(rows)
        self.tried = {(row.net, row.variant) for row in rows}
        self.rows = {(row.net, row.variant): row for row in rows if not row.reason}

    def get(self, net: str, variant: str) -> Row | None:
        return self.rows.get((net, variant))

    def has_all_peers(self, net: str) -> bool:
        """Whether all other tools were tried: those that failed have a reason."""
        return all((net, peer) in self.tried for peer in PEERS)

    def of(self, net: str, variants: Sequence[str]) -> list[Row]:
        """The measured rows of a network among ``variants``."""
        found = (self.get(net, variant) for variant in variants)
        return [row for row in found if row is not None and row.sqnr is not None and row.speed is not None]


def check(rows: Iterable[Row]) -> list[Check]:
    """Computes all checks from the rows."""
    table = _Rows(rows)
    return [
        *_accuracy(table),
        *_speeds(table),
        *_fastest(table),
        *_dominated(table),
        *_tasks(table),
        *_calibration(table),
        *_predictions(table),
        *_parity(table),
    ]


def dominated(row: Row, peers: Iterable[Row]) -> list[str]:
    """Returns the ``peers`` that are at least as fast and accurate as ``row``, and better in one."""
    own = (row.speed or 0.0, row.sqnr or 0.0)
    others = {peer.variant: (peer.speed or 0.0, peer.sqnr or 0.0) for peer in peers}
    return [
        name
        for name, other in others.items()
        if other != own and all(b >= a for a, b in zip(own, other, strict=True))
    ]


def render(checks: Iterable[Check]) -> str:
    """Returns the checks as a table."""
    cells = [(c.name, c.target, c.measured, c.verdict) for c in checks]
    return format_table(("check", "target", "measured", "verdict"), cells, max_width=None)


def _compare(name: str, target: str, value: float | None, low: float, form: str) -> Check:
    """A value that must be ``low`` at least."""
    return Check(name, target) if value is None else Check(name, target, format(value, form), value >= low)


def _accuracy(table: _Rows) -> Iterator[Check]:
    for net in TRAINED_NETS:
        name, target = f"{net}: SQNR of balanced against the best peer", ">= +1 dB"
        ours, peers = table.of(net, ("balanced",)), table.of(net, PEERS)
        if not ours or not peers:
            yield Check(name, target)
            continue
        best = max(peers, key=lambda row: row.sqnr or 0.0)
        gain = (ours[0].sqnr or 0.0) - (best.sqnr or 0.0)
        in_float = ours[0].mode == "float"
        text = f"{gain:+.1f} dB ({best.variant})" + (", no gain: left in float" if in_float else "")
        met = gain >= 1 and not in_float
        yield Check(name, target, text, None if met and not table.has_all_peers(net) else met)


def _speeds(table: _Rows) -> Iterator[Check]:
    for net, low in _MIN_SPEED.items():
        row = table.get(net, "balanced")
        yield _compare(f"{net}: speed of balanced against float", f">= {low}x", row and row.speed, low, ".2f")
    speeds = {net: row.speed for net in (*TRAINED_NETS, *TIMED) if (row := table.get(net, "balanced"))}
    known = {net: speed for net, speed in speeds.items() if speed is not None}
    slower = [f"{net} {speed:.2f}x" for net, speed in known.items() if speed < 1]
    name, target = "no network slower than float", ">= 1.0x"
    whole = len(known) == len(TRAINED_NETS) + len(TIMED)
    if slower:
        yield Check(name, target, ", ".join(slower), False)
    else:
        least = f"{min(known.values()):.2f}x at least" if known else ""
        yield Check(
            name, target, f"{least} in {len(known)} networks" if known else "", True if whole else None
        )


def _fastest(table: _Rows) -> Iterator[Check]:
    for net in (*TRAINED_NETS, *TIMED):
        ours, peer = table.get(net, "fastest"), table.get(net, _ORT_MINMAX)
        speed = ours.speed / peer.speed if ours and peer and ours.speed and peer.speed else None
        name = f"{net}: fastest against onnxruntime's quantizer"
        yield _compare(f"{name}, speed", ">= 0.98x", speed, 0.98, ".2f")
        if net in TRAINED_NETS:
            pair = table.of(net, ("fastest", _ORT_MINMAX))
            gain = (pair[0].sqnr or 0.0) - (pair[1].sqnr or 0.0) if len(pair) == 2 else None
            yield _compare(f"{name}, SQNR", ">= +3 dB", gain, 3, "+.1f")


def _dominated(table: _Rows) -> Iterator[Check]:
    for net in TRAINED:
        name, target = f"{net}: placements", "none dominated by a peer"
        ours, peers = table.of(net, PLACEMENTS), table.of(net, PEERS)
        losing = {row.variant: losers for row in ours if (losers := dominated(row, peers))}
        texts = [f"{variant} by {' and '.join(losers)}" for variant, losers in losing.items()]
        if texts:
            yield Check(name, target, f"dominated: {'; '.join(texts)}", False)
        elif not ours or not table.has_all_peers(net):
            yield Check(name, target)
        else:
            yield Check(name, target, f"none of {len(ours)} is", True)


def _tasks(table: _Rows) -> Iterator[Check]:
    for net, limits in _MAX_LOSS.items():
        exact, ours = table.get(net, "float"), table.get(net, "balanced")
        for metric, limit in limits.items():
            name = f"{net}: loss of {metric}" if limit > 0 else f"{net}: increase of {metric}"
            target = f"<= {abs(limit)}"
            if exact is None or ours is None or metric not in exact.metrics or metric not in ours.metrics:
                yield Check(name, target)
                continue
            loss = exact.metrics[metric] - ours.metrics[metric]
            loss = loss if limit > 0 else -loss
            yield Check(name, target, f"{loss:+.2f}", loss <= abs(limit) + 1e-9)
    row = table.get("detector", "balanced")
    iou = row.metrics.get("IoU") if row else None
    yield _compare("detector: IoU with float's map", f">= {_MIN_IOU}", iou, _MIN_IOU, ".3f")


def _calibration(table: _Rows) -> Iterator[Check]:
    for variant, peer in (("balanced", _NNCF_FULL), ("minmax", _ORT_MINMAX)):
        for net in TRAINED:
            ours, other = table.get(net, variant), table.get(net, peer)
            name, target = f"{net}: time of calibration, {variant} / {peer}", "<= 1.0"
            if ours and other and ours.seconds and other.seconds:
                ratio = ours.seconds / other.seconds
                yield Check(name, target, f"{ratio:.2f}", ratio <= 1)
            else:
                yield Check(name, target)


def _predictions(table: _Rows) -> Iterator[Check]:
    for net in (*TRAINED_NETS, *TIMED):
        own = table.get(net, next(iter(OWN_TIMES)))
        row = own or table.get(net, "balanced")
        times = "own times" if own else "packaged times"
        name, target = f"{net}: predicted time against measured, balanced, {times}", "within 15 %"
        error = row.prediction_error if row else None
        yield (
            Check(name, target) if error is None else Check(name, target, f"{error:+.0%}", abs(error) <= 0.15)
        )


def _parity(table: _Rows) -> Iterator[Check]:
    rows = [row for row in table.rows.values() if row.worst_lsb is not None and row.equal is not None]
    worst_name, equal_name = "parity, op by op, without optimizations", "share of equal integers, op by op"
    if not rows:
        yield Check(worst_name, "<= 1 LSB")
        yield Check(equal_name, ">= 99.99 %")
        return
    worst = max(rows, key=lambda row: row.worst_lsb or 0)
    least = min(rows, key=lambda row: row.equal or 0.0)
    place = f"{worst.net}, {worst.variant}"
    text = f"{worst.worst_lsb} LSB in {len(rows)} files" + (f" ({place})" if worst.worst_lsb else "")
    yield Check(worst_name, "<= 1 LSB", text, (worst.worst_lsb or 0) <= 1)
    share = least.equal or 0.0
    yield Check(equal_name, ">= 99.99 %", f"{share:.4%} ({least.net}, {least.variant})", share >= 0.9999)
