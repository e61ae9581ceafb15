"""Golden entries: every call into the library whose results are stored, each as a function without arguments.

An entry returns a flat dict of NumPy arrays. `GROUPS` maps a file name to its entries; `make.py` writes them and
`test_golden.py` recomputes and compares them. Trainings last one or two epochs, so that rounding does not grow.
"""

import atexit
import csv
import io
import json
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from sklearn.datasets import load_diabetes, load_digits, load_iris
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from neuboots import (
    MIMO,
    SWAG,
    BatchEnsemble,
    BayesianBootstrap,
    DeepEnsemble,
    Deterministic,
    GaussianProcess,
    InfluenceBootstrap,
    Laplace,
    MCDropout,
    NeuBoots,
    SparseGP,
    StandardBootstrap,
    TrainingConfig,
    cli,
    load,
    metrics,
    save,
)
from neuboots._prng import derive_keys, derive_seed, draw_gamma, draw_normal, draw_uniform, hash_to_range, stable_hash
from neuboots.data.augment import CropFlip, CropFlipCutout
from neuboots.data.corruptions import CORRUPTIONS, rotate
from neuboots.estimators import NeuBootsClassifier, NeuBootsRegressor
from neuboots.evaluation.active_learning import select_for_labeling
from neuboots.evaluation.bootstrap_audit import compare_with_bootstrap
from neuboots.evaluation.conformal import fit_conformal_classifier, fit_conformal_regressor
from neuboots.evaluation.ood import (
    Energy,
    Entropy,
    Mahalanobis,
    MahalanobisEnsemble,
    MaxSoftmax,
    MutualInformation,
    Odin,
    PredictiveStd,
    ReplicateDetector,
)
from neuboots.evaluation.selective import evaluate_selective_prediction, fit_risk_controlled_threshold
from neuboots.losses import GaussianNLL
from neuboots.methods import CalibratedNeuBoots, DeterministicPredictor
from neuboots.posthoc import StdScaling, TemperatureScaling
from neuboots.weights import (
    BlockTable,
    Constant,
    Dirichlet,
    Exponential,
    HashedBlocks,
    Multinomial,
    WeightSchedule,
    apply_link,
    assign_blocks,
    compute_strata,
    link_moments,
)
from neuboots_paper.baselines.adversarial_ensemble import AdversarialDeepEnsemble
from neuboots_paper.baselines.amortized_bootstrap import AmortizedBootstrap
from neuboots_paper.baselines.gbs import GBS
from neuboots_paper.baselines.lp_bnn import LPBNN

Arrays = dict[str, np.ndarray[Any, Any]]
Entry = Callable[[], Arrays]
SEED = 0  # another seed must change the golden values: see test_golden.py
B = 5

# -- small nets and data -------------------------------------------------------------------------------


def draws(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def mlp(outputs: int) -> nn.Module:
    return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, outputs))


def cnn() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(4, 6, 3, padding=1), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(6, 3),
    )  # fmt: skip


def pixel_net() -> nn.Module:
    return nn.Sequential(nn.Conv2d(2, 6, 3, padding=1), nn.BatchNorm2d(6), nn.ReLU(), nn.Conv2d(6, 3, 1))


def short_training(epochs: int = 2) -> TrainingConfig:
    return TrainingConfig(epochs=epochs, batch_size=16, seed=SEED, accelerator="cpu", progress=False)


Task = tuple[Any, Callable[[], nn.Module], Callable[[], TensorDataset], Tensor]


def _regression_rows(n: int = 48, seed: int = 0) -> TensorDataset:
    x = draws(n, 4, seed=seed)
    return TensorDataset(x, (x.sum(1) + 0.3 * draws(n, seed=seed + 1))[:, None])


def _class_rows(n: int = 48, seed: int = 0) -> TensorDataset:
    x = draws(n, 4, seed=seed)
    return TensorDataset(x, (x @ draws(4, 3, seed=9) + 0.5 * draws(n, 3, seed=seed + 1)).argmax(1))


def _image_rows() -> TensorDataset:
    x = draws(32, 1, 8, 8)
    return TensorDataset(x, torch.arange(32) % 3)


