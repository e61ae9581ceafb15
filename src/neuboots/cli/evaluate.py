"""The command `neuboots evaluate`: everything that labelled rows say of a model, on the terminal and as a page."""

import shlex
from dataclasses import asdict, dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from neuboots.cli._console import (
    Console,
    DataPath,
    ModelFolder,
    UsageError,
    check_int_option,
    collect_warnings,
    load_or_exit,
    print_json,
    user_errors,
)
from neuboots.cli._writers import check_output_path

if TYPE_CHECKING:
    from neuboots.app import Model
    from neuboots.cli.evaluation import Evaluation

OPENING = (
    "What the model said of rows whose truth is known. A check *holds* or *does NOT hold* where the rows are enough to "
    "tell, and is *not resolved* otherwise; intervals are of 95 % for the rows that were drawn."
)
_STYLES = {True: ("✓", None), False: ("✗", "bold red"), None: ("–", "yellow")}


@dataclass(frozen=True)
class Evaluate:
    """Say what a model is worth on labelled data: on the terminal, and as an HTML page with diagrams.

    Errors, calibration or coverage of the intervals, where to trust it and where not, beside a constant guess and the
    test rows at training time; what went wrong comes first. It warns where errors are more than then, or where rows are
    unlike those of the training. Rows without a label are counted and left out. Any number of rows is read.
    """

    model: ModelFolder
    """A folder that `neuboots fit` wrote."""
    data: DataPath
    """A table with the target's column, a folder of class folders, or a folder of images and masks; - for standard
    input."""
    out: Path | None = None
    """The page; MODEL-evaluation.html in the current folder by default. With --json a page is written only if asked."""
    level: float = 0.95
    """How much of the truth the intervals of a regression are to hold."""
    num_samples: int = 100
    """Bootstrap replicates B behind each answer."""
    json: bool = False
    """One JSON object on standard output, for machines; words go to standard error."""

    @property
    def command(self) -> str:
        """The command line that repeats this."""
        words = ["neuboots", "evaluate", self.model, self.data]
        options = {
            "out": None if self.out is None else str(self.out),
            "level": self.level,
            "num_samples": self.num_samples,
        }
        for name, value in options.items():
            if value is not None and value != getattr(type(self), name):
                words += [f"--{name.replace('_', '-')}", str(value)]
        return shlex.join(words)

    @property
    def page(self) -> Path | None:
        """Where the page goes; None for none."""
        if self.out is not None:
            return self.out
        return None if self.json else Path(f"{Path(self.model).resolve().name}-evaluation.html")

    def run(self) -> None:
        """Read, measure, print and write."""
        self._check()
        words = Console(aside=self.json)
        model = load_or_exit(self.model)
        from neuboots.cli.evaluation import evaluate

        with user_errors(), collect_warnings() as warned:
            found = evaluate(model, self.data, num_samples=self.num_samples, level=self.level, progress=not self.json)
        found.seen.add(warned)
        if not self.json:
            self._print(model, found, words)
        if self.page is not None:
            self._write(model, found, self.page)
            words.say(f"\nWith diagrams: {self.page}")
        if self.json:
            print_json(self._object(model, found))

    def _print(self, model: "Model", found: "Evaluation", words: Console) -> None:
        """What went wrong first, then the figures."""
        from neuboots.cli.evaluation import summary_of

        words.say(self._opening(model, found), style="bold")
        for note in self._notes(found):
            words.say(f"note: {note}")
        for check in found.checks:
            mark, style = _STYLES[check.holds]
            words.say(f"{mark} {check}", style=style)
        for table in summary_of(found):
            words.show(table)

    def _opening(self, model: "Model", found: "Evaluation") -> str:
        from neuboots.cli.evaluation.sections import counted

        things = counted(found.count, "image" if model.card.task == "segmentation" else "row")
        return (
            f"{self.model} on {self.data}: {model.card.task} of {model.card.target!r} by {model.card.method}, "
            f"{things}, B = {self.num_samples}"
        )

    def _notes(self, found: "Evaluation") -> list[str]:
        seen, left_out = found.seen, []
        if seen.unlabelled:
            left_out = [
                f"{seen.unlabelled:,} of {seen.rows:,} rows have no label that the model knows, and are left out"
            ]
        return [*left_out, *seen.notes]

    def _object(self, model: "Model", found: "Evaluation") -> dict[str, Any]:
        return {
            "command": self.command,
            "model": self.model,
            "data": self.data,
            **{name: getattr(model.card, name) for name in ("task", "target", "method")},
            "rows": {"read": found.seen.rows, "without label": found.seen.unlabelled, "counted": found.count},
            "num_samples": self.num_samples,
            "figures": found.figures,
            "constant": found.constant,
            "at_training": {"rows": model.card.rows, "figures": model.card.figures},
            **found.details,
            "checks": [asdict(check) for check in found.checks],
            "notes": self._notes(found),
            "page": None if self.page is None else str(self.page),
        }

    def _write(self, model: "Model", found: "Evaluation", path: Path) -> None:
        from neuboots._io import write_text
        from neuboots.cli.evaluation import chapters_of
        from neuboots.report.html import render_html

        chapters = chapters_of(found)
        about = {"command": self.command, "neuboots": model.card.version}
        settings = {"model": self.model, "made by": model.card.command, "data": self.data, "B": self.num_samples}
        chapters[-1] = replace(chapters[-1], about=about, settings=settings)
        source = "standard input" if self.data == "-" else Path(self.data).resolve().name
        title = f"{Path(self.model).resolve().name} on {source}"
        text = render_html(
            chapters, title=title, introduction=f"{self._opening(model, found)}. {OPENING}", is_paper=False
        )
        try:
            write_text(path, text)
        except OSError as fault:
            raise UsageError(f"--out is {path}, which cannot be written ({fault.strerror}); give another one") from None

    def _check(self) -> None:
        check_int_option("num-samples", self.num_samples, 1)
        if not 0 < self.level < 1:
            raise UsageError(f"--level is {self.level}; give a number between 0 and 1, such as 0.95")
        if self.page is None:
            return
        if self.page.suffix.lower() not in (".html", ".htm"):
            raise UsageError(f"--out is {self.page}; give a name that ends in .html")
        check_output_path(str(self.page), self.data)
        if find_spec("matplotlib") is None:
            raise ImportError("the page needs matplotlib; get it with: pip install 'neuboots[demo]', or give --json")
