"""One file an experiment: a frozen dataclass of options whose `run()` measures, prints and draws."""

from typing import Protocol


class Experiment(Protocol):
    """Options that know how to run themselves."""

    def run(self) -> None: ...


class UsageError(ValueError):
    """An option has a value that cannot be used; the message says which, and what to give instead."""
