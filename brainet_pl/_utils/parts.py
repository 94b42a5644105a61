"""Parts of a model: things that know their own settings and can be named in Python, in YAML and in a checkpoint.

A part is a class whose constructor arguments are all kept as attributes of the same name. From that follow its settings
and the form in which YAML and checkpoints hold it: `{"class_path": "MCDropout", "init_args": {"rate": 0.3}}`. A part is
looked up among the classes that are loaded; nothing is ever imported because a file names it.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from typing import Any, ClassVar, TypeVar

from brainet_pl._utils.checks import all_plain, shown

P = TypeVar("P", bound="Part")


class Part:
    """The base of heads, scores, calibrators and tasks.

    Attributes:
        kept_as: constructor argument → attribute that keeps it, where a method has the argument's name.
    """

    kept_as: ClassVar[Mapping[str, str]] = {}

    def settings(self) -> dict[str, Any]:
        """Every constructor argument and its value."""
        names = [argument.name for argument in arguments(type(self))]
        return {name: getattr(self, self.kept_as.get(name, name)) for name in names}

    def to_dict(self) -> dict[str, Any]:
        """The part as primitives, in the form that YAML, jsonargparse and `make_part` read."""
        return {"class_path": part_name(type(self)), "init_args": primitive(self.settings())}

    def describe(self) -> str:
        """The part as one would write it: `MCDropout(rate=0.3)`, settings at their defaults left out."""
        defaults = {argument.name: argument.default for argument in arguments(type(self))}
        changed = {k: v for k, v in self.settings().items() if v != defaults[k]}
        return f"{type(self).__name__}({', '.join(f'{k}={v!r}' for k, v in changed.items())})"


def arguments(cls: type) -> list[inspect.Parameter]:
    """The constructor arguments of a class that have a name."""
    found = inspect.signature(cls).parameters.values()
    return [p for p in found if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]


def part_name(cls: type) -> str:
    """The short name of a class of this package, or the full path of another's."""
    return cls.__name__ if cls.__module__.split(".")[0] == "brainet_pl" else f"{cls.__module__}.{cls.__qualname__}"


def part_classes(base: Any) -> dict[str, Any]:
    """Name → class of every concrete part of a kind that is loaded, the package's own and any other."""

    classes = {}
    for cls in (base, *_derived(base)):
        if not inspect.isabstract(cls) and not cls.__name__.startswith("_"):
            classes[part_name(cls)] = cls
    return classes


def _derived(cls: Any) -> Iterator[Any]:
    """All classes that are derived from one, each before its own; not what torch makes of one to trace it.

    An export leaves classes behind, until memory is tidied up, that have the name and the module of their parent.
    """
    for child in cls.__subclasses__():
        if (child.__module__, child.__qualname__) == (cls.__module__, cls.__qualname__):
            continue
        yield child
        yield from _derived(child)


def make_part(base: Callable[..., P], given: Any, argument: str) -> P:
    """A part from what a user may give: the part itself, its name, or the dictionary of `to_dict`.

    Args:
        base: the kind of part.
        given: a part, a name or a dictionary.
        argument: the argument it was given for, to say so in an error.

    >>> from brainet_pl.network import HeadSettings
    >>> make_part(HeadSettings, {"class_path": "MCDropout", "init_args": {"rate": 0.3}}, "head")
    MCDropout(rate=0.3)
    """
    if isinstance(given, base):  # type: ignore[arg-type]
        return given  # type: ignore[no-any-return]
    name, settings = _name_and_settings(given, argument)
    known = part_classes(base)
    # YAML may have the full path of a class of the package, which is known by its short name.
    cls = known.get(name) or known.get(str(name).rpartition(".")[2]) if isinstance(name, str) else None
    if cls is None:
        what = name if isinstance(name, str) else type(given).__name__
        raise ValueError(
            f"expected {argument} to be one of {', '.join(sorted(known))}, got {what!r}: give one of these or an "
            f"object of a class derived from {base.__name__}; a class of your own must be imported before a file can "
            "name it"
        )
    _check_names(cls, settings)
    made: P = cls(**settings)
    return made


def _name_and_settings(given: Any, argument: str) -> tuple[Any, Mapping[str, Any]]:
    """The name of a class and its settings, from a name or the dictionary of `to_dict`."""
    if not (isinstance(given, Mapping) and set(given) <= {"class_path", "init_args"}):
        return given, {}
    settings = given.get("init_args") or {}
    if not isinstance(settings, Mapping):
        raise ValueError(
            f"expected init_args of {argument} to be a dictionary of settings, got {shown(settings)}: leave them "
            "out, or write name: value"
        )
    return given.get("class_path"), settings


def _check_names(cls: type, settings: Mapping[str, Any]) -> None:
    """Refuse settings that a class does not have, and a lack of those that it needs."""
    accepted = [argument.name for argument in arguments(cls)]
    required = [argument.name for argument in arguments(cls) if argument.default is argument.empty]
    if set(settings) - set(accepted) or set(required) - set(settings):
        raise ValueError(
            f"expected settings of {cls.__name__} ({', '.join(accepted) or 'it has none'}), got "
            f"{', '.join(map(str, settings)) or 'none'}: leave out what it does not have, and give what it needs"
        )


def primitive(value: Any) -> Any:
    """The same with parts as dictionaries and tuples as lists, all the way down, so that it can be dumped as JSON."""
    if isinstance(value, Part):
        return value.to_dict()
    if isinstance(value, Mapping):
        return {k: primitive(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return list(value) if all_plain(value) else [primitive(v) for v in value]
    if hasattr(value, "item") and getattr(value, "ndim", None) == 0:  # NumPy's and torch's scalars
        return value.item()
    return value
