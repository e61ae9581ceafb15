"""Mahalanobis distances of features: detectors of Lee et al., and a score that needs no labels.

    μ_c = mean of φ over class c,   Σ = 1/n Σᵢ (φᵢ − μ_{yᵢ})(φᵢ − μ_{yᵢ})ᵀ,   d²(φ) = min_c (φ − μ_c)ᵀ Σ⁺ (φ − μ_c)

    Mahalanobis:          s = d²(φ),   φ the features that the head reads
    MahalanobisEnsemble:  s = w · (d²_1(x̃_1), …, d²_L(x̃_L)) + w₀,   x̃_l = x − ε sign ∇_x d²_l(x),   l over layers
    MahalanobisScore:     s = d(φ) / q,   of one class, q the distance that 99 % of held-out examples stay below

The features of a layer are the means over the pixels of each channel. Sums are accumulated in double precision in one
pass over the training data, around the mean of the first batch. Σ⁺ = S⁻¹ (S⁻¹ΣS⁻¹)⁺ S⁻¹ with S the standard deviations:
a pseudo-inverse that does not depend on the units of the features. Features that are constant in training, such as dead
units, and directions that vary by rounding alone have no distance.

Lee, Lee, Lee and Shin, A simple unified framework for detecting out-of-distribution samples and adversarial attacks,
NeurIPS 2018. The covariance is theirs: maximum likelihood (1/n), one for all classes, with a pseudo-inverse. That of
`MahalanobisScore` is shrunk towards a multiple of the identity: Ledoit and Wolf, A well-conditioned estimator for
large-dimensional covariance matrices, 2004.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from itertools import chain, groupby
from typing import Any, Self, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from neuboots._validation import ArgumentError
from neuboots.evaluation._batching import LabeledData, iter_batches
from neuboots.evaluation.ood.detector import (
    Detector,
    LogisticDetector,
    _hash_batch,
    _input_gradients,
    _make_leaves,
    _perturb,
    _replace_float_tensors,
    _to_double,
)
from neuboots.head import (
    HeadSplit,
    StructureCopier,
    add_output_axis,
    cast_inputs,
    check_inputs,
    compute_output,
    count_rows,
    eager_mode,
    extract_output,
    split_head,
    take_rows,
    unwrap_model,
)
from neuboots.prediction import Predictor
from neuboots.serialization import check_tensors

EPSILONS = (0.0, 0.0005, 0.001, 0.0014, 0.002, 0.005, 0.01)

_ROUNDING = 8  # eps of the features' precision, relative to their size: smaller variation is rounding error
_NUM_PROBES = 8  # inputs with which a net is probed
_NUM_STAGES = 3  # evenly spaced layers, if shapes do not show the stages of a net
_MAX_COV_FEATURES = 512  # of more features only the variances are used
_MAX_COV_ROWS = 20_000
_QUANTILE = 0.99

_T = TypeVar("_T")


# -- Gaussians -----------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class ClassGaussians:
    """Gaussian of the features of each class, with a shared covariance Σ.

    Attributes:
        means: μ: (C, D).
        whitening: W with W Wᵀ = Σ⁺: (D, R), R the directions in which features vary; (D,) if Σ is diagonal.
    """

    means: Tensor
    whitening: Tensor

    def distances(self, features: Tensor) -> Tensor:
        """Return the squared distance to the nearest class, min_c d²: (N, D) → (N,)."""
        white, centers = (
            part * self.whitening if self.whitening.ndim == 1 else part @ self.whitening
            for part in (features.double(), self.means)
        )
        # not by a matrix product: the difference of two large numbers would lose small distances
        distances = torch.cdist(white, centers, compute_mode="donot_use_mm_for_euclid_dist")  # (N, C)
        return distances.amin(1).square()


class ClassMoments:
    """Streaming means and covariance of the features of each class.

    Args:
        features: Features of the first batch, around whose mean sums are accumulated: (N, D). They are not added.

    Example:
        >>> phi, y = torch.tensor([[0.0], [2.0], [10.0], [12.0]]), torch.tensor([0, 0, 1, 1])
        >>> moments = ClassMoments(phi[:2])
        >>> moments.add(phi[:2], y[:2])
        >>> moments.add(phi[2:], y[2:])
        >>> gaussians = moments.gaussians()
        >>> gaussians.means.flatten().tolist()
        [1.0, 11.0]
        >>> gaussians.distances(torch.tensor([[4.0]])).tolist()  # 3 standard deviations from the nearer mean
        [9.0]
    """

    def __init__(self, features: Tensor) -> None:
        phi, width = _to_double(features.detach()), features.shape[1]
        self._rounding = _ROUNDING * torch.finfo(features.dtype).eps
        self.shift = phi.mean(0)  # (D,)
        self.classes = torch.zeros(0, dtype=torch.int64, device=phi.device)  # the labels so far, sorted: (C,)
        self.counts, self.totals = phi.new_zeros(0), phi.new_zeros(0, width)  # (C,), Σ of φ − shift by class: (C, D)
        self.products = phi.new_zeros(width, width)  # Σ (φ − shift)(φ − shift)ᵀ: (D, D)

    def add(self, features: Tensor, labels: Tensor) -> None:
        """Add features (N, D) and their classes (N,)."""
        phi = _to_double(features.detach()) - self.shift
        y = _check_labels(labels, len(features)).to(phi.device)
        if not bool(phi.isfinite().all()):
            raise ArgumentError("train_data", "NaN or infinite features", "finite features", hint="check the net")
        self.classes, place = torch.cat([self.classes, y]).unique(return_inverse=True)  # type: ignore[no-untyped-call]
        counts, totals = torch.cat([self.counts, phi.new_ones(len(y))]), torch.cat([self.totals, phi])
        self.counts = phi.new_zeros(len(self.classes)).index_add(0, place, counts)
        self.totals = phi.new_zeros(len(self.classes), phi.shape[1]).index_add(0, place, totals)
        self.products = self.products + phi.mT @ phi

    def gaussians(self) -> ClassGaussians:
        """Return the Gaussians of the features added so far."""
        counts, n = self.counts[:, None], self.counts.sum()
        means = self.totals / counts
        scatter = self.products - (counts * means).mT @ means  # Σ over rows, around the means of their classes
        covariance = (scatter + scatter.mT) / (2 * n)
        mean_square = (self.products.diagonal() + 2 * self.shift * self.totals.sum(0)) / n + self.shift**2
        relative = len(covariance) * torch.finfo(covariance.dtype).eps
        noise = torch.maximum(mean_square * self._rounding**2, relative * self.products.diagonal() / n)  # by rounding
        variance = covariance.diagonal()
        scale = torch.where(variance > noise, variance, torch.inf).sqrt()  # of a constant feature ∞
        values, vectors = torch.linalg.eigh(covariance / scale / scale[:, None])
        rounding = vectors.square().mT @ (noise / scale**2)  # along each direction
        kept = values > torch.maximum(rounding, values[-1] * relative)
        if not bool(kept.any()):
            got = f"{int(n)} rows of constant features"
            raise ArgumentError("train_data", got, "features that vary within a class")
        return ClassGaussians(means + self.shift, vectors[:, kept] / values[kept].sqrt() / scale[:, None])


def _check_labels(labels: Tensor, rows: int) -> Tensor:
    """Labels (N,) as integers ≥ 0; floats and further axes of length 1 are accepted."""
    integer = not labels.is_floating_point() or bool((labels == labels.round()).all())
    if labels.shape[:1] != (rows,) or labels.numel() != rows or not integer or int(labels.amin()) < 0:
        expected = f"one integer class ≥ 0 for each of the {rows} rows"
        raise ArgumentError("train_data", f"{labels.dtype} labels {tuple(labels.shape)}", expected)
    return labels.reshape(rows).long()


@dataclass(frozen=True, eq=False)
class MahalanobisScore:
    """Mahalanobis distance to the training data in units of a quantile of held-out data; above 1: out of distribution.

    The score does not use predictions: a net may be confident far away from its training data.

    Attributes:
        gaussian: Mean and whitening of the training features.
        limit: The distance q that 99 % of the held-out examples stay below.

    Example:
        >>> features = torch.randn(400, 2, generator=torch.Generator().manual_seed(0))
        >>> score = MahalanobisScore.fit(features[:300], features[300:])
        >>> near, far = score(torch.tensor([[0.5, 0.0], [20.0, 0.0]]))
        >>> bool(near < 1 < far)
        True
    """

    gaussian: ClassGaussians
    limit: float

    @classmethod
    def fit(cls, train: Tensor, held_out: Tensor) -> "MahalanobisScore":
        """Fit to features, with a Ledoit–Wolf covariance; of more than 512 features only the variances are used.

        Args:
            train: Features of training examples: (n, D).
            held_out: Features of examples that were not used in training: (m, D). If empty, `train` is used.

        Returns:
            The fitted score.
        """
        from sklearn.covariance import ledoit_wolf

        rows = train[:: math.ceil(len(train) / _MAX_COV_ROWS)].double()
        if rows.shape[1] > _MAX_COV_FEATURES or len(rows) < 3:
            variance = rows.var(0, correction=0)
            whitening = (variance + 1e-3 * variance.mean() + 1e-12).rsqrt()
        else:
            covariance = torch.from_numpy(ledoit_wolf(np.asarray(rows))[0])
            ridge = 1e-6 * covariance.diagonal().mean() + 1e-12  # constant features
            inverse = torch.linalg.inv(covariance + ridge * torch.eye(len(covariance), dtype=torch.float64))
            whitening = torch.linalg.cholesky((inverse + inverse.T) / 2)
        gaussian = ClassGaussians(rows.mean(0, keepdim=True), whitening.contiguous())
        score = cls(gaussian, 1.0)
        limit = float(np.quantile(score(held_out if len(held_out) else train), _QUANTILE, method="higher"))
        return replace(score, limit=limit if limit > 0 else 1.0)

    def __call__(self, features: Tensor) -> NDArray[np.float64]:
        """Return the scores of features (N, D): (N,)."""
        return self.gaussian.distances(features).sqrt().cpu().numpy() / self.limit

    @property
    def num_features(self) -> int:
        """D."""
        return self.gaussian.means.shape[1]

    def state_dict(self) -> dict[str, Tensor]:
        """Return the tensors to save."""
        limit = torch.tensor(self.limit, dtype=torch.float64)
        return {"means": self.gaussian.means, "whitening": self.gaussian.whitening, "limit": limit}

    @classmethod
    def from_state_dict(cls, state: Mapping[str, Tensor]) -> "MahalanobisScore":
        """Return the score whose `state_dict` was saved."""
        features = state["means"].shape[-1]
        whitening = (features, None)[: state["whitening"].ndim]
        shapes: dict[str, tuple[int | None, ...]] = {"means": (None, features), "whitening": whitening, "limit": ()}
        check_tensors(state, {name: (torch.float64, shape) for name, shape in shapes.items()})
        return cls(ClassGaussians(state["means"], state["whitening"]), float(state["limit"]))


# -- features of a trained net -------------------------------------------------------------------------


def find_feature_net(predictor: Predictor, net: nn.Module | None, head: str | None, x: Any) -> HeadSplit:
    """Find the trained net of a predictor whose features are compared, and split it at its head.

    Candidates are `net` or the predictor's own net, then its first member and its module. One is accepted if the
    predictor's replicates are computed from its features at x.

    Args:
        predictor: Predictor of any method.
        net: Trained net, if the predictor's own is not meant.
        head: Name of the last layer, if it cannot be inferred.
        x: A batch of inputs.

    Returns:
        The net, split at its head.

    Raises:
        ArgumentError: If the predictor has no such net.
    """
    x = take_rows(x, slice(0, _NUM_PROBES))
    if net is not None:
        net = unwrap_model(net)
        return split_head(net, head, example=cast_inputs(net, x))
    candidates = [] if predictor.net is None else [predictor.net, *getattr(predictor, "nets", ())[:1]]
    if predictor.net is not None and _weight_shapes(predictor.module) == _weight_shapes(predictor.net):
        candidates.append(predictor.module)  # the net with dropout inserted
    for candidate in candidates:
        if any(tensor.is_meta for tensor in (*candidate.parameters(), *candidate.buffers())):
            continue
        split = split_head(candidate, head, example=cast_inputs(candidate, x))
        if _is_replicate(predictor, candidate, x) or _uses_features(predictor, split, x):
            return split
    expected = "a predictor that uses the features of its net"
    hint = "pass net=…, such as predictor.export(0), predictor.module, or a net trained on the same data"
    raise ArgumentError("net", type(predictor).__name__, expected, hint=hint)


def _weight_shapes(net: nn.Module) -> list[torch.Size]:
    return [tensor.shape for tensor in (*net.parameters(), *net.buffers())]


def _is_replicate(predictor: Predictor, net: nn.Module, x: Any) -> bool:
    """Whether the net's output is one of the predictor's replicates."""
    samples = predictor.predict(x, predictor.num_distinct or 1).samples  # (B, N, C, *)
    with torch.no_grad():
        output = add_output_axis(compute_output(StructureCopier().copy(net), x))
    return output.shape == samples.shape[1:] and bool(
        torch.isclose(samples, output.to(samples), rtol=1e-4, atol=1e-5).flatten(1).all(1).any()
    )


def _uses_features(predictor: Predictor, split: HeadSplit, x: Any) -> bool:
    """Whether the head, while the predictor predicts, reads the features that the net computes by itself."""
    read: list[Tensor] = []
    copier = StructureCopier()
    predictor, split = copier.copy(predictor), copier.copy(split)

    def record(head: nn.Module, args: tuple[Tensor, ...]) -> None:
        if type(args[0]) is Tensor:  # a traced tensor depends on the replicate
            read.append(args[0].detach().clone())

    with torch.no_grad():
        next(predictor.stream(x, 1, seed=0).chunks(1))  # one-time preparations happen without the hook
        with split.head.register_forward_pre_hook(record):
            list(predictor.stream(x, predictor.num_distinct or 1, seed=0).chunks(1))
        phi = split.features(cast_inputs(split.net, x))
    return any(part.shape == phi.shape and torch.allclose(part, phi, rtol=1e-4, atol=1e-5) for part in read)


def extract_features(split: HeadSplit, layers: tuple[str, ...], x: Any) -> list[Tensor]:
    """Compute the features of some layers, and of the head's input, in one pass.

    Args:
        split: Net, split at its head.
        layers: Names of layers before the head.
        x: A batch of inputs.

    Returns:
        The features of each layer, then those that the head reads: (N, D_l) each.

    Raises:
        ArgumentError: If a layer does not give one output with a row for each input.
    """
    check_inputs(x)
    # of (N, D, T) or (N, T, D)
    axis = 1 if any(isinstance(module, nn.Conv1d) for module in split.net.modules()) else -1

    def average(output: Any) -> Tensor:
        output = extract_output(output)
        return _average(output, 1 if output.ndim > 3 else axis)

    seen, phi = _run_layers(split, layers, x, average)
    features = [*((name, seen.get(name, [])) for name in layers), (split.name, [_average(phi, split.axis)])]
    for name, outputs in features:
        if len(outputs) != 1 or len(outputs[0]) != count_rows(x):
            got = f"{name!r}, which gives {len(outputs)} outputs for {count_rows(x)} rows"
            raise ArgumentError("layers", got, "layers before the head that are used once, the batch on the first axis")
    return [outputs[0] for _, outputs in features]


def _average(output: Tensor, axis: int) -> Tensor:
    """Mean over all but the rows and the channels on this axis: (N, D); a copy, as a later layer may overwrite it."""
    return output.movedim(axis, -1).flatten(1, -2).mean(1) if output.ndim > 2 else output.clone()


def _run_layers(
    split: HeadSplit, names: Iterable[str], x: Any, function: Callable[[Any], _T]
) -> tuple[dict[str, list[_T]], Tensor]:
    """Function of each output of these layers, in the order of their first calls, and the head's input."""
    seen: dict[str, list[_T]] = {}
    split = StructureCopier().copy(split)
    with eager_mode(split.net), ExitStack() as hooks:
        for name in names:

            def record(module: nn.Module, args: Any, output: Any, name: str = name) -> None:
                seen.setdefault(name, []).append(function(output))

            hooks.enter_context(split.net.get_submodule(name).register_forward_hook(record))
        return seen, split.features(cast_inputs(split.net, x))


