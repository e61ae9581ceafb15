"""The rooms of the house and the one direction of imports between them.

A room is a top-level module or package of `neuboots`. An edge counts wherever the import stands,
also inside a function or under `if TYPE_CHECKING:`; loading counts only what runs on import.
"""

import ast
import subprocess
import sys
from collections.abc import Iterator
from graphlib import TopologicalSorter
from pathlib import Path
from typing import NamedTuple

import pytest

SRC = Path(__file__).resolve().parent.parent / "src"
FILES = sorted((SRC / "neuboots").rglob("*.py"))

ALLOWED: dict[str, set[str]] = {
    "keys": set(),
    "weights": {"keys"},
    "tape": set(),
    "surgery": {"tape"},
    "prediction": {"keys"},
    "regression": {"prediction"},
    "generator": {"keys", "weights", "surgery", "prediction"},
    "losses": set(),
    "batches": {"keys"},
    "checkpoints": set(),
    "progress": set(),
    "training": {"batches", "checkpoints", "progress"},
    "metrics": set(),
    "methods": {
        "keys",
        "checkpoints",
        "weights",
        "tape",
        "surgery",
        "prediction",
        "regression",
        "generator",
        "losses",
        "batches",
        "training",
    },
    "tasks": {
        "keys",
        "surgery",
        "prediction",
        "regression",
        "metrics",
        "losses",
        "batches",
        "progress",
        "training",
    },
    "nets": {"batches", "checkpoints", "progress"},
    "data": {"keys", "batches"},
    "report": {"prediction", "metrics", "tasks"},
    "saving": {"prediction", "surgery", "methods", "nets"},
    "contract": {"losses", "methods", "prediction", "saving", "training"},
    "estimators": {"methods", "training", "losses", "prediction", "saving", "nets", "weights", "data", "tasks", "keys"},
}
ALLOWED["experiments"] = set(ALLOWED)  # all of the above
ALLOWED |= {
    "models": {
        "estimators", "data", "methods", "nets", "tasks", "metrics", "prediction", "saving", "training", "losses",
        "progress", "surgery", "batches", "keys", "regression",
    },
    "commands": {
        "models", "report", "tasks", "data", "methods", "metrics", "progress", "experiments", "nets", "estimators",
        "training", "prediction", "saving",
    },
    "cli": {"experiments", "commands", "report", "methods"},
    "__init__": {
        "weights", "surgery", "prediction", "generator", "losses", "batches", "training", "methods", "saving",
        "regression",
    },
}  # fmt: skip

CORE = ALLOWED["__init__"] | {"__init__", "keys", "tape", "checkpoints", "progress"}
LIGHT = sys.stdlib_module_names | {"torch", "numpy", "neuboots"}
HEAVY = [
    "lightning_fabric", "rich", "safetensors", "sklearn", "matplotlib", "tyro", "torchmetrics", "gpytorch",
    "datasets", "kornia", "monai", "nibabel", "pandas", "transformers",
]  # fmt: skip


class Import(NamedTuple):
    module: str  # the dotted, absolute name
    on_load: bool  # runs when the file is imported


def imports(source: str, path: str) -> Iterator[Import]:
    """Every import in `source`, the text of the file at `path` (relative to src)."""
    package = path.split("/")[:-1]

    def targets(node: ast.AST) -> list[str]:
        if isinstance(node, ast.Import):
            return [alias.name for alias in node.names]
        if not isinstance(node, ast.ImportFrom):
            return []
        base = package[: len(package) - node.level + 1] if node.level else []
        module = ".".join([*base, *filter(None, [node.module])])
        # `from neuboots import x` names the room x, any other `from` names its module.
        return [f"neuboots.{a.name}" for a in node.names] if module == "neuboots" else [module]

    def walk(node: ast.AST, on_load: bool) -> Iterator[Import]:
        yield from (Import(module, on_load) for module in targets(node))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            on_load = False
        if isinstance(node, ast.If) and ast.unparse(node.test).endswith("TYPE_CHECKING"):
            for child in node.body:
                yield from walk(child, False)
            for child in node.orelse:
                yield from walk(child, on_load)
        else:
            for child in ast.iter_child_nodes(node):
                yield from walk(child, on_load)

    return walk(ast.parse(source), True)


def room_of(path: str) -> str:
    return path.split("/")[1].removesuffix(".py")


