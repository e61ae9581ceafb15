"""Eight evaluations of predictors, one panel each: writes evaluation.png (or the file you name).

    python examples/evaluation.py [out.png]

Needs the extra `all`; takes a minute or two on two cores. The nets and data are small, for illustration only.
"""

import sys
from pathlib import Path

import torch
from matplotlib.figure import Figure
from sklearn.datasets import load_diabetes, load_digits
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from neuboots import BayesianBootstrap, Deterministic, NeuBoots, Predictor, TrainingConfig, residual_std
from neuboots.data.corruptions import CORRUPTIONS
from neuboots.evaluation.active_learning import run_active_learning
from neuboots.evaluation.calibration import evaluate_calibration
from neuboots.evaluation.corruption import evaluate_corruptions
from neuboots.evaluation.coverage import SYNTHETIC_REGRESSIONS, simulate_coverage
from neuboots.evaluation.ood import ReplicateDetector, holdout_split
from neuboots.evaluation.regression import evaluate_regression
from neuboots.evaluation.selective import evaluate_selective_prediction
from neuboots.nets import MLP
from neuboots.report import plots

CONFIG = TrainingConfig(epochs=40, batch_size=32, progress=False)
WORKERS = 2


def digits() -> tuple[Tensor, Tensor]:
    x, y = load_digits(return_X_y=True)
    return torch.from_numpy(x).float() / 16, torch.from_numpy(y).long()


def model() -> MLP:
    return MLP(64, 10, widths=(64, 64))


def main(out: Path) -> None:
    sheet = Figure(figsize=(18, 9), layout="constrained")
    axes = sheet.subplots(2, 4)
    x, y = digits()
    train, test = TensorDataset(x[:400], y[:400]), TensorDataset(x[1000:], y[1000:])
    nets: dict[str, Predictor] = {
        "plain": Deterministic().fit(model, train, CONFIG),
        "NeuBoots": NeuBoots().fit(model, train, CONFIG),
    }

    curves = {name: evaluate_calibration(net, test).reliability_curve for name, net in nets.items()}
    plots.plot_reliability(axes[0, 0], curves)
    plots.plot_risk_coverage(
        axes[0, 1], {name: evaluate_selective_prediction(net, test).curve for name, net in nets.items()}
    )

    noise = torch.rand(600, 64, generator=torch.Generator().manual_seed(0))
    (inside, test_in), (outside, test_out) = holdout_split(x[1000:], 300), holdout_split(noise, 300)
    detector = ReplicateDetector(nets["NeuBoots"]).fit(inside, outside)
    found = detector.evaluate(test_in, test_out, positive="in")
    print(found)
    groups = {"digits": detector.score(test_in), "noise": detector.score(test_out)}
    plots.plot_histograms(axes[0, 2], groups, label="log-odds of being out of distribution", bottom=-6, top=6)

    pool = TensorDataset(x[:1000], y[:1000])
    options = {
        "initial_size": 50,
        "query_size": 50,
        "num_rounds": 4,
        "num_trials": 3,
        "num_samples": 50,
        "num_workers": WORKERS,
    }
    learned = {}
    for strategy in ("random", "margin", "batch"):
        curve = run_active_learning(NeuBoots(), model, pool, test, CONFIG, strategy=strategy, **options)  # type: ignore[arg-type]
        learned[strategy] = (curve.num_labels.tolist(), curve.accuracy)
    plots.plot_learning_curves(axes[0, 3], learned)

    methods = {
        "NeuBoots": NeuBoots.regression(),
        "Bayesian bootstrap": BayesianBootstrap(nn.MSELoss(), num_members=10),
    }
    checks = {
        name: simulate_coverage(
            method,
            lambda: MLP(1, 1, widths=(64, 64)),
            SYNTHETIC_REGRESSIONS["sine"],
            CONFIG,
            num_datasets=20,
            num_workers=WORKERS,
        )
        for name, method in methods.items()
    }
    check = checks["NeuBoots"]
    band, grid = check.bands[0], check.x[:, 0]
    plots.plot_regression_band(
        axes[1, 0],
        grid,
        band.mean,
        band.low,
        band.high,
        label="NeuBoots, 95 % band",
        truth=check.truth,
        points=(band.x[:, 0], band.y),
    )
    covered = {name: check.rate for name, check in checks.items()}
    plots.plot_coverage(axes[1, 1], grid, covered, level=check.level, num_sets=check.num_datasets)

    u, v = (torch.from_numpy(part).float() for part in load_diabetes(return_X_y=True))
    u, v = (u - u.mean(0)) / u.std(0), (v - v.mean()) / v.std()
    curve = NeuBoots.regression().fit(lambda: MLP(10, 1, widths=(32,)), TensorDataset(u[:250], v[:250]), CONFIG)
    sigma = residual_std(curve, u[250:340], v[250:340])
    report = evaluate_regression(curve, TensorDataset(u[340:], v[340:]), noise_std=sigma)
    print(report)
    plots.plot_calibration_curve(axes[1, 2], {"NeuBoots with noise": report.state.calibration_curve})

    images = TensorDataset(x[1000:].reshape(-1, 1, 8, 8), y[1000:])
    lines = {}
    for name in ("gaussian_noise", "gaussian_blur", "contrast", "pixelate"):
        by = evaluate_corruptions(
            nets["NeuBoots"], images, {name: CORRUPTIONS[name]}, preprocess=lambda part: part.flatten(1)
        )
        lines[name.replace("_", " ")] = {int(row["severity"]): float(row["accuracy"]) for row in by.by_severity}
    plots.plot_corruption(axes[1, 3], lines, label="accuracy of NeuBoots")
    titles = (
        *("digits: reliability", "digits: selective prediction"),
        *(f"out-of-distribution detection, AUROC {float(found.auroc):.3f}", "digits: active learning"),
        *("a sine: one dataset", "a sine: coverage over 20 datasets", "diabetes: calibration", "digits: corrupted"),
    )
    for ax, title in zip(axes.flat, titles, strict=True):
        ax.set_title(title, fontsize=11)
    plots.save_png(sheet, out)
    print(f"wrote {out}")


if __name__ == "__main__":
    main(Path(sys.argv[1] if len(sys.argv) > 1 else "evaluation.png"))
