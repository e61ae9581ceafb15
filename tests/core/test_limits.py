"""Sizes that no machine can serve are refused with an estimate, before anything large is allocated."""

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from neuboots import TrainingConfig, _validation, prediction
from neuboots._prng import derive_keys
from neuboots._validation import ArgumentError, available_memory, check_memory
from neuboots.data.tabular import load_table
from neuboots.estimators import NeuBootsClassifier
from neuboots.evaluation.active_learning import select_for_labeling
from neuboots.evaluation.bootstrap_audit import compare_with_bootstrap
from neuboots.evaluation.calibration import evaluate_calibration
from neuboots.evaluation.conformal import fit_conformal_classifier
from neuboots.evaluation.coverage import SYNTHETIC_REGRESSIONS, simulate_coverage
from neuboots.evaluation.diversity import evaluate_diversity
from neuboots.evaluation.imbalance import evaluate_imbalance
from neuboots.evaluation.ood.odin import confidence_direction
from neuboots.methods import DeterministicPredictor, InfluenceBootstrap, NeuBootsPredictor, create_method
from neuboots.methods.neuboots import BootstrapGenerator
from neuboots.prediction import (
    collect_samples,
    draw_member_order,
    stream_forward_passes,
    stream_members,
)
from neuboots.weights import Dirichlet


def make_predictor() -> DeterministicPredictor:
    return DeterministicPredictor(nn.Linear(2, 3))


def test_available_memory_is_at_most_the_machine_s() -> None:
    assert 0 < available_memory() < 1 << 60


@pytest.mark.parametrize("limit", [0, 10**9])
def test_memory_is_compared_with_what_is_available(limit: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_validation, "available_memory", lambda: limit)
    check_memory("n", 1, limit, hint="")
    with pytest.raises(ArgumentError, match=r"2\.0 GB") as raised:
        check_memory("n", 10, 2 * 10**9, hint="use fewer")
    assert (raised.value.name, raised.value.value, raised.value.hint) == ("n", 10, "use fewer")


@pytest.mark.parametrize("num_samples", [10**13, 10**20])
def test_samples_that_do_not_fit_into_memory_are_refused(num_samples: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prediction, "_MAX_BYTES", 1 << 16)
    with pytest.raises(ArgumentError, match="GB") as raised:
        make_predictor().predict(torch.zeros(4, 2), num_samples)
    assert (raised.value.name, raised.value.value) == ("num_samples", num_samples)
    assert num_samples > 10**13 or "480,000.0 GB" in str(raised.value)  # of 4 × 3 numbers of 4 bytes


def test_a_single_replicate_tells_how_much_memory_all_of_them_need() -> None:
    passes = []

    def run(b: int) -> Tensor:
        passes.append(b)
        return torch.zeros(4, 3)

    with pytest.raises(ArgumentError):
        collect_samples(stream_forward_passes(10**20, run))
    assert passes == [0]


@pytest.mark.parametrize("num_samples", [2**24 + 1, 2**31, 10**20])
def test_summaries_of_too_many_replicates_are_refused(num_samples: int) -> None:
    with pytest.raises(ArgumentError) as raised:
        make_predictor().summarize(torch.zeros(4, 2), num_samples)
    assert raised.value.name == "num_samples"
    prediction.check_summarized(2**24)


def test_summaries_of_too_many_values_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prediction, "MAX_SUMMARIZED_VALUES", 12 * 100)
    x = torch.zeros(4, 2)
    make_predictor().summarize(x, 100)
    with pytest.raises(ArgumentError) as raised:
        make_predictor().summarize(x, 101)
    assert raised.value.name == "num_samples"
    with pytest.raises(ArgumentError):  # a second pass
        make_predictor().summarize(x, 100, quantiles=(0.5,))
    monkeypatch.setattr(prediction, "_SMALL_BYTES", 1)
    monkeypatch.setattr(prediction, "MAX_SUMMARIZED_VALUES", 12 * 50 * 3)
    make_predictor().summarize(x, 50, quantiles=(0.5,))  # 7 outputs in the second pass, 5 in the third
    monkeypatch.setattr(prediction, "MAX_SUMMARIZED_VALUES", 12 * 50 * 3 - 1)
    with pytest.raises(ArgumentError):
        make_predictor().summarize(x, 50, quantiles=(0.5,))


