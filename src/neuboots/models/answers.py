"""What B replicates say of the class of each row, in memory that is bounded whatever N, B and C are.

p(x) = 1/B Σ_b softmax f_b(x);   std: of softmax f_b(x) at the likeliest class, over b
"""

from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor

from neuboots.prediction import Prediction, Predictor, class_probabilities
from neuboots.prediction.figures import std_of

NUMBERS = 1 << 22  # of the samples that are held at once


@dataclass(frozen=True, eq=False)
class ClassAnswers:
    """Figures of N rows; entropies in nats."""

    probs: Tensor  # (N, C)
    std: Tensor  # (N,), of the likeliest class's probability over replicates
    entropy: Tensor  # (N,)
    mutual_information: Tensor  # (N,)

    @property
    def labels(self) -> Tensor:
        return self.probs.argmax(1)

    @property
    def confidence(self) -> Tensor:
        return self.probs.amax(1)


def class_answers(predictor: Predictor, x: Tensor, num_samples: int, *, seed: int = 0) -> ClassAnswers:
    """What the replicates say of each row of x, some rows at a time.

    >>> from neuboots import PlainPredictor
    >>> said = class_answers(PlainPredictor(torch.nn.Identity()), torch.tensor([[0.0, 0.0], [9.0, 0.0]]), 5)
    >>> said.labels.tolist(), [round(p, 3) for p in said.confidence.tolist()], said.std.tolist()
    ([0, 0], [0.5, 1.0], [0.0, 0.0])
    """
    outputs = predictor.summarize(x[:1], 1, seed=seed).mean.shape[1]
    size = max(1, NUMBERS // (num_samples * outputs))
    parts = [_of_some(predictor, some, num_samples, seed) for some in torch.split(x, size)]
    return ClassAnswers(*(torch.cat([getattr(part, f.name) for part in parts]) for f in fields(ClassAnswers)))


def _of_some(predictor: Predictor, x: Any, num_samples: int, seed: int) -> ClassAnswers:
    with torch.no_grad():
        prediction: Prediction = predictor.predict(x, num_samples, seed=seed)
        likeliest = prediction.labels  # (N,)
        drawn = class_probabilities(prediction.samples, 2)  # (B, N, C)
        chosen = drawn.gather(2, likeliest[None, :, None].expand(len(drawn), -1, 1))[..., 0]  # (B, N)
        return ClassAnswers(prediction.probs, std_of(chosen), prediction.entropy, prediction.mutual_information)
