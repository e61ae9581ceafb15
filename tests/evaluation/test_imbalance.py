"""Imbalance: long-tailed training sets, and the F1 of each class with its spread."""

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import sklearn.metrics
import torch
from _nets import Stored, noise, numbered
from _reference import standard_errors
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset

import neuboots
from neuboots import TrainingConfig
from neuboots.data import exponential_counts, subsample_classes
from neuboots.evaluation.imbalance import (
    ImbalanceOverSeedsReport,
    ImbalanceReport,
    evaluate_imbalance,
    evaluate_imbalance_over_seeds,
)
from neuboots.prediction import Predictor
from neuboots.training import EpochReport


def measure(samples: Tensor, y: Tensor, **options: Any) -> ImbalanceReport:
    return evaluate_imbalance(Stored(samples), numbered(y), num_samples=len(samples), progress=False, **options)


# -- training sets -------------------------------------------------------------------------------------------


def test_exponential_counts_are_those_of_long_tailed_cifar() -> None:
    """12,406 rows of CIFAR-10 and 10,847 of CIFAR-100 at ratio 100, as everybody uses them."""
    assert sum(exponential_counts(5000, 100, 10)) == 12406
    assert sum(exponential_counts(500, 100, 100)) == 10847
    assert exponential_counts(500, 1, 3) == [500, 500, 500]
    assert exponential_counts(7, 3, 1) == [7]
    assert exponential_counts(500, 10, 2) == [500, 50]


@pytest.mark.parametrize(("largest", "ratio", "classes"), [(0, 10, 3), (10, 0.5, 3), (10, 5, 0), (10, float("nan"), 3)])
def test_bad_exponential_counts_get_a_sentence(largest: int, ratio: float, classes: int) -> None:
    with pytest.raises(ValueError, match="expected at least one row and one class, and ratio ≥ 1"):
        exponential_counts(largest, ratio, classes)


def test_a_ratio_that_leaves_no_row_gets_a_sentence() -> None:
    with pytest.raises(ValueError, match="got ratio=11 for largest=10; expected at most 10: the last class has no row"):
        exponential_counts(10, 11, 3)


@settings(deadline=None, max_examples=40, derandomize=True)
@given(st.lists(st.tuples(st.integers(0, 12), st.integers(0, 12)), min_size=1, max_size=5), st.integers(0, 99))
def test_every_class_has_its_count(pairs: list[tuple[int, int]], seed: int) -> None:
    """`there` rows of each class in the data, `counts` of them wanted; no row twice."""
    there = [max(pair) for pair in pairs]
    counts = [min(pair) for pair in pairs]
    if sum(counts) == 0:
        return
    y = torch.repeat_interleave(torch.arange(len(there)), torch.tensor(there))
    y = y[torch.randperm(len(y), generator=torch.Generator().manual_seed(seed))]
    few = subsample_classes(numbered(y), counts, seed=seed)
    rows = list(few.indices)
    assert rows == sorted(set(rows))
    assert y[rows].bincount(minlength=len(there)).tolist() == counts
    as_mapping = subsample_classes(numbered(y), dict(enumerate(counts)), seed=seed)
    assert list(as_mapping.indices) == rows


def test_rows_are_drawn_uniformly_and_by_the_seed() -> None:
    y = torch.arange(40) % 2
    picks = torch.zeros(40)
    for seed in range(2000):
        picks[list(subsample_classes(numbered(y), [5, 10], seed=seed).indices)] += 1
    for c, share in ((0, 0.25), (1, 0.5)):
        allowed = standard_errors(40) * (2000 * share * (1 - share)) ** 0.5
        assert float((picks[c::2] - 2000 * share).abs().max()) < allowed
    assert list(subsample_classes(numbered(y), [5, 5]).indices) == list(subsample_classes(numbered(y), [5, 5]).indices)


def test_smaller_counts_are_among_larger_ones() -> None:
    y = torch.arange(60) % 3
    small, large = (set(subsample_classes(numbered(y), counts, seed=3).indices) for counts in ([2, 4, 6], [5, 4, 20]))
    assert small < large


