"""The command `neuboots report`: one page of all results in a folder."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from neuboots.cli import UsageError
from neuboots.cli._console import echo
from neuboots.report.section import Section, count_outcomes
from neuboots.serialization import write_text
from neuboots_paper.runner import JOBS, ROWS, SETTINGS, IncompleteRunError, Run, format_markdown, read_run
from neuboots_paper.studies import STUDY_NAMES
from neuboots_paper.study import BEYOND_PAPER

_INTRODUCTION = (
    "Every table and figure of the paper, measured by this library. Values marked *paper* are the paper's; all others "
    "are ours, mean ± standard deviation over seeds. A claim *holds* or *does NOT hold* if Student's 95 % interval of "
    "the paired differences shows it, or by the rule that the claim names, and is *not resolved* otherwise. A result "
    "is for the scale that was run: at `cpu`, small nets, few epochs and subsets of the data, where the paper trains "
    "large nets for long. It neither proves nor refutes the paper's own values."
)
_INTRODUCTION_BEYOND = (
    "Claims of this library that are not in the paper, tested in the same way. A claim *holds* or *does NOT hold* by "
    "the rule that it names, and is *not resolved* if that rule is Student's 95 % interval of the paired differences "
    "and the interval includes zero."
)


@dataclass(frozen=True)
class Report:
    """Write one page of all results in a folder: tables, checks of the claims, and plots."""

    folder: Path
    """Results folder of `neuboots reproduce`, or any folder inside it."""
    out: Path | None = None
    """The page, .html or .md (default: report.html in the folder)."""
    without: tuple[str, ...] = ()
    """Studies to exclude, such as uci."""

    def run(self) -> None:
        """Read the results and write the page."""
        out = self.out or self.folder / "report.html"
        if out.suffix not in (".html", ".md"):
            raise UsageError(f"--out is {out}; expected a name that ends in .html or .md")
        sections = read_sections(self.folder, plots=out.suffix == ".html", without=self.without)
        try:
            if out.is_dir() or not out.absolute().parent.is_dir():
                raise UsageError(f"--out is {out}; expected a file in an existing folder")
            write_text(out, render_report(sections, out.suffix))
        except OSError as error:
            raise UsageError(f"cannot write --out {out} ({error.strerror}); choose another file") from None
        echo(f"{len(sections)} {'study' if len(sections) == 1 else 'studies'}: {out}")


def read_sections(folder: Path, *, plots: bool = True, without: Sequence[str] = ()) -> list[Section]:
    """Sections of all finished runs in a folder, in the order of the paper; incomplete runs are listed on stderr.

    Args:
        folder: Folder that holds runs, at any depth.
        plots: Whether to make the plots.
        without: Names of studies to exclude.

    Raises:
        UsageError: If the folder has no finished run, or rows that this version cannot read.
    """
    if unknown := [name for name in without if name not in STUDY_NAMES]:
        raise UsageError(f"--without is {' '.join(unknown)}; expected some of {', '.join(STUDY_NAMES)}")
    if not folder.is_dir():
        raise UsageError(f"{folder} is not a folder; pass one written by `neuboots reproduce`")
    folders = [file.parent for file in sorted(folder.rglob(SETTINGS))]
    folders = [each for each in folders if (each / ROWS).is_dir() or (each / JOBS).is_dir()]  # others may be alike
    if not folders:
        raise UsageError(f"no results in {folder}; make some: neuboots reproduce all --out {folder}")
    runs: list[Run] = []
    incomplete = []
    for each in folders:
        try:
            runs.append(read_run(each))
        except IncompleteRunError as error:
            incomplete.append(str(error))
    if not runs:
        raise UsageError("\n".join(incomplete))
    for message in incomplete:
        echo(f"excluded: {message}", to_stderr=True)
    selected = [run for run in runs if run.study.name not in without]
    if not selected:
        raise UsageError(f"--without excludes all results in {folder} ({', '.join(without)}); exclude fewer studies")
    selected.sort(key=lambda run: (STUDY_NAMES.index(run.study.name), run.scale))
    return [_make_section(run, plots=plots) for run in selected]


def _make_section(run: Run, *, plots: bool) -> Section:
    try:
        return run.section(plots=plots)
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
        raise UsageError(
            f"cannot make the tables of {run.study.name} at scale {run.scale} from its rows "
            f"({type(error).__name__}: {error}); run it again: {run.about['command']}"
        ) from error


def render_report(sections: list[Section], suffix: str) -> str:
    """Render the page of these sections as HTML (".html") or Markdown (".md")."""
    beyond = all(section.source == BEYOND_PAPER for section in sections)
    title = "Beyond the paper" if beyond else "The paper, reproduced"
    introduction = _INTRODUCTION_BEYOND if beyond else _INTRODUCTION
    if suffix == ".md":
        return format_markdown_report(sections, title=title, introduction=introduction)
    from neuboots.report.html import render_html

    return render_html(sections, title=title, introduction=introduction)


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
        kept = [letter for letter in f"{section.name}: {section.source}".lower() if letter.isalnum() or letter in " -_"]
        anchor = "".join(kept).replace(" ", "-")  # as GitHub makes it
        link = f"[{section.name}](#{anchor}{f'-{seen[anchor]}' if seen[anchor] else ''})"  # a name may repeat
        seen[anchor] += 1
        for check in section.checks:
            claim = check.claim.replace("|", "\\|")
            lines.append(f"| {link} | {section.source} | {claim} | {check.outcome} |")
    words = zip(counts.values(), ("hold", "do NOT hold", "are not resolved"), strict=True)
    summary = ", ".join(f"{count} {word}" for count, word in words)
    checks = f"## What held\n\nOf {sum(counts.values())} claims: {summary}.\n\n" + "\n".join(lines)
    return "\n".join([f"# {title}\n\n{introduction}\n\n{checks}\n", *map(format_markdown, sections)])
