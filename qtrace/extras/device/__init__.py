"""A device that is not here: test vectors that go to it, and the tensors that come back, as a runtime."""

from __future__ import annotations

import json
import math
import os
import re
import zipfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from qtrace.data.batches import as_arguments, check_batches, evaluating, refuse_nan, translate_errors
from qtrace.errors import CalibrationError, ConfigError, ExportError, refusing, shorten_list
from qtrace.graph.types import TracedModule
from qtrace.graph.walk import op_label
from qtrace.plugins.options import hint
from qtrace.preparation.model import QuantizedModel
from qtrace.process import on_engine_thread
from qtrace.scheme import QParams, QScheme
from qtrace.storage.checkpoints import pack_arrays
from qtrace.storage.files import parse_document, replace_folder, temporary_folder
from qtrace.verification.runs import GraphRun, activations, integer_qparams, output_names
from qtrace.verification.runtimes.base import Runtime, RuntimeRun

KINDS = ("inputs", "sites", "outputs")
"""The folders of a batch that tell tensors of one name apart."""

_RAW = (".raw", ".bin")
_PARTS = re.compile(r"(\d+)")


@dataclass(frozen=True)
class Sample:
    """The dumped tensors of one batch.

    Attributes:
        path: the folder or the archive that holds them.
        files: name of the tensor, such as ``sites/conv_out`` or ``conv_out`` -> its file; None for a member
            of ``path``.
    """

    path: Path
    files: Mapping[str, Path | None]

    def read(self, name: str, decode: Callable[[bytes], np.ndarray]) -> np.ndarray:
        """Reads one tensor.

        Args:
            name: one of `files`.
            decode: turns the bytes of a raw file into values.

        Raises:
            ExportError: when the file is damaged.
        """
        file = self.files[name]
        try:
            if file is None:
                with np.load(self.path, allow_pickle=False) as archive:
                    return np.asarray(archive[name])
            if file.suffix.lower() == ".npy":
                return np.asarray(np.load(file, allow_pickle=False))
            return decode(file.read_bytes())
        except (OSError, ValueError, EOFError, zipfile.BadZipFile) as error:
            where = self.path if file is None else file
            raise ExportError(
                f"{where}: the tensor {name!r} cannot be read ({error}): dump it again."
            ) from error


def find_samples(folder: Path) -> tuple[Sample, ...]:
    """Finds the dumped tensors of each batch, in the order of their names with numbers by value.

    A batch is an .npz archive or a folder of .npy, .raw and .bin files, which may stand in folders
    ``inputs``, ``sites`` and ``outputs``. Files that stand in ``folder`` itself are one batch. An archive
    with the name of a folder next to it stands for the folder.

    Args:
        folder: the folder of dumped tensors, or one .npz archive.

    Raises:
        ExportError: when there is no such folder, or nothing of this form in it.
    """
    if folder.is_file():
        return (_archive(folder),)
    if not folder.is_dir():
        raise ExportError(f"{folder} is no folder of dumped tensors, and no .npz file.")
    samples = {path.stem: _archive(path) for path in sorted(folder.glob("*.npz")) if path.stem != "inputs"}
    for inner in sorted(path for path in folder.iterdir() if path.is_dir() and path.name not in KINDS):
        if inner.name not in samples and (files := dict(_tensor_files(inner))):
            samples[inner.name] = Sample(inner, files)
    if not samples and (files := dict(_tensor_files(folder))):
        return (Sample(folder, files),)
    if not samples:
        raise ExportError(
            f"{folder} holds no tensors: it needs an .npz file for each batch, or a folder of .npy, .raw or "
            ".bin files."
        )
    return tuple(samples[name] for name in sorted(samples, key=_natural))


def file_name(tensor: str) -> str:
    """Returns the name of a tensor's files: what is no letter, digit, ``_``, ``-`` or ``.`` becomes ``_``."""
    return re.sub(r"[^\w.-]", "_", tensor)


def _archive(path: Path) -> Sample:
    try:
        with np.load(path, allow_pickle=False) as archive:
            return Sample(path, dict.fromkeys(archive.files))
    except (OSError, ValueError, EOFError, zipfile.BadZipFile, AttributeError) as error:
        raise ExportError(f"{path} is no .npz archive ({error}): dump it again.") from error


