"""Tests of the OOD study: preprocessing of images, spreads and checks."""

import pytest
import torch
from torch import Tensor

from neuboots.data import DatasetBundle, LazyDataset, Standardizer
from neuboots.data.dataset import TensorSource
from neuboots.report.checks import Check
from neuboots_paper._common import load_images, prepare_split
from neuboots_paper.studies.ood import OutOfDistribution, check_majority


def image_set(x: Tensor, mean: float, std: float) -> DatasetBundle:
    part = LazyDataset(TensorSource(x, torch.zeros(len(x), dtype=torch.long)), Standardizer((mean,), (std,)))
    return DatasetBundle(
        "a set", "classification", part, part, part, 1, ("one",), standardizer=Standardizer((mean,), (std,))
    )


def test_outside_images_are_standardized_like_the_training_set() -> None:
    x = torch.rand(3, 1, 4, 4, generator=torch.Generator().manual_seed(0))
    ours, theirs = image_set(x, 0.5, 0.25), image_set(x, 0.1, 2.0)
    seen = load_images(theirs, "test", reference=ours, shrink=2).tensors[0]
    means = x.view(3, 1, 2, 2, 2, 2).mean((3, 5))  # of 2 × 2 pixels
    order = torch.cdist(seen.flatten(1), ((means - 0.5) / 0.25).flatten(1)).min(1)
    assert torch.allclose(order.values, torch.zeros(3), atol=1e-5)
    assert sorted(order.indices.tolist()) == [0, 1, 2]
    assert torch.equal(prepare_split(ours, "test")[1][0], (x[1] - 0.5) / 0.25)


@pytest.mark.parametrize(
    ("parts", "word"),
    [
        ([True, True, True, False, None], True),
        ([True, True, None, None, None], None),
        ([False, False, False, True, True], False),
        ([True, True, False, False, None], None),
        ([True, False], False),
    ],
)
def test_check_majority_needs_more_than_half(parts: list[bool | None], word: bool | None) -> None:
    assert check_majority("c", [Check("", part, "") for part in parts]).holds is word


def test_only_ensembles_have_fewer_seeds() -> None:
    study = OutOfDistribution.from_preset("cpu")
    seeds = {method: [job["seed"] for job in study.jobs() if job["method"] == method] for method in study.methods}
    assert seeds.pop("deep-ensemble") == seeds.pop("adversarial-deep-ensemble") == [0, 1, 2]
    assert all(found == [*study.seeds] for found in seeds.values())
