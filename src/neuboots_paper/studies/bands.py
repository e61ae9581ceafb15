"""Figures B.6–B.8: predictive bands of NeuBoots for single images of known and unknown classes.

    band of class c at x:  the central 95 % of p_b,c(x) = softmax(f_b(x))_c over the replicates b

P(out) is the probability of "out of distribution" by the paper's logistic detector. The study also measures over many
images whether bands are wider for unknown classes.
"""

import base64
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from neuboots.data import DatasetBundle
from neuboots.evaluation.ood import ReplicateDetector
from neuboots.prediction import Predictor
from neuboots.report.checks import Check
from neuboots.report.tables import Table
from neuboots_paper._common import PAPER_SGD, classifier, load_images, make_method, neuboots_variants, prepare_split
from neuboots_paper.checks import compare_groups
from neuboots_paper.study import Job, Rows, RunContext, Study, load_published
from neuboots_paper.tables import MetricColumn, tabulate

if TYPE_CHECKING:
    from matplotlib.figure import Figure

PUBLISHED = load_published("bands")
COLUMNS = (
    MetricColumn("top", "probability of the top class", digits=3),
    MetricColumn("width", "width of its band", digits=3),
    MetricColumn("overlap", "band overlaps another, %", 100, digits=1),
    MetricColumn("outside", "P(out)", digits=3),
)


