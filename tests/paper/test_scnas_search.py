"""The SCNAS search: it finds what it should, by its seed alone, and goes on where it was cut short."""

import contextlib
import io
import json
import re
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from _scnas import copy_weights, make_certain, noise
from matplotlib.image import imread
from torch.nn import functional
from torch.utils.data import Dataset, TensorDataset

from neuboots.cli._console import UsageError
from neuboots_paper.scnas import KINDS, SCNAS, SearchResult, SuperNet, expected_loss, random_genotype, search
from neuboots_paper.scnas.command import Scnas, Trial, balls, sentence, verdict


def far_voxels(seed: int, n: int = 16, size: int = 8) -> TensorDataset:
    """y(d) says whether x(d − 3) > 0: past the 3×3×3 stem, only a dilated convolution sees that far."""
    x = noise(n, 1, size, size, size, seed=seed)
    shifted = functional.pad(x[:, 0], (0, 0, 0, 0, 3, 0))[:, :size]
    return TensorDataset(x, (shifted > 0).long())


@pytest.mark.parametrize("compared", [None, 2])
def test_the_search_finds_the_only_operation_that_can_do_it(compared: int | None) -> None:
    found = search(
        far_voxels(1), far_voxels(2), num_classes=2, width=4, levels=1, nodes=1, epochs=24, warmup=4, batch_size=8,
        lr=2e-2, architecture_lr=0.1, compared=compared, seed=1, progress=False,
    )  # fmt: skip
    assert found.genotype["encoder_normal"] == [["dilated_conv"]]
    assert found.probabilities["encoder_normal"][0]["dilated_conv"] > 0.5  # 1/7 before
    searched = expected_loss(found.net, far_voxels(3), samples=20, seed=0)
    uniform = expected_loss(found.net, far_voxels(3), samples=20, seed=0, uniform=True)
    # the same 20 draws of noise for both: more than two standard errors of the difference
    gain = uniform - searched
    assert gain.mean() > 2 * gain.std() / 20**0.5
    assert searched.mean() < uniform.mean()


def short(folder: Path | None = None, validation: Dataset[Any] | None = None, **options: Any) -> SearchResult:
    chosen: dict[str, Any] = {"width": 2, "levels": 2, "epochs": 4, "warmup": 1, "batch_size": 3, "seed": 5, **options}
    judging = far_voxels(2, 5, 4) if validation is None else validation
    return search(far_voxels(1, 8, 4), judging, num_classes=2, folder=folder, progress=False, **chosen)


def same(a: SearchResult, b: SearchResult) -> bool:
    weights = zip(a.net.state_dict().values(), b.net.state_dict().values(), strict=True)
    figures = (a.genotype, a.objective, a.temperature, a.probabilities) == (
        b.genotype,
        b.objective,
        b.temperature,
        b.probabilities,
    )
    return figures and all(torch.equal(x, y) for x, y in weights)


def test_the_seed_governs_the_search_and_the_caller_s_random_state_is_left_alone() -> None:
    before = torch.get_rng_state()
    first = short()
    assert torch.equal(torch.get_rng_state(), before)
    torch.rand(3)
    assert same(first, short())
    assert first.objective != short(seed=6).objective


class Rows(Dataset[Any]):
    """Rows from a disk, one by one, that draw something as they are read."""

    def __init__(self, data: TensorDataset) -> None:
        self.data = data

    def __len__(self) -> int:
        return len(self.data)

    def __getitem__(self, i: int) -> Any:
        torch.rand(i + 1)
        return self.data[i]


def test_cells_are_drawn_alike_however_the_rows_are_read() -> None:
    """What a row draws for itself leaves the draws of the architecture alone."""
    assert same(short(validation=Rows(far_voxels(2, 5, 4))), short())