def _pixel_rows() -> TensorDataset:
    x = draws(12, 2, 6, 6)
    y = (x[:, 0] > 0).long() + (x[:, 1] > 1).long()
    y[:, :1] = 255
    return TensorDataset(x, y)


TASKS: dict[str, Task] = {
    "classification": (nn.CrossEntropyLoss(), partial(mlp, 3), _class_rows, draws(4, 4, seed=5)),
    "regression": (nn.MSELoss(), partial(mlp, 1), _regression_rows, draws(4, 4, seed=5)),
    "gaussian": (GaussianNLL(), partial(mlp, 2), _regression_rows, draws(4, 4, seed=5)),
    "images": (nn.CrossEntropyLoss(), cnn, _image_rows, draws(3, 1, 8, 8, seed=5)),
    "segmentation": (nn.CrossEntropyLoss(ignore_index=255), pixel_net, _pixel_rows, draws(1, 2, 4, 4, seed=5)),
}

# -- methods -------------------------------------------------------------------------------------------

BOTH = ("classification", "regression")
IMAGES = (*BOTH, "images")
ALL = (*IMAGES, "segmentation")

METHODS: dict[str, tuple[Callable[[Any], Any], tuple[str, ...]]] = {
    "plain": (lambda loss: Deterministic(loss), BOTH),
    "neuboots": (lambda loss: NeuBoots(loss), (*ALL, "gaussian")),
    "neuboots, link exp, redraw step, warm-up": (
        lambda loss: NeuBoots(loss, link="exp", weight_distribution=Exponential(), resample="step", warmup=1),
        BOTH,
    ),
    "neuboots, redraw sample": (lambda loss: NeuBoots(loss, resample="sample"), BOTH),
    "neuboots, redraw pool": (lambda loss: NeuBoots(loss, resample="pool"), BOTH),
    "neuboots, 3 blocks": (lambda loss: NeuBoots(loss, num_blocks=3), BOTH),
    "neuboots, head only": (lambda loss: NeuBoots(loss, train_head_only=True), BOTH),
    "neuboots, multinomial": (lambda loss: NeuBoots(loss, weight_distribution=Multinomial()), ("classification",)),
    "neuboots, paper": (lambda loss: NeuBoots.paper(loss), ("classification",)),
    "neuboots, regression": (lambda loss: NeuBoots.regression(loss), ("regression", "gaussian")),
    "standard-bootstrap": (lambda loss: StandardBootstrap(loss, num_members=3), BOTH),
    "bayesian-bootstrap": (lambda loss: BayesianBootstrap(loss, num_members=3), BOTH),
    "deep-ensemble": (lambda loss: DeepEnsemble(loss, num_members=3), (*BOTH, "segmentation")),
    "deep-ensemble-original": (lambda loss: AdversarialDeepEnsemble(loss, num_members=2), BOTH),
    "gbs": (lambda loss: GBS(loss), BOTH),
    "amortized-bootstrap": (lambda loss: AmortizedBootstrap(loss), BOTH),
    "gp": (lambda loss: GaussianProcess(loss, steps=20), ("regression",)),
    "gp, Matérn, one length-scale": (
        lambda loss: GaussianProcess(loss, kernel="matern52", ard=False, steps=20),
        ("regression",),
    ),
    "sparse-gp": (lambda loss: SparseGP(loss, num_inducing=8, steps=20), ("regression",)),
    "batch-ensemble": (lambda loss: BatchEnsemble(loss, num_members=3), IMAGES),
    "batch-ensemble, random signs": (lambda loss: BatchEnsemble(loss, num_members=3, init="random_sign"), BOTH),
    "mimo": (lambda loss: MIMO(loss, num_members=2), BOTH),
    "lp-bnn": (lambda loss: LPBNN(loss, num_members=3), BOTH),
    "mc-dropout": (lambda loss: MCDropout(loss), ALL),
    "mc-dropout, channels before the head": (
        lambda loss: MCDropout(loss, where="head", granularity="channel", rate=0.5),
        IMAGES,
    ),
    "laplace": (lambda loss: Laplace(loss), ALL),
    "laplace, kron": (lambda loss: Laplace(loss, structure="kron", prior_precision=2.0), IMAGES),
    "influence": (lambda loss: InfluenceBootstrap(loss), (*ALL, "gaussian")),
    "influence, refitted": (lambda loss: InfluenceBootstrap(loss, refit=True, residuals="raw"), BOTH),
    "influence, blocks": (
        lambda loss: InfluenceBootstrap(loss, num_blocks=12, weight_distribution=Exponential()),
        BOTH,
    ),
    "influence, 2 layers": (lambda loss: InfluenceBootstrap(loss, layers=2), BOTH),
    "influence, all layers": (lambda loss: InfluenceBootstrap(loss, layers="all"), (*IMAGES, "gaussian")),
    "influence, all layers, 1 replicate": (
        lambda loss: InfluenceBootstrap(loss, layers="all", num_calibration_fits=1),
        BOTH,
    ),
    "influence, 1 replicate": (lambda loss: InfluenceBootstrap(loss, num_calibration_fits=1), BOTH),
    "swag": (lambda loss: SWAG(loss, start=0.0, every=1, rank=2, learning_rate=1e-2), BOTH),
    "calibrated-neuboots": (lambda loss: CalibratedNeuBoots(loss), BOTH),
    "calibrated-neuboots, by bootstrap": (
        lambda loss: CalibratedNeuBoots(loss, reference="bootstrap", num_members=3),
        BOTH,
    ),
}