class Folder(Dataset[Any]):
    """Rows that must be read to know their class."""

    def __len__(self) -> int:
        return 30

    def __getitem__(self, i: int) -> tuple[Tensor, int]:
        return torch.full((2,), float(i)), i % 3


def test_any_labelled_data_set() -> None:
    tensors = TensorDataset(torch.arange(30.0)[:, None].expand(30, 2), torch.arange(30) % 3)
    few, same = subsample_classes(Folder(), [1, 2, 3]), subsample_classes(tensors, [1, 2, 3])
    assert list(few.indices) == list(same.indices)
    assert [few[i][1] for i in range(6)] == [int(same[i][1]) for i in range(6)]
    column = TensorDataset(tensors.tensors[0], tensors.tensors[1][:, None].float())
    assert list(subsample_classes(column, [1, 2, 3]).indices) == list(same.indices)


def test_a_mapping_takes_the_classes_it_names() -> None:
    y = torch.arange(30) % 3
    few = subsample_classes(numbered(y), {2: 4, 0: 1})
    assert y[list(few.indices)].bincount().tolist() == [1, 0, 4]


@pytest.mark.parametrize("kind", [tuple, np.array, torch.tensor, lambda counts: [np.int64(c) for c in counts]])
def test_counts_of_any_kind(kind: Any) -> None:
    y = torch.arange(30) % 3
    expected = list(subsample_classes(numbered(y), [1, 2, 3]).indices)
    assert list(subsample_classes(numbered(y), kind([1, 2, 3])).indices) == expected
    assert list(subsample_classes(numbered(y.double()), kind([1, 2, 3]), seed=np.int64(0)).indices) == expected


