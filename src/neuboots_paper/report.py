"""The command `neuboots report`: one page of everything that a folder of results holds."""

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from neuboots._io import write_text
from neuboots.cli._console import UsageError
from neuboots.report.section import Section, format_markdown_report
from neuboots_paper.registry import STUDIES
from neuboots_paper.runner import ROWS, SETTINGS, UNITS, IncompleteRunError, Run, read_run
from neuboots_paper.study import BEYOND

OPENING = (
    "Every table and figure of the paper, measured by this library. Figures marked *paper* are the paper's; all others "
    "are ours, mean ± standard deviation over seeds. A claim *holds* or *does NOT hold* if Student's 95 % interval of "
    "the paired differences says so, or the rule that it names, and is *not resolved* otherwise. A verdict is one on "
    "the scale that was run: at `cpu`, small nets, few epochs and part of the data, where the paper has large nets "
    "trained for long. It says what holds there, and neither proves nor refutes the paper's own figures."
)

OWN = (
    "What this library claims and the paper does not, measured as the paper's claims are. A claim *holds* or *does NOT "
    "hold* by the rule that it names, and is *not resolved* if that rule is Student's 95 % interval of the paired "
    "differences and it holds zero."
)


@dataclass(frozen=True)
class Report:
    """Make one self-contained page from the results in a folder: HTML, or Markdown if --out ends in .md."""

    folder: Path
    """What `neuboots reproduce` has made: one experiment, or a folder of them."""
    out: Path | None = None
    """The page; report.html in the folder by default."""
    without: tuple[str, ...] = ()
    """Experiments in the folder to leave out, such as uci."""

    def run(self) -> None:
        out = self.out or self.folder / "report.html"
        if out.suffix not in (".html", ".md"):
            raise UsageError(f"--out is {out}; give a name that ends in .html or .md")
        chapters = chapters_in(self.folder, figures=out.suffix == ".html", without=self.without)
        try:
            if out.is_dir() or not out.absolute().parent.is_dir():
                raise UsageError(f"--out is {out}; give the name of a file in a folder that exists")
            write_text(out, render(chapters, out.suffix))
        except OSError as fault:
            raise UsageError(f"--out is {out}, which cannot be written ({fault.strerror}); give another one") from None
        print(f"{len(chapters)} {'experiment' if len(chapters) == 1 else 'experiments'}: {out}")


def chapters_in(folder: Path, *, figures: bool = True, without: Sequence[str] = ()) -> list[Section]:
    """The chapters of all finished runs in the folder, in the paper's order; the others are named."""
    if unknown := [name for name in without if name not in STUDIES]:
        raise UsageError(f"--without is {' '.join(unknown)}; give some of {', '.join(STUDIES)}")
    if not folder.is_dir():
        raise UsageError(f"{folder} is no folder; give one that `neuboots reproduce` has made")
    homes = [file.parent for file in sorted(folder.rglob(SETTINGS)) if _is_home(file.parent)]
    if not homes:
        raise UsageError(f"{folder} holds no results; make some with: neuboots reproduce all --out {folder}")
    runs, unfinished = [], []
    for home in homes:
        try:
            runs.append(read_run(home, STUDIES))
        except IncompleteRunError as fault:
            unfinished.append(str(fault))
    if not runs:
        raise UsageError("\n".join(unfinished))
    for sentence in unfinished:
        print(f"left out: {sentence}", file=sys.stderr)
    order = list(STUDIES)
    runs = [run for run in runs if run.study.name not in without]
    if not runs:
        raise UsageError(f"{folder} holds nothing but {', '.join(without)}, which --without leaves out; give it less")
    runs.sort(key=lambda run: (order.index(run.study.name), run.scale))
    return [_chapter(run, figures=figures) for run in runs]


def _is_home(folder: Path) -> bool:
    """Whether a run lives there; other programs have a settings.json, too."""
    return (folder / ROWS).is_dir() or (folder / UNITS).is_dir()


def _chapter(run: Run, *, figures: bool) -> Section:
    try:
        return run.chapter(figures=figures)
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as fault:
        what = f"{type(fault).__name__}: {fault}"
        raise UsageError(
            f"the rows of {run.study.name} at scale {run.scale} lack what its tables need ({what}); make them again: "
            f"{run.about['command']}"
        ) from fault


def render(chapters: list[Section], suffix: str) -> str:
    """The page of these chapters, as HTML or Markdown."""
    own = all(chapter.source == BEYOND for chapter in chapters)
    title, opening = ("Beyond the paper", OWN) if own else ("The paper, reproduced", OPENING)
    if suffix == ".md":
        return format_markdown_report(chapters, title=title, introduction=opening)
    from neuboots.report.html import render_html

    return render_html(chapters, title=title, introduction=opening)
