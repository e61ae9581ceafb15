"""Nets that the library has never seen, each with an input and the name of its head; and a predictor by table."""

import os
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import Dataset, IterableDataset, TensorDataset

from neuboots import testing
from neuboots.methods import find_method
from neuboots.prediction import Predictor, SampleStream
from neuboots.training import TrainingConfig


def noise(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


class Composed(nn.Module):
    """A net of named layers, and a function of the net and its inputs."""

    def __init__(self, function: Callable[..., Any], **layers: nn.Module | nn.Parameter) -> None:
        super().__init__()
        self.function = function
        for name, layer in layers.items():
            setattr(self, name, layer)

    def forward(self, *inputs: Tensor) -> Any:
        return self.function(self, *inputs)


class Deep(nn.Module):
    """The head is an attribute two levels down, registered before the body."""

    def __init__(self) -> None:
        super().__init__()
        self.outer = nn.ModuleDict({"inner": nn.ModuleList([nn.Linear(8, 3)])})
        self.body = nn.Linear(4, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.outer["inner"][0](self.body(x).tanh())


class TwoBranches(testing.TwoBranches):
    """Two branches, joined before one head, with 3 outputs."""

    def __init__(self) -> None:
        super().__init__(3)


class BodyAndHead(nn.Module):
    """A linear layer and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.fc = nn.Linear(4, 8), nn.Linear(8, 3)


class Upsampling(nn.Module):
    """A 1×1 convolution, then upsampling to the input's size; `wrap` is what it returns."""

    def __init__(self, dims: int = 2, wrap: str = "tensor") -> None:
        super().__init__()
        conv = (nn.Conv1d, nn.Conv2d, nn.Conv3d)[dims - 1]
        self.mode = ("linear", "bilinear", "trilinear")[dims - 1]
        self.stem = conv(2, 7, 3, 2, 1)
        self.classifier = conv(7, 4, 1)
        self.wrap = wrap

    def forward(self, x: Tensor) -> Any:
        low = self.classifier(F.relu(self.stem(x)))
        out = F.interpolate(low, size=x.shape[2:], mode=self.mode, align_corners=False)
        if self.wrap == "dict":
            return {"out": out, "aux": x}
        return SimpleNamespace(logits=out, loss=None) if self.wrap == "logits" else out


class Squeezed(nn.Module):
    """A regression net that returns (N,)."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(4, 9), nn.Tanh(), nn.Linear(9, 1))

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x).squeeze(-1)


class Tied(nn.Module):
    """The head has the weights of the body."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(4, 4), nn.Linear(4, 4)
        self.head.weight = self.body.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(x).relu())


class Skipped(BodyAndHead):
    """What follows the head uses the input again, works in place, and mixes channels."""

    def forward(self, x: Tensor) -> Tensor:
        z = self.fc(self.body(x).relu())
        z += x[:, :3]
        values, _ = z.max(1, keepdim=True)
        return (z - values).log_softmax(1)


class Written(BodyAndHead):
    """Writes into its head's output in place, also through a view, and into a tensor made from it."""

    def forward(self, x: Tensor) -> Tensor:
        z = self.fc(self.body(x).relu())
        z[:, 0] += 10
        z[z < 0] = 0
        view = z[:, 1]
        view *= 3
        out = torch.zeros_like(z)
        out[:, [0, 2, 1]] = z
        F.relu(out, inplace=True)
        return out


class WrittenThroughAView(BodyAndHead):
    """The head's own output is returned, after a view of it was written into."""

    def forward(self, x: Tensor) -> Tensor:
        z = self.fc(self.body(x).relu())
        view = z[:, 1]
        view *= 3
        return z


class Tokens(nn.Module):
    """Keyword inputs, one output for each token, an object with .logits."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 6)
        self.score = nn.Linear(6, 3)

    def forward(self, input_ids: Tensor, scale: Tensor) -> Any:
        return SimpleNamespace(logits=self.score(self.embed(input_ids) * scale))


class Scaled(BodyAndHead):
    """Uses a buffer in the head's own precision, flat views and an operation in place that keeps its result."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("scale", torch.tensor([1.0, 2.0, 3.0]))

    def forward(self, x: Tensor) -> Tensor:
        z = self.fc(self.body(x).relu()) * self.scale.to(x)
        z = z.view(-1).mul(2).view(len(x), 3) / self.scale.to(z)
        return torch.sigmoid_(z)


class Transposed(Tokens):
    """Puts its outputs on axis 1 by itself; with as many tokens as classes no shape tells the two apart."""

    def forward(self, input_ids: Tensor, scale: Tensor) -> Any:
        logits = self.score(self.embed(input_ids) * scale)
        return SimpleNamespace(logits=-0.5 * logits.transpose(1, 2))


class SoftCapped(Tokens):
    def forward(self, input_ids: Tensor, scale: Tensor) -> Any:
        logits = self.score(self.embed(input_ids) * scale)
        return SimpleNamespace(logits=30 * torch.tanh(logits / 30))


class Normalized(Tokens):
    """Every output depends on all outputs of the head at its token."""

    def forward(self, input_ids: Tensor, scale: Tensor) -> Any:
        return self.score(self.embed(input_ids) * scale).log_softmax(-1)


class WeightNormed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(4, 8)
        self.head = nn.utils.parametrizations.weight_norm(nn.Linear(8, 3, bias=False))

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(x).relu())


