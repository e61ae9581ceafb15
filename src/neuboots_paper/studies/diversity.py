"""Table 3.3: diversity of the members of an ensemble or the replicates of a single net.

    ratio-error = different errors / same errors,   disagreement = P(ŷ_b ≠ ŷ_b′),   means over pairs b < b′

and the Q-statistic and the correlation of their errors, for five members or replicates each.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from neuboots.evaluation.diversity import evaluate_diversity
from neuboots.report.checks import Check
from neuboots.report.tables import Table
from neuboots_paper._common import (
    CLASS_COLUMNS,
    PAPER_SGD,
    class_scores,
    image_net,
    load_images,
    load_with_rows,
    make_method,
    neuboots_variants,
    reliability_plots,
)
from neuboots_paper.checks import compare_groups
from neuboots_paper.study import Job, Rows, RunContext, Study, load_published
from neuboots_paper.tables import MetricColumn, tabulate

if TYPE_CHECKING:
    from matplotlib.figure import Figure

MEASURES: dict[str, tuple[str, Literal["lower", "higher"]]] = {  # title, and direction of more diversity
    "ratio_error": ("ratio-error, %", "higher"),
    "q_statistic": ("Q-statistic, %", "lower"),
    "correlation": ("correlation, %", "lower"),
    "disagreement": ("disagreement, %", "higher"),
}
PUBLISHED = load_published("diversity")


@dataclass(frozen=True)
class DiversityStudy(Study):
    """Four measures of diversity of a deep ensemble, MC dropout and NeuBoots."""

    name = "diversity"
    source = "table 3.3"
    claim = (
        "The replicates of NeuBoots differ from each other more than those of MC dropout in every measure, and about "
        "as much as the members of a deep ensemble."
    )

    data: str = "cifar100"
    net: str = "densenet-10"
    shrink: int = 4  # images are averaged over shrink × shrink pixels
    augment: bool = False
    n: int = 4_000
    n_test: int = 2_000
    epochs: int = 14
    batch_size: int = 64
    num_samples: int = 5  # members of the ensemble, replicates of the others
    methods: tuple[str, ...] = ("deep-ensemble", "mc-dropout", "neuboots", "neuboots-paper")

    def jobs(self) -> list[Job]:
        return self.job_grid(method=self.methods)

    def measure(self, job: Job, context: RunContext) -> Rows:
        data = load_with_rows(context, self.data, self.n)
        train = load_images(data, "train", self.n, job["seed"], shrink=self.shrink, augment=self.augment)
        test = load_images(data, "test", self.n_test, shrink=self.shrink)
        config = context.config(epochs=self.epochs, batch_size=self.batch_size, optimizer=PAPER_SGD, seed=job["seed"])
        predictor = make_method(job["method"], members=self.num_samples).fit(image_net(self.net, data), train, config)
        found = evaluate_diversity(predictor, test, num_samples=self.num_samples, progress=False)
        return {"diversity": [found.metrics], **class_scores(predictor, test, num_samples=self.num_samples)}

    def tables(self, rows: Rows) -> list[Table]:
        seeds = f"mean ± standard deviation over {len(self.seeds)} seeds"
        measures = tuple(MetricColumn(key, title, 100, better=better) for key, (title, better) in MEASURES.items())
        return [
            tabulate(
                f"Diversity of {self.num_samples} replicates on {self.data}, {seeds}.",
                rows["diversity"],
                by=("method",),
                columns=(*measures, MetricColumn("pairwise_kl", "pairwise KL, nats", digits=3)),
                paper=PUBLISHED,
                note="Higher ratio-error and disagreement, lower Q-statistic and correlation mean more diversity.",
            ),
            tabulate(
                f"The same nets, {self.num_samples} replicates together, {seeds}.",
                rows["scores"],
                by=("method",),
                columns=CLASS_COLUMNS,
                link="reliability-{method}",
                note=(
                    "The paper's nets misclassify about a quarter of the images (table B.3). Members with more errors "
                    "also differ more: compare the four measures together with the errors."
                ),
            ),
        ]

    def checks(self, rows: Rows) -> list[Check]:
        names = neuboots_variants(self.methods).items()
        return [check for name, title in names for check in self._check_method(name, title, rows["diversity"])]

    def _check_method(self, name: str, title: str, rows: list[dict[str, Any]]) -> Iterator[Check]:
        """Check the diversity against MC dropout in each measure, and against the deep ensemble."""

        def against(other: str, key: str, more: Literal["lower", "higher"]) -> Check:
            claim = f"by {MEASURES[key][0].removesuffix(', %')}, {title} is more diverse than {other}"
            return compare_groups(claim, rows, key, {"method": name}, {"method": other}, expect=more, scale=100)

        measures = [(key, more) for key, (_, more) in MEASURES.items()]
        yield from (against("mc-dropout", key, more) for key, more in measures)
        ensemble = [against("deep-ensemble", key, more) for key, more in measures]
        behind, open_ = ([check.holds for check in ensemble].count(word) for word in (False, None))
        yield Check(  # in the paper each is ahead in two measures
            f"{title} is at least about as diverse as the deep ensemble: behind it in two of the four measures at most",
            False if behind > 2 else True if behind + open_ <= 2 else None,
            "; ".join(check.evidence for check in ensemble),
        )

    def plots(self, rows: Rows) -> "dict[str, Figure]":
        return reliability_plots(rows["bins"], ("method",))

    @property
    def note(self) -> str:
        size = f", images averaged over {self.shrink} × {self.shrink} pixels" if self.shrink > 1 else ""
        return (
            f"{self.net}, {self.epochs} epochs on {self.n:,} images of {self.data}{size}; the paper has DenseNet-100."
        )
