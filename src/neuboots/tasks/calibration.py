"""Is a predictor as often right as it says? All figures of its class probabilities over labelled data.

    p(y | x) = 1/B Σ_b softmax f_b(x),   of the inputs with max p ≈ 0.8, are 80 % right?

Paper, section 4.1 and tables B.3 and B.4. Data are read batch by batch and replicates chunk by chunk: memory grows with
neither, but for a few bytes an input that the figures of ranks (AURC, adaptive bins) need.
"""

from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor

from neuboots.metrics import Classification, LogitScores, Mean, ReliabilityCurve, Tally
from neuboots.prediction import Prediction, Predictor, Summary
from neuboots.tasks.common import Rows, batches_of, check_predictor, labels_for, table


@dataclass(frozen=True, eq=False)
class Calibration(Tally):
    """What `calibration` found. Parts of a data set add: `Calibration.of(a, y_a) + Calibration.of(b, y_b)`."""

    classes: Classification
    logits: LogitScores
    entropy: Mean
    expected_entropy: Mean
    mutual_information: Mean
    num_samples: int

    @classmethod
    def of(
        cls, prediction: Prediction | Summary, labels: Tensor, *, num_bins: int = 15, void: int | None = None
    ) -> Self:
        """The figures of one batch: a Prediction or Summary of N inputs and their labels (N, *), `void` ones apart."""
        labels = labels_for(prediction.probs, labels, void=void)
        logits = prediction.mean
        if logits.shape[1] == 1:  # one logit of the second of two classes
            logits = torch.cat([torch.zeros_like(logits), logits], 1)
        counted = torch.ones_like(labels, dtype=torch.bool) if void is None else labels != void  # (N, *)
        probs, z = (values.movedim(1, -1)[counted] for values in (prediction.probs, logits))  # (rows, C)
        return cls(
            classes=Classification.of(probs, labels[counted], num_bins=num_bins),
            logits=LogitScores.of(z, labels[counted]),
            entropy=Mean.of(prediction.entropy[counted]),
            expected_entropy=Mean.of(prediction.expected_entropy[counted]),
            mutual_information=Mean.of(prediction.mutual_information[counted]),
            num_samples=prediction.num_samples,
        )

    @property
    def count(self) -> int:
        return int(self.classes.count)

    @property
    def error(self) -> float:
        return float(self.classes.error)

    @property
    def ece(self) -> float:
        return float(self.classes.ece)

    @property
    def nll(self) -> float:
        """−log of the mean probability of the true class, in nats."""
        return float(self.classes.nll)

    @property
    def brier(self) -> float:
        """Summed over classes."""
        return float(self.classes.brier)

    @property
    def reliability_curve(self) -> ReliabilityCurve:
        return self.classes.reliability_curve

    @property
    def figures(self) -> dict[str, float]:
        """Every figure by name; entropies are means over the inputs, in nats."""
        names = ("error", "accuracy", "ece", "adaptive_ece", "mce", "nll", "brier", "aurc")
        figures = {name: getattr(self.classes, name) for name in names}
        figures |= {name: getattr(self.logits, name) for name in ("nll_at_mean_logit", "paper_nll")}
        figures |= {name: getattr(self, name).value for name in ("entropy", "expected_entropy", "mutual_information")}
        return {name: float(value) for name, value in figures.items()}

    def __str__(self) -> str:
        rows = [{"figure": name, "value": value} for name, value in self.figures.items()]
        return f"N = {self.count:,}, B = {self.num_samples}\n{table(rows)}"


def calibration(
    predictor: Predictor,
    data: Rows,
    *,
    num_samples: int = 100,
    seed: int = 0,
    num_bins: int = 15,
    void: int | None = None,
    batch_size: int = 256,
    progress: bool = True,
) -> Calibration:
    """Error, ECE, NLL, Brier and the rest over a data set of rows (x, y), or over a loader that gives batches of them.

    Pixels count as inputs of their own; those labelled `void` are passed over.

    >>> from torch.utils.data import TensorDataset
    >>> from neuboots import PlainPredictor
    >>> net = torch.nn.Linear(2, 2)
    >>> _ = net.load_state_dict({"weight": 50 * torch.eye(2), "bias": torch.zeros(2)})  # the larger coordinate wins
    >>> x = torch.randn(200, 2, generator=torch.Generator().manual_seed(0))
    >>> found = calibration(PlainPredictor(net), TensorDataset(x, x.argmax(1)), num_samples=1, progress=False)
    >>> found.error, found.ece < 0.03
    (0.0, True)
    """
    check_predictor(predictor)
    total: Calibration | int = 0
    for x, y in batches_of(data, batch_size, title="calibration", progress=progress):
        summary = predictor.summarize(x, num_samples, seed=seed)
        total = total + Calibration.of(summary, y, num_bins=num_bins, void=void)
    assert isinstance(total, Calibration), "batches_of gives at least one batch"
    if total.count == 0:
        raise ValueError(f"got data whose labels are all void ({void}); expected some that count")
    return total
