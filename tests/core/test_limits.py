"""Sizes that no machine can serve are refused with an estimate, before anything large is allocated."""

import sys
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from neuboots import _validation, prediction
from neuboots._validation import ArgumentError, available_memory, check_memory
from neuboots.methods import DeterministicPredictor, InfluenceBootstrap
from neuboots.prediction import SampleStream, draw_member_order, num_bytes, stream_members, summarize_stream
from neuboots.weights import Dirichlet


def make_predictor() -> DeterministicPredictor:
    return DeterministicPredictor(nn.Linear(2, 3))


def make_stream(num_samples: int) -> SampleStream:
    """Replicate b is b everywhere, (1, 2)."""

    def chunks(size: int) -> Iterator[Tensor]:
        for start in range(0, num_samples, size):
            numbers = torch.arange(start, min(start + size, num_samples))
            yield numbers[:, None, None].expand(-1, 1, 2).float()

    return SampleStream(num_samples, 8, chunks)


def test_available_memory_is_at_most_the_machine_s() -> None:
    assert 0 < available_memory() < 1 << 60


@pytest.mark.parametrize("limit", [0, 10**9])
def test_memory_is_compared_with_what_is_available(limit: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_validation, "available_memory", lambda: limit)
    check_memory("n", 1, limit, hint="")
    with pytest.raises(ArgumentError, match=r"2\.0 GB") as raised:
        check_memory("n", 10, 2 * 10**9, hint="use fewer")
    assert (raised.value.name, raised.value.value, raised.value.hint) == ("n", 10, "use fewer")


@pytest.mark.parametrize("num_samples", [10**13, 10**20])
def test_samples_that_do_not_fit_into_memory_are_refused(num_samples: int) -> None:
    with pytest.raises(ArgumentError, match="GB") as raised:
        make_predictor().predict(torch.zeros(4, 2), num_samples)
    assert (raised.value.name, raised.value.value) == ("num_samples", num_samples)


@pytest.mark.parametrize("num_samples", [2**24 + 1, 2**31, 10**20])
def test_summaries_of_too_many_replicates_are_refused(num_samples: int) -> None:
    with pytest.raises(ArgumentError) as raised:
        make_predictor().summarize(torch.zeros(4, 2), num_samples)
    assert raised.value.name == "num_samples"


def test_summaries_of_too_many_values_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prediction, "MAX_SUMMARIZED_VALUES", 12 * 100)
    x = torch.zeros(4, 2)
    make_predictor().summarize(x, 100)
    with pytest.raises(ArgumentError) as raised:
        make_predictor().summarize(x, 101)
    assert raised.value.name == "num_samples"
    with pytest.raises(ArgumentError):  # a second pass
        make_predictor().summarize(x, 100, quantiles=(0.5,))


def test_members_are_drawn_chunk_by_chunk(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing of size B is drawn, and the order does not depend on the chunks."""
    drawn = []
    original = prediction.derive_keys
    monkeypatch.setattr(prediction, "derive_keys", lambda ids, *name: drawn.append(len(ids)) or original(ids, *name))
    stream = stream_members(10**20, 3, lambda numbers: numbers[:, None, None].float(), seed=5)
    chunks = stream.chunks(7)
    found = torch.cat([next(chunks) for _ in range(10)]).flatten()
    assert max(drawn) <= 4
    assert found.tolist() == draw_member_order(3, 70, seed=5).tolist()
    assert draw_member_order(3, 70, seed=5, start=31).tolist() == found[31:].tolist()


class _Terminal:
    """A standard error stream that is a terminal."""

    def __init__(self) -> None:
        self.text = ""

    def write(self, text: str) -> None:
        self.text += text

    def flush(self) -> None:
        pass

    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize("seconds", [0.0, 1e9])
def test_long_work_shows_its_progress(seconds: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a terminal only, and only after some seconds."""
    terminal, clock = _Terminal(), iter(range(1, 10**6))
    monkeypatch.setattr(sys, "stderr", terminal)
    monkeypatch.setattr(prediction, "_SILENT_SECONDS", seconds)
    monkeypatch.setattr(prediction, "_SMALL_BYTES", 1)
    monkeypatch.setattr(prediction.time, "monotonic", lambda: 2.0 * next(clock))
    summary = summarize_stream(make_stream(20), (0.5,))
    assert summary.mean.tolist() == [[9.5, 9.5]]
    assert ("5 of 20" in terminal.text) == (seconds == 0.0)
    assert num_bytes(summary.mean) == 8


@pytest.mark.parametrize("layers", [1, "all"])
def test_weights_of_the_data_are_drawn_in_bounded_memory(layers: Any) -> None:
    """A single input of one output, and many weights for each replicate."""
    drawn = []

    class Recorded(Dirichlet):
        def sample(self, keys: Tensor, size: int) -> Tensor:
            drawn.append(len(keys) * size)
            return torch.ones(len(keys), size, dtype=torch.float64)

    n, net = 1000, nn.Linear(1, 1)
    x = torch.linspace(-1, 1, n)[:, None]
    method = InfluenceBootstrap(nn.MSELoss(), layers=layers, weight_distribution=Recorded(), num_blocks=n)
    if layers == "all":
        method = replace(method, max_kernel_rows=n // 10, num_blocks=n // 10)
    predictor = method.from_trained(net, TensorDataset(x, x))
    predictor.summarize(x[:1], 9_000)
    assert sum(drawn) >= 9_000 * (method.num_blocks or 0)
    assert 8 * max(drawn) <= 1 << 19
    drawn.clear()
    predictor.predict(x[:1], 9_000)
    assert 8 * max(drawn) <= 1 << 26
