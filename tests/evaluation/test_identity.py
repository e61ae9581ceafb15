"""Identity: whatever changes a result changes the text, and nothing else does, in any process."""

import os
import random
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import (
    DataLoader,
    Dataset,
    IterableDataset,
    SequentialSampler,
    Subset,
    SubsetRandomSampler,
    TensorDataset,
)

import neuboots
from neuboots import NeuBoots, TrainingConfig
from neuboots.evaluation._parallel import fingerprint, make_reference_net

GLOBAL = 1.0


def text(value: Any) -> str:
    return fingerprint(value=value)


# -- functions -----------------------------------------------------------------------------------------


def closure(k: Any) -> Callable[[Any], Any]:
    return lambda x: x * k


def nested(k: int) -> Callable[[Any], Any]:
    return [lambda x: [y + 1 for y in x], lambda x: [y + 2 for y in x]][k]


def helper_of(k: int) -> Callable[[Any], Any]:
    def one(x: Any) -> Any:
        return x + 1

    def two(x: Any) -> Any:
        return x + 2

    two.__qualname__ = one.__qualname__
    inner = (one, two)[k]
    return lambda x: inner(x)


@pytest.mark.parametrize(
    ("a", "b"),
    [
        (lambda x: x + 1, lambda x: x + 2),
        (lambda x: x.sum(), lambda x: x.mean()),
        (lambda x: x in {"a", "b"}, lambda x: x in {"a", "c"}),
        (lambda x, k=1: x * k, lambda x, k=2: x * k),
        (lambda x, *, k=1: x * k, lambda x, *, k=2: x * k),
        (closure(1), closure(2)),
        (closure(torch.zeros(5000)), closure(torch.zeros(5000).index_fill(0, torch.tensor([2500]), 1.0))),
        (closure(np.zeros(5000)), closure(np.eye(1, 5000, 2500)[0])),
        (closure({"a": [1, 2]}), closure({"a": [1, 3]})),
        (closure(closure(1)), closure(closure(2))),
        (nested(0), nested(1)),
        (helper_of(0), helper_of(1)),
        (partial(closure, k=1), partial(closure, k=2)),
        (partial(torch.optim.SGD, lr=0.1), partial(torch.optim.SGD, lr=0.2)),
        (partial(torch.optim.SGD, lr=0.1), partial(torch.optim.Adam, lr=0.1)),
        (torch.sin, torch.cos),
        (nn.functional.relu, nn.functional.gelu),
        ([1, 2].count, (1, 2).count),
    ],
)
def test_other_functions_have_another_text(a: Any, b: Any) -> None:
    assert text(a) == text(a)
    assert text(a) != text(b)


@pytest.mark.parametrize("make", [closure, nested, helper_of])
def test_a_function_made_again_has_the_same_text(make: Any) -> None:
    assert make(1) is not make(1)
    assert text(make(1)) == text(make(1))


def test_global_variables_count_and_attributes_of_their_names_do_not(monkeypatch: pytest.MonkeyPatch) -> None:
    refers, does_not = (lambda x: x * GLOBAL), (lambda x: x.GLOBAL)
    before = text(refers), text(does_not)
    monkeypatch.setitem(globals(), "GLOBAL", 2.0)
    assert text(refers) != before[0]
    assert text(does_not) == before[1]


def test_what_contains_itself_comes_to_an_end() -> None:
    def factorial(k: int) -> int:
        return k * factorial(k - 1) if k else 1

    class Inner(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x)

    ring: list[Any] = [1]
    ring.append(ring)
    for value in (factorial, Inner, ring):
        assert text(value) == text(value)
    assert text(ring) == "value=(1, itself)"


# -- values --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("a", "b"),
    [
        (torch.zeros(3), torch.zeros(3).double()),
        (torch.zeros(2, 3), torch.zeros(3, 2)),
        (torch.zeros(3), torch.tensor([0.0, 0.0, 1e-30])),
        (torch.zeros(3, dtype=torch.bfloat16), torch.ones(3, dtype=torch.bfloat16)),
        (torch.tensor(True), torch.tensor(False)),
        (torch.zeros(2, dtype=torch.complex64), torch.ones(2, dtype=torch.complex64)),
        (torch.eye(3), torch.eye(3).to_sparse() * 2),
        (np.array([1, None], dtype=object), np.array([2, None], dtype=object)),
        (np.array(["a", "b"]), np.array(["a", "c"])),
        ({"a": 1}, {"a": 2}),
        ({1, 2}, {1, 3}),
        (list(range(1000)), [*range(500), -1, *range(501, 1000)]),
        ("a" * 1000, "a" * 999 + "b"),
        (nn.CrossEntropyLoss(), nn.CrossEntropyLoss(ignore_index=9)),
        (NeuBoots(), NeuBoots(loss=nn.CrossEntropyLoss(label_smoothing=0.1))),
        (neuboots.Plain(lambda z, y: z), neuboots.Plain(lambda z, y: -z)),
    ],
)
def test_other_values_have_another_text(a: Any, b: Any) -> None:
    assert text(a) == text(a)
    assert text(a) != text(b)


