"""Tries `qtrace.from_torch` on families of torchvision and timm, each by its smallest member.

    python -m benchmarks.torch_families                # all of them: hours on one core
    python -m benchmarks.torch_families resnet18 vit   # those whose names begin so
    python -m benchmarks.torch_families --missing      # those without a stored row
    python -m benchmarks.torch_families --runtime-python VENV/bin/python  # onnxruntime of another environment

Weights are random; where the outputs hardly depend on the image, BatchNorms get the statistics of a batch,
and scales of layers that begin at nearly zero are drawn. A network is imported with an open batch, compared
with torch on two batches, calibrated on two, converted, exported for onnxruntime and verified. Each has a
process of its own, one after the other; rows are stored as they come. On a CPU with AMX the integer kernels
of onnxruntime 1.23 are wrong: verify with a newer one there.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import multiprocessing
import os
import sys
import tempfile
import time
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from qtrace.runtimes.host import RuntimeHost
from scripts.stored import TorchRow, load, store, today

__all__ = ["NETWORKS", "TorchNetwork", "main", "measure"]

SECONDS = 600  # a network that takes longer is stored as such
_MIN_SPREAD = 2e-3  # of the outputs between two images, relative to their largest value
_TINY = 1e-4  # scales of layers begin at 1e-6 to 1e-4 in deep networks


@dataclass(frozen=True)
class TorchNetwork:
    """A network of a package.

    Attributes:
        name: the name in the package.
        package: ``torchvision`` or ``timm``.
        size: height and width of the images.
        part: the attribute of the outputs that is compared, of networks that return a dict.
        batches: the number of batches to verify on. From end to end, single LSBs add up to another noise of
            the same size; where it differs by more than 1 dB between the graph and a runtime on two images,
            it takes more of them to see that.
    """

    name: str
    package: str
    size: int = 64
    part: str = ""
    batches: int = 1

    def build(self) -> Any:
        """Makes the module in eval mode, with random weights of a fixed seed."""
        import torch

        torch.manual_seed(0)
        if self.package == "timm":
            import timm

            try:
                return timm.create_model(self.name, pretrained=False, img_size=self.size).eval()
            except TypeError:  # convolutional networks have no size
                return timm.create_model(self.name, pretrained=False).eval()
        import torchvision

        options: dict[str, Any] = {"weights": None}
        if self.part:
            options["weights_backbone"] = None
        if self.name in ("googlenet", "inception_v3"):
            options.update(init_weights=True, aux_logits=False)
        module = torchvision.models.get_model(self.name, **options).eval()
        return _part(module, self.part) if self.part else module


def _part(module: Any, part: str) -> Any:
    import torch

    class Part(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = module

        def forward(self, x: Any) -> Any:
            return self.net(x)[part]

    return Part().eval()


def _networks() -> tuple[TorchNetwork, ...]:
    torchvision = (
        "alexnet vgg11 resnet18 squeezenet1_1 mobilenet_v2 mobilenet_v3_small shufflenet_v2_x0_5 "
        "mnasnet0_5 regnet_x_400mf regnet_y_400mf densenet121 efficientnet_b0 efficientnet_v2_s "
        "convnext_tiny googlenet"
    )
    timm = (
        "resnetv2_50 res2net50_14w_8s seresnet18 resnest14d skresnet18 "
        "lcnet_035 ghostnet_050 mobilenetv4_conv_small_035 "
        "mixnet_s rexnetr_100 repvgg_a0 mobileone_s0 hrnet_w18_small dla46_c darknet53 "
        "vovnet39a dpn48b selecsls42 nf_regnet_b0 fastvit_t8 "
        "edgenext_xx_small convnextv2_atto mobilevit_xxs poolformer_s12 inception_next_atto "
        "starnet_s1 efficientvit_b0 efficientformerv2_s0"
    )
    attention = (
        "deit_tiny_patch16_224 vit_tiny_patch16_224 mixer_s32_224 resmlp_12_224 levit_128s "
        "swin_tiny_patch4_window7_224 xcit_nano_12_p16_224 pvt_v2_b0 cait_xxs24_224 coat_lite_tiny "
        "gmlp_s16_224 tiny_vit_5m_224 repvit_m0_9"
    )
    noisy = {"tiny_vit_5m_224"}
    large = {"swin_tiny_patch4_window7_224", "tiny_vit_5m_224", "coat_lite_tiny", "levit_128s"}
    return (
        *(TorchNetwork(name, "torchvision") for name in torchvision.split()),
        TorchNetwork("inception_v3", "torchvision", 96),
        TorchNetwork("lraspp_mobilenet_v3_large", "torchvision", 64, "out"),
        TorchNetwork("fcn_resnet50", "torchvision", 64, "out"),
        TorchNetwork("deeplabv3_mobilenet_v3_large", "torchvision", 64, "out"),
        *(TorchNetwork(name, "timm") for name in timm.split()),
        *(
            TorchNetwork(name, "timm", 224 if name in large else 64, "", 8 if name in noisy else 1)
            for name in attention.split()
        ),
    )


NETWORKS = _networks()


def measure(network: TorchNetwork, host: RuntimeHost | None = None) -> TorchRow:
    """Imports, converts and verifies a network in this process.

    Args:
        network: the network.
        host: the interpreter that has the onnxruntime to verify with; None for this one.
    """
    import megengine as mge
    import numpy as np
    import torch

    import qtrace
    from qtrace import process
    from qtrace.errors import QtraceError
    from qtrace.graph.open_axes import read_open_axes

    process.quiet()
    torch.set_num_threads(1)
    start = time.perf_counter()
    row = TorchRow(network.package, network.name, network.size, measured=today())
    try:
        random = np.random.default_rng(0)
        batches = [random.standard_normal((2, 3, network.size, network.size), np.float32) for _ in range(2)]
        module, spread = _prepared(network, batches[0])
        row = dataclasses.replace(row, spread=spread)
        traced = qtrace.from_torch(module, batches[0])
        record = read_open_axes(traced)
        row = dataclasses.replace(row, opened=bool(record is not None and record.axes))
        error = 0.0
        for batch in batches:
            with torch.no_grad():
                expected = module(torch.from_numpy(batch)).numpy()
            largest = float(np.abs(expected).max())
            error = max(error, float(np.abs(traced(mge.Tensor(batch)).numpy() - expected).max()) / largest)
        row = dataclasses.replace(row, error=error)
        prepared = qtrace.prepare(traced, "backend/onnxruntime")
        qtrace.calibrate(prepared, batches, progress=False)
        converted = qtrace.convert(prepared)
        absent = _absent(converted, module)
        row = dataclasses.replace(row, converted=True, returned=not absent, absent=absent)
        with tempfile.TemporaryDirectory() as folder:
            file = Path(folder) / "network.onnx"
            qtrace.export(converted, file)
            shape = (2, 3, network.size, network.size)
            more = [random.standard_normal(shape, np.float32) for _ in range(network.batches - 1)]
            report = qtrace.verify(file, converted, [batches[0], *more], runtime_host=host)
        failure = "" if report.passed else next(t for t in str(report).splitlines() if t.startswith("FAILED"))
        row = dataclasses.replace(row, verified=bool(report.passed), refusal=failure)
    except QtraceError as error:
        row = dataclasses.replace(row, refusal=str(error)[:1500])
    return dataclasses.replace(row, seconds=round(time.perf_counter() - start))


def _prepared(network: TorchNetwork, batch: Any) -> tuple[Any, float]:
    """Builds the module, and returns how much its outputs differ between two images."""
    module = network.build()
    _draw_zeros(module)
    spread = _spread(module, batch)
    if spread < _MIN_SPREAD:
        _settle(module, batch)
        spread = _spread(module, batch)
    return module, spread


def _spread(module: Any, batch: Any) -> float:
    """Returns the largest difference between the outputs of two images, of their largest value."""
    import torch

    with torch.no_grad():
        outputs = module(torch.from_numpy(batch))
    largest = float(outputs.abs().max())
    return float((outputs[0] - outputs[1]).abs().max()) / largest if largest else 0.0


def _settle(module: Any, batch: Any) -> None:
    """Gives BatchNorms the statistics of a batch, and draws scales of layers that are nearly zero."""
    import torch

    for norm in module.modules():
        if isinstance(norm, torch.nn.modules.batchnorm._BatchNorm):
            norm.reset_running_stats()
            norm.momentum = None  # the statistics are those of what comes
            norm.train()
    with torch.no_grad():
        for parameter in module.parameters():
            if parameter.any() and float(parameter.abs().max()) <= _TINY:
                parameter.uniform_(0.1, 1)
        module(torch.from_numpy(batch).repeat(4, 1, 1, 1) + 0.1 * torch.randn(8, *batch.shape[1:]))
    module.eval()


def _draw_zeros(module: Any) -> None:
    """Draws matrices that begin as zeros, such as the heads of timm's mixers, whose outputs would be zero."""
    import torch

    with torch.no_grad():
        for parameter in module.parameters():
            if parameter.ndim > 1 and not parameter.any():
                parameter.normal_(std=0.02)


