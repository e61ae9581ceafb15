"""Metrics as torchmetrics `Metric` objects, which reset, go into a `MetricCollection`, and sync over processes.

This module needs torchmetrics and is imported by its path: `from neuboots.metrics.modular import StreamingMetric`. A
metric that is a mean over inputs, such as `pinball` or `crps_samples`, needs no class of its own: use
`torchmetrics.MeanMetric` with `weight=len(batch)`.
"""

from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from typing import Any, get_type_hints

import safetensors.torch
import torch
from torch import Tensor
from torchmetrics import Metric
from torchmetrics.utilities import dim_zero_cat

from neuboots._validation import ArgumentError, check_int
from neuboots.metrics.classification import MetricState, concat_values


class StreamingMetric(Metric):
    """One metric of a `MetricState`: `forward` returns the metric of a batch, `compute` that of all batches.

    Metrics of the same state and options, such as ECE and NLL, share their work in a `MetricCollection`.

    Args:
        state: `MetricState` with `from_batch`, such as `ClassificationMetrics`.
        metric: Name of one of its properties, such as "ece".
        **options: Keyword arguments of `state.from_batch`.

    Raises:
        ArgumentError: If the state has no such property.

    Example:
        >>> from neuboots.metrics import ClassificationMetrics
        >>> metric = StreamingMetric(ClassificationMetrics, "ece", num_bins=10)
        >>> metric.update(torch.tensor([[0.9, 0.1]]), torch.tensor([0]))
        >>> metric.update(torch.tensor([[0.9, 0.1]]), torch.tensor([1]))
        >>> metric.compute()
        tensor(0.4000, dtype=torch.float64)
    """

    # torchmetrics gathers tensors that are declared in advance, whereas the sizes of a MetricState are known from the
    # first batch on. So the state is a list of byte vectors, each of which encodes a MetricState.
    parts: list[Tensor]
    full_state_update = False

    def __init__(self, state: type[Any], metric: str, **options: Any) -> None:
        super().__init__()
        if not isinstance(getattr(state, metric, None), property):
            raise ArgumentError("metric", metric, f"a property of {state.__name__}")
        self.state, self.metric = state, metric
        self.options = {**(state.from_batch.__kwdefaults__ or {}), **options}
        self.add_state("parts", [], dist_reduce_fx="cat")
        self.reset()

    def reset(self) -> None:
        """Forget all batches."""
        super().reset()
        # A process without data must send bytes, not the float32 tensor that torchmetrics makes of an empty list.
        self.parts = [torch.zeros(0, dtype=torch.uint8, device=self.device)]

    def update(self, *batch: Any, **named: Any) -> None:
        """Add a batch, the arguments of `from_batch`."""
        state = self.state.from_batch(*batch, **named, **self.options)
        # A new list: in a collection, metrics of the same state hold one list together.
        parts = [*self.parts, self._encode(state)]
        # A part at most twice as large as the next is added to it: sums stay one part, stored scores become log N.
        while len(parts) > 1 and len(parts[-2]) <= 2 * len(parts[-1]):
            parts[-2:] = [self._encode(self._decode(torch.cat(parts[-2:])))]
        self.parts = parts

    def forward(self, *batch: Any, **named: Any) -> Any:
        """Add a batch and return its metric (torchmetrics' own method would not merge the parts)."""
        self.update(*batch, **named)
        self._forward_cache = self._value(self.state.from_batch(*batch, **named, **self.options))
        return self._forward_cache

    def compute(self) -> Any:
        """Return the metric of all batches; a curve is returned as a dict of its tensors."""
        return self._value(self._decode(dim_zero_cat(self.parts)))

    def _value(self, state: MetricState) -> Any:
        value = getattr(state, self.metric)
        if is_dataclass(value):
            return {part.name: getattr(value, part.name).to(self.device) for part in fields(value)}
        return value.to(self.device) if isinstance(value, Tensor) else value

    def _encode(self, state: MetricState) -> Tensor:
        """The state as bytes: the length, then the tensors and the options in the safetensors format."""
        tensors = {str(k): value.cpu() for k, value in enumerate(_tensors(state))}
        data = safetensors.torch.save(tensors, {"options": repr((self.state.__name__, sorted(self.options.items())))})
        return torch.frombuffer(bytearray(len(data).to_bytes(8) + data), dtype=torch.uint8).to(self.device)

    def _decode(self, encoded: Tensor) -> MetricState:
        """The sum of the states that are encoded one after another."""
        data, states = encoded.cpu().numpy().tobytes(), []
        while data:
            end = 8 + int.from_bytes(data[:8])
            try:
                tensors = safetensors.torch.load(data[8:end])
                states.append(_build(self.state, (tensors[str(k)] for k in range(len(tensors))), self.options))
            except (safetensors.SafetensorError, KeyError, RuntimeError, StopIteration) as error:
                reason = f"bytes that are not ({type(error).__name__})"
                raise ArgumentError("parts", reason, f"encoded states of {self.state.__name__}") from None
            data = data[end:]
        check_int("batches", len(states), minimum=1)
        return sum(states[1:], states[0])


def _tensors(state: MetricState) -> Iterator[Tensor]:
    """The tensors of a state in the order of its fields."""
    for part in fields(state):
        value = getattr(state, part.name)
        if isinstance(value, MetricState):
            yield from _tensors(value)
        elif isinstance(value, Tensor):
            yield value
        elif isinstance(value, tuple):
            yield concat_values(value)


def _build(cls: type[MetricState], tensors: Iterator[Tensor], options: dict[str, Any]) -> MetricState:
    """The state with these tensors and options."""
    hints, values = get_type_hints(cls), list[Any]()
    for part in fields(cls):
        if isinstance(hints[part.name], type) and issubclass(hints[part.name], MetricState):
            values.append(_build(hints[part.name], tensors, options))
        elif part.name in options:
            values.append(options[part.name])
        else:
            values.append(next(tensors) if hints[part.name] is Tensor else (next(tensors),))
    return cls(*values)