@dataclass(frozen=True)
class Case:
    name: str
    make: Any
    x: Any
    head: str
    shape: tuple[int, ...]


def _sequential() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 3))


def _nested() -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Sequential(nn.Linear(4, 8), nn.Sequential(nn.ReLU(), nn.Linear(8, 3))))


def _compiled_body() -> nn.Module:
    body = torch.compile(nn.Sequential(nn.Linear(4, 8), nn.ReLU()), backend="eager")
    return nn.Sequential(body, nn.Linear(8, 3))


_IDS = torch.randint(0, 11, (5, 7), generator=torch.Generator().manual_seed(7))

ZOO = [
    Case("sequential", _sequential, noise(5, 4), "3", (5, 3)),
    Case("nested sequential", _nested, noise(5, 4), "1.1.1", (5, 3)),
    Case("bare linear", lambda: nn.Linear(4, 3), noise(5, 4), "0", (5, 3)),
    Case("deep attribute", Deep, noise(5, 4), "outer.inner.0", (5, 3)),
    Case("two branches", TwoBranches, noise(5, 4), "fc", (5, 3)),
    Case("data parallel", lambda: nn.DataParallel(_sequential()), noise(5, 4), "3", (5, 3)),
    Case("compiled", lambda: torch.compile(_sequential(), backend="eager"), noise(5, 4), "3", (5, 3)),
    Case("conv1d", lambda: Upsampling(1), noise(3, 2, 12), "classifier", (3, 4, 12)),
    Case("conv2d", lambda: Upsampling(2), noise(3, 2, 8, 10), "classifier", (3, 4, 8, 10)),
    Case("conv3d", lambda: Upsampling(3), noise(2, 2, 4, 6, 8), "classifier", (2, 4, 4, 6, 8)),
    Case("dict", lambda: Upsampling(2, "dict"), noise(3, 2, 8, 10), "classifier", (3, 4, 8, 10)),
    Case("logits", lambda: Upsampling(2, "logits"), noise(3, 2, 8, 10), "classifier", (3, 4, 8, 10)),
    Case("squeezed", Squeezed, noise(5, 4), "net.2", (5,)),
    Case("skipped", Skipped, noise(5, 4), "fc", (5, 3)),
    Case("written", Written, noise(5, 4), "fc", (5, 3)),
    Case("written through a view", WrittenThroughAView, noise(5, 4), "fc", (5, 3)),
    Case("compiled body", _compiled_body, noise(5, 4), "1", (5, 3)),
    Case("scaled", Scaled, noise(5, 4), "fc", (5, 3)),
    Case("soft-capped tokens", SoftCapped, {"input_ids": _IDS, "scale": torch.tensor(2.0)}, "score", (5, 3, 7)),
    Case("tokens", Tokens, {"input_ids": _IDS, "scale": torch.tensor(2.0)}, "score", (5, 3, 7)),
    Case("weight normed", WeightNormed, noise(5, 4), "head", (5, 3)),
]


def make(case: Case) -> nn.Module:
    """The case's net with weights governed by a fixed seed, in evaluation mode."""
    with torch.random.fork_rng():
        torch.manual_seed(3)
        return case.make().eval()


