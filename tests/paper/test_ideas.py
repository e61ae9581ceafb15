"""The trials of decision 0010: their arithmetic against plain oracles, their rows and their page."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

import benchmarks.ideas.world
from benchmarks.ideas import generators, influence
from benchmarks.ideas.__main__ import main, read_rows
from benchmarks.ideas.judge import PAGE, correlation, follows, judged, page_with, tables
from benchmarks.ideas.tried import IDEAS
from benchmarks.ideas.world import FUNCTIONS, NOISES, Params, Setting, World, beginnings, fit_weighted, net, tangent


@pytest.fixture(scope="module")
def world() -> World:
    return World(Setting("gap", "varying", n=40, width=8, sets=3, steps=60), replicates=4)


def net_of(params: Params, r: int) -> nn.Sequential:
    """Net r by torch's own layers."""
    layers: list[nn.Module] = []
    for layer in range(4):
        weight, bias = params[f"weight{layer}"][r], params[f"bias{layer}"][r]
        made = nn.Linear(*weight.shape)
        made.weight.data, made.bias.data = weight.T.clone(), bias[0].clone()
        layers += [made, nn.ReLU()]
    return nn.Sequential(*layers[:-1]).double()


# -- the world -------------------------------------------------------------------------------------------


def test_data_leave_the_gap_empty_and_the_noise_is_as_told() -> None:
    setting = Setting("gap", "varying", n=2000, sets=2)
    x, y = setting.data
    assert x.abs().min() >= 0.5
    assert x.abs().max() <= 2.0
    noise = y - torch.sin(2 * x)
    for low, high in ((0.5, 0.7), (1.8, 2.0)):
        part = noise[(x.abs() > low) & (x.abs() < high)]
        assert float(part.std()) == pytest.approx(0.1 + 0.1 * (low + high), abs=4 * 0.5 / (2 * len(part)) ** 0.5)


def test_nets_side_by_side_are_the_nets_one_by_one(world: World) -> None:
    for r in range(3):
        expected = net_of(world.plain, r)(world.x[r].double())
        assert torch.allclose(net(world.plain, world.x)[r].double(), expected, atol=1e-5)


def test_training_side_by_side_is_training_alone() -> None:
    many = World(Setting("smooth", "constant", n=40, width=8, sets=3, steps=20))
    alone = {name: value[1:2] for name, value in many.start.items()}
    trained = fit_weighted(alone, many.x[1:2], many.y[1:2], steps=20)
    for name, value in trained.items():
        assert torch.allclose(many.plain[name][1:2], value, atol=1e-5)


def test_a_row_of_weight_zero_is_not_seen() -> None:
    setting = Setting("smooth", "constant", n=40, width=8, sets=1, steps=10)
    x, y = setting.data
    weights = torch.ones_like(y)
    weights[:, ::2] = 0.0
    spoiled = y + 100.0 * (weights == 0)
    start = beginnings(1, 8, 0)
    first, second = (fit_weighted(start, x, targets, weights, steps=10) for targets in (y, spoiled))
    assert torch.equal(first["weight0"], second["weight0"])


@pytest.mark.parametrize("head", [False, True])
def test_the_tangent_is_that_of_autograd(world: World, head: bool) -> None:
    t = tangent(world.plain, world.x, world.y, world.grid, head=head)
    module = net_of(world.plain, 1)
    params = {k: v for k, v in module.named_parameters() if not head or k.startswith("6")}

    def jacobian(points: torch.Tensor) -> torch.Tensor:
        outputs = module(points.double())[:, 0]
        return torch.stack([torch.cat([g.flatten() for g in torch.autograd.grad(z, params.values(), retain_graph=True)])
                            for z in outputs])  # fmt: skip

    at_data, at_grid = jacobian(world.x[1]), jacobian(world.grid[1])
    theta = torch.cat([value.flatten() for value in params.values()])
    ridge = torch.full((3,), 0.1, dtype=torch.float64)
    inverse = torch.linalg.inv(at_data @ at_data.T + 0.1 * torch.eye(40, dtype=torch.float64))
    assert torch.allclose(t.response(ridge)[1], at_grid @ at_data.T @ inverse, atol=1e-3)
    assert torch.allclose(t.hat(ridge)[1], at_data @ at_data.T @ inverse, atol=1e-3)
    assert torch.allclose(t.target[1], at_data @ theta + t.residual[1], atol=1e-4)