class Endless(IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        return itertools.repeat((torch.zeros(2), 0))


@pytest.mark.parametrize(
    ("data", "counts", "sentence"),
    [
        (
            numbered(torch.arange(30) % 3),
            [1, 11, 2],
            r"got counts\[1\]=11 for data with 10 rows of class 1; expected no more",
        ),
        (numbered(torch.arange(30) % 3), {7: 1}, r"got counts\[7\]=1 for data with 0 rows of class 7"),
        (numbered(torch.arange(30) % 3), [1, -1, 2], r"got counts\[1\]=-1; expected a whole number, at least 0"),
        (numbered(torch.arange(30) % 3), [1, 0.5, 2], r"got counts\[1\]=0.5; expected a whole number"),
        (numbered(torch.arange(30) % 3), torch.tensor([1, 0.5, 2]), r"got counts\[0\]=tensor\(1.\); expected a whole"),
        (numbered(torch.arange(30) % 3), [1, 1], "got counts for 2 classes and data with class 2"),
        (numbered(torch.arange(30) % 3), [0, 0, 0], "which leave no row; expected at least one"),
        (numbered(torch.arange(30) % 3), {}, "which leave no row; expected at least one"),
        (numbered(torch.rand(30)), [1], "expected the class of each row"),
        (numbered(torch.full((30,), torch.nan)), [1], "expected the class of each row"),
        (numbered(torch.zeros(30, 2, dtype=torch.long)), [1], "expected the class of each row"),
        (numbered(torch.full((30,), -1)), [1], "expected the class of each row"),
        (Endless(), [1], "got a stream of unknown length"),
    ],
)
def test_bad_counts_get_a_sentence(data: Any, counts: Any, sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        subsample_classes(data, counts)


# -- one predictor -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("batch_size", [3, 64])
@pytest.mark.parametrize("outputs", [1, 4])
def test_f1_agrees_with_scikit_learn_for_every_replicate(outputs: int, batch_size: int) -> None:
    """Also precision and recall of the predictive mean; one class is never there, and one hardly ever guessed."""
    classes = max(2, outputs)
    samples = 2 * noise(6, 50, outputs)
    y = torch.randint(0, max(2, classes - 1), (50,), generator=torch.Generator().manual_seed(1))
    found = measure(samples, y, batch_size=batch_size)
    full = torch.cat([torch.zeros_like(samples), samples], 2) if outputs == 1 else samples
    options = {"labels": range(classes), "average": None, "zero_division": 0}
    for b in range(6):
        theirs = sklearn.metrics.f1_score(y.numpy(), full[b].argmax(1).numpy(), **options)
        np.testing.assert_allclose(found.f1_replicates[b], theirs, atol=1e-12)
    guess = full.softmax(2).mean(0).argmax(1).numpy()
    for mine, score in (("f1", "f1"), ("precision", "precision"), ("recall", "recall")):
        theirs = getattr(sklearn.metrics, f"{score}_score")(y.numpy(), guess, **options)
        np.testing.assert_allclose(getattr(found, mine), theirs, atol=1e-12)
    np.testing.assert_allclose(found.f1_std, found.f1_replicates.numpy().std(0, ddof=1))
    assert found.support.tolist() == y.bincount(minlength=classes).tolist()
    assert found.macro_f1 == pytest.approx(float(found.f1.mean()))


def test_an_oracle_is_perfect_and_its_replicates_agree() -> None:
    y = torch.arange(30) % 3
    found = measure(50 * nn.functional.one_hot(y, 3).float().expand(5, 30, 3) + 0.1 * noise(5, 30, 3), y)
    assert found.f1.tolist() == [1.0, 1.0, 1.0]
    assert found.f1_std.tolist() == [0.0, 0.0, 0.0]


def test_a_constant_guess_finds_one_class() -> None:
    y = torch.tensor([0] * 6 + [1] * 3 + [2])
    constant = torch.tensor([0.0, 5.0, 0.0]).expand(4, 10, 3)
    found = measure(constant, y)
    assert found.f1.tolist() == [0.0, pytest.approx(2 * 3 / (3 + 10)), 0.0]
    assert found.f1_std.tolist() == [0.0, 0.0, 0.0]
    assert found.recall.tolist() == [0.0, 1.0, 0.0]
    assert (found.minor, found.major) == (2, 0)


def test_pixels_count_as_rows() -> None:
    samples = 2 * noise(4, 5, 3, 2, 2)
    y = torch.randint(0, 3, (5, 2, 2), generator=torch.Generator().manual_seed(1))
    found = measure(samples, y, batch_size=2)
    flat = samples.movedim(2, -1).reshape(4, 20, 3)
    assert torch.equal(found.f1_replicates, measure(flat, y.flatten()).f1_replicates)
    assert int(found.support.sum()) == 20


@pytest.mark.parametrize("ignore_index", [255, -100, 1])
@pytest.mark.parametrize("batch_size", [1, 64])
def test_void_pixels_are_passed_over(ignore_index: int, batch_size: int) -> None:
    """As if they were not there, also where a whole batch is void, or where void is the name of a class."""
    samples = 2 * noise(4, 5, 3, 2, 2)
    y = torch.randint(0, 3, (5, 2, 2), generator=torch.Generator().manual_seed(1))
    y[y == 1] = ignore_index
    y[2] = ignore_index
    there = y != ignore_index
    flat = samples.movedim(2, -1)[:, there]
    found, expected = measure(samples, y, batch_size=batch_size, ignore_index=ignore_index), measure(flat, y[there])
    for name in ("f1", "precision", "recall", "f1_replicates", "support"):
        torch.testing.assert_close(getattr(found, name), getattr(expected, name), rtol=0, atol=1e-12)
    with pytest.raises(ValueError, match="got data whose labels are all void .*; expected some that count"):
        measure(samples, torch.full_like(y, ignore_index), ignore_index=ignore_index)


def test_members_are_counted_once() -> None:
    """Three members make three replicates, however many are asked for; counted again they would seem more alike."""
    samples, y = noise(3, 40, 3), torch.arange(40) % 3
    found = evaluate_imbalance(Stored(samples, num_distinct=3), numbered(y), num_samples=100, progress=False)
    assert found.num_samples == 3
    assert found.f1_replicates.shape == (3, 3)


def test_the_training_counts_name_minor_and_major() -> None:
    samples, y = noise(3, 40, 4), torch.arange(40) % 4
    assert (measure(samples, y).minor, measure(samples, y).major) == (0, 0)  # all alike
    found = measure(samples, y, train_counts=[30, 5, 500, 20])
    assert (found.minor, found.major) == (1, 2)
    lines = str(found).splitlines()
    assert lines[0].startswith("N = 40, B = 3, seed 0; F1 of the predictive mean (macro ")
    assert lines[3].startswith("1 (minor)")
    assert lines[4].startswith("2 (major)")
    for counts in (np.array([30, 5, 500, 20]), torch.tensor([30, 5, 500, 20])):
        assert (measure(samples, y, train_counts=counts).minor, found.major) == (1, 2)
    # A class without training rows is not the rarest.
    assert measure(samples, y, train_counts=[30, 0, 500]).minor == 0
    with pytest.raises(ValueError, match="got counts of 5 classes for a net with 4"):
        measure(samples, y, train_counts=[1, 2, 3, 4, 5])


def test_one_replicate_and_one_row() -> None:
    found = measure(noise(1, 1, 3), torch.tensor([1]))
    assert found.f1_std.tolist() == [0.0, 0.0, 0.0]
    assert found.support.tolist() == [0, 1, 0]


def test_a_loader_will_do() -> None:
    samples, y = noise(4, 30, 3), torch.arange(30) % 3
    loader = DataLoader(numbered(y), batch_size=7)
    found = evaluate_imbalance(Stored(samples), loader, num_samples=4, progress=False)
    assert torch.equal(found.f1_replicates, measure(samples, y).f1_replicates)


def test_bad_calls_get_a_sentence() -> None:
    with pytest.raises(ValueError, match="expected a predictor"):
        evaluate_imbalance(nn.Linear(1, 2), numbered(torch.arange(3)), progress=False)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="labels run from 0 to 3; expected 0 to 2"):
        measure(noise(2, 4, 3), torch.arange(4))
    with pytest.raises(ValueError, match=r"labels run from 0 to 255; expected 0 to 2"):
        measure(noise(2, 2, 3), torch.tensor([0, 255]))
    with pytest.raises(ValueError, match=r"got train_counts\[0\]=0.5; expected a whole number, at least 0"):
        measure(noise(2, 3, 3), torch.arange(3), train_counts=[0.5, 0.2, 0.3])
    with pytest.raises(ValueError, match="got num_samples='a'; expected a whole number, at least 1"):
        evaluate_imbalance(Stored(noise(2, 3, 3)), numbered(torch.arange(3)), num_samples="a", progress=False)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="is this a regression"):
        measure(noise(2, 4, 3), torch.rand(4))