def _tensor_files(folder: Path) -> Iterator[tuple[str, Path]]:
    """Yields the name and the file of each tensor in a folder.

    Raises:
        ExportError: when two files hold one tensor.
    """
    names: dict[str, Path] = {}
    folders = [folder, *(folder / kind for kind in KINDS if (folder / kind).is_dir())]
    for path in sorted(path for inner in folders for path in inner.iterdir()):
        if path.suffix.lower() not in (".npy", *_RAW) or not path.is_file():
            continue
        name = path.relative_to(folder).with_suffix("").as_posix()
        other = names.setdefault(name, path)
        if other != path:
            raise ExportError(f"{path} and {other.name} both hold the tensor {name!r}: remove one.")
        yield name, path


def _natural(name: str) -> tuple[tuple[int, str], ...]:
    return tuple((int(part), "") if part.isdigit() else (math.inf, part) for part in _PARTS.split(name))  # type: ignore[misc]


# How far from a multiple of the scale, in LSB, floats may be that a device made from integers.
_OFF_GRID = {np.dtype(np.float16): 0.25}
_OFF_GRID_ELSE = 0.02

Tensor = tuple[str, str]  # one of `KINDS`, and the name of an input, a site or an output


def dumped_tensors(
    folder: str | Path, converted: TracedModule, names: Mapping[str, str] | None = None, layout: str = "nchw"
) -> Runtime:
    """Returns a runtime for `verify` and `bisect` that reads dumped tensors in place of running a file.

    A batch of the data belongs to one .npz archive, or to one folder of .npy, .raw or .bin files. Batches and
    archives or folders are matched in order. Tensors may be missing: ops between two that are there are
    compared together. Integers are read as they are; int8 in the place of uint8, and the reverse, is shifted
    by 128; floats must be integers times the site's scale. The type of a raw file follows from its size: one
    byte a value is int8 or uint8, two are int16 or uint16, four float32.

    Args:
        folder: the folder of the dumped tensors, or one .npz archive.
        converted: the converted module.
        names: name in the dump -> name of a site, an output or an input; None if they are the same.
        layout: how tensors of four axes are stored: ``nchw``, ``nhwc``, or such as ``nc4hw4``.

    Raises:
        ExportError: when nothing in the folder has the name of a site, or a name in ``names`` is unknown.
        ConfigError: for an unknown layout.
    """
    model = QuantizedModel(converted, "converted")
    samples = find_samples(Path(folder))
    return Runtime(
        "dumped tensors",
        package="numpy",
        extra="",
        suffixes=(),
        open=lambda path, optimize: DumpedSession(samples, model, names or {}, DeviceLayout(layout)),
        optimizes=False,
    )


