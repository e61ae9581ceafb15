"""What an audit found, and what it means: a verdict with its numbers, by thresholds that are stated."""

import math
from dataclasses import dataclass
from typing import Any, Literal

from torch import Tensor

from neuboots.tasks.audit.spread import RIGHT_SIZE, Place, Ratio
from neuboots.tasks.common import table

Finding = Literal["faithful", "flat", "narrow", "wide", "misplaced", "centre", "shape", "unknown"]

# What counts as faithful, beside RIGHT_SIZE. A fault is found where a 95 % interval proves it; "faithful" needs
# intervals that are short enough to have found one.
OFF = 1.5  # the factor by which one output or a typical input may be off, and to which an interval may reach
RIGHT_PLACE = 0.5  # the least correlation; below, most of the differences between inputs are the predictor's own
AWAY = 2.0  # standard deviations between the centres: a band of mean ± 2 standard deviations misses the other centre
MANY = 0.05  # the share of places at which something may be amiss
_SHOWN = 10  # outputs in the printed table


@dataclass(frozen=True, eq=False)
class Audit:
    """What `compare` and `audit` found; `verdict` says it in a sentence, `print` shows all figures.

    Maps are (N, C, *), one value for each input, output and pixel, which is a place; other figures are over all places.
    """

    size: Ratio | None  # of generated to true standard deviation; None: the predictor has no spread anywhere
    sizes: tuple[Ratio | None, ...]  # the same for each output
    place: Place  # how they go together over inputs
    ks: float | None  # mean Kolmogorov–Smirnov distance, where there is spread
    ks_chance: float | None  # of replicates of one distribution
    wasserstein: float | None  # mean Wasserstein-1 distance of standardised replicates
    wasserstein_chance: float | None
    wasserstein_limit: float | None  # which replicates of one distribution hardly ever exceed
    shift: float  # median distance of the centres, in true standard deviations
    away: float  # share of places where it is more than AWAY
    away_limit: float  # which replicates of one distribution hardly ever exceed
    flat: float  # share of places where true replicates differ and generated ones do not
    far_out_true: tuple[int, ...]  # numbers of true replicates that make up most of the spread by themselves
    far_out: tuple[int, ...]  # and of generated ones
    std: Tensor  # maps
    true_std: Tensor
    ks_map: Tensor
    wasserstein_map: Tensor
    num_true: int  # K
    num_samples: int  # B, or the number of distinct generated replicates where that is smaller
    classes: bool
    seed: int

    @property
    def ratio(self) -> float:
        """Geometric mean of generated over true standard deviation; 1 is right, 0 no spread at all."""
        return 0.0 if self.size is None else self.size.value

    @property
    def correlation(self) -> float | None:
        """Over inputs, of log standard deviations, corrected for few replicates; None: see `place.reason`."""
        return self.place.correlation

    @property
    def faithful(self) -> bool:
        return self.finding == "faithful"

    @property
    def finding(self) -> Finding:
        """The first fault that the figures prove; "unknown" where they could not have, "faithful" where none is."""
        return self._faults[0][0] if self._faults else "unknown" if self._doubts else "faithful"

    @property
    def _faults(self) -> list[tuple[Finding, str]]:
        """All that is proven, with a sentence for each."""
        faults: list[tuple[Finding, str]] = []
        if self.flat > MANY:
            faults.append(("flat", self._no_spread))
        faults += self._wrong_sizes
        if self._misplaced:
            faults.append(("misplaced", f"not where it should be ({self._where})"))
        if self.away > max(MANY, self.away_limit):
            away = f"around another centre at {_percent(self.away)} of the {self._places}, more than {AWAY:g} standard"
            faults.append(("centre", f"{away} deviations away"))
        if self.wasserstein is not None and self.wasserstein_limit is not None:
            distance = f"Wasserstein distance {self.wasserstein:.2f}, by chance {self.wasserstein_chance:.2f}"
            if self.wasserstein > self.wasserstein_limit:
                faults.append(("shape", f"of another shape ({distance})"))
        return faults

    @property
    def _no_spread(self) -> str:
        if self.size is None:
            return f"no spread at all: {self.num_true} true replicates differ, the predictor's do not"
        without = [str(c) for c, ratio in enumerate(self.sizes) if ratio is None]
        which = f", nowhere in output {', '.join(without)}" if without else ""
        return f"no spread at {_percent(self.flat)} of the {self._places}{which}, where true replicates differ"

    @property
    def _wrong_sizes(self) -> list[tuple[Finding, str]]:
        """Over all outputs, or else in the worst of them; the larger fault first."""
        found: list[tuple[float, Finding, str]] = []
        kinds: tuple[Finding, Finding] = ("wide", "narrow")
        for kind in kinds:
            if self.size is not None and _wrong(self.size) == kind:
                found.append((abs(math.log(self.size.value)), kind, _too(kind, self.size)))
                continue
            bad = {c: ratio for c, ratio in enumerate(self.sizes) if ratio is not None and _wrong(ratio) == kind}
            if bad:
                worst = max(bad, key=lambda c: abs(math.log(bad[c].value)))
                more = f", the worst of {len(bad)} such outputs" if len(bad) > 1 else ""
                sentence = f"{_too(kind, bad[worst])} in output {worst}{more}"
                found.append((abs(math.log(bad[worst].value)), kind, sentence))
        return [(kind, sentence) for _, kind, sentence in sorted(found, reverse=True)]

    @property
    def _misplaced(self) -> bool:
        place = self.place
        follows = place.correlation is None or place.correlation + (place.error or 0.0) >= RIGHT_PLACE
        return place.spread_low > OFF or not follows

    @property
    def _doubts(self) -> list[str]:
        """What is neither proven wrong nor seen to be right."""
        place, doubts = self.place, []
        if not self._size_known:
            doubts.append("size")
        off = [
            c for c, ratio in enumerate(self.sizes) if ratio is not None and abs(math.log(ratio.value)) > math.log(OFF)
        ]
        if off and len(self.sizes) > 1:
            doubts.append(f"size of output {off[0]}")
        judged = place.spread_high <= OFF if place.correlation is None else place.correlation >= RIGHT_PLACE
        if not judged or place.spread > OFF:
            doubts.append("places")
        return doubts

    @property
    def _size_known(self) -> bool:
        """Right, and by an interval that is short enough to say so."""
        size = self.size
        return size is not None and 1 / RIGHT_SIZE <= size.value <= RIGHT_SIZE and size.high / size.value <= OFF

    @property
    def verdict(self) -> str:
        """One sentence with its numbers."""
        faults = [sentence for _, sentence in self._faults]
        if self.size is None:
            return faults[0]
        if faults:
            before = f"the right size on average ({_shown(self.size)}), but " if self._right_size else ""
            return before + "; and ".join(faults) + self._notes
        if self._doubts:
            return f"cannot tell ({_shown(self.size)}; {self._where}) {self._with}: {self._advice}{self._notes}"
        right = f"the right size ({_shown(self.size)}; {self._where})"
        if self.correlation is not None:
            right = f"the right size ({_shown(self.size)}) in the right places ({self._where})"
        return f"faithful: {right}, as far as one can tell {self._with}{self._notes}"

    @property
    def _right_size(self) -> bool:
        return self._size_known and self._faults[0][0] in ("misplaced", "centre", "shape")

    @property
    def _where(self) -> str:
        place = self.place
        parts = [] if place.correlation is None else [f"correlation {place.correlation:.2f}"]
        if place.spread_low > OFF or (place.correlation is None and 1 < place.spread_high < math.inf):
            parts.append(f"off by a factor {place.spread:.1f} at a typical input")
        return ", ".join([*parts, place.reason] if place.reason else parts)

    @property
    def _with(self) -> str:
        own = f" and {self.num_samples} of the predictor" if self.num_samples < 2 * self.num_true else ""
        return f"with {self.num_true} true replicates{own}"

    @property
    def _advice(self) -> str:
        """More of those replicates that the interval is long for."""
        assert self.size is not None, "otherwise a fault is found"
        if self.far_out_true or self.far_out:
            return "look at the training"
        if self.size.true_share >= 0.5:
            return f"train {max(20, 2 * self.num_true)} true replicates"
        return f"the predictor's own {self.num_samples} replicates are too few; give it more members or num_samples"

    @property
    def _notes(self) -> str:
        notes = [
            f"{who} {', '.join(map(str, numbers))} of seed {self.seed} lies far out and makes up most of the spread"
            for who, numbers in (("true replicate", self.far_out_true), ("the predictor's replicate", self.far_out))
            if numbers
        ]
        notes += [
            f"{what} at {_percent(share)} of the {self._places}"
            for what, share in (("no spread", self.flat), ("another centre", self.away))
            if 0.005 < share <= MANY
        ]
        return "".join(f"; {note}" for note in notes)

    @property
    def _places(self) -> str:
        return "inputs" if self.std.ndim == 2 and len(self.sizes) == 1 else "outputs at these inputs"

    def __str__(self) -> str:
        places = "inputs" if self.std.ndim == 2 else "inputs with pixels"
        what = "logits of classes, less their mean" if self.classes else "outputs"
        header = (
            f"{len(self.std):,} {places}, {what}; K = {self.num_true} true replicates, B = {self.num_samples} of the "
            f"predictor, seed {self.seed}"
        )
        low, high = (None, None) if self.size is None else (_finite(self.size.low), _finite(self.size.high))
        rows: list[dict[str, Any]] = [
            {"figure": "ratio of standard deviations", "value": self.ratio, "compare with": 1.0},
            {"figure": "  its interval, from", "value": low, "compare with": None},
            {"figure": "  to", "value": high, "compare with": None},
            {"figure": "  spread over inputs (factor)", "value": self.place.spread, "compare with": 1.0},
            {"figure": "correlation over inputs", "value": self.correlation, "compare with": 1.0},
            {"figure": "  not corrected", "value": self.place.raw, "compare with": None},
            {"figure": "  reliability of true spread", "value": self.place.reliability, "compare with": None},
            {"figure": "KS distance", "value": self.ks, "compare with": self.ks_chance},
            {"figure": "Wasserstein distance", "value": self.wasserstein, "compare with": self.wasserstein_chance},
            {"figure": "shift of the centre", "value": self.shift, "compare with": 0.0},
            {"figure": "  share of places far away", "value": self.away, "compare with": 0.0},
            {"figure": "share of places without spread", "value": self.flat, "compare with": 0.0},
        ]
        return f"{self.verdict}\n{header}\n{table(rows)}{self._by_output}"

    @property
    def _by_output(self) -> str:
        """The outputs whose ratios are farthest from 1."""
        if len(self.sizes) == 1:
            return ""
        far = [math.inf if ratio is None else abs(math.log(ratio.value)) for ratio in self.sizes]
        shown = sorted(sorted(range(len(far)), key=lambda c: -far[c])[:_SHOWN])
        rows = [
            {"output": str(c), "ratio": 0.0, "from": None, "to": None}
            if (ratio := self.sizes[c]) is None
            else {"output": str(c), "ratio": ratio.value, "from": _finite(ratio.low), "to": _finite(ratio.high)}
            for c in shown
        ]
        return f"\n\n{table(rows)}"