def test_equal_values_have_the_same_text() -> None:
    pairs: list[tuple[Any, Any]] = [
        (torch.arange(6).reshape(2, 3).T, torch.tensor([[0, 3], [1, 4], [2, 5]])),  # another order in memory
        (torch.zeros(3), nn.Parameter(torch.zeros(3)).detach()),
        ({"a": 1, "b": 2}, {"b": 2, "a": 1}),
        ({f"{k}" for k in range(50)}, {f"{k}" for k in reversed(range(50))}),
        (np.int64(3), 3),
        (NeuBoots(), NeuBoots()),
    ]
    for a, b in pairs:
        assert text(a) == text(b)
    assert fingerprint(a=1, b=2) != fingerprint(a=2, b=1)


def test_a_text_is_short_and_can_be_read() -> None:
    found = fingerprint(method=NeuBoots(), weights=torch.zeros(10_000), numbers=list(range(10_000)), seed=3)
    assert len(found) < 600
    assert found.startswith("method=neuboots.methods.neuboots.NeuBoots(")
    assert "weights=float32(10000,)#" in found
    assert found.endswith("; seed=3")


class Scale:
    """No dataclass, no repr."""

    power = 1

    def __init__(self, k: float) -> None:
        self.k = k

    def __call__(self, x: Any) -> Any:
        return x * self.k


class Told(Scale):
    def __repr__(self) -> str:
        return f"Told({self.k}) at 0x{id(self):x}"


class Other(Scale):
    @property
    def more(self) -> int:
        return 1

    @cached_property
    def most(self) -> int:
        return 1

    @staticmethod
    def least() -> int:
        return 1


def test_objects_are_known_by_their_class_and_state(monkeypatch: pytest.MonkeyPatch) -> None:
    for kind in (Scale, Told):
        assert text(kind(1)) == text(kind(1)) != text(kind(2))
    assert text(Scale(1).__call__) == text(Scale(1).__call__) != text(Scale(2).__call__)
    assert text(Scale(1)) != text(Other(1))
    for kind, name, value in (
        (Scale, "__call__", lambda self, x: x),
        (Scale, "power", 2),
        (Other, "more", property(lambda self: 2)),
        (Other, "least", staticmethod(lambda: 2)),
    ):
        before = text(Other(1))
        with monkeypatch.context() as changed:
            changed.setattr(kind, name, value)
            assert text(Other(1)) != before
        assert text(Other(1)) == before


@dataclass(frozen=True)
class Counted:
    rate: float
    calls: list[int] = field(default_factory=list, compare=False)


def test_fields_that_do_not_compare_do_not_count() -> None:
    assert text(Counted(1.0)) == text(Counted(1.0, [1, 2])) != text(Counted(2.0))


def test_of_a_recipe_only_what_changes_results_counts() -> None:
    config = TrainingConfig(epochs=3)
    same = [
        {"progress": False},
        {"num_workers": 3},
        {"folder": Path("here")},
        {"on_epoch": print},
        {"checkpoint_steps": 5},
    ]
    for change in same:
        assert text(replace(config, **change)) == text(config)
    for change in ({"epochs": 4}, {"seed": 1}, {"schedule": neuboots.constant}, {"precision": "bf16-mixed"}):
        assert text(replace(config, **change)) != text(config)


# -- nets ----------------------------------------------------------------------------------------------


def net(rate: float = 0.1, activation: type[nn.Module] = nn.ReLU, seed: int = 0, hidden: int = 4) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(2, hidden), activation(), nn.Dropout(rate), nn.Linear(hidden, 2), nn.BatchNorm1d(2))


def test_nets_are_known_by_their_options_and_weights() -> None:
    for change in ({"rate": 0.2}, {"activation": nn.GELU}, {"seed": 1}, {"hidden": 5}):
        assert text(net()) == text(net()) != text(net(**change))
    other = net()
    other[4].running_mean += 1
    assert text(net()) != text(other)
    losses = [nn.CrossEntropyLoss(reduction="none", label_smoothing=s) for s in (0.0, 0.1)]  # their repr does not say
    assert text(losses[0]) != text(losses[1])
    assert text(nn.LazyLinear(3)) == text(nn.LazyLinear(3))