class DumpedSession:
    """Gives the dumped tensors of one batch after the other.

    Args:
        samples: the dumped tensors of each batch.
        model: the converted graph.
        names: name in the dump -> name of a site, an output or an input.
        layout: the order of the axes in the dump.

    Attributes:
        partial: sites may be missing.
    """

    partial = True

    def __init__(
        self, samples: Sequence[Sample], model: QuantizedModel, names: Mapping[str, str], layout: DeviceLayout
    ) -> None:
        self.samples, self.layout, self._batch = samples, layout, 0
        sites = [site for site in activations(model).values() if not site.static]
        moved = model.annotation.moved()
        self.qparams = {site.name: site.qparams for site in sites}
        self.qparams.update({name: model.carried_qparams()[name] for name in moved})
        graph = model.module.graph
        self.outputs, self.inputs = output_names(model), [node.name for node in graph.inputs[1:]]
        shapes = {("sites", site.name): site.node.shape for site in sites}
        shapes.update({("sites", name): model.nodes[name].shape for name in moved})
        shapes.update({("inputs", node.name): node.shape for node in graph.inputs[1:]})
        shapes.update(
            {("outputs", n): node.shape for n, node in zip(self.outputs, graph.outputs, strict=True)}
        )
        self.shapes = {tensor: tuple(shape or ()) for tensor, shape in shapes.items()}
        self.sources = [self._match(sample, names) for sample in samples]
        present = set.intersection(
            *({name for kind, name in source if kind == "sites"} for source in self.sources)
        )
        self.integer_names = sorted(present)
        if not present:
            dumped, known = shorten_list(sorted(samples[0].files)), shorten_list(self.qparams)
            raise ExportError(
                f"{samples[0].path}: no tensor has the name of a site. It holds {dumped}; sites are {known}: "
                "map the names with --names, in Python with names=."
            )

    def _match(self, sample: Sample, names: Mapping[str, str]) -> dict[Tensor, str]:
        """Maps the tensors of the graph to names in the dump."""
        by_file: dict[str, Tensor] = {}
        for kind, name in self.shapes:  # of tensors of one name, the site is meant
            by_file[f"{kind}/{file_name(name)}"] = by_file[f"{kind}/{name}"] = (kind, name)
            by_file.setdefault(file_name(name), (kind, name))
            by_file.setdefault(name, (kind, name))
        for name in names.values():
            if name not in by_file:
                raise ExportError(
                    f"{name!r} is no site, output or input of the model{hint(name, self.qparams)}"
                )
        matched: dict[Tensor, str] = {}
        for dumped in sample.files:
            tensor = by_file.get(names.get(dumped, dumped))
            if tensor is not None and matched.setdefault(tensor, dumped) != dumped:
                raise ExportError(
                    f"{sample.path}: {matched[tensor]!r} and {dumped!r} are both {tensor[1]!r}: remove one."
                )
        return matched

    def run(self, inputs: list[np.ndarray]) -> RuntimeRun:
        """Returns the tensors of the next batch; see `Session`."""
        if self._batch >= len(self.samples):
            raise ExportError(
                f"there are dumped tensors of {len(self.samples)} batches, but more data: give --max-batches "
                f"{len(self.samples)}, and the --batch-size of the dump."
            )
        number, self._batch = self._batch, self._batch + 1
        self._check_inputs(number, inputs)
        batch = inputs[0].shape[0] if inputs and inputs[0].ndim else 1
        integers = {name: self._integers(number, name, batch) for name in self.integer_names}
        outputs: list[Any] = [self._float(number, ("outputs", name), batch) for name in self.outputs]
        return RuntimeRun(outputs, integers)

    def _check_inputs(self, number: int, inputs: list[np.ndarray]) -> None:
        """Refuses a batch whose input was dumped as well and is another."""
        for name, value in zip(self.inputs, inputs, strict=True):
            dumped = self._float(number, ("inputs", name), len(value) if value.ndim else 1)
            if dumped is not None and (
                dumped.shape != value.shape or not np.allclose(dumped, value, 1e-4, 1e-4)
            ):
                raise ExportError(
                    f"{self.samples[number].path}: its input {name!r} differs from batch {number} of the "
                    "data: give the data that the device has read, in its order."
                )

    def _float(self, number: int, tensor: Tensor, batch: int) -> np.ndarray | None:
        """Returns the values of an input or an output; None if they were not dumped, or as integers."""
        source = self.sources[number].get(tensor)
        if source is None:
            return None
        value = self._read(number, source, tensor, batch)
        return value.astype(np.float32) if value.dtype.kind == "f" else value

    def _integers(self, number: int, name: str, batch: int) -> np.ndarray:
        source, qparams = self.sources[number]["sites", name], self.qparams[name]
        value = self._read(number, source, ("sites", name), batch)
        where = f"{self.samples[number].path}: {source!r}"
        if value.dtype.kind == "f":
            integers = _on_grid(value, qparams, where)
        else:
            integers = value.astype(np.int64) + _shift(value.dtype, qparams)
        low, high = qparams.scheme.qmin, qparams.scheme.qmax
        if integers.size and (integers.min() < low or integers.max() > high):
            raise ExportError(
                f"{where} has integers from {integers.min()} to {integers.max()}, and its site holds {low} "
                f"to {high}: the tensor, or the type of its values, is another."
            )
        return integers.astype(np.int32)

    def _read(self, number: int, source: str, tensor: Tensor, batch: int) -> np.ndarray:
        """Reads a tensor, in the graph's order of axes."""
        traced = self.shapes[tensor]
        shape = (batch, *traced[1:]) if traced else traced
        stored = self.layout.stored_shape(shape)
        value = self.samples[number].read(source, lambda data: self._decode(data, stored, tensor))
        if value.shape != stored and value.size == math.prod(stored):
            value = value.reshape(stored)  # some devices flatten, or leave out axes of length 1
        return self.layout.to_graph(value, shape[1] if len(shape) == 4 else 0)

    def _decode(self, data: bytes, shape: tuple[int, ...], tensor: Tensor) -> np.ndarray:
        """Reads the values of a raw file, whose type follows from their number."""
        kind, name = tensor
        count = math.prod(shape)
        signed = kind != "sites" or self.qparams[name].scheme.signed
        types: dict[int, Any] = {
            1: np.int8 if signed else np.uint8,
            2: np.int16 if signed else np.uint16,
            4: np.float32,
        }
        size = len(data) // max(count, 1)
        if size not in types or size * count != len(data):
            raise ValueError(f"{len(data)} bytes for {count} values of shape {shape}")
        return np.frombuffer(data, types[size]).reshape(shape)


