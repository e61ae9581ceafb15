"""ODIN: a hot softmax at an input that was moved a little towards more confidence.

    S(x; T) = max_c 1/B Σ_b softmax(f_b(x) / T)_c,   x̃ = x + ε sign ∇_x log S(x; T),   s = −S(x̃; T)

Confidence rises faster around inputs in distribution, so that x̃ tells the two kinds apart better than x. For a single
net this is the paper's formula; with replicates it is that of their mean probability, for one ε-step that they share.

Liang, Li and Srikant, Enhancing the reliability of out-of-distribution image detection in neural networks, ICLR 2018;
the grid, and its choice by TNR at 95 % TPR on a validation part, as in Lee, Lee, Lee and Shin, NeurIPS 2018.

The paper's detector: logistic regression on four statistics of the replicates (section 4.3, table 4.1).

    log P(out) / P(in) = w · (max_c p_c, mean_c std_b f_b,c, 1/B Σ_b H(p_b), H(p)) + w₀,   p = 1/B Σ_b p_b

It is trained on a validation part of inputs in and out of distribution. "+ Calibration" takes the statistics at ODIN's
x̃ = x + ε sign ∇_x log S(x; T), with ε chosen on the same part.

Shin, Cho, Min and Lim, Neural Bootstrapper, NeurIPS 2021. The "predictive mean" is that of the probabilities, as in the
authors' code. Decided here, since neither text nor code says it: the standard deviation of a logit vector is the mean
of those of its C logits, and the statistics are taken at T = 1; their code's T = 1000 is that of the gradient. All
replicates share the step of their mean probability, where their code takes one for each, at B times the passes.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, Self

import torch
from torch import Tensor

from neuboots._streaming import class_probabilities
from neuboots.evaluation._batching import InputData, LabeledData, mean_per_input
from neuboots.evaluation.ood.detector import (
    Detector,
    LogisticRule,
    check_epsilons,
    check_temperature,
    select_best_candidate,
    select_logistic_rule,
    to_double,
)
from neuboots.prediction import Predictor, SampleStream, Summary, check_inputs, summarize_stream

TEMPERATURES = (1.0, 10.0, 100.0, 1000.0)
EPSILONS = (0.0, 0.0005, 0.001, 0.0014, 0.002, 0.0024, 0.005, 0.01, 0.05, 0.1, 0.2)

_PASSES = 5  # replicates whose passes are kept for one backward pass: memory does not grow with B
_LARGE = 1 << 26  # bytes of replicates kept, where all of them come from one pass


def float_tensors(x: Any) -> list[Tensor]:
    """The floating-point tensors among the inputs, which can be moved a little."""
    parts = [x] if isinstance(x, Tensor) else x.values() if isinstance(x, Mapping) else x
    return [part for part in parts if part.is_floating_point()]


def replace_float_tensors(x: Any, others: list[Tensor]) -> Any:
    """The inputs with others in the place of their floating-point tensors."""
    rest = iter(others)

    def swapped(part: Tensor) -> Tensor:
        return next(rest) if part.is_floating_point() else part

    if isinstance(x, Tensor):
        return swapped(x)
    if isinstance(x, Mapping):
        return {key: swapped(part) for key, part in x.items()}
    return tuple(swapped(part) for part in x)


def make_leaves(x: Any) -> list[Tensor]:
    """Copies of the floating-point inputs that gather gradients, or a sentence."""
    leaves = [part.detach().clone().requires_grad_() for part in float_tensors(x)]
    if not leaves:
        raise ValueError(
            "got inputs of whole numbers, which cannot be moved by a small ε; expected floating-point inputs: take a "
            "detector without input preprocessing, or ε = 0"
        )
    return leaves


def input_gradients(objectives: list[Tensor], leaves: list[Tensor]) -> list[list[Tensor]]:
    """∇ of each objective at each leaf, zero where it does not depend on it, or a sentence where none depends on any.

    What they were computed from is kept for others.
    """
    found: list[tuple[Tensor | None, ...]] = []
    for objective in objectives:
        slopes: tuple[Tensor | None, ...] = (None,) * len(leaves)
        if objective.requires_grad:
            slopes = torch.autograd.grad(objective, leaves, retain_graph=True, allow_unused=True)
        found.append(slopes)
    if all(slope is None for slopes in found for slope in slopes):
        raise ValueError(
            "the outputs have no gradient in the inputs, so these cannot be moved by a small ε; expected a predictor "
            "that can be differentiated in x: take a detector without input preprocessing, or ε = 0"
        )
    return [
        [torch.zeros_like(leaf) if slope is None else slope for slope, leaf in zip(slopes, leaves, strict=True)]
        for slopes in found
    ]


def perturb(x: Any, directions: list[Tensor], epsilon: float) -> Any:
    """x + ε · direction."""
    pairs = zip(float_tensors(x), directions, strict=True)
    return replace_float_tensors(x, [part + epsilon * direction.to(part) for part, direction in pairs])


def confidence_direction(
    predictor: Predictor, x: Any, *, temperature: float, num_samples: int, seed: int
) -> list[Tensor]:
    """sign ∇_x log S(x; T), for each floating-point tensor of the inputs; 0 where the gradient is.

    >>> from neuboots import DeterministicPredictor
    >>> predictor = DeterministicPredictor(torch.nn.Identity())  # the inputs are the logits
    >>> confidence_direction(predictor, torch.tensor([[2.0, 1.0]]), temperature=1.0, num_samples=1, seed=0)
    [tensor([[ 1., -1.]])]
    """
    check_inputs(x)
    with torch.inference_mode(False), torch.enable_grad():
        leaves = make_leaves(x)
        stream = predictor.stream(replace_float_tensors(x, leaves), num_samples, seed=seed)
        size = _chunk(stream)
        with torch.no_grad():
            sums = [_probabilities(chunk, temperature).sum(0) for chunk in stream.chunks(size)]
            probs = torch.stack(sums).sum(0) / num_samples  # (N, C, *)
            labels = probs.argmax(1, keepdim=True)  # (N, 1, *)
            likeliest = num_samples * probs.gather(1, labels)
        total = [torch.zeros_like(leaf) for leaf in leaves]
        for chunk in stream.chunks(size):
            p = _probabilities(chunk, temperature)  # (b, N, C, *)
            ours = p.gather(2, labels.expand(len(p), *labels.shape)) / likeliest
            total = [a + b for a, b in zip(total, input_gradients([ours.sum()], leaves)[0], strict=True)]
        return [slope.sign() for slope in total]


def _probabilities(chunk: Tensor, temperature: float) -> Tensor:
    """In double precision: a confidence of 1 − 10⁻¹⁰ still has a slope."""
    return class_probabilities(to_double(chunk) / temperature, 2)


def _chunk(stream: SampleStream) -> int:
    """How many replicates are differentiated at once. Methods that know their exact mean make all of one pass, which
    one backward pass answers; of others each replicate may keep a pass of its own."""
    size = _PASSES if stream.moments is None else max(_PASSES, _LARGE // stream.replicate_bytes)
    return min(size, stream.num_samples)


def summarize_tempered(predictor: Predictor, x: Any, *, temperature: float, num_samples: int, seed: int) -> Summary:
    """The figures of f_b(x) / T, in memory that does not grow with B.

    In double precision: at T = 1000 all probabilities are close to 1/C, and inputs differ in digits that others lack.
    """
    if temperature == 1:
        return predictor.summarize(x, num_samples, seed=seed)
    check_inputs(x)
    with torch.no_grad():
        stream = predictor.stream(x, num_samples, seed=seed)

        def chunks(size: int) -> Iterator[Tensor]:
            return (to_double(chunk) / temperature for chunk in stream.chunks(size))

        return summarize_stream(replace(stream, chunks=chunks, moments=None))


@dataclass(frozen=True, eq=False, kw_only=True)
class Odin(Detector):
    """s = −S(x̃; T). `fit` chooses T and ε from the grid; without, they are those of the authors' released code.

    ε is in the units of the inputs: where images were divided by a standard deviation σ, it is the paper's over σ.

    >>> from neuboots import DeterministicPredictor
    >>> inside, outside = 3 * torch.eye(4), torch.zeros(4, 4)
    >>> detector = Odin(DeterministicPredictor(torch.nn.Identity())).fit(inside[:2], outside[:2] + 0.1, progress=False)
    >>> detector.temperature, detector.epsilon  # the first of many that part them
    (1.0, 0.0)
    >>> float(detector.evaluate(inside[2:], outside[2:], progress=False).auroc)
    1.0
    """

    temperature: float = 1000.0
    epsilon: float = 0.0014
    temperatures: tuple[float, ...] = TEMPERATURES
    epsilons: tuple[float, ...] = EPSILONS

    def __post_init__(self) -> None:
        super().__post_init__()
        check_epsilons((self.epsilon,))
        check_epsilons(self.epsilons)
        if not isinstance(self.temperatures, tuple | list) or not self.temperatures:
            raise ValueError(f"got temperatures={self.temperatures!r}; expected a tuple of positive numbers")
        for temperature in (self.temperature, *self.temperatures):
            check_temperature(temperature)

    def scores(self, x: Any) -> Tensor:
        return self._scores_at(x, self.temperature, (self.epsilon,))[0]

    def fit(
        self,
        id_data: InputData | None = None,
        ood_data: InputData | None = None,
        *,
        train_data: LabeledData | None = None,
        batch_size: int = 256,
        progress: bool = True,
    ) -> Self:
        """T and ε of the largest TNR at 95 % TPR on a validation part of both kinds."""
        grid = [(temperature, epsilon) for temperature in self.temperatures for epsilon in self.epsilons]

        def measure(x: Any) -> Tensor:
            scores = [self._scores_at(x, temperature, self.epsilons) for temperature in self.temperatures]
            return torch.cat(scores)[..., None]  # (G, N, 1)

        ours, theirs, names = self._measured(id_data, ood_data, measure, batch_size, progress)
        temperature, epsilon = grid[select_best_candidate(ours[..., 0], theirs[..., 0])]
        return replace(self, temperature=temperature, epsilon=epsilon, fitted_on=names)

    def _scores_at(self, x: Any, temperature: float, epsilons: tuple[float, ...]) -> Tensor:
        """With one gradient for all ε: (len(epsilons), N)."""
        options: dict[str, Any] = {
            "temperature": temperature,
            "num_samples": self.num_samples,
            "seed": self.seed,
        }
        directions = confidence_direction(self.predictor, x, **options) if any(epsilons) else []
        found = []
        for epsilon in epsilons:
            at = perturb(x, directions, epsilon) if epsilon else x
            found.append(mean_per_input(-summarize_tempered(self.predictor, at, **options).confidence))
        return torch.stack(found)


STATISTICS = ("max probability", "std of logits", "expected entropy", "predictive entropy")


@dataclass(frozen=True, eq=False, kw_only=True)
class ReplicateDetector(Detector):
    """s = the log-odds of being out of distribution, from four statistics. `preprocess=True` is "+ Calibration".

    >>> from neuboots import DeterministicPredictor
    >>> inside, outside = 3 * torch.eye(8), torch.zeros(8, 8)
    >>> detector = ReplicateDetector(DeterministicPredictor(torch.nn.Identity()))
    >>> detector = detector.fit(inside[:4], outside[:4] + 0.1, progress=False)
    >>> float(detector.evaluate(inside[4:], outside[4:], progress=False).auroc)
    1.0
    """

    preprocess: bool = False
    temperature: float = 1000.0  # of the gradient
    epsilons: tuple[float, ...] = EPSILONS  # to choose from
    epsilon: float = 0.0  # the one chosen
    rule: LogisticRule | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        check_temperature(self.temperature)
        check_epsilons(self.epsilons)
        check_epsilons((self.epsilon,))

    def scores(self, x: Any) -> Tensor:
        if self.rule is None:
            raise ValueError("the detector is not fitted; expected detector.fit(inside, outside) first")
        return self.rule(self._statistics_at(x, (self.epsilon,))[0])

    def statistics(self, x: Any) -> Tensor:
        """The four, in the order of STATISTICS, in double precision: (N, 4)."""
        found = self._summary(x)
        figures = (found.confidence, found.std.mean(1), found.expected_entropy, found.entropy)
        return torch.stack([mean_per_input(to_double(figure)) for figure in figures], 1)

    def fit(
        self,
        id_data: InputData | None = None,
        ood_data: InputData | None = None,
        *,
        train_data: LabeledData | None = None,
        batch_size: int = 256,
        progress: bool = True,
    ) -> Self:
        """The regression on a validation part of both kinds. With `preprocess`, ε is the one whose regression, fitted
        on half of it, has the largest TNR at 95 % TPR on the other half."""
        epsilons = self.epsilons if self.preprocess else (0.0,)

        def measure(x: Any) -> Tensor:
            return self._statistics_at(x, epsilons)

        ours, theirs, names = self._measured(id_data, ood_data, measure, batch_size, progress)
        best, rule = select_logistic_rule(ours, theirs, seed=self.seed)
        return replace(self, epsilon=epsilons[best], rule=rule, fitted_on=names)

    def _statistics_at(self, x: Any, epsilons: tuple[float, ...]) -> Tensor:
        """With one gradient for all ε: (len(epsilons), N, 4)."""
        directions: list[Tensor] = []
        if any(epsilons):
            directions = confidence_direction(
                self.predictor, x, temperature=self.temperature, num_samples=self.num_samples, seed=self.seed
            )
        return torch.stack([self.statistics(perturb(x, directions, e) if e else x) for e in epsilons])
