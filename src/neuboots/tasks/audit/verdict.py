"""What an audit found, and what it means: a verdict with its numbers, by thresholds that are stated."""

from dataclasses import dataclass
from typing import Any, Literal

from torch import Tensor

from neuboots.tasks.common import table

Finding = Literal["faithful", "flat", "narrow", "wide", "misplaced", "centre", "shape", "unknown"]

# What counts as faithful. An interval of 95 % must leave these bounds before a fault is found, and "faithful" also
# needs an interval that is short enough to have found one.
RIGHT_SIZE = 1.25  # a band that is wider or narrower by less is as good as right: 95 % becomes 88 % to 99 %
TOLD_APART = 2.0  # an interval of the ratio that is longer than this factor to either side tells nothing
RIGHT_PLACE = 0.5  # the least correlation; below, most of the differences between inputs are the predictor's own
OFF_PLACE = 2.0  # where true spread hardly differs between inputs: the factor by which it may typically be missed
AWAY = 2.0  # standard deviations between the centres: a band of mean ± 2 standard deviations misses the other centre
FEW = 8  # true replicates; halves of fewer than four do not tell where spread is large


@dataclass(frozen=True, eq=False)
class Audit:
    """What `compare` and `audit` found; `verdict` says it in a sentence, `print` shows all figures.

    Maps are (N, C, *), one value for each input, output and pixel; the other figures are over all of them.
    """

    ratio: float  # geometric mean of generated over true standard deviation; 1 is right
    ratio_low: float  # its 95 % interval
    ratio_high: float
    ratio_spread: float  # the factor by which the ratio at one input typically differs from their mean; 1 is none
    correlation: float | None  # over inputs, of log standard deviations, corrected; None: true spread hardly differs
    correlation_error: float | None  # half its 95 % interval
    raw_correlation: float | None  # not corrected for the few replicates
    reliability: float | None  # share of var log t that is more than sampling error
    ks: float  # mean Kolmogorov–Smirnov distance
    ks_chance: float  # of two samples of one Gaussian
    ks_limit: float  # which one in a hundred of such pairs exceeds
    wasserstein: float  # mean Wasserstein-1 distance, in true standard deviations
    wasserstein_chance: float
    shift: float  # median distance of the centres, in true standard deviations
    flat: float  # share of places where true replicates differ and generated ones do not
    std: Tensor  # maps
    true_std: Tensor
    ks_map: Tensor
    wasserstein_map: Tensor
    num_true: int  # K
    num_samples: int  # B, or the number of distinct generated replicates where that is smaller
    classes: bool
    seed: int

    @property
    def faithful(self) -> bool:
        return self.finding == "faithful"

    @property
    def finding(self) -> Finding:
        """The first fault that the figures prove; "unknown" where they could not have, "faithful" where none is."""
        if self.flat > 0.5:
            return "flat"
        if self.ratio_high < 1 / RIGHT_SIZE:
            return "narrow"
        if self.ratio_low > RIGHT_SIZE:
            return "wide"
        if self.num_true < FEW:
            return "unknown"
        if self._misplaced:
            return "misplaced"
        if self.ratio_high / self.ratio > TOLD_APART or self._place_unknown:
            return "unknown"
        if self.shift > AWAY:
            return "centre"
        return "shape" if self.ks > self.ks_limit else "faithful"

    @property
    def _misplaced(self) -> bool:
        if self.correlation is None or self.correlation_error is None:
            return self.ratio_spread > OFF_PLACE
        return self.correlation + self.correlation_error < RIGHT_PLACE

    @property
    def _place_unknown(self) -> bool:
        return self.correlation is not None and self.correlation < RIGHT_PLACE and not self._misplaced

    @property
    def verdict(self) -> str:
        """One sentence with its numbers."""
        if self.finding == "flat":
            return f"no spread at all: {self.num_true} true replicates differ, the predictor's do not"
        size = f"ratio {self.ratio:.2f}, between {self.ratio_low:.2f} and {self.ratio_high:.2f}"
        sentence = {
            "narrow": f"too narrow by a factor {1 / self.ratio:.1f} ({size}){self._and_misplaced}",
            "wide": f"too wide by a factor {self.ratio:.1f} ({size}){self._and_misplaced}",
            "misplaced": f"the right size on average ({size}), but not where it should be ({self._place})",
            "centre": f"the right spread ({size}; {self._place}), but around another centre, {self.shift:.1f} standard "
            "deviations away",
            "shape": f"the right size ({size}) in the right places ({self._place}), but of another shape (KS distance "
            f"{self.ks:.2f}, by chance {self.ks_chance:.2f})",
            "unknown": f"cannot tell with {self._replicates} ({size}; {self._place}): train "
            f"{max(20, 2 * self.num_true)} true replicates",
            "faithful": f"faithful: the right size ({size}) in the right places ({self._place}), as far as "
            f"{self.num_true} true replicates can tell",
        }[self.finding]
        return sentence + (f"; no spread at {100 * self.flat:.0f} % of the outputs" if self.flat > 0.005 else "")

    @property
    def _replicates(self) -> str:
        own = f" and {self.num_samples} of the predictor" if self.num_samples < self.num_true else ""
        return f"{self.num_true} true replicates{own}"

    @property
    def _place(self) -> str:
        if self.correlation is None:
            return "true spread hardly differs between these inputs"
        return f"correlation {self.correlation:.2f}"

    @property
    def _and_misplaced(self) -> str:
        return f", and not where it should be ({self._place})" if self.num_true >= FEW and self._misplaced else ""

    def __str__(self) -> str:
        places = "inputs" if self.std.ndim == 2 else "inputs with pixels"
        what = "logits of classes, less their mean" if self.classes else "outputs"
        header = (
            f"{len(self.std):,} {places}, {what}; K = {self.num_true} true replicates, B = {self.num_samples} of the "
            f"predictor, seed {self.seed}"
        )
        rows: list[dict[str, Any]] = [
            {"figure": "ratio of standard deviations", "value": self.ratio, "compare with": 1.0},
            {"figure": "  its interval, from", "value": self.ratio_low, "compare with": None},
            {"figure": "  to", "value": self.ratio_high, "compare with": None},
            {"figure": "  spread over inputs (factor)", "value": self.ratio_spread, "compare with": 1.0},
            {"figure": "correlation over inputs", "value": self.correlation, "compare with": 1.0},
            {"figure": "  not corrected", "value": self.raw_correlation, "compare with": None},
            {"figure": "  reliability of true spread", "value": self.reliability, "compare with": None},
            {"figure": "KS distance", "value": self.ks, "compare with": self.ks_chance},
            {"figure": "Wasserstein distance", "value": self.wasserstein, "compare with": self.wasserstein_chance},
            {"figure": "shift of the centre", "value": self.shift, "compare with": 0.0},
        ]
        return f"{self.verdict}\n{header}\n{table(rows)}"