# -- several seeds -------------------------------------------------------------------------------------------

RECIPE = TrainingConfig(epochs=3, batch_size=32, progress=False)


def model() -> nn.Module:
    return nn.Sequential(nn.Linear(64, 16), nn.ReLU(), nn.Dropout(0.1), nn.Linear(16, 10))


def digits() -> tuple[Dataset[Any], TensorDataset]:
    """The paper's counts, a tenth of them, and 300 rows to test on."""
    x, y = load_digits(return_X_y=True)
    x, y = torch.tensor(x, dtype=torch.float32) / 16, torch.tensor(y)
    train = subsample_classes(TensorDataset(x[:-300], y[:-300]), [5 * (c + 1) for c in range(10)])
    return train, TensorDataset(x[-300:], y[-300:])


def several(
    method: Any = None, config: TrainingConfig = RECIPE, make: Any = model, change: Any = None, **options: Any
) -> ImbalanceOverSeedsReport:
    train, test = digits()
    train, test = (train, test) if change is None else change(train, test)
    options = {"seeds": (0, 1, 2), "num_samples": 4, "progress": False, **options}
    return evaluate_imbalance_over_seeds(method or neuboots.Plain(), make, train, test, config, **options)


NET = model()


def assert_same(a: ImbalanceOverSeedsReport, b: ImbalanceOverSeedsReport) -> None:
    assert torch.equal(a.f1, b.f1)
    assert torch.equal(a.replicate_std, b.replicate_std)
    assert a.seeds == b.seeds


