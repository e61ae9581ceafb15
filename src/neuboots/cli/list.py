"""The command `neuboots data`: the data sets that have a name, and whether they are there. Nothing is loaded."""

import json
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from neuboots.cli._console import Console, print_json, user_errors
from neuboots.methods import METHODS

TASKS = ("classification", "regression", "segmentation")
ALSO = {"voc2012": "VOCdevkit/VOC2012", "hippocampus3d": "Task04_Hippocampus"}  # folders as they are unpacked
WORDS: dict[str, dict[bool | None, str]] = {
    "package": {True: "shipped", False: "shipped with scikit-learn, which is not installed"},
    "root": {True: "data root", False: "NOT in the data root"},
    "hub": {None: "hub, if reached"},
    "nowhere": {False: "needs a data root"},
}


@dataclass(frozen=True)
class ListDatasets:
    """List the data sets that have a name, what each is, and where it is found.

    A set is shipped with scikit-learn, lies in a data root, or is fetched from the Hugging Face hub. `neuboots
    reproduce` and `neuboots.data.load_dataset` take these names; `neuboots fit` takes files of your own.
    """

    root: Path | None = None
    """The folder of data sets; without it the variable NEUBOOTS_DATA, or the hub."""
    json: bool = False
    """One JSON object on standard output, for machines."""

    def run(self) -> None:
        from neuboots.data._common import resolve_data_root

        with user_errors():
            root = resolve_data_root(self.root)
        found = find_datasets(root)
        if self.json:
            print_json({"root": None if root is None else str(root), "sets": found})
            return
        from neuboots.report.tables import Cell, Table

        words = Console(aside=False)
        words.say(f"Data root: {root}" if root else "No data root: give --root, or set the variable NEUBOOTS_DATA.")
        for task in TASKS:
            lines = tuple(
                (Cell(each["name"]), Cell(each["summary"]), Cell(WORDS[each["where"]][each["there"]]))
                for each in found
                if each["task"] == task
            )
            words.show(Table(task.capitalize(), ("name", "what it is", "where"), lines, num_keys=3))


def find_datasets(root: Path | None) -> list[dict[str, Any]]:
    """Every set: its name, task, a line on it, where to look, the place, whether it is there (None: nobody knows yet).

    >>> found = {each["name"]: each for each in find_datasets(None)}
    >>> found["digits"]["task"], found["digits"]["there"], found["mnist"]["where"], found["mnist"]["place"]
    ('classification', True, 'hub', 'ylecun/mnist')
    """
    from neuboots.data import DATASETS

    found = []
    for name, entry in DATASETS.items():
        where, place, there = _found(name, entry.hub, shipped=entry.shipped, root=root)
        known: dict[str, Any] = {"name": name, "task": entry.task, "summary": entry.summary, "hub": entry.hub}
        found.append(known | {"where": where, "place": place, "there": there, "how": entry.hint or None})
    return found


def _found(name: str, hub: str | None, *, shipped: bool, root: Path | None) -> tuple[str, str | None, bool | None]:
    """Where to look for a set, the place, and whether it is there."""
    if shipped:
        return "package", "scikit-learn", find_spec("sklearn") is not None
    if root is None:
        return ("hub", hub, None) if hub else ("nowhere", None, False)
    if name.startswith("uci/"):
        files = [root / f"{name}.{end}" for end in ("csv", "test_splits.json")]
        return "root", str(files[0]), all(file.is_file() for file in files)
    from neuboots.data._common import DatasetNotFoundError
    from neuboots.data.huggingface import DatasetLocation, find_folder

    if name in ALSO and (root / ALSO[name]).is_dir():
        return "root", str(root / ALSO[name]), True
    try:
        return "root", str(find_folder(DatasetLocation(name, hub), root)), True
    except DatasetNotFoundError:
        return "root", str(root / name), False


@dataclass(frozen=True)
class ListMethods:
    """List the methods: what each is, what it can do, and what it costs."""

    json: bool = False
    """One JSON object a line, for machines."""

    def run(self) -> None:
        if self.json:
            shown = ("name", "summary", "tasks", "train_cost", "predict_cost", "reference")
            for entry in METHODS.values():
                print(json.dumps({key: getattr(entry, key) for key in shown}, ensure_ascii=False))
            return
        from rich import box, get_console
        from rich.table import Table

        table = Table(
            box=box.SIMPLE, caption="Costs in the passes L of one net and the number K of members or replicates."
        )
        table.add_column("method", no_wrap=True)
        for head in ("what it is", "tasks", "training", "prediction"):
            table.add_column(head, overflow="fold", min_width=26 if head == "what it is" else None)
        for entry in METHODS.values():
            tasks = "all" if len(entry.tasks) == 3 else ", ".join(entry.tasks)
            table.add_row(entry.name, entry.summary, tasks, entry.train_cost, entry.predict_cost)
        get_console().print(table)
