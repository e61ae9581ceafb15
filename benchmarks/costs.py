"""Training time, prediction time and peak memory of each method at K = 1 … 5, on one CNN and one MLP.

    python -m benchmarks.costs [--methods NAME …] [--repeats 2] [--write]

Times are whole fits and whole predictions, best of several interleaved runs, as ratios to the plain net of the same
run; memory is what a fresh process needed beyond what it held before, in megabytes. K is the number of members of a
method that has members, and of replicates asked for. With --write the rows go to benchmarks/costs.jsonl and the tables
into docs/methods.md.
"""

import argparse
import json
import multiprocessing
import os
import tempfile
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, fields
from functools import partial
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from benchmarks.measure import Watch, interleave
from benchmarks.memory import EXACT, resident
from neuboots import Method, Predictor, TrainingConfig, load, save
from neuboots.losses import Loss
from neuboots.methods import METHODS, MethodInfo, find_method
from neuboots.nets import MLP, SmallCNN
from neuboots_paper import baselines  # noqa: F401 -- registers its methods

ROWS = Path(__file__).with_name("costs.jsonl")
PAGE = Path(__file__).parents[1] / "docs" / "methods.md"
BEGIN, END = "<!-- costs: begin -->\n", "<!-- costs: end -->"
KS = (1, 2, 3, 4, 5)
SEED = 0


@dataclass(frozen=True)
class Net:
    """One net with data to train it on and inputs to predict."""

    title: str
    loss: Loss
    make: Callable[[], nn.Module]
    data: TensorDataset
    x: Tensor
    config: TrainingConfig

    def can(self, entry: MethodInfo) -> bool:
        return ("regression" if isinstance(self.loss, nn.MSELoss) else "classification") in entry.tasks


def cnn(quick: bool = False) -> Net:
    n, epochs = (16, 2) if quick else (128, 4)
    widths = (4, 8) if quick else (16, 32, 64, 128)
    data = TensorDataset(torch.randn(n, 3, 32, 32), torch.arange(n) % 10)
    title = f"CNN with {len(widths)} convolutions of {widths[0]} to {widths[-1]} channels, {n} images of 3 × 32 × 32"
    config = TrainingConfig(epochs=epochs, batch_size=32, seed=SEED, progress=False)
    return Net(
        title, nn.CrossEntropyLoss(), lambda: SmallCNN(3, 10, widths=widths), data, torch.randn(n, 3, 32, 32), config
    )


def mlp(quick: bool = False) -> Net:
    n, epochs, width = (16, 2, 8) if quick else (512, 4, 500)
    x = torch.randn(n, 100)
    data = TensorDataset(x, x[:, :10].sum(1) + 0.1 * torch.randn(n))
    config = TrainingConfig(epochs=epochs, batch_size=64, seed=SEED, progress=False)
    title = f"MLP with five layers of {width}, {n} rows of 100 columns"
    return Net(title, nn.MSELoss(), lambda: MLP(100, 1, widths=(width,) * 5), data, torch.randn(n, 100), config)


NETS: dict[str, Callable[..., Net]] = {"cnn": cnn, "mlp": mlp}


def made(entry: MethodInfo, loss: Loss, K: int) -> Method:
    """The method with K members where it has members; `adversarial-deep-ensemble` keeps its own score for classes."""
    probe = entry.make()
    options: dict[str, object] = {} if isinstance(probe.loss, type(loss)) else {"loss": loss}  # type: ignore[attr-defined]
    if entry.name == "adversarial-deep-ensemble" and isinstance(loss, nn.CrossEntropyLoss):
        options = {}
    has = {option.name for option in fields(probe)}  # type: ignore[arg-type]
    size = "num_members" if entry.members else "num_resamples"
    options |= {size: K} if size in has else {}
    return entry.make(**options)


def fitted(entry: MethodInfo, net: Net, K: int) -> Predictor:
    return made(entry, net.loss, K).fit(net.make, net.data, net.config)


# -- time ----------------------------------------------------------------------------------------------


def times(net_name: str, names: list[str], repeats: int, quick: bool) -> list[dict[str, object]]:
    """Ratios of whole fits and whole predictions to the plain net's, K after K."""
    net = NETS[net_name](quick)
    entries = [find_method(name) for name in names if net.can(find_method(name))]
    rows: list[dict[str, object]] = []
    for K in KS:
        predictors = {entry.name: fitted(entry, net, K) for entry in entries}
        fits = {entry.name: Watch().timed(partial(fitted, entry, net, K)) for entry in entries}
        predictions = {name: Watch().timed(partial(p.predict, net.x, K)) for name, p in predictors.items()}
        train, predict = interleave(fits, repeats), interleave(predictions, 5 * repeats)
        for entry in entries:
            row = {"net": net_name, "title": net.title, "method": entry.name, "K": K}
            ratios = {"train": train.whole_ratio(entry.name, "deterministic")}
            ratios |= {"predict": predict.whole_ratio(entry.name, "deterministic")}
            rows.append(row | {key: round(value, 3) for key, value in ratios.items()})
            print(rows[-1], flush=True)
    return rows


