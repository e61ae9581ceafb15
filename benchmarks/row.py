"""One line of the table: a ratio, the bound it must keep to, and how much is run to measure it."""

from dataclasses import dataclass

from benchmarks.timing import Series

SEED = 0


@dataclass(frozen=True)
class Row:
    """A ratio and the bound it must keep to; a row without a bound is there to compare with."""

    name: str
    ratio: float
    at_most: float | None = None
    at_least: float | None = None
    whole_runs: float | None = None  # the same ratio with nothing told apart, where `timing` tells parts apart
    note: str = ""

    @property
    def holds(self) -> bool | None:
        if self.at_most is not None:
            return self.ratio <= self.at_most
        return None if self.at_least is None else self.ratio >= self.at_least

    @property
    def bound(self) -> str:
        if self.at_most is not None:
            return f"≤ {self.at_most:g}"
        return "" if self.at_least is None else f"≥ {self.at_least:g}"


@dataclass(frozen=True)
class Scale:
    """How much to run; quick sizes show that the harness works and nothing else."""

    repeats: int
    quick: bool = False


def against(series: Series, other: str, name: str, label: str, at_most: float | None = None) -> Row:
    return Row(label, series.ratio(name, other), at_most=at_most, whole_runs=series.whole_ratio(name, other))