def _on_grid(value: np.ndarray, qparams: QParams, where: str) -> np.ndarray:
    """Returns the integers of floats that a device made from integers.

    Raises:
        ExportError: when they are no integers times the scale.
    """
    scale, zero_point = float(np.ravel(qparams.scale)[0]), int(np.ravel(qparams.zero_point)[0])
    exact = value.astype(np.float64) / scale + zero_point
    if not np.isfinite(exact).all():
        raise ExportError(f"{where} holds values that are not finite.")
    integers = np.rint(exact)
    if np.abs(exact - integers).max(initial=0) > _OFF_GRID.get(value.dtype, _OFF_GRID_ELSE):
        raise ExportError(
            f"{where} holds floats that are no integers times {scale:.6g}, the scale of its site: dump the "
            "tensor after its quantization."
        )
    return integers.astype(np.int64)


def _shift(dtype: np.dtype[Any], qparams: QParams) -> int:
    """Returns what to add to 8-bit integers of the other sign than the site's."""
    scheme = qparams.scheme
    if dtype == np.int8 and not scheme.signed and scheme.bits == 8:
        return 128
    return -128 if dtype == np.uint8 and scheme.signed and scheme.bits == 8 else 0


_BLOCKS = re.compile(r"nc(?P<block>\d+)hw(?P=block)")


