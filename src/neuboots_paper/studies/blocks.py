"""Theorem A.1 and section 3.1: the bootstrap with one weight per block against one weight per point.

    wᵢ = α_{u(i)},  α ~ S × Dirichlet(1, …, 1)   against   w ~ n × Dirichlet(1, …, 1)
    KS(x) = sup_t | P(f_w(x) − f̂(x) ≤ t) − P(f_{w_α}(x) − f̂(x) ≤ t) |

By the theorem the distance goes to 0 as S and n grow. It is measured for ridge regression on fixed features, where f_w
is known exactly, with thousands of replicates, and for a small net trained with the weights from one initialization.
The distance of two independent runs of the unblocked bootstrap is the resolution of the measurement.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset, TensorDataset

from neuboots._prng import derive_keys, derive_seed
from neuboots.evaluation._audit_stats import ks_and_wasserstein
from neuboots.methods import BayesianBootstrap, Deterministic
from neuboots.nets import MLP
from neuboots.prediction import Method
from neuboots.report.checks import Check
from neuboots.report.tables import Table
from neuboots.weights import Dirichlet, assign_blocks, compute_strata
from neuboots_paper.checks import compare_groups
from neuboots_paper.study import Job, Rows, RunContext, Study
from neuboots_paper.tables import MetricColumn, tabulate

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

GROUPINGS = ("random", "stratified", "contiguous", "sorted")
UNBLOCKED = "unblocked again"  # a second run of the unblocked bootstrap
_MARGIN = 0.05  # of a probability


def assign_groups(kind: str, y: Tensor, num_blocks: int, seed: int) -> Tensor:
    """u: [n] → [S]: at random, by strata of y, in the order of the rows, or in the order of y (the worst case)."""
    n = len(y)
    if kind in ("random", "stratified"):
        return assign_blocks(n, num_blocks, strata=compute_strata(y) if kind == "stratified" else None, seed=seed)
    place = torch.arange(n) if kind == "contiguous" else y.flatten().argsort().argsort()
    return place * num_blocks // n


def block_weights(blocks: Tensor, num: int, *name: int | str) -> Tensor:
    """wᵢ = α_{u(i)} for each replicate: (num, n)."""
    alpha = Dirichlet().sample(derive_keys(torch.arange(num), *name), int(blocks.max()) + 1)
    return alpha[:, blocks]


def ridge(features: Tensor, y: Tensor, weights: Tensor, at: Tensor, penalty: float) -> Tensor:
    """argmin_θ 1/n Σᵢ wᵢ (yᵢ − θᵀφᵢ)² + penalty |θ|², for each row of weights (B, n), at φ (M, d): (B, M)."""
    n, d = features.shape
    products = (features[:, :, None] * features[:, None, :]).flatten(1)  # (n, d²)
    gram = (weights @ products).view(-1, d, d) / n + penalty * torch.eye(d).to(features)
    theta: Tensor = torch.linalg.solve(gram, weights @ (features * y[:, None]) / n)  # (B, d)
    return theta @ at.T


def compute_distances(ours: Tensor, true: Tensor) -> dict[str, float]:
    """Distances of replicates minus f̂, (B, M), from those of the unblocked bootstrap: means over M inputs."""
    scale = true.std(0)
    ratio = ours.std(0) / scale
    ks, moved = ks_and_wasserstein(ours, true)
    metrics = {
        "ks": ks.mean(),
        "ks_worst": ks.max(),
        "w1": (moved / scale).mean(),
        "ratio": ratio.square().mean().sqrt(),
        "ratio_error": (ratio - 1).square().mean().sqrt(),
    }
    return {name: round(float(value), 5) for name, value in metrics.items()}


@dataclass(frozen=True)
class BlockBootstrap(BayesianBootstrap):
    """The random-weight bootstrap with one weight for each block: `blocks` is u."""

    blocks: tuple[int, ...] = ()

    def _weights(self, data: Dataset[Any], seed: int) -> Tensor:
        return block_weights(torch.tensor(self.blocks), self.num_members, seed, "block weights").float()


@dataclass(frozen=True)
class Blocks(Study):
    """Blocked and unblocked random-weight bootstrap, for several numbers S of blocks and four groupings."""

    name = "blocks"
    source = "theorem A.1, section 3.1"
    claim = (
        "As the number of blocks S grows, a bootstrap whose weights are shared inside blocks tends to the same "
        "distribution as the one with a weight for each point, and it hardly matters how points are grouped."
    )

    data: tuple[str, ...] = ("diabetes", "uci/concrete")
    sizes: tuple[int, ...] = (5, 10, 20, 50, 100, 200)  # S; n is added
    draws: int = 4000  # replicates of the ridge
    features: int = 30  # random ReLU features
    penalty: float = 1e-3
    net_data: str = "diabetes"
    net_sizes: tuple[int, ...] = (5, 20, 100)
    net_draws: int = 100
    widths: tuple[int, ...] = (32, 32)
    steps: int = 150
    learning_rate: float = 3e-3
    rows: int | None = None  # of the training split; None: all
    places: int = 50  # test inputs

    @property
    def dataset_names(self) -> Sequence[str]:
        return tuple(dict.fromkeys((*self.data, self.net_data)))

    def jobs(self) -> list[Job]:
        return [
            {"model": model, "data": data, "seed": seed}
            for seed in self.seeds
            for model, data in (*(("ridge", data) for data in self.data), ("net", self.net_data))
        ]

    def measure(self, job: Job, context: RunContext) -> Rows:
        data = context.load_data(job["data"])
        x, y = _tensors(data.train, self.rows)
        at = _tensors(data.test, self.places)[0]
        run = self._ridge if job["model"] == "ridge" else self._nets
        return {"distances": run(x, y, at, job["seed"], context)}

    def _ridge(self, x: Tensor, y: Tensor, at: Tensor, seed: int, context: RunContext) -> list[dict[str, Any]]:
        rng = torch.Generator().manual_seed(derive_seed("features"))  # the same for all seeds
        first = torch.randn(x.shape[1] + 1, self.features, generator=rng).double() / x.shape[1] ** 0.5
        phi, phi_at = (_random_features(inputs, first) for inputs in (x, at))
        target = y.double().flatten()
        centre = ridge(phi, target, torch.ones(1, len(y)).double(), phi_at, self.penalty)

        def replicates(blocks: Tensor, *name: int | str) -> Tensor:
            weights = block_weights(blocks, self.draws, seed, *name)
            return ridge(phi, target, weights, phi_at, self.penalty) - centre

        each = torch.arange(len(y))
        true = replicates(each, "unblocked")
        rows = [{"S": len(y), "grouping": UNBLOCKED, **compute_distances(replicates(each, "again"), true)}]
        for size in (*self.sizes, len(y)):
            for kind in GROUPINGS:
                ours = replicates(assign_groups(kind, y, size, seed), kind, size)
                found = compute_distances(ours, true)
                if kind == "random":
                    others = replicates(assign_groups(kind, y, size, derive_seed(seed, "regrouped")), "regrouped", size)
                    found["ks_regrouped"] = compute_distances(others, ours)["ks"]
                rows.append({"S": size, "grouping": kind, **found})
        return rows

    def _nets(self, x: Tensor, y: Tensor, at: Tensor, seed: int, context: RunContext) -> list[dict[str, Any]]:
        data, loss, num = TensorDataset(x, y), nn.MSELoss(), self.net_draws

        def model() -> nn.Module:
            torch.manual_seed(seed)  # same initialization for all members
            return MLP(x.shape[1], 1, widths=self.widths)

        def outputs(method: Method, part: str, named: int = seed) -> Tensor:
            config = context.config(
                part, epochs=self.steps, batch_size=len(y), seed=named,
                optimizer=partial(torch.optim.Adam, lr=self.learning_rate),
            )  # fmt: skip
            predictor = method.fit(model, data, config)
            return predictor.predict(at, predictor.num_distinct or 1).samples[..., 0].double()

        centre = outputs(Deterministic(loss), "deterministic")
        true = outputs(BayesianBootstrap(loss, num_members=num), "unblocked") - centre
        again = outputs(BayesianBootstrap(loss, num_members=num), "again", derive_seed(seed, "again")) - centre
        rows = [{"S": len(y), "grouping": UNBLOCKED, **compute_distances(again, true)}]
        for size in self.net_sizes:
            blocks = tuple(assign_groups("random", y, size, seed).tolist())
            method = BlockBootstrap(loss, num_members=num, blocks=blocks)
            rows.append(
                {"S": size, "grouping": "random", **compute_distances(outputs(method, f"S={size}") - centre, true)}
            )
        return rows

    def tables(self, rows: Rows) -> list[Table]:
        columns = (
            MetricColumn("ks", "KS", digits=3),
            MetricColumn("ks_worst", "KS at the worst x", digits=3),
            MetricColumn("w1", "W₁ / std", digits=3),
            MetricColumn("ratio", "std / unblocked", digits=3),
            MetricColumn("ratio_error", "its error at one x", digits=3),
        )
        found = sorted(rows["distances"], key=lambda row: (row["S"], row["grouping"] == UNBLOCKED))
        random = [row for model in ("ridge", "net") for row in found if row["model"] == model and _is_fair(row)]
        regrouped = MetricColumn("ks_regrouped", "KS to another grouping", digits=3)
        title = f"against the random-weight bootstrap, means over {self.places} inputs, {len(self.seeds)} seeds."
        return [
            tabulate(
                f"Random blocks {title}",
                [
                    row | {"S": _block_label(row)}
                    for data in self.dataset_names
                    for row in random
                    if row["data"] == data
                ],
                by=("model", "data", "S"),
                columns=(*columns, regrouped),
                note="W₁ / std: Wasserstein's distance in units of the unblocked standard deviation.",
            ),
            tabulate(
                f"Groupings {title}",
                [row for data in self.data for row in found if _is_ridge(row, data) and row["grouping"] in GROUPINGS],
                by=("data", "S", "grouping"),
                columns=columns,
                note="sorted: blocks of points whose targets are neighbours, which no random grouping gives.",
            ),
        ]

    def checks(self, rows: Rows) -> list[Check]:
        found, pair = rows["distances"], ("data", "seed")
        checks = []
        for model, sizes in (("ridge", self.sizes), ("net", self.net_sizes)):
            mine = [row for row in found if row["model"] == model]
            first, last = ({"grouping": "random", "S": size} for size in (min(sizes), max(sizes)))
            checks += [
                compare_groups(
                    f"{model}: the distance to the unblocked bootstrap is less with S = {last['S']} than with "
                    f"{first['S']} blocks",
                    mine, "ks", last, first, expect="lower", pair=pair, digits=3,
                ),
                compare_groups(
                    f"{model}: with S = {last['S']} blocks it is that of two unblocked runs, within {_MARGIN}",
                    mine, "ks", last, {"grouping": UNBLOCKED}, expect="equal", margin=_MARGIN, pair=pair, digits=3,
                ),
            ]  # fmt: skip
        size = max(self.sizes)
        ridges = [row for row in found if row["model"] == "ridge"]
        again = [row | {"ks_regrouped": row["ks"]} for row in ridges if row["grouping"] == UNBLOCKED]
        return [
            *checks,
            compare_groups(
                f"ridge: two random groupings into {size} blocks are as close as two unblocked runs, within {_MARGIN}",
                [*again, *(row for row in ridges if row["grouping"] == "random")], "ks_regrouped",
                {"grouping": "random", "S": size}, {"grouping": UNBLOCKED},
                expect="equal", margin=_MARGIN, pair=pair, digits=3,
            ),
            compare_groups(
                f"ridge: stratified blocks give the spread of random ones, S = {size}, within {_MARGIN:.0%}",
                ridges, "ratio", {"grouping": "stratified", "S": size}, {"grouping": "random", "S": size},
                expect="equal", margin=_MARGIN, pair=pair, digits=3,
            ),
        ]  # fmt: skip

    def plots(self, rows: Rows) -> "dict[str, Figure]":
        from matplotlib.figure import Figure

        cases = [*(("ridge", data) for data in self.data), ("net", self.net_data)]
        figure = Figure(figsize=(4.3 * len(cases), 7.0), layout="constrained")
        panels = figure.subplots(2, len(cases), squeeze=False, sharey="row")
        for (model, data), upper, lower in zip(cases, *panels, strict=True):
            mine = [row for row in rows["distances"] if (row["model"], row["data"]) == (model, data)]
            _plot_distances(upper, mine, "ks", "KS distance to unblocked", "log")
            floor = [row["ks"] for row in mine if row["grouping"] == UNBLOCKED]
            upper.axhline(sum(floor) / len(floor), color="black", lw=1, ls=":", label="two unblocked runs")
            upper.legend(fontsize=9)
            upper.set_title(f"{model}, {data}")
            _plot_distances(lower, mine, "ratio", "standard deviation / unblocked", "linear")
            lower.axhline(1.0, color="black", lw=1, ls=":")
        return {"blocks": figure}

    @property
    def note(self) -> str:
        return (
            f"The paper proves the theorem without measurements. Ridge regression on {self.features} random features "
            f"solved for {self.draws:,} weights each; nets of {' × '.join(map(str, self.widths))} trained with "
            f"{self.net_draws} weights each for {self.steps} steps on {self.net_data}, with one initialization."
        )


def _plot_distances(ax: "Axes", rows: Sequence[dict[str, Any]], key: str, label: str, scale: str) -> None:
    from neuboots_paper.plots import plot_scaling

    lines: dict[str, dict[int, list[float]]] = {}
    for row in rows:
        if row["grouping"] != UNBLOCKED:
            lines.setdefault(row["grouping"], {}).setdefault(row["S"], []).append(row[key])
    plot_scaling(ax, lines, xlabel="blocks S", ylabel=label, yscale=scale)


def _random_features(x: Tensor, first: Tensor) -> Tensor:
    """(1, ReLU((x, 1) W)): (n, d + 1)."""
    one = x.new_ones(len(x), 1).double()
    return torch.cat([one, (torch.cat([x.double(), one], 1) @ first).relu()], 1)


def _tensors(part: Any, limit: int | None) -> tuple[Tensor, Tensor]:
    """First rows of a split: (n, D), (n,)."""
    rows = [part[k] for k in range(len(part) if limit is None else min(limit, len(part)))]
    x, y = (torch.stack([torch.as_tensor(row[k]) for row in rows]) for k in (0, 1))
    return x, y.flatten()


def _is_fair(row: dict[str, Any]) -> bool:
    return row["grouping"] in ("random", UNBLOCKED)


def _is_ridge(row: dict[str, Any], data: str) -> bool:
    return (row["model"], row["data"]) == ("ridge", data)


def _block_label(row: dict[str, Any]) -> Any:
    """S, or the name of the unblocked bootstrap."""
    return UNBLOCKED if row["grouping"] == UNBLOCKED else row["S"]
