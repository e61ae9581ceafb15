"""Data sets, loaders and targets: seeded reads, batches, and what fit accepts as data."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from _nets import Augmented
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, Subset, TensorDataset

from neuboots import ArgumentError, TrainingConfig
from neuboots.loading import EpochLoader, as_dataset, check_length, load_class_labels, load_targets
from neuboots.training import resolve_fit


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


def read_epoch(data: Any, epoch: int = 0, batch_size: int = 4, **options: Any) -> list[tuple[Tensor, Tensor, Tensor]]:
    loader = EpochLoader(data, batch_size=batch_size, seed=5, **options)
    return [(batch.x, batch.y, batch.index) for _, batch, _ in loader.epoch(epoch)]


def test_batched_reads_are_seeded() -> None:
    data = AtOnce()
    first, again, next_epoch = read_epoch(data), read_epoch(data), read_epoch(data, 1)
    assert [len(rows) for rows in data.asked] == [4, 4, 2] * 3
    for (x, y, index), (x2, _, index2) in zip(first, again, strict=True):
        assert torch.equal(x, x2)
        assert torch.equal(index, index2)
        assert torch.equal(y, index)
        assert torch.equal(x.floor().long()[:, 0], index)  # each row's own, in its own place
        assert len((x - index[:, None]).unique()) == x.numel()  # every image has its own draw
    assert not torch.equal(torch.cat([x.frac() for x, _, _ in first]), torch.cat([x.frac() for x, _, _ in next_epoch]))


def test_batched_reads_independent_of_workers() -> None:
    for ours, theirs in zip(read_epoch(AtOnce()), read_epoch(AtOnce(), num_workers=2), strict=True):
        assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))


def test_batched_reads_from_the_middle() -> None:
    loader = EpochLoader(AtOnce(), batch_size=4, seed=5)
    whole = [batch.x for _, batch, _ in loader.epoch(2)]
    rest = [batch.x for _, batch, _ in loader.epoch(2, start=1)]
    assert all(torch.equal(a, b) for a, b in zip(whole[1:], rest, strict=True))


def test_subset_reads_batches() -> None:
    data = AtOnce()
    read_epoch(Subset(data, [1, 3, 5, 7, 9]))
    assert [len(rows) for rows in data.asked] == [5]  # a last batch of one row joins the one before
    assert {i for rows in data.asked for i in rows} == {1, 3, 5, 7, 9}


def test_subset_seeds_each_example() -> None:
    """torch's Subset offers to read many rows at once for any data: rows that cannot are still seeded one by one."""

    small, large = (
        {
            int(i): row
            for x, _, index in read_epoch(Subset(Augmented(), range(6)), batch_size=size)
            for i, row in zip(index, x, strict=True)
        }
        for size in (2, 6)
    )
    assert all(torch.equal(small[i], large[i]) for i in range(6))


class WithMasks(Dataset[Any]):
    """Images that must not be read for their masks."""

    def __len__(self) -> int:
        return 4

    def __getitem__(self, i: int) -> Any:
        raise AssertionError("an image was read for its mask")

    def target(self, i: int) -> Tensor:
        return torch.full((3, 2), i)


class Normalized(TensorDataset):
    def __getitem__(self, i: Any) -> Any:
        x, y = super().__getitem__(i)
        return x / 255, y + 1


class Shifted(Subset[Any]):
    def __getitem__(self, i: Any) -> Any:
        x, y = super().__getitem__(i)
        return x + 1000, y + 1

    def __getitems__(self, rows: list[int]) -> list[Any]:
        return [self[i] for i in rows]


class Batched(Normalized):
    def __getitems__(self, rows: list[int]) -> list[Any]:
        return [self[i] for i in rows]


class Unaware(Batched):
    """Reads many examples at once, but not as a subclass reads one."""

    def __getitems__(self, rows: list[int]) -> list[Any]:
        return [Normalized.__getitem__(self, i) for i in rows]


class Overriding(Unaware):
    def __getitem__(self, i: Any) -> Any:
        x, y = super().__getitem__(i)
        return x - 3, y


class Forwarding(Dataset[Any]):
    """A wrapper with the attributes of its data set, such as the `__getitems__` of a Subset."""

    def __init__(self, *tensors: Tensor) -> None:
        self.inner = Subset(TensorDataset(*tensors), range(3))

    def __len__(self) -> int:
        return 3

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["inner"], name)

    def __getitem__(self, i: int) -> Any:
        x, y = self.inner[i]
        return x + 5, y


@pytest.mark.parametrize("wrap", [lambda data: data, lambda data: Subset(data, [2, 0, 1])], ids=["bare", "subset"])
@pytest.mark.parametrize(
    "kind",
    [Normalized, lambda *tensors: Shifted(TensorDataset(*tensors), range(3)), Batched, Overriding, Forwarding],
)
def test_subclasses_of_tensor_datasets_are_read_through_getitem(kind: Any, wrap: Any) -> None:
    data = wrap(kind(torch.tensor([[0.0], [51.0], [255.0]]), torch.arange(3)))
    ((x, y, _),) = read_epoch(data, shuffle=False)
    assert torch.equal(x, torch.stack([data[i][0] for i in range(3)]))
    assert torch.equal(y, torch.stack([data[i][1] for i in range(3)]))
    assert torch.equal(load_targets(data), y)


def test_load_targets_reads_targets_only() -> None:
    reduced = load_targets(WithMasks(), reduce=lambda mask: mask.flatten()[0])
    assert reduced.tolist() == [0, 1, 2, 3]
    assert load_targets(Subset(WithMasks(), [3, 1]), reduce=lambda mask: mask.flatten()[0]).tolist() == [3, 1]


