"""The contract of every method: a `Predictor` gives B sampled outputs at x."""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any, Protocol, final

import torch
from torch import Tensor, nn

from neuboots.prediction.figures import Prediction, Summary
from neuboots.prediction.streams import Stream, gather
from neuboots.prediction.sums import accumulate


class Predictor(ABC):
    """Gives B sampled outputs at x. A replicate is named by (seed, b) and is one function of x:
    the same seed gives the same B functions on any batch, order, device and process.

    `save` writes the state of `module` and describes the architecture of `net`; a class method
    `restore(config, net)` makes of that description a predictor whose module the saved tensors fit.
    """

    @property
    @abstractmethod
    def net(self) -> nn.Module | None:
        """The net as its maker built it, before any surgery; None for a method that has none."""

    @property
    def module(self) -> nn.Module:
        """All that was learned: whatever prediction needs is in its state."""
        assert self.net is not None, "a predictor without a net has a module of its own"
        return self.net

    @property
    def num_distinct(self) -> int | None:
        """K, where the replicates are K members and no more; None where there are infinitely many."""
        return None

    @abstractmethod
    def stream(self, x: Any, num_samples: int, *, seed: int) -> Stream:
        """The B replicates at x."""

    @abstractmethod
    def config(self) -> dict[str, Any]:
        """What `save` writes beside the tensors: the method's name and options, as JSON."""

    @classmethod
    def restore(cls, config: dict[str, Any], net: nn.Module) -> "Predictor":
        """The predictor that `config` describes around a net of the right architecture; `load` fills in the tensors."""
        raise ValueError(f"{cls.__name__} cannot be loaded; expected a class method restore(config, net)")

    def state(self) -> dict[str, Tensor]:
        """The tensors that `save` writes."""
        return self.module.state_dict()

    @final
    def predict(self, x: Any, num_samples: int = 100, *, seed: int = 0) -> Prediction:
        """B replicates in one tensor, (B, N, C, *). Gradients are kept only if x itself asks for them."""
        with torch.set_grad_enabled(torch.is_grad_enabled() and _wants_grad(x)):
            return gather(self._checked(x, num_samples, seed))

    @final
    def summarize(self, x: Any, num_samples: int = 100, *, seed: int = 0, quantiles: tuple[float, ...] = ()) -> Summary:
        """The figures of B replicates, in memory that does not grow with B."""
        with torch.no_grad():
            return accumulate(self._checked(x, num_samples, seed), quantiles)

    def _checked(self, x: Any, num_samples: int, seed: int) -> Stream:
        if not isinstance(num_samples, int) or num_samples < 1:
            raise ValueError(f"got B = {num_samples!r} replicates; expected num_samples ≥ 1, a whole number")
        if not isinstance(seed, int):
            raise ValueError(f"got seed={seed!r}; expected a whole number")
        check_inputs(x)
        return self.stream(x, num_samples, seed=seed)


class Method(Protocol):
    """A frozen dataclass of options that turns a net and data into a Predictor."""

    def fit(self, make_net: Any, data: Any, recipe: Any) -> Predictor: ...


def check_inputs(x: Any) -> None:
    """Refuse what is not tensors, and NaN and infinite values: they would come out as silent NaNs."""
    tensors = _tensors(x)
    if not tensors:
        raise ValueError(
            f"got inputs of type {type(x).__name__}; expected a tensor (torch.as_tensor(x) makes one of an array), "
            "a dict of tensors, or a tuple of them"
        )
    for tensor in tensors:
        if tensor.dtype == torch.uint8:
            raise ValueError("got uint8 inputs; expected floating-point numbers: use x.float() / 255")
        # A sum of finite numbers may overflow, but a finite sum has no NaN and no infinity in it: one cheap read.
        if tensor.is_floating_point() and not torch.isfinite(tensor.detach().sum()):
            bad = int((~torch.isfinite(tensor)).sum())
            if bad:
                raise ValueError(
                    f"the input has {bad} NaN or infinite value(s) of {tensor.numel()}; expected finite "
                    "numbers: fill or drop them before predicting"
                )


def _tensors(x: Any) -> list[Tensor]:
    parts = x.values() if isinstance(x, Mapping) else x if isinstance(x, tuple | list) else [x]
    return [part for part in parts if isinstance(part, Tensor)]


def _wants_grad(x: Any) -> bool:
    return any(tensor.requires_grad for tensor in _tensors(x))
