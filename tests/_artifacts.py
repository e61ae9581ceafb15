"""Saved artifacts with other content and a right manifest, as a stranger could write them."""

from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch

from torch import Tensor

from neuboots import serialization
from neuboots.serialization import CONFIG, parse_json, read_artifact, write_artifact

HEADER = ("format", "version", "kind")


def rewrite_artifact(folder: Path, change: Callable[[dict[str, Any], dict[str, Tensor]], object]) -> None:
    """Write the artifact again after a function has changed its config and tensors in place."""
    kind = parse_json((folder / CONFIG).read_bytes())["kind"]
    artifact = read_artifact(folder, kind=kind)
    config = {key: value for key, value in artifact.config.items() if key not in HEADER}
    change(config, artifact.tensors)
    with patch.object(serialization, "_find_not_finite", return_value=None, create=True):  # writes NaN, too
        write_artifact(folder, config, artifact.tensors, kind=kind)
