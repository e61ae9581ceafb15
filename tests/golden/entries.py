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
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from functools import cache, partial
from itertools import product
from pathlib import Path
from typing import Any, Literal

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


def arrays(**values: Any) -> Arrays:
    return {name: np.asarray(value) for name, value in values.items()}


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

METHODS: dict[str, tuple[Callable[..., Any], dict[str, Any], tuple[str, ...]]] = {
    "plain": (Deterministic, {}, BOTH),
    "neuboots": (NeuBoots, {}, (*ALL, "gaussian")),
    "neuboots, link exp, redraw step, warm-up": (
        NeuBoots,
        {"link": "exp", "weight_distribution": Exponential(), "resample": "step", "warmup": 1},
        BOTH,
    ),
    "neuboots, redraw sample": (NeuBoots, {"resample": "sample"}, BOTH),
    "neuboots, redraw pool": (NeuBoots, {"resample": "pool"}, BOTH),
    "neuboots, 3 blocks": (NeuBoots, {"num_blocks": 3}, BOTH),
    "neuboots, head only": (NeuBoots, {"train_head_only": True}, BOTH),
    "neuboots, multinomial": (NeuBoots, {"weight_distribution": Multinomial()}, ("classification",)),
    "neuboots, paper": (NeuBoots.paper, {}, ("classification",)),
    "neuboots, regression": (NeuBoots.regression, {}, ("regression", "gaussian")),
    "standard-bootstrap": (StandardBootstrap, {"num_members": 3}, BOTH),
    "bayesian-bootstrap": (BayesianBootstrap, {"num_members": 3}, BOTH),
    "deep-ensemble": (DeepEnsemble, {"num_members": 3}, (*BOTH, "segmentation")),
    "deep-ensemble-original": (AdversarialDeepEnsemble, {"num_members": 2}, BOTH),
    "gbs": (GBS, {}, BOTH),
    "amortized-bootstrap": (AmortizedBootstrap, {}, BOTH),
    "gp": (GaussianProcess, {"steps": 20}, ("regression",)),
    "gp, Matérn, one length-scale": (
        GaussianProcess,
        {"kernel": "matern52", "ard": False, "steps": 20},
        ("regression",),
    ),
    "sparse-gp": (SparseGP, {"num_inducing": 8, "steps": 20}, ("regression",)),
    "batch-ensemble": (BatchEnsemble, {"num_members": 3}, IMAGES),
    "batch-ensemble, random signs": (BatchEnsemble, {"num_members": 3, "init": "random_sign"}, BOTH),
    "mimo": (MIMO, {"num_members": 2}, BOTH),
    "lp-bnn": (LPBNN, {"num_members": 3}, BOTH),
    "mc-dropout": (MCDropout, {}, ALL),
    "mc-dropout, channels before the head": (
        MCDropout,
        {"where": "head", "granularity": "channel", "rate": 0.5},
        IMAGES,
    ),
    "laplace": (Laplace, {}, ALL),
    "laplace, kron": (Laplace, {"structure": "kron", "prior_precision": 2.0}, IMAGES),
    "influence": (InfluenceBootstrap, {}, (*ALL, "gaussian")),
    "influence, refitted": (InfluenceBootstrap, {"refit": True, "residuals": "raw"}, BOTH),
    "influence, blocks": (InfluenceBootstrap, {"num_blocks": 12, "weight_distribution": Exponential()}, BOTH),
    "influence, 2 layers": (InfluenceBootstrap, {"layers": 2, "num_folds": 0}, BOTH),
    "influence, all layers": (InfluenceBootstrap, {"layers": "all", "num_folds": 0}, (*IMAGES, "gaussian")),
    "influence, all layers, 2 folds": (InfluenceBootstrap, {"layers": "all"}, BOTH),
    "swag": (SWAG, {"start": 0.0, "every": 1, "rank": 2, "learning_rate": 1e-2}, BOTH),
    "calibrated-neuboots": (CalibratedNeuBoots, {}, BOTH),
    "calibrated-neuboots, by bootstrap": (CalibratedNeuBoots, {"reference": "bootstrap", "num_members": 3}, BOTH),
}