def test_void_voxels_count_for_nothing() -> None:
    """Half of the labels void: the search follows the other half, whatever their logits are."""
    x, y = far_voxels(2, 5, 4).tensors
    ignore_index = y.clone()
    ignore_index[:, :2] = 255
    ignoring = partial(functional.cross_entropy, ignore_index=255)
    net = SuperNet(1, 2, width=2, levels=1)
    make_certain(net, random_genotype(2, seed=1))
    losses = expected_loss(net, TensorDataset(x, ignore_index), samples=1, seed=0, batch_size=5, loss=ignoring)
    outputs = net(x, net.pick(random_genotype(2, seed=1))).detach()
    torch.testing.assert_close(losses[0], functional.cross_entropy(outputs[:, :, 2:], y[:, 2:]))
    assert len(short(validation=TensorDataset(x, ignore_index), loss=ignoring).objective) == 9
    alone = TensorDataset(x, torch.full_like(y, 255))
    with pytest.raises(FloatingPointError, match="the loss became nan on batch 1 of the data: look for NaN"):
        expected_loss(net, alone, samples=1, seed=0, loss=ignoring)


def spoilt(kind: str) -> Dataset[Any]:
    x, y = far_voxels(2, 5, 4).tensors
    if kind == "stream":
        return torch.utils.data.ChainDataset([])
    return {
        "void": TensorDataset(x, y.masked_fill(y == 1, 255)),
        "bytes": TensorDataset(x, y.byte()),
        "images": TensorDataset(x[:, :, 0], y[:, 0]),
        "two inputs": TensorDataset(x, x, y),
    }[kind]


@pytest.mark.parametrize(
    ("kind", "sentence"),
    [
        ("stream", "length"),
        ("void", r"the loss refuses targets .*Target 255 is out of bounds.* below num_classes: where some are void"),
        ("bytes", "the loss refuses targets .* of torch.uint8 .* expected labels .* of torch.int64"),
        ("images", r"got inputs of shape \(3, 1, 4, 4\); expected \(N, channels, D, H, W\)"),
        ("two inputs", r"got inputs of type tuple; expected \(N, channels, D, H, W\)"),
    ],
)
def test_rows_that_cannot_be_searched_on_are_named(kind: str, sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        short(validation=spoilt(kind))
    with pytest.raises(ValueError, match=sentence):
        expected_loss(SuperNet(1, 2, width=2, levels=1), spoilt(kind), samples=1, seed=0, batch_size=3)


def test_volumes_of_other_types_are_searched_on_as_the_net_s() -> None:
    x, y = far_voxels(2, 5, 4).tensors
    assert same(short(validation=TensorDataset(x.double(), y)), short())
    net = SuperNet(1, 2, width=2, levels=1).double()
    assert expected_loss(net, TensorDataset(x, y), samples=1, seed=0).isfinite().all()


def test_history_and_temperature_are_kept_step_by_step() -> None:
    """Three rows a batch: 8 rows make 3 steps, and the architecture moves in 3 of 4 epochs; the temperature falls."""
    found = short(temperature=(4.0, 1.0))
    assert len(found.objective) == len(found.temperature) == 9
    assert found.temperature[0] == 4.0
    assert found.temperature[-1] == pytest.approx(1.0)
    ratios = [b / a for a, b in zip(found.temperature, found.temperature[1:], strict=False)]
    assert ratios == pytest.approx([0.25 ** (1 / 8)] * 8)
    assert set(found.genotype) == set(KINDS)
    assert "9 steps" in str(found)


class Interrupting(Dataset[Any]):
    """Rows as a slow disk gives them; after so many of them somebody presses Ctrl-C."""

    def __init__(self, data: TensorDataset, after: int) -> None:
        self.data, self.left = data, after

    def __len__(self) -> int:
        return len(self.data)

    def __getitem__(self, i: int) -> Any:
        self.left -= 1
        if self.left < 0:
            raise KeyboardInterrupt
        return self.data[i]


@pytest.fixture(scope="module")
def whole() -> SearchResult:
    return short(validation=Interrupting(far_voxels(2, 5, 4), 10**6))


@pytest.mark.parametrize("after", [1, 12])
def test_an_interrupted_search_goes_on_as_if_nothing_had_happened(
    tmp_path: Path, whole: SearchResult, after: int
) -> None:
    with pytest.raises(KeyboardInterrupt):
        short(tmp_path, Interrupting(far_voxels(2, 5, 4), after))
    assert same(short(tmp_path, Interrupting(far_voxels(2, 5, 4), 10**6)), whole)
    # what is finished is found again without a step
    assert same(short(tmp_path, Interrupting(far_voxels(2, 5, 4), 0)), whole)
    assert [path.name for path in tmp_path.iterdir()] == ["search.ckpt"]


def test_a_folder_of_another_search_or_a_damaged_one_is_refused(tmp_path: Path) -> None:
    short(tmp_path)
    with pytest.raises(ValueError, match=r"is of another search \(seed was 5, is 6\): choose another folder"):
        short(tmp_path, seed=6)
    x, y = far_voxels(1, 8, 4).tensors
    colours = TensorDataset(x.repeat(1, 2, 1, 1, 1), y)
    with pytest.raises(ValueError, match=r"is of another search \(channels was 1, is 2"):
        search(colours, colours, num_classes=2, folder=tmp_path, progress=False)
    (tmp_path / "search.ckpt").write_bytes(b"half a file")
    with pytest.raises(ValueError, match="cannot read .*search.ckpt .*; delete it to search anew"):
        short(tmp_path)
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match="which cannot be made"):
        short(tmp_path / "file" / "folder")


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"warmup": 4}, "warmup is 4; expected a whole number of epochs from 0 to 3"),
        ({"lr": 0.0}, "lr is 0.0; expected a positive number"),
        ({"lr": "fast"}, "lr is 'fast'; expected a positive number"),
        ({"temperature": 1.0}, "temperature is 1.0; expected (first, last)"),
        ({"seed": None}, "seed is None; expected an int"),
        ({"device": "nowhere"}, "got device='nowhere', which cannot be used here"),
        ({"temperature": (1.0, 2.0)}, "temperature is (1.0, 2.0); expected (first, last), positive and not rising"),
        ({"compared": 1}, "compared is 1; expected None for all candidates, or at least 2"),
        ({"nodes": 0}, "got nodes=0"),
        ({"epochs": 0}, "got epochs=0"),
    ],
)
def test_bad_options_get_one_sentence(options: Mapping[str, Any], sentence: str) -> None:
    with pytest.raises(ValueError) as caught:  # noqa: PT011 (the sentence is compared)
        short(**options)
    assert str(caught.value).startswith(sentence)


