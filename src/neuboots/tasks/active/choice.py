"""One step of active learning: the k rows of a pool to label next, with their scores."""

from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset, SequentialSampler

from neuboots.keys import whole
from neuboots.prediction import Predictor
from neuboots.tasks.active.strategies import OF_SPREAD, STRATEGIES, Compared, Kind, Score, check_strategy, same
from neuboots.tasks.active.together import check_numbers, check_pool, chosen_together, drawn
from neuboots.tasks.common import check_predictor, table
from neuboots.tasks.inputs import Inputs, input_batches, rows_in

_SHOWN = 10  # rows of a choice that are printed


@dataclass(frozen=True, eq=False)
class Choice:
    """What `next_to_label` chose: row numbers, the best first, and their scores (larger is better)."""

    rows: Tensor  # (k,)
    scores: Tensor  # (k,); for batch the variance that was left when the row was chosen
    strategy: str
    pool_size: int
    num_samples: int
    seed: int

    def __str__(self) -> str:
        header = (
            f"{len(self.rows)} of {self.pool_size:,} rows by {self.strategy}, B = {self.num_samples}, seed {self.seed}"
        )
        shown = [
            {"rank": rank, "row": row, "score": score}
            for rank, (row, score) in enumerate(zip(self.rows.tolist(), self.scores.tolist(), strict=True), 1)
        ]
        rest = len(shown) - _SHOWN
        more = f"\n… and {rest} more" if rest > 0 else ""
        return f"{header}\n{table(shown[:_SHOWN])}{more}"


def next_to_label(
    predictor: Predictor,
    pool: Inputs,
    k: int,
    *,
    strategy: str | Score = "entropy",
    kind: Kind = "classes",
    num_samples: int = 100,
    seed: int = 0,
    shortlist: int | None = None,
    batch_size: int = 256,
    progress: bool = True,
) -> Choice:
    """The k rows of the pool to label next, best first, with their scores.

    The pool is a tensor of inputs (a dict or tuple of them for a net of several), a data set, or a loader; labels are
    passed over. Rows are numbered in the order in which the pool gives them, and a DataLoader must give them in that
    of its data set. A strategy is one of `STRATEGIES`, or a
    function of a Summary that gives N scores. `kind` says what the outputs are; of a regression the spread of the
    function itself counts. Equal scores are put in order by the seed.

    `batch` reads the pool once and holds at most `shortlist` rows of it (max(1000, 4k)): of each so many, the k best
    stay.

    >>> from neuboots import PlainPredictor
    >>> net = torch.nn.Linear(1, 1)  # one logit, x itself
    >>> _ = net.load_state_dict({"weight": torch.ones(1, 1), "bias": torch.zeros(1)})
    >>> pool = torch.tensor([[-3.0], [0.1], [2.0], [-0.5]])
    >>> choice = next_to_label(PlainPredictor(net), pool, 2, num_samples=1, progress=False)
    >>> print(choice)
    2 of 4 rows by entropy, B = 1, seed 0
    rank  row   score
       1    1  0.6919
       2    3  0.6628
    """
    check_predictor(predictor)
    name = check_strategy(strategy, kind)
    _check_order(pool)
    k, num_samples = whole("k", k, least=1), whole("num_samples", num_samples, least=1)
    seed = whole("seed", seed)
    size = max(1000, 4 * k) if shortlist is None else whole("shortlist", shortlist)
    if strategy == "batch" and size < 2 * k:
        raise ValueError(
            f"got shortlist={size} for k={k}; expected at least {2 * k}, twice as many as are to be chosen"
        )
    if predictor.num_distinct is not None:
        num_samples = min(num_samples, predictor.num_distinct)  # each member once
    batches = input_batches(pool, batch_size, title="scoring the pool", progress=progress)
    with closing(batches) as inputs:  # a traceback would keep it open, and its bar on the screen
        if strategy == "batch":
            view = Compared(predictor, kind)
            rows, scores, total = chosen_together(view, inputs, k, num_samples, seed, size, progress=progress)
        else:
            every = _scores(predictor, inputs, strategy, kind, num_samples, seed)  # (N,)
            total = len(every)
            check_pool(k, total)
            rows = _best(every, seed)[:k]
            scores = every[rows]
    return Choice(rows, scores, name, total, num_samples, seed)


def _check_order(pool: Inputs) -> None:
    """Refuse a DataLoader whose k-th row is not the k-th of its data set."""
    if not isinstance(pool, DataLoader) or isinstance(pool.dataset, IterableDataset):
        return
    order = pool.sampler if pool.batch_sampler is None else getattr(pool.batch_sampler, "sampler", pool.batch_sampler)
    if not isinstance(order, SequentialSampler):
        raise ValueError(
            f"got a loader that shuffles, by a {type(order).__name__}; expected rows in their order: make it with "
            "shuffle=False, or give its data set"
        )


def _scores(
    predictor: Predictor, inputs: Iterator[Any], strategy: str | Score, kind: Kind, num_samples: int, seed: int
) -> Tensor:
    """The score of every row of the pool: (N,)."""
    score = strategy if callable(strategy) else STRATEGIES[strategy]
    view = Compared(predictor, kind) if strategy in OF_SPREAD else predictor
    parts = [torch.zeros(0, dtype=torch.float64)]
    for x in inputs:
        size = rows_in(x)
        if score is same:  # no need to ask the predictor
            parts.append(torch.zeros(size, dtype=torch.float64))
            continue
        figures = view.summarize(x, num_samples, seed=seed)
        check_numbers(figures.mean)
        part = torch.as_tensor(score(figures)).detach()
        if part.shape != (size,):
            raise ValueError(
                f"the strategy gave scores of shape {tuple(part.shape)}; expected ({size},), one for each row"
            )
        if bool(part.isnan().any()):
            raise ValueError(f"the strategy gave NaN for {int(part.isnan().sum())} of {size} rows; expected numbers")
        parts.append(part.double().cpu())
    return torch.cat(parts)


def _best(scores: Tensor, seed: int) -> Tensor:
    """Row numbers, the largest score first; the seed decides among equals: (N,)."""
    anyhow = drawn(torch.arange(len(scores)), seed, "tie").argsort()
    return anyhow[scores[anyhow].argsort(descending=True, stable=True)]
