"""Features of a trained net, and Gaussians around their class means.

    μ_c = mean of φ over class c,   Σ = 1/n Σᵢ (φᵢ − μ_{yᵢ})(φᵢ − μ_{yᵢ})ᵀ,   d²(φ) = min_c (φ − μ_c)ᵀ Σ⁺ (φ − μ_c)

φ is what the head reads, or the means over the pixels of each channel of a layer's output. Sums are gathered in double
precision in one pass over the training data, around the mean of the first batch. Σ⁺ is the pseudo-inverse: features
that never change in training, as dead units do, have no distance to tell.
"""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from neuboots.prediction import Predictor, check_inputs
from neuboots.surgery import Split, eval_mode, main_output, split_head, to_net, uncompiled, unwrap
from neuboots.tasks.common import part_of
from neuboots.tasks.inputs import rows_in
from neuboots.tasks.ood.detector import precise

_ROUNDING = 8  # eps of the features' precision, of their size: what varies less than that, varies by rounding
_FEW = 8  # inputs with which a net is tried

# -- which net, which layers ---------------------------------------------------------------------------


def trained_net(predictor: Predictor, net: nn.Module | None, head: str | None, x: Any) -> Split:
    """The net whose features are meant, split at its head: `net`, or the predictor's own if its replicates are made of
    the features that this net gives at x; else a sentence."""
    found = predictor.net if net is None else unwrap(net)
    if found is None:
        raise ValueError(
            f"the {type(predictor).__name__} has no net; expected one, whose features are compared: take a detector of "
            "its predictions, such as MaxSoftmax or Spread"
        )
    if any(tensor.is_meta for tensor in (*found.parameters(), *found.buffers())):
        raise ValueError(_other_net(predictor, "keeps only the architecture of the net it was given"))
    few = part_of(x, slice(0, _FEW))
    split = split_head(found, head, example=to_net(found, few))
    if net is None and not _uses(predictor, split, few):
        raise ValueError(_other_net(predictor, "predicts with other weights than those of its net"))
    return split


def _other_net(predictor: Predictor, why: str) -> str:
    return (
        f"the {type(predictor).__name__} {why}; expected a trained net, whose features are compared: give one with "
        "net=…, such as one member of an ensemble (predictor.nets[0], predictor.export(0)), the trained module "
        "(predictor.module) of MC dropout, or a plain net"
    )


def _uses(predictor: Predictor, split: Split, x: Any) -> bool:
    """Whether the head of the net, while the predictor predicts, reads the features that the net gives by itself."""
    read: list[Tensor] = []
    hook = split.head.register_forward_pre_hook(lambda head, args: read.append(args[0].detach().clone()))
    try:
        predictor.predict(x, predictor.num_distinct or 1)
    finally:
        hook.remove()
    with torch.no_grad(), eval_mode(split.net):
        phi = split.features(to_net(split.net, x))
    return any(part.shape == phi.shape and torch.allclose(part, phi, rtol=1e-4, atol=1e-5) for part in read)


def features_of(split: Split, layers: tuple[str, ...], x: Any) -> list[Tensor]:
    """The features of these layers at x, and then those that the head reads: (N, D_l) each, from one pass."""
    check_inputs(x)
    net = split.net
    seen: dict[str, list[Tensor]] = {name: [] for name in layers}
    axis = 1 if any(isinstance(module, nn.Conv1d) for module in net.modules()) else -1  # of (N, T, D) or (N, D, T)

    def keep(name: str, output: Any) -> None:
        seen[name].append(_channels(main_output(output), axis))

    with eval_mode(net), uncompiled(net), _watching(net, layers, keep):
        phi = split.features(to_net(net, x))
    for name, found in seen.items():
        if len(found) != 1:
            raise ValueError(
                f"the layer {name!r} gives {len(found)} outputs before the head is reached; expected exactly one: name "
                "other layers (layers=…)"
            )
    features = {name: found[0] for name, found in seen.items()}
    features[split.name] = _channels(phi, split.axis, of_head=True)
    for name, part in features.items():
        if len(part) != rows_in(x):
            raise ValueError(
                f"the features at {name!r} have {len(part)} rows for {rows_in(x)} inputs; expected the batch on the "
                "first axis: name other layers (layers=…, head=…)"
            )
    return list(features.values())


@contextmanager
def _watching(net: nn.Module, names: Iterable[str], note: Callable[[str, Any], None]) -> Iterator[None]:
    """note(name, output) whenever one of these layers is done; the hooks go, whatever happens."""
    hooks = []
    try:
        for name in names:
            layer = net.get_submodule(name)
            hooks.append(layer.register_forward_hook(lambda module, args, output, name=name: note(name, output)))
        yield
    finally:
        for hook in hooks:
            hook.remove()


def _channels(output: Tensor, axis: int, *, of_head: bool = False) -> Tensor:
    """The mean over all but the rows and the channels: (N, D). Images have their channels on axis 1; of (N, T, D) it is
    said which. A layer may write into its input later, so nothing is kept that is not a copy."""
    if output.ndim > 3 and not of_head:
        axis = 1
    return output.movedim(axis, -1).flatten(1, -2).mean(1) if output.ndim > 2 else output.clone()


