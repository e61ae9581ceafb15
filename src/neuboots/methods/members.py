"""K nets, each trained by itself: what the bootstraps and the deep ensembles share.

    f_b(x) = net_{k(b)}(x),   net_k = argmin 1/n Σᵢ w_{ki} ℓ(f(Xᵢ), yᵢ)

Member k is named by (seed, k): first weights, order of the rows and bootstrap weights depend on nothing else, so
K = 5 begins with the members of K = 3, and member 0 under constant weights is the plain net of the same seed. Small
nets are trained together, with the same result as one after another; large ones in turn, each with its own
checkpoint, so that a run that was cut short goes on at the member that was under way.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

from neuboots.batches import Batch, size_of
from neuboots.checkpoints import identity_of, name_of
from neuboots.keys import draw_keys, seed_named
from neuboots.losses import CrossEntropy, Loss, check_loss, unmasked, weighted_loss
from neuboots.methods.common import example_of, loss_figures, output_of, with_outputs
from neuboots.methods.stacked import Stacked, why_not_together
from neuboots.prediction import Predictor, Stream, stream_members
from neuboots.surgery import copy_of, eval_mode, to_net, unwrap
from neuboots.training import Recipe, make_seeded, train
from neuboots.weights import WeightLaw

Perturb = Callable[[Tensor, Any], Any]  # (the objective at x, x with gradients) → other inputs to train on as well

_ROWS = 128  # that K nets side by side take at once: more would not fit in a cache
SMALL = 300_000  # parameters of one net; above, the operations themselves take the time

# Each element is updated by itself, so that K nets in one tensor are updated as K nets apart.
_ELEMENTWISE = (
    *(torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW, torch.optim.RMSprop, torch.optim.Adagrad),
    *(torch.optim.Adadelta, torch.optim.Adamax, torch.optim.NAdam, torch.optim.RAdam, torch.optim.ASGD),
)


def member_seed(seed: int, k: int) -> int:
    """The seed of member k; member 0 has the recipe's own."""
    return seed if k == 0 else seed_named(seed, "member", k)


def check_members(num_members: int) -> None:
    if isinstance(num_members, bool) or not isinstance(num_members, int) or num_members < 1:
        raise ValueError(f"got num_members={num_members!r}; expected K ≥ 1, a whole number")


@dataclass(frozen=True)
class MembersPredictor(Predictor):
    """Replicates are members: every K of them are all K, in an order that the seed draws.

    Nets that were trained side by side stay so, in one module with stacked parameters; `nets` gives them apart.
    """

    members: nn.ModuleList | Stacked
    name: str  # of the method

    @property
    def together(self) -> bool:
        return isinstance(self.members, Stacked)

    @property
    def nets(self) -> list[nn.Module]:
        """The K nets; copies, where they are held side by side."""
        return self.members.nets() if isinstance(self.members, Stacked) else list(self.members)

    @property
    def net(self) -> nn.Module:
        return self.members.template if isinstance(self.members, Stacked) else self.members[0]

    @property
    def module(self) -> nn.Module:
        return self.members

    @property
    def num_distinct(self) -> int:
        return len(self.members)

    def stream(self, x: Any, num_samples: int, *, seed: int) -> Stream:
        x = to_net(self.members, x)
        run = self._run_stacked if isinstance(self.members, Stacked) else self._run_in_turn
        with eval_mode(self.members):
            return stream_members(num_samples, len(self.members), partial(run, x), seed=seed)

    def _run_in_turn(self, x: Any, numbers: Tensor) -> Tensor:
        return torch.stack([with_outputs(output_of(self.nets[k], x)) for k in numbers.tolist()])

    def _run_stacked(self, x: Any, numbers: Tensor) -> Tensor:
        parts = torch.split(x, _ROWS) if isinstance(x, Tensor) and len(x) else [x]
        outputs = torch.cat([self.members(part, alike=True) for part in parts], 1)
        outputs = outputs[..., None] if outputs.ndim == 2 else outputs  # (K, N, C, *)
        return outputs if len(numbers) == len(outputs) else outputs[numbers.to(outputs.device)]

    def config(self) -> dict[str, Any]:
        return {"method": self.name, "num_members": len(self.members), "together": self.together}

    @classmethod
    def restore(cls, config: dict[str, Any], net: nn.Module) -> "MembersPredictor":
        nets = [net, *(copy_of(net) for _ in range(config["num_members"] - 1))]
        return cls((Stacked(nets) if config["together"] else nn.ModuleList(nets)).eval(), config["method"])