class MixedInputs(nn.Module):
    """Two inputs, by position or by name; one of them integers."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.body, self.head = nn.Embedding(5, 3), nn.Linear(4, 3), nn.Linear(3, 2)

    def forward(self, a: Tensor, kind: Tensor) -> Tensor:
        return self.head((self.body(a) + self.embed(kind)).tanh())


class PassPredictor(Predictor):
    """Replicate b is a pass through net b; the requested chunk sizes are recorded."""

    net = None

    def __init__(self, nets: list[nn.Module]) -> None:
        self.nets, self.sizes = nets, list[int]()

    def stream(self, x: Any, num_samples: int, *, seed: int) -> SampleStream:
        def chunks(size: int) -> Iterator[Tensor]:
            self.sizes.append(size)
            for start in range(0, num_samples, size):
                passes = range(start, min(start + size, num_samples))
                yield torch.stack([self.nets[b % len(self.nets)](x) for b in passes])

        return SampleStream(num_samples, 1, chunks)

    def config(self) -> dict[str, Any]:
        return {}


@dataclass(frozen=True)
class Stored(Predictor):
    """Row x of the inputs is the number of a column of stored samples (B, M, C, *)."""

    samples: Tensor
    num_distinct: int | None = None  # type: ignore[assignment]

    @property
    def net(self) -> None:
        return None

    def stream(self, x: Tensor, num_samples: int, *, seed: int) -> SampleStream:
        found = self.samples[:num_samples, x[:, 0].long()]
        return SampleStream(num_samples, 1, lambda size: iter(found.split(size)))

    def config(self) -> dict[str, Any]:
        return {}


def numbered(y: Tensor) -> TensorDataset:
    """Inputs that are their own row numbers."""
    return TensorDataset(torch.arange(float(len(y)))[:, None], y)


def data_root() -> Path | None:
    """The folder of real data sets: NEUBOOTS_DATA, or one beside the repository; None where there is neither."""
    beside = Path(__file__).resolve().parents[2] / "shared" / "data"
    root = Path(os.environ.get("NEUBOOTS_DATA") or beside)
    return root if root.is_dir() else None


QUICK = TrainingConfig(epochs=2, batch_size=16, progress=False)


def quick_options(name: str) -> dict[str, Any]:
    """Options with which a method is quick: two members, or a few steps."""
    info = find_method(name)
    return {"num_members": 2} if info.members else {} if info.needs_net else {"steps": 5}


def class_data(n: int = 50) -> TensorDataset:
    """n examples of 4 features with 3 classes."""
    return TensorDataset(noise(n, 4), torch.arange(n) % 3)


class Augmented(Dataset[Any]):
    """Rows with noise from torch, NumPy and Python, as augmentations draw it."""

    def __init__(self, n: int = 30) -> None:
        self.x, self.targets = noise(n, 4), torch.arange(n) % 3

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, i: int) -> tuple[Tensor, Tensor]:
        drawn = torch.randn(4) + float(np.random.rand()) + random.random()
        return self.x[i] + 0.1 * drawn, self.targets[i]


class TwoInputs(TwoBranches):
    """Takes two inputs."""

    def forward(self, a: Tensor, b: Tensor) -> Tensor:
        return super().forward(a + b)


class ListedLayers(nn.Module):
    """Calls its layers through a plain list beside its attributes."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 8), nn.Linear(8, 3)
        self.steps = [self.first, nn.ReLU(), self.last]

    def forward(self, x: Tensor) -> Tensor:
        for step in self.steps:
            x = step(x)
        return x


class CenteredInTraining(ListedLayers):
    """Subtracts the batch mean, in training only."""

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x)
        return self.last((h - h.mean(0) if self.training else h).relu())


class Stream(IterableDataset[Any]):
    """Rows of inputs and targets, without a length."""

    def __init__(self, x: Tensor, y: Tensor) -> None:
        self.x, self.y = x, y

    def __iter__(self) -> Iterator[Any]:
        return iter(zip(self.x, self.y, strict=True))


class TokenData(Dataset[Any]):
    """Token ids and a scale, as keyword inputs, with one label per token."""

    def __len__(self) -> int:
        return 12

    def __getitem__(self, i: int) -> tuple[dict[str, Tensor], Tensor]:
        ids = torch.randint(0, 11, (7,), generator=torch.Generator().manual_seed(i))
        return {"input_ids": ids, "scale": torch.ones(1, 1)}, ids % 3