def stages_of(split: Split, x: Any) -> tuple[str, ...]:
    """The net's stages: of its blocks in order, the last that gives outputs of one shape before the shape changes.

    Blocks are the net's children, those of nn.Sequential and of whatever holds the head among them. Stages whose
    features are those of the head are left out.
    """
    net = split.net
    x = to_net(net, part_of(x, slice(0, _FEW)))
    calls: list[tuple[str, torch.Size]] = []

    def note(name: str, output: Any) -> None:
        if isinstance(output, Tensor) and output.shape[:1] == (rows_in(x),):
            calls.append((name, output.shape[1:]))

    with torch.no_grad(), eval_mode(net), uncompiled(net), _watching(net, _blocks(net, "", split.head), note):
        split.features(x)
    names = [name for name, _ in calls]
    last = [
        name
        for k, (name, shape) in enumerate(calls)
        if names.count(name) == 1 and (k + 1 == len(calls) or calls[k + 1][1] != shape)
    ]
    if not last:
        return ()
    with torch.no_grad():
        *found, phi = features_of(split, tuple(last), x)
    kept = zip(last, found, strict=True)
    return tuple(name for name, part in kept if part.shape != phi.shape or not torch.allclose(part, phi, atol=1e-5))


def _blocks(module: nn.Module, prefix: str, head: nn.Module) -> Iterator[str]:
    for key, child in module.named_children():
        name = f"{prefix}.{key}" if prefix else key
        if child is head:
            continue
        if isinstance(child, nn.Sequential | nn.ModuleList) or any(part is head for part in child.modules()):
            yield from _blocks(child, name, head)
        else:
            yield name


# -- Gaussians -----------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class ClassGaussians:
    """One Gaussian for each class seen, all of one covariance."""

    means: Tensor  # μ: (C, D), of the classes that have rows
    covariance: Tensor  # Σ: (D, D)
    whitening: Tensor  # W with W Wᵀ = Σ⁺: (D, R)

    def distances(self, features: Tensor) -> Tensor:
        """min_c d²: (N, D) → (N,)."""
        white, centres = precise(features) @ self.whitening, self.means @ self.whitening
        # not through a product: the difference of two large numbers would lose the small distances
        apart = torch.cdist(white, centres, compute_mode="donot_use_mm_for_euclid_dist")  # (N, C)
        return apart.amin(1).square()


class ClassSums:
    """Sums over features, from which the Gaussians follow; features are added batch by batch.

    >>> sums = ClassSums()
    >>> sums.add(torch.tensor([[0.0], [2.0]]), torch.tensor([0, 0]))
    >>> sums.add(torch.tensor([[10.0], [12.0]]), torch.tensor([1, 1]))
    >>> gaussians = sums.gaussians()
    >>> gaussians.means.flatten().tolist(), gaussians.covariance.tolist()
    ([1.0, 11.0], [[1.0]])
    >>> gaussians.distances(torch.tensor([[4.0]])).tolist()  # 3 standard deviations from the nearer mean
    [9.0]
    """

    shift: Tensor  # (D,)
    counts: Tensor  # (C,)
    totals: Tensor  # Σ of φ − shift by class: (C, D)
    products: Tensor  # Σ (φ − shift)(φ − shift)ᵀ: (D, D)

    def __init__(self) -> None:
        self.empty = True

    def add(self, features: Tensor, labels: Tensor) -> None:
        """Features (N, D) and their classes (N,)."""
        phi = precise(features.detach())
        y = _classes(labels, len(features)).to(phi.device)
        if not bool(phi.isfinite().all()):
            raise ValueError("the net's features have NaN or infinite values; expected numbers: check the net")
        if self.empty:
            self.empty, width = False, phi.shape[1]
            self.rounding = _ROUNDING * torch.finfo(features.dtype).eps
            self.shift = phi.mean(0)
            self.counts, self.totals = phi.new_zeros(0), phi.new_zeros(0, width)
            self.products = phi.new_zeros(width, width)
        phi = phi - self.shift
        new = int(y.amax()) + 1 - len(self.counts)
        if new > 0:
            self.counts = torch.cat([self.counts, self.counts.new_zeros(new)])
            self.totals = torch.cat([self.totals, self.totals.new_zeros(new, phi.shape[1])])
        self.counts = self.counts.index_add(0, y, phi.new_ones(len(y)))
        self.totals = self.totals.index_add(0, y, phi)
        self.products = self.products + phi.mT @ phi

    def gaussians(self) -> ClassGaussians:
        seen = self.counts > 0
        counts = self.counts[seen, None]
        means = self.totals[seen] / counts
        n = counts.sum()
        scatter = self.products - (counts * means).mT @ means  # Σ over rows, around the means of their classes
        covariance = (scatter + scatter.mT) / (2 * n)
        size = (self.products.diagonal() + 2 * self.shift * self.totals.sum(0)) / n + self.shift**2  # mean of φ²
        values, vectors = torch.linalg.eigh(covariance)
        digits = len(values) * torch.finfo(values.dtype).eps
        kept = values > max(float(size.amax()) * self.rounding**2, float(values[-1]) * digits)
        if not bool(kept.any()):
            raise ValueError(
                f"the features of {int(n)} inputs do not vary within their classes, so distances have no unit; "
                "expected several different inputs of a class"
            )
        return ClassGaussians(means + self.shift, covariance, vectors[:, kept] / values[kept].sqrt())


def _classes(labels: Tensor, rows: int) -> Tensor:
    if labels.shape not in ((rows,), (rows, 1)) or labels.is_floating_point() or int(labels.amin()) < 0:
        raise ValueError(
            f"got labels of shape {tuple(labels.shape)} and {labels.dtype}; expected ({rows},), a class 0 … C − 1 for "
            "each input"
        )
    return labels.reshape(rows).long()
