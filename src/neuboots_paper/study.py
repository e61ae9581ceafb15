"""Abstract base class of the studies: one table or figure of the paper each.

    settings → jobs → rows of each job → tables, checks, plots

A study is a frozen dataclass whose fields are its settings, all plain values. `presets/<name>.toml` has the settings
that differ from the defaults at each scale, `published/<name>.toml` the values printed in the paper. A job is the
smallest unit of work that is cached: one method with one seed. It measures rows of plain values, and everything that
is printed, plotted or claimed is computed from the rows, without training again.
"""

import tomllib
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cache
from importlib.resources import files
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Self, get_args

from neuboots.data import DatasetBundle, load_dataset
from neuboots.report.checks import Check
from neuboots.report.tables import Table
from neuboots.training import TrainingConfig
from neuboots_paper.tables import PaperValues
from neuboots_paper.toy_datasets import TOY_DATASETS

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Scale = Literal["smoke", "cpu", "paper"]
SCALES: tuple[Scale, ...] = get_args(Scale)
BEYOND_PAPER = "beyond the paper"  # `source` of a study that reproduces nothing and tests a claim of this library

Job = dict[str, Any]
"""Name of a unit of work: {"method": "neuboots", "seed": 0}. Every row that it measures has these values too."""

Rows = dict[str, list[dict[str, Any]]]
"""Tidy rows by the name of their table: {"scores": [{"method": "neuboots", "seed": 0, "error": 0.12}], …}."""


def load_preset(name: str, scale: str) -> dict[str, Any]:
    """Settings of a study at a scale, as far as they differ from the defaults.

    Args:
        name: Name of the study.
        scale: "smoke", "cpu" or "paper".

    Returns:
        Values of fields by name; arrays are tuples.

    Example:
        >>> load_preset("rotated-mnist", "smoke")["net"]
        'mlp-32'
    """
    text = files("neuboots_paper").joinpath("presets", f"{name}.toml").read_text(encoding="utf-8")
    return {key: _freeze(value) for key, value in tomllib.loads(text).get(scale, {}).items()}


def load_published(name: str) -> PaperValues:
    """Values printed in the paper, by the key of a table row (a tuple where the key has several columns).

    Example:
        >>> load_published("rotated-mnist")[25, "neuboots"]
        {'error': '14.45 ± 0.31', 'ece': 2.98}
    """
    text = files("neuboots_paper").joinpath("published", f"{name}.toml").read_text(encoding="utf-8")
    found: dict[Any, Any] = {}
    for key, values in tomllib.loads(text).items():
        columns = tuple(int(column) if column.isdigit() else column for column in key.split(" | "))
        found[columns if len(columns) > 1 else columns[0]] = values
    return found


@dataclass(frozen=True)
class RunContext:
    """Where a job runs: the data root, a folder for its checkpoints, and whether to show progress bars."""

    root: Path | None = None
    folder: Path | None = None
    progress: bool = False

    def load_data(self, name: str, **options: Any) -> DatasetBundle:
        """Load a dataset of `neuboots.data` or a toy dataset; jobs of one process share it."""
        return _load(name, self.root, tuple(sorted(options.items())))

    def config(self, part: str = "training", **options: Any) -> TrainingConfig:
        """Training options whose checkpoints lie in the job's folder, so that an interrupted training resumes."""
        folder = None if self.folder is None else self.folder / part
        return TrainingConfig(folder=folder, progress=self.progress, **options)


@cache
def _load(name: str, root: Path | None, options: tuple[tuple[str, Any], ...]) -> DatasetBundle:
    if name in TOY_DATASETS:
        return TOY_DATASETS[name](**dict(options))
    return load_dataset(name, root=root, **dict(options))


@dataclass(frozen=True)
class Study(ABC):
    """One experiment; a subclass adds its settings as fields, and defines its jobs and what they measure."""

    name: ClassVar[str]  # as in `neuboots reproduce NAME`
    source: ClassVar[str]  # table, figure or section of the paper
    claim: ClassVar[str]  # what the paper states
    requires: ClassVar[tuple[str, ...]] = ()  # packages that the study imports while it runs

    seeds: tuple[int, ...] = field(default=(0, 1, 2), kw_only=True)

    @classmethod
    def from_preset(cls, scale: Scale) -> Self:
        """The study with the settings of a scale."""
        return cls(**load_preset(cls.name, scale))

    @classmethod
    def from_settings(cls, settings: Mapping[str, Any]) -> Self:
        """The study with settings as `settings` returned them, or as JSON stored them."""
        return cls(**{name: _freeze(value) for name, value in settings.items()})

    @property
    def settings(self) -> dict[str, Any]:
        """Values of all fields."""
        return asdict(self)

    def with_seeds(self, seeds: Sequence[int]) -> Self:
        """The same study with other seeds."""
        return replace(self, seeds=tuple(seeds))

    @property
    def dataset_names(self) -> Sequence[str]:
        """Datasets that the study loads, by default those of the field `data`; checked before any work begins."""
        data = getattr(self, "data", ())
        return (data,) if isinstance(data, str) else data

    @abstractmethod
    def jobs(self) -> list[Job]:
        """All jobs, those of the first seed first."""

    def job_grid(self, **axes: Sequence[Any]) -> list[Job]:
        """One job for each seed and combination of values, those of the first seed first."""
        return [
            {**dict(zip(axes, values, strict=True)), "seed": seed}
            for seed in self.seeds
            for values in product(*axes.values())
        ]

    def is_timing_job(self, job: Job) -> bool:
        """Whether the job measures time: it then runs alone, after all others, with all threads."""
        return False

    @abstractmethod
    def measure(self, job: Job, context: RunContext) -> Rows:
        """Rows of one job; the runner adds the job's own values to each."""

    @abstractmethod
    def tables(self, rows: Rows) -> list[Table]:
        """Measured values beside the paper's."""

    @abstractmethod
    def checks(self, rows: Rows) -> list[Check]:
        """Whether the claims of the paper hold in these rows."""

    @abstractmethod
    def plots(self, rows: Rows) -> "dict[str, Figure]":
        """The figures of the paper, plotted from the rows."""

    @property
    def note(self) -> str:
        """Differences from the paper at this scale; empty if there are none."""
        return ""


def _freeze(value: Any) -> Any:
    """Lists of JSON and TOML as tuples."""
    return tuple(map(_freeze, value)) if isinstance(value, list) else value
