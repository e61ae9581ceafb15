"""A chapter: everything there is to say of one experiment, ready to be printed, written or put on the page."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from neuboots.report.checks import Check
from neuboots.report.tables import Table

OUTCOMES = ("holds", "does NOT hold", "not resolved")


@dataclass(frozen=True)
class Section:
    """One experiment: the paper's claim, tables with the paper's numbers beside ours, verdicts, and figures as SVG.

    A chapter of an evaluation has a question for a claim, no scale, and nothing `about` it but in the last.
    """

    name: str
    source: str  # where it stands in the paper
    claim: str
    scale: str
    tables: tuple[Table, ...]
    verdicts: tuple[Check, ...]
    figures: Mapping[str, str]  # by name, SVG each
    settings: Mapping[str, Any]
    about: Mapping[str, Any]  # command, versions, cost
    note: str = ""

    @property
    def cost(self) -> str:
        """What the run took, in words."""
        minutes = self.about["core_seconds"] / 60
        return f"{minutes:.1f} core-minutes in {self.about['units']} units"

    @property
    def seeds(self) -> str:
        seeds = self.settings["seeds"]
        return f"{'seed' if len(seeds) == 1 else 'seeds'} {', '.join(map(str, seeds))}"


def format_text(chapter: Section) -> str:
    """For a terminal: the tables, and a line for each claim."""
    lines = "\n".join(str(verdict) for verdict in chapter.verdicts)
    return "\n\n".join([*[table.text for table in chapter.tables], lines])


def format_markdown(chapter: Section) -> str:
    """A section of Markdown: claim, verdicts, tables, and how they came about."""
    verdicts = "\n".join(f"- **{verdict.word}**: {verdict.claim} ({verdict.found})" for verdict in chapter.verdicts)
    tables = "\n".join(table.markdown for table in chapter.tables)
    note = f"{chapter.note}\n\n" if chapter.note else ""
    return (
        f"## {chapter.name}: {chapter.source}\n\n{chapter.claim}\n\n{note}{verdicts}\n\n{tables}\n"
        f"Scale {chapter.scale}, {chapter.seeds}; {chapter.cost}: `{chapter.about['command']}`\n"
    )


def count_outcomes(verdicts: Sequence[Check]) -> dict[str, int]:
    """How many claims hold, do not hold, and are open."""
    return {word: [verdict.word for verdict in verdicts].count(word) for word in OUTCOMES}


def format_markdown_report(sections: Sequence[Section], *, title: str, introduction: str) -> str:
    """A whole Markdown page: what held and what did not, then a section for each chapter."""
    counts = count_outcomes([verdict for chapter in sections for verdict in chapter.verdicts])
    lines, seen = ["| experiment | paper | claim | here |", "| --- | --- | --- | --- |"], Counter[str]()
    for chapter in sections:
        anchor = _anchor(f"{chapter.name}: {chapter.source}")
        link = f"[{chapter.name}](#{anchor}{f'-{seen[anchor]}' if seen[anchor] else ''})"  # at several scales
        seen[anchor] += 1
        for verdict in chapter.verdicts:
            claim = verdict.claim.replace("|", "\\|")
            lines.append(f"| {link} | {chapter.source} | {claim} | {verdict.word} |")
    words = zip(counts.values(), ("hold", "do NOT hold", "are not resolved"), strict=True)
    summary = ", ".join(f"{count} {word}" for count, word in words)
    found = f"## What held\n\nOf {sum(counts.values())} claims: {summary}.\n\n" + "\n".join(lines)
    return "\n".join([f"# {title}\n\n{introduction}\n\n{found}\n", *[format_markdown(chapter) for chapter in sections]])


def _anchor(heading: str) -> str:
    """The address of a heading, as Git hosts make it."""
    kept = "".join(letter for letter in heading.lower() if letter.isalnum() or letter in " -_")
    return kept.replace(" ", "-")