def predicted(predictor: Any, x: Tensor) -> Arrays:
    """Samples, mean, standard deviation and probabilities at x."""
    prediction = predictor.predict(x, B, seed=SEED)
    found = {"samples": prediction.samples, "mean": prediction.mean, "std": prediction.std, "probs": prediction.probs}
    return {name: value.numpy() for name, value in found.items()}


def method_entry(name: str, task: str) -> Arrays:
    loss, model, rows, x = TASKS[task]
    return predicted(METHODS[name][0](loss).fit(model, rows(), short_training()), x)


@cache
def fitted(task: str) -> Any:
    loss, model, rows, _ = TASKS[task]
    return NeuBoots(loss).fit(model, rows(), short_training())


@cache
def influence(task: str) -> Any:
    loss, model, rows, _ = TASKS[task]
    return InfluenceBootstrap(loss).fit(model, rows(), short_training())


def influence_around() -> Arrays:
    with torch.random.fork_rng():
        torch.manual_seed(SEED)
        net = mlp(3)
    predictor = InfluenceBootstrap(nn.CrossEntropyLoss()).from_trained(net, _class_rows(), batch_size=16, seed=SEED)
    return predicted(predictor, TASKS["classification"][3])


def temperature() -> Arrays:
    scaled = TemperatureScaling(num_samples=B, seed=SEED).fit(fitted("classification"), _class_rows(30, seed=20))
    return {"temperature": np.array(scaled.temperature), **predicted(scaled, TASKS["classification"][3])}


def std_scale(task: str) -> Arrays:
    scaled = StdScaling(num_samples=B, seed=SEED).fit(fitted(task), _regression_rows(30, seed=20))
    return {"std_scale": np.array(scaled.std_scale), **predicted(scaled, TASKS[task][3])}


def streamed() -> Arrays:
    found = fitted("classification").summarize(TASKS["classification"][3], 40, seed=SEED, quantiles=(0.025, 0.975))
    low, high = found.interval(method="percentile")
    names = ("mean", "std", "probs", "entropy", "expected_entropy", "mutual_information", "confidence")
    return {"low": low.numpy(), "high": high.numpy(), **{name: getattr(found, name).numpy() for name in names}}


def saved() -> Arrays:
    """The tensors of a saved predictor, and what it predicts when it is loaded again."""
    with tempfile.TemporaryDirectory() as folder:
        return save_predictor(Path(folder) / "model")


def save_predictor(folder: Path) -> Arrays:
    from safetensors.numpy import load_file

    save(fitted("classification"), folder)
    again = load(folder, model=mlp(3))
    state = {f"state/{name}": value for name, value in load_file(folder / "model.safetensors").items()}
    return state | predicted(again, TASKS["classification"][3])


# -- draws ---------------------------------------------------------------------------------------------