def find_stages(split: HeadSplit, x: Any) -> tuple[str, ...]:
    """Names of a net's stages: of its blocks in order, the last of each output shape.

    Blocks are the children of the net, of each nn.Sequential and of each module that holds the head. Blocks that are
    used more than once, and those whose features are the head's, do not count. If none is left, a few blocks at even
    distances are used, and if these are few, the blocks inside them.

    Args:
        split: Net, split at its head.
        x: A batch of inputs.

    Returns:
        The names.

    Raises:
        ArgumentError: If the net has no such layer.
    """
    x = take_rows(x, slice(0, _NUM_PROBES))
    blocks = list(_find_blocks(split.net, "", split.head))
    shapes = _output_shapes(split, blocks, x)
    last = [[*names][-1] for _, names in groupby(shapes, key=shapes.__getitem__)]
    if stages := _without_head_features(split, last, x):
        return tuple(stages)
    rest = _without_head_features(split, list(shapes), x)
    while len(rest) < _NUM_STAGES:
        parts = (list(_find_blocks(split.net.get_submodule(name), name, split.head)) or [name] for name in blocks)
        inner = list(chain.from_iterable(parts))
        if inner == blocks:
            break
        blocks, rest = inner, _without_head_features(split, list(_output_shapes(split, inner, x)), x)
    if not rest:
        hint = "name some, or use Mahalanobis"
        raise ArgumentError("layers", None, "a net with layers whose features are not the head's", hint=hint)
    thirds = torch.arange(len(rest)).tensor_split(min(_NUM_STAGES, len(rest)))
    return tuple(rest[int(third[-1])] for third in thirds)