def _absent(converted: Any, module: Any) -> list[str]:
    """Returns the tensors of a module that its converted graph does not give back."""
    import qtrace
    from qtrace.errors import ImportingError

    try:
        state = qtrace.to_torch_state(converted)
    except ImportingError as error:
        return [str(error)]
    own = module.state_dict()
    strangers = [f"{name}, which the module lacks" for name in state if name not in own]
    return strangers + [name for name in own if name not in state and own[name].is_floating_point()]


def _child(network: TorchNetwork, host: RuntimeHost | None, connection: Any) -> None:
    with open(os.devnull, "w") as sink, contextlib.redirect_stdout(sink):
        warnings.simplefilter("ignore")
        try:
            row = measure(network, host)
        except BaseException as error:
            row = TorchRow(network.package, network.name, network.size, measured=today())
            row = dataclasses.replace(row, refusal=f"FAULT {type(error).__name__}: {error}"[:1500])
    connection.send(row)
    connection.close()


def _run(network: TorchNetwork, host: RuntimeHost | None) -> TorchRow:
    """Measures a network in a process of its own, forked from this one, which has loaded torch."""
    context = multiprocessing.get_context("fork")
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=_child, args=(network, host, sender))
    process.start()
    sender.close()
    row = TorchRow(network.package, network.name, network.size, measured=today(), seconds=SECONDS)
    row = dataclasses.replace(row, refusal=f"not done after {SECONDS} s")
    if receiver.poll(SECONDS):
        try:
            row = receiver.recv()
        except EOFError:
            row = dataclasses.replace(row, refusal="FAULT: the process died")
    process.kill()
    process.join()
    return row


