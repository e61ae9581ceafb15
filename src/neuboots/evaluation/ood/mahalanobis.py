"""Features of a trained net, and Gaussians around their class means.

    μ_c = mean of φ over class c,   Σ = 1/n Σᵢ (φᵢ − μ_{yᵢ})(φᵢ − μ_{yᵢ})ᵀ,   d²(φ) = min_c (φ − μ_c)ᵀ Σ⁺ (φ − μ_c)

φ is what the head reads, or the means over the pixels of each channel of a layer's output. Sums are gathered in double
precision in one pass over the training data, around the mean of the first batch. Σ⁺ = S⁻¹ (S⁻¹ΣS⁻¹)⁺ S⁻¹ with S the
standard deviations: a pseudo-inverse in which the unit of a feature does not matter. Features that never change in
training, as dead units do, and what varies by the rounding of others alone, have no distance to tell.

How far the features of an input lie from those of every class.

    plain:  s = min_c (φ − μ_c)ᵀ Σ⁺ (φ − μ_c),   φ what the head reads
    full:   s = w · (d²_1(x̃_1), …, d²_L(x̃_L)) + w₀,   x̃_l = x − ε sign ∇_x d²_l(x),   l over layers of the net

The full form takes several layers, moves the input towards the nearest class of each (ε ≥ 0), and weighs the distances
by logistic regression on a validation part of inputs in and out of distribution.

Lee, Lee, Lee and Shin, A simple unified framework for detecting out-of-distribution samples and adversarial attacks,
NeurIPS 2018. The covariance is theirs: maximum likelihood (1/n), one for all classes, with a pseudo-inverse.
"""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, Self

import torch
from torch import Tensor, nn

from neuboots.evaluation._batching import InputData, LabeledData, iter_batches, num_rows, take_rows
from neuboots.evaluation.ood.detector import (
    Detector,
    LogisticRule,
    check_batch_axis,
    check_epsilons,
    row_hash_tensor,
    select_logistic_rule,
    to_double,
    unique_hashes,
)
from neuboots.evaluation.ood.odin import input_gradients, make_leaves, perturb, replace_float_tensors
from neuboots.head import (
    HeadSplit,
    call_net,
    cast_inputs,
    eager_mode,
    eval_mode,
    extract_output,
    split_head,
    unwrap_model,
)
from neuboots.metrics._base import run_ends
from neuboots.prediction import Predictor, check_inputs

_ROUNDING = 8  # eps of the features' precision, of their size: what varies less than that, varies by rounding
_FEW = 8  # inputs with which a net is tried
_STAGES = 3  # layers at even distances, where shapes do not tell the stages of a net

# -- which net, which layers ---------------------------------------------------------------------------


def find_feature_net(predictor: Predictor, net: nn.Module | None, head: str | None, x: Any) -> HeadSplit:
    """The net whose features are meant, split at its head: `net`, or the predictor's own if its replicates are made of
    the features that this net gives at x, or the first of its members, or its module, on the same terms; else a
    sentence."""
    found = predictor.net if net is None else unwrap_model(net)
    if found is None:
        raise ValueError(
            f"the {type(predictor).__name__} has no net; expected one, whose features are compared: take a detector of "
            "its predictions, such as MaxSoftmax or Spread"
        )
    few = take_rows(x, slice(0, _FEW))
    why = "keeps only the architecture of the net it was given"
    if not any(tensor.is_meta for tensor in (*found.parameters(), *found.buffers())):
        split = split_head(found, head, example=cast_inputs(found, few))
        if net is not None or _uses(predictor, split, few):
            return split
        why = "predicts with other weights than those of its net"
    others = _others(predictor, found)
    for other in others.values():
        split = split_head(other, head, example=cast_inputs(other, few))
        if _is_replicate(predictor, other, few) or _uses(predictor, split, few):
            return split
    known = [*others, *(["export(0)"] if callable(getattr(predictor, "export", None)) else [])]
    ways = " or ".join(["a plain net trained on the same data", *(f"predictor.{name}" for name in known)])
    raise ValueError(
        f"the {type(predictor).__name__} {why}; expected a trained net, whose features are compared: give one with "
        f"net=…, such as {ways}"
    )