LAWS: dict[str, Any] = {
    "dirichlet 1": Dirichlet(),
    "dirichlet 5": Dirichlet(5.0),
    "dirichlet 0.3": Dirichlet(0.3),
    "exponential 1": Exponential(),
    "exponential 4": Exponential(4.0),
    "multinomial": Multinomial(),
    "constant": Constant(),
}


def draws_of_law(name: str) -> Arrays:
    alpha = LAWS[name].sample(derive_keys(torch.arange(3), SEED, "replicate"), 7)
    exact = {
        link: np.array(link_moments(LAWS[name], link, 7))
        for link in ("identity", "exp")  # type: ignore[arg-type]
    }
    linked = apply_link(alpha, "exp").numpy()
    return {"alpha": alpha.numpy(), "exp": linked, **{f"moments {link}": value for link, value in exact.items()}}


def keys() -> Arrays:
    named = derive_keys(torch.arange(4), SEED, "replicate")
    return {
        "stable_hash": np.array([stable_hash(SEED, "epoch", 3), stable_hash("a", 1, "b")]),
        "seed": np.array([derive_seed(SEED, "trial", k) for k in range(3)]),
        "keys": named.numpy(),
        "uniforms": draw_uniform(named[:, None], torch.arange(5)).numpy(),
        "hashed": hash_to_range(torch.arange(20), 7, SEED, "stream").numpy(),
    }


def continuous_keys() -> Arrays:
    named = derive_keys(torch.arange(4), SEED, "replicate")
    shapes = {f"gamma {shape}": draw_gamma(named, 5, shape).numpy() for shape in (0.3, 1.0, 2.5)}
    return {"normals": draw_normal(named, 5).numpy(), **shapes}


def blocks() -> Arrays:
    strata = torch.arange(40) % 3
    pixels = torch.arange(60).reshape(5, 3, 4) % 4
    return {
        "plain": assign_blocks(40, 7, seed=SEED).numpy(),
        "strata": assign_blocks(40, 7, strata=strata, seed=SEED).numpy(),
        "hashed": HashedBlocks(7, seed=SEED)(torch.arange(40)).numpy(),
        "strata of numbers": compute_strata(draws(25), num_bins=5).numpy(),
        "strata of columns": compute_strata(draws(25, 2), num_bins=5).numpy(),
        "strata of pixels": compute_strata(pixels).numpy(),
    }


def plan(resample: Any) -> Arrays:
    table = BlockTable(assign_blocks(20, 4, seed=SEED), 4)
    chosen = WeightSchedule(Dirichlet(), table, seed=SEED, resample=resample, warmup=1)
    found = {}
    for epoch in (0, 1, 2):
        alpha, w = chosen.at_epoch(epoch)(torch.tensor([0, 5, 7]), step=3)
        found |= {f"alpha {epoch}": alpha.numpy(), f"w {epoch}": w.numpy()}
    return found


# -- metrics -------------------------------------------------------------------------------------------

LOGITS = draws(40, 3).double()
PROBS = LOGITS.softmax(1)
LABELS = torch.arange(40) * 7 % 3
Y, MEAN, STD = draws(40).double(), draws(40, seed=1).double(), draws(40, seed=2).double().abs() + 0.1
SAMPLES = draws(6, 40, seed=3).double()
POSITIVE = torch.arange(40) % 2 == 0
PIXELS = draws(2, 3, 5, 5).double().softmax(1)
PIXEL_LABELS = torch.arange(50).reshape(2, 5, 5) * 5 % 3
GUESSES = torch.stack([(draws(40, 3, seed=s)).argmax(1) for s in range(4)])

