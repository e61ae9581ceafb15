"""What B replicates say of the class of each row, in memory that is bounded whatever N, B and C are.

p(x) = 1/B Σ_b softmax f_b(x);   std: of softmax f_b(x) at the likeliest class, over b
"""

from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor

from neuboots.prediction import Predictor
from neuboots.prediction.probabilities import entropy_of

NUMBERS = 1 << 20  # of the samples that are held at once


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
    """softmax f = e^(f − m) / Σ e^(f − m) and H = log Σ e^(f − m) − Σ p (f − m), m = max f: one exponential a number.

    In single precision, and classes first, since torch is slow along a short last axis: this is what prediction spends
    its time on.
    """
    with torch.no_grad():
        samples = predictor.predict(x, num_samples, seed=seed).samples  # (B, N, C)
        if samples.shape[2] == 1:  # one logit, of the second of two classes
            samples = torch.cat([torch.zeros_like(samples), samples], 2)
        z = samples.float().permute(2, 0, 1).contiguous()  # (C, B, N)
        z -= z.amax(0)
        drawn = z.exp()
        total = drawn.sum(0)  # (B, N)
        drawn /= total
        expected = (total.log_() - (drawn * z).sum(0)).mean(0)  # (N,)
        probs = drawn.mean(1).T  # (N, C)
        chosen = drawn.gather(0, probs.argmax(1)[None, None].expand(1, drawn.shape[1], -1))[0]  # (B, N)
        entropy = entropy_of(probs, 1) + 0.0  # −0 is 0
        gap = entropy - expected
        rounding = 16 * torch.finfo(gap.dtype).eps * entropy.clamp_min(1)  # and not disagreement
        std = ((chosen - chosen.mean(0)).square_().sum(0) / max(1, len(chosen) - 1)).sqrt_()
        return ClassAnswers(probs, std, entropy, gap.masked_fill(gap <= rounding, 0.0))
