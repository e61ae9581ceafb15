"""ODIN, and the paper's detector of replicate statistics.

ODIN is a softmax at a high temperature, at an input that was moved a small step towards more confidence:

    S(x; T) = max_c 1/B Σ_b softmax(f_b(x) / T)_c,   x̃ = x + ε sign ∇_x log S(x; T),   s = −S(x̃; T)

For a single net this is the formula of Liang et al.; with replicates it uses their mean probability, for one ε-step
that they share. The paper's detector is a logistic regression on four statistics of the replicates (section 4.3, table
4.1):

    log P(out) / P(in) = w · (max_c p_c, mean_c std_b f_b,c, 1/B Σ_b H(p_b), H(p)) + w₀,   p = 1/B Σ_b p_b

"+ Calibration" computes the statistics at ODIN's x̃. The "predictive mean" is that of the probabilities, as in the
authors' code. Neither text nor code states the following: the standard deviation of a logit vector is the mean of those
of its C logits, and the statistics are taken at T = 1; the T = 1000 of their code is that of the gradient. All
replicates share the step of their mean probability, where their code takes one for each, at B times the passes.

Liang, Li and Srikant, Enhancing the reliability of out-of-distribution image detection in neural networks, ICLR 2018;
the grid, and its selection by TNR at 95 % TPR on validation data, as in Lee, Lee, Lee and Shin, NeurIPS 2018; Shin,
Cho, Min and Lim, Neural Bootstrapper, NeurIPS 2021.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import groupby
from operator import itemgetter
from typing import Any, Self

import torch
from torch import Tensor

from neuboots.evaluation._batching import mean_per_input
from neuboots.evaluation.ood.detector import (
    Detector,
    LogisticDetector,
    _input_gradients,
    _make_leaves,
    _perturb,
    _replace_float_tensors,
    _select_best_candidate,
    _to_double,
)
from neuboots.head import check_inputs
from neuboots.prediction import (
    Predictor,
    Summary,
    check_summarized,
    class_logits,
    class_probabilities,
    summarize_stream,
)

TEMPERATURES = (1.0, 10.0, 100.0, 1000.0)
EPSILONS = (0.0, 0.0005, 0.001, 0.0014, 0.002, 0.0024, 0.005, 0.01, 0.05, 0.1, 0.2)
STATISTICS = ("max probability", "std of logits", "expected entropy", "predictive entropy")

_MIN_CHUNK = 5  # replicates whose passes are stored for one backward pass: memory does not grow with B
_MAX_CHUNK_BYTES = 1 << 26  # of replicates, if all of them come from one pass


def confidence_direction(
    predictor: Predictor, x: Any, *, temperature: float, num_samples: int, seed: int
) -> list[Tensor]:
    """Return sign ∇_x log S(x; T) for each floating-point tensor of the inputs.

    Args:
        predictor: Predictor of class logits.
        x: A batch of inputs.
        temperature: T.
        num_samples: Number of replicates B.
        seed: Seed of the replicates.

    Returns:
        The signs, 0 where the gradient is 0.

    Raises:
        ArgumentError: If no input is floating-point, or the outputs have no gradient in the inputs.

    Example:
        >>> from neuboots.methods.deterministic import DeterministicPredictor
        >>> predictor = DeterministicPredictor(torch.nn.Identity())  # the inputs are the logits
        >>> confidence_direction(predictor, torch.tensor([[2.0, 1.0]]), temperature=1.0, num_samples=1, seed=0)
        [tensor([[ 1., -1.]])]
    """
    check_inputs(x)
    check_summarized(num_samples)
    with torch.inference_mode(False), torch.enable_grad():
        leaves = _make_leaves(x)
        stream = predictor.copy_for_thread().stream(_replace_float_tensors(x, leaves), num_samples, seed=seed)
        tempered = partial(_tempered_probs, temperature=temperature, independent=predictor.independent)
        # Methods with exact moments compute all replicates from one pass, which one backward pass covers; other methods
        # may store a pass for each replicate.
        fitting = _MIN_CHUNK if stream.moments is None else _MAX_CHUNK_BYTES // stream.replicate_bytes
        size = min(num_samples, max(_MIN_CHUNK, fitting))
        with torch.no_grad():
            sums = [tempered(chunk).sum(0) for chunk in stream.chunks(size)]
            probs = torch.stack(sums).sum(0) / num_samples  # (N, C, *)
            labels = probs.argmax(1, keepdim=True)  # (N, 1, *)
            total_prob = num_samples * probs.gather(1, labels)
        total = [torch.zeros_like(leaf) for leaf in leaves]
        for chunk in stream.chunks(size):
            p = tempered(chunk)  # (b, N, C, *)
            fractions = p.gather(2, labels.expand(len(p), *labels.shape)) / total_prob
            total = [a + b for a, b in zip(total, _input_gradients([fractions.sum()], leaves)[0], strict=True)]
        return [slope.sign() for slope in total]


def _tempered_probs(chunk: Tensor, *, temperature: float, independent: bool) -> Tensor:
    """In double precision: a confidence of 1 − 10⁻¹⁰ still has a gradient."""
    return class_probabilities(class_logits(_to_double(chunk) / temperature, 2, independent=independent), 2)


def _move_inputs(predictor: Predictor, x: Any, epsilons: Sequence[float], **options: Any) -> Iterator[Any]:
    """x̃ for each ε, with one gradient for all of them."""
    directions = confidence_direction(predictor, x, **options) if any(epsilons) else []
    return (_perturb(x, directions, epsilon) if epsilon else x for epsilon in epsilons)


def _summarize_tempered(predictor: Predictor, x: Any, *, temperature: float, num_samples: int, seed: int) -> Summary:
    """Summary of f_b(x) / T, in memory that does not grow with B.

    In double precision: at T = 1000 all probabilities are close to 1/C, and differ in digits that others lack.
    """
    if temperature == 1:
        return predictor.summarize(x, num_samples, seed=seed)
    check_inputs(x)
    with torch.no_grad():
        stream = predictor.copy_for_thread().stream(x, num_samples, seed=seed)

        def chunks(size: int) -> Iterator[Tensor]:
            return (_to_double(chunk) / temperature for chunk in stream.chunks(size))

        return summarize_stream(replace(stream, chunks=chunks, moments=None, independent=predictor.independent))


# -- detectors -----------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False, kw_only=True)
class Odin(Detector):
    """ODIN, s = −S(x̃; T). `fit` selects T and ε on validation data; the defaults are those of the authors' code.

    Args:
        temperature: T.
        epsilon: ε, in the units of the inputs: if images were divided by a standard deviation σ, the paper's ε / σ.
        temperatures: Candidates of T.
        epsilons: Candidates of ε.

    Example:
        >>> from neuboots.methods.deterministic import DeterministicPredictor
        >>> id_data, ood_data = 3 * torch.eye(4), torch.zeros(4, 4)
        >>> detector = Odin(DeterministicPredictor(torch.nn.Identity()))
        >>> detector = detector.fit(id_data[:2], ood_data[:2] + 0.1, progress=False)
        >>> detector.temperature, detector.epsilon  # the first of many that separate them
        (1.0, 0.0)
        >>> float(detector.evaluate(id_data[2:], ood_data[2:], progress=False).auroc)
        1.0
    """

    temperature: float = 1000.0
    epsilon: float = 0.0014
    temperatures: tuple[float, ...] = TEMPERATURES
    epsilons: tuple[float, ...] = EPSILONS

    def scores(self, x: Any) -> Tensor:
        """Return the scores of one batch of inputs: (N,)."""
        return self._statistics(x, ((self.temperature, self.epsilon),))[0, :, 0]

    @property
    def _candidates(self) -> tuple[Any, ...]:
        return tuple((temperature, epsilon) for temperature in self.temperatures for epsilon in self.epsilons)

    def _statistics(self, x: Any, candidates: tuple[Any, ...]) -> Tensor:
        scores = []
        for temperature, group in groupby(candidates, key=itemgetter(0)):
            options: dict[str, Any] = {"num_samples": self.num_samples, "seed": self.seed, "temperature": temperature}
            for moved in _move_inputs(self.predictor, x, [epsilon for _, epsilon in group], **options):
                scores.append(mean_per_input(-_summarize_tempered(self.predictor, moved, **options).confidence))
        return torch.stack(scores)[..., None]  # (G, N, 1)

    def _select(self, id_statistics: Tensor, ood_statistics: Tensor) -> Self:
        best = _select_best_candidate(id_statistics[..., 0], ood_statistics[..., 0])
        temperature, epsilon = self._candidates[best]
        return replace(self, temperature=temperature, epsilon=epsilon)


@dataclass(frozen=True, eq=False, kw_only=True)
class ReplicateDetector(LogisticDetector):
    """The paper's detector: log-odds of being out of distribution, from four statistics of the replicates.

    Args:
        preprocess: Whether to move inputs as ODIN does ("+ Calibration").
        temperature: T of the gradient.
        epsilons: Candidates of ε, in the units of the inputs. `fit` selects the one whose regression, fitted on half of
            the validation data, has the largest TNR at 95 % TPR on the other half.

    Example:
        >>> from neuboots.methods.deterministic import DeterministicPredictor
        >>> id_data, ood_data = 3 * torch.eye(8), torch.zeros(8, 8)
        >>> detector = ReplicateDetector(DeterministicPredictor(torch.nn.Identity()))
        >>> detector = detector.fit(id_data[:4], ood_data[:4] + 0.1, progress=False)
        >>> float(detector.evaluate(id_data[4:], ood_data[4:], progress=False).auroc)
        1.0
    """

    preprocess: bool = False
    temperature: float = 1000.0
    epsilons: tuple[float, ...] = EPSILONS

    def statistics(self, x: Any) -> Tensor:
        """Return the four statistics, in the order of STATISTICS, in double precision: (N, 4)."""
        summary = self._summarize(x)
        values = (summary.confidence, summary.std.mean(1), summary.expected_entropy, summary.entropy)
        return torch.stack([mean_per_input(_to_double(value)) for value in values], 1)

    @property
    def _candidates(self) -> tuple[Any, ...]:
        return self.epsilons if self.preprocess else (0.0,)

    def _statistics(self, x: Any, candidates: tuple[Any, ...]) -> Tensor:
        options: dict[str, Any] = {"num_samples": self.num_samples, "seed": self.seed, "temperature": self.temperature}
        moved = _move_inputs(self.predictor, x, candidates, **options)
        return torch.stack([self.statistics(inputs) for inputs in moved])  # (G, N, 4)
