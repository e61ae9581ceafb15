"""One method fitted again and again, with other seeds or on other rows: what is checked first, and what is kept.

mean ± t s / √T,   Student's interval of the mean over T fits
"""

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from torch import Tensor

from neuboots.prediction import Method
from neuboots.tasks.units import read_json, write_json
from neuboots.training import Recipe


def check_fits(method: Method, recipe: Recipe, test: Any, *, task: str) -> None:
    """Whether the task can fit, and measure on the test rows, more than once, or a sentence."""
    if isinstance(method, type):
        raise ValueError(f"got the class {method.__name__}; expected an object of it: {method.__name__}()")
    if not hasattr(method, "fit"):
        raise ValueError(f"got method of type {type(method).__name__}; expected a method such as NeuBoots()")
    if not isinstance(recipe, Recipe):
        raise ValueError(f"got recipe of type {type(recipe).__name__}; expected a Recipe, such as Recipe(epochs=30)")
    if recipe.folder is not None:
        raise ValueError(f"got a recipe with a folder, which all fits would share; expected {task}(folder=…)")
    if isinstance(test, Iterator):
        raise ValueError(
            f"got test rows of type {type(test).__name__}, which can be read once; expected a data set or a loader, "
            "since every fit is measured on them"
        )


def kept(file: Path | None, fit: Callable[[Path | None], dict[str, Any]]) -> dict[str, Any]:
    """What fit(folder) gives, as JSON in a file, or what an earlier call has left there.

    The folder is for the checkpoints of the fit under way; it stands beside the file, and goes when that is written.
    """
    if file is None:
        return fit(None)
    checkpoints = file.with_suffix("")
    result: dict[str, Any] | None = read_json(file)
    if result is None:
        result = fit(checkpoints)
        write_json(file, result)
    shutil.rmtree(checkpoints, ignore_errors=True)
    return result


def student_interval(values: Tensor, *, level: float = 0.95) -> tuple[Tensor, Tensor]:
    """mean ± t s / √T over the first axis: (*,) each.

    >>> import torch
    >>> low, high = student_interval(torch.tensor([0.4, 0.5, 0.6]))
    >>> round(float(low), 3), round(float(high), 3)
    (0.252, 0.748)
    """
    count = len(values)
    if count < 2:
        raise ValueError(f"got {count} value, which has no spread; expected at least 2")
    if not 0.0 < level < 1.0:
        raise ValueError(f"got level={level}; expected a number between 0 and 1, such as 0.95")
    from scipy.stats import t

    half = float(t.ppf((1 + level) / 2, count - 1)) * values.std(0) / count**0.5
    return values.mean(0) - half, values.mean(0) + half
