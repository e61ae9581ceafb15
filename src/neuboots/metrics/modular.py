"""Any figure of a tally as a torchmetrics metric: it resets, goes into a `MetricCollection`, and syncs over processes.

This module alone needs torchmetrics, and is imported by name: `from neuboots.metrics.modular import Running`.
"""

import io
import pickle
from collections.abc import Callable
from dataclasses import fields, is_dataclass
from typing import Any

import torch
from torch import Tensor
from torchmetrics import Metric

from neuboots.metrics._base import MetricState


class StreamingMetric(Metric):
    """figure(T₁ + T₂ + …), T = make(batch): `forward` gives the figure of one batch, `compute` that of all.

    >>> from neuboots.metrics import ClassificationMetrics
    >>> metric = StreamingMetric(ClassificationMetrics.of, "error")
    >>> metric.update(torch.tensor([[0.9, 0.1]]), torch.tensor([0]))
    >>> metric.update(torch.tensor([[0.9, 0.1]]), torch.tensor([1]))
    >>> metric.compute()
    tensor(0.5000, dtype=torch.float64)

    Options of a tally are bound first: `Running(functools.partial(Classification.of, num_bins=10), "ece")`. Metrics
    that tally alike, such as ECE and NLL of one `Classification.of`, share the work in a `MetricCollection`.
    """

    # torchmetrics gathers states that are tensors and declared beforehand, whereas what a tally holds is known from
    # the first batch on. So the state is a list of tallies, each written into a tensor of bytes, options included.
    parts: list[Tensor]
    full_state_update = False

    def __init__(self, make: Callable[..., MetricState], figure: str) -> None:
        super().__init__()
        self.make, self.figure = make, figure
        self.add_state("parts", [], dist_reduce_fx="cat")
        self.reset()

    def reset(self) -> None:
        super().reset()
        # A process without data must still send bytes, not the empty float tensor that stands for an empty list.
        self.parts = [torch.zeros(0, dtype=torch.uint8, device=self.device)]

    def update(self, *batch: Any, **named: Any) -> None:
        tally = self.make(*batch, **named)
        if not isinstance(getattr(type(tally), self.figure, None), property):
            raise ValueError(f"got figure={self.figure!r}; expected a property of {type(tally).__name__}")
        # A list of its own: in a collection, metrics that tally alike hold one list together.
        parts = [*self.parts, _packed(tally, self.device)]
        # A part at most twice as large as the next is added to it: sums stay one part, kept scores become log N.
        while len(parts) > 1 and len(parts[-2]) <= 2 * len(parts[-1]):
            parts[-2:] = [_packed(_total(torch.cat(parts[-2:])), self.device)]
        self.parts = parts

    def forward(self, *batch: Any, **named: Any) -> Any:
        """The figure of this batch, which also joins the others.

        torchmetrics' own would keep the parts of all batches, since it joins lists without adding their parts.
        """
        self.update(*batch, **named)
        self._forward_cache = self._shown(self.make(*batch, **named))
        return self._forward_cache

    def compute(self) -> Any:
        parts = self.parts if isinstance(self.parts, list) else [self.parts]  # one tensor, once gathered
        return self._shown(_total(torch.cat(parts)))

    def _shown(self, tally: MetricState) -> Any:
        """The figure on the metric's device; a curve as a dict of its tensors, since torchmetrics takes no other."""
        value = getattr(tally, self.figure)
        if is_dataclass(value):
            return {part.name: getattr(value, part.name).to(self.device) for part in fields(value)}
        return value.to(self.device) if isinstance(value, Tensor) else value


class _Packer(pickle.Pickler):
    """Tensors as arrays: torch's own form names storages by their address, so that equal tallies differ."""

    def reducer_override(self, value: Any) -> Any:
        if isinstance(value, Tensor):
            # NumPy has no bfloat16; float32 holds its values.
            array = (value.float() if value.dtype == torch.bfloat16 else value).cpu().numpy()
            return torch.tensor, (array,)
        return NotImplemented


def _packed(tally: MetricState, device: torch.device) -> Tensor:
    """The tally as bytes: (num_bytes,)."""
    stream = io.BytesIO()
    _Packer(stream, protocol=5).dump(tally)
    return torch.frombuffer(bytearray(stream.getvalue()), dtype=torch.uint8).to(device)


def _total(packed: Tensor) -> MetricState:
    """The sum of tallies written one after another; they come from this metric, or from its twins on other ranks."""
    stream, found = io.BytesIO(packed.cpu().numpy().tobytes()), None
    while stream.tell() < len(packed):
        part = pickle.load(stream)
        found = part if found is None else found + part
    if found is None:
        raise ValueError("got no batch yet; expected at least one update before compute")
    assert isinstance(found, MetricState)
    return found