def test_nets_of_one_name_are_known_by_their_code() -> None:
    def made(k: int) -> nn.Module:
        class Net(nn.Module):
            forward = (lambda self, x: x, lambda self, x: -x)[k]

        return Net()

    assert text(made(0)) == text(made(0)) != text(made(1))


def test_a_net_is_known_by_what_make_net_gives_under_the_seed() -> None:
    state = torch.get_rng_state()
    texts = [text(make_reference_net(lambda k=k: nn.Linear(2, k), 0)) for k in (3, 3, 4)]
    assert texts[0] == texts[1] != texts[2]
    assert text(make_reference_net(lambda: nn.Linear(2, 3), 1)) != texts[0]
    assert torch.equal(torch.get_rng_state(), state)
    assert make_reference_net(None, 0) is None
    shared = nn.Linear(2, 2)
    for make in (lambda: shared, lambda: nn.Sequential(nn.Linear(2, 2), shared)):
        with pytest.raises(ValueError, match="make_net.. gave the same weights twice, so that each fit would go on"):
            make_reference_net(make, 0)


# -- data ----------------------------------------------------------------------------------------------


class Lazy(Dataset[Any]):
    """Rows that are read one by one, and augmented; it remembers which."""

    def __init__(self, n: int = 1000, shift: float = 0.0, augmented: bool = False) -> None:
        self.n, self.shift, self.augmented_train, self.read = n, shift, augmented, set[int]()

    def __len__(self) -> int:
        return self.n

    def __getitem__(self, i: int) -> tuple[Tensor, int]:
        self.read.add(i)
        x = torch.full((2,), float(i)) + self.shift
        return (x + torch.rand(2) + random.random() + np.random.rand() if self.augmented_train else x), i % 3


def test_rows_that_are_read_one_by_one_are_read_here_and_there() -> None:
    data = Lazy()
    assert text(data) == text(Lazy())
    assert {0, 999} < data.read
    assert 10 <= len(data.read) <= 20
    assert max(b - a for a, b in zip(sorted(data.read), sorted(data.read)[1:], strict=False)) < 100
    for other in (Lazy(n=999), Lazy(shift=1e-3)):
        assert text(other) != text(data)
    assert text(Lazy(n=1)) == text(Lazy(n=1)) != text(Lazy(n=2))


def test_augmentation_is_that_of_one_seed_and_the_random_states_are_left_alone() -> None:
    torch.manual_seed(1)
    states = torch.get_rng_state(), random.getstate(), np.random.get_state()[2]
    first = text(Lazy(augmented=True))
    assert torch.equal(states[0], torch.get_rng_state())
    assert states[1:] == (random.getstate(), np.random.get_state()[2])
    torch.manual_seed(2)
    random.seed(2)
    assert text(Lazy(augmented=True)) == first


def test_tensors_in_memory_count_to_the_last_row() -> None:
    x, y = torch.arange(10_000.0).reshape(5000, 2), torch.arange(5000) % 3
    data = TensorDataset(x, y)
    changed_x, changed_y = x.clone(), y.clone()
    changed_x[1234, 1] += 1
    changed_y[1234] += 1
    others = [TensorDataset(changed_x, y), TensorDataset(x, changed_y), TensorDataset(x[:-1], y[:-1])]
    for other in others:
        assert text(other) != text(data)
    few = list(range(1200, 1300))
    assert text(Subset(data, few)) == text(TensorDataset(x[few], y[few]))
    assert text(Subset(data, few)) == text(Subset(Subset(data, [0, *few]), range(1, 101)))
    assert text(Subset(data, few)) != text(Subset(data, few[::-1]))
    for other in others[:2]:
        assert text(Subset(data, few)) != text(Subset(other, few))


class Labelled(Lazy):
    """All targets in memory, as torchvision has them."""

    def __init__(self, targets: Any) -> None:
        super().__init__(len(targets))
        self.targets = targets


@pytest.mark.parametrize("kind", [list, torch.tensor, np.array, lambda y: [str(c) for c in y]])
def test_targets_in_memory_all_count(kind: Any) -> None:
    y = [i % 3 for i in range(1000)]
    other = [*y[:777], 2 - y[777], *y[778:]]
    assert text(Labelled(kind(y))) == text(Labelled(kind(y)))
    assert text(Labelled(kind(y))) != text(Labelled(kind(other)))
    every = list(range(1000))
    assert text(Subset(Labelled(kind(y)), every)) != text(Subset(Labelled(kind(other)), every))


def test_the_rows_of_a_subset_count() -> None:
    data = Lazy()
    rows = [*range(100, 200), 300]
    assert text(Subset(data, rows)) == text(Subset(Lazy(), np.array(rows)))  # type: ignore[arg-type]
    assert data.read <= set(rows)
    assert text(Subset(data, rows)) != text(Subset(data, [*range(100, 200), 301]))
    swapped = [*rows[:30], rows[31], rows[30], *rows[32:]]
    assert text(Subset(data, rows)) != text(Subset(data, swapped))


