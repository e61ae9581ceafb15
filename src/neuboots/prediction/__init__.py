"""The waist of the library: B sampled outputs at x, and what they say.

    samples[b] = f_b(x),   p(y | x) ≈ 1/B Σ_b softmax f_b(x)

Every method ends in a `Predictor`; every task knows only that, its `Prediction` and its `Summary`.
Samples are (B, N, C, *): replicate first, then input, output, and pixels or voxels if there are any.
"""

from neuboots.prediction.figures import IntervalKind, Moments, Prediction, Summary
from neuboots.prediction.predictor import Method, Predictor, check_inputs
from neuboots.prediction.probabilities import bytes_of, class_probabilities, entropy_of
from neuboots.prediction.streams import Stream, gather, member_order, stream_members, stream_passes
from neuboots.prediction.sums import accumulate

__all__ = [
    "IntervalKind",
    "Method",
    "Moments",
    "Prediction",
    "Predictor",
    "Stream",
    "Summary",
    "accumulate",
    "bytes_of",
    "check_inputs",
    "class_probabilities",
    "entropy_of",
    "gather",
    "member_order",
    "stream_members",
    "stream_passes",
]