# -- generators ------------------------------------------------------------------------------------------


def test_generators_are_the_plain_net_at_ones(world: World) -> None:
    """All but GBS, whose new columns count at α = 1 as well."""
    ones = torch.ones(1, 1, 8)
    extra = {**generators.learned_maps(world), **generators.scales(world), **generators.predict(world)}
    params = {**world.plain, **extra}
    expected = net(world.plain, world.x)
    for g in (generators.paper, generators.every_layer, generators.low_rank, generators.scaled, generators.bilinear):
        assert torch.allclose(g(params, world.x, ones), expected, atol=1e-5)


def test_the_papers_band_is_its_closed_form(world: World) -> None:
    """Var W(φ ⊙ α) = Σ_d (w_d φ_d)² S/(S + 1) − (Σ_d w_d φ_d)²/(S + 1) for S × Dirichlet(1, …, 1)."""
    terms = generators.features(world.plain, world.grid) * world.plain["weight3"].mT
    variance = (terms.square().sum(-1) * 8 - terms.sum(-1).square()) / 9
    band = generators.band_of(world, generators.paper, world.plain, 8)
    error = band.sd / variance.sqrt() - 1
    assert float(error.abs().mean()) < 4 * (1 / (2 * generators.DRAWN)) ** 0.5


@pytest.mark.parametrize(("resample", "kinds"), [("epoch", 2), ("step", 12), ("sample", 12 * 10)])
def test_draws_are_held_as_long_as_told(resample: str, kinds: int) -> None:
    draws = generators.Draws(resample=resample)  # type: ignore[arg-type]
    seen = torch.cat([draws.at(step, 12, 10, 6 * 50, 4)[0] for step in range(12)])
    assert len(seen.unique(dim=0)) == kinds
    assert torch.allclose(seen.sum(1), torch.tensor(4.0))


def test_mirrored_draws_are_turned_about() -> None:
    alpha = generators.Draws(antithetic=True).at(3, 12, 400, 300, 16)[0]
    correlations = correlation(alpha[:200].T, alpha[200:].T)
    assert float(correlations.max()) < -0.4


def test_features_go_to_the_block_that_excites_them(world: World) -> None:
    blocks = generators.neighbours(world)
    assert torch.equal(blocks.gather(1, world.x[..., 0].argsort(1)).diff(dim=1).clamp(max=0), torch.zeros(3, 39).long())
    means = generators.block_means(world.x, blocks)
    for block in range(generators.NEIGHBOURHOODS):
        assert float(means[2, block]) == pytest.approx(float(world.x[2][blocks[2] == block].mean()), abs=1e-5)


# -- the influence form ----------------------------------------------------------------------------------


def test_ridges_fit_as_they_say(world: World) -> None:
    t = tangent(world.plain, world.x, world.y, world.grid)
    hat = t.hat(influence.as_close(t))
    left = (t.target[..., None] - hat @ t.target[..., None]).square().sum((1, 2))
    assert torch.allclose(left.sqrt(), t.residual.norm(dim=1), rtol=0.1)
    df = t.hat(influence.of_freedom(t, 3.0)).diagonal(dim1=1, dim2=2).sum(1)
    assert torch.allclose(df, torch.full_like(df, 3.0), rtol=0.05)


