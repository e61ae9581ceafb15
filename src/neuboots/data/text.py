"""Texts as numbers of words: a vocabulary, and SST-2.

    x = (number of word 1, …, number of word T),   0 padding, 1 a word that is not known, 2 the most frequent word, …

Socher et al., Recursive deep models for semantic compositionality over a sentiment treebank, EMNLP 2013; with two
classes as in Wang et al., GLUE, ICLR 2019.
"""

import json
import re
import unicodedata
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import TensorDataset

from neuboots._validation import check_int
from neuboots.data._common import corrupt_file_error, identity
from neuboots.data.dataset import DatasetBundle, StreamingDataset
from neuboots.data.huggingface import ColumnSpec, DatasetLocation, build_splits, open_tables

PADDING, UNKNOWN = 0, 1

_WORDS = re.compile(r"\w+(?:'\w+)*|'\w+|[^\w\s]")


def tokenize(text: str) -> list[str]:
    """A text in lower case, cut into words, with what follows an apostrophe, and single signs.

    Letters with accents are the same however Unicode spells them (normal form C). Languages that put no space between
    words are not cut: give them cut.

    >>> tokenize("It isn't BAD -- it's 3x better!")
    ['it', "isn't", 'bad', '-', '-', "it's", '3x', 'better', '!']
    """
    if not isinstance(text, str):
        raise ValueError(f"got a text of type {type(text).__name__}; expected a string")
    return _WORDS.findall(unicodedata.normalize("NFC", text.lower()))


@dataclass(frozen=True)
class Vocabulary:
    """Words and their numbers, 2 … size − 1 by frequency; `length` is the T of a text that is encoded.

    >>> vocabulary = Vocabulary.of(["a good film", "a good plot , a bad film"], length=5)
    >>> vocabulary.size, vocabulary.words
    (5, ('a', 'film', 'good'))
    >>> x = vocabulary.encode("A GOOD cast")
    >>> x, vocabulary.decode(x)
    (tensor([2, 4, 1, 0, 0]), 'a good <unknown>')
    """

    words: tuple[str, ...]
    length: int = 64

    def __post_init__(self) -> None:
        check_int("length", self.length, minimum=1)
        if len({*self.words}) < len(self.words):
            raise ValueError("got a vocabulary with a word twice; expected each word once")

    @classmethod
    def of(cls, texts: Iterable[str], *, min_count: int = 2, length: int = 64) -> "Vocabulary":
        """The words that come at least `min_count` times in these texts."""
        if isinstance(texts, str):
            raise ValueError("got one string; expected several texts: give a list of them")
        least = check_int("min_count", min_count, minimum=1)
        counts = Counter(word for text in texts for word in tokenize(text))
        frequent = [(-count, word) for word, count in counts.items() if count >= least]
        return cls(tuple(word for _, word in sorted(frequent)), check_int("length", length, minimum=1))

    @property
    def size(self) -> int:
        """How many numbers there are, padding and unknown with them: what a net's embedding needs."""
        return 2 + len(self.words)

    @cached_property
    def _numbers(self) -> dict[str, int]:
        return {word: number for number, word in enumerate(self.words, 2)}

    def encode(self, text: str, length: int | None = None) -> Tensor:
        """The numbers of a text's words, cut or padded to `length`: (T,). A text without a word is one unknown word."""
        size = self.length if length is None else check_int("length", length, minimum=1)
        numbers = [self._numbers.get(word, UNKNOWN) for word in tokenize(text)[:size]] or [UNKNOWN]
        return torch.tensor(numbers + [PADDING] * (size - len(numbers)))

    def decode(self, ids: Tensor) -> str:
        """The words of (T,) numbers, with a space between them, without padding."""
        names = ("", "<unknown>", *self.words)
        if not isinstance(ids, Tensor):
            raise ValueError(f"got {type(ids).__name__}; expected a tensor of the numbers of words, (T,)")
        if ids.ndim != 1 or ids.is_floating_point() or bool(((ids < 0) | (ids >= self.size)).any()):
            raise ValueError(
                f"got numbers of shape {tuple(ids.shape)} and type {ids.dtype}; expected (T,) whole numbers from 0 to "
                f"{self.size - 1}"
            )
        return " ".join(names[number] for number in ids.tolist() if number != PADDING)

    def to_json(self) -> str:
        return json.dumps(asdict(self), ensure_ascii=False)

    @classmethod
    def from_json(cls, text: str) -> "Vocabulary":
        try:
            read = json.loads(text)
            return cls(tuple(read["words"]), read["length"])
        except (ValueError, KeyError, TypeError) as fault:
            raise ValueError(
                f"got a text that is no vocabulary ({type(fault).__name__}: {fault}); expected what to_json gave"
            ) from None


