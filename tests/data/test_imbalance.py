"""Long-tailed training sets: counts of classes, and subsets with these counts."""

import itertools
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
from torch.utils.data import Dataset, IterableDataset, TensorDataset

from neuboots.data import subsample_classes

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


class Folder(Dataset[Any]):
    """Rows that must be read to know their class."""

    def __len__(self) -> int:
        return 30

    def __getitem__(self, i: int) -> tuple[Tensor, int]:
        return torch.full((2,), float(i)), i % 3


def test_labels_are_read_from_any_data_set() -> None:
    tensors = TensorDataset(torch.arange(30.0)[:, None].expand(30, 2), LABELS)
    few, same = subsample_classes(Folder(), [1, 2, 3]), subsample_classes(tensors, [1, 2, 3])
    assert list(few.indices) == list(same.indices)
    assert [few[i][1] for i in range(6)] == [int(same[i][1]) for i in range(6)]
    column = TensorDataset(tensors.tensors[0], LABELS[:, None].float())
    assert list(subsample_classes(column, [1, 2, 3]).indices) == list(same.indices)


def test_mapping_excludes_classes_that_it_does_not_name() -> None:
    few = subsample_classes(numbered(LABELS), {2: 4, 0: 1})
    assert LABELS[list(few.indices)].bincount().tolist() == [1, 0, 4]


@pytest.mark.parametrize("kind", [tuple, np.array, torch.tensor])
def test_counts_may_be_tuple_array_or_tensor(kind: Any) -> None:
    expected = list(subsample_classes(numbered(LABELS), [1, 2, 3]).indices)
    assert list(subsample_classes(numbered(LABELS), kind([1, 2, 3]), seed=np.int64(0)).indices) == expected


class Endless(IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        return itertools.repeat((torch.zeros(2), 0))


@pytest.mark.parametrize(
    ("data", "counts"),
    [
        *(
            (numbered(LABELS), counts)
            for counts in ([1, 11, 2], {7: 1}, [1, -1, 2], [1, 0.5, 2], [1, 1], [0, 0, 0], {})
        ),
        *((numbered(y), [1]) for y in (torch.rand(30), torch.full((30,), torch.nan), torch.full((30,), -1))),
        (numbered(torch.zeros(30, 2, dtype=torch.long)), [1]),
        (Endless(), [1]),
    ],
)
def test_invalid_counts_and_labels_are_errors(data: Any, counts: Any) -> None:
    with pytest.raises(ValueError):  # noqa: PT011 (several arguments)
        subsample_classes(data, counts)
