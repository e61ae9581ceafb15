"""Text classification data: a word vocabulary and SST-2.

    x = (id of word 1, …, id of word T),   0 padding, 1 an unknown word, 2 the most frequent word, …

Socher et al., Recursive deep models for semantic compositionality over a sentiment treebank, EMNLP 2013; with two
classes as in Wang et al., GLUE, ICLR 2019.
"""

import re
import unicodedata
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import TensorDataset

from neuboots._validation import ArgumentError, check_int
from neuboots.data._common import CorruptFileError, identity
from neuboots.data.dataset import DatasetBundle, LoadOptions
from neuboots.data.huggingface import DatasetLocation, RowDecoder, RowId, build_splits, open_tables

PADDING, UNKNOWN = 0, 1
SST2_LOCATION = DatasetLocation("sst2", hub="stanfordnlp/sst2")

_TOKENS = re.compile(r"\w+(?:'\w+)*|'\w+|[^\w\s]")


def tokenize(text: str) -> list[str]:
    """Split a text into lower-case words and punctuation marks, after Unicode normalization (NFC).

    Args:
        text: The text. Languages without spaces between words must be segmented before.

    Returns:
        Its tokens.

    Raises:
        ArgumentError: If it is not a string.

    Example:
        >>> tokenize("It isn't BAD -- it's 3x better!")
        ['it', "isn't", 'bad', '-', '-', "it's", '3x', 'better', '!']
    """
    if not isinstance(text, str):
        raise ArgumentError("text", text, "a string")
    return _TOKENS.findall(unicodedata.normalize("NFC", text.lower()))


@dataclass(frozen=True)
class Vocabulary:
    """Words and their ids 2 … size − 1, by frequency.

    Attributes:
        words: The words.
        length: Number of tokens T of an encoded text.

    Example:
        >>> vocabulary = Vocabulary.from_texts(["a good film", "a good plot , a bad film"], length=5)
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
            raise ArgumentError("words", self.words, "each word once")

    @classmethod
    def from_texts(cls, texts: Iterable[str], *, min_count: int = 2, length: int = 64) -> "Vocabulary":
        """Build the vocabulary of texts.

        Args:
            texts: The texts.
            min_count: Minimum number of occurrences of a word.
            length: Number of tokens of an encoded text.

        Returns:
            The vocabulary.

        Raises:
            ArgumentError: If `texts` is a single string.
        """
        if isinstance(texts, str):
            raise ArgumentError("texts", texts, "a list of texts")
        check_int("min_count", min_count, minimum=1)
        counts = Counter(word for text in texts for word in tokenize(text))
        frequent = [(-count, word) for word, count in counts.items() if count >= min_count]
        return cls(tuple(word for _, word in sorted(frequent)), check_int("length", length, minimum=1))

    @property
    def size(self) -> int:
        """Number of ids, with padding and unknown: the size of an embedding."""
        return 2 + len(self.words)

    @cached_property
    def _ids(self) -> dict[str, int]:
        return {word: number for number, word in enumerate(self.words, 2)}

    def encode(self, text: str, length: int | None = None) -> Tensor:
        """Encode a text.

        Args:
            text: The text; one without a token is one unknown word.
            length: Number of tokens to truncate or pad to; None for that of the vocabulary.

        Returns:
            Token ids (T,).
        """
        size = self.length if length is None else check_int("length", length, minimum=1)
        ids = [self._ids.get(word, UNKNOWN) for word in tokenize(text)[:size]] or [UNKNOWN]
        return torch.tensor(ids + [PADDING] * (size - len(ids)))

    def decode(self, ids: Tensor) -> str:
        """Decode token ids.

        Args:
            ids: Token ids (T,).

        Returns:
            The words without padding, joined by spaces.

        Raises:
            ArgumentError: If they are not a vector of ids of this vocabulary.
        """
        words = ("", "<unknown>", *self.words)
        if ids.ndim != 1 or ids.is_floating_point() or bool(((ids < 0) | (ids >= self.size)).any()):
            raise ArgumentError("ids", ids, f"integers (T,) from 0 to {self.size - 1}")
        return " ".join(words[number] for number in ids.tolist() if number != PADDING)


def load_sst2(root: Path | None, options: LoadOptions) -> DatasetBundle:
    """Load SST-2, sentences of film reviews with two classes; the vocabulary is that of the training split.

    The hub has no labels of its test rows: there the validation rows are the test split.

    Args:
        root: Data root; None for the hub.
        options: Options of the splits.

    Returns:
        Splits of token ids (64,): `TensorDataset`s, or streams.
    """
    tables = open_tables(SST2_LOCATION, root, [("sentence", "text"), ("label",)], streaming=options.streaming)
    if "test" in tables and next(iter(tables["test"].iter(batch_size=1))).column(1).to_pylist()[0] == -1:
        del tables["test"]

    def build(decode_x: Any) -> tuple[Any, Any, Any]:
        return build_splits("sst2", tables, RowDecoder(decode_x, _decode_label), identity, options)

    train: Any = build(_check_sentence)[0]
    if options.streaming:
        vocabulary = Vocabulary.from_texts(sentence for sentence, _ in map(train.decode, train.read()))
    else:
        vocabulary = Vocabulary.from_texts(train.source.read(train.rows or range(len(train)))[0])
    splits, classes = build(partial(_encode_sentence, vocabulary=vocabulary)), ("negative", "positive")
    data = DatasetBundle("sst2", "classification", *splits, vocabulary.size, classes, vocabulary=vocabulary)
    return data if options.streaming else data.map_splits(_load_tensors)


def _check_sentence(sentence: Any, where: RowId) -> str:
    if not isinstance(sentence, str):
        raise CorruptFileError(str(where), f"it has a {type(sentence).__name__} instead of a sentence")
    return sentence


def _encode_sentence(sentence: Any, where: RowId, vocabulary: Vocabulary) -> Tensor:
    return vocabulary.encode(_check_sentence(sentence, where))


def _decode_label(value: Any, where: RowId) -> Tensor:
    if value not in (0, 1):
        raise CorruptFileError(str(where), f"its label is {value!r}, neither 0 nor 1")
    return torch.tensor(int(value))


def _load_tensors(dataset: Any) -> TensorDataset:
    x, y = zip(*dataset.__getitems__(range(len(dataset))), strict=True)
    return TensorDataset(torch.stack(x), torch.stack(y))