METHODS = {"deterministic": {}, "neuboots": {}, "mc-dropout": {}, "deep-ensemble": {"num_members": 2}}


@pytest.mark.parametrize("name", list(METHODS))
def test_any_method_over_seeds_is_each_seed_by_itself(name: str) -> None:
    method = neuboots.create_method(name, **METHODS[name])
    found = several(method, seeds=(0, 5))
    train, test = digits()
    for k, seed in enumerate((0, 5)):
        predictor = method.fit(model, train, replace(RECIPE, seed=seed))
        alone = evaluate_imbalance(predictor, test, num_samples=4, progress=False)
        if predictor.num_distinct or name == "deterministic":  # replicates that no seed changes
            assert torch.equal(found.f1[k], alone.f1)
            assert torch.equal(found.replicate_std[k], alone.f1_std)
    assert (found.minor, found.major) == (0, 9)
    assert found.train_counts.tolist() == [5 * (c + 1) for c in range(10)]
    assert found.num_samples == {"deterministic": 1, "deep-ensemble": 2}.get(name, 4)
    torch.testing.assert_close(found.mean, (found.f1[0] + found.f1[1]) / 2)
    torch.testing.assert_close(found.std, (found.f1[0] - found.f1[1]).abs() / 2**0.5)
    spread = bool((found.replicate_std > 0).any())
    assert spread == (name != "deterministic")


def test_workers_change_nothing() -> None:
    assert_same(several(num_workers=2), several())


class Broken(Exception):
    pass


@dataclass(frozen=True)
class Breaking:
    """The plain net, but fit number `at` breaks."""

    at: int = field(compare=False)  # the same method, whenever it breaks
    fits: list[int] = field(default_factory=list, compare=False)

    def fit(self, make: Any, data: Any, config: Any) -> Predictor:
        self.fits.append(config.seed)
        if len(self.fits) == self.at + 1:
            raise Broken
        return neuboots.Plain().fit(make, data, config)


def test_seeds_broken_off_go_on_and_more_may_be_added(tmp_path: Path) -> None:
    with pytest.raises(Broken):
        several(Breaking(at=1), folder=tmp_path)
    second = Breaking(at=99)
    assert_same(several(second, folder=tmp_path), several())
    assert second.fits == [1, 2]
    third = Breaking(at=99)
    assert_same(several(third, folder=tmp_path, seeds=(0, 1, 2, 3)), several(seeds=(0, 1, 2, 3)))
    assert third.fits == [3]
    with pytest.raises(ValueError, match="holds units of other settings"):
        several(Breaking(at=99), folder=tmp_path, num_samples=5)


@pytest.mark.parametrize("num_workers", [1, 2])
def test_seeds_are_found_again_in_any_order(tmp_path: Path, num_workers: int) -> None:
    """Each by its own number, whichever others were asked for before."""
    whole = several(seeds=(0, 1, 2, 7))
    options = {"folder": tmp_path, "num_workers": num_workers}
    for seeds in ((0,), (1, 0, 2), (2, 7), (7, 2, 1, 0)):
        found = several(seeds=seeds, **options)
        places = [(0, 1, 2, 7).index(seed) for seed in seeds]
        assert torch.equal(found.f1, whole.f1[places])
        assert torch.equal(found.replicate_std, whole.replicate_std[places])
        assert found.seeds == seeds
    last = Breaking(at=0)
    with pytest.raises(ValueError, match="holds units of other settings"):
        several(last, **options)
    assert last.fits == []
    assert_same(several(seeds=(0, 1, 2, 7), config=replace(RECIPE, seed=5), **options), whole)


