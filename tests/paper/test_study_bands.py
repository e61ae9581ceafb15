"""Tests of the study of predictive bands: quantiles, stored images and checks."""

import base64
from dataclasses import replace

import pytest
import torch
from matplotlib.figure import Figure

from neuboots.methods import NeuBoots
from neuboots.nets import MLP
from neuboots.training import TrainingConfig
from neuboots_paper.studies.bands import Bands, band_metrics, plot_stored_image, predict_bands
from neuboots_paper.study import RunContext


def test_bands_are_central_quantiles_of_replicates() -> None:
    x = torch.randn(300, 2, generator=torch.Generator().manual_seed(0))
    data = torch.utils.data.TensorDataset(x, (x[:, 0] > 0).long())
    predictor = NeuBoots().fit(lambda: MLP(2, 3, widths=(8,)), data, TrainingConfig(epochs=1, progress=False))
    mean, low, high = predict_bands(predictor, x, 21, 0.8)
    probs = predictor.predict(x, 21).samples.softmax(2).sort(0).values  # (B, N, C)
    assert torch.allclose(mean, probs.mean(0), atol=1e-6)
    assert torch.allclose(low, probs[2], atol=1e-6)  # 10 % of 20 steps
    assert torch.allclose(high, probs[18], atol=1e-6)


def test_band_overlap() -> None:
    mean = torch.tensor([[0.2, 0.7, 0.1], [0.4, 0.5, 0.1]])
    low = torch.tensor([[0.1, 0.5, 0.0], [0.2, 0.3, 0.0]])
    high = torch.tensor([[0.4, 0.9, 0.2], [0.6, 0.8, 0.2]])
    found = band_metrics(mean, low, high)
    assert found["top"].tolist() == pytest.approx([0.7, 0.5])
    assert found["width"].tolist() == pytest.approx([0.4, 0.5])
    assert found["overlap"].tolist() == [0.0, 1.0]


@pytest.fixture(scope="module")
def study() -> Bands:
    return replace(Bands.from_preset("smoke"), epochs=1, n=80, n_group=20, num_validation=20, num_samples=5)


def test_stored_image_round_trip(study: Bands) -> None:
    rows = study.measure({"part": "images"}, RunContext())["images"]
    assert [row["image"] for row in rows] == [f"{name} ({which})" for which, name in study._shown_images]
    digits = RunContext().load_data("digits")
    first = next(x for x, y in digits.test if digits.classes[y] == "3")  # type: ignore[union-attr]
    pixels = digits.standardizer.inverse(first) * 255  # type: ignore[union-attr]
    assert list(base64.b64decode(rows[0]["base64"])) == pytest.approx(pixels.flatten().tolist(), abs=0.51)
    ax = Figure().add_subplot()
    plot_stored_image(ax, rows[0])
    drawn = torch.as_tensor(ax.images[0].get_array().astype(int))  # type: ignore[union-attr]
    assert drawn.shape == (8, 8, 3)
    assert torch.allclose(drawn[..., 1].double(), pixels[0].double(), atol=0.51)