def _output_shapes(split: HeadSplit, names: list[str], x: Any) -> dict[str, torch.Size]:
    """Output shapes of the layers that are used once, in the order of the pass."""

    def shape(output: Any) -> torch.Size | None:
        valid = isinstance(output, Tensor) and output.ndim > 1 and output.shape[:1] == (count_rows(x),)
        return output.shape[1:] if valid else None

    with torch.no_grad():
        seen, _ = _run_layers(split, names, x, shape)
    return {name: shapes[0] for name, shapes in seen.items() if len(shapes) == 1 and shapes[0] is not None}


def _without_head_features(split: HeadSplit, names: list[str], x: Any) -> list[str]:
    """Those of the layers whose features are not what the head reads."""
    with torch.no_grad():
        *found, phi = extract_features(split, tuple(names), x)
    pairs = zip(names, found, strict=True)
    return [name for name, part in pairs if part.shape != phi.shape or not torch.allclose(part, phi, atol=1e-5)]


def _find_blocks(module: nn.Module, prefix: str, head: nn.Module) -> Iterator[str]:
    for key, child in module.named_children():
        name = f"{prefix}.{key}" if prefix else key
        if child is head:
            continue
        if isinstance(child, nn.Sequential | nn.ModuleList) or any(part is head for part in child.modules()):
            yield from _find_blocks(child, name, head)
        else:
            yield name


