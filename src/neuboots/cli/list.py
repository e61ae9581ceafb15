"""`neuboots list`: methods, and datasets that have a name. No data are loaded."""

from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal

from neuboots.cli._console import echo, echo_table, print_json

_UNPACKED = {"voc2012": "VOCdevkit/VOC2012", "hippocampus3d": "Task04_Hippocampus"}  # folder names of the archives
_STATUS: dict[tuple[str, bool | None], str] = {
    ("package", True): "scikit-learn",
    ("package", False): "scikit-learn, not installed",
    ("root", True): "data root",
    ("root", False): "NOT in the data root",
    ("hub", None): "Hugging Face hub",
    ("nowhere", False): "needs a data root",
}


@dataclass(frozen=True)
class List:
    """List the methods of uncertainty quantification, or the named datasets and where they are found.

    Datasets are part of scikit-learn, in a data root, or on the Hugging Face hub. `neuboots reproduce` and
    `neuboots.data.load_dataset` take their names; `neuboots fit` takes your own files.

    Args:
        what: What to list.
        root: Data root; by default the variable NEUBOOTS_DATA, else the hub.
        json: Print one JSON object.
    """

    what: Literal["methods", "datasets"]
    root: Path | None = None
    json: bool = False

    def run(self) -> None:
        """Print the list."""
        from neuboots.report.tables import make_table

        if self.what == "methods":
            from neuboots.methods import METHODS

            keys = ("name", "summary", "tasks", "train_cost", "predict_cost", "reference")
            methods = [{key: getattr(METHODS[name], key) for key in keys} for name in sorted(METHODS)]
            if self.json:
                print_json({"methods": methods})
                return
            rows = [{key: method[key] for key in keys[:-1]} for method in methods]
            title = "Methods. L: passes of one net; K: members or replicates."
            echo_table(make_table(title, rows), max_rows=len(rows))
            return
        from neuboots.data._common import resolve_data_root

        root = resolve_data_root(self.root)
        datasets = find_datasets(root)
        if self.json:
            print_json({"root": None if root is None else str(root), "datasets": datasets})
            return
        echo(f"Data root: {root}" if root else "No data root: give --root, or set the variable NEUBOOTS_DATA.")
        for task in ("classification", "regression", "segmentation"):
            rows = [
                {"name": d["name"], "summary": d["summary"], "where": _STATUS[d["where"], d["available"]]}
                for d in datasets
                if d["task"] == task
            ]
            echo_table(make_table(task.capitalize(), rows), max_rows=len(rows))


def find_datasets(root: Path | None) -> list[dict[str, Any]]:
    """Describe every named dataset.

    Args:
        root: Data root, or None for the hub.

    Returns:
        Name, task, summary, hub name, where to look (`where`, `place`), whether it is `available` (None: unknown until
        the hub is asked) and how to get it.

    Example:
        >>> found = {each["name"]: each for each in find_datasets(None)}
        >>> found["digits"]["task"], found["digits"]["available"], found["mnist"]["where"], found["mnist"]["place"]
        ('classification', True, 'hub', 'ylecun/mnist')
    """
    from neuboots.data import DATASETS

    datasets = []
    for name, entry in DATASETS.items():
        where, place, available = _find(name, entry.hub, in_sklearn=entry.shipped, root=root)
        known: dict[str, Any] = {"name": name, "task": entry.task, "summary": entry.summary, "hub": entry.hub}
        datasets.append(known | {"where": where, "place": place, "available": available, "how": entry.hint or None})
    return datasets


def _find(name: str, hub: str | None, *, in_sklearn: bool, root: Path | None) -> tuple[str, str | None, bool | None]:
    """Return where to look for a dataset, the place, and whether it is there."""
    if in_sklearn:
        return "package", "scikit-learn", find_spec("sklearn") is not None
    if root is None:
        return ("hub", hub, None) if hub else ("nowhere", None, False)
    if name.startswith("uci/"):
        files = [root / f"{name}.{suffix}" for suffix in ("csv", "test_splits.json")]
        return "root", str(files[0]), all(file.is_file() for file in files)
    from neuboots.data._common import DatasetNotFoundError
    from neuboots.data.huggingface import DatasetLocation, find_folder

    if name in _UNPACKED and (root / _UNPACKED[name]).is_dir():
        return "root", str(root / _UNPACKED[name]), True
    try:
        return "root", str(find_folder(DatasetLocation(name, hub), root)), True
    except DatasetNotFoundError:
        return "root", str(root / name), False
