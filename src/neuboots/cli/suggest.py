"""The command `neuboots next`: which rows of a pool to label next, and why.

    score × distance:   next row = argmax_x u(x) · min_{a chosen} ‖x − x_a‖,   u: the score, from 0 to 1 over candidates

Each row has a score; the 10 k best are candidates, and k of them are chosen one after the other, each far from those
before it, so that no two labels tell the same. Only candidates are held, whatever the size of the pool.

In trials on digits and breast cancer, margin with rows chosen apart did better than chance and no worse than the
highest margins alone; it is the default for classes. On three UCI tables no choice was better than chance for numbers:
the width of the confidence band is the default there because it shows what the model knows least. `random` is a fair
sample, to compare with.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, Literal

import numpy as np
import torch
from torch import Tensor

from neuboots.cli._console import (
    Console,
    ModelFolder,
    UsageError,
    check_int_option,
    collect_warnings,
    load_or_exit,
    print_json,
    read_batches,
    silence_stream,
    user_errors,
)
from neuboots.cli._writers import check_output_path, file_format, open_writer
from neuboots.training import progress_bar

if TYPE_CHECKING:
    from neuboots.app import Model, PredictionTable, RowBatch
    from neuboots.report.tables import Table

Column = np.ndarray[Any, Any]
Row = Mapping[str, Any]
StrategyName = Literal["default", "margin", "entropy", "mutual-information", "std", "band", "unusual", "random"]

TIMES = 10  # candidates for each row that is chosen
MOST = 5_000  # rows that are chosen apart from each other
WIDTH = 512  # numbers of a row that distances are of
CELLS = 8  # of an image's sides, whose mean pixels stand for it
FAR = 3.0  # standard deviations: what lies further out is no further from others
SHOWN = 20  # rows on a terminal
WORDS = ("rank", "why")  # columns beside the answers


def _shown(**options: Any) -> Any:
    """How an option is called on the command line, where there is tyro to read it."""
    try:
        from tyro.conf import arg
    except ImportError:
        return None
    return arg(**options)


@dataclass(frozen=True)
class AcquisitionStrategy:
    """How much a label of a row would tell: its score, the larger the more, and the reason in words."""

    meaning: str
    tasks: tuple[str, ...]
    score: "Callable[[PredictionTable], Column]"
    why: Callable[[Row], str]


def _margin(answers: "PredictionTable") -> Column:
    """1 − (p₁ − p₂), for an image the mean over its pixels."""
    assert answers.probs is not None, "classes have probabilities"
    first, *second = answers.probs.topk(min(2, answers.probs.shape[1]), 1).values.unbind(1)
    gap = first - (second[0] if second else 0)
    return np.asarray((1 - gap).double().flatten(1).mean(1) if gap.ndim > 1 else (1 - gap).double())


def _of(*names: str) -> "Callable[[PredictionTable], Column]":
    """The first of these columns that there is."""
    return lambda answers: next(answers.columns[name] for name in names if name in answers.columns).astype(np.float64)


def _two(row: Row) -> str:
    if "unsure_share" in row:
        return f"{row['unsure_share']:.0%} of its pixels are unsure"
    if "second" not in row:  # a model of a single class
        return str(row["prediction"])
    return f"{row['prediction']} {row['probability']:.0%} or {row['second']} {row['second_probability']:.0%}"


_CLASSES = ("classification", "segmentation")
STRATEGIES: dict[str, AcquisitionStrategy] = {
    "margin": AcquisitionStrategy("the two likeliest classes are nearly as likely", _CLASSES, _margin, _two),
    "entropy": AcquisitionStrategy(
        "the class is open",
        _CLASSES,
        _of("entropy", "mean_entropy"),
        lambda row: f"entropy {row['score']:.2f} nats; {_two(row)}",
    ),
    "mutual-information": AcquisitionStrategy(
        "the replicates disagree about the class",
        _CLASSES,
        _of("mutual_information", "mean_mutual_information"),
        lambda row: f"replicates disagree by {row['score']:.3f} nats; {_two(row)}",
    ),
    "std": AcquisitionStrategy(
        "the probability of its class varies over replicates",
        ("classification",),
        _of("std"),
        lambda row: f"{row['prediction']} {row['probability']:.0%} ± {row['std']:.0%}",
    ),
    "band": AcquisitionStrategy(
        "the confidence band of the function is wide",
        ("regression",),
        lambda answers: answers.columns["confidence_high"] - answers.columns["confidence_low"],
        lambda row: f"its mean is between {row['confidence_low']:.4g} and {row['confidence_high']:.4g}",
    ),
    "unusual": AcquisitionStrategy(
        "it is unlike the training rows",
        (*_CLASSES, "regression"),
        _of("ood_score"),
        lambda row: f"{row['score']:.2g} times as far out as 99 % of the rows it knows",
    ),
    "random": AcquisitionStrategy(
        "drawn by the seed",
        (*_CLASSES, "regression"),
        lambda answers: np.zeros(len(answers)),
        lambda row: "drawn at random",
    ),
}
DEFAULTS = {"classification": "margin", "segmentation": "margin", "regression": "band"}


@dataclass(frozen=True)
class Suggest:
    """Choose the rows of a pool that are worth labelling next.

    Rows are scored by what a label would tell the model, and chosen apart from each other, so that no two labels tell
    the same. The pool may be of any size; labels in it are not looked at. Strategies: margin (the two likeliest classes
    are nearly as likely; the default for classes), entropy (the class is open), mutual-information (replicates disagree
    about the class), std (the probability of its class varies over replicates), band (the confidence band is wide; the
    default for numbers, though no better than random on our sets), unusual (unlike the training rows), random (a fair
    sample).
    """

    model: ModelFolder
    """A folder that `neuboots fit` wrote."""
    pool: Annotated[str, _shown(metavar="POOL")]
    """Rows without labels: a table, or a folder of images; - for standard input."""
    k: Annotated[int, _shown(aliases=["-k"])] = 100
    """How many rows to choose."""
    out: str | None = None
    """Where to: a file that ends in .csv, .jsonl or .parquet, or - for standard output. Without it the terminal has the
    first rows."""
    strategy: StrategyName = "default"
    """What makes a row worth a label."""
    diverse: bool = True
    """Choose rows apart from each other, and no near-duplicates; --no-diverse takes the k highest scores."""
    keep: tuple[str, ...] = ()
    """Columns of a table to write beside the choice, such as an id; `--keep all` for every one."""
    num_samples: int = 100
    """Bootstrap replicates B behind each score."""
    seed: int = 0
    """Decides among rows of equal score."""
    json: bool = False
    """One JSON object on standard output, for machines; words go to standard error."""

    def run(self) -> None:
        """Score the pool, choose, and write or print what was chosen."""
        self._check()
        model = load_or_exit(self.model)
        name = self._strategy(model)
        words = Console(aside=self.json or self.out == "-")
        with user_errors(), collect_warnings() as warned:
            chosen = self._choose(model, name)
        for note in (notes := [*chosen.notes, *warned]):
            words.say(f"note: {note}")
        columns = chosen.table(STRATEGIES[name])
        count = len(columns["rank"])
        if self.out is not None:
            self._write(columns, self.out)
        if self.json:
            about = {"model": self.model, "pool": self.pool, "strategy": name, "diverse": self.diverse}
            counts = {"read": chosen.total, "chosen": count, "out": self.out, "notes": notes}
            print_json({**about, **counts, "rows": [dict(zip(columns, row, strict=True)) for row in _rows(columns)]})
            return
        said = f"{count:,} of {chosen.total:,} rows, by {name}: {STRATEGIES[name].meaning}"
        if self.out is None:
            words.show(_table(columns, f"{said}."))
        else:
            words.say(f"{said}; on {'standard output' if self.out == '-' else self.out}")

    def _write(self, columns: dict[str, Column], out: str) -> None:
        try:
            with user_errors(), open_writer(out, file_format(out, None)) as write:
                write(columns)
        except BrokenPipeError:
            if out != "-":
                raise UsageError(f"--out is {out}, which takes no more rows; give another place") from None
            silence_stream()

    def _choose(self, model: "Model", name: str) -> "Candidates":
        apart = self.diverse and name != "random" and self.k <= MOST
        held = Candidates(self.k, TIMES * self.k if apart else self.k, self.seed, apart=apart)
        if self.diverse and self.k > MOST:
            held.notes.append(f"rows are not chosen apart from each other, as they are more than {MOST:,}")
        with progress_bar("scoring", None, enabled=not self.json and self.out != "-") as advance:
            for chunk in read_batches(model, self.pool, self.keep):
                answers = model.predict(chunk, num_samples=self.num_samples)
                held.add(chunk, answers, STRATEGIES[name].score(answers), model.classes)
                advance(f"scored {held.total:,} rows")
        if self.k > held.total:
            held.notes.append(f"the pool has {held.total:,} rows, fewer than the {self.k:,} asked for: all are given")
        return held

    def _strategy(self, model: "Model") -> str:
        task = model.card.task
        if self.strategy == "default":
            return DEFAULTS[task]
        if task not in STRATEGIES[self.strategy].tasks:
            fit = ", ".join(name for name, strategy in STRATEGIES.items() if task in strategy.tasks)
            raise UsageError(f"--strategy is {self.strategy}, which is none for a {task}; give one of {fit}")
        return self.strategy

    def _check(self) -> None:
        for name, value, least in (("k", self.k, 1), ("num-samples", self.num_samples, 1), ("seed", self.seed, 0)):
            check_int_option(name, value, least)
        if self.out is not None:
            if self.json and self.out == "-":
                raise UsageError("--json needs --out to be a file, as standard output has the object; give one")
            file_format(self.out, None)
            check_output_path(self.out, self.pool)


class Candidates:
    """The rows of a stream with the highest scores, at most `most` of them, and what is needed to choose k of those."""

    def __init__(self, k: int, most: int, seed: int, *, apart: bool) -> None:
        self.k, self.most, self.seed, self.apart = k, most, seed, apart
        self.total, self.notes = 0, list[str]()
        self._held: dict[str, Column] = {}  # columns of one length
        self._places = torch.zeros(0, 0)  # (M, D)

    def add(self, chunk: "RowBatch", answers: "PredictionTable", scores: Column, classes: tuple[str, ...]) -> None:
        """Some more rows, with a score each: (N,)."""
        from neuboots.app import unique_name
        from neuboots.evaluation.active_learning import row_uniforms

        if not np.isfinite(scores).all():
            raise ValueError("the model gives scores that are no finite numbers; expected some: train it again")
        numbers = torch.arange(self.total, self.total + len(chunk))
        ties = row_uniforms(numbers, self.seed, "tie").numpy()
        said = {**answers.columns, **_runner_up(answers, classes), "score": scores, "": ties}
        keys: dict[str, Column] = {}
        for name, values in chunk.keys.items():
            keys[unique_name(name, {*keys, *said, *WORDS})] = values
        more = {**keys, **said}
        self.notes += [note for note in dict.fromkeys(chunk.notes) if note not in self.notes]
        kept = np.lexsort((ties, -scores))[: self.most]  # no more of these can stay
        more = {name: column[kept] for name, column in more.items()}
        places = distance_features(chunk.x)[torch.from_numpy(kept)] if self.apart else torch.zeros(len(kept), 0)
        if self.total:
            more = {name: np.concatenate([self._held[name], column]) for name, column in more.items()}
            places = torch.cat([self._places, places])
        order = np.lexsort((more[""], -more["score"]))[: self.most]
        self._held = {name: column[order] for name, column in more.items()}
        self._places, self.total = places[torch.from_numpy(order)], self.total + len(chunk)
        self._keys = tuple(keys)

    def table(self, strategy: AcquisitionStrategy) -> dict[str, Column]:
        """The chosen rows, the best first: rank, row or file, score, prediction, and why."""
        size = min(self.k, len(self._held["score"]))
        order = greedy_diverse_selection(self._held["score"], self._places, size) if self.apart else np.arange(size)
        rows = [{name: column[i] for name, column in self._held.items()} for i in order.tolist()]
        columns = {name: self._held[name][order] for name in (*self._keys, "score", "prediction") if name in self._held}
        why = [_why(strategy, row) for row in rows]
        return {"rank": np.arange(1, size + 1), **columns, "why": np.array(why, dtype=object)}


def greedy_diverse_selection(scores: Column, places: Tensor, k: int) -> Column:
    """k of the rows, one after the other: argmax of the score, from 0 to 1, times the distance to the nearest chosen.

    The first is that of the highest score, the first of equals.

    >>> greedy_diverse_selection(
    ...     np.array([1.0, 0.99, 0.5, 0.0]), torch.tensor([[0.0], [0.001], [2.0], [9.0]]), 2
    ... ).tolist()
    [0, 2]
    """
    weights = torch.from_numpy((scores - scores.min()) / max(float(np.ptp(scores)), 1e-300)) + 1e-9
    nearest = torch.full((len(scores),), float("inf"), dtype=torch.float64)
    left = weights.clone()
    chosen: list[int] = []
    for _ in range(k):
        chosen.append(int(left.argmax()))
        nearest = torch.minimum(nearest, (places - places[chosen[-1]]).norm(dim=1).double())
        left = weights * nearest
        left[chosen] = -1.0
    return np.array(chosen, dtype=np.int64)


def distance_features(x: Any) -> Tensor:
    """What the distances of rows are of: their inputs, of images the mean pixels of 8 × 8 cells: (N, at most 512)."""
    from neuboots.evaluation._batching import input_tensors

    parts = []
    for part in input_tensors(x):
        part = part.detach().float().cpu()
        if part.ndim == 4:
            part = torch.nn.functional.adaptive_avg_pool2d(part, CELLS)
        parts.append(part.flatten(1).clamp(-FAR, FAR))
    flat = torch.cat(parts, 1)
    if flat.shape[1] <= WIDTH:
        return flat
    folds = -(-flat.shape[1] // WIDTH)  # columns are added up in as many sums: copies stay copies
    padded = torch.nn.functional.pad(flat, (0, folds * WIDTH - flat.shape[1]))
    return padded.view(len(flat), folds, WIDTH).sum(1)


def _runner_up(answers: "PredictionTable", classes: tuple[str, ...]) -> dict[str, Column]:
    """The second likeliest class of each row, and its probability; nothing of images with masks."""
    if answers.probs is None or answers.probs.ndim != 2 or len(classes) < 2:
        return {}
    values, order = answers.probs.topk(2, 1)
    names = np.array(classes, dtype=object)
    return {"second": names[order[:, 1].cpu().numpy()], "second_probability": np.asarray(values[:, 1].double().cpu())}


def _why(strategy: AcquisitionStrategy, row: Row) -> str:
    unusual = strategy is not STRATEGIES["unusual"] and row["ood_score"] > 1
    return strategy.why(row) + ("; unlike the training rows" if unusual else "")


def _rows(columns: dict[str, Column]) -> Iterator[tuple[Any, ...]]:
    return zip(*(column.tolist() for column in columns.values()), strict=True)


def _table(columns: dict[str, Column], title: str) -> "Table":
    """The first rows, for a terminal."""
    from neuboots.report.tables import Cell, Table

    def cell(value: Any) -> Cell:
        number = isinstance(value, int | float)
        return Cell(f"{value:.4g}" if isinstance(value, float) else str(value), value if number else None)

    rows = list(_rows(columns))
    cells = tuple(tuple(map(cell, row)) for row in rows[:SHOWN])
    more = f"… and {len(rows) - SHOWN:,} more: --out FILE has all of them." if len(rows) > SHOWN else ""
    return Table(title, tuple(columns), cells, note=more, num_keys=len(columns))