METRICS: dict[str, Callable[[], Any]] = {
    "accuracy": lambda: metrics.accuracy(PROBS, LABELS),
    "error": lambda: metrics.error(PROBS, LABELS),
    "nll": lambda: metrics.nll(PROBS, LABELS),
    "brier": lambda: metrics.brier(PROBS, LABELS),
    "ece": lambda: metrics.ece(PROBS, LABELS),
    "ece, 7 bins": lambda: metrics.ece(PROBS, LABELS, num_bins=7),
    "mce": lambda: metrics.mce(PROBS, LABELS),
    "adaptive_ece": lambda: metrics.adaptive_ece(PROBS, LABELS),
    "aurc": lambda: metrics.aurc(PROBS, LABELS),
    "nll_at_mean_logit": lambda: metrics.nll_at_mean_logit(LOGITS, LABELS),
    "paper_nll": lambda: metrics.paper_nll(LOGITS, LABELS),
    "confusion_matrix": lambda: metrics.confusion_matrix(PROBS, LABELS),
    "precision": lambda: metrics.precision(PROBS, LABELS),
    "recall": lambda: metrics.recall(PROBS, LABELS),
    "f1": lambda: metrics.f1(PROBS, LABELS),
    "disagreement": lambda: metrics.disagreement(GUESSES, LABELS),
    "q_statistic": lambda: metrics.q_statistic(GUESSES, LABELS),
    "correlation": lambda: metrics.correlation(GUESSES, LABELS),
    "ratio_error": lambda: metrics.ratio_error(GUESSES, LABELS),
    "pairwise_kl": lambda: metrics.pairwise_kl(draws(4, 10, 3).softmax(2)),
    "coverage": lambda: metrics.interval_coverage(MEAN - STD, MEAN + STD, Y),
    "mean_width": lambda: metrics.mean_width(MEAN - STD, MEAN + STD),
    "pinball": lambda: metrics.pinball(MEAN, Y, q=0.9),
    "interval_score": lambda: metrics.interval_score(MEAN - STD, MEAN + STD, Y, level=0.8),
    "crps_samples": lambda: metrics.crps_samples(SAMPLES, Y),
    "rmse": lambda: metrics.rmse(MEAN, Y),
    "sharpness": lambda: metrics.sharpness(STD),
    "gaussian_nll": lambda: metrics.gaussian_nll(MEAN, STD, Y),
    "crps": lambda: metrics.crps(MEAN, STD, Y),
    "check_score": lambda: metrics.check_score(MEAN, STD, Y),
    "mean_interval_score": lambda: metrics.mean_interval_score(MEAN, STD, Y),
    "mean_absolute_calibration": lambda: metrics.mean_absolute_calibration(MEAN, STD, Y),
    "rms_calibration": lambda: metrics.rms_calibration(MEAN, STD, Y),
    "miscalibration_area": lambda: metrics.miscalibration_area(MEAN, STD, Y),
    "auroc": lambda: metrics.auroc(Y, positive=POSITIVE),
    "aupr": lambda: metrics.aupr(Y, positive=POSITIVE),
    "fpr_at_tpr": lambda: metrics.fpr_at_tpr(Y, positive=POSITIVE),
    "tnr_at_tpr": lambda: metrics.tnr_at_tpr(Y, positive=POSITIVE),
    "detection_accuracy": lambda: metrics.detection_accuracy(Y, positive=POSITIVE),
    "iou": lambda: metrics.iou(PIXELS, PIXEL_LABELS),
    "mean_iou": lambda: metrics.mean_iou(PIXELS, PIXEL_LABELS),
    "dice": lambda: metrics.dice(PIXELS, PIXEL_LABELS),
    "dice, void": lambda: metrics.dice(PIXELS, PIXEL_LABELS, ignore_index=2),
}


def metric(name: str) -> Arrays:
    return {"value": METRICS[name]().numpy()}


# -- evaluation ----------------------------------------------------------------------------------------


def _outputs(n: int, seed: int) -> tuple[DeterministicPredictor, TensorDataset]:
    """A predictor whose inputs are its logits, and labels drawn from them."""
    logits = 2 * draws(n, 3, seed=seed)
    labels = (logits + draws(n, 3, seed=seed + 1)).argmax(1)
    return DeterministicPredictor(nn.Identity()), TensorDataset(logits, labels)


def conformal_set(kind: Any, by_class: bool) -> Arrays:
    predictor, rows = _outputs(200, 30)
    rule = fit_conformal_classifier(
        predictor, rows, level=0.8, score=kind, class_conditional=by_class, num_samples=1, seed=SEED, progress=False
    )
    found = rule.evaluate(_outputs(50, 40)[1], progress=False)
    report = [found.coverage, found.mean_size, found.empty, found.singleton]
    sets = rule.predict(draws(8, 3, seed=50), progress=False)
    return {"quantiles": np.array(rule.quantiles), "mask": sets.mask.numpy(), "report": np.array(report)}


