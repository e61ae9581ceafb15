"""Conventions of the source tree: layers of imports and light imports.

A layer is a top-level module or package of `neuboots`. What a module imports when it is loaded comes from lower layers;
imports inside functions and under `if TYPE_CHECKING:` do not count.
"""

import ast
import importlib
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

SRC = Path(__file__).resolve().parents[2] / "src"
FILES = sorted((SRC / "neuboots").rglob("*.py"))

LAYERS = (
    "_validation", "_prng", "weights", "losses", "loading", "_fingerprint", "head", "prediction",
    "training", "methods", "serialization", "nets", "testing", "metrics", "data",
    "evaluation", "estimators", "report", "app", "cli",
)  # fmt: skip
ALIASES = {"posthoc": "methods"}  # one of the methods is scaled
CORE = set(LAYERS[: LAYERS.index("metrics")])  # needs torch and NumPy only
LIGHT = {"torch", "numpy", "neuboots", *sys.stdlib_module_names}
EXTRAS = (
    "lightning_fabric", "rich", "safetensors", "sklearn", "scipy", "joblib", "matplotlib", "tyro", "torchmetrics",
    "gpytorch", "datasets", "kornia", "monai", "nibabel", "pandas", "pyarrow", "transformers", "neuboots_paper",
)  # fmt: skip


def imported_modules(source: str, path: str) -> Iterator[str]:
    """Absolute names of the modules that a file (path relative to src) imports when it is loaded."""
    package = path.split("/")[:-1]

    def walk(node: ast.AST) -> Iterator[str]:
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            module = ".".join([*base, *filter(None, [node.module])])
            # `from neuboots import x` names the layer x, any other `from` its module
            yield from [f"neuboots.{alias.name}" for alias in node.names] if module == "neuboots" else [module]
        elif isinstance(node, ast.If) and ast.unparse(node.test).endswith("TYPE_CHECKING"):
            yield from (module for child in node.orelse for module in walk(child))
        elif not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield from (module for child in ast.iter_child_nodes(node) for module in walk(child))

    return walk(ast.parse(source))


def find_violations(source: str, path: str) -> list[str]:
    layer = path.split("/")[1].removesuffix(".py")
    layer = ALIASES.get(layer, layer)
    if layer in ("__init__", "__main__"):
        return []
    if layer not in LAYERS:
        return [f"{path}: {layer} is not in LAYERS"]
    found = []
    for module in imported_modules(source, path):
        top, _, rest = module.partition(".")
        target = rest.split(".")[0]
        target = ALIASES.get(target, target)
        if top == "neuboots" and (target not in LAYERS or LAYERS.index(target) > LAYERS.index(layer)):
            found.append(f"{path} imports {module}, which is not in a lower layer")
        if layer in CORE and top not in LIGHT:
            found.append(f"{path} imports {module} when it is loaded")
        if top in ("neuboots_paper", "torchvision"):
            found.append(f"{path} imports {module} when it is loaded")
    return found


@pytest.mark.parametrize("file", FILES, ids=lambda file: str(file.relative_to(SRC)))
def test_imports_come_from_lower_layers(file: Path) -> None:
    assert find_violations(file.read_text(encoding="utf-8"), file.relative_to(SRC).as_posix()) == []


@pytest.mark.parametrize(
    ("path", "source", "count"),
    [
        ("neuboots/attic.py", "", 1),
        ("neuboots/weights.py", "from .head import split_head", 1),
        ("neuboots/weights.py", "from neuboots import head", 1),
        ("neuboots/training.py", "try:\n    import rich.progress\nexcept ImportError:\n    pass", 1),
        ("neuboots/serialization.py", "class A:\n    from safetensors.torch import save_file", 1),
        ("neuboots/cli/models.py", "import neuboots_paper", 1),
        ("neuboots/weights.py", "import math, torch\nfrom torch import Tensor", 0),
        ("neuboots/methods/neuboots.py", "from ..training import train\nfrom ._base import register", 0),
        ("neuboots/training.py", "def f():\n    import lightning_fabric", 0),
        ("neuboots/training.py", "if typing.TYPE_CHECKING:\n    import lightning_fabric", 0),
        ("neuboots/report/plots.py", "import matplotlib.pyplot as plt", 0),
    ],
)
def test_find_violations(path: str, source: str, count: int) -> None:
    assert len(find_violations(source, path)) == count


def test_import_neuboots_is_light_and_has_no_side_effects() -> None:
    program = f"""
import sys, torch
before = torch.get_rng_state(), torch.get_default_dtype(), torch.get_num_threads()
import neuboots
after = torch.get_rng_state(), torch.get_default_dtype(), torch.get_num_threads()
assert torch.equal(before[0], after[0]) and before[1:] == after[1:], "the import changed a state of torch"
assert not sys.modules.keys() & set({EXTRAS}), sys.modules.keys() & set({EXTRAS})
"""
    run = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert run.returncode == 0, run.stderr


@pytest.mark.parametrize("package", ["neuboots", "neuboots.nets", "neuboots.data"])
def test_dir_lists_names_that_are_imported_later(package: str) -> None:
    module = importlib.import_module(package)
    assert set(module.__all__) <= set(dir(module))


RUNS_CODE = re.compile(
    r"\b(pickle|cPickle|dill|cloudpickle|marshal|shelve)\b(?!:)|allow_pickle\s*=\s*True|weights_only\s*=\s*False"
    r"|\b(joblib|pd|pandas)\.(load|read_pickle)\(|(?<![.\w])(eval|exec)\("
)


@pytest.mark.parametrize("path", ["neuboots", "neuboots_paper"])
def test_nothing_that_is_read_can_run_code(path: str) -> None:
    for file in sorted((SRC / path).rglob("*.py")):
        tree = ast.parse(file.read_text(encoding="utf-8"))
        for node in ast.walk(tree):
            if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
                node.value.value = None  # a docstring
        code = ast.unparse(tree)
        assert not RUNS_CODE.search(code), file
        for call in re.findall(r"(?<!safetensors\.)torch\.load\((.*)\)", code):
            assert "weights_only=" in call, file