@dataclass(frozen=True)
class Bands(Study):
    """Bands of every class for a few images, and their mean width over groups of images."""

    name = "bands"
    source = "figures B.6, B.7 and B.8"
    claim = (
        "For images of unknown classes the bands of NeuBoots are wide and overlap, and the detector assigns them to "
        "out-of-distribution (a bison, 0.77; a gazelle, 0.50), but not an image similar to a known class (a German "
        "shepherd, 0.20)."
    )

    inside: str = "cifar10"
    outside: str = "svhn"
    others: str = "cifar100"  # some of its classes are similar to known ones
    close: tuple[str, ...] = ("bus", "pickup_truck", "tiger", "wolf")
    known: tuple[str, ...] = ("dog", "ship")  # classes of `inside` with a shown image
    unknown: tuple[str, ...] = ("cattle", "camel", "wolf")  # of `others`, from least to most similar to a known class
    digits: tuple[str, ...] = ("7",)  # of `outside`
    net: str = "small-cnn"
    shrink: int = 2  # images are averaged over shrink × shrink pixels
    augment: bool = False
    n: int = 9_000
    n_group: int = 1_000  # maximum number of images of a group
    num_validation: int = 400  # images of each dataset to fit the detector
    epochs: int = 12
    batch_size: int = 128
    num_samples: int = 100
    level: float = 0.95
    methods: tuple[str, ...] = ("neuboots", "neuboots-paper")

    @property
    def dataset_names(self) -> Sequence[str]:
        return tuple(dict.fromkeys((self.inside, self.outside, self.others)))

    def jobs(self) -> list[Job]:
        return [{"part": "images"}, *self.job_grid(method=self.methods)]

    def measure(self, job: Job, context: RunContext) -> Rows:
        if "method" not in job:
            return {"images": [self._pixels(*which, context) for which in self._shown_images]}
        data = context.load_data(self.inside)
        train = load_images(data, "train", self.n, job["seed"], shrink=self.shrink, augment=self.augment)
        config = context.config(epochs=self.epochs, batch_size=self.batch_size, optimizer=PAPER_SGD, seed=job["seed"])
        predictor = make_method(job["method"]).fit(classifier(self.net, data), train, config)
        detector = ReplicateDetector(predictor, num_samples=self.num_samples).fit(
            *(self._x(context, name, "validation", self.num_validation) for name in (self.inside, self.outside)),
            progress=False,
        )
        rows: Rows = {"groups": [], "single": [], "bands": []}
        for group, set_name, x in self._groups(context):
            found = band_metrics(*predict_bands(predictor, x, self.num_samples, self.level))
            found["outside"] = detector.score(x, progress=False).sigmoid()
            means = {key: float(values.double().mean()) for key, values in found.items()}
            rows["groups"].append({"group": group, "set": set_name, "images": len(x), **means})
        for set_name, class_name in self._shown_images:
            image, x = f"{class_name} ({set_name})", self._one(set_name, class_name, context)
            parts = predict_bands(predictor, x, self.num_samples, self.level)
            figures = band_metrics(*parts) | {"outside": detector.score(x, progress=False).sigmoid()}
            rows["single"].append({"image": image, **{key: float(value) for key, value in figures.items()}})
            for label, mean, low, high in zip(data.classes, *(part[0].tolist() for part in parts), strict=True):
                values = {"mean": round(mean, 5), "low": round(low, 5), "high": round(high, 5)}
                rows["bands"].append({"image": image, "class": label, **values})
        return rows

    @property
    def _shown_images(self) -> list[tuple[str, str]]:
        """Datasets and classes whose first test image is shown."""
        pairs = ((self.inside, self.known), (self.others, self.unknown), (self.outside, self.digits))
        return [(set_name, class_name) for set_name, names in pairs for class_name in names]

    def _groups(self, context: RunContext) -> list[tuple[str, str, Tensor]]:
        """Groups of test images: known classes, similar classes, other classes, and another kind of image."""
        data, others = context.load_data(self.inside), context.load_data(self.others)
        x, y = load_images(others, "test", reference=data, shrink=self.shrink).tensors
        close = torch.isin(y, torch.tensor([others.classes.index(name) for name in self.close]))
        return [
            ("known", self.inside, self._x(context, self.inside, "test", self.n_group)),
            ("close", self.others, x[close][: self.n_group]),
            ("unknown", self.others, x[~close][: self.n_group]),
            ("far", self.outside, self._x(context, self.outside, "test", self.n_group)),
        ]

    def _x(self, context: RunContext, name: str, part: str, limit: int) -> Tensor:
        x: Tensor = load_images(
            context.load_data(name), part, limit, reference=context.load_data(self.inside), shrink=self.shrink
        ).tensors[0]
        return x

    def _one(self, set_name: str, class_name: str, context: RunContext) -> Tensor:
        """First test image of a class as an input of the net: (1, C, H, W)."""
        data = context.load_data(set_name)
        return prepare_split(data, "test", reference=context.load_data(self.inside), shrink=self.shrink)[
            _first_index(data, class_name)
        ][0][None]

    def _pixels(self, set_name: str, class_name: str, context: RunContext) -> dict[str, Any]:
        """The same image as bytes, at full resolution."""
        data = context.load_data(set_name)
        x: Tensor = data.test[_first_index(data, class_name)][0]  # type: ignore[index]
        raw = data.standardizer.inverse(x) if data.standardizer is not None else x  # type: ignore[attr-defined]
        coded = base64.b64encode(bytes((255 * raw.clamp(0, 1)).round().byte().flatten().tolist())).decode()
        return {"image": f"{class_name} ({set_name})", "shape": "×".join(map(str, x.shape)), "base64": coded}

    def tables(self, rows: Rows) -> list[Table]:
        seeds = f"mean ± standard deviation over {len(self.seeds)} seeds"
        order = list(self.methods)
        return [
            tabulate(
                f"Bands of {100 * self.level:g} % over groups of test images, {seeds}.",
                sorted(rows["groups"], key=lambda row: order.index(row["method"])),
                by=("method", "group", "set", "images"),
                columns=COLUMNS,
                link="bands-{method}",
            ),
            tabulate(
                f"Single images, the first of their class, {seeds}.",
                sorted(rows["single"], key=lambda row: order.index(row["method"])),
                by=("method", "image"),
                columns=COLUMNS,
                paper=PUBLISHED,
                link="bands-{method}",
                note=(
                    "The paper's values for cattle, camel and wolf are of its bison, gazelle and German shepherd. Of "
                    "the last it only gives prob = 0.1983, which is taken as P(out)."
                ),
            ),
        ]

    def checks(self, rows: Rows) -> list[Check]:
        names = neuboots_variants(self.methods).items()
        return [check for name, title in names for check in self._check_method(name, title, rows)]

    def _check_method(self, name: str, title: str, rows: Rows) -> Iterator[Check]:
        groups, single = ([row for row in rows[key] if row["method"] == name] for key in ("groups", "single"))
        known, close, unknown, far = ({"group": group} for group in ("known", "close", "unknown", "far"))
        strange = ((unknown, f"unknown classes of {self.others}"), (far, f"images of {self.outside}"))
        larger = partial(compare_groups, rows=groups, expect="higher", digits=3)
        for which, words in strange:
            claim = f"{title}: the band of the top class is wider on {words} than on known classes"
            yield larger(claim, key="width", first=which, second=known)
        for which, words in strange:
            claim = f"{title}: the band of the top class overlaps another more often on {words} than on known classes"
            yield larger(claim, key="overlap", first=which, second=known, scale=100, digits=1)
        for which, words in ((known, "known classes"), (close, "those close to a known one")):
            claim = f"{title}: P(out) is larger on unknown classes of {self.others} than on {words}"
            yield larger(claim, key="outside", first=unknown, second=which)
        first, last = ({"image": f"{shown} ({self.others})"} for shown in (self.unknown[0], self.unknown[-1]))
        claim = f"{title}: P(out) of the image of {self.unknown[0]} is larger than that of {self.unknown[-1]}"
        yield larger(claim, rows=single, key="outside", first=first, second=last)

    def plots(self, rows: Rows) -> "dict[str, Figure]":
        """The images and their bands with the first seed, one plot per method."""
        methods = dict.fromkeys(row["method"] for row in rows["bands"])
        return {f"bands-{method}": self._plot_method(rows, method) for method in methods}

    def _plot_method(self, rows: Rows, method: str) -> "Figure":
        from matplotlib.figure import Figure

        from neuboots_paper.plots import plot_class_intervals

        mine = {name: [row for row in rows[name] if row["method"] == method] for name in ("bands", "single")}
        seed = mine["bands"][0]["seed"]
        figure = Figure(figsize=(10.5, 2.5 * -(-len(rows["images"]) // 2) + 0.4), layout="constrained")
        axes = figure.subplots(-(-len(rows["images"]) // 2), 4, width_ratios=(1, 2.6) * 2, squeeze=False)
        places = axes.reshape(-1, 2)
        for (left, right), row in zip(places, rows["images"], strict=False):
            plot_stored_image(left, row)
            where = {"image": row["image"], "seed": seed}
            bars = [each for each in mine["bands"] if where.items() <= each.items()]
            (single,) = [each for each in mine["single"] if where.items() <= each.items()]
            columns = (torch.tensor([each[key] for each in bars]) for key in ("mean", "low", "high"))
            plot_class_intervals(right, [each["class"] for each in bars], *columns, name=method, level=self.level)
            right.tick_params(axis="x", labelrotation=60, labelsize=8)
            left.set_title(row["image"], fontsize=9)
            right.set_title(f"P(out) = {single['outside']:.2f}", fontsize=9)
        for left, right in places[len(rows["images"]) :]:
            left.axis("off")
            right.axis("off")
        figure.legend(*places[0][1].get_legend_handles_labels(), loc="outside lower center", ncols=2, fontsize=9)
        return figure

    @property
    def note(self) -> str:
        small = f", shrunk by {self.shrink}" if self.shrink > 1 else ""
        return (
            f"{self.net}, {self.epochs} epochs of at most {self.n:,} images of {self.inside}{small}. The paper shows "
            f"three images of TinyImageNet and no averages; here they are the first test images of classes of "
            f"{self.others}. The detector is fitted on {self.num_validation:,} images each of {self.inside} and "
            f"{self.outside}, not used for training."
        )


def predict_bands(predictor: Predictor, x: Tensor, num_samples: int, level: float) -> tuple[Tensor, Tensor, Tensor]:
    """Mean probability of each class, and the ends of its band: (N, C) each."""
    ends = torch.tensor([(1 - level) / 2, (1 + level) / 2])
    parts = []
    for some in torch.split(x, 256):
        probs = predictor.predict(some, num_samples).samples.softmax(2)  # (B, N, C)
        parts.append(torch.cat([probs.mean(0, keepdim=True), probs.quantile(ends.to(probs), 0)]))
    mean, low, high = torch.cat(parts, 1)
    return mean, low, high


def band_metrics(mean: Tensor, low: Tensor, high: Tensor) -> dict[str, Tensor]:
    """Probability of the most likely class, width of its band, and whether another band overlaps it: (N,) each.

    >>> found = band_metrics(torch.tensor([[0.7, 0.3]]), torch.tensor([[0.5, 0.1]]), torch.tensor([[0.9, 0.4]]))
    >>> found["width"], found["overlap"]
    (tensor([0.4000]), tensor([0.]))
    """
    top = mean.argmax(1, keepdim=True)
    lower, upper = low.gather(1, top), high.gather(1, top)
    rival = high.scatter(1, top, -1.0).amax(1, keepdim=True)  # of the other classes
    found = {"top": mean.gather(1, top), "width": upper - lower, "overlap": (rival > lower).to(mean)}
    return {key: values[:, 0] for key, values in found.items()}


def plot_stored_image(ax: Any, row: dict[str, Any]) -> None:
    """Plot an image from its row: bytes of channels, rows and columns."""
    shape = tuple(map(int, row["shape"].split("×")))
    pixels = torch.tensor(list(base64.b64decode(row["base64"]))).view(shape).movedim(0, -1)  # (H, W, C)
    ax.imshow(pixels.expand(-1, -1, 3).tolist(), interpolation="nearest")
    ax.set(xticks=[], yticks=[])


def _first_index(data: DatasetBundle, class_name: str) -> int:
    """Index of the first test image of a class."""
    targets: Tensor = data.test.targets  # type: ignore[union-attr]
    return int((targets == data.classes.index(class_name)).nonzero()[0])
