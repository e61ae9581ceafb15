"""The paper's numbers in the studies are those of its LaTeX, which is not shipped: NEUBOOTS_PAPER names the file."""

import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from neuboots_paper.studies import active, bands, calibration, cost, diversity, imbalance, ood, rotated_mnist

TEX = Path(os.environ.get("NEUBOOTS_PAPER", ""))
pytestmark = pytest.mark.skipif(not TEX.is_file(), reason="NEUBOOTS_PAPER does not name the LaTeX of the paper")


def table(label: str) -> list[list[str]]:
    """The lines of a table as cells without markup: numbers as they are printed, ± between spaces."""
    text = TEX.read_text()
    end = text.index(rf"\label{{{label}}}")
    body = text[text.rindex(r"\begin{table", 0, end) : end]
    lines = []
    for line in re.split(r"\\\\|\\tabularnewline", body.replace(r"\pm", "±")):
        plain = re.sub(r"\\(cite\{.*?\}|multirow\{\d+\}|[a-z]+|_)|[{}$*\s]", "", line)
        lines.append([cell.replace("±", " ± ") for cell in plain.split("&")])
    return lines


def lines_of(label: str, count: int) -> list[list[str]]:
    """The last so many cells of each line that ends in numbers."""
    number = re.compile(r"[\d.]+( ± [\d.]+)?")
    found = [line[-count:] for line in table(label)]
    return [line for line in found if len(line) == count and all(number.fullmatch(cell) for cell in line)]


def shown(figures: Mapping[str, Any]) -> list[str]:
    return [str(value) for value in figures.values()]


def test_calibration() -> None:
    printed = lines_of("table_classification", 6) + lines_of("tab:table_classification_appendix", 6)
    assert [shown(figures) for figures in calibration.PUBLISHED.values()] == printed


def test_out_of_distribution() -> None:
    assert [shown(figures) for figures in ood.PAPER.values()] == lines_of("table_OOD_cifar", 5)


def test_diversity() -> None:
    assert [shown(figures) for figures in diversity.PAPER.values()] == lines_of("tab:diversity", 4)


def test_rotated_digits() -> None:
    methods = ("standard-bootstrap", "amortized-bootstrap", "neuboots")
    ours = [[str(rotated_mnist.PAPER[B, name]["error"]) for B in (1, 5, 25)] for name in methods]
    assert ours == lines_of("tab:rotatedMNIST", 3)
    ends = [rotated_mnist.PAPER[B, "neuboots"]["ece"] for B in (1, 25)]
    assert "from {} to {} by increasing".format(*ends) in TEX.read_text()


def test_costs() -> None:
    assert [[*map(str, line)] for line in cost.ABSOLUTE.values()] == lines_of("tab:comp_cost_1", 3)
    assert [[*map(str, line)] for line in cost.MEGABYTES.values()] == lines_of("tab:comp_cost_2", 5)
    orders = [[cell.replace(" ", "") for cell in shown(figures)] for figures in cost.ORDERS.values()]
    assert orders == [line[-3:] for line in table("tab:comp_costs") if line[-1].startswith("O(")]
    text = TEX.read_text()
    for seconds in cost.MLP_SECONDS.values():
        assert f"NeuBoots takes {seconds['neuboots']} seconds" in text
        assert f"MIMO takes {seconds['mimo']} seconds" in text
    assert f"bootstrapping in {cost.MANY_SECONDS['neuboots']}s" in text
    assert f"MCDrop takes {cost.MANY_SECONDS['mc-dropout']}s" in text


def test_numbers_in_the_text() -> None:
    text = TEX.read_text()
    accuracy = active.PAPER["cifar100", "neuboots"]["accuracy"]
    assert rf"{accuracy}\% accuracy in CIFAR-100 and {active.GAP}\% gap" in text
    assert ", ".join(map(str, imbalance.COUNTS)) in text
    probabilities = [str(figures["outside"]) for figures in bands.PAPER.values()]
    assert re.findall(r"\\cmtt\{prob\}=([\d.]+)\.", text) == probabilities
