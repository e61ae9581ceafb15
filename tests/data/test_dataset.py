"""Lazy and streaming data sets, standardization, splits and class imbalance."""

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from _nets import numbered
from _reference import standard_errors
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset, random_split

from neuboots._validation import ArgumentError
from neuboots.data import DatasetBundle, LazyDataset, Standardizer, StreamingDataset, subsample_classes
from neuboots.data.dataset import LARGE_EXAMPLE, STREAM_BATCH_SIZE, LoadOptions, TensorSource
from neuboots.loading import EpochLoader, load_class_labels, load_targets


def halved(x: Tensor) -> Tensor:
    return x / 2


def noisy(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    return x + torch.rand(len(x), *[1] * (x.ndim - 1)), y


class Counted(TensorSource):
    """Says how it was read."""

    def read(self, rows: Any) -> Any:
        calls.append(list(rows))
        return super().read(rows)


calls: list[list[int]] = []


def rows(n: int = 6) -> TensorSource:
    return TensorSource(torch.arange(n * 4, dtype=torch.float64).view(n, 1, 2, 2), torch.arange(n))


def test_dataset_reads_standardizes_and_ends() -> None:
    part = LazyDataset(rows(), halved)
    x, y = part[4]
    assert x.dtype == torch.float32
    assert (x * 2 == torch.arange(16.0, 20.0).view(1, 2, 2)).all()
    assert int(y) == 4
    assert int(part[-1][1]) == 5
    assert [int(y) for _, y in part] == list(range(6))
    for beyond in (6, -7):
        with pytest.raises(IndexError):
            part[beyond]


def test_take_of_take() -> None:
    part = LazyDataset(rows()).take([5, 3, 1]).take([2, 0, -1])
    assert part.rows == (1, 5, 1)
    assert len(part) == 3
    assert part.targets is not None
    assert part.targets.tolist() == [1, 5, 1] == [int(part.target(i)) for i in range(3)]
    assert len(part.take([])) == 0
    assert part.take([]).targets is None
    with pytest.raises(IndexError):
        part.take([3])


def test_row_indices_must_be_integers() -> None:
    part = LazyDataset(rows())
    for numbers in (torch.tensor([4, 1]), np.array([4, 1]), (np.int64(4), torch.tensor(1))):
        assert part.take(numbers).rows == (4, 1)
    assert int(part[np.int64(4)][1]) == int(part[torch.tensor(4)][1]) == 4
    chosen = [True, False, True, False, False, False]  # which are no numbers 1 and 0
    for wrong in (chosen, torch.tensor(chosen), np.array(chosen), [0.5], ["1"]):
        with pytest.raises(ArgumentError):
            part.take(wrong)  # type: ignore[arg-type]
    with pytest.raises(ArgumentError):
        part[0:2]  # type: ignore[index]


def test_many_rows_are_read_and_augmented_at_once() -> None:
    calls.clear()
    part = LazyDataset(Counted(*vars(rows()).values()), halved, noisy)
    torch.manual_seed(1)
    together = part.__getitems__([4, 0, 2])
    assert calls == [[4, 0, 2]]
    torch.manual_seed(1)
    shifts = torch.rand(3, 1, 1, 1)
    for (x, y), row, shift in zip(together, [4, 0, 2], shifts, strict=True):
        assert torch.allclose(x, (rows().x[row].float() + shift) / 2)
        assert int(y) == row
    assert part.__getitems__([]) == []


def test_images_of_several_sizes_are_augmented_one_by_one() -> None:
    class Sizes(TensorSource):
        def read(self, rows: Any) -> Any:
            xs, ys = super().read(rows)
            return [x[:, : 1 + row % 2] for x, row in zip(xs, rows, strict=True)], ys

    part = LazyDataset(Sizes(*vars(rows()).values()), halved, noisy)
    assert [tuple(x.shape) for x, _ in part.__getitems__([0, 1, 3])] == [(1, 1, 2), (1, 2, 2), (1, 2, 2)]


def test_lazy_dataset_in_epoch_loader() -> None:
    """Named draws: the same in other processes, another at each epoch; targets without reading a row."""
    calls.clear()
    part = LazyDataset(Counted(*vars(rows(9)).values()), halved, noisy)
    assert load_targets(part).tolist() == load_class_labels(part).tolist() == list(range(9))
    assert calls == []

    def epoch(number: int, num_workers: int = 0) -> list[Tensor]:
        return [
            batch.x for _, batch, _ in EpochLoader(part, batch_size=4, seed=0, num_workers=num_workers).epoch(number)
        ]

    first = epoch(0)
    assert [len(call) for call in calls] == [4, 5]  # one reading for each batch
    assert all(map(torch.equal, first, epoch(0, num_workers=2)))
    assert not torch.equal(first[0], epoch(1)[0])


def test_masks_are_not_held_all_at_once() -> None:
    part = LazyDataset(TensorSource(torch.zeros(3, 1, 2, 2), torch.zeros(3, 2, 2, dtype=torch.int64)))
    assert part.targets is None
    assert part.target(1).shape == (2, 2)


def numbers() -> Iterator[int]:
    return iter(range(11))


decoded: list[int] = []


def decode(number: int) -> tuple[Tensor, Tensor]:
    decoded.append(number)
    return torch.full((1, 2), number, dtype=torch.uint8), torch.tensor(number)


def test_stream_restarts_and_transforms_rows() -> None:
    stream = StreamingDataset(numbers, halved, decode=decode)
    for _ in range(2):
        assert [int(y) for _, y in stream] == list(range(11))
    assert [float(x[0, 0]) * 2 * 255 for x, _ in stream] == pytest.approx(list(range(11)))
    assert not hasattr(stream, "__len__")


def test_small_rows_of_stream_are_prepared_at_once() -> None:
    sizes: list[int] = []

    def noted(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        sizes.append(len(x))
        return noisy(x, y)

    def some(large: bool) -> Iterator[tuple[Tensor, Tensor]]:
        for number in range(70):
            yield torch.full((1, LARGE_EXAMPLE + 1 if large else 2), float(number)), torch.tensor(number)

    torch.manual_seed(0)
    found = list(StreamingDataset(lambda: some(False), augment=noted))
    assert sizes == [STREAM_BATCH_SIZE, STREAM_BATCH_SIZE, 70 - 2 * STREAM_BATCH_SIZE]
    assert [int(y) for _, y in found] == [int(x[0, 0]) for x, _ in found] == list(range(70))
    assert len({float(x[0, 0]) % 1 for x, _ in found}) == 70  # each with a draw of its own
    sizes.clear()
    large = iter(StreamingDataset(lambda: some(True), augment=noted))
    assert [int(next(large)[1]) for _ in range(3)] == [0, 1, 2]
    assert sizes == [1, 1, 1]  # and none is read ahead


@pytest.mark.parametrize("num_workers", [1, 2])
def test_workers_take_turns(num_workers: int) -> None:
    loader = DataLoader(StreamingDataset(numbers, decode=decode), batch_size=1, num_workers=num_workers)
    assert [int(y) for _, y in loader] == list(range(11))


def test_each_lane_decodes_its_own_rows_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    decoded.clear()
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_rank", lambda: 1)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 3)
    assert [int(y) for _, y in StreamingDataset(numbers, decode=decode)] == [1, 4, 7, 10] == decoded


def test_standardization_of_channels_and_its_inverse() -> None:
    x = torch.rand(5, 3, 4, 6, generator=torch.Generator().manual_seed(0))
    normalise = Standardizer.from_data(x, axes=2)
    y = normalise(x)
    assert y.mean((0, 2, 3)).tolist() == pytest.approx([0] * 3, abs=1e-6)
    assert y.std((0, 2, 3), correction=0).tolist() == pytest.approx([1] * 3, rel=1e-5)
    assert torch.allclose(normalise.inverse(y), x, atol=1e-6)
    assert torch.allclose(normalise(x[2]), y[2])  # one row too
    constant = Standardizer.from_data(torch.full((4, 1), 7.0))
    assert constant(torch.tensor([[7.0], [8.0]])).tolist() == [[0.0], [1.0]]
    for wrong in (x[:, :2], x[0, 0]):
        with pytest.raises(ArgumentError):
            normalise(wrong)
    for mean, std in [((0.0,), (1.0, 1.0)), ((), ()), ((0.0,), (0.0,)), ((float("nan"),), (1.0,))]:
        with pytest.raises(ArgumentError):
            Standardizer(mean, std)


def data_set(**changes: Any) -> DatasetBundle:
    x = torch.rand(40, 3, 8, 8, generator=torch.Generator().manual_seed(0))
    normalisation = Standardizer((0.5, 0.4, 0.3), (0.2, 0.2, 0.2))
    part = LazyDataset(TensorSource(x, torch.arange(40) % 4), normalisation)
    options: dict[str, Any] = {
        "name": "toys",
        "task": "classification",
        "train": part.take(range(30)),
        "validation": None,
        "test": part.take(range(30, 40)),
        "channels": 3,
        "classes": ("a", "b", "c", "d"),
        "standardizer": normalisation,
        "augmentation": noisy,
    }
    return DatasetBundle(**options | changes)


def test_bundle_repr_shows_sizes() -> None:
    data = data_set(test=StreamingDataset(numbers, decode=decode))
    assert data.num_classes == 4
    assert repr(data) == (
        "DatasetBundle('toys', classification, 4 classes, 3 channels; train 30, validation none, test streamed)"
    )


def test_augmented_is_train_with_its_augmentation() -> None:
    data: Any = data_set()
    assert (data.augmented_train.augment, data.train.augment) == (noisy, None)
    without = data_set(augmentation=None)
    assert without.augmented_train is without.train
    half, _ = random_split(data.train, [0.5, 0.5])
    subset: Any = data_set(train=half).augmented_train
    assert (subset.dataset.augment, subset.indices) == (noisy, half.indices)
    stream: Any = data_set(train=StreamingDataset(numbers, decode=decode)).augmented_train
    assert stream.augment is noisy
    with pytest.raises(TypeError):
        _ = data_set(train=TensorDataset(torch.zeros(2, 3), torch.zeros(2))).augmented_train


def test_load_options_are_validated() -> None:
    for options in ({"val_fraction": 1.0}, {"val_fraction": "0.1"}, {"seed": 0.5}, {"split": -1}):
        with pytest.raises(ArgumentError):
            LoadOptions(**options)


# -- subsets with a given number of rows of each class ----------------------------------------------------

LABELS = torch.arange(30) % 3


@settings(deadline=None, max_examples=40, derandomize=True)
@given(st.lists(st.tuples(st.integers(0, 12), st.integers(0, 12)), min_size=1, max_size=5), st.integers(0, 99))
def test_subset_has_counts_without_repetition(pairs: list[tuple[int, int]], seed: int) -> None:
    available, counts = [max(pair) for pair in pairs], [min(pair) for pair in pairs]
    if sum(counts) == 0:
        return
    y = torch.repeat_interleave(torch.arange(len(available)), torch.tensor(available))
    y = y[torch.randperm(len(y), generator=torch.Generator().manual_seed(seed))]
    rows = list(subsample_classes(numbered(y), counts, seed=seed).indices)
    assert rows == sorted(set(rows))
    assert y[rows].bincount(minlength=len(available)).tolist() == counts
    assert list(subsample_classes(numbered(y), dict(enumerate(counts)), seed=seed).indices) == rows


def test_rows_are_drawn_uniformly_by_seed() -> None:
    y, picks, draws = torch.arange(40) % 2, torch.zeros(40), 1000
    for seed in range(draws):
        picks[list(subsample_classes(numbered(y), [5, 10], seed=seed).indices)] += 1
    for c, fraction in ((0, 0.25), (1, 0.5)):
        allowed = standard_errors(40) * (draws * fraction * (1 - fraction)) ** 0.5
        assert float((picks[c::2] - draws * fraction).abs().max()) < allowed


def test_smaller_subsets_are_nested_in_larger_ones() -> None:
    y = torch.arange(60) % 3
    small, large = (set(subsample_classes(numbered(y), counts, seed=3).indices) for counts in ([2, 4, 6], [5, 4, 20]))
    assert small < large


@pytest.mark.parametrize("kind", [tuple, np.array, torch.tensor])
def test_counts_may_be_tuple_array_or_tensor(kind: Any) -> None:
    expected = list(subsample_classes(numbered(LABELS), [1, 2, 3]).indices)
    assert list(subsample_classes(numbered(LABELS), kind([1, 2, 3]), seed=np.int64(0)).indices) == expected
    few = subsample_classes(numbered(LABELS), {2: 4, 0: 1})  # without class 1
    assert LABELS[list(few.indices)].bincount().tolist() == [1, 0, 4]


@pytest.mark.parametrize("counts", [[1, 11, 2], {7: 1}, [1, -1, 2], [1, 0.5, 2], [1, 1], [0, 0, 0], {}])
def test_invalid_counts_are_errors(counts: Any) -> None:
    with pytest.raises(ArgumentError):
        subsample_classes(numbered(LABELS), counts)
    with pytest.raises(ArgumentError):
        subsample_classes(numbered(torch.rand(30)), counts)
