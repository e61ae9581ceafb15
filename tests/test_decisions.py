"""The tables of the decision on defaults are made from the committed rows, never typed."""

from benchmarks.defaults import PAGE, VARIANTS, page_with, read_rows
from neuboots import NeuBoots


def test_the_page_shows_the_committed_rows() -> None:
    text = PAGE.read_text(encoding="utf-8")
    assert page_with(text, read_rows()) == text


def test_the_rows_are_enough_to_decide() -> None:
    """At least two sets and three seeds for the plain net, the paper's preset and the default."""
    default = next(name for name, method in VARIANTS.items() if method == NeuBoots())
    for variant in ("plain", "paper: identity, c = 1, epoch", default):
        seeds: dict[object, set[object]] = {}
        for row in read_rows():
            if row["variant"] == variant:
                seeds.setdefault(row["set"], set()).add(row["seed"])
        assert sum(len(found) >= 3 for found in seeds.values()) >= 2