# -- detectors -----------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class LayerGaussians:
    """Layers of a trained net, the head's input last, and the Gaussians of their features.

    Attributes:
        split: Net, split at its head.
        names: Names of the layers before the head.
        gaussians: Gaussians of each layer, and of the head's input.
    """

    split: HeadSplit
    names: tuple[str, ...]
    gaussians: tuple[ClassGaussians, ...]

    def distances(self, x: Any, epsilons: tuple[float, ...]) -> Tensor:
        """Return d² of each layer, at inputs moved by each ε towards the layer's nearest class: (G, N, L)."""
        directions: list[list[Tensor]] = []
        if any(epsilons):
            with torch.inference_mode(False), torch.enable_grad():
                leaves = _make_leaves(x)
                totals = [distance.sum() for distance in self._distances(_replace_float_tensors(x, leaves))]
                # A layer that depends on no floating-point input, such as an embedding of tokens, does not move.
                directions = [[-slope.sign() for slope in slopes] for slopes in _input_gradients(totals, leaves)]
        found = []
        with torch.no_grad():
            for epsilon in epsilons:
                # A step, and so a pass, for each layer.
                moved = [self._distances(_perturb(x, d, epsilon))[k] for k, d in enumerate(directions) if epsilon]
                found.append(torch.stack(moved or self._distances(x), 1))
        return torch.stack(found)

    def _distances(self, x: Any) -> list[Tensor]:
        pairs = zip(self.gaussians, extract_features(self.split, self.names, x), strict=True)
        return [gaussians.distances(_to_double(features)) for gaussians, features in pairs]