# -- SST-2 ---------------------------------------------------------------------------------------------

SST2_LOCATION = DatasetLocation("sst2", hub="stanfordnlp/sst2")


def load_sst2(root: Path | None, *, val_fraction: float, seed: int, streaming: bool) -> DatasetBundle:
    """Sentences of film reviews, negative or positive; the vocabulary is that of the training part.

    On the hub the labels of the test rows are not public: there the validation rows are the test part, and a share of
    the training rows is for validation. Parts are TensorDatasets of numbers of words, (n, 64), or streams.
    """
    tables = dict(open_tables(SST2_LOCATION, root, [("sentence", "text"), ("label",)], streaming=streaming))
    if "test" in tables and _first_label(tables["test"]) == -1:
        del tables["test"]

    def parts(decode: Callable[[Any, str], Tensor]) -> dict[str, Any]:
        columns = ColumnSpec("sentence", "label", decode, _label, numbers=True)
        return build_splits(
            "sst2", tables, columns, identity, val_fraction=val_fraction, seed=seed, streaming=streaming
        )

    vocabulary = Vocabulary.of(_sentences(parts(_only_checked)["train"]))
    found = parts(_Encode(vocabulary))
    if not streaming:
        found = {name: None if part is None else _in_memory(part) for name, part in found.items()}
    classes = ("negative", "positive")
    return DatasetBundle(
        "sst2", "classification", **found, channels=vocabulary.size, classes=classes, vocabulary=vocabulary
    )


@dataclass(frozen=True)
class _Encode:
    vocabulary: Vocabulary

    def __call__(self, sentence: Any, where: str) -> Tensor:
        _only_checked(sentence, where)
        return self.vocabulary.encode(sentence)


def _only_checked(sentence: Any, where: str) -> Tensor:
    if not isinstance(sentence, str):
        raise corrupt_file_error(where, f"it holds {type(sentence).__name__} and no sentence")
    return torch.zeros(0)


def _label(value: Any, where: str) -> Tensor:
    if value not in (0, 1):
        raise corrupt_file_error(where, f"its label is {value!r}, and neither 0 nor 1")
    return torch.tensor(int(value))


def _first_label(table: Any) -> Any:
    return next(iter(table.iter(batch_size=1))).column("label").to_pylist()[0]


def _sentences(train: Any) -> Iterator[str]:
    """Of the training part, one after the other, as they are written."""
    source: Any = train.read if isinstance(train, StreamingDataset) else train.source
    if isinstance(train, StreamingDataset):
        numbered: Iterable[tuple[int, Any]] = ((number, sentence) for number, sentence, _ in source())
    else:
        all_of_them = source.table[:].column("sentence").to_pylist()
        numbered = ((row, all_of_them[row]) for row in train.rows or range(len(train)))
    for number, sentence in numbered:
        _only_checked(sentence, f"{source.where}, row {number}")
        yield sentence


def _in_memory(part: Any) -> TensorDataset:
    x, y = zip(*part.__getitems__(range(len(part))), strict=True)
    return TensorDataset(torch.stack(x), torch.stack(y))
