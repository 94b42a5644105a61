"""The server's description of itself, OpenAPI 3.1: what this model takes and gives, and every status there is."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from brainet_pl.serving.folder import CUT, FEATURES, MAPS, NAMED, ExportedModel
from brainet_pl.serving.images import FORMATS
from brainet_pl.serving.limits import Limits

Schema = dict[str, Any]
STATUSES = {
    400: "not understood: no JSON, or no form",
    403: "from a page of another origin",
    408: "sent too slowly",
    413: "too large",
    415: "of another kind",
    421: "to another name than this machine's",
    422: "not what the model takes",
    429: "too many requests at a time",
    500: "the server failed",
    503: "too many connections",
    504: "the answer took too long",
}
NUMBER: Schema = {"type": ["number", "null"]}  # null where it is none, or infinite
INTEGERS = ("class",)
FLAGS = ("known", "answered")


def openapi_of(model: ExportedModel, limits: Limits) -> dict[str, Any]:
    """What the server of a model takes and gives, as OpenAPI has it."""
    paths: dict[str, Any] = {"/predict": {"post": _asked("predictions", "application/json", _asking(model, limits))}}
    if model.images is not None:
        files = {"type": "array", "items": {"type": "string", "format": "binary"}} | _sizes(limits)
        form = {"type": "object", "properties": {"files": files}, "required": ["files"]}
        kinds = {"files": {"contentType": ", ".join(f"image/{name.lower()}" for name in FORMATS)}}
        asked = _asked("predictions of image files", "multipart/form-data", form, encoding=kinds)
        paths["/predict/images"] = {"post": asked}
    for path, summary in (
        ("/health", "whether it runs"),
        ("/model", "what the model takes and gives"),
        ("/drift", "whether inputs have changed"),
        ("/openapi.json", "this description"),
    ):
        paths[path] = {"get": {"summary": summary, "responses": _responses({"type": "object"}, (400, 421, 500, 503))}}
    text = {"200": {"description": "for Prometheus", "content": {"text/plain": {"schema": {"type": "string"}}}}}
    paths["/metrics"] = {"get": {"summary": "counts and times", "responses": text | _refusals((400, 421, 500, 503))}}
    schemas = {"Answers": _answers(model), "Refusal": REFUSAL}
    info = {"title": "brainet", "version": str(model.about["brainet_pl"])}
    return {"openapi": "3.1.0", "info": info, "paths": paths, "components": {"schemas": schemas}}


REFUSAL: Schema = {"type": "object", "properties": {"detail": {"type": "string"}}, "required": ["detail"]}


def _asked(summary: str, kind: str, schema: Schema, **more: Any) -> dict[str, Any]:
    """A POST that is answered with predictions."""
    body = {"required": True, "content": {kind: {"schema": schema} | more}}
    responses = _responses({"$ref": "#/components/schemas/Answers"}, tuple(STATUSES))
    return {"summary": summary, "requestBody": body, "responses": responses}


def _responses(schema: Schema, statuses: Sequence[int]) -> dict[str, Any]:
    answer = {"description": "the answer", "content": {"application/json": {"schema": schema}}}
    return {"200": answer} | _refusals(statuses)


def _refusals(statuses: Sequence[int]) -> dict[str, Any]:
    """By status; what is no HTTP (400) and one connection too many (503) are said in plain text."""
    json_ = {"application/json": {"schema": {"$ref": "#/components/schemas/Refusal"}}}
    text = {"text/plain": {"schema": {"type": "string"}}}
    return {
        str(status): {"description": STATUSES[status], "content": json_ | (text if status in (400, 503) else {})}
        for status in statuses
    }


def _sizes(limits: Limits) -> Schema:
    return {"minItems": 1, "maxItems": limits.batch}


def _asking(model: ExportedModel, limits: Limits) -> Schema:
    """What `POST /predict` takes: inputs, or rows where the model has columns."""
    tensors = {one["name"]: _tensor(one["shape"][1:], one["dtype"].startswith("float")) for one in model.inputs}
    batches = {name: {"type": "array", "items": schema} | _sizes(limits) for name, schema in tensors.items()}
    inputs: list[Schema] = [_object(batches)]
    if len(batches) == 1:
        inputs.extend(batches.values())
    ways = [_only("inputs", {"anyOf": inputs})]
    if model.features is not None:
        names = list(dict.fromkeys(feature.column for feature in model.features))
        cells: Schema = {"type": ["string", "number", "null"]}
        row = {"type": "object", "properties": dict.fromkeys(names, cells), "required": names}
        ordered = {"type": "array", "items": cells, "minItems": len(names), "maxItems": len(names)}
        ways.append(_only("rows", {"type": "array", "items": {"anyOf": [row, ordered]}} | _sizes(limits)))
    if model.texts is not None:
        ways.append(_only("texts", {"type": "array", "items": {"type": "string"}} | _sizes(limits)))
    return {"anyOf": ways}


def _only(name: str, schema: Schema) -> Schema:
    """An object of one field."""
    return _object({name: schema})


def _tensor(shape: Sequence[int | None], may_miss: bool) -> Schema:
    """Numbers, in lists as deep as the shape; of a length that is free, None, there are as many as one likes.

    A number that is missing, null, is NaN where there is one: its sample has no class.
    """
    if not shape:
        return NUMBER if may_miss else {"type": "number"}
    sizes = {} if shape[0] is None else {"minItems": shape[0], "maxItems": shape[0]}
    return {"type": "array", "items": _tensor(shape[1:], may_miss)} | sizes


def _answers(model: ExportedModel) -> Schema:
    """What is said of each sample."""
    outputs: list[Mapping[str, Any]] = [one for one in model.about["outputs"] if one["role"] != FEATURES]
    scores = [one["name"] for one in outputs if one["role"] == "score"]
    maps = model.about["task"] == MAPS
    found: Schema = {"scores": _object(dict.fromkeys(scores, _rows_of(NUMBER) if maps else NUMBER))}
    for name in [one["name"] for one in outputs if one["role"] != "score"]:
        found[name] = _map(name) if maps else _answer(name)
    if model.class_names is not None and "class" in found and not maps:
        found["class_name"] = {"type": ["string", "null"]}
    answer = _object(found)
    if model.texts is not None:  # of token numbers nobody knows it
        answer["properties"] = found | {CUT: {"type": "boolean"}}
    return _object({"answers": {"type": "array", "items": answer}})


def _map(name: str) -> Schema:
    """What is said of each pixel, in rows; of each class where it is said of classes."""
    if name in NAMED:
        return {"type": "object", "additionalProperties": _rows_of(NUMBER if name != "set" else {"type": "boolean"})}
    return _rows_of(_answer(name))


def _rows_of(schema: Schema) -> Schema:
    return {"type": "array", "items": {"type": "array", "items": schema}}


def _answer(name: str) -> Schema:
    if name in ("set", "labels"):
        return {"type": "array", "items": {"type": "string"}}
    if name in NAMED:
        return {"type": "object", "additionalProperties": NUMBER}
    if name in FLAGS:
        return {"type": "boolean"}
    return {"type": "integer"} if name in INTEGERS else NUMBER


def _object(properties: Schema) -> Schema:
    return {"type": "object", "properties": properties, "required": list(properties), "additionalProperties": False}