def test_a_loss_that_is_not_a_number_stops_the_search() -> None:
    with pytest.raises(FloatingPointError, match="the loss became nan in step 1 of the search"):
        short(loss=lambda outputs, targets: outputs.sum() * float("nan"))


def test_expected_loss_is_the_mean_over_rows() -> None:
    """Over batches of unequal size, and for an architecture that is certain: the loss of the fixed net."""
    supernet, genotype = SuperNet(1, 2, width=4, levels=2), random_genotype(2, seed=1)
    make_certain(supernet, genotype)
    net = SCNAS(1, 2, genotype=genotype, width=4, levels=2)
    copy_weights(net, supernet)
    data = far_voxels(1, 7, 4)
    losses = expected_loss(supernet, data, samples=2, seed=0, batch_size=3)
    x, y = data.tensors
    torch.testing.assert_close(losses, functional.cross_entropy(net(x), y).detach().expand(2))


# -- the experiment ------------------------------------------------------------------------------------


def run(folder: Path, *seeds: int) -> str:
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        Scnas(seeds=seeds, smoke=True, num_workers=1, out=folder).run()
    return out.getvalue()


def test_the_experiment_prints_what_it_measured_and_finds_it_again(tmp_path: Path) -> None:
    said = run(tmp_path, 3)
    genotype = json.loads((tmp_path / "genotype-3.json").read_text())
    SCNAS(1, 3, genotype=genotype, width=4, levels=2)
    assert imread(tmp_path / "scnas.png").shape[2] == 4
    units = [json.loads(path.read_text()) for path in sorted((tmp_path / "trained-3").glob("job-*.json"))]
    best = re.findall(r"^(found|random) cells +2 +(\S+) ± \S+ +(\S+)", said, re.MULTILINE)
    for (name, mean, least), pair in zip(best, (units[:2], units[2:]), strict=True):
        losses = [unit["validation"] for unit in pair]
        assert float(mean) == pytest.approx(sum(losses) / 2, abs=6e-5), name
        assert float(least) == pytest.approx(min(losses), abs=6e-5), name
    assert run(tmp_path, 3).split("Finished")[0] == said.split("Finished")[0]
    before = {path: path.stat().st_mtime_ns for path in tmp_path.glob("trained-3/job-*.json")}
    longer = run(tmp_path, 3, 4)  # one more run, beside what is there
    assert said[said.index("Seed 3") : said.index("\n\nwith shared")] in longer
    assert "Seed 4" in longer
    assert {path: path.stat().st_mtime_ns for path in before} == before
    with pytest.raises(UsageError, match="is of another search .*epochs was 3, is 100"):
        Scnas(seeds=(3,), out=tmp_path).run()
    with pytest.raises(UsageError, match="nowhere"):
        Scnas(data="hippocampus3d", root=tmp_path / "nowhere", smoke=True, out=tmp_path / "mri").run()


