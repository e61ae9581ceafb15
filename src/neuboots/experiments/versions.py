"""The two forms of NeuBoots: the library's defaults, and the paper's Algorithm 1. What is claimed is asked of both."""

from collections.abc import Sequence

_TITLES = {"neuboots": "NeuBoots", "neuboots-paper": "NeuBoots by Algorithm 1"}


def versions(methods: Sequence[str]) -> dict[str, str]:
    """Those among the methods, with a title for sentences.

    >>> versions(("plain", "neuboots"))
    {'neuboots': 'NeuBoots'}
    """
    return {name: title for name, title in _TITLES.items() if name in methods}