# -- memory --------------------------------------------------------------------------------------------


def _peak(net_name: str, method: str, quick: bool, work: Callable[[Net, MethodInfo], None]) -> float:
    """Megabytes that the work needed beyond what this process held before."""
    torch.manual_seed(SEED)
    torch.set_num_threads(1)
    net, entry, warm = NETS[net_name](quick), find_method(method), NETS[net_name](True)
    fitted(entry, warm, 1).predict(warm.x, 1)  # kernels and libraries are there before we look
    before = resident("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # the highest so far is forgotten
    work(net, entry)
    return round((resident("VmHWM") - before) / 2**20, 1)


def train_megabytes(net_name: str, method: str, K: int, quick: bool, folder: str) -> float:
    kept: list[Predictor] = []
    peak = _peak(net_name, method, quick, lambda net, entry: kept.append(fitted(entry, net, K)))
    save(kept[0], folder)
    return peak


def predict_megabytes(net_name: str, method: str, K: int, quick: bool, folder: str) -> float:
    return _peak(net_name, method, quick, lambda net, entry: load(folder).predict(net.x, K).mean.sum())


def memory(rows: list[dict[str, object]], quick: bool) -> list[dict[str, object]]:
    """The rows with the megabytes of fitting and, in another process, of loading and predicting."""
    os.environ.update(EXACT)
    context = multiprocessing.get_context("forkserver")  # every measurement in a process that did nothing before
    context.set_forkserver_preload(["neuboots", "lightning_fabric", "safetensors.torch", "gpytorch"])
    with tempfile.TemporaryDirectory() as root, ProcessPoolExecutor(2, context, max_tasks_per_child=1) as pool:
        calls = [(row["net"], row["method"], row["K"], quick, f"{root}/{i}") for i, row in enumerate(rows)]
        train = [job.result() for job in [pool.submit(train_megabytes, *call) for call in calls]]
        predict = [job.result() for job in [pool.submit(predict_megabytes, *call) for call in calls]]
    figures = zip(rows, train, predict, strict=True)
    return [row | {"train_mb": mine, "predict_mb": theirs} for row, mine, theirs in figures]


# -- the table -----------------------------------------------------------------------------------------


def _figures(rows: list[dict[str, object]], key: str, form: str) -> str:
    by_k = {row["K"]: row[key] for row in rows}
    return " / ".join(format(by_k[K], form) for K in KS if K in by_k)


def table(rows: list[dict[str, object]]) -> str:
    lines = []
    for net_name in NETS:
        mine = [row for row in rows if row["net"] == net_name]
        if not mine:
            continue
        lines += [f"**{mine[0]['title']}**; each cell K = {' / '.join(map(str, KS))}.", ""]
        lines += [
            "| method | order: training, prediction | training time | prediction time | MB training | MB prediction |"
        ]
        lines += ["| --- | --- | --- | --- | --- | --- |"]
        for name in dict.fromkeys(row["method"] for row in mine):
            of = [row for row in mine if row["method"] == name]
            cells = [_figures(of, "train", ".1f"), _figures(of, "predict", ".1f")]
            cells += [_figures(of, "train_mb", ".0f"), _figures(of, "predict_mb", ".0f")]
            entry = find_method(name)
            lines.append(f"| {name} | {entry.train_cost}, {entry.predict_cost} | " + " | ".join(cells) + " |")
        lines.append("")
    return "\n".join(lines)


def page_with(text: str, rows: list[dict[str, object]]) -> str:
    """The page with its tables made anew from the rows."""
    before, _, rest = text.partition(BEGIN)
    _, _, after = rest.partition(END)
    return before + BEGIN + "\n" + table(rows) + "\n" + END + after


def read_rows() -> list[dict[str, object]]:
    return [json.loads(line) for line in ROWS.read_text().splitlines()] if ROWS.exists() else []


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=list(METHODS), metavar="NAME")
    parser.add_argument("--nets", nargs="+", choices=NETS, default=list(NETS), metavar="NAME")
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--quick", action="store_true", help="tiny sizes, which show that it runs and nothing else")
    parser.add_argument("--write", action="store_true", help="keep the rows and write the page")
    args = parser.parse_args()
    if args.quick and args.write:
        parser.error("got --quick with --write; expected measurements worth keeping")
    torch.manual_seed(SEED)
    torch.set_num_threads(1)
    names = list(dict.fromkeys(["deterministic", *args.methods]))
    rows = [row for net_name in args.nets for row in times(net_name, names, args.repeats, args.quick)]
    rows = memory(rows, args.quick)
    print(table(rows))
    if args.write:
        measured = {(row["net"], row["method"]) for row in rows}
        rows += [row for row in read_rows() if (row["net"], row["method"]) not in measured]
        ROWS.write_text("".join(json.dumps(row) + "\n" for row in rows))
        PAGE.write_text(page_with(PAGE.read_text(encoding="utf-8"), rows), encoding="utf-8")


if __name__ == "__main__":
    main()
