"""Report section: tables, checks and plots of one experiment or of one aspect of an evaluation."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from neuboots.report.checks import Check
from neuboots.report.tables import Table

OUTCOMES = ("holds", "does NOT hold", "not resolved")


@dataclass(frozen=True)
class Section:
    """One section of a report.

    Args:
        name: Title and anchor.
        claim: Claim of the paper, or what the section answers.
        source: Where the claim is in the paper.
        scale: Name of the preset that was run.
        tables: Tables in order.
        checks: Results of the checks.
        plots: SVG text by name, or functions that return it.
        settings: Options of the run.
        about: Command, versions and cost; empty for a section without a footer.
        note: Remark below the claim.
    """

    name: str
    claim: str
    source: str = ""
    scale: str = ""
    tables: tuple[Table, ...] = ()
    checks: tuple[Check, ...] = ()
    plots: Mapping[str, Any] = field(default_factory=dict)
    settings: Mapping[str, Any] = field(default_factory=dict)
    about: Mapping[str, Any] = field(default_factory=dict)
    note: str = ""

    @property
    def cost(self) -> str:
        """Core-minutes and number of jobs of the run."""
        return f"{self.about['core_seconds'] / 60:.1f} core-minutes in {self.about['units']} units"

    @property
    def seeds(self) -> str:
        """Seeds of the run as text."""
        seeds = self.settings["seeds"]
        return f"{'seed' if len(seeds) == 1 else 'seeds'} {', '.join(map(str, seeds))}"


def count_outcomes(checks: Sequence[Check]) -> dict[str, int]:
    """Return the number of checks of each outcome.

    Args:
        checks: Checks.

    Returns:
        Counts by outcome.
    """
    return {outcome: [check.outcome for check in checks].count(outcome) for outcome in OUTCOMES}
