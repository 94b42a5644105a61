"""What `model.json` of an exported folder holds, checked field by field before anything is made of it."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from msgspec import Meta, Struct

from brainet_pl._utils.stored import parse
from brainet_pl.serving.tables import Feature

FORMAT = 1
ADVICE = "export the model again"

Name = Annotated[str, Meta(min_length=1)]
Length = Annotated[int, Meta(ge=1, le=10**6)]
Pixels = Annotated[int, Meta(ge=1, le=10**5)]
Share = Annotated[float, Meta(gt=0, lt=1)]
DType = Literal["float16", "float32", "float64", "uint8", "int8", "int16", "int32", "int64", "bool"]


class AboutInput(Struct, forbid_unknown_fields=True):
    """One input of the graph; None is the length of a batch."""

    name: Name
    dtype: DType
    shape: Annotated[list[Length | None], Meta(min_length=1)]


class AboutOutput(Struct, forbid_unknown_fields=True):
    """One output of the graph."""

    name: Name
    role: Literal["answer", "score", "features"]
    meaning: str = ""
    unit: str = ""
    higher: str = ""


class AboutVerdict(Struct, forbid_unknown_fields=True):
    """How the model tells whether it knows an input."""

    score: str | None
    level: Share


class AboutImages(Struct, forbid_unknown_fields=True):
    """The arguments of `ImageSteps`."""

    resize: Pixels | Annotated[list[Pixels], Meta(min_length=2, max_length=2)]
    crop: Pixels
    mean: list[float]
    std: list[float]
    interpolation: Literal["nearest", "bilinear", "bicubic"]
    channels: Literal[1, 3]

    def __post_init__(self) -> None:
        if not (len(self.mean) == len(self.std) and len(self.mean) in (0, 1, self.channels) and all(self.std)):
            raise ValueError("Expected a mean and a deviation above 0 for each channel")


class AboutTexts(Struct, forbid_unknown_fields=True):
    """What `TextSteps` takes beside the tokenizer, which is a file of its own."""

    max_tokens: Annotated[int, Meta(ge=3, le=10**5)]
    pad: Annotated[int, Meta(ge=0)]


class AboutColumns(Struct, forbid_unknown_fields=True):
    """Held-out features, as `Columns.to_dict` gives them."""

    size: Length
    cuts: Annotated[list[Length], Meta(min_length=1)]
    edges: list[list[float]]
    ties: list[list[float]]

    def __post_init__(self) -> None:
        tables = (self.edges, self.ties)
        if any(len(table) != len(self.cuts) for table in tables) or len({len(r) for t in tables for r in t}) != 1:
            raise ValueError("Expected edges and ties to have a row for each cut, and each row the same columns")
        if sorted(set(self.cuts)) != self.cuts or self.cuts[-1] > self.size or not self.edges[0]:
            raise ValueError("Expected cuts to rise up to the size")


class AboutRisk(Struct, forbid_unknown_fields=True):
    """What is promised of the answers, see `brainet_pl.calibration.risk.Promise`."""

    error: Share
    delta: Share
    share: Annotated[float, Meta(ge=0, le=1)]
    rows: Annotated[int, Meta(ge=0)]
    per_class: bool
    missed: Annotated[int, Meta(ge=0)] | None
    silent: Annotated[int, Meta(ge=0)]


class About(Struct, forbid_unknown_fields=True):
    """The content of `model.json`."""

    format: int
    brainet_pl: str
    torch: str
    sha256: str
    task: str
    class_names: Annotated[list[str], Meta(min_length=1)] | None
    inputs: Annotated[list[AboutInput], Meta(min_length=1)]
    outputs: Annotated[list[AboutOutput], Meta(min_length=1)]
    verdict: AboutVerdict
    conformal: dict[str, Any] | None
    images: AboutImages | None
    features: list[Feature] | None
    held_out: dict[str, Annotated[list[float], Meta(min_length=1)] | AboutColumns] | None
    risk: AboutRisk | None = None
    texts: AboutTexts | None = None

    def __post_init__(self) -> None:
        watched = {one.name for one in self.outputs}
        if watched & {"class", "mean"}:
            watched.add("answer")
        more = sorted(set(self.held_out or ()) - watched)
        if more:
            raise ValueError(f"Expected held-out values of outputs, got those of {more[0]!r}")
        if len(set(self.class_names or ())) != len(self.class_names or ()):
            raise ValueError("Expected class_names that differ")
        if self.features == []:
            raise ValueError("Expected at least one feature, or null")


def check_about(content: Any, path: Any) -> About:
    """The content of `model.json`, or one sentence that says what is wrong with it."""
    if not isinstance(content, dict) or content.get("format") != FORMAT:
        got = content.get("format") if isinstance(content, dict) else type(content).__name__
        raise ValueError(f"expected format {FORMAT} in {path}, got {got}: {ADVICE}")
    return parse(About, content, f"{path}", ADVICE)