def test_members_are_drawn_chunk_by_chunk(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing of size B is drawn, and the order does not depend on the chunks."""
    drawn = []
    original = prediction.derive_keys
    monkeypatch.setattr(prediction, "derive_keys", lambda ids, *name: drawn.append(len(ids)) or original(ids, *name))
    stream = stream_members(10**20, 3, lambda numbers: numbers[:, None, None].float(), seed=5)
    chunks = stream.chunks(7)
    found = torch.cat([next(chunks) for _ in range(10)]).flatten()
    assert max(drawn) <= 4
    assert found.tolist() == draw_member_order(3, 70, seed=5).tolist()
    assert draw_member_order(3, 70, seed=5, start=31).tolist() == found[31:].tolist()


@pytest.mark.parametrize("layers", [1, "all"])
def test_weights_of_the_data_are_drawn_in_bounded_memory(layers: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A single input of one output, and many weights for each replicate."""
    drawn = []

    class Recorded(Dirichlet):
        def sample(self, keys: Tensor, size: int) -> Tensor:
            drawn.append(len(keys) * size)
            return torch.ones(len(keys), size, dtype=torch.float64)

    n, net = 1000, nn.Linear(1, 1)
    x = torch.linspace(-1, 1, n)[:, None]
    method = InfluenceBootstrap(nn.MSELoss(), layers=layers, weight_distribution=Recorded(), num_blocks=n)
    if layers == "all":
        method = replace(method, max_kernel_rows=n // 10, num_blocks=n // 10)
    predictor = method.from_trained(net, TensorDataset(x, x))
    predictor.summarize(x[:1], 900)
    assert sum(drawn) >= 900 * (method.num_blocks or 0)
    assert 8 * max(drawn) <= 1 << 18
    drawn.clear()
    monkeypatch.setattr(prediction, "_MAX_BYTES", 1 << 18)
    predictor.predict(x[:1], 900)
    assert 8 * max(drawn) <= 1 << 18


# -- arguments that set sizes --------------------------------------------------------------------------

CONFIG = TrainingConfig(epochs=1, batch_size=8, progress=False)
X = torch.linspace(-1, 1, 24).view(12, 2)
CLASSES, VALUES = TensorDataset(X, torch.arange(12) % 2), TensorDataset(X, X[:, :1])


def make_net(outputs: int = 2) -> nn.Module:
    return nn.Sequential(nn.Linear(2, 4), nn.ReLU(), nn.Linear(4, outputs))


@pytest.mark.parametrize(
    ("name", "option"),
    [
        *((name, "num_members") for name in ("deep-ensemble", "bayesian-bootstrap", "mimo", "batch-ensemble")),
        ("influence", "num_blocks"),
        ("neuboots", "num_blocks"),
    ],
)
@pytest.mark.parametrize("size", [10**10, 10**20])
def test_sizes_of_methods_are_refused_before_training(name: str, option: str, size: int) -> None:
    with pytest.raises(ArgumentError) as raised:
        create_method(name, **{option: size}).fit(make_net, CLASSES, CONFIG)
    assert (raised.value.name, raised.value.value) == (option, size)


def test_blocks_without_rows_or_features_are_refused() -> None:
    for num_blocks in (12, 5, 13):  # 12 rows and 4 features
        create_method("neuboots", num_blocks=num_blocks).fit(make_net, CLASSES, CONFIG)
    with pytest.raises(ArgumentError) as raised:
        create_method("neuboots", num_blocks=10_001).fit(make_net, CLASSES, CONFIG)
    assert raised.value.name == "num_blocks"


@pytest.fixture
def memory(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The available memory in bytes, and a limit of zero below which it is not asked for."""
    limit = [0]
    monkeypatch.setattr(_validation, "available_memory", lambda: limit[0])
    monkeypatch.setattr(_validation, "_UNCHECKED_BYTES", 0)
    return limit


@pytest.mark.parametrize(
    ("name", "options", "expected"),
    [
        ("swag", {"rank": 20}, "rank"),
        ("sparse-gp", {"num_inducing": 10}, "num_inducing"),
        ("neuboots", {}, "num_blocks"),
        ("influence", {"layers": "all"}, "max_kernel_rows"),
        ("laplace", {}, "head"),
        ("deep-ensemble", {}, "num_members"),
    ],
)
def test_memory_of_methods_is_estimated(name: str, options: Any, expected: str, memory: list[int]) -> None:
    regression = name == "sparse-gp"
    config, method = replace(CONFIG, epochs=4), create_method(name, **options)
    with pytest.raises(ArgumentError, match="GB") as raised:
        method.fit(make_net(1 if regression else 2), VALUES if regression else CLASSES, config)
    assert raised.value.name == expected


def test_rows_of_an_exact_gaussian_process_are_limited() -> None:
    x = torch.zeros(5001, 1)
    with pytest.raises(ArgumentError) as raised:
        create_method("gp").fit(None, TensorDataset(x, x), CONFIG)
    assert (raised.value.name, "SparseGP" in raised.value.hint) == ("data", True)


def test_weights_of_members_are_drawn_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    drawn = []
    sample = Dirichlet.sample
    monkeypatch.setattr(Dirichlet, "sample", lambda self, keys, n: drawn.append(len(keys)) or sample(self, keys, n))
    method: Any = create_method("bayesian-bootstrap", num_members=5)
    weights = method._draw_weights(CLASSES, 3)
    assert drawn == [1] * 5
    keys = derive_keys(torch.arange(5), 3, "point weights")
    assert torch.equal(weights, sample(Dirichlet(), keys, 12).float())


def run_evaluation(name: str, size: int) -> None:
    predictor = NeuBootsPredictor(BootstrapGenerator(make_net()).eval(), Dirichlet())
    if name == "diversity":
        evaluate_diversity(predictor, CLASSES, num_samples=size, progress=False)
    elif name == "audit":
        members = create_method("deep-ensemble", num_members=4).fit(make_net, CLASSES, CONFIG)
        compare_with_bootstrap(predictor, members, X, num_samples=size, progress=False)
    elif name == "conformal":
        fit_conformal_classifier(predictor, CLASSES, num_samples=size, progress=False)
    elif name == "imbalance":
        evaluate_imbalance(predictor, CLASSES, num_samples=size, progress=False)
    elif name == "calibration":
        evaluate_calibration(predictor, CLASSES, num_samples=size, progress=False)
    elif name == "batch selection":
        select_for_labeling(predictor, X, 2, strategy="batch", num_samples=size, progress=False)
    elif name == "odin":
        confidence_direction(predictor, X, temperature=10.0, num_samples=size, seed=0)
    else:
        NeuBootsClassifier(num_samples=size).fit(X.numpy(), torch.arange(12).numpy() % 2)


@pytest.mark.parametrize(
    "name",
    ["diversity", "audit", "conformal", "imbalance", "calibration", "batch selection", "odin", "estimator"],
)
def test_replicates_of_an_evaluation_are_limited(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prediction, "_MAX_BYTES", 1 << 16)
    with pytest.raises(ArgumentError) as raised:
        run_evaluation(name, 10**15)
    assert (raised.value.name, raised.value.value) == ("num_samples", 10**15)


@pytest.mark.parametrize("option", ["n", "num_datasets", "num_samples"])
def test_sizes_of_a_simulation_are_limited(option: str) -> None:
    options: Any = {"num_datasets": 2, "n": 10, "num_samples": 5, "progress": False, option: 10**15}
    problem = SYNTHETIC_REGRESSIONS["line"]
    with pytest.raises(ArgumentError) as raised:
        simulate_coverage(create_method("deterministic"), partial(nn.Linear, 1, 1), problem, CONFIG, **options)
    assert raised.value.value == 10**15


@pytest.mark.parametrize("strategy", ["batch", "entropy"])
def test_work_of_a_selection_is_limited(strategy: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("neuboots.evaluation.active_learning._MAX_SELECTION_WORK", 20)
    predictor = DeterministicPredictor(make_net())
    options: Any = {"num_samples": 1, "progress": False, "strategy": strategy, "diverse": strategy != "batch"}
    with pytest.raises(ArgumentError) as raised:
        select_for_labeling(predictor, X, 5, **options)
    assert raised.value.name == "k"


def test_one_hot_columns_must_fit_into_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lines = [f"name{k},{k}" for k in range(30)]
    (tmp_path / "names.csv").write_text("\n".join(["name,y", *lines]))
    monkeypatch.setattr(_validation, "available_memory", lambda: 1000)
    monkeypatch.setattr(_validation, "_UNCHECKED_BYTES", 0)
    with pytest.raises(ArgumentError, match="GB") as raised:
        load_table(tmp_path / "names.csv", target="y", max_categories=10**12)
    assert raised.value.name == "max_categories"
    load_table(tmp_path / "names.csv", target="y", max_categories=10**12, streaming=True)