def conformal_interval(kind: Any) -> Arrays:
    rows = _regression_rows(100, seed=20)
    rule = fit_conformal_regressor(
        influence("regression"), rows, level=0.8, score=kind, noise_std=0.5, num_samples=20, seed=SEED, progress=False
    )
    low, high = rule.predict(draws(5, 4, seed=50), progress=False)
    found = rule.evaluate(_regression_rows(40, seed=60), progress=False)
    report = torch.cat([found.coverage, found.mean_width, found.interval_score])
    return {"quantiles": np.array(rule.quantiles), "low": low.numpy(), "high": high.numpy(), "report": report.numpy()}


def selective_entry(score: Any) -> Arrays:
    rows = _class_rows(80, seed=70)
    found = evaluate_selective_prediction(
        fitted("classification"), rows, score=score, num_samples=20, seed=SEED, progress=False
    )
    threshold = found.threshold_for(coverage=0.5)
    labels, abstain = found.wrap(fitted("classification"), coverage=0.5).predict(draws(8, 4, seed=50), progress=False)
    return {
        "figures": np.array([found.risk, found.aurc, found.excess_aurc, found.risk_at(0.5), threshold]),
        "labels": labels.numpy(),
        "abstain": abstain.numpy(),
    }


def controlled() -> Arrays:
    predictor, rows = _outputs(300, 30)
    found = fit_risk_controlled_threshold(predictor, rows, risk=0.15, num_samples=1, seed=SEED, progress=False)
    return {"figures": np.array([found.threshold, found.bound, found.selective_risk, found.coverage])}


DETECTORS: dict[str, Callable[[Any], Any]] = {
    "max softmax": lambda p: MaxSoftmax(p, num_samples=20, seed=SEED),
    "entropy": lambda p: Entropy(p, num_samples=20, seed=SEED),
    "mutual information": lambda p: MutualInformation(p, num_samples=20, seed=SEED),
    "spread": lambda p: PredictiveStd(p, num_samples=20, seed=SEED),
    "energy": lambda p: Energy(p, num_samples=20, seed=SEED),
    "odin": lambda p: Odin(p, num_samples=20, seed=SEED),
    "mahalanobis": lambda p: Mahalanobis(p, num_samples=20, seed=SEED),
    "mahalanobis ensemble": lambda p: MahalanobisEnsemble(p, num_samples=20, seed=SEED),
    "replicates": lambda p: ReplicateDetector(p, num_samples=20, seed=SEED),
    "replicates, preprocessed": lambda p: ReplicateDetector(p, preprocess=True, num_samples=20, seed=SEED),
}


def detector(name: str) -> Arrays:
    inside, outside = draws(30, 4, seed=80), 3 * draws(30, 4, seed=81) + 1
    chosen = DETECTORS[name](influence("classification"))
    chosen = chosen.fit(inside[:15], outside[:15], train_data=_class_rows(), progress=False)
    found = chosen.evaluate(inside[15:], outside[15:], progress=False)
    scores = chosen.score(torch.cat([inside[15:20], outside[15:20]]), progress=False)
    return {"scores": scores.numpy(), "auroc": np.array(float(found.auroc))}


def active(strategy: str, kind: Any) -> Arrays:
    task = "classification" if kind == "classes" else "regression"
    choice = select_for_labeling(
        fitted(task), draws(30, 4, seed=90), 6, strategy=strategy, task=task, num_samples=20, seed=SEED, progress=False
    )
    return {"rows": choice.rows.numpy(), "scores": choice.scores.numpy()}


def audited(task: str) -> Arrays:
    loss, model, rows, _ = TASKS[task]
    truth = BayesianBootstrap(loss, num_members=4).fit(model, rows(), short_training(1))
    found = compare_with_bootstrap(
        fitted(task),
        truth,
        draws(10, 4, seed=50),
        num_samples=50,
        seed=SEED,
        logits=task == "classification",
        progress=False,
    )
    figures = [found.ratio, found.ks, found.null.ks, found.wasserstein, found.null.wasserstein, found.shift]
    figures += [found.null.wasserstein_limit, found.shifted, found.null.shifted_limit, found.constant]
    maps = {"std": found.std, "true_std": found.bootstrap_std, "ks": found.ks_map, "wasserstein": found.wasserstein_map}
    named = {name: value.numpy() for name, value in maps.items()}
    return {"figures": np.array([np.nan if value is None else value for value in figures]), **named}