@dataclass(frozen=True, eq=False, kw_only=True)
class Mahalanobis(Detector):
    """Squared Mahalanobis distance to the nearest class, s = min_c d²; `fit(train_data=…)`.

    Args:
        net: Trained net whose features are compared. By default the predictor's own, if its predictions are computed
            from it; of an ensemble the first member; of MC dropout its module, if dropout is before the head alone.
        head: Name of the last layer, if it cannot be inferred.
        fitted: Layers and Gaussians, set by `fit`.

    Example:
        >>> from torch.utils.data import TensorDataset
        >>> from neuboots.methods.deterministic import DeterministicPredictor
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

    def scores(self, x: Any) -> Tensor:
        """Return the scores of one batch of inputs: (N,)."""
        return self._layers.distances(x, (0.0,))[0, :, 0]

    @property
    def _layers(self) -> LayerGaussians:
        if self.fitted is None:
            raise ArgumentError("fitted", None, "a fitted detector", hint="call fit(train_data=…) first")
        return self.fitted

    def _layer_names(self, split: HeadSplit, x: Any) -> tuple[str, ...]:
        return ()

    def _fit_train(self, data: LabeledData | None, batch_size: int, progress: bool) -> tuple[Self, list[Tensor]]:
        """Means and covariance of the features of every layer, in one pass."""
        if data is None:
            raise ArgumentError("train_data", None, "the labeled training data of the net")
        hashes: list[Tensor] = []
        moments: list[ClassMoments] = []
        for x, y in iter_batches(data, batch_size, title="features of the training data", progress=progress):
            if not hashes:
                split = find_feature_net(self.predictor, self.net, self.head, x)
                names = self._layer_names(split, x)
            with torch.no_grad():
                features = extract_features(split, names, x)
            moments = moments or [ClassMoments(part) for part in features]
            for each, part in zip(moments, features, strict=True):
                each.add(part, y)
            hashes.append(_hash_batch(x))
        fitted = LayerGaussians(split, names, tuple(each.gaussians() for each in moments))
        return replace(self, fitted=fitted), hashes


@dataclass(frozen=True, eq=False, kw_only=True)
class MahalanobisEnsemble(LogisticDetector, Mahalanobis):
    """Log-odds of being out of distribution, from distances in several layers, with input preprocessing.

    `fit` needs the training data, and validation inputs of both kinds on which ε and the weights of the layers are
    selected. A score costs a pass and a gradient for each layer.

    Args:
        layers: Names of layers before the head. By default the last layer of each output shape, as the stages of a
            residual net, or a few layers at even distances. The head's input is always added.
        epsilons: Candidates of ε, in the units of the inputs.

    Example:
        >>> from torch.utils.data import TensorDataset
        >>> from neuboots.methods.deterministic import DeterministicPredictor
        >>> x = torch.randn(200, 2, generator=torch.Generator().manual_seed(0))
        >>> net = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.Tanh(), torch.nn.Linear(3, 2))
        >>> train = TensorDataset(x[:100], (x[:100, 0] > 0).long())
        >>> detector = MahalanobisEnsemble(DeterministicPredictor(net), layers=("0",))
        >>> detector = detector.fit(x[100:150], x[100:150] + 9, train_data=train, progress=False)
        >>> float(detector.evaluate(x[150:], x[150:] - 9, progress=False).auroc) > 0.9
        True
    """

    layers: tuple[str, ...] | None = None
    epsilons: tuple[float, ...] = EPSILONS

    def _layer_names(self, split: HeadSplit, x: Any) -> tuple[str, ...]:
        return find_stages(split, x) if self.layers is None else self.layers

    def _statistics(self, x: Any, candidates: tuple[Any, ...]) -> Tensor:
        return self._layers.distances(x, candidates)