class Duck:
    """A data set that is none by name."""

    def __init__(self, k: int) -> None:
        self._k = k

    def __repr__(self) -> str:
        return "a duck"

    def __len__(self) -> int:
        return 5

    def __getitem__(self, i: int) -> tuple[int, int]:
        return i, self._k


class Endless(IterableDataset[Any]):
    def __init__(self, k: int = 0) -> None:
        self.k = k

    def __iter__(self) -> Iterator[Any]:
        start = self.k + torch.rand(1)

        def rows() -> Iterator[Any]:
            while True:
                yield start + torch.rand(1), 0

        return rows()


def test_loaders_streams_and_lists_of_batches() -> None:
    assert text(Duck(1)) == text(Duck(1)) != text(Duck(2))
    state = torch.get_rng_state()
    assert text(Endless()) == text(Endless()) != text(Endless(1))
    assert torch.equal(torch.get_rng_state(), state)
    batches = [(torch.zeros(3, 2), torch.zeros(3)), (torch.ones(3, 2), torch.zeros(3))]
    assert text(batches) != text([batches[0], (2 * batches[1][0], batches[1][1])])
    data = TensorDataset(torch.arange(100.0)[:, None], torch.zeros(100))
    loader = DataLoader(data, batch_size=10)
    assert text(loader) == text(DataLoader(data, batch_size=30, num_workers=0))
    others = [
        DataLoader(TensorDataset(torch.arange(100.0)[:, None], torch.ones(100)), batch_size=10),
        DataLoader(data, batch_size=30, drop_last=True),
        DataLoader(data, batch_size=10, sampler=SubsetRandomSampler(range(50))),
        DataLoader(data, batch_size=10, sampler=SubsetRandomSampler(range(51))),
        DataLoader(data, batch_size=10, collate_fn=lambda rows: torch.utils.data.default_collate(rows[:5])),
        DataLoader(data, batch_sampler=[list(range(10))]),
    ]
    texts = [text(loader), *map(text, others)]
    assert len(set(texts)) == len(texts)
    assert text(DataLoader(data, sampler=SequentialSampler(data))) == text(loader)


# -- other processes -----------------------------------------------------------------------------------

PROGRAM = """
import functools, random
from dataclasses import dataclass
import numpy as np
import torch
from torch import nn
from torch.utils.data import Dataset, DataLoader, SubsetRandomSampler
import neuboots
from neuboots.evaluation._parallel import identity_of, net_of

names = {f"n{k}" for k in range(20)}

@dataclass(frozen=True)
class Method:
    loss: object
    options: tuple = ("a", frozenset({"x", "y", "z"}))
    def fit(self, make_net, data, recipe):
        return neuboots.Deterministic(self.loss).fit(make_net, data, recipe)

class Rows(Dataset):
    targets = [0, 1] * 10
    def __len__(self):
        return 20
    def __getitem__(self, i):
        return torch.rand(3) + random.random() + np.random.rand(), i % 2

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer, self.rate, self.score = nn.Linear(3, 2), 0.5, lambda x: x
    def forward(self, x):
        return self.layer(x)

def outer(k):
    def inner(figures, *, among={"p", "q", "r"}):
        return figures.std if k in {"a", "b", "c"} else figures.mean if str(k) in names | among else None
    return inner

class Object:
    def __init__(self):
        self.children, self.rows = {"u", "v", "w"}, Rows()

print(identity_of(
    method=Method(lambda z, y: z), ready=neuboots.NeuBoots(), net=net_of(Net, 0), strategy=outer(Object()),
    partial=functools.partial(outer, k=[torch.arange(5000.0)]), rows=Rows(), loader=DataLoader(Rows(), 4, shuffle=True),
    some=DataLoader(Rows(), 4, sampler=SubsetRandomSampler([1, 2])), recipe=neuboots.TrainingConfig(on_epoch=print),
    bound=Object().__init__, kinds=(Net, Method, Object, nn.Linear, torch.float32, np.int64),
))
"""


def test_the_text_is_the_same_in_another_process(tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    texts = []
    for number, folder in (("1", tmp_path), ("2", tmp_path / "elsewhere")):
        folder.mkdir(exist_ok=True)
        run = subprocess.run(
            [sys.executable, str(program)],
            env={**os.environ, "PYTHONHASHSEED": number},
            capture_output=True,
            text=True,
            cwd=folder,
        )
        assert run.returncode == 0, run.stderr
        texts.append(run.stdout)
    assert texts[0] == texts[1]
    assert "0x" not in texts[0]
