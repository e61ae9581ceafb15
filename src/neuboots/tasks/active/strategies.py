"""How much a label would tell, row by row.

    score(x) = H(p̄)                          entropy
             = −(p̄₍₁₎ − p̄₍₂₎)                margin: the two likeliest classes
             = H(p̄) − 1/B Σ_b H(p_b)         bald: what the replicates disagree about
             = Σ_c std_b p_bc                std; for regression the standard deviation of the outputs

with p_b = softmax f_b(x) and p̄ their mean. The paper's released code ranks by `std`. These look at one row at a time,
so that the k best may be k copies of one row; `batch` looks at the rows together.

Houlsby, Huszár, Ghahramani and Lengyel, Bayesian active learning for classification and preference learning,
arXiv:1112.5745, 2011 (bald); Gal, Islam and Ghahramani, Deep Bayesian active learning with image data, ICML 2017.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn

from neuboots.prediction import Moments, Prediction, Predictor, Stream, Summary, class_probabilities
from neuboots.tasks.inputs import per_input

Score = Callable[[Summary], Tensor]  # figures of N rows → (N,), the largest to be labelled first
Kind = Literal["classes", "regression", "gaussian"]  # gaussian: the outputs are k means, then k values of log σ²


_ROUNDING = 16  # machine epsilons; the std of 5,000 equal numbers comes to 4.5


def same(figures: Summary) -> Tensor:
    """All rows alike: the seed decides, as it does in every tie."""
    return figures.mean.new_zeros(len(figures.mean))


def _entropy(figures: Summary) -> Tensor:
    return per_input(figures.entropy)


def _margin(figures: Summary) -> Tensor:
    first, second = figures.probs.topk(2, 1).values.unbind(1)
    return per_input(second - first)


def _bald(figures: Summary) -> Tensor:
    return per_input(figures.mutual_information)


def _spread(figures: Summary | Prediction) -> Tensor:
    """std over replicates, and 0 where it is the rounding of a mean of equal numbers: (N, C, *)."""
    mean, std = figures.mean, figures.std
    eps = min(torch.finfo(std.dtype).eps, torch.finfo(torch.float32).eps)  # half precision is summed in float32
    return std.masked_fill(std <= _ROUNDING * eps * mean.abs(), 0.0)  # NaN stays NaN


def _std(figures: Summary) -> Tensor:
    return per_input(_spread(figures).sum(1))


def variance(figures: Summary | Prediction) -> Tensor:
    return _spread(figures).square().flatten(1).sum(1)


STRATEGIES: dict[str, Score] = {
    "random": same,
    "entropy": _entropy,
    "margin": _margin,
    "bald": _bald,
    "std": _std,
    "batch": variance,  # of a row by itself; the rows are then chosen together
}
OF_SPREAD = ("std", "batch")  # figures of the class probabilities, where the others are of the outputs
_OF_CLASSES = ("entropy", "margin", "bald")


def check_strategy(strategy: str | Score, kind: Kind) -> str:
    """The strategy's name, or a sentence."""
    if kind not in get_args(Kind):
        raise ValueError(f"got kind={kind!r}; expected one of {', '.join(get_args(Kind))}")
    if callable(strategy):
        return str(getattr(strategy, "__qualname__", type(strategy).__qualname__))
    if not isinstance(strategy, str) or strategy not in STRATEGIES:
        raise ValueError(
            f"got strategy={strategy!r}; expected one of {', '.join(STRATEGIES)}, or a function of a Summary that "
            "gives a score for each row"
        )
    if kind != "classes" and strategy in _OF_CLASSES:
        raise ValueError(
            f"got strategy={strategy!r} for a regression, which has no classes; expected 'std', 'batch' or 'random'"
        )
    return strategy


@dataclass(frozen=True)
class Compared(Predictor):
    """Another predictor, giving what its rows are compared by: class probabilities, or the regression function."""

    inner: Predictor
    kind: Kind

    @property
    def net(self) -> nn.Module | None:
        return self.inner.net

    def _of(self, chunk: Tensor) -> Tensor:
        if self.kind == "classes":
            return class_probabilities(chunk, 2)
        if self.kind == "regression":
            return chunk
        if chunk.shape[2] % 2:
            raise ValueError(
                f"got {chunk.shape[2]} outputs for kind='gaussian'; expected k means, then k values of log σ²"
            )
        return chunk[:, :, : chunk.shape[2] // 2]

    def stream(self, x: Any, num_samples: int, *, seed: int) -> Stream:
        inner = self.inner.stream(x, num_samples, seed=seed)

        def chunks(size: int) -> Iterator[Tensor]:
            return map(self._of, inner.chunks(size))

        moments = None  # exact ones are of the outputs, not of the probabilities
        if inner.moments is not None and self.kind != "classes":
            mean, std = (self._of(part[None])[0] for part in (inner.moments.mean, inner.moments.std))
            moments = Moments(mean, std)
        return Stream(num_samples, inner.replicate_bytes, chunks, moments)

    def config(self) -> dict[str, Any]:
        return self.inner.config()