SIZES = [(torch.zeros(3, 10 + i), 0) for i in range(4)]


def test_inputs_of_several_sizes_need_single_batches() -> None:
    with pytest.raises(RuntimeError, match="equal size"):
        read_epoch(SIZES)
    assert len(read_epoch(SIZES, batch_size=1)) == 4


def test_class_labels_and_length() -> None:
    assert load_class_labels(AtOnce(3)).tolist() == [0, 1, 2]
    assert check_length(AtOnce(3)) == 3
    with pytest.raises(ArgumentError, match="data"):
        load_class_labels(TensorDataset(torch.zeros(3, 2), torch.tensor([0.5, 1.0, 2.0])))


# -- data of a fit -------------------------------------------------------------------------------------

X, Y = np.arange(12.0).reshape(6, 2)[:, ::-1], np.arange(6)


def pad_collate(examples: list[tuple[Tensor, int]]) -> tuple[Tensor, Tensor]:
    xs, ys = zip(*examples, strict=True)
    return nn.utils.rnn.pad_sequence([x.T for x in xs], batch_first=True), torch.tensor(ys)


@pytest.mark.parametrize("data", [(X, Y), [torch.from_numpy(X.copy()), torch.from_numpy(Y)]], ids=["arrays", "tensors"])
def test_as_dataset_of_pairs(data: Any) -> None:
    dataset = as_dataset(data)
    x, y = dataset[5]
    assert (x.tolist(), int(y), len(dataset)) == ([11.0, 10.0], 5, 6)


def test_as_dataset_of_loader() -> None:
    data = AtOnce()
    assert as_dataset(DataLoader(data, batch_size=3)) is data
    assert as_dataset(DataLoader(data, batch_size=3, shuffle=True)) is data
    padded = as_dataset(DataLoader(SIZES, batch_size=4, collate_fn=pad_collate))
    ((x, y, index),) = read_epoch(padded)
    assert (x.shape, y.tolist()) == ((4, 13, 3), [0] * 4)
    assert x.abs().sum() == 0
    assert sorted(index.tolist()) == [0, 1, 2, 3]


def test_config_takes_the_options_of_a_loader() -> None:
    loader = DataLoader(AtOnce(), batch_size=3, num_workers=2)
    inputs = resolve_fit(nn.Linear(3, 1), loader, TrainingConfig(epochs=2))
    assert (inputs.config.batch_size, inputs.config.num_workers, inputs.config.epochs) == (3, 2, 2)


@pytest.mark.parametrize(
    "data",
    [
        torch.zeros(5, 3),
        3,
        (X, Y[:4]),
        DataLoader(AtOnce(), batch_size=3, drop_last=True),
        DataLoader(AtOnce(), batch_size=None),
        DataLoader(AtOnce(), sampler=torch.utils.data.WeightedRandomSampler([1.0] * 10, 10)),
        DataLoader(AtOnce(), sampler=torch.utils.data.RandomSampler(AtOnce(), replacement=True)),
        DataLoader(AtOnce(), batch_sampler=[[0, 1], [2]]),
        DataLoader(AtOnce(), sampler=torch.utils.data.SequentialSampler(range(3))),
        DataLoader(
            AtOnce(),
            batch_sampler=torch.utils.data.BatchSampler(
                torch.utils.data.WeightedRandomSampler([1.0] * 10, 10), batch_size=2, drop_last=False
            ),
        ),
    ],
    ids=[
        "tensor",
        "number",
        "lengths",
        "drop_last",
        "no batches",
        "weighted",
        "replacement",
        "batch_sampler",
        "subset",
        "own batches",
    ],
)
def test_as_dataset_rejects_other_data(data: Any) -> None:
    with pytest.raises(ArgumentError, match="val_data"):
        as_dataset(data, name="val_data")


class Records(Dataset[Any]):
    """Examples of another form, which a collate function turns into (x, y)."""

    def __len__(self) -> int:
        return 10

    def __getitem__(self, i: int) -> dict[str, Any]:
        return {"value": float(i), "label": i % 2, "id": str(i)}


def collate_records(examples: list[dict[str, Any]]) -> tuple[Tensor, Tensor]:
    values, labels = ([example[key] for example in examples] for key in ("value", "label"))
    return torch.tensor(values)[:, None], torch.tensor(labels)


def test_collate_function_may_make_pairs_of_other_examples() -> None:
    data = as_dataset(DataLoader(Records(), 4, collate_fn=collate_records))
    assert load_targets(data).tolist() == [i % 2 for i in range(10)]
    for _, batch, _ in EpochLoader(data, batch_size=4, seed=0).epoch(0):
        assert torch.equal(batch.x[:, 0], batch.index.float())
        assert torch.equal(batch.y, batch.index % 2)
    with pytest.raises(ArgumentError, match="data"):
        next(EpochLoader(Records(), batch_size=4, seed=0).epoch(0))


def test_tensors_without_rows_are_rejected_by_name() -> None:
    for data in (
        (torch.zeros(()), torch.zeros(())),
        (None, torch.zeros(3)),
        (3.5, torch.zeros(3)),
        (torch.eye(3).to_sparse(), torch.zeros(3)),
    ):
        with pytest.raises(ArgumentError) as raised:
            as_dataset(data, name="val_data")  # type: ignore[arg-type]
        assert raised.value.name == "val_data"
