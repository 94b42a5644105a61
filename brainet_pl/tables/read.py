"""What a column holds: numbers, dates or categories, found in its cells and in what its data type says."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from brainet_pl.tables.cells import (
    PLAIN,
    POINTS,
    SYMBOLS,
    days_of,
    plain_number,
    without_placeholders,
    without_symbol,
)
from brainet_pl.tables.column import MISSING, OTHER, Column, array_of, cells_as_text, is_categorical

MOST_CATEGORIES = 50  # columns of zeros and ones that one column becomes
LEAST_OF_CATEGORY = 3  # rows of a category that is read by itself, where there are more categories
LEAST_NUMBERS = 0.9  # share of numbers in a column of too many categories, from which other texts count as missing
SHOWN = 3  # values in a message
DATE_LIKE = re.compile(
    r"(\d{4}([-/.])\d{1,2}\2\d{1,2}|\d{1,2}([-/])\d{1,2}\3(\d{4}|\d{2})|\d{1,2}\.\d{1,2}\.\d{4})"
    r"([T ]\d{1,2}:\d{2}(:\d{2}(\.\d+)?)?\s*(Z|[+-]\d{2}:?\d{2}|[AaPp][Mm])?)?"
)
CODE = re.compile(r"0\d+")
EITHER = re.compile(r"[+-]?[1-9]\d{0,2},\d{3}")  # thousands, or three decimals


def read_column(
    name: str,
    values: Any,
    *,
    categorical: bool = False,
    most: int = MOST_CATEGORIES,
    advice: str = "drop it if it is a name or a number of a row, or group its values",
) -> Column:
    """How a column (N,) becomes numbers, found in its cells.

    A column whose data type is categories holds categories, whatever they look like. Of any other, text that is all
    numbers is numbers, in the notation that fits all of them, and text that is all ISO dates is dates. Digits with
    leading zeros are codes, and so categories.

    Args:
        name: the name of the column.
        values: a column of pandas or polars, an array, or a list of cells.
        categorical: whether it holds categories, whatever they look like.
        most: the largest number of categories that are read one by one; the rarer of more are read as one.
        advice: what to do with a column of values that do not repeat.
    """
    array = array_of(values)
    if not categorical and not is_categorical(values):
        if array.dtype.kind in "fiubm":
            return Column(name)
        if array.dtype.kind == "M":
            return Column(name, "date")
        texts = cells_as_text(array, name)
        if _are_codes(texts):
            shown = next(text for text in texts if CODE.fullmatch(text))
            note = f"read as categories, because digits with leading zeros such as {shown!r} are codes"
            found = _read_categories(name, texts, most, advice)
            return replace(found, note="; ".join(filter(None, [note, found.note])))
        numbers = _read_texts(name, texts, most)
        if numbers is not None:
            return numbers
    return _read_categories(name, cells_as_text(array, name), most, advice)


def _read_texts(name: str, texts: Sequence[str], most: int) -> Column | None:
    """A column of text that holds numbers or dates; None where it holds categories."""
    counts = Counter(without_placeholders(texts))
    counts.pop("", None)
    given = list(counts)
    if not given and any(texts):
        return None
    if all(plain_number(text) is not None for text in given):
        return Column(name)
    if all(days_of(text) is not None for text in given):
        return Column(name, "date")
    found = _read_notation(name, given)
    if found is not None:
        return found
    _refuse_unclear(name, given)
    odd = [text for text in given if plain_number(text) is None]
    numbers = sum(counts.values()) - sum(counts[text] for text in odd)
    if len(given) > most and numbers >= LEAST_NUMBERS * sum(counts.values()):
        note = f"read as numbers; {_listed(odd)} ({sum(counts[text] for text in odd):,} rows) counts as missing"
        return Column(name, note=note)
    return None


def _are_codes(texts: Sequence[str]) -> bool:
    """Whether texts are digits with leading zeros, such as postal codes: as numbers they would lose these."""
    given = {text for text in texts if text}
    return any(map(CODE.fullmatch, given)) and all(text.isdigit() for text in given)


def _read_notation(name: str, given: Sequence[str]) -> Column | None:
    """A column of numbers with thousands separators, decimal commas or a sign beside them; None for any other."""
    symbol = _symbol_of(given)
    plain = [without_symbol(text, symbol) for text in given] if symbol else list(given)
    fits = [one for one in (PLAIN, *POINTS) if all(one.number(text) is not None for text in plain)]
    if not fits:
        return None
    chosen, note = fits[0], ""
    unclear = [text for text in plain if EITHER.fullmatch(text)]
    if len(fits) == 2 and unclear:  # both meanings of a comma
        note = (
            f"read with commas between thousands, so that {unclear[0]!r} is {unclear[0].replace(',', '')}; write "
            "decimals with a point if they were meant"
        )
    separators = "".join(character for character in chosen.separators if any(character in text for text in plain))
    return Column(name, separators=separators, decimal=chosen.decimal, symbol=symbol, note=note)


def _symbol_of(given: Sequence[str]) -> str:
    """The sign that stands beside most of these texts, "" for none."""
    found = Counter(character for text in given for character in set(text) if character in SYMBOLS)
    symbol, count = found.most_common(1)[0] if found else ("", 0)
    return symbol if len(found) == 1 and 2 * count > len(given) else ""


def _refuse_unclear(name: str, given: Sequence[str]) -> None:
    """Refuse dates of which nobody can tell day and month, and numbers that are written in several ways."""
    odd = [text for text in given if plain_number(text) is None]
    if odd and all(map(DATE_LIKE.fullmatch, odd)):
        raise ValueError(
            f"expected numbers, dates or categories in column {name!r}, got dates such as {odd[0]!r}: write dates as "
            "2024-12-31, or drop the column"
        )
    if odd and all(any(one.number(text) is not None for one in POINTS) for text in odd):
        raise ValueError(
            f"expected numbers that are all written in one way in column {name!r}, got {_listed(given)}: write "
            "thousands without a separator and decimals with a point"
        )


def _read_categories(name: str, texts: Sequence[str], most: int, advice: str) -> Column:
    counts = Counter(text or MISSING for text in texts)
    if len(counts) <= most:
        return Column(name, "category", sorted(counts))
    frequent = [text for text, count in counts.most_common(most - 1) if count >= LEAST_OF_CATEGORY]
    if len(frequent) < 2:
        raise ValueError(f"expected at most {most} categories, got {len(counts)} in column {name!r}: {advice}")
    rare = sum(counts.values()) - sum(counts[text] for text in frequent)
    note = f"the {len(frequent)} most frequent of {len(counts):,} categories are read one by one, all others ({rare:,} "
    return Column(name, "category", sorted(frequent), grouped=True, note=f"{note}rows) as one, {OTHER!r}")


def _listed(texts: Sequence[str]) -> str:
    more = f" and {len(texts) - SHOWN} more" if len(texts) > SHOWN else ""
    return ", ".join(repr(text[:40]) for text in texts[:SHOWN]) + more
