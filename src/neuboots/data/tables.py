"""Tables: rows of numbers and categories, and a class or a number to predict.

    x̂ = (x − mean) / std,   ŷ = (y − mean) / std for numbers,   by the training rows alone

scikit-learn's own sets, the UCI regression sets with their 20 standard splits (Hernández-Lobato and Adams,
Probabilistic backpropagation for scalable learning of Bayesian neural networks, ICML 2015; Gal and Ghahramani, Dropout
as a Bayesian approximation, ICML 2016), and the user's CSV or Parquet file. Parts are TensorDatasets, or streams.
"""

import difflib
import json
import math
from collections.abc import Iterator, Sequence
from functools import partial
from numbers import Real
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import TensorDataset

from neuboots.data.learning import deal, learned, standard, target_of
from neuboots.data.parts import Stream
from neuboots.data.schema import Kind, Schema, kind_of, listed
from neuboots.data.sets import DataSet, Normalisation
from neuboots.data.sources import VARIABLE, Corrupt, corrupt, missing, need, root_of
from neuboots.data.table_files import TableFile, columns_of
from neuboots.keys import whole

UCI = ("boston", "concrete", "energy", "power", "wine_red", "yacht")

# -- scikit-learn's ------------------------------------------------------------------------------------


def diabetes(root: Path | None, *, validation: float, seed: int, streaming: bool) -> DataSet:
    """442 patients, 10 measurements, the progress of the disease a year later; a fifth is for the test.

    >>> data = diabetes(None, validation=0.1, seed=0, streaming=False)
    >>> data
    DataSet('diabetes', regression, numbers, 10 channels; train 319, validation 35, test 88)
    >>> x, y = data.test[0]
    >>> x.shape, bool(25 <= data.target.inverse(y) <= 346)
    (torch.Size([10]), True)
    """
    return _shipped("diabetes", validation=validation, seed=seed, streaming=streaming, scaled=False)


def breast_cancer(root: Path | None, *, validation: float, seed: int, streaming: bool) -> DataSet:
    """569 tumours, 30 measurements, malignant or benign; a fifth is for the test."""
    return _shipped("breast_cancer", validation=validation, seed=seed, streaming=streaming)


def wine(root: Path | None, *, validation: float, seed: int, streaming: bool) -> DataSet:
    """178 wines, 13 measurements, three growers; a fifth is for the test."""
    return _shipped("wine", validation=validation, seed=seed, streaming=streaming)


def _shipped(name: str, *, validation: float, seed: int, streaming: bool, **options: bool) -> DataSet:
    bunch = getattr(need("sklearn.datasets"), f"load_{name}")(**options)
    x, y = torch.from_numpy(bunch.data), torch.from_numpy(bunch.target)
    classes = tuple(str(label) for label in bunch.get("target_names", ()))
    part = deal(len(x), _share("validation", validation), 0.2, seed=seed, strata=y if classes else None)
    return _numeric(name, x, y, part, classes, streaming)


# -- UCI -----------------------------------------------------------------------------------------------


def uci(
    name: str, root: str | Path | None, *, split: int = 0, validation: float, seed: int, streaming: bool
) -> DataSet:
    """A UCI regression set with one of its 20 standard test splits, from root/uci/<name>.csv (target y) and
    root/uci/<name>.test_splits.json: {"0": [rows of the test part], …}.

    The rows for validation are a share of those that are not for the test.
    """
    x, y, test = uci_rows(name, root, split=split)
    part = deal(len(x), _share("validation", validation), test, seed=seed)
    return _numeric(name, x, y, part, (), streaming)