def _warm_up() -> None:
    """Loads torch's exporter, which takes long, before processes are forked."""
    import timm  # noqa: F401
    import torch
    import torchvision  # noqa: F401

    torch.set_num_threads(1)
    with contextlib.redirect_stdout(sys.stderr):
        torch.onnx.export(torch.nn.Linear(2, 2), (torch.zeros(1, 2),), dynamo=True, verbose=False)


def main(arguments: list[str] | None = None) -> int:
    """The command; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("names", nargs="*", help="beginnings of names; all networks without them")
    parser.add_argument("--missing", action="store_true", help="only networks without a stored row")
    parser.add_argument("--runtime-python", default="", help="the interpreter that has the onnxruntime")
    options = parser.parse_args(arguments)
    host = RuntimeHost(python=options.runtime_python) if options.runtime_python else None
    stored = {row.network: row for row in load(TorchRow)}
    chosen = [n for n in NETWORKS if not options.names or n.name.startswith(tuple(options.names))]
    if options.missing:
        chosen = [n for n in chosen if n.name not in stored]
    _warm_up()
    for network in chosen:
        row = _run(network, host)
        stored[row.network] = row
        print(" | ".join(row.cells()), flush=True)
        store([stored[n.name] for n in NETWORKS if n.name in stored], TorchRow)
    return 0


if __name__ == "__main__":
    sys.exit(main())