@dataclass(frozen=True)
class DeviceLayout:
    """The order in which a device stores tensors of four axes; others are stored in the graph's order.

    Attributes:
        name: ``nchw``, the graph's own; ``nhwc``; or ``nc4hw4``, ``nc32hw32`` ...: blocks of so many
            channels, each with its channels innermost, the last one filled up.

    Raises:
        ConfigError: for another name.
    """

    name: str = "nchw"

    def __post_init__(self) -> None:
        if self.name not in ("nchw", "nhwc") and not self.block:
            raise ConfigError(f"unknown layout {self.name!r}: it is nchw, nhwc, or such as nc4hw4.")

    @property
    def block(self) -> int:
        """The channels of a block; 0 for layouts without blocks."""
        match = _BLOCKS.fullmatch(self.name)
        return int(match["block"]) if match else 0

    def stored_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Returns the shape in which the device stores a tensor of ``shape``."""
        if len(shape) != 4 or self.name == "nchw":
            return shape
        n, c, h, w = shape
        return (n, -(-c // self.block), h, w, self.block) if self.block else (n, h, w, c)

    def to_graph(self, value: np.ndarray, channels: int) -> np.ndarray:
        """Returns a stored tensor with the graph's order of axes.

        Args:
            value: a tensor in its stored shape.
            channels: the channels of the tensor, without those that fill up a block.
        """
        if self.block and value.ndim == 5:
            n, blocks, h, w, block = value.shape
            return value.transpose(0, 1, 4, 2, 3).reshape(n, blocks * block, h, w)[:, :channels]
        return value.transpose(0, 3, 1, 2) if self.name == "nhwc" and value.ndim == 4 else value


SCHEMA = "qtrace-vectors/1"


@on_engine_thread
def write_vectors(
    converted: TracedModule, folder: str | os.PathLike[str], batches: Iterable[Any], count: int
) -> Path:
    """Writes test vectors: for each batch its inputs, the integers of every site and the outputs.

    ``0000.npz`` holds the tensors of the first batch, as ``inputs/NAME``, ``sites/NAME`` and
    ``outputs/NAME``. The folder ``0000`` holds the same as raw files, little endian and without header.
    ``index.json`` has their types, shapes, scales and zero points, in the order of computation.
    ``inputs.npz`` has the inputs of all batches, samples first, as data for `verify`.

    Args:
        converted: the converted module.
        folder: the folder to write; an existing one that holds vectors is replaced.
        batches: inputs as for ``qtrace.calibrate``.
        count: how many batches to take.

    Returns:
        The folder.

    Raises:
        CalibrationError: when there are fewer batches, or one does not fit the model or holds NaN.
        ExportError: when the folder cannot be written, or something else stands there.
    """
    target, model = Path(folder), QuantizedModel(converted, "converted")
    check_batches(batches)
    if target.exists() and not _holds_vectors(target):
        raise ExportError(f"{target} exists and holds no test vectors: name another folder.")
    with refusing(ExportError, target, "written"), temporary_folder(target) as partial:
        _write_all(model, partial, batches, count)
        replace_folder(target, partial)
    return target


def _holds_vectors(folder: Path) -> bool:
    """Whether a folder has the index that `write_vectors` writes."""
    try:
        return parse_document((folder / "index.json").read_bytes()).get("schema") == SCHEMA
    except (OSError, ValueError):
        return False


def _write_all(model: QuantizedModel, folder: Path, batches: Iterable[Any], count: int) -> None:
    inputs: list[list[np.ndarray]] = []
    entries: list[dict[str, Any]] = []
    with evaluating(model.module):
        for number, batch in enumerate(batches):
            if number == count:
                break
            run = _run(model, batch, number)
            tensors = dict(_tensors(model, run))
            entries = [_entry(model, name, value) for name, value in tensors.items()]
            inputs.append(run.inputs)
            _write_batch(folder, f"{number:04d}", tensors)
    if len(inputs) < count:
        raise CalibrationError(f"there are {len(inputs)} batches for {count} test vectors: give more data.")
    stacked = (np.concatenate(values) for values in zip(*inputs, strict=True))
    arrays = pack_arrays(dict(zip(_input_names(model), stacked, strict=True)))
    (folder / "inputs.npz").write_bytes(arrays)
    index = {"schema": SCHEMA, "vectors": [f"{n:04d}" for n in range(count)], "tensors": entries}
    (folder / "index.json").write_text(json.dumps(index, indent=1) + "\n", encoding="utf-8")


def _run(model: QuantizedModel, batch: Any, number: int) -> GraphRun:
    """Runs the graph on one batch."""
    args, kwargs = as_arguments(batch, model.module, number)
    refuse_nan((args, kwargs), number, model.module)
    run = GraphRun(model, _written_nodes(model))
    with translate_errors(model.module, (args, kwargs), number):
        run.compute(args, kwargs)
    return run


def _input_names(model: QuantizedModel) -> list[str]:
    return [node.name for node in model.module.graph.inputs[1:]]


def _written_nodes(model: QuantizedModel) -> dict[str, str]:
    """Maps each node whose integers are written to the name of its site, or of itself if it moves some."""
    sites = {node: site.name for node, site in activations(model).items() if not site.static}
    return {**sites, **{name: name for name in model.annotation.moved()}}


def _tensors(model: QuantizedModel, run: GraphRun) -> Iterator[tuple[tuple[str, str], np.ndarray]]:
    """Yields kind, name and value of each tensor of a batch; sites in the order of computation."""
    for name, value in zip(_input_names(model), run.inputs, strict=True):
        yield ("inputs", name), value
    names = _written_nodes(model)
    for node, value in run.integers.items():
        yield ("sites", names[node]), value.astype(_storage(run.qparams[node].scheme))
    for name, value in zip(output_names(model), run.outputs, strict=True):
        yield ("outputs", name), value


def _entry(model: QuantizedModel, tensor: tuple[str, str], value: np.ndarray) -> dict[str, Any]:
    """Returns the entry of one tensor in the index."""
    kind, name = tensor
    entry: dict[str, Any] = {"name": name, "kind": kind, "file": f"{kind}/{file_name(name)}.raw"}
    entry.update(dtype=value.dtype.name, shape=list(value.shape))
    if kind != "sites":
        return entry
    node = next(node for node, written in _written_nodes(model).items() if written == name)
    site, qparams = model.rounded.get(node), integer_qparams(model)[node]
    source = model.nodes[node] if site is None else site.source
    return {**entry, "op": op_label(source.expr), **_parameters(qparams)}


def _parameters(qparams: QParams) -> dict[str, Any]:
    scheme = qparams.scheme
    return {
        "bits": scheme.bits,
        "scale": float(np.ravel(qparams.scale)[0]),
        "zero_point": int(np.ravel(qparams.zero_point)[0]),
    }


def _storage(scheme: QScheme) -> Any:
    """Returns the type that holds integers of a scheme: 8 bits, or 16 for wider schemes."""
    if scheme.bits <= 8:
        return np.int8 if scheme.signed else np.uint8
    return np.int16 if scheme.signed else np.uint16


def _write_batch(folder: Path, name: str, tensors: dict[tuple[str, str], np.ndarray]) -> None:
    """Writes the tensors of a batch as one archive and as raw files."""
    arrays = pack_arrays({f"{kind}/{file_name(n)}": v for (kind, n), v in tensors.items()})
    (folder / f"{name}.npz").write_bytes(arrays)
    for kind in KINDS:
        (folder / name / kind).mkdir(parents=True)
    for (kind, tensor), value in tensors.items():
        data = np.ascontiguousarray(value).astype(value.dtype.newbyteorder("<"))
        (folder / name / kind / f"{file_name(tensor)}.raw").write_bytes(data.tobytes())