def _wrong(ratio: Ratio) -> Finding | None:
    """Not of the right size, and proven to be larger or smaller than true."""
    if ratio.value > RIGHT_SIZE and ratio.low > 1:
        return "wide"
    return "narrow" if ratio.value < 1 / RIGHT_SIZE and ratio.high < 1 else None


def _too(kind: Finding, ratio: Ratio) -> str:
    """Somewhat, where the interval reaches what is as good as right."""
    somewhat = "somewhat " if ratio.high > 1 / RIGHT_SIZE and ratio.low < RIGHT_SIZE else ""
    factor = max(ratio.value, 1 / ratio.value)
    return f"{somewhat}too {kind} by a factor {factor:.{1 if factor < 10 else 0}f} ({_shown(ratio)})"


def _shown(ratio: Ratio) -> str:
    if ratio.high / ratio.value > 10:
        return f"ratio {_number(ratio.value)}, give or take more than a factor 10"
    return f"ratio {_number(ratio.value)}, between {_number(ratio.low)} and {_number(ratio.high)}"


def _number(value: float) -> str:
    return f"{value:.2f}" if value >= 0.1 else f"{value:.1g}"


def _percent(share: float) -> str:
    return f"{100 * share:.0f} %"


def _finite(value: float | None) -> float | None:
    return value if value is not None and 0 < value < math.inf else None
