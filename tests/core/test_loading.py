"""Rows read many at once, targets read alone, and rows of several sizes."""

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, Subset

from neuboots.loading import EpochLoader, check_length, load_class_labels, load_targets


class AtOnce(Dataset[Any]):
    """Rows with noise of their own, many at once; what was asked for is noted down."""

    def __init__(self, n: int = 10) -> None:
        self.n = n
        self.asked: list[list[int]] = []

    def __len__(self) -> int:
        return self.n

    def __getitem__(self, i: int) -> tuple[Tensor, int]:
        return self.__getitems__([i])[0]

    def __getitems__(self, rows: Sequence[int]) -> list[tuple[Tensor, int]]:
        self.asked.append(list(rows))
        noise = torch.rand(len(rows), 3)
        return [(i + each, i) for i, each in zip(rows, noise, strict=True)]


def passes(data: Dataset[Any], epoch: int = 0, **options: Any) -> list[tuple[Tensor, Tensor, Tensor]]:
    loader = EpochLoader(data, batch_size=4, seed=5, **options)
    return [(batch.x, batch.y, batch.index) for _, batch, _ in loader.epoch(epoch)]


def test_a_batch_is_read_at_once_and_its_draws_are_named() -> None:
    data = AtOnce()
    first, again, next_epoch = passes(data), passes(data), passes(data, 1)
    assert [len(rows) for rows in data.asked] == [4, 4, 2] * 3
    for (x, y, index), (x2, _, index2) in zip(first, again, strict=True):
        assert torch.equal(x, x2)
        assert torch.equal(index, index2)
        assert torch.equal(y, index)
        assert torch.equal(x.floor().long()[:, 0], index)  # each row's own, in its own place
        assert len((x - index[:, None]).unique()) == x.numel()  # every image has its own draw
    assert not torch.equal(torch.cat([x.frac() for x, _, _ in first]), torch.cat([x.frac() for x, _, _ in next_epoch]))


def test_workers_change_nothing_of_what_a_batch_draws() -> None:
    for ours, theirs in zip(passes(AtOnce()), passes(AtOnce(), num_workers=2), strict=True):
        assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))


def test_a_pass_taken_up_in_the_middle_draws_the_same() -> None:
    loader = EpochLoader(AtOnce(), batch_size=4, seed=5)
    whole = [batch.x for _, batch, _ in loader.epoch(2)]
    rest = [batch.x for _, batch, _ in loader.epoch(2, start=1)]
    assert all(torch.equal(a, b) for a, b in zip(whole[1:], rest, strict=True))


def test_a_subset_reads_at_once_only_if_its_data_does() -> None:
    data = AtOnce()
    passes(Subset(data, [1, 3, 5, 7, 9]))
    assert [len(rows) for rows in data.asked] == [5]  # a last batch of one row joins the one before
    assert {i for rows in data.asked for i in rows} == {1, 3, 5, 7, 9}


def test_rows_of_a_subset_keep_their_own_names() -> None:
    """torch's Subset offers to read many rows at once for any data: rows that cannot are still seeded one by one."""

    class Plain(Dataset[Any]):
        def __len__(self) -> int:
            return 6

        def __getitem__(self, i: int) -> tuple[Tensor, int]:
            return i + torch.rand(3), i

    small, large = (
        {
            int(i): row
            for x, _, index in _batches(Subset(Plain(), range(6)), size)
            for i, row in zip(index, x, strict=True)
        }
        for size in (2, 6)
    )
    assert all(torch.equal(small[i], large[i]) for i in range(6))


def _batches(data: Dataset[Any], size: int) -> list[tuple[Tensor, Tensor, Tensor]]:
    return [(b.x, b.y, b.index) for _, b, _ in EpochLoader(data, batch_size=size, seed=1).epoch(0)]


def test_torchs_own_loader_reads_the_same_rows_at_once() -> None:
    data = AtOnce()
    assert [y.tolist() for _, y in DataLoader(data, batch_size=6)] == [[0, 1, 2, 3, 4, 5], [6, 7, 8, 9]]
    assert [len(rows) for rows in data.asked] == [6, 4]


class WithMasks(Dataset[Any]):
    """Images that must not be read for their masks."""

    def __len__(self) -> int:
        return 4

    def __getitem__(self, i: int) -> Any:
        raise AssertionError("an image was read for its mask")

    def target(self, i: int) -> Tensor:
        return torch.full((3, 2), i)


def test_targets_are_read_alone_where_they_can_be() -> None:
    reduced = load_targets(WithMasks(), reduce=lambda mask: mask.flatten()[0])
    assert reduced.tolist() == [0, 1, 2, 3]
    assert load_targets(Subset(WithMasks(), [3, 1]), reduce=lambda mask: mask.flatten()[0]).tolist() == [3, 1]


class Sizes(Dataset[Any]):
    def __len__(self) -> int:
        return 4

    def __getitem__(self, i: int) -> tuple[Tensor, int]:
        return torch.zeros(3, 10 + i), 0


def test_rows_of_several_sizes_get_a_sentence() -> None:
    with pytest.raises(
        ValueError, match=r"got inputs of several sizes in one batch, such as \(3, 1\d\) and \(3, 1\d\)"
    ):
        passes(Sizes())
    assert len(_batches(Sizes(), 1)) == 4
    texts = [({"input_ids": torch.zeros(length, dtype=torch.int64)}, 0) for length in (3, 5, 4)]
    with pytest.raises(
        ValueError, match=r"several sizes in one batch, such as \(3,\) and \(5,\).*pad texts to one length"
    ):
        passes(texts)  # type: ignore[arg-type]


def test_classes_are_whole_numbers() -> None:
    assert load_class_labels(AtOnce(3)).tolist() == [0, 1, 2]
    assert check_length(AtOnce(3)) == 3
