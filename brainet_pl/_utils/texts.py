"""Texts as token numbers, without torch: a tokenizer's own file, read by the package `tokenizers` alone."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from brainet_pl._utils import checks
from brainet_pl._utils.warn import warn

MOST_TOKENS = 10**5  # that a network reads of one text


class Texts(Sequence[str]):
    """Texts (B,) in the place of a tensor: some of them by numbers or a mask, and on every device at home.

    >>> Texts(["one", "two", "three"])[np.array([True, False, True])]
    Texts(['one', 'three'])
    """

    def __init__(self, texts: Sequence[str]) -> None:
        self._texts = list(texts)
        for place, text in enumerate(self._texts):
            if not isinstance(text, str):
                raise ValueError(f"expected a text, got {checks.shown(text)} at place {place}: leave it out")

    def __len__(self) -> int:
        return len(self._texts)

    def __iter__(self) -> Iterator[str]:
        return iter(self._texts)

    def __getitem__(self, which: Any) -> Any:
        if isinstance(which, int | np.integer):
            return self._texts[int(which)]
        if isinstance(which, slice):
            return Texts(self._texts[which])
        places = np.asarray(which)
        return Texts([self._texts[i] for i in (np.flatnonzero(places) if places.dtype == bool else places)])

    def __repr__(self) -> str:
        return f"Texts({self._texts})"

    def to(self, *args: Any, **kwargs: Any) -> Texts:
        """Gives the same texts: they are on no device."""
        return self


def are_texts(x: Any) -> bool:
    """Whether these are texts, one for each sample: `Texts`, a list, a tuple, an array or a column of a table."""
    if isinstance(x, Texts):
        return True
    if getattr(x, "ndim", None) == 1 and getattr(getattr(x, "dtype", None), "kind", "") in "OUT":
        x = list(x)
    return isinstance(x, list | tuple) and len(x) > 0 and isinstance(x[0], str)


class Tokens(NamedTuple):
    """Texts as a network reads them.

    Attributes:
        input_ids: (B, T) the numbers of tokens, padded to the longest text.
        attention_mask: (B, T) 1 for a token, 0 for padding.
        cut: (B,) whether a text was longer than the network reads.
    """

    input_ids: NDArray[np.int64]
    attention_mask: NDArray[np.int64]
    cut: NDArray[np.bool_]

    def inputs(self) -> dict[str, NDArray[np.int64]]:
        """What the network takes, by name."""
        return {"input_ids": self.input_ids, "attention_mask": self.attention_mask}


@dataclass(frozen=True)
class TextSteps:
    """How a text becomes what a network reads: split into tokens, cut to a length, numbered, padded.

    Attributes:
        tokenizer: the content of a `tokenizer.json`, which says all that there is to say about tokens.
        max_tokens: what is longer is cut, and said to be.
        pad: the number of the token that fills shorter texts up.
    """

    tokenizer: str
    max_tokens: int = 512
    pad: int = 0

    def __post_init__(self) -> None:
        checks.whole("max_tokens", self.max_tokens, 3, MOST_TOKENS)

    def to_dict(self) -> dict[str, Any]:
        """Primitives that `TextSteps(**…)` takes."""
        return asdict(self)

    @cached_property
    def _reader(self) -> Any:
        try:
            from tokenizers import Tokenizer
        except ImportError as error:
            raise ImportError("texts need the package tokenizers: pip install 'brainet_pl[text]'") from error
        try:
            reader = Tokenizer.from_str(self.tokenizer)
        except Exception as error:  # the package raises nothing more special
            raise ValueError(f"expected the content of a tokenizer.json, got what is none ({error})") from error
        reader.enable_truncation(self.max_tokens)
        reader.enable_padding(pad_id=self.pad)
        return reader

    def __call__(self, texts: Sequence[Any]) -> Tokens:
        """Texts (B,) → their tokens. One that is empty, or is no text, is refused."""
        whole = [text.encode("utf-8", "replace").decode() for text in Texts(texts)]  # half a surrogate is no text
        read = self._reader.encode_batch(whole)
        ids = np.array([one.ids for one in read], dtype=np.int64)
        mask = np.array([one.attention_mask for one in read], dtype=np.int64)
        special = np.array([one.special_tokens_mask for one in read], dtype=np.int64)
        empty = np.flatnonzero((mask * (1 - special)).sum(axis=1) == 0)
        if len(empty):
            shown = checks.shown(texts[int(empty[0])])
            raise ValueError(
                f"expected texts with at least one word, got {shown} at place {empty[0]} of a batch: leave it out, or "
                "answer it without a model"
            )
        return Tokens(ids, mask, np.array([bool(one.overflowing) for one in read]))

    def warn_of_cut(self, cut: NDArray[np.bool_]) -> None:
        """Say that texts were cut, where some were."""
        if cut.any():
            warn(
                f"{int(cut.sum())} of {len(cut)} texts have more than {self.max_tokens} tokens, which is all that the "
                "network reads: what comes after counts for nothing; shorten them, or predict them in parts"
            )
