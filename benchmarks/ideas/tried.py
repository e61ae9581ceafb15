"""The ideas that were tried, and the settings they were tried in."""

from dataclasses import replace
from functools import partial

from benchmarks.ideas import generators as g
from benchmarks.ideas import influence as i
from benchmarks.ideas.generators import Band, Draws, annealed, generator
from benchmarks.ideas.judge import Idea
from benchmarks.ideas.world import Setting, World

FEWER = 8  # replicates of the true bootstrap, in the settings beside the main ones


def sampling_sd(world: World) -> Band:
    """No method: the sd over data sets, which nobody knows. What it misses is bias, or the chance of few data sets."""
    return Band(world.curve, world.curve.std(0).expand_as(world.curve))


def true_bootstrap(world: World) -> Band:
    return Band(world.curve, world.true.std(0), len(world.true))


paper = partial(generator, form=g.paper)

IDEAS = [
    Idea("reference", "sampling sd", sampling_sd, further=True),
    Idea("reference", "true bootstrap", true_bootstrap, None, further=True),
    Idea("paper", "c = 1, an α each epoch", partial(paper, draws=Draws(resample="epoch"))),
    Idea("blocks", "neighbours in x, features in turn", partial(g.aligned, by="x", deal="turn")),
    Idea("blocks", "neighbours in x, features by activation", partial(g.aligned, by="x", deal="activation")),
    Idea("blocks", "k-means of features, by activation", partial(g.aligned, by="features", deal="activation")),
    Idea("depth", "every layer its own dealing", partial(generator, form=g.every_layer)),
    Idea("depth", "every layer, learned map of rank 8", partial(generator, form=g.low_rank, extra=g.learned_maps)),
    Idea("depth", "GBS", partial(generator, form=g.gbs, extra=g.columns)),
    Idea("schedule", "c = 1, an α each step", partial(paper, draws=Draws(resample="step"))),
    Idea("schedule", "c = 1, an α each sample", paper, further=True),
    Idea("schedule", "c = 20, an α each sample", partial(paper, draws=annealed(20.0, 20.0), predict=20.0)),
    Idea("schedule", "c from 100 to 1", partial(paper, draws=annealed(100.0, 1.0))),
    Idea("schedule", "c from 1 to 100, drawn with 1", partial(paper, draws=annealed(1.0, 100.0))),
    Idea("schedule", "half the steps warm-up", partial(paper, draws=Draws(warmup=0.5))),
    Idea("schedule", "twice the steps", partial(paper, longer=2), 2),
    Idea("form", "1 + s(α − 1), s trained", partial(generator, form=g.scaled, extra=g.one_scale)),
    Idea("form", "1 + s_d(α_d − 1), s trained", partial(generator, form=g.scaled, extra=g.scales)),
    Idea("form", "mirrored pairs of α", partial(paper, draws=Draws(antithetic=True))),
    Idea("form", "φᵀM(α − 1), M trained", partial(generator, form=g.bilinear, extra=g.predict)),
    Idea("form", "the same, from the trained net", partial(generator, form=g.bilinear, extra=g.answer_after), 2),
    Idea("taught", "one number for each feature", i.taught_in_the_papers_form),
    Idea("taught", "φᵀM(w − 1), last layer", i.taught, further=True),
    Idea("taught", "last layer, inputs elsewhere too", partial(i.taught, elsewhere=True), further=True),
    Idea("taught", "all layers", partial(i.taught, every=True), further=True),
    Idea("taught", "all layers, inputs elsewhere too", partial(i.taught, every=True, elsewhere=True), further=True),
    Idea("short", "10 replicates, rate 0.01", partial(g.short, count=10, lr=0.01), 2, further=True),
    Idea("short", "10 replicates, rate 0.003", partial(g.short, count=10, lr=0.003), 2),
    Idea("short", "5 replicates, rate 0.01", partial(g.short, count=5, lr=0.01), 2),
    Idea("short", "10 replicates of drawn noise", partial(i.short_drawn, count=10, lr=0.01), 2, further=True),
    Idea("short", "10 replicates, × leverage", partial(i.short_scaled, count=10, lr=0.01), 2, further=True),
    Idea("short", "20 replicates, × leverage", partial(i.short_scaled, count=20, lr=0.01), 2, further=True),
    Idea("influence", "head alone", partial(i.influence, head=True), further=True),
    *(
        Idea("influence", f"{ridge}, {noise}", partial(i.influence, ridge=ridge, noise=noise), further=True)
        for ridge, noise in [
            *((ridge, i.NOISE) for ridge in i.RIDGES),
            *((i.RIDGE, noise) for noise in i.NOISES if noise != i.NOISE),
        ]
    ),
    Idea("influence", f"{i.RIDGE}, {i.NOISE}, × one replicate", i.scaled_by_one, 2, further=True),
]


def worlds(scale: str) -> list[World]:
    """Full: three settings, with n = 300 and 100. All: the other pairs of function and noise too, and wider nets."""
    if scale == "smoke":
        return [World(Setting("gap", "varying", n=60, width=16, sets=3, steps=20), replicates=4)]
    first = [Setting("smooth", "constant"), Setting("wiggly", "varying"), Setting("gap", "varying")]
    others = [Setting("smooth", "varying"), Setting("wiggly", "constant"), Setting("gap", "constant")]
    found = []
    for settings in [first, others] if scale == "all" else [first]:
        found += [World(setting) for setting in settings]
        found += [World(replace(setting, n=100), FEWER) for setting in settings]
    return found + [World(replace(setting, width=256), FEWER) for setting in first if scale == "all"]