def predicted(predictor: Any, x: Tensor) -> Arrays:
    found = predictor.predict(x, B, seed=SEED)
    return arrays(samples=found.samples, mean=found.mean, std=found.std, probs=found.probs)


def method_entry(name: str, task: str) -> Arrays:
    method, options, _ = METHODS[name]
    loss, model, rows, x = TASKS[task]
    return predicted(method(loss, **options).fit(model, rows(), short_training()), x)


@cache
def fitted(task: str, method: type[NeuBoots] | type[InfluenceBootstrap] = NeuBoots) -> Any:
    loss, model, rows, _ = TASKS[task]
    return method(loss).fit(model, rows(), short_training())


def influence_around() -> Arrays:
    with torch.random.fork_rng():
        torch.manual_seed(SEED)
        net = mlp(3)
    predictor = InfluenceBootstrap(nn.CrossEntropyLoss()).from_trained(net, _class_rows(), batch_size=16, seed=SEED)
    return predicted(predictor, TASKS["classification"][3])


def temperature() -> Arrays:
    scaled = TemperatureScaling(num_samples=B, seed=SEED).fit(fitted("classification"), _class_rows(30, seed=20))
    return arrays(temperature=scaled.temperature) | predicted(scaled, TASKS["classification"][3])


def std_scale(task: str) -> Arrays:
    scaled = StdScaling(num_samples=B, seed=SEED).fit(fitted(task), _regression_rows(30, seed=20))
    return arrays(std_scale=scaled.std_scale) | predicted(scaled, TASKS[task][3])


def streamed() -> Arrays:
    found = fitted("classification").summarize(TASKS["classification"][3], 40, seed=SEED, quantiles=(0.025, 0.975))
    low, high = found.interval(method="percentile")
    names = ("mean", "std", "probs", "entropy", "expected_entropy", "mutual_information", "confidence")
    return arrays(low=low, high=high, **{name: getattr(found, name) for name in names})


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

DISTRIBUTIONS: dict[str, Any] = {
    "dirichlet 1": Dirichlet(),
    "dirichlet 5": Dirichlet(5.0),
    "dirichlet 0.3": Dirichlet(0.3),
    "exponential 1": Exponential(),
    "exponential 4": Exponential(4.0),
    "multinomial": Multinomial(),
    "constant": Constant(),
}


def draws_of_distribution(name: str) -> Arrays:
    distribution = DISTRIBUTIONS[name]
    alpha = distribution.sample(derive_keys(torch.arange(3), SEED, "replicate"), 7)
    links: tuple[Literal["identity", "exp"], ...] = ("identity", "exp")
    exact = {f"moments {link}": link_moments(distribution, link, 7) for link in links}
    return arrays(alpha=alpha, exp=apply_link(alpha, "exp"), **exact)


def keys() -> Arrays:
    named = derive_keys(torch.arange(4), SEED, "replicate")
    return arrays(
        stable_hash=[stable_hash(SEED, "epoch", 3), stable_hash("a", 1, "b")],
        seed=[derive_seed(SEED, "trial", k) for k in range(3)],
        keys=named,
        uniforms=draw_uniform(named[:, None], torch.arange(5)),
        hashed=hash_to_range(torch.arange(20), 7, SEED, "stream"),
    )


def continuous_keys() -> Arrays:
    named = derive_keys(torch.arange(4), SEED, "replicate")
    shapes = {f"gamma {shape}": draw_gamma(named, 5, shape) for shape in (0.3, 1.0, 2.5)}
    return arrays(normals=draw_normal(named, 5), **shapes)


def blocks() -> Arrays:
    strata = {
        "strata of numbers": compute_strata(draws(25), num_bins=5),
        "strata of columns": compute_strata(draws(25, 2), num_bins=5),
        "strata of pixels": compute_strata(torch.arange(60).reshape(5, 3, 4) % 4),
    }
    return arrays(
        plain=assign_blocks(40, 7, seed=SEED),
        strata=assign_blocks(40, 7, strata=torch.arange(40) % 3, seed=SEED),
        hashed=HashedBlocks(7, seed=SEED)(torch.arange(40)),
        **strata,
    )