# -- fitting -------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Sums:
    """The objective of one net, or the sum of those of K stacked nets: 1/N Σᵢ wᵢ ℓᵢ, plain and adversarial."""

    loss: Loss
    weights: Tensor | None  # (n,), or (K, n) for stacked nets
    perturb: Perturb | None
    stacked: bool

    def __call__(self, net: nn.Module, batch: Batch) -> Tensor:
        x = to_net(net, batch.x)
        w = self._weights_of(batch)
        if self.perturb is None:
            return self._value(net, x, batch.y, w)
        x = tree_floats(lambda part: part.detach().requires_grad_(), x)
        value = self._value(net, x, batch.y, w)
        return value + self._value(net, self.perturb(value, x), batch.y, w)

    def _weights_of(self, batch: Batch) -> Tensor:
        if self.weights is None:
            return torch.ones(batch.index.shape)
        return self.weights.gather(-1, batch.index)

    def _value(self, net: nn.Module, x: Any, y: Tensor, w: Tensor) -> Tensor:
        if not self.stacked:
            losses = self.loss(output_of(net, x), y)
            return weighted_loss(losses, w, unmasked(self.loss, y))
        outputs = net(x)  # (K, N, C, *)
        mask = unmasked(self.loss, y)
        losses = self.loss(outputs.flatten(0, 1), y.flatten(0, 1))
        losses = losses.view(*w.shape, *losses.shape[1:])  # (K, N, *)
        mapped = torch.vmap(weighted_loss, in_dims=(0, 0, None if mask is None else 0))
        return mapped(losses, w.to(losses), mask).sum()


def tree_floats(function: Callable[[Tensor], Tensor], x: Any) -> Any:
    """The function on every floating-point tensor of the inputs."""
    if isinstance(x, Mapping):
        return {key: tree_floats(function, value) for key, value in x.items()}
    if isinstance(x, tuple | list):
        return type(x)(tree_floats(function, value) for value in x)
    return function(x) if x.is_floating_point() else x


def point_weights(law: WeightLaw, n: int, k: int, *, seed: int) -> Tensor:
    """w_k over the n points for member k: (n,)."""
    return law.sample(draw_keys(torch.tensor([k]), seed, "point weights"), n)[0].float()


@dataclass(frozen=True)
class MembersMethod:
    """K nets; `together` trains them side by side (None: where that is faster and gives the same).

    What a method of this kind adds is a law of weights over the n points, or other inputs to train on as well.
    """

    loss: Loss = field(default_factory=CrossEntropy)
    num_members: int = 5
    together: bool | None = None

    name: ClassVar[str]  # in the table of methods
    law: ClassVar[WeightLaw | None] = None  # None: all points count alike

    def __post_init__(self) -> None:
        check_loss(self.loss)
        check_members(self.num_members)
        if self.together not in (None, True, False):
            raise ValueError(f"got together={self.together!r}; expected True, False, or None to let it be found out")

    def perturb_on(self, data: Dataset[Any], recipe: Recipe) -> Perturb | None:
        """How inputs are changed to be trained on a second time, if they are."""
        return None

    def fit(
        self,
        make_net: Callable[[], nn.Module],
        data: Dataset[Any],
        recipe: Recipe,
        *,
        validation: Dataset[Any] | None = None,
    ) -> MembersPredictor:
        """Train K nets that `make_net()` gives, on (x, y) rows, as the recipe says: together, or in turn."""
        seeds = [member_seed(recipe.seed, k) for k in range(self.num_members)]
        members = fit_members(
            [make_seeded(make_net, seed) for seed in seeds],
            data,
            recipe,
            loss=self.loss,
            seeds=seeds,
            weights=self._weights(data, recipe.seed),
            identity=identity_of(replace(self, num_members=1, together=None)),  # a member knows nothing of the others
            validation=validation,
            perturb=self.perturb_on(data, recipe),
            together=self.together,
        )
        return MembersPredictor(members.eval(), self.name)

    def _weights(self, data: Dataset[Any], seed: int) -> Tensor | None:
        """w_k over the n points, for every member: (K, n)."""
        if self.law is None:
            return None
        n = size_of(data)
        if n is None:
            raise ValueError(
                f"got a stream of unknown length; expected a data set with a length, since {type(self).__name__} draws "
                "weights over all n points"
            )
        return torch.stack([point_weights(self.law, n, k, seed=seed) for k in range(self.num_members)])