def _others(predictor: Predictor, net: nn.Module) -> dict[str, nn.Module]:
    """Trained nets that a predictor may hold besides the one it was given, by what to call them."""
    found: dict[str, nn.Module] = {}
    if nets := getattr(predictor, "nets", None):
        found["nets[0]"] = nets[0]
    module = getattr(predictor, "module", None)
    if isinstance(module, nn.Module) and _weights(module) == _weights(net):  # the same, with dropout put in
        found["module"] = module
    return found


def _weights(net: nn.Module) -> list[torch.Size]:
    return [tensor.shape for tensor in (*net.parameters(), *net.buffers())]


def _is_replicate(predictor: Predictor, net: nn.Module, x: Any) -> bool:
    """Whether the net by itself gives what one of the predictor's replicates does."""
    samples = predictor.predict(x, predictor.num_distinct or 1).samples  # (B, N, C, *)
    with torch.no_grad(), eval_mode(net):
        output = extract_output(call_net(net, cast_inputs(net, x)), x)
    output = output[..., None] if output.ndim == 1 else output
    return output.shape == samples.shape[1:] and bool(
        torch.isclose(samples, output.to(samples), rtol=1e-4, atol=1e-5).flatten(1).all(1).any()
    )


def _uses(predictor: Predictor, split: HeadSplit, x: Any) -> bool:
    """Whether the head of the net, while the predictor predicts, reads the features that the net gives by itself."""
    read: list[Tensor] = []
    predictor.predict(x, 1)  # what it prepares once, it prepares without the hook

    def note(head: nn.Module, args: tuple[Tensor, ...]) -> None:
        if type(args[0]) is Tensor:  # what is traced comes after something that replicates do each in its own way
            read.append(args[0].detach().clone())

    hook = split.head.register_forward_pre_hook(note)
    try:
        predictor.predict(x, predictor.num_distinct or 1)
    finally:
        hook.remove()
    with torch.no_grad(), eval_mode(split.net):
        phi = split.features(cast_inputs(split.net, x))
    return any(part.shape == phi.shape and torch.allclose(part, phi, rtol=1e-4, atol=1e-5) for part in read)


