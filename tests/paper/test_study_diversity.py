"""Tests of the diversity study and of the loading of images."""

import pytest
import torch

from neuboots.data import load_dataset
from neuboots_paper._common import load_images, load_with_rows
from neuboots_paper.studies.diversity import MEASURES, DiversityStudy
from neuboots_paper.study import Rows, RunContext

STUDY = DiversityStudy.from_preset("cpu")


def make_rows(**diverse: dict[str, float]) -> Rows:
    """Rows with these measures; a measure that is not given is 0.5 and told apart by nothing."""
    methods = {"deep-ensemble": "ensemble", "mc-dropout": "dropout", "neuboots": "ours", "neuboots-paper": "ours"}
    rows = []
    for method, name in methods.items():
        for seed in STUDY.seeds:
            noise = (-1) ** seed / 10 if name == "ours" else 0.0
            figures = {key: diverse.get(name, {}).get(key, 0.5 + noise) for key in MEASURES}
            rows.append({"method": method, "seed": seed, **figures})
    return {"diversity": rows}


def more(by: float, keys: tuple[str, ...] = tuple(MEASURES)) -> dict[str, float]:
    """Measures that say: more diverse by so much."""
    return {key: 0.5 + (by if MEASURES[key][1] == "higher" else -by) for key in keys}


@pytest.mark.parametrize(("behind", "holds"), [(0, True), (2, True), (3, False), (4, False)])
def test_comparable_diversity_tolerates_two_measures(behind: int, holds: bool) -> None:
    keys = tuple(MEASURES)
    ours = more(-0.1, keys[:behind]) | more(0.1, keys[behind:])
    assert STUDY.checks(make_rows(ours=ours, ensemble=more(0.0)))[-1].holds is holds


def test_comparable_diversity_is_open_within_noise() -> None:
    ours = more(-0.1, tuple(MEASURES)[:1])  # behind in one; the other three vary from seed to seed around the same
    assert STUDY.checks(make_rows(ours=ours, ensemble=more(0.0)))[-1].holds is None


def test_load_images_averages_pixels_and_draws_by_the_seed() -> None:
    data = load_dataset("digits")
    whole, small = (load_images(data, "train", 40, seed=3, shrink=shrink).tensors for shrink in (1, 2))
    assert torch.equal(whole[1], small[1])
    by_hand = whole[0].unfold(2, 2, 2).unfold(3, 2, 2).mean((4, 5))
    assert small[0].shape == (40, 1, 4, 4)
    assert torch.allclose(small[0], by_hand, atol=1e-6)
    assert not torch.equal(load_images(data, "train", 40, seed=4).tensors[1], whole[1])
    assert len(load_images(data, "train", 10**6)) == len(load_dataset("digits").train)  # type: ignore[arg-type]


def test_only_training_images_are_augmented() -> None:
    data = load_dataset("digits")
    part = load_images(data, "train", 8, shrink=2, augment=True)
    assert part.augment is not None
    assert part[0][0].shape == (1, 4, 4)
    assert len({float(part[0][0].sum()) for _ in range(20)}) > 1  # drawn anew at each reading


def test_validation_rows_are_used_only_if_needed() -> None:
    some, whole = (load_with_rows(RunContext(), "digits", n) for n in (1_294, 1_295))
    assert (len(some.train), some.validation is None) == (1_294, False)  # type: ignore[arg-type]
    assert (len(whole.train), whole.validation is None) == (1_438, True)  # type: ignore[arg-type]
    assert torch.equal(some.test.targets, whole.test.targets)  # type: ignore[union-attr]