def plan(resample: Any) -> Arrays:
    table = BlockTable(assign_blocks(20, 4, seed=SEED), 4)
    chosen = WeightSchedule(Dirichlet(), table, seed=SEED, resample=resample, warmup=1)
    found = {}
    for epoch in (0, 1, 2):
        alpha, w = chosen.at_epoch(epoch)(torch.tensor([0, 5, 7]), step=3)
        found |= arrays(**{f"alpha {epoch}": alpha, f"w {epoch}": w})
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
PREDICTIONS = torch.stack([(draws(40, 3, seed=s)).argmax(1) for s in range(4)])

CLASSES, GAUSSIAN = (PROBS, LABELS), (MEAN, STD, Y)
METRIC_ARGUMENTS: dict[tuple[str, ...], tuple[Tensor, ...]] = {
    ("accuracy", "error", "nll", "brier", "ece", "mce", "adaptive_ece", "aurc"): CLASSES,
    ("confusion_matrix", "precision", "recall", "f1"): CLASSES,
    ("nll_at_mean_logit", "paper_nll"): (LOGITS, LABELS),
    ("disagreement", "q_statistic", "correlation", "ratio_error"): (PREDICTIONS, LABELS),
    ("pairwise_kl",): (draws(4, 10, 3).softmax(2),),
    ("mean_width",): (MEAN - STD, MEAN + STD),
    ("crps_samples",): (SAMPLES, Y),
    ("rmse",): (MEAN, Y),
    ("sharpness",): (STD,),
    ("gaussian_nll", "crps", "check_score", "mean_interval_score"): GAUSSIAN,
    ("mean_absolute_calibration", "rms_calibration", "miscalibration_area"): GAUSSIAN,
    ("iou", "mean_iou", "dice"): (PIXELS, PIXEL_LABELS),
}
METRICS: dict[str, Callable[[], Any]] = {
    **{name: partial(getattr(metrics, name), *args) for names, args in METRIC_ARGUMENTS.items() for name in names},
    **{
        name: partial(getattr(metrics, name), Y, positive=POSITIVE)
        for name in ("auroc", "aupr", "fpr_at_tpr", "tnr_at_tpr", "detection_accuracy")
    },
    "ece, 7 bins": partial(metrics.ece, PROBS, LABELS, num_bins=7),
    "coverage": partial(metrics.interval_coverage, MEAN - STD, MEAN + STD, Y),
    "pinball": partial(metrics.pinball, MEAN, Y, q=0.9),
    "interval_score": partial(metrics.interval_score, MEAN - STD, MEAN + STD, Y, level=0.8),
    "dice, void": partial(metrics.dice, PIXELS, PIXEL_LABELS, ignore_index=2),
}


def metric(name: str) -> Arrays:
    return arrays(value=METRICS[name]())


# -- evaluation ----------------------------------------------------------------------------------------


def _outputs(n: int, seed: int) -> tuple[DeterministicPredictor, TensorDataset]:
    """A predictor whose inputs are its logits, and labels drawn from them."""
    logits = 2 * draws(n, 3, seed=seed)
    labels = (logits + draws(n, 3, seed=seed + 1)).argmax(1)
    return DeterministicPredictor(nn.Identity()), TensorDataset(logits, labels)


SAMPLING: dict[str, Any] = {"num_samples": 20, "seed": SEED}


SET_SCORES = ("threshold", "adaptive", "regularised")


def conformal_set(kind: Any, by_class: bool) -> Arrays:
    predictor, rows = _outputs(200, 30)
    rule = fit_conformal_classifier(
        predictor, rows, level=0.8, score=kind, class_conditional=by_class, num_samples=1, seed=SEED, progress=False
    )
    found = rule.evaluate(_outputs(50, 40)[1], progress=False)
    report = [found.coverage, found.mean_size, found.empty, found.singleton]
    return arrays(quantiles=rule.quantiles, mask=rule.predict(draws(8, 3, seed=50), progress=False).mask, report=report)


