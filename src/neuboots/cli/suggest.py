"""`neuboots suggest`: the rows of a pool to label next, and why.

    score × distance:   next row = argmax_x u(x) · min_{a chosen} ‖x − x_a‖,   u: the score, scaled to [0, 1]

The 10 k rows with the highest scores are candidates; k of them are selected one after the other, each far from those
before it. Only candidates are held in memory.

On digits and breast cancer, `margin` with diverse rows was better than random selection and no worse than the highest
margins; it is the default for classes. On three UCI tables no strategy was better than random for regression; `band`
is the default there, as it shows where the regression function is least known.
"""

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, Literal, NamedTuple

import numpy as np

from neuboots._validation import check_choice, check_int
from neuboots.app.model import load_model, open_writer, unique_name
from neuboots.cli._console import (
    ModelFolder,
    UsageError,
    argument,
    check_output_path,
    collect_warnings,
    echo,
    echo_table,
    file_format,
    print_json,
)
from neuboots.cli.models import read_batches
from neuboots.training import progress_bar

if TYPE_CHECKING:
    from neuboots.app.model import Array, Model, PredictionTable

StrategyName = Literal["default", "margin", "entropy", "mutual-information", "std", "band", "ood", "random"]

MAX_DIVERSE_ROWS = 5_000
_SHOWN = 20


class _Strategy(NamedTuple):
    """How useful the label of a row is: tasks, the column of the score (larger is better) and the reason in words."""

    meaning: str
    tasks: tuple[str, ...]
    score: str
    reason: str


_CLASSES = ("classification", "segmentation")
_ALL = (*_CLASSES, "regression")
STRATEGIES = {
    "margin": _Strategy("small margin between the two most probable classes", _CLASSES, "margin", "{top}"),
    "entropy": _Strategy(
        "high entropy of the class probabilities", _CLASSES, "entropy", "entropy {score:.2f} nats; {top}"
    ),
    "mutual-information": _Strategy(
        "replicates disagree about the class",
        _CLASSES,
        "mutual_information",
        "mutual information {score:.3f} nats; {top}",
    ),
    "std": _Strategy(
        "the probability of its class varies over replicates",
        ("classification",),
        "std",
        "{prediction} {probability:.0%} ± {std:.0%}",
    ),
    "band": _Strategy(
        "wide confidence band of the regression function",
        ("regression",),
        "band",
        "mean between {confidence_low:.4g} and {confidence_high:.4g}",
    ),
    "ood": _Strategy("out of distribution", _ALL, "ood_score", "OOD score {score:.2g}"),
    "random": _Strategy("random sample", _ALL, "random", "random"),
}
DEFAULTS = {"classification": "margin", "segmentation": "margin", "regression": "band"}


def _score_columns(table: "PredictionTable", classes: tuple[str, ...]) -> "dict[str, Array]":
    """Columns of the predictions (of masks the means over pixels), further scores and the second most probable class.

    The margin is 1 − (p₁ − p₂), of masks its mean over pixels.
    """
    columns = {name.removeprefix("mean_"): values for name, values in table.columns.items()}
    columns["random"] = np.zeros(len(table))
    if table.probs is None:
        return {**columns, "band": columns["confidence_high"] - columns["confidence_low"]}
    top, order = table.probs.double().topk(min(2, len(classes)), 1)
    margin = 1 - (top[:, 0] - (top[:, 1] if len(classes) > 1 else 0))
    columns["margin"] = np.asarray(margin.flatten(1).mean(1) if margin.ndim > 1 else margin)
    if margin.ndim == 1 and len(classes) > 1:
        names = np.array(classes, dtype=object)
        columns |= {"second": names[order[:, 1].numpy()], "second_probability": np.asarray(top[:, 1])}
    return columns


def _top_classes(row: Mapping[str, Any]) -> str:
    if "uncertain_fraction" in row:
        return f"{row['uncertain_fraction']:.0%} of its pixels are uncertain"
    if "second" not in row:  # a model of numbers, or with one class
        return str(row["prediction"])
    return f"{row['prediction']} {row['probability']:.0%} or {row['second']} {row['second_probability']:.0%}"