def test_the_remainder_is_what_is_left_of_white_noise(world: World) -> None:
    t = tangent(world.plain, world.x, world.y, world.grid)
    hat = t.hat(influence.of_freedom(t, 6.0))
    noise = torch.randn(40, 20_000, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    left = (noise - hat[0] @ noise).square().mean(1)
    assert torch.allclose(influence.remainder(hat)[0], left, atol=4 * (2 / 20_000) ** 0.5)


def test_residual_rules_agree_where_noise_and_leverage_are_even() -> None:
    """With H = I/2 and residuals of one size, all corrected rules give that size / ¼; the raw one does not."""
    t = influence.Tangent(torch.ones(1, 4), torch.eye(4)[None], torch.eye(4)[None], torch.ones(1, 4), torch.ones(1, 4))
    t = influence.Tangent(*(value.double() for value in (t.values, t.vectors, t.cross, t.residual, t.target)))
    hat = t.hat(torch.ones(1, dtype=torch.float64))
    for name, rule in influence.NOISES.items():
        assert torch.allclose(rule(t, hat), torch.full((1, 4), 1.0 if name == "raw" else 4.0, dtype=torch.float64))


def test_a_rich_enough_head_is_taught_the_answer(world: World) -> None:
    """At the data themselves the features of all layers span nearly what the whole net answers."""
    t = tangent(world.plain, world.x, world.y, world.x)
    answers = influence._deviations(t, influence.RIDGE, influence.NOISE).norm(dim=-1)
    wide = World(world.setting, replicates=4)
    wide.grid = world.x  # judged at the data themselves
    wide.plain = world.plain
    taught = influence.taught(wide, every=True).sd
    assert float(correlation(taught, answers).min()) > 0.9


def test_short_replicates_do_not_share_the_weights_of_the_bootstrap_that_judges_them(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    def seeds_of(run: Callable[[], object]) -> set[int]:
        seen = []

        def watched(shape: tuple[int, int, int], seed: int) -> torch.Tensor:
            seen.append(seed)
            return torch.ones(shape)

        for module in (generators, benchmarks.ideas.world):
            monkeypatch.setattr(module, "random_weights", watched)
        run()
        return set(seen)

    fresh = World(world.setting, replicates=12)
    short, true = seeds_of(lambda: generators.short(world, 20, 0.01)), seeds_of(lambda: fresh.true)
    assert len(short) == 20
    assert len(true) == 12
    assert not short & true


# -- judging ---------------------------------------------------------------------------------------------


def test_a_band_of_the_right_size_is_judged_right(world: World) -> None:
    wide = judged(world, generators.Band(world.curve, torch.full_like(world.curve, 1e3)))
    none = judged(world, generators.Band(world.curve, torch.zeros_like(world.curve)))
    assert (wide["mean"], wide["worst"], none["mean"], none["ratio"]) == (1.0, 1.0, 0.0, 0.0)
    errors = (world.curve - world.setting.truth)[:, world.setting.grid.abs() > 0.51]
    assert wide["rmse"] == pytest.approx(float(errors.square().mean().sqrt()), abs=1e-4)


def test_the_correlation_is_corrected_for_the_noise_of_few_replicates() -> None:
    random = torch.Generator().manual_seed(0)
    sd = 0.5 + torch.rand(300, 40, generator=random)
    replicates = sd * torch.randn(8, 300, 40, generator=random)
    assert float(correlation(sd, replicates.std(0)).mean()) < 0.85
    assert follows(sd, replicates) == pytest.approx(1.0, abs=0.05)
    other = torch.rand(300, 40, generator=random)
    assert follows(other, replicates) == pytest.approx(0.0, abs=0.05)


# -- rows and page ---------------------------------------------------------------------------------------


def test_every_idea_gives_a_row(tmp_path: Path) -> None:
    file = tmp_path / "rows.jsonl"
    main(["--scale", "smoke", "--rows", str(file)])
    rows = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]
    assert [(row["group"], row["idea"]) for row in rows] == [(idea.group, idea.name) for idea in IDEAS]
    assert all(0.0 <= row["mean"] <= 1.0 and row["rmse"] > 0 for row in rows)
    main(["--scale", "smoke", "--rows", str(file)])  # what is there is not measured again
    assert len(file.read_text(encoding="utf-8").splitlines()) == len(rows)
    assert all(idea.name in tables(rows) for idea in IDEAS)


def test_the_page_shows_the_committed_rows() -> None:
    text = PAGE.read_text(encoding="utf-8")
    assert page_with(text, read_rows()) == text


def test_the_rows_are_enough_to_decide() -> None:
    """With n = 300 and width 64 every idea has the same settings: all functions, both noises, forty data sets."""
    rows = read_rows()
    found = {}
    for idea in IDEAS:
        mine = [row for row in rows if (row["group"], row["idea"]) == (idea.group, idea.name)]
        settings = [(row["function"], row["noise"]) for row in mine if (row["n"], row["width"]) == (300, 64)]
        assert len(set(settings)) == len(settings) >= 3
        found[idea.name] = set(settings)
    (settings,) = {frozenset(each) for each in found.values()}
    assert {function for function, _ in settings} == set(FUNCTIONS)
    assert {noise for _, noise in settings} == set(NOISES)
    assert all(row["sets"] >= 40 and row["scale"] in ("full", "all") for row in rows)
    assert len({row["seed"] for row in rows}) == 1