# -- images --------------------------------------------------------------------------------------------

IMAGE = torch.rand(1, 3, 8, 8, generator=torch.Generator().manual_seed(0))


def corruption(name: str) -> Arrays:
    index = torch.tensor([4])
    return {f"{k}": CORRUPTIONS[name](IMAGE, k, seed=SEED, index=index).float().numpy() for k in (1, 4)}


def rotation() -> Arrays:
    return {"30": rotate(IMAGE, 30.0).numpy()}


def augmentation(name: str) -> Arrays:
    augment: Any = {
        "crop, flip, cutout": CropFlipCutout((8, 8), padding=2, cutout=4, fill=(0.4, 0.5, 0.6)),
        "crop, flip": CropFlip((6, 7), scale=(0.5, 2.0), fill=(0.4, 0.5, 0.6)),
    }[name]
    masks = torch.arange(128).reshape(2, 8, 8) % 3 if name == "crop, flip" else torch.arange(2)
    with torch.random.fork_rng():
        torch.manual_seed(SEED)
        x, y = augment(IMAGE.repeat(2, 1, 1, 1), masks)
    return {"x": x.numpy(), "y": y.numpy()}


# -- estimators ----------------------------------------------------------------------------------------


def classifier(method: str) -> Arrays:
    X, y = load_iris(return_X_y=True)
    model = NeuBootsClassifier(method, epochs=2, num_samples=B, random_state=SEED).fit(X[::2], y[::2])
    rows = X[1::20]
    return {"probs": model.predict_proba(rows), "labels": model.predict(rows), "samples": model.sample(rows, 2)}


def regressor(method: str, band: Any) -> Arrays:
    X, y = load_diabetes(return_X_y=True)
    model = NeuBootsRegressor(method, epochs=2, num_samples=B, random_state=SEED, band=band).fit(X[:200], y[:200])
    rows = X[200:206]
    mean, std = model.predict(rows, return_std=True)
    found = {"mean": mean, "std": std, "samples": model.sample(rows, 2)}
    for kind in ("prediction", "confidence"):
        found[f"{kind} low"], found[f"{kind} high"] = model.predict_interval(rows, interval=kind)
    return found


# -- command line --------------------------------------------------------------------------------------


def _iris(folder: Path) -> Path:
    found = load_iris(as_frame=True)
    frame = found.frame.rename(columns=lambda name: name.replace(" (cm)", "").replace(" ", "_"))
    frame["target"] = found.target_names[frame["target"]]
    frame["site"] = ["north", "south", "east"] * 50
    frame.to_csv(folder / "table.csv", index=False)
    frame.iloc[::9].to_csv(folder / "some.csv", index=False)
    return folder / "table.csv"


def _diabetes(folder: Path) -> Path:
    frame = load_diabetes(as_frame=True, scaled=False).frame.iloc[:250]
    frame.to_csv(folder / "table.csv", index=False)
    frame.iloc[::11].to_csv(folder / "some.csv", index=False)
    return folder / "table.csv"


def _digits(folder: Path) -> Path:
    from PIL import Image

    found = load_digits()
    for name in ("table", "some"):
        for label in (0, 1):
            (folder / name / f"digit {label}").mkdir(parents=True)
    for k, (image, label) in enumerate(zip(found.images, found.target, strict=True)):
        if label < 2 and k < 400:
            picture = Image.fromarray((image * 15).astype(np.uint8)).resize((32, 32), Image.Resampling.NEAREST)
            picture.save(folder / "table" / f"digit {label}" / f"{k:04}.png")
            if k < 60:
                picture.save(folder / "some" / f"digit {label}" / f"{k:04}.png")
    return folder / "table"


COMMAND_DATA: dict[str, tuple[Callable[[Path], Path], tuple[str, ...]]] = {
    "classification table": (_iris, ("--target", "target")),
    "regression table": (_diabetes, ("--target", "target")),
    "image folder": (_digits, ("--size", "32", "--channels", "1")),
}


