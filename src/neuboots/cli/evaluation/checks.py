"""Checks of a model on labelled rows: each holds, does not, or cannot be told from so few rows.

    worse than before:   e − e₀ − √((e − l)² + (u₀ − e₀)²) > 0,   [l, u] and [l₀, u₀] Wilson's intervals of e and e₀

A fault is what is larger than chance allows, and what anyone would mind (the margins below).

Newcombe, Interval estimation for the difference between independent proportions, Statistics in Medicine 1998.
"""

import math
from collections.abc import Sequence
from typing import Any

from neuboots.report.checks import Check, wilson_interval
from neuboots.report.tables import MISSING

Z = 1.96
UNUSUAL_BELOW = 0.99  # of the held-out rows are no further out than an unusual row
FAR = 0.02  # more than that of new rows: they are others
GAP = 0.03  # between how sure it is and how often it is right, or between coverage and level


def worst_first(checks: Sequence[Check]) -> list[Check]:
    """Those that fail, those that are open, those that hold."""
    return sorted(checks, key=lambda check: (False, None, True).index(check.holds))


def no_worse_error(error: float, count: int, before: Any, rows_before: int) -> Check | None:
    """Against the error on the test rows of the training; None where that is not known.

    >>> str(no_worse_error(0.3, 100, 0.1, 100))
    'does NOT hold: no more errors than on the test rows at training time (30.0 % against 10.0 %)'
    """
    if not isinstance(before, float | int) or rows_before < 1:
        return None
    low, high = difference((error, count), (before, rows_before))
    holds = False if low > 0 else True if high < 0.05 else None
    found = f"{percent(error)} against {percent(before)}"
    return Check("no more errors than on the test rows at training time", holds, found)


def no_worse_squares(mean: float, std: float, count: int, before: Any, rows_before: int) -> Check | None:
    """The same of squared errors, of this mean and std; `before` is the RMSE then, whose squares spread alike.

    Squares of normal errors have a std of √2 times their mean; of few rows less than that may be seen by chance.

    >>> str(no_worse_squares(9.0, 13.0, 100, 1.0, 100))
    'does NOT hold: errors no larger than on the test rows at training time (RMSE 3 against 1)'
    >>> no_worse_squares(9.0, 0.0, 1, 1.0, 100).holds
    """
    if not isinstance(before, float | int) or rows_before < 1 or not before > 0:
        return None
    then, spread = before**2, max(math.sqrt(2), std / mean if mean > 0 else 0.0)
    half = Z * spread * math.hypot(mean / math.sqrt(count), then / math.sqrt(rows_before))
    holds = False if mean - then > half else True if mean - then + half < then else None
    found = f"RMSE {short(math.sqrt(mean))} against {short(before)}"
    return Check("errors no larger than on the test rows at training time", holds, found)


def difference(one: tuple[float, int], other: tuple[float, int]) -> tuple[float, float]:
    """Newcombe's 95 % interval of the difference of two shares, each with its count.

    >>> [round(end, 3) for end in difference((0.3, 100), (0.1, 100))]
    [0.09, 0.306]
    """
    (a, low_a, high_a), (b, low_b, high_b) = ((share, *wilson_interval(share, count)) for share, count in (one, other))
    return a - b - math.hypot(a - low_a, high_b - b), a - b + math.hypot(high_a - a, b - low_b)


def usual_rows(unusual: int, count: int, held_out: int) -> Check:
    """Are there no more unusual rows than by chance? The limit is one that 1 % of the held-out rows were beyond.

    Beyond the r-th largest of m rows a new one lies with a probability that has the law Beta(r, m − r + 1): with few
    held-out rows, the limit is the largest, and many new rows may lie beyond it without being others.

    >>> usual_rows(30, 100, 1000).holds, usual_rows(10, 1000, 1000).holds, usual_rows(0, 3, 1000).holds
    (False, True, None)
    >>> usual_rows(20, 100, 9).holds
    """
    from scipy.stats import beta

    held_out = max(1, held_out)
    beyond = held_out - math.ceil(UNUSUAL_BELOW * (held_out - 1))  # as numpy's quantile counts, rounded up
    most = float(beta.ppf(0.975, beyond, held_out - beyond + 1))
    low, high = wilson_interval(unusual / count, count)
    holds = False if low > max(FAR, most) else True if high < FAR + GAP else None
    found = f"{percent(unusual / count)} are unusual, where {percent(beyond / (held_out + 1))} were to be expected"
    return Check("the rows are like those it was trained on", holds, found)


