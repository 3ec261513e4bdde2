"""The options of the calls that quantize, as frozen data, of which the commands are derived."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # at run time they load numpy, which --help does without
    from qtrace.preparation.annotation import Preference
    from qtrace.runtimes.host import RuntimeHost


@dataclass(frozen=True)
class DataReading:
    """How calibration data is read.

    Attributes:
        batch_size: the number of samples in a batch, as ``max_batches`` counts them. How many run at once
            follows from their size and the network.
        max_batches: the most batches to calibrate on; None for all.
        skip_bad: whether to leave out unreadable images.
    """

    batch_size: int = 8
    max_batches: int | None = None
    skip_bad: bool = False


@dataclass(frozen=True)
class QuantizeOptions(DataReading):
    """The options of ``qtrace.quantize`` that few calls need, which are given by name.

    Attributes:
        batch_size: samples in a batch of arrays, files and images, as ``max_batches`` counts them.
        max_batches: the most batches to calibrate on; None for all.
        skip_bad: whether to leave out unreadable images.
        shapes: the shapes of inputs that an ONNX file leaves open; None for the shapes of the first batch.
        max_drop: how far ``metric`` may be below its value in float: layers are raised to float until it
            holds.
        verify: whether to run the file in its runtime next to the graph.
        measure: whether to compare its speed with the user's own file, or else with float. If it is slower
            beyond doubt, and the placement is ``balanced`` or ``fastest``, the file is in float.
        keep: whether to write the quantized file though it is slower than float; a ``recipe`` that is a
            precision, such as ``w8a8``, asks for it, too.
        allow_broken: whether to write the file though the verdict is ``broken``, or all values of the data
            are alike.
        allow: the user's classes that an .mge file may name.
        runtime_host: the interpreter or machine with the runtime, where the file is measured and verified;
            None for this interpreter.
    """

    shapes: Mapping[str, Sequence[int]] | None = None
    max_drop: float | None = None
    verify: bool = True
    measure: bool = True
    keep: bool = False
    allow_broken: bool = False
    allow: Sequence[str] = ()
    runtime_host: RuntimeHost | None = None


@dataclass(frozen=True)
class FolderOptions:
    """The options of ``qtrace.calibrate_to_folder`` that few calls need, which are given by name.

    Attributes:
        learning_engine: computes the steps of ``adaround`` and ``reconstruct``, as for ``qtrace.calibrate``.
        prefer: the placement that is taken, as for ``qtrace.calibrate``.
        about: more entries of report.json, such as the names of model and data.
        importing: the name or file of ``recipe``, if that is a ``QConfig``, for the cure to import.
    """

    learning_engine: str = "auto"
    prefer: Preference | None = None
    about: Mapping[str, Any] | None = None
    importing: str | Path | None = None