def _run(*words: str | Path) -> Any:
    out = io.StringIO()
    with redirect_stdout(out), redirect_stderr(io.StringIO()):
        code = cli.main([str(word) for word in words])
    assert code in (0, None), words
    return json.loads(out.getvalue())


def _columns(path: Path) -> dict[str, list[Any]]:
    with path.open(encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))
    return {name: [row[name] for row in rows] for name in (rows[0] if rows else {})}


@cache
def _trained(name: str) -> tuple[Path, Any]:
    folder = Path(tempfile.mkdtemp(prefix="golden"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    make, options = COMMAND_DATA[name]
    source = make(folder)
    quick = ("--epochs", "2", "--num-samples", str(B), "--seed", str(SEED))
    return folder, _run("fit", source, *options, "--out", folder / "model", *quick, "--json")


def command(name: str, step: str) -> dict[str, Any]:
    """The JSON object of one command, and the columns of the file that it writes."""
    folder, fit = _trained(name)
    if step == "fit":
        return {"json": fit}
    model, data = folder / "model", folder / ("some" if name == "image folder" else "some.csv")
    out, samples = folder / f"{step}.csv", ("--num-samples", str(B), "--json")
    if step == "predict":
        return {"json": _run("predict", model, data, "--out", out, *samples), "columns": _columns(out)}
    if step == "evaluate":
        return {"json": _run("evaluate", model, data, *samples)}
    return {"json": _run("suggest", model, data, "-k", "4", "--out", out, *samples), "columns": _columns(out)}


# -- all entries, by file ------------------------------------------------------------------------------

GROUPS: dict[str, dict[str, Entry]] = {
    "methods": {
        **{f"{name} | {task}": partial(method_entry, name, task) for name, (_, ts) in METHODS.items() for task in ts},
        "influence around a net": influence_around,
        "temperature": temperature,
        "std scale | regression": partial(std_scale, "regression"),
        "std scale | gaussian": partial(std_scale, "gaussian"),
        "summarize": streamed,
        "saved": saved,
    },
    "draws": {
        **{f"law {name}": partial(draws_of_law, name) for name in LAWS},
        **{f"plan {resample}": partial(plan, resample) for resample in ("epoch", "step", "sample", "pool")},
        "keys": keys,
        "continuous keys": continuous_keys,
        "blocks": blocks,
    },
    "metrics": {name: partial(metric, name) for name in METRICS},
    "evaluation": {
        **{
            f"conformal sets {kind}, by class {by_class}": partial(conformal_set, kind, by_class)
            for kind in ("threshold", "adaptive", "regularised")
            for by_class in (False, True)
        },
        **{
            f"conformal intervals {kind}": partial(conformal_interval, kind)
            for kind in ("absolute", "normalised", "quantile")
        },
        **{
            f"selective {score}": partial(selective_entry, score)
            for score in ("confidence", "entropy", "mutual_information", "std")
        },
        "risk control": controlled,
        **{f"ood {name}": partial(detector, name) for name in DETECTORS},
        **{
            f"active {strategy}, {kind}": partial(active, strategy, kind)
            for kind, strategies in {
                "classes": ("random", "entropy", "margin", "bald", "std", "batch"),
                "regression": ("random", "std", "batch"),
            }.items()
            for strategy in strategies
        },
        **{f"audit {task}": partial(audited, task) for task in BOTH},
    },
    "images": {
        **{f"corruption {name}": partial(corruption, name) for name in CORRUPTIONS},
        "rotation": rotation,
        **{f"augmentation {name}": partial(augmentation, name) for name in ("crop, flip, cutout", "crop, flip")},
    },
    "estimators": {
        **{f"classifier {method}": partial(classifier, method) for method in ("neuboots", "deep-ensemble", "laplace")},
        "regressor neuboots, influence band": partial(regressor, "neuboots", "influence"),
        "regressor neuboots, band of the method": partial(regressor, "neuboots", "method"),
        "regressor mc-dropout": partial(regressor, "mc-dropout", "method"),
    },
}
COMMANDS: dict[str, Callable[[], dict[str, Any]]] = {
    f"{name} | {step}": partial(command, name, step)
    for name in COMMAND_DATA
    for step in ("fit", "predict", "evaluate", "next")
}


@contextmanager
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)
