"""A study: one table or figure of the paper as settings, units of work, and what is made of their rows.

    settings → units → rows of each → tables, verdicts, figures

A study is a frozen dataclass whose fields are its settings, plain values all, with a set of them for each scale. A unit
is the least piece of work that is worth keeping: a method with a seed, a trial. What a unit measures are rows of plain
values; whatever is printed, drawn or claimed is made from the rows alone, so it can be made again without any training.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Self, get_args

from neuboots.data import DatasetBundle, load_dataset
from neuboots.report.checks import Check
from neuboots.report.tables import Table
from neuboots.training import TrainingConfig
from neuboots_paper.toy_datasets import TOY_DATASETS

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Scale = Literal["smoke", "cpu", "paper"]
SCALES: tuple[Scale, ...] = get_args(Scale)
BEYOND = "beyond the paper"  # the source of a study that reproduces nothing, and makes a claim of our own

Job = dict[str, Any]
"""What names a unit of work: {"method": "neuboots", "seed": 0}. Every row it measures has these values too."""

Rows = dict[str, list[dict[str, Any]]]
"""Tidy rows by the name of their table: {"scores": [{"method": "neuboots", "seed": 0, "error": 0.12}], …}."""


@dataclass(frozen=True)
class RunContext:
    """Where a unit works: the data root, a folder for its checkpoints, and whether to show bars."""

    root: Path | None = None
    folder: Path | None = None
    progress: bool = False

    def data(self, name: str, **options: Any) -> DatasetBundle:
        """A data set of `neuboots.data`, or one of the small ones made from what scikit-learn ships."""
        return read_dataset(name, self.root, tuple(sorted(options.items())))

    def config(self, part: str = "training", **options: Any) -> TrainingConfig:
        """A recipe whose checkpoints lie in the unit's folder, under `part`: training that was cut short goes on."""
        folder = None if self.folder is None else self.folder / part
        return TrainingConfig(folder=folder, progress=self.progress, **options)


@cache  # units of one process share what they read
def read_dataset(name: str, root: Path | None, options: tuple[tuple[str, Any], ...] = ()) -> DatasetBundle:
    """The data set of this name: shipped ones are made, the others loaded."""
    if name in TOY_DATASETS:
        return TOY_DATASETS[name](**dict(options))
    return load_dataset(name, root=root, **dict(options))


@dataclass(frozen=True)
class Study(ABC):
    """One experiment. A subclass adds its settings as fields, and says what its units are and what they measure."""

    name: ClassVar[str]  # as in `neuboots reproduce NAME`
    source: ClassVar[str]  # where it stands in the paper
    claim: ClassVar[str]  # what the paper says it shows, in a sentence of our own
    presets: ClassVar[Mapping[Scale, Mapping[str, Any]]]  # settings that differ from the fields' defaults

    seeds: tuple[int, ...] = field(default=(0, 1, 2), kw_only=True)

    @classmethod
    def at(cls, scale: Scale) -> Self:
        """The study with the settings of a scale."""
        return cls(**cls.presets[scale])

    @classmethod
    def of(cls, settings: Mapping[str, Any]) -> Self:
        """The study with these settings, as `settings` gave them, or as JSON gave them back."""
        return cls(**{name: _frozen(value) for name, value in settings.items()})

    @property
    def settings(self) -> dict[str, Any]:
        return asdict(self)

    def with_seeds(self, seeds: Sequence[int]) -> Self:
        return replace(self, seeds=tuple(seeds))

    @property
    @abstractmethod
    def sets(self) -> Sequence[str]:
        """The data sets that the study reads; all are looked for before any work begins."""

    @abstractmethod
    def units(self) -> list[Job]:
        """The units of work, those of the first seed first."""

    def timed(self, unit: Job) -> bool:
        """Whether the unit measures time: then it runs alone, after all others, with all threads."""
        return False

    @abstractmethod
    def measure(self, unit: Job, bench: RunContext) -> Rows:
        """The rows of one unit; its own values are added to each."""

    @abstractmethod
    def tables(self, rows: Rows) -> list[Table]:
        """Ours beside the paper's."""

    @abstractmethod
    def verdicts(self, rows: Rows) -> list[Check]:
        """Does what the paper claims hold in these rows?"""

    @abstractmethod
    def figures(self, rows: Rows) -> "dict[str, Figure]":
        """The paper's figures, drawn from the rows."""

    @property
    def note(self) -> str:
        """What differs from the paper at this scale, in a sentence or two; nothing where nothing does."""
        return ""


def _frozen(value: Any) -> Any:
    """JSON's lists as the tuples that they were."""
    return tuple(map(_frozen, value)) if isinstance(value, list) else value