def extract_features(split: HeadSplit, layers: tuple[str, ...], x: Any) -> list[Tensor]:
    """The features of these layers at x, and then those that the head reads: (N, D_l) each, from one pass."""
    check_inputs(x)
    net = split.net
    seen: dict[str, list[Tensor]] = {name: [] for name in layers}
    axis = 1 if any(isinstance(module, nn.Conv1d) for module in net.modules()) else -1  # of (N, T, D) or (N, D, T)

    def keep(name: str, output: Any) -> None:
        seen[name].append(_channels(extract_output(output), axis))

    with eval_mode(net), eager_mode(net), _watching(net, layers, keep):
        phi = split.features(cast_inputs(net, x))
    for name, found in seen.items():
        if len(found) != 1:
            raise ValueError(
                f"the layer {name!r} gives {len(found)} outputs before the head is reached; expected exactly one: name "
                "other layers (layers=…)"
            )
    features = {name: found[0] for name, found in seen.items()}
    features[split.name] = _channels(phi, split.axis, of_head=True)
    for name, part in features.items():
        if len(part) != num_rows(x):
            raise ValueError(
                f"the features at {name!r} have {len(part)} rows for {num_rows(x)} inputs; expected the batch on the "
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


def find_stages(split: HeadSplit, x: Any) -> tuple[str, ...]:
    """The net's stages: of its blocks in order, the last that gives outputs of one shape before the shape changes.

    Blocks are the net's children, those of nn.Sequential and of whatever holds the head among them; those that are used
    more than once do not count, and stages whose features are those of the head are left out. Where that leaves none,
    as where all blocks give one shape, a few at even distances are taken, of the parts of blocks where these are few.
    """
    few = cast_inputs(split.net, take_rows(x, slice(0, _FEW)))
    blocks = list(_blocks(split.net, "", split.head))
    shapes = _shapes(split, blocks, few)
    order = list(shapes)
    last = [name for k, name in enumerate(order) if k + 1 == len(order) or shapes[order[k + 1]] != shapes[name]]
    if stages := _not_the_heads(split, last, few):
        return tuple(stages)
    rest = _not_the_heads(split, order, few)
    while len(rest) < _STAGES:
        parts = [part for name in blocks for part in _parts(split, name)]
        if parts == blocks:
            break
        blocks, rest = parts, _not_the_heads(split, list(_shapes(split, parts, few)), few)
    if not rest:
        raise ValueError(
            "found no layer before the head whose features are not the head's own; expected at least one, for this "
            "detector to be more than the plain one: name some (layers=…), or take Mahalanobis"
        )
    thirds = torch.arange(len(rest)).tensor_split(min(_STAGES, len(rest)))
    return tuple(rest[int(third[-1])] for third in thirds)


def _shapes(split: HeadSplit, names: list[str], x: Any) -> dict[str, torch.Size]:
    """The shape of what each of these layers gives, in the order in which they are done; those used once."""
    net = split.net
    calls: list[tuple[str, torch.Size | None]] = []

    def note(name: str, output: Any) -> None:
        fits = isinstance(output, Tensor) and output.ndim > 1 and output.shape[:1] == (num_rows(x),)
        calls.append((name, output.shape[1:] if fits else None))

    with torch.no_grad(), eval_mode(net), eager_mode(net), _watching(net, names, note):
        split.features(x)
    used = [name for name, _ in calls]
    return {name: shape for name, shape in calls if shape is not None and used.count(name) == 1}


def _not_the_heads(split: HeadSplit, names: list[str], x: Any) -> list[str]:
    """Of these layers, those whose features are not what the head reads."""
    with torch.no_grad():
        *found, phi = extract_features(split, tuple(names), x)
    kept = zip(names, found, strict=True)
    return [name for name, part in kept if part.shape != phi.shape or not torch.allclose(part, phi, atol=1e-5)]


def _parts(split: HeadSplit, name: str) -> list[str]:
    """The blocks inside a block; itself, where there are none."""
    return list(_blocks(split.net.get_submodule(name), name, split.head)) or [name]


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
    whitening: Tensor  # W with W Wᵀ = Σ⁺: (D, R), R the directions in which features vary

    def distances(self, features: Tensor) -> Tensor:
        """min_c d²: (N, D) → (N,)."""
        white, centres = to_double(features) @ self.whitening, self.means @ self.whitening
        # not through a product: the difference of two large numbers would lose the small distances
        apart = torch.cdist(white, centres, compute_mode="donot_use_mm_for_euclid_dist")  # (N, C)
        return apart.amin(1).square()


class ClassMoments:
    """Sums over features, from which the Gaussians follow; features are added batch by batch.

    >>> sums = ClassMoments()
    >>> sums.add(torch.tensor([[0.0], [2.0]]), torch.tensor([0, 0]))
    >>> sums.add(torch.tensor([[10.0], [12.0]]), torch.tensor([1, 1]))
    >>> gaussians = sums.gaussians()
    >>> gaussians.means.flatten().tolist(), gaussians.covariance.tolist()
    ([1.0, 11.0], [[1.0]])
    >>> gaussians.distances(torch.tensor([[4.0]])).tolist()  # 3 standard deviations from the nearer mean
    [9.0]
    """

    shift: Tensor  # (D,)
    classes: Tensor  # the labels seen so far, rising: (C,)
    counts: Tensor  # (C,)
    totals: Tensor  # Σ of φ − shift by class: (C, D)
    products: Tensor  # Σ (φ − shift)(φ − shift)ᵀ: (D, D)

    def __init__(self) -> None:
        self.empty = True

    def add(self, features: Tensor, labels: Tensor) -> None:
        """Features (N, D) and their classes (N,)."""
        phi = to_double(features.detach())
        y = _classes(labels, len(features)).to(phi.device)
        if not bool(phi.isfinite().all()):
            raise ValueError("the net's features have NaN or infinite values; expected numbers: check the net")
        if self.empty:
            self.empty, width = False, phi.shape[1]
            self.rounding = _ROUNDING * torch.finfo(features.dtype).eps
            self.shift = phi.mean(0)
            self.classes, self.counts, self.totals = y[:0], phi.new_zeros(0), phi.new_zeros(0, width)
            self.products = phi.new_zeros(width, width)
        phi = phi - self.shift
        classes = torch.cat([self.classes, y]).sort().values
        classes = classes[run_ends(classes) - 1]  # each once, so that labels may be as large as they like
        before, now = torch.searchsorted(classes, self.classes), torch.searchsorted(classes, y)
        counts, totals = phi.new_zeros(len(classes)), phi.new_zeros(len(classes), phi.shape[1])
        self.counts = counts.index_add(0, before, self.counts).index_add(0, now, phi.new_ones(len(y)))
        self.totals = totals.index_add(0, before, self.totals).index_add(0, now, phi)
        self.classes = classes
        self.products = self.products + phi.mT @ phi

    def gaussians(self) -> ClassGaussians:
        counts = self.counts[:, None]
        means = self.totals / counts
        n = counts.sum()
        scatter = self.products - (counts * means).mT @ means  # Σ over rows, around the means of their classes
        covariance = (scatter + scatter.mT) / (2 * n)
        size = (self.products.diagonal() + 2 * self.shift * self.totals.sum(0)) / n + self.shift**2  # mean of φ²
        digits = len(covariance) * torch.finfo(covariance.dtype).eps
        noise = torch.maximum(size * self.rounding**2, digits * self.products.diagonal() / n)  # variance by rounding
        variance = covariance.diagonal()
        scale = torch.where(variance > noise, variance, torch.inf).sqrt()  # a feature that never changes counts as 0
        values, vectors = torch.linalg.eigh(covariance / scale / scale[:, None])
        rounding = vectors.square().mT @ (noise / scale**2)  # along each direction
        kept = values > torch.maximum(rounding, values[-1] * digits)
        if not bool(kept.any()):
            raise ValueError(
                f"the features of {int(n)} inputs do not vary within their classes, so distances have no unit; "
                "expected several different inputs of a class"
            )
        return ClassGaussians(means + self.shift, covariance, vectors[:, kept] / values[kept].sqrt() / scale[:, None])


def _classes(labels: Tensor, rows: int) -> Tensor:
    """Labels (N,) as whole numbers ≥ 0; they may be floats, and have axes of length 1 besides, as for other tasks."""
    if labels.shape[:1] != (rows,) or labels.numel() != rows:
        raise ValueError(f"got labels of shape {tuple(labels.shape)}; expected ({rows},), a class for each input")
    if labels.is_floating_point() and not bool((labels == labels.round()).all()):
        raise ValueError("got labels that are not whole numbers; expected classes 0 … C − 1: is this a regression?")
    if int(labels.amin()) < 0:
        raise ValueError(
            f"labels run from {int(labels.amin())} to {int(labels.amax())}; expected classes 0 … C − 1: renumber the "
            "labels, or drop the inputs without one"
        )
    return labels.reshape(rows).long()


EPSILONS = (0.0, 0.0005, 0.001, 0.0014, 0.002, 0.005, 0.01)


@dataclass(frozen=True, eq=False)
class LayerGaussians:
    """Layers of a trained net, the head's features last, and the Gaussians of each."""

    split: HeadSplit
    names: tuple[str, ...]
    gaussians: tuple[ClassGaussians, ...]

    def distances(self, x: Any, epsilons: tuple[float, ...]) -> Tensor:
        """d² of each layer, at inputs moved by each ε towards the layer's nearest class: (len(epsilons), N, L)."""
        if not any(epsilons):
            with torch.no_grad():
                found = self._distances(x)
            return torch.stack([torch.stack(found, 1)] * len(epsilons))
        with torch.inference_mode(False), torch.enable_grad():
            leaves = make_leaves(x)
            totals = [distance.sum() for distance in self._distances(replace_float_tensors(x, leaves))]
            # A layer that depends on no floating-point input, as an embedding of words does, is measured where it is.
            directions = [[-slope.sign() for slope in slopes] for slopes in input_gradients(totals, leaves)]
        with torch.no_grad():
            return torch.stack([self._moved(x, directions, epsilon) for epsilon in epsilons])

    def _moved(self, x: Any, directions: list[list[Tensor]], epsilon: float) -> Tensor:
        """(N, L); each layer has an input of its own, and so a pass."""
        if epsilon == 0:
            return torch.stack(self._distances(x), 1)
        found = [self._distances(perturb(x, mine, epsilon))[layer] for layer, mine in enumerate(directions)]
        return torch.stack(found, 1)

    def _distances(self, x: Any) -> list[Tensor]:
        pairs = zip(self.gaussians, extract_features(self.split, self.names, x), strict=True)
        return [gaussians.distances(features) for gaussians, features in pairs]


@dataclass(frozen=True, eq=False, kw_only=True)
class Mahalanobis(Detector):
    """s = min_c d²: the plain form, `fit(train=…)` on the training data.

    The features are those of the predictor's net, where its predictions come from it; of an ensemble, those of its
    first member; of MC dropout, those of its module, where dropout stands before the head alone. Else `net` says which
    net is meant. `head` names its last layer where that is in doubt. B plays no part.

    >>> from torch.utils.data import TensorDataset
    >>> from neuboots import DeterministicPredictor
    >>> x = torch.randn(200, 2, generator=torch.Generator().manual_seed(0))
    >>> data = TensorDataset(x, (x[:, 0] > 0).long())
    >>> predictor = DeterministicPredictor(torch.nn.Linear(2, 2))  # whose head reads the inputs
    >>> detector = Mahalanobis(predictor).fit(train_data=data, progress=False)
    >>> near, far = detector.score(torch.tensor([[0.5, 0.0], [9.0, 9.0]]), progress=False)
    >>> bool(near < 1), bool(far > 50)
    (True, True)
    """

    net: nn.Module | None = field(default=None, repr=False)
    head: str | None = None
    fitted: LayerGaussians | None = field(default=None, repr=False)

    def __post_init__(self) -> None:
        super().__post_init__()
        _check_net(self.net)

    def scores(self, x: Any) -> Tensor:
        return _fitted(self.fitted).distances(x, (0.0,))[0, :, 0]

    def fit(
        self,
        id_data: InputData | None = None,
        ood_data: InputData | None = None,
        *,
        train_data: LabeledData | None = None,
        batch_size: int = 256,
        progress: bool = True,
    ) -> Self:
        """Class means and covariance of the features, in one pass over rows (x, y)."""

        def choose(x: Any) -> tuple[HeadSplit, tuple[str, ...]]:
            return find_feature_net(self.predictor, self.net, self.head, x), ()

        layers, names = _layers(choose, train_data, batch_size, progress)
        return replace(self, fitted=layers, fitted_on=names)


@dataclass(frozen=True, eq=False, kw_only=True)
class MahalanobisEnsemble(Detector):
    """s = the log-odds of being out of distribution, from distances in several layers, with input preprocessing.

    `layers` names them; None takes the last output of each shape on the way to the head, as the stages of a residual
    net give, or where all have one shape, a few at even distances. The head's features always join; which net is meant
    is said as for `Mahalanobis`. `fit` needs the training data and a validation part of both
    kinds, on which ε and the weights of the layers are chosen. One score costs a pass and a gradient for each layer.

    >>> from torch.utils.data import TensorDataset
    >>> from neuboots import DeterministicPredictor
    >>> x = torch.randn(200, 2, generator=torch.Generator().manual_seed(0))
    >>> net = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.Tanh(), torch.nn.Linear(3, 2))
    >>> train = TensorDataset(x[:100], (x[:100, 0] > 0).long())
    >>> detector = MahalanobisEnsemble(DeterministicPredictor(net), layers=("0",))
    >>> detector = detector.fit(x[100:150], x[100:150] + 9, train_data=train, progress=False)
    >>> float(detector.evaluate(x[150:], x[150:] - 9, progress=False).auroc) > 0.9
    True
    """

    net: nn.Module | None = field(default=None, repr=False)
    head: str | None = None
    layers: tuple[str, ...] | None = None
    epsilons: tuple[float, ...] = EPSILONS  # to choose from, in the units of the inputs
    epsilon: float = 0.0  # the one chosen
    fitted: LayerGaussians | None = field(default=None, repr=False)
    rule: LogisticRule | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        _check_net(self.net)
        check_epsilons(self.epsilons)
        check_epsilons((self.epsilon,))
        layers = self.layers
        names = isinstance(layers, tuple | list) and all(isinstance(name, str) for name in layers)
        if layers is not None and (not names or len(set(layers)) < len(layers)):
            raise ValueError(f"got layers={layers!r}; expected a tuple of names that differ, as of net.named_modules()")

    def scores(self, x: Any) -> Tensor:
        layers = _fitted(self.fitted)
        assert self.rule is not None, "fitted together with the layers"
        return self.rule(layers.distances(x, (self.epsilon,))[0])

    def fit(
        self,
        id_data: InputData | None = None,
        ood_data: InputData | None = None,
        *,
        train_data: LabeledData | None = None,
        batch_size: int = 256,
        progress: bool = True,
    ) -> Self:
        """Gaussians on the training data; then ε by TNR at 95 % TPR, and the regression, on a validation part."""

        def choose(x: Any) -> tuple[HeadSplit, tuple[str, ...]]:
            split = find_feature_net(self.predictor, self.net, self.head, x)
            return split, find_stages(split, x) if self.layers is None else _known(self.layers, split)

        layers, trained_on = _layers(choose, train_data, batch_size, progress)

        def measure(x: Any) -> Tensor:
            return layers.distances(x, self.epsilons)

        ours, theirs, names = self._measured(id_data, ood_data, measure, batch_size, progress)
        best, rule = select_logistic_rule(ours, theirs, seed=self.seed)
        names = unique_hashes([names, trained_on])
        return replace(self, fitted=layers, epsilon=self.epsilons[best], rule=rule, fitted_on=names)


def _layers(
    choose: Callable[[Any], tuple[HeadSplit, tuple[str, ...]]],
    train: LabeledData | None,
    batch_size: int,
    progress: bool,
) -> tuple[LayerGaussians, Tensor]:
    """The Gaussians of every layer, in one pass over the training data, and the names of its rows; `choose` sees the
    first batch."""
    if train is None:
        raise ValueError("got no training data to know the classes by; expected fit(train=…) with rows (x, y)")
    check_batch_axis(train)
    names: list[Tensor] = []
    chosen: tuple[HeadSplit, tuple[str, ...]] | None = None
    sums: list[ClassMoments] = []
    for x, y in iter_batches(train, batch_size, title="features of the training data", progress=progress):
        if chosen is None:
            chosen = choose(x)
            sums = [ClassMoments() for _ in (*chosen[1], "head")]
        with torch.no_grad():
            found = extract_features(*chosen, x)
        for each, features in zip(sums, found, strict=True):
            each.add(features, y)
        names.append(row_hash_tensor(x))
    assert chosen is not None, "batches_of gives at least one batch"
    return LayerGaussians(*chosen, tuple(each.gaussians() for each in sums)), unique_hashes(names)


def _check_net(net: Any) -> None:
    if net is not None and not isinstance(net, nn.Module):
        raise ValueError(f"got net={net!r}; expected a trained torch.nn.Module, or None for the predictor's own")


def _known(names: tuple[str, ...], split: HeadSplit) -> tuple[str, ...]:
    modules = dict(split.net.named_modules())
    for name in names:
        if name not in modules or not name:
            raise ValueError(f"got the layer {name!r}; expected a name that net.named_modules() gives")
    return names


def _fitted(layers: LayerGaussians | None) -> LayerGaussians:
    if layers is None:
        raise ValueError("the detector is not fitted; expected detector.fit(train=…) first")
    return layers