def test_a_folder_of_another_net_or_other_data_is_refused(tmp_path: Path) -> None:
    several(folder=tmp_path, seeds=(0,))

    def shifted(data: Any) -> TensorDataset:
        x, y = (torch.stack([torch.as_tensor(row[k]) for row in data]) for k in (0, 1))
        x[len(x) // 3, 30] += 0.5
        return TensorDataset(x, y)

    changes: list[dict[str, Any]] = [
        {"make": lambda: nn.Linear(64, 10)},
        {"change": lambda train, test: (shifted(train), test)},
        {"change": lambda train, test: (train, shifted(test))},
        {"method": neuboots.Plain(lambda z, y: z.logsumexp(1) - z[torch.arange(len(y)), y])},
        {"config": replace(RECIPE, schedule=lambda optimizer, steps: neuboots.constant(optimizer, steps))},
    ]
    for change in changes:
        with pytest.raises(ValueError, match="holds units of other settings"):
            several(folder=tmp_path, seeds=(0, 1), **change)


def test_a_training_broken_off_goes_on_where_it_stopped(tmp_path: Path) -> None:
    epochs: list[int] = []

    def count(report: EpochReport) -> None:
        epochs.append(report.epoch)
        if len(epochs) == 2:
            raise Broken

    config = replace(RECIPE, on_epoch=count)
    with pytest.raises(Broken):
        several(config=config, folder=tmp_path)
    assert_same(several(config=config, folder=tmp_path), several())
    assert len(epochs) == 3 * RECIPE.epochs
    assert not list(tmp_path.rglob("*.ckpt"))


def test_the_table_names_the_rarest_and_the_commonest() -> None:
    f1 = torch.tensor([[0.5, 1.0], [0.25, 1.0]]).double()
    found = ImbalanceOverSeedsReport("Plain", f1, f1 / 10, torch.tensor([3, 90]), 0, 1, (4, 7), 20)
    lines = str(found).splitlines()
    assert lines[0] == "Plain: F1 of the predictive mean, 2 seeds, B = 20 (macro 0.6875)"
    assert lines[2].split() == ["0", "(minor)", "3", "0.375", "0.1768", "0.0375"]
    assert lines[3].split() == ["1", "(major)", "90", "1", "0", "0.1"]


def test_classes_without_training_rows() -> None:
    """A net may have more classes than the training set."""
    x = noise(40, 64)
    train = TensorDataset(x, torch.arange(40) % 2)
    test = TensorDataset(x, torch.arange(40) % 10)
    options = {"seeds": (0,), "num_samples": 2, "progress": False}
    found = evaluate_imbalance_over_seeds(neuboots.Plain(), model, train, test, RECIPE, **options)
    assert found.train_counts.tolist() == [20, 20] + 8 * [0]
    assert found.std.tolist() == 10 * [0.0]  # a single seed


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"seeds": ()}, "got seeds=(); expected at least one, and none twice"),
        ({"seeds": (1, 1)}, "got seeds=(1, 1)"),
        ({"seeds": 3}, "got seeds=3; expected several, such as range(5)"),
        ({"seeds": (0, 1.5)}, "got seed=1.5; expected a whole number"),
        ({"seeds": "ab"}, "got seed='a'; expected a whole number"),
        ({"config": None}, "got recipe of type NoneType; expected a Recipe"),
        ({"method": neuboots.NeuBoots}, "got the class NeuBoots; expected an object of it: NeuBoots()"),
        ({"make": lambda: NET}, "make_net() gave the same weights twice"),
        ({"num_samples": 1.5}, "got num_samples=1.5; expected a whole number"),
        ({"num_workers": 1.5}, "got num_workers=1.5; expected a whole number"),
        ({"folder": Path(__file__)}, "which is a file; expected a folder"),
        (
            {"change": lambda train, test: (train, iter([test[:9]]))},
            "got test rows of type list_iterator, which can be",
        ),
        ({"config": replace(RECIPE, folder=Path("here"))}, "got a recipe with a folder"),
        ({"method": "neuboots"}, "got method of type str"),
    ],
)
def test_bad_seeds_get_a_sentence(change: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ValueError, match=".*") as refusal:
        several(**change)
    assert sentence in str(refusal.value)