def conformal_interval(kind: Any) -> Arrays:
    predictor, rows = fitted("regression", InfluenceBootstrap), _regression_rows(100, seed=20)
    rule = fit_conformal_regressor(predictor, rows, level=0.8, score=kind, noise_std=0.5, progress=False, **SAMPLING)
    low, high = rule.predict(draws(5, 4, seed=50), progress=False)
    found = rule.evaluate(_regression_rows(40, seed=60), progress=False)
    report = torch.cat([found.coverage, found.mean_width, found.interval_score])
    return arrays(quantiles=rule.quantiles, low=low, high=high, report=report)


def selective_entry(score: Any) -> Arrays:
    predictor, rows = fitted("classification"), _class_rows(80, seed=70)
    found = evaluate_selective_prediction(predictor, rows, score=score, progress=False, **SAMPLING)
    threshold = found.threshold_for(coverage=0.5)
    labels, abstain = found.wrap(predictor, coverage=0.5).predict(draws(8, 4, seed=50), progress=False)
    figures = [found.risk, found.aurc, found.excess_aurc, found.risk_at(0.5), threshold]
    return arrays(figures=figures, labels=labels, abstain=abstain)


def controlled() -> Arrays:
    predictor, rows = _outputs(300, 30)
    found = fit_risk_controlled_threshold(predictor, rows, risk=0.15, num_samples=1, seed=SEED, progress=False)
    return arrays(figures=[found.threshold, found.bound, found.selective_risk, found.coverage])


DETECTORS: dict[str, Callable[..., Any]] = {
    "max softmax": MaxSoftmax,
    "entropy": Entropy,
    "mutual information": MutualInformation,
    "spread": PredictiveStd,
    "energy": Energy,
    "odin": Odin,
    "mahalanobis": Mahalanobis,
    "mahalanobis ensemble": MahalanobisEnsemble,
    "replicates": ReplicateDetector,
    "replicates, preprocessed": partial(ReplicateDetector, preprocess=True),
}


def detector(name: str) -> Arrays:
    inside, outside = draws(30, 4, seed=80), 3 * draws(30, 4, seed=81) + 1
    chosen = DETECTORS[name](fitted("classification", InfluenceBootstrap), **SAMPLING)
    chosen = chosen.fit(inside[:15], outside[:15], train_data=_class_rows(), progress=False)
    found = chosen.evaluate(inside[15:], outside[15:], progress=False)
    scores = chosen.score(torch.cat([inside[15:20], outside[15:20]]), progress=False)
    return arrays(scores=scores, auroc=float(found.auroc))


def active(strategy: str, kind: str) -> Arrays:
    task: Any = "classification" if kind == "classes" else "regression"
    pool = draws(30, 4, seed=90)
    choice = select_for_labeling(fitted(task), pool, 6, strategy=strategy, task=task, progress=False, **SAMPLING)
    return arrays(rows=choice.rows, scores=choice.scores)


def audited(task: str) -> Arrays:
    loss, model, rows, _ = TASKS[task]
    truth = BayesianBootstrap(loss, num_members=4).fit(model, rows(), short_training(1))
    options: dict[str, Any] = {"num_samples": 50, "seed": SEED, "logits": task == "classification", "progress": False}
    found = compare_with_bootstrap(fitted(task), truth, draws(10, 4, seed=50), **options)
    figures = [found.ratio, found.ks, found.null.ks, found.wasserstein, found.null.wasserstein, found.shift]
    figures += [found.null.wasserstein_limit, found.shifted, found.null.shifted_limit, found.constant]
    maps = {"std": found.std, "true_std": found.bootstrap_std, "ks": found.ks_map, "wasserstein": found.wasserstein_map}
    return arrays(figures=[np.nan if value is None else value for value in figures], **maps)


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
    return arrays(x=x, y=y)


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


