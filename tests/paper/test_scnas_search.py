"""Tests of the SCNAS search and of `neuboots scnas`: the result, reproducibility, and resuming."""

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

from neuboots._validation import ArgumentError
from neuboots.cli import UsageError
from neuboots_paper.scnas import SCNAS, SearchResult, SuperNet, expected_loss, random_genotype, search
from neuboots_paper.scnas.command import SearchCommand, Trial, summarize_trials


def far_voxels(seed: int, n: int = 16, size: int = 8) -> TensorDataset:
    """y(d) says whether x(d − 3) > 0: past the 3×3×3 stem, only a dilated convolution sees that far."""
    x = noise(n, 1, size, size, size, seed=seed)
    shifted = functional.pad(x[:, 0], (0, 0, 0, 0, 3, 0))[:, :size]
    return TensorDataset(x, (shifted > 0).long())


@pytest.mark.parametrize("num_compared", [None, 2])
def test_search_finds_the_only_sufficient_operation(num_compared: int | None) -> None:
    found = search(
        far_voxels(1), far_voxels(2), num_classes=2, width=4, levels=1, nodes=1, epochs=24, warmup=4, batch_size=8,
        lr=2e-2, architecture_lr=0.1, num_compared=num_compared, seed=1, progress=False,
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


def test_search_depends_on_the_seed_and_keeps_the_global_rng() -> None:
    before = torch.get_rng_state()
    first = short()
    assert torch.equal(torch.get_rng_state(), before)
    torch.rand(3)
    assert same(first, short())
    assert first.objective != short(seed=6).objective


def test_ignored_voxels_have_no_effect() -> None:
    """Half of the labels are ignored: the loss is that of the other half."""
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
    with pytest.raises(FloatingPointError, match="batch 1"):
        expected_loss(net, alone, samples=1, seed=0, loss=ignoring)


def test_invalid_rows_are_rejected() -> None:
    x, y = far_voxels(2, 5, 4).tensors
    rows: list[Dataset[Any]] = [
        torch.utils.data.ChainDataset([]),
        TensorDataset(x, y.masked_fill(y == 1, 255)),
        TensorDataset(x, y.byte()),
        TensorDataset(x[:, :, 0], y[:, 0]),
        TensorDataset(x, x, y),
    ]
    for invalid in rows:
        with pytest.raises(ValueError, match="got|rejects"):
            short(validation=invalid)


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
def test_interrupted_search_resumes(tmp_path: Path, whole: SearchResult, after: int) -> None:
    with pytest.raises(KeyboardInterrupt):
        short(tmp_path, Interrupting(far_voxels(2, 5, 4), after))
    assert same(short(tmp_path, Interrupting(far_voxels(2, 5, 4), 10**6)), whole)
    # what is finished is found again without a step
    assert same(short(tmp_path, Interrupting(far_voxels(2, 5, 4), 0)), whole)
    assert [path.name for path in tmp_path.iterdir()] == ["search.ckpt"]


def test_folder_of_another_search_or_a_damaged_one_is_rejected(tmp_path: Path) -> None:
    short(tmp_path)
    with pytest.raises(ArgumentError, match="seed"):
        short(tmp_path, seed=6)
    (tmp_path / "search.ckpt").write_bytes(b"half a file")
    with pytest.raises(ValueError, match="search.ckpt"):
        short(tmp_path)


@pytest.mark.parametrize(
    "options",
    [{"warmup": 4}, {"seed": None}, {"temperature": (1.0, 2.0)}, {"num_compared": 1}, {"nodes": 0}, {"epochs": 0}],
)
def test_invalid_option_is_rejected(options: Mapping[str, Any]) -> None:
    with pytest.raises(ArgumentError) as caught:
        short(**options)
    assert caught.value.name in options


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


# -- the command ---------------------------------------------------------------------------------------


def run(folder: Path, *seeds: int) -> str:
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        SearchCommand(seeds=seeds, smoke=True, num_workers=1, out=folder).run()
    return out.getvalue()


def test_command_prints_what_it_measured_and_reuses_it(tmp_path: Path) -> None:
    printed = run(tmp_path, 3)
    SCNAS(1, 3, genotype=json.loads((tmp_path / "genotype-3.json").read_text()), width=4, levels=2)
    assert imread(tmp_path / "scnas.png").shape[2] == 4
    jobs = [json.loads(path.read_text()) for path in sorted((tmp_path / "trained-3").glob("job-*.json"))]
    best = re.findall(r"^(found|random) cells +2 +(\S+) ± \S+ +(\S+)", printed, re.MULTILINE)
    for (name, mean, least), pair in zip(best, (jobs[:2], jobs[2:]), strict=True):
        losses = [job["validation"] for job in pair]
        assert float(mean) == pytest.approx(sum(losses) / 2, abs=6e-5), name
        assert float(least) == pytest.approx(min(losses), abs=6e-5), name
    before = {path: path.stat().st_mtime_ns for path in tmp_path.glob("trained-3/job-*.json")}
    longer = run(tmp_path, 3, 4)  # one more seed
    assert printed[printed.index("Seed 3") : printed.index("\n\nwith shared")] in longer
    assert "Seed 4" in longer
    assert {path: path.stat().st_mtime_ns for path in before} == before
    with pytest.raises(UsageError, match="epochs"):
        SearchCommand(seeds=(3,), out=tmp_path).run()
    with pytest.raises(UsageError, match="nowhere"):
        SearchCommand(data="hippocampus3d", root=tmp_path / "nowhere", smoke=True, out=tmp_path / "mri").run()


def trial(searched: list[float], uniform: list[float], found: list[float], random: list[float]) -> Trial:
    expected = {("found", "validation"): torch.tensor(searched), ("random", "validation"): torch.tensor(uniform)}
    trained = {
        name: [{"validation": loss} for loss in losses] for name, losses in {"found": found, "random": random}.items()
    }
    return Trial(0, None, expected, trained)  # type: ignore[arg-type]


def test_gains_have_standard_errors() -> None:
    """Means 1 and 2, standard errors 0.1 and 0; the other way round from scratch."""
    one = trial([0.9, 1.1], [2.0, 2.0], [2.0, 2.0], [0.9, 1.1])
    assert one.gains["with shared weights"] == pytest.approx((1.0, 0.1))
    assert one.gains["from scratch"] == pytest.approx((-1.0, 0.1))
    assert "(10.0 standard errors)" in one.summary
    assert "(-10.0 standard errors)" in one.summary
    counted = summarize_trials([one, trial([1.0, 3.0], [2.0, 2.1], [1.0, 1.0], [2.0, 2.0])])
    assert "with shared weights: better than random cells by more than two standard errors in 1 of 2 runs" in counted


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"seeds": ()}, "--seeds"),
        ({"seeds": (1, 1)}, "--seeds"),
        ({"warmup": 100}, "--warmup"),
        ({"repeats": 1}, "--repeats"),
    ],
)
def test_invalid_option_of_the_command_is_a_usage_error(options: dict[str, Any], named: str) -> None:
    with pytest.raises(UsageError, match=named):
        SearchCommand(**options).run()
