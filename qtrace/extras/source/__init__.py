"""Python source of a traced module: readable classes that compute what the graph computes."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from qtrace.display import Displayed
from qtrace.errors import GraphError, refusing
from qtrace.extras.source.body import is_reserved
from qtrace.extras.source.classes import Classes
from qtrace.graph.types import TracedModule
from qtrace.graph.walk import check_traced
from qtrace.storage.checkpoints import pack_arrays
from qtrace.storage.files import replacing

_HELPERS = {
    "Group": '''class Group(M.Module):
    """Layers and tensors by name, which the network calls itself."""

    def forward(self):
        raise NotImplementedError("a Group is not called")

    def __getitem__(self, index):
        return getattr(self, str(index))

    def __setitem__(self, index, member):
        setattr(self, str(index), member)
''',
    "made": '''def made(kind, **attributes):
    """Returns a module of a class with these attributes, which its constructor does not take."""
    module = kind.__new__(kind)
    M.Module.__init__(module)
    for name, value in attributes.items():
        setattr(module, name, value)
    return module
''',
}


@dataclass(frozen=True, eq=False, repr=False)
class PythonSource(Displayed):
    """A traced module as Python code.

    Attributes:
        name: the name of the class and, in lower case, of the files.
        code: the text of a Python module with the class and a function ``load``.
        weights: name in the state dict -> value.
    """

    name: str
    code: str
    weights: Mapping[str, np.ndarray]

    def _text(self, max_width: int | None) -> str:
        return self.code

    def save(self, folder: str | os.PathLike[str]) -> Path:
        """Writes ``name.py`` and ``name.npz``, the name in lower case; makes the folder if it is missing.

        Returns:
            The path of the Python file.

        Raises:
            GraphError: when the files cannot be written; earlier ones are as they were.
        """
        path = Path(folder) / f"{self.name.lower()}.py"
        with refusing(GraphError, f"{path}: the source", "written"):
            path.parent.mkdir(parents=True, exist_ok=True)
            with replacing(path.with_suffix(".npz"), path) as (weights, code):
                weights.write(pack_arrays(self.weights))
                code.write(self.code.encode())
        return path


def to_source(traced: TracedModule, name: str = "Net") -> PythonSource:
    """Writes a traced module as Python code that can be read, changed and trained.

    Each traced submodule is a class, ``Sequential`` stays one, layers are made by their constructors, and
    variables are called like the nodes. Parameters and buffers keep their paths. Sizes are read from
    ``x.shape``; where an op computes with them, MegEngine's op gives them as a Tensor. What the code gives,
    traced again, computes the same bits.

    Args:
        traced: a traced module: of ``trace`` or ``from_onnx``, edited, prepared or converted.
        name: the name of the class.

    Returns:
        The code and the weights. Statistics of observers, hooks, and what qtrace records in prepared modules
        are not part of them.

    Raises:
        GraphError: naming the module or node that no source gives, or for a name that no class can have.
    """
    check_traced(traced, "to_source takes")
    if not name.isidentifier() or is_reserved(name):
        raise GraphError(f"to_source: {name!r} is no name of a class, or one that the code uses itself.")
    if len(traced.argdef_graph_map) != 1:
        raise GraphError("to_source: the module was traced with several structures of arguments; trace one.")
    classes = Classes(traced, name)
    weights = dict(traced.state_dict())
    weights.update((path, value.numpy()) for path, value in classes.constants.items())
    return PythonSource(name, _module_text(classes, name), weights)


def _module_text(classes: Classes, name: str) -> str:
    file = f"{name.lower()}.npz"
    literals = classes.literals
    literals.use("import numpy as np")
    literals.use("import megengine.module as M")
    helpers = [_HELPERS[helper] for helper in sorted(literals.helpers)]
    plain = sorted(line for line in literals.imports if line.startswith("import"))
    others = sorted(line for line in literals.imports if line.startswith("from"))
    head = f'"""{name}, written by qtrace from a traced graph; its weights are in {file}."""\n'
    imports = "\n".join(["from pathlib import Path", "", *plain, *others]) + "\n"
    load = f'''def load(weights=Path(__file__).with_name("{file}")):
    """Returns the network with its weights, in eval mode."""
    net = {name}()
    with np.load(weights) as arrays:
        net.load_state_dict(dict(arrays))
    net.eval()
    return net
'''
    return "\n\n".join([head + "\n" + imports, *helpers, *classes.texts.values(), load])