def _write_table(folder: Path, frame: Any, every: int) -> Path:
    frame.to_csv(folder / "table.csv", index=False)
    frame.iloc[::every].to_csv(folder / "some.csv", index=False)
    return folder / "table.csv"


def _iris(folder: Path) -> Path:
    found = load_iris(as_frame=True)
    frame = found.frame.rename(columns=lambda name: name.replace(" (cm)", "").replace(" ", "_"))
    frame["target"] = found.target_names[frame["target"]]
    frame["site"] = ["north", "south", "east"] * 50
    return _write_table(folder, frame, 9)


def _diabetes(folder: Path) -> Path:
    return _write_table(folder, load_diabetes(as_frame=True, scaled=False).frame.iloc[:250], 11)


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


STEPS: dict[str, tuple[str, ...]] = {"fit": (), "predict": ("--out",), "evaluate": (), "next": ("-k", "4", "--out")}


def command(name: str, step: str) -> dict[str, Any]:
    """The JSON object of one command, and the columns of the file that it writes."""
    folder, fit = _trained(name)
    if step == "fit":
        return {"json": fit}
    data, out = folder / ("some" if name == "image folder" else "some.csv"), folder / f"{step}.csv"
    words = [*STEPS[step], *([out] if "--out" in STEPS[step] else [])]
    command = {"next": "suggest"}.get(step, step)
    found = {"json": _run(command, folder / "model", data, *words, "--num-samples", str(B), "--json")}
    return found | ({"columns": _columns(out)} if out.exists() else {})


# -- all entries, by file ------------------------------------------------------------------------------


def each(template: str, compute: Callable[..., Any], *choices: Iterable[Any]) -> dict[str, Callable[[], Any]]:
    """An entry for every combination of the choices, named by the template."""
    return {template.format(*args): partial(compute, *args) for args in product(*choices)}


GROUPS: dict[str, dict[str, Entry]] = {
    "methods": {
        **{f"{name} | {task}": partial(method_entry, name, task) for name in METHODS for task in METHODS[name][2]},
        "influence around a net": influence_around,
        "temperature": temperature,
        **each("std scale | {}", std_scale, ("regression", "gaussian")),
        "summarize": streamed,
        "saved": saved,
    },
    "draws": {
        **each("law {}", draws_of_distribution, DISTRIBUTIONS),
        **each("plan {}", plan, ("epoch", "step", "sample", "pool")),
        "keys": keys,
        "continuous keys": continuous_keys,
        "blocks": blocks,
    },
    "metrics": each("{}", metric, METRICS),
    "evaluation": {
        **each(
            "conformal sets {}, by class {}", conformal_set, ("threshold", "adaptive", "regularised"), (False, True)
        ),
        **each("conformal intervals {}", conformal_interval, ("absolute", "normalised", "quantile")),
        **each("selective {}", selective_entry, ("confidence", "entropy", "mutual_information", "std")),
        "risk control": controlled,
        **each("ood {}", detector, DETECTORS),
        **each("active {}, {}", active, ("random", "std", "batch"), ("classes", "regression")),
        **each("active {}, {}", active, ("entropy", "margin", "bald"), ("classes",)),
        **each("audit {}", audited, BOTH),
    },
    "images": {
        **each("corruption {}", corruption, CORRUPTIONS),
        "rotation": rotation,
        **each("augmentation {}", augmentation, ("crop, flip, cutout", "crop, flip")),
    },
    "estimators": {
        **each("classifier {}", classifier, ("neuboots", "deep-ensemble", "laplace")),
        "regressor neuboots, influence band": partial(regressor, "neuboots", "influence"),
        "regressor neuboots, band of the method": partial(regressor, "neuboots", "method"),
        "regressor mc-dropout": partial(regressor, "mc-dropout", "method"),
    },
}
COMMANDS: dict[str, Callable[[], dict[str, Any]]] = each("{} | {}", command, COMMAND_DATA, STEPS)


@contextmanager
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)