def room_named(module: str) -> str:
    """The room behind a dotted name; a name that is no room is taken from `__init__`."""
    name = [*module.split("."), ""][1]
    return name if name in ALLOWED else "__init__"


def faults(source: str, path: str) -> list[str]:
    """What is wrong with the imports of one file, a sentence each."""
    room = room_of(path)
    if room not in ALLOWED:
        return [f"{path}: the room '{room}' is not in the table; give it a line in ALLOWED"]
    found = []
    for module, on_load in imports(source, path):
        top = module.split(".")[0]
        if top == "neuboots" and room_named(module) not in ALLOWED[room] | {room}:
            found.append(f"{path}: '{room}' imports '{module}', but may import {ALLOWED[room]}")
        if on_load and room in CORE and top not in LIGHT:
            found.append(f"{path}: the core loads '{module}'; import it inside the function")
        if on_load and top == "torchvision":
            found.append(f"{path}: loads torchvision; import it inside the function")
    return found


@pytest.mark.parametrize("file", FILES, ids=lambda file: str(file.relative_to(SRC)))
def test_every_file_stays_in_its_room(file: Path) -> None:
    assert faults(file.read_text(encoding="utf-8"), file.relative_to(SRC).as_posix()) == []


def test_the_table_itself_has_no_cycle() -> None:
    order = list(TopologicalSorter(ALLOWED).static_order())  # raises CycleError
    assert all(order.index(below) < order.index(room) for room, stands_on in ALLOWED.items() for below in stands_on)


@pytest.mark.parametrize(
    ("path", "source"),
    [
        ("neuboots/attic.py", ""),
        ("neuboots/weights.py", "from .surgery import split_head"),
        ("neuboots/weights.py", "from . import surgery"),
        ("neuboots/weights.py", "from neuboots import surgery"),
        ("neuboots/weights.py", "import neuboots.head as s"),
        ("neuboots/weights.py", "from neuboots import Prediction"),
        ("neuboots/weights.py", "import neuboots"),
        ("neuboots/methods/plain.py", "from ..metrics import ece"),
        ("neuboots/methods/__init__.py", "from ..tasks.ood import auroc"),
        ("neuboots/tasks/ood.py", "def f():\n    from neuboots.methods import NeuBoots"),
        ("neuboots/training.py", "if TYPE_CHECKING:\n    from .prediction import Method"),
        ("neuboots/training.py", "import lightning_fabric"),
        ("neuboots/training.py", "try:\n    import rich.progress\nexcept ImportError:\n    pass"),
        ("neuboots/saving.py", "class A:\n    from safetensors.torch import save_file"),
        ("neuboots/saving.py", "if TYPE_CHECKING:\n    pass\nelse:\n    import safetensors"),
        ("neuboots/nets/resnet.py", "import torchvision.models"),
    ],
)
def test_the_checker_fails_on(path: str, source: str) -> None:
    assert len(faults(source, path)) == 1


@pytest.mark.parametrize(
    ("path", "source"),
    [
        ("neuboots/weights.py", "import math, torch\nfrom torch import Tensor"),
        ("neuboots/generator.py", "from .weights import WeightLaw\nfrom neuboots import surgery"),
        ("neuboots/methods/plain.py", "from ..training import train\nfrom .common import f"),
        ("neuboots/methods/__init__.py", "from .plain import Plain\nfrom . import plain"),
        ("neuboots/__init__.py", "from .methods import NeuBoots\nfrom . import weights"),
        ("neuboots/training.py", "def f():\n    import lightning_fabric"),
        ("neuboots/training.py", "if typing.TYPE_CHECKING:\n    import lightning_fabric"),
        ("neuboots/report/page.py", "import matplotlib.pyplot as plt"),
        ("neuboots/data/cifar.py", "def f():\n    import torchvision"),
    ],
)
def test_the_checker_passes(path: str, source: str) -> None:
    assert faults(source, path) == []


def test_importing_neuboots_loads_nothing_heavy_and_sets_nothing() -> None:
    program = f"""
import sys, torch
before = torch.get_rng_state(), torch.get_default_dtype(), torch.get_num_threads()
import neuboots
after = torch.get_rng_state(), torch.get_default_dtype(), torch.get_num_threads()
assert torch.equal(before[0], after[0]), "the import moved torch's random state"
assert before[1:] == after[1:], f"the import turned {{before[1:]}} into {{after[1:]}}"
loaded = sys.modules.keys() & set({HEAVY})
assert not loaded, f"the import loads {{loaded}}"
"""
    run = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