def uci_rows(name: str, root: str | Path | None, *, split: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    """x (n, C) and y (n, 1) of a UCI set as its file has them, and the numbers of the rows for the test."""
    if name not in UCI:
        raise ValueError(f"got the UCI set {name!r}; expected one of {', '.join(UCI)}")
    folder = root_of(root)
    file, splits = (Path(folder or "<data root>", "uci", f"{name}.{end}") for end in ("csv", "test_splits.json"))
    if not (file.is_file() and splits.is_file()):
        none = [] if folder else [f"no data root, since neither root=… nor the variable {VARIABLE} was given"]
        how = (
            f"put {file.name}, with the features and the target y, and {splits.name}, with the numbers of the test "
            f"rows of each split from 0 on, into the folder uci of a data root, and give it as root=… or in {VARIABLE}"
        )
        raise missing(name, none or [path for path in (file, splits) if not path.is_file()], how)
    frame = need("pandas").concat(list(TableFile.open(file).frames()))
    if "y" not in frame or len(frame.columns) < 2:
        raise corrupt(file, f"its columns are {listed(list(frame))}, and not features and y")
    if any(dtype.kind not in "iuf" for dtype in frame.dtypes) or not np.isfinite(values := frame.to_numpy(float)).all():
        raise corrupt(file, "it holds something else than finite numbers")
    x, y = (torch.from_numpy(values[:, chosen]) for chosen in (frame.columns != "y", frame.columns == "y"))
    return x, y, _test_rows(splits, whole("split", split), len(frame))


def _test_rows(file: Path, split: int, n: int) -> Tensor:
    try:
        splits = json.loads(file.read_text(encoding="utf-8"))
        rows = {int(number): torch.tensor(rows) for number, rows in splits.items()}
    except (ValueError, TypeError, AttributeError, RuntimeError):
        raise corrupt(file, 'it is not {"0": [row numbers], …} as JSON') from None
    if split not in rows:
        raise ValueError(f"got split={split}; expected one of 0 … {len(rows) - 1}, the splits in {file}")
    test = rows[split]
    good = test.ndim == 1 and not test.is_floating_point() and 0 < len({*test.tolist()}) == len(test) < n
    if not good or not 0 <= int(test.min()) <= int(test.max()) < n:
        raise corrupt(file, f"split {split} is no list of different rows among 0 … {n - 1}")
    return test


def _numeric(name: str, x: Tensor, y: Tensor, part: Tensor, classes: tuple[str, ...], streaming: bool) -> DataSet:
    """A set of x (n, C) and y, in double precision, standardised by the rows of part 0."""
    normalisation = standard(x[part == 0], [f"{name}, column {k}" for k in range(x.shape[1])])
    target = None if classes else standard(y.reshape(-1, 1)[part == 0], [f"{name}, target"])
    x, y = normalisation(x).float(), y.long() if target is None else target(y.reshape(-1, 1)).float()
    parts = [_in_memory(x[part == k], y[part == k], streaming) for k in range(3)]
    return _data_set(name, parts, part, classes, normalisation, target)


def _data_set(
    name: str,
    parts: Sequence[Any],
    part: Tensor,
    classes: tuple[str, ...],
    normalisation: Normalisation,
    target: Normalisation | None,
    schema: Schema | None = None,
) -> DataSet:
    train, validation, test = (data if bool((part == k).any()) else None for k, data in enumerate(parts))
    assert train is not None, "deal leaves rows to train with"
    return DataSet(
        name,
        "classification" if classes else "regression",
        train,
        validation,
        test,
        channels=len(normalisation.mean),
        classes=classes,
        normalisation=normalisation,
        target=None if classes else target,
        schema=schema,
    )


def _in_memory(x: Tensor, y: Tensor, streaming: bool) -> TensorDataset | Stream:
    return Stream(partial(zip, x, y)) if streaming else TensorDataset(x, y)


def _share(name: str, share: Any) -> float:
    number = math.nan if isinstance(share, bool) or not isinstance(share, Real) else float(share)
    if not 0 <= number < 1:
        raise ValueError(f"got {name}={share!r}; expected a share of the rows from 0 to below 1")
    return number


# -- the user's own ------------------------------------------------------------------------------------


def table(
    path: str | Path,
    *,
    target: str,
    task: Literal["classification", "regression"] | None = None,
    ignore: Sequence[str] = (),
    validation: float = 0.1,
    test: float = 0.1,
    seed: int = 0,
    max_categories: int = 256,
    leave_out_texts: bool = False,
    streaming: bool = False,
) -> DataSet:
    """The rows of a CSV or Parquet file, to predict the column `target` from all others but those to `ignore`.

    Numbers, booleans and dates (2024-02-29, with or without a time; as days) are standardised, texts become a column of
    0 and 1 for each category; see `neuboots.data.schema` for missing values and unknown categories. A column of more
    than `max_categories` texts is refused or, with `leave_out_texts`, left out. Of the target, texts, booleans and
    at most 20 different whole numbers, each at least five times on average, are taken for classes (two whole numbers
    always); other numbers for a regression; `task` overrides that. `test` is a share of the rows, `validation` one of
    the rest, the same of every class, and every class stays among the training rows.

    The set's `schema`, printed, says what was made of each column; its `encode(frame)` gives the inputs of new rows.
    With `streaming`, rows are read from the file at each pass, a chunk at a time and in its order: a file that is
    sorted should be shuffled before. What is held of a row is a byte, for its part.

    >>> import tempfile
    >>> file = Path(tempfile.mkdtemp(), "pets.csv")
    >>> lines = [f"{20 + i},{'short' if i % 2 else 'long'},{'dog' if i % 3 else 'cat'}" for i in range(30)]
    >>> _ = file.write_text("\\n".join(["weight,hair,kind", *lines]), encoding="utf-8")
    >>> data = table(file, target="kind")
    >>> data, data.classes
    (DataSet('pets', classification, 2 classes, 3 channels; train 24, validation 3, test 3), ('cat', 'dog'))
    >>> data.schema.features
    ('weight', 'hair=long', 'hair=short')
    """
    if task not in (None, "classification", "regression"):
        raise ValueError(f"got task={task!r}; expected 'classification', 'regression', or None to decide by the target")
    shares = _share("validation", validation), _share("test", test)
    most = whole("max_categories", max_categories, least=2)
    file = TableFile.open(path)
    kinds = _kinds(file, target, ignore)
    found = target_of(file, target, kinds.pop(target), task)
    part = deal(len(found.values), *shares, seed=seed, strata=found.values if found.classes else None)
    schema = learned(file, kinds, found, part == 0, most, leave_out_texts=leave_out_texts)
    if streaming:
        parts: list[Any] = [Stream(partial(_rows, file, schema, part, k)) for k in range(3)]
    else:
        parts = [TensorDataset(*tensors) for tensors in _encoded(file, schema, part)]
    scale = Normalisation((schema.target.mean,), (schema.target.std,), axes=0)
    return _data_set(file.path.stem, parts, part, found.classes, schema.normalisation, scale, schema)


def read_rows(path: str | Path, schema: Schema) -> Iterator[Tensor]:
    """The rows of a new file as inputs (N, C), chunk by chunk; it need not have the target."""
    for frame in TableFile.open(path).frames(schema.columns, texts=schema.texts):
        yield schema.encode(frame)


def _kinds(file: TableFile, target: str, ignore: Sequence[str]) -> dict[str, Kind | None]:
    """What each column holds that is used, target and all; None for one without a value."""
    if isinstance(ignore, str):
        raise ValueError(f"got ignore={ignore!r}; expected a list of names: give [{ignore!r}]")
    for name in (target, *ignore):
        if name not in file.names or not name:
            close = difflib.get_close_matches(str(name), file.names, n=len(file.names), cutoff=0.0)
            raise ValueError(
                f"got {name!r}, which is no column of {file.path}; expected one of {listed(close, 20)}: its first line "
                "must hold the names"
            )
    if target in ignore:
        raise ValueError(f"got {target!r} both to predict and to ignore; expected it once")
    kinds: dict[str, Kind | None] = {name: None for name in file.names if name and name not in ignore}
    if len(kinds) < 2:
        raise ValueError(f"got {file.path} with no column but the target {target!r}; expected some to learn from")
    for frame in file.frames(kinds):
        numeric = [name for name, dtype in zip(frame.columns, frame.dtypes, strict=True) if dtype.kind in "iuf"]
        values = columns_of(frame, numeric).to_numpy(dtype=np.float64, na_value=np.nan)
        empty = dict(zip(numeric, np.isnan(values).all(0).tolist(), strict=True))
        for name, known in kinds.items():
            kind: Kind | None = (None if empty[name] else "number") if name in empty else kind_of(frame[name])
            kinds[name] = known if kind is None else kind if known in (None, kind) else "text"
    return kinds


def _chunks(file: TableFile, schema: Schema, n: int) -> Iterator[tuple[slice, Tensor, Tensor]]:
    """Inputs and targets, and which rows they are."""
    start = 0
    for frame in file.frames((*schema.columns, schema.target.name), texts=schema.texts, checked=True):
        rows = slice(start, start := start + len(frame))
        if start > n:
            break
        yield rows, schema.encode(frame), schema.encode_target(frame)
    if start != n:
        raise Corrupt(f"{file.path} has no longer the {n:,} rows that it had; expected it not to change: load it again")


def _encoded(file: TableFile, schema: Schema, part: Tensor) -> list[tuple[Tensor, Tensor]]:
    """x and y of each part, filled chunk by chunk: nothing is held twice."""
    classes, sizes = schema.target.classes, [int((part == k).sum()) for k in range(3)]
    xs = [torch.empty(size, len(schema.features)) for size in sizes]
    ys = [torch.empty(size, dtype=torch.int64) if classes else torch.empty(size, 1) for size in sizes]
    filled = [0, 0, 0]
    for rows, x, y in _chunks(file, schema, len(part)):
        for k in range(3):
            chosen = part[rows] == k
            place = slice(filled[k], filled[k] + int(chosen.sum()))
            xs[k][place], ys[k][place], filled[k] = x[chosen], y[chosen], place.stop
    return list(zip(xs, ys, strict=True))


def _rows(file: TableFile, schema: Schema, part: Tensor, k: int) -> Iterator[tuple[Tensor, Tensor]]:
    """The rows of part k, one after the other."""
    for rows, x, y in _chunks(file, schema, len(part)):
        chosen = part[rows] == k
        yield from zip(x[chosen], y[chosen], strict=True)
