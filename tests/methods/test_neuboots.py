"""NeuBoots and the plain net: what is theirs alone, beside the contract of every method."""

from typing import Any

import pytest
import torch
from _nets import TwoBranches
from torch import Tensor, nn
from torch.utils.data import IterableDataset, TensorDataset, random_split

from neuboots import Deterministic, NeuBoots, Predictor, TrainingConfig
from neuboots.generator import BootstrapGenerator
from neuboots.methods import NeuBootsPredictor
from neuboots.weights import Dirichlet

RECIPE = TrainingConfig(epochs=2, batch_size=16, progress=False)


def rows(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def classes() -> TensorDataset:
    return TensorDataset(rows(50, 4), torch.arange(50) % 3)


@pytest.fixture(scope="module")
def predictors() -> dict[str, Predictor]:
    return {
        "plain": Deterministic().fit(TwoBranches, classes(), RECIPE),
        "neuboots": NeuBoots().fit(TwoBranches, classes(), RECIPE),
    }


X = rows(9, 4, seed=5)


@pytest.mark.parametrize("link", ["identity", "exp"])
def test_any_optimiser_and_torch_losses(link: Any) -> None:
    config = TrainingConfig(epochs=1, optimizer=torch.optim.RMSprop, clip_norm=1.0, progress=False)
    method = NeuBoots(loss=nn.CrossEntropyLoss(reduction="none"), link=link)
    assert method.fit(TwoBranches, classes(), config).predict(X, 2).samples.shape == (2, 9, 3)


def test_a_stream_of_unknown_length() -> None:
    class Stream(IterableDataset[Any]):
        def __iter__(self) -> Any:
            for i in range(40):
                yield rows(4, seed=i), i % 3

    config = TrainingConfig(epochs=2, batch_size=8, steps_per_epoch=5, progress=False)
    predictor = NeuBoots().fit(TwoBranches, Stream(), config)
    assert predictor.predict(X, 2).samples.shape == (2, 9, 3)
    with pytest.raises(ValueError, match=r"got a stream of unknown length; expected Recipe\(steps_per_epoch=…\)"):
        NeuBoots().fit(TwoBranches, Stream(), RECIPE)


def test_exact_moments_are_the_mean_and_std_of_many_replicates(predictors: dict[str, Predictor]) -> None:
    predictor = predictors["neuboots"]
    assert isinstance(predictor, NeuBootsPredictor)
    prediction = predictor.predict(X, 4000)
    moments = predictor.moments(X)
    assert torch.equal(prediction.mean, moments.mean)
    # 27 outputs: 5 standard errors of a mean, and 5 × 1/√(2B) of a nearly normal standard deviation
    gap = (prediction.samples.mean(0) - moments.mean).abs()
    assert bool((gap <= 5 * moments.std / 4000**0.5).all())
    torch.testing.assert_close(prediction.samples.std(0), moments.std, rtol=5 / 8000**0.5, atol=0)


def test_an_exported_replicate_predicts_the_same(predictors: dict[str, Predictor]) -> None:
    predictor = predictors["neuboots"]
    assert isinstance(predictor, NeuBootsPredictor)
    samples = predictor.predict(X, 3, seed=8).samples
    with torch.no_grad():
        torch.testing.assert_close(predictor.export(2, seed=8)(X), samples[2])


def test_an_ensemble_of_one_is_the_single_net() -> None:
    """One replicate with constant weights is the plain net, trained and predicted the same way."""
    from neuboots.weights import Constant

    plain = Deterministic().fit(TwoBranches, classes(), RECIPE)
    single = NeuBoots(weight_distribution=Constant()).fit(TwoBranches, classes(), RECIPE)
    torch.testing.assert_close(single.predict(X, 1).samples, plain.predict(X, 1).samples)
    assert bool((single.predict(X, 5).std == 0).all())


def test_a_pretrained_net_keeps_its_features_when_only_the_head_is_tuned() -> None:
    pretrained = TwoBranches()
    before = {key: value.clone() for key, value in pretrained.state_dict().items()}
    NeuBoots(tune="head").fit(lambda: pretrained, classes(), RECIPE)
    changed = {key for key, value in pretrained.state_dict().items() if not torch.equal(value, before[key])}
    assert changed == {"fc.weight", "fc.bias"}


def test_a_user_may_wrap_a_trained_net_without_fit() -> None:
    predictor = NeuBootsPredictor(BootstrapGenerator(TwoBranches()), Dirichlet(10.0))
    assert predictor.predict(X, 4).samples.shape == (4, 9, 3)


def test_gradients_flow_to_the_input_when_asked() -> None:
    x = X.clone().requires_grad_()
    predictor = NeuBootsPredictor(BootstrapGenerator(TwoBranches()), Dirichlet())
    predictor.predict(x, 4).probs.amax(1).sum().backward()
    assert x.grad is not None
    assert bool((x.grad != 0).any())


@pytest.mark.parametrize(
    ("call", "sentence"),
    [
        (lambda p: p.predict(X, 0), "got B = 0 replicates; expected num_samples ≥ 1"),
        (lambda p: p.summarize(X, -1), "got B = -1 replicates"),
        (lambda p: p.predict(X * torch.nan, 2), r"the input has 36 NaN or infinite value\(s\) of 36"),
        (lambda p: p.predict(X.numpy(), 2), "got inputs of type ndarray; expected a tensor"),
        (lambda p: p.predict(classes(), 2), "got inputs of type TensorDataset; expected a tensor"),
        (lambda p: p.predict(X, 2.5), r"got B = 2.5 replicates; expected num_samples ≥ 1, a whole number"),
        (lambda p: p.predict(X, 2, seed=1.5), "got seed=1.5; expected a whole number"),
        (lambda p: p.predict(X.to(torch.uint8), 2), r"got uint8 inputs; expected floating-point numbers"),
        (lambda p: p.moments(X * torch.nan), "NaN or infinite"),
        (
            lambda p: NeuBoots(weight_distribution="dirichlet"),
            r"got law='dirichlet'; expected a law such as Dirichlet\(\)",
        ),
        (lambda p: NeuBoots(weight_distribution=Dirichlet), "expected a law such as"),
        (lambda p: NeuBoots(loss=nn.CrossEntropyLoss), r"expected a function of \(outputs, targets\)"),
        (lambda p: Deterministic(loss="ce"), "got loss='ce'"),
        (lambda p: NeuBoots(num_blocks=2.5), "got S = 2.5 blocks"),
        (lambda p: NeuBoots(num_blocks=0), "got S = 0 blocks; expected at least 1"),
        (lambda p: NeuBoots(resample="day"), "got redraw='day'; expected one of 'epoch', 'step', 'sample', 'pool'"),
        (lambda p: NeuBoots(tune="tail"), "got tune='tail'; expected 'all' or 'head'"),
        (lambda p: NeuBoots(warmup=-1), "got warmup=-1"),
        (lambda p: NeuBoots(link="log").fit(TwoBranches, classes(), RECIPE), "got link='log'"),
        (lambda p: NeuBoots().fit(TwoBranches, TensorDataset(X[:0], X[:0]), RECIPE), "n = 0 rows"),
        (lambda p: Deterministic().fit(TwoBranches, TensorDataset(X[:0], X[:0]), RECIPE), "n = 0 rows"),
        (
            lambda p: NeuBoots().fit(TwoBranches, TensorDataset(X, torch.arange(9)), RECIPE),
            "got label [3-8] for a net with 3 outputs; expected 0 … 2",
        ),
        (
            lambda p: Deterministic().fit(TwoBranches, TensorDataset(X), RECIPE),
            "one tensor; expected inputs and targets",
        ),
        (
            lambda p: NeuBoots(loss=nn.CrossEntropyLoss()).fit(TwoBranches, classes(), RECIPE),
            'got a single number for 16 weights.*reduction="none"',
        ),
        (
            lambda p: NeuBoots().fit(lambda: nn.Sequential(nn.Conv1d(4, 3, 3)), classes(), RECIPE),
            "the net has no Linear or 1×1 convolution",
        ),
    ],
)
def test_bad_calls_get_one_sentence(call: Any, sentence: str, predictors: dict[str, Predictor]) -> None:
    with pytest.raises(ValueError, match=sentence):
        call(predictors["neuboots"])


def test_a_net_that_cannot_be_replicated_is_refused_before_training() -> None:
    class Branching(TwoBranches):
        def forward(self, x: Tensor) -> Tensor:
            z = super().forward(x)
            return z if z.sum().item() > 0 else -z

    reports: list[Any] = []
    config = TrainingConfig(epochs=1, batch_size=16, progress=False, on_epoch=reports.append)
    with pytest.raises(ValueError, match="after its head the net reads values"):
        NeuBoots().fit(Branching, classes(), config)
    assert not reports


def test_a_batch_that_is_not_on_the_first_axis_is_refused_where_alpha_is_drawn_for_each_sample() -> None:
    folded = nn.Sequential(nn.Unflatten(1, (4, 1)), nn.Flatten(0, 1), nn.Linear(1, 3))
    with pytest.raises(ValueError, match=r"have \d+ rows, so α cannot be drawn for each sample.*redraw='step'"):
        NeuBoots().fit(lambda: folded, classes(), RECIPE)


def test_lazy_layers_are_settled_by_the_first_row() -> None:
    def lazy() -> nn.Module:
        return nn.Sequential(nn.LazyLinear(8), nn.ReLU(), nn.LazyLinear(3))

    for method in (Deterministic(), NeuBoots()):
        torch.manual_seed(1)
        first = method.fit(lazy, classes(), RECIPE).predict(X, 2).samples
        torch.manual_seed(2)
        assert torch.equal(method.fit(lazy, classes(), RECIPE).predict(X, 2).samples, first)
    with pytest.raises(ValueError, match="lazy layers that have seen no input.*example=x"):
        BootstrapGenerator(lazy())


def test_several_inputs_and_a_random_split() -> None:
    class TwoInputs(TwoBranches):
        def forward(self, a: Tensor, b: Tensor) -> Tensor:
            return super().forward(a + b)

    data = TensorDataset(rows(50, 4), rows(50, 4, seed=1), torch.arange(50) % 3)
    train_part, held_out = random_split(data, [40, 10], generator=torch.Generator().manual_seed(0))
    for method in (Deterministic(), NeuBoots()):
        predictor = method.fit(TwoInputs, train_part, RECIPE, val_data=held_out)
        assert predictor.predict((X, X), 2).samples.shape == (2, 9, 3)


def test_equal_replicates_have_no_mutual_information(predictors: dict[str, Predictor]) -> None:
    assert bool((predictors["plain"].predict(X, 50).mutual_information == 0).all())
    assert bool((predictors["plain"].summarize(X, 50).mutual_information == 0).all())


def test_nan_in_training_data_is_said() -> None:
    x = rows(20, 4)
    x[3, 2] = torch.nan
    with pytest.raises((ValueError, FloatingPointError), match="NaN"):
        NeuBoots().fit(TwoBranches, TensorDataset(x, torch.arange(20) % 3), RECIPE)