def trial(searched: list[float], uniform: list[float], found: list[float], random: list[float]) -> Trial:
    expected = {("found", "validation"): torch.tensor(searched), ("random", "validation"): torch.tensor(uniform)}
    trained = {
        name: [{"validation": loss} for loss in losses] for name, losses in {"found": found, "random": random}.items()
    }
    return Trial(0, None, expected, trained)  # type: ignore[arg-type]


def test_the_verdict_is_honest() -> None:
    """Means 1 and 2, standard errors 0.1 and 0: ten of them; the other way round from scratch."""
    one = trial([0.9, 1.1], [2.0, 2.0], [2.0, 2.0], [0.9, 1.1])
    assert one.gains["with shared weights"] == pytest.approx((1.0, 0.1))
    assert "with shared weights the loss is lower by 1.0000 ± 0.1000 (10.0 standard errors): the search did better" in (
        sentence(one)
    )
    assert "from scratch the loss is HIGHER by 1.0000 ± 0.1000 (-10.0 standard errors): the search did NOT" in (
        sentence(one)
    )
    equal = sentence(trial([1.0, 1.0], [1.0, 1.0], [1.0, 2.0], [1.0, 2.0]))
    assert equal.count("the loss is lower by 0.0000") == equal.count("the search did NOT do better") == 2
    assert "with shared weights: better than random cells by more than two standard errors in 1 of 2 runs, by any" in (
        verdict([one, trial([1.0, 3.0], [2.0, 2.1], [1.0, 1.0], [2.0, 2.0])])
    )


def test_the_inside_of_a_ball_is_as_dark_as_the_outside() -> None:
    """Mean light by class, n voxels each: 0, 0 and 1 with standard errors of 0.2/√n."""
    x, y = balls(30, size=12, seed=1).tensors
    for label, light in ((0, 0.0), (1, 0.0), (2, 1.0)):
        seen = x[:, 0][y == label]
        assert len(seen) > 500
        assert abs(seen.mean().item() - light) < 4 * 0.2 / len(seen) ** 0.5
    assert torch.equal(x, balls(30, size=12, seed=1).tensors[0])


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"seeds": ()}, "--seeds is empty; give different numbers"),
        ({"seeds": (1, 1)}, "--seeds is 1 1; give different numbers"),
        ({"warmup": 100}, "--warmup is 100; give a number from 0 to"),
        ({"repeats": 1}, "--repeats is 1; give at least 2"),
    ],
)
def test_options_that_cannot_be_used_are_refused(options: dict[str, Any], sentence: str) -> None:
    with pytest.raises(UsageError, match=sentence):
        Scnas(**options).run()