@dataclass(frozen=True)
class Suggest:
    """Suggest the rows of a pool that are worth labeling next.

    Rows are scored by how useful a label would be, and selected apart from each other. Strategies: margin (between the
    two most probable classes; the default for classes), entropy (of the class probabilities), mutual-information
    (replicates disagree about the class), std (the probability of the class varies over replicates), band (width of
    the confidence band; the default for regression), ood (out of distribution), random (uniform sample).

    Args:
        model: Folder that neuboots fit wrote.
        pool: Rows without labels: a table, or a folder of images; - reads standard input.
        k: Number of rows to select.
        out: File that ends in .csv, .jsonl or .parquet, or - for standard output. By default the first rows are
            printed.
        strategy: Acquisition strategy.
        diverse: Select rows apart from each other; --no-diverse takes the k highest scores.
        keep: Columns of the table to copy, such as an id; `--keep all` for every one.
        num_samples: Bootstrap replicates B.
        seed: Seed that breaks ties.
        raw_cells: Write texts of a CSV as they are; by default, one that a spreadsheet may take for a formula gets a
            leading apostrophe.
        json: Print one JSON object on standard output, and text on standard error.
    """

    model: ModelFolder
    pool: Annotated[str, argument(metavar="POOL")]
    k: Annotated[int, argument(aliases=["-k"])] = 100
    out: str | None = None
    strategy: StrategyName = "default"
    diverse: bool = True
    keep: tuple[str, ...] = ()
    num_samples: int = 100
    seed: int = 0
    raw_cells: bool = False
    json: bool = False

    def run(self) -> None:
        """Score the pool, select, and write or print the selection."""
        to_stderr = self.json or self.out == "-"
        self._check()
        model = load_model(os.path.expanduser(self.model))
        name = self._strategy_name(model)
        with collect_warnings() as notes:
            columns, total = self._select(model, name, notes)
        for note in notes:
            echo(f"note: {note}", to_stderr=to_stderr)
        if self.out is not None:
            with open_writer(self.out, file_format(self.out, None), raw_cells=self.raw_cells) as write:
                write(columns)
        count = len(columns["rank"])
        cells = zip(*(column.tolist() for column in columns.values()), strict=True)
        rows = [dict(zip(columns, row, strict=True)) for row in cells]
        if self.json:
            options = {"model": self.model, "pool": self.pool, "strategy": name, "diverse": self.diverse}
            counts = {"read": total, "chosen": count, "out": self.out, "notes": notes}
            print_json({**options, **counts, "rows": rows})
            return
        summary = f"{count:,} of {total:,} rows by {name} ({STRATEGIES[name].meaning})"
        if self.out is not None:
            where = "standard output" if self.out == "-" else self.out
            echo(f"Wrote {summary} to {where}.", to_stderr=to_stderr, optional=True)
            return
        from neuboots.report.tables import make_table

        note = "--out FILE writes all of them." if count > _SHOWN else ""
        shown = [
            {column: f"{value:.4g}" if isinstance(value, float) else str(value) for column, value in row.items()}
            for row in rows
        ]
        echo_table(make_table(f"{summary}.", shown, note=note), max_rows=_SHOWN)

    def _select(self, model: "Model", name: str, notes: list[str]) -> "tuple[dict[str, Array], int]":
        """Return the selected rows (rank, keys, score, prediction and why), and the size of the pool."""
        from neuboots.evaluation.active_learning import RowSelector, distance_features

        strategy, keys = STRATEGIES[name], dict[str, str]()
        diverse = self.diverse and self.k <= MAX_DIVERSE_ROWS
        selector = RowSelector(self.k, seed=self.seed, diverse=diverse)
        with progress_bar("scoring", None, enabled=not self.json and self.out != "-") as step:
            for batch in read_batches(model, self.pool, self.keep):
                columns = _score_columns(model.predict(batch, num_samples=self.num_samples), model.classes)
                for key in batch.keys:
                    keys.setdefault(key, unique_name(key, {*keys.values(), *columns, "rank", "score", "why"}))
                features = distance_features(model.inputs(batch)) if diverse else None
                copied = {keys[key]: values for key, values in batch.keys.items()}
                selector.add(columns[strategy.score].astype(np.float64), features, columns | copied)
                notes += [note for note in dict.fromkeys(batch.notes) if note not in notes]
                step(f"scored {selector.num_rows:,} rows")
        if self.k > selector.num_rows:
            notes.append(f"the pool has {selector.num_rows:,} rows, fewer than k={self.k:,}; all are selected")
        elif self.diverse and not diverse:
            notes.append(f"more than {MAX_DIVERSE_ROWS:,} rows are selected by score alone")
        _, scores, columns = selector.select()
        columns["score"] = scores.numpy()
        reasons = []
        for i in range(len(scores)):
            row = {column: values[i] for column, values in columns.items()}
            ood = name != "ood" and row["ood_score"] > 1
            reason = strategy.reason.format_map({**row, "top": _top_classes(row)})
            reasons.append(reason + ("; out of distribution" if ood else ""))
        shown = [column for column in (*keys.values(), "score", "prediction") if column in columns]
        ranks = {"rank": np.arange(1, len(scores) + 1)}
        selected = {**ranks, **{c: columns[c] for c in shown}, "why": np.array(reasons, dtype=object)}
        return selected, selector.num_rows

    def _strategy_name(self, model: "Model") -> str:
        task = model.card.task
        if self.strategy == "default":
            return DEFAULTS[task]
        supported = [name for name, strategy in STRATEGIES.items() if task in strategy.tasks]
        return check_choice("strategy", self.strategy, supported)

    def _check(self) -> None:
        for name, value, minimum in (("k", self.k, 1), ("num_samples", self.num_samples, 1), ("seed", self.seed, 0)):
            check_int(name, value, minimum=minimum)
        if self.out is not None:
            if self.json and self.out == "-":
                raise UsageError("--json needs a file as --out, since standard output has the rows")
            file_format(self.out, None)
            check_output_path(self.out, self.pool)
