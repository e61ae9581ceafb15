"""Report section: tables, checks and plots of one experiment or of one aspect of an evaluation."""

from collections import Counter
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


def format_text(section: Section) -> str:
    """Return the tables and checks of a section as plain text.

    Args:
        section: The section.

    Returns:
        The text.
    """
    return "\n\n".join([*[table.text for table in section.tables], "\n".join(map(str, section.checks))])


def format_markdown(section: Section) -> str:
    """Return a section as Markdown: claim, checks, tables and how to repeat the run.

    Args:
        section: A section of a study.

    Returns:
        The Markdown text.
    """
    checks = "\n".join(f"- **{check.outcome}**: {check.claim} ({check.evidence})" for check in section.checks)
    tables = "\n".join(table.markdown for table in section.tables)
    note = f"{section.note}\n\n" if section.note else ""
    return (
        f"## {section.name}: {section.source}\n\n{section.claim}\n\n{note}{checks}\n\n{tables}\n"
        f"Scale {section.scale}, {section.seeds}; {section.cost}: `{section.about['command']}`\n"
    )


def format_markdown_report(sections: Sequence[Section], *, title: str, introduction: str) -> str:
    """Return a Markdown page: a summary of all checks, then the sections.

    Args:
        sections: Sections of studies.
        title: Title of the page.
        introduction: First paragraph.

    Returns:
        The Markdown text.
    """
    counts = count_outcomes([check for section in sections for check in section.checks])
    lines, seen = ["| experiment | paper | claim | here |", "| --- | --- | --- | --- |"], Counter[str]()
    for section in sections:
        anchor = _github_anchor(f"{section.name}: {section.source}")
        link = f"[{section.name}](#{anchor}{f'-{seen[anchor]}' if seen[anchor] else ''})"  # a name may repeat
        seen[anchor] += 1
        for check in section.checks:
            claim = check.claim.replace("|", "\\|")
            lines.append(f"| {link} | {section.source} | {claim} | {check.outcome} |")
    words = zip(counts.values(), ("hold", "do NOT hold", "are not resolved"), strict=True)
    summary = ", ".join(f"{count} {word}" for count, word in words)
    checks = f"## What held\n\nOf {sum(counts.values())} claims: {summary}.\n\n" + "\n".join(lines)
    return "\n".join([f"# {title}\n\n{introduction}\n\n{checks}\n", *map(format_markdown, sections)])


def count_outcomes(checks: Sequence[Check]) -> dict[str, int]:
    """Return the number of checks of each outcome.

    Args:
        checks: Checks.

    Returns:
        Counts by outcome.
    """
    return {outcome: [check.outcome for check in checks].count(outcome) for outcome in OUTCOMES}


def _github_anchor(heading: str) -> str:
    kept = "".join(letter for letter in heading.lower() if letter.isalnum() or letter in " -_")
    return kept.replace(" ", "-")