def fit_members(
    nets: Sequence[nn.Module],
    data: Dataset[Any],
    recipe: Recipe,
    *,
    loss: Loss,
    seeds: Sequence[int],
    weights: Tensor | None,
    identity: str,
    validation: Dataset[Any] | None = None,
    perturb: Perturb | None = None,
    together: bool | None = None,
) -> nn.ModuleList | Stacked:
    """Train K nets in place, net k on rows in the order of its seed, under its weights (K, n): together, or in turn."""
    nets = [unwrap(net) for net in nets]
    examples = [example_of(net, data, seed=seed) for net, seed in zip(nets, seeds, strict=True)]
    _check_apart(nets)

    def fit(net: nn.Module, rows: Tensor | None, recipe: Recipe, what: str = "", **options: Any) -> None:
        """Train one net under its weights (n,), or all of them stacked under (K, n)."""
        objective = _Sums(loss, rows, perturb, stacked=isinstance(net, Stacked))
        validate = partial(_figures, loss, isinstance(net, Stacked))
        options |= {"validation": validation, "validate": validate, "identity": identity + what}
        train(net, data, lambda epoch: objective, recipe, **options)

    if _go_together(nets, data, recipe, examples[0], together):
        stacked = Stacked(nets)
        fit(stacked, weights, recipe, f" {len(nets)} together", seeds=seeds)
        return stacked
    for k, (net, seed) in enumerate(zip(nets, seeds, strict=True)):
        mine = replace(recipe, seed=seed, folder=_member_folder(recipe, k))
        title = f"member {k + 1}/{len(nets)}" if len(nets) > 1 else ""
        fit(net, None if weights is None else weights[k], mine, f" {k}", title=title)
    return nn.ModuleList(nets)


def _go_together(
    nets: list[nn.Module], data: Dataset[Any], recipe: Recipe, example: Any, together: bool | None
) -> bool:
    if len(nets) == 1 or together is False or (together is None and not _is_small(nets[0])):
        return False  # without a trial, which would copy all the nets
    why = _why_in_turn(nets, data, recipe, example)
    if together and why:
        raise ValueError(f"got together=True, but {why}; expected together=False, or None to let it be found out")
    return why is None


def _check_apart(nets: list[nn.Module]) -> None:
    """Members that share a layer would overwrite each other."""
    seen: dict[int, int] = {}
    for k, net in enumerate(nets):
        for tensor in [*net.parameters(), *net.buffers()]:
            if tensor.numel() and seen.setdefault(tensor.data_ptr(), k) != k:
                raise ValueError(
                    "make_net() gave nets that share weights, which would overwrite each other; expected a new net at "
                    "each call: build it inside make_net, or copy.deepcopy what is pretrained"
                )


def _member_folder(recipe: Recipe, k: int) -> Path | None:
    return None if recipe.folder is None else Path(recipe.folder) / f"member-{k}"


def _figures(loss: Loss, stacked: bool, net: nn.Module, batch: Batch) -> dict[str, Tensor]:
    """The validation figures of a net; of K nets, their means."""
    if not stacked:
        return loss_figures(loss, output_of(net, batch.x), batch.y)
    figures = [loss_figures(loss, output, batch.y) for output in net(to_net(net, batch.x), alike=True)]
    return {name: torch.stack([figure[name] for figure in figures]).mean() for name in figures[0]}


def _is_small(net: nn.Module) -> bool:
    """Whether the net spends its time between operations. On a CPU convolutions keep it busy by themselves: K of them
    in one are slower than K in turn (a row of `make bench`)."""
    convolves = any(isinstance(module, nn.Conv1d | nn.Conv2d | nn.Conv3d) for module in net.modules())
    busy = convolves and not torch.cuda.is_available()
    return sum(parameter.numel() for parameter in net.parameters()) <= SMALL and not busy


def _why_in_turn(nets: list[nn.Module], data: Dataset[Any], recipe: Recipe, example: Any) -> str | None:
    """Why these nets must be trained one after another; None if they need not."""
    optimizer = recipe.optimizer  # a function of your own may look at shapes, which stacking changes
    while isinstance(optimizer, partial):
        optimizer = optimizer.func
    if size_of(data) is None:
        return "a stream can be read by one net at a time"
    if recipe.num_workers:
        return "workers read rows for one net at a time"
    if recipe.devices != 1 or recipe.num_nodes != 1 or recipe.strategy != "auto":
        return "members on several devices train in turn"
    if recipe.clip_norm is not None:
        return "clip_norm looks at the gradients of one net"
    if recipe.patience is not None:
        return "patience may stop each net at another epoch"
    if optimizer not in _ELEMENTWISE:
        return f"the optimizer {name_of(optimizer)} is not known to update each element by itself"
    return why_not_together(nets, output_of, example)
