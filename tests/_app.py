"""Models with known predictions for tests of the command line, and a small trained model of a table."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
import torch
from torch import Tensor

from neuboots.app import Model, ModelCard, PredictionTable, RowBatch
from neuboots.app.tabular import fit_table
from neuboots.cli._console import describe_error


@dataclass(eq=False)
class ArrayModel(Model):
    """Model whose predictions are given: class probabilities `probs`, or `mean` and `std` of a regression.

    The first column of the inputs is the row number, so that batches of any size are predicted alike. `y` is −1 or NaN
    where there is no label.
    """

    kind = "arrays"

    y: Tensor
    probs: Tensor | None = None
    mean: Tensor | None = None
    std: Tensor | None = None
    x: Tensor | None = None
    ood_score: Tensor | None = None
    names: tuple[str, ...] = ()
    metrics: dict[str, Any] = field(default_factory=dict)
    num_test: int = 500
    batch_size: int = 64
    notes: tuple[str, ...] = ()
    min_confidence: float = 0.6
    error: Exception | None = None  # raised after the first batch

    @property
    def card(self) -> ModelCard:  # type: ignore[override]
        task = "classification" if self.probs is not None else "regression"
        rows = {"train": 1000, "held out": 200, "test": self.num_test}
        return ModelCard(task, "what", "neuboots", rows, 0, "neuboots fit …", "0", self.metrics)  # type: ignore[arg-type]

    @property
    def classes(self) -> tuple[str, ...]:  # type: ignore[override]
        if self.probs is None:
            return ()
        return self.names or tuple(f"class {k}" for k in range(self.probs.shape[1]))

    def read(self, source: str | Path, *, with_labels: bool = False) -> Iterator[RowBatch]:
        x = torch.randn(len(self.y), 3, generator=torch.Generator().manual_seed(9)) if self.x is None else self.x
        for rows in torch.arange(len(self.y)).split(self.batch_size):
            inputs = torch.cat([rows[:, None].float(), x[rows]], 1)
            yield RowBatch({"row": rows.numpy() + 1}, inputs, self.y[rows] if with_labels else None, self.notes)
            if self.error is not None:
                raise self.error

    def predict(self, batch: RowBatch, *, num_samples: int = 100, level: float = 0.95) -> PredictionTable:
        rows = batch.x[:, 0].long()
        score = torch.full((len(rows),), 0.5) if self.ood_score is None else self.ood_score[rows]
        ood = np.asarray(score) > 1
        if self.probs is not None:
            probs = self.probs[rows]
            confidence, labels = probs.max(1)
            entropy = -torch.xlogy(probs, probs).sum(1)
            columns = {
                "prediction": np.array(self.classes, dtype=object)[labels.numpy()],
                "probability": confidence.numpy(),
                "std": (0.1 * (1 - confidence)).numpy(),
                "entropy": entropy.numpy(),
                "mutual_information": (0.1 * entropy).numpy(),
                "ood_score": score.double().numpy(),
                "abstain": (confidence.numpy() < self.min_confidence) | ood,
            }
            return PredictionTable(columns, probs)
        assert self.mean is not None
        assert self.std is not None
        mean, std = self.mean[rows].double(), self.std[rows].double()
        half = float(torch.special.ndtri(torch.tensor(0.5 + level / 2, dtype=torch.float64))) * std
        columns = {
            "prediction": mean.numpy(),
            "low": (mean - half).numpy(),
            "high": (mean + half).numpy(),
            "std": std.numpy(),
            "confidence_low": (mean - half / 3).numpy(),
            "confidence_high": (mean + half / 3).numpy(),
            "ood_score": score.double().numpy(),
            "abstain": (2 * half > 6).numpy() | ood,
        }
        return PredictionTable(columns)

    def _to_artifact(self) -> Any:
        raise NotImplementedError

    @classmethod
    def _from_artifact(cls, artifact: Any, card: ModelCard) -> Model:
        raise NotImplementedError


def make_classifier(count: int = 400, *, classes: int = 3, seed: int = 0, **options: Any) -> ArrayModel:
    """A calibrated classifier: labels are drawn from its probabilities."""
    rng = torch.Generator().manual_seed(seed)
    probs = (2.0 * torch.randn(count, classes, generator=rng)).softmax(1)
    return ArrayModel(torch.multinomial(probs, 1, generator=rng)[:, 0], probs=probs, **options)


def make_regressor(count: int = 400, *, seed: int = 0, scale: float = 1.0, **options: Any) -> ArrayModel:
    """y ~ N(mean, (scale · std)²), where the model predicts std."""
    rng = torch.Generator().manual_seed(seed)
    mean, std = 10 + 3 * torch.randn(count, generator=rng), 0.2 + torch.rand(count, generator=rng) * 2
    y = mean + scale * std * torch.randn(count, generator=rng)
    return ArrayModel(y[:, None], mean=mean, std=std, **options)


def error_message(command: Any) -> str:
    """What the command line prints of the error that a command raises, as a wrong option, file or system."""
    with pytest.raises(Exception) as caught:  # noqa: PT011
        command.run()
    message, code = describe_error(caught.value)
    assert code == 2
    return message


def fitted_table_model(folder: Path, task: Literal["classification", "regression"]) -> tuple[Path, Path]:
    """A trained model of a table with the columns a, b, town and y, and a file of 160 rows like the training rows."""
    rng = np.random.default_rng(0)
    a, b, town = rng.standard_normal(560), rng.standard_normal(560), rng.choice(["Bonn", "Rome"], 560)
    y = a + 0.5 * b + (town == "Rome") + 0.2 * rng.standard_normal(560)
    labels = np.where(y > 0.5, "high", "low") if task == "classification" else y
    lines = [f"{w},{x},{t},{label}" for w, x, t, label in zip(a, b, town, labels, strict=True)]
    for name, rows in (("train.csv", lines[:400]), ("new.csv", lines[400:])):
        (folder / name).write_text("\n".join(["a,b,town,y", *rows, ""]), encoding="utf-8")
    fit_table(folder / "train.csv", "y", task=task, epochs=8, num_samples=20, progress=False).save(folder / "model")
    return folder / "model", folder / "new.csv"