def better_than_constant(name: str, low: float, high: float, found: str, constant: float) -> Check:
    """Does an error in [low, high] lie below that of a constant guess?"""
    holds = True if high < constant else False if low > constant else None
    return Check(f"better than a constant guess ({name})", holds, found)


def right_as_often_as_it_says(confidence: float, accuracy: float, count: int) -> Check:
    """
    >>> right_as_often_as_it_says(0.99, 0.7, 500).holds, right_as_often_as_it_says(0.9, 0.9, 5000).holds
    (False, True)
    """
    low, high = wilson_interval(accuracy, count)
    within = confidence - GAP <= low and high <= confidence + GAP
    beyond = high < confidence - GAP or low > confidence + GAP
    found = f"in the mean it says {percent(confidence)}, and is right in {percent(accuracy)}"
    return Check("it is right as often as it says", True if within else False if beyond else None, found)


def covers(coverage: float, level: float, count: int) -> Check:
    """Do intervals hold the truth at least as often as they say?

    >>> covers(0.8, 0.95, 500).holds, covers(0.95, 0.95, 5000).holds, covers(1.0, 0.95, 5).holds
    (False, True, None)
    """
    low, high = wilson_interval(coverage, count)
    margin = min(GAP, 0.6 * (1 - level))  # 3 points at 95 %, and 0.6 at 99 %
    holds = False if high < level - margin else True if low > level - margin else None
    wide = "; they are wider than they need be" if low > level + margin else ""
    found = f"those of {100 * level:g} % hold {percent(coverage)}{between(low, high)}{wide}"
    return Check("the intervals hold the truth as often as they say", holds, found)


def finds_errors(auroc: float | None, wrong: int, right: int) -> Check:
    """Is a wrong answer less sure than a right one? By Mann and Whitney's test of an AUROC of ½.

    >>> finds_errors(0.9, 50, 500).holds, finds_errors(0.55, 5, 5).holds, finds_errors(None, 0, 10).found
    (True, None, 'it has no wrong answer to find')
    """
    claim = "it is less sure where it is wrong"
    if auroc is None:
        return Check(claim, None, f"it has no {'wrong' if right else 'right'} answer to find")
    half = Z * math.sqrt((wrong + right + 1) / (12 * wrong * right))
    holds = True if auroc > 0.5 + half else False if auroc < 0.5 - half else None
    return Check(claim, holds, f"AUROC {auroc:.3f} of the entropy, wrong answers against right ones; 0.5 is chance")


def abstains_well(answered: tuple[float, int], abstained: tuple[float, int]) -> Check:
    """Are there more errors among the rows it abstains from? Shares and counts.

    >>> abstains_well((0.02, 900), (0.4, 100)).holds, abstains_well((0.1, 10), (0.0, 0)).found
    (True, 'it answers every row')
    """
    claim = "what it answers is more often right than what it leaves open"
    (error, kept), (other, left) = answered, abstained
    if not kept:
        return Check(claim, False, "it answers no row")
    if not left:
        return Check(claim, None, "it answers every row")
    low, high = difference(abstained, answered)
    holds = True if low > 0 else False if high < 0 else None
    found = f"{percent(error)} wrong of {kept:,} answered, {percent(other)} of the {left:,} it abstains from"
    return Check(claim, holds, found)


def follows(correlation: float | None, count: int) -> Check:
    """Are errors larger where the standard deviation is, by Spearman's correlation of |error| and std?

    >>> follows(0.5, 100).holds, follows(0.0, 100).holds, follows(None, 1).holds
    (True, None, None)
    """
    claim = "errors are larger where it says so"
    if correlation is None:
        return Check(claim, None, "all its standard deviations are alike" if count > 2 else "of too few rows")
    half = Z / math.sqrt(max(1, count - 1))
    holds = True if correlation > half else False if correlation < -half else None
    return Check(claim, holds, f"rank correlation {correlation:.2f} of its standard deviation and the size of errors")


def percent(share: float, digits: int = 1) -> str:
    """
    >>> percent(0.0721), percent(1.0)
    ('7.2 %', '100.0 %')
    """
    return f"{100 * share:.{digits}f} %"


def between(low: float, high: float) -> str:
    """The interval of a share, to stand behind it.

    >>> between(0.911, 0.97)
    ' (91.1–97.0 %)'
    """
    return f" ({100 * low:.1f}–{100 * high:.1f} %)"


def short(value: float | None) -> str:
    """A number in the user's units, four digits of it.

    >>> short(1234.5678), short(None), short(math.inf)
    ('1235', '–', '∞')
    """
    if value is None or math.isnan(value):
        return MISSING
    return f"{value:.4g}".replace("inf", "∞")
