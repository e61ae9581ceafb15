"""Golden outputs: what the current code computes is what was stored before the redesign.

Draws, seeds, labels and counts agree bit for bit; other numbers to 1e-5 of the scale of their array, since processors
round differently, and to 1e-3 after training with convolutions and BatchNorm. The samples of Laplace approximations
were stored anew when they became independent of the eigenvectors that a processor finds for equal eigenvalues; their
moments were not. `entries.py` holds every call into the library.
"""

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE))

import entries  # noqa: E402

TOLERANCE, CONVOLUTION_TOLERANCE = 1e-5, 1e-3
EXACT = ("plain", "strata", "hashed", "keys", "stable_hash", "seed", "uniforms")  # of the draws
TEXT = ("command", "model", "out", "data", "pool", "source", "page")  # paths and what depends on them

GOLDEN: dict[str, dict[str, Any]] = {group: dict(np.load(HERE / f"{group}.npz")) for group in entries.GROUPS}
COMMANDS: dict[str, Any] = json.loads((HERE / "commands.json").read_text(encoding="utf-8"))
CASES = [pytest.param(group, name, id=f"{group}-{name}") for group, named in entries.GROUPS.items() for name in named]


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    with entries.one_thread():
        yield


def assert_same(stored: Any, found: Any, where: str, *, exact: bool = False, tolerance: float = TOLERANCE) -> None:
    stored, found = np.asarray(stored), np.asarray(found)
    assert stored.shape == found.shape, f"{where}: shape {found.shape}, expected {stored.shape}"
    if exact or stored.dtype.kind not in "fc":
        np.testing.assert_array_equal(found, stored, err_msg=where)
        return
    finite = np.abs(stored[np.isfinite(stored)])
    scale = float(finite.max()) if finite.size else 0.0
    np.testing.assert_allclose(found, stored, rtol=tolerance, atol=tolerance * scale, equal_nan=True, err_msg=where)


@pytest.mark.parametrize(("group", "name"), CASES)
def test_arrays(group: str, name: str) -> None:
    found = entries.GROUPS[group][name]()
    stored = {key.split("::")[1]: value for key, value in GOLDEN[group].items() if key.split("::")[0] == name}
    assert stored, f"{name} is not stored: run make.py"
    assert found.keys() == stored.keys()
    tolerance = CONVOLUTION_TOLERANCE if name.endswith(("| images", "| segmentation")) else TOLERANCE
    for key in stored:
        exact = group == "draws" and key in EXACT
        assert_same(stored[key], found[key], f"{name}, {key}", exact=exact, tolerance=tolerance)


def test_all_entries_are_stored_and_recomputed() -> None:
    for group, named in entries.GROUPS.items():
        assert {key.split("::")[0] for key in GOLDEN[group]} == set(named)
    assert COMMANDS.keys() == entries.COMMANDS.keys()


def test_a_saved_predictor_has_the_stored_tensors() -> None:
    stored = load_file(HERE / "predictor" / "model.safetensors")
    found = {key.removeprefix("state/"): value for key, value in entries.saved().items() if key.startswith("state/")}
    assert found.keys() == stored.keys()
    for name, value in stored.items():
        assert_same(value, found[name], name)


def test_another_seed_gives_other_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(entries, "SEED", 1)
    for group, name in (("methods", "neuboots | classification"), ("draws", "keys"), ("draws", "law dirichlet 1")):
        with pytest.raises(AssertionError):
            test_arrays(group, name)


def leaves(tree: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], float | bool]]:
    """Numbers of a JSON object, with the keys on the way; text is not compared."""
    if isinstance(tree, dict):
        for key, value in tree.items():
            if key not in TEXT:
                yield from leaves(value, (*path, key))
    elif isinstance(tree, list):
        for k, value in enumerate(tree):
            yield from leaves(value, (*path, str(k)))
    elif isinstance(tree, bool | int | float):
        yield path, tree


@pytest.mark.parametrize("name", COMMANDS)
def test_commands(name: str) -> None:
    found, stored = entries.COMMANDS[name](), COMMANDS[name]
    numbers, expected = dict(leaves(found["json"])), dict(leaves(stored["json"]))
    assert expected.keys() <= numbers.keys(), sorted(expected.keys() - numbers.keys())
    for path, value in expected.items():
        assert numbers[path] == pytest.approx(value, rel=TOLERANCE, abs=TOLERANCE), "/".join(path)
    for column, values in stored.get("columns", {}).items():
        if column == "why":  # prose
            continue
        same_column(values, found["columns"][column], f"{name}, {column}")


def same_column(stored: list[str], found: list[str], where: str) -> None:
    """Columns of a CSV file, as numbers if they are such."""
    try:
        numbers = [float(value) for value in stored]
    except ValueError:
        assert [Path(value).name for value in found] == [Path(value).name for value in stored], where
    else:
        if where.endswith("mutual_information"):  # a difference of two entropies of about 1 nat in single precision
            np.testing.assert_allclose([float(value) for value in found], numbers, atol=1e-6, err_msg=where)
            return
        assert_same(numbers, [float(value) for value in found], where)
