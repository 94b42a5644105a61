"""Reads back what an offline run of W&B has written, with nothing of W&B but its messages."""

import json
from pathlib import Path
from typing import NamedTuple


def wandb_records(path):
    """Records of a .wandb file: a header of 7 bytes, then LevelDB's log format in blocks of 32 KiB."""
    data, place, parts = path.read_bytes(), 7, b""
    while place + 7 <= len(data):
        left = 32768 - place % 32768
        if left < 7:
            place += left
            continue
        size, kind = int.from_bytes(data[place + 4 : place + 6], "little"), data[place + 6]
        parts += data[place + 7 : place + 7 + size]
        place += 7 + size
        if kind in (1, 4):  # whole, or the last part
            yield parts
            parts = b""


class Offline(NamedTuple):
    """What the file of an offline run holds; `files` are those of its folder."""

    history: dict
    config: dict
    summaries: dict
    hidden: set
    artifacts: list
    files: Path


def files_of(folder):
    """The files of the offline runs below a folder in the order in which they were begun; a run may have several."""
    return sorted((folder / "runs" / "wandb").glob("offline-run-*/run-*.wandb"), key=lambda path: path.stat().st_ctime)


def read_wandb(path):
    """Everything in the file of an offline run."""
    from wandb.proto import wandb_internal_pb2

    found = Offline({}, {}, {}, set(), [], path.parent / "files")
    for data in wandb_records(path):
        record = wandb_internal_pb2.Record()
        record.ParseFromString(data)
        for item in record.history.item:
            found.history.setdefault(item.key or "/".join(item.nested_key), []).append(json.loads(item.value_json))
        for item in record.config.update:
            *way, last = [item.key] if item.key else item.nested_key
            place = found.config
            for key in way:
                place = place.setdefault(key, {})
            place[last] = json.loads(item.value_json)
        if record.HasField("run"):
            found.config["run"] = record.run
        if record.HasField("metric"):
            how = record.metric.summary
            kinds = [kind for kind in ("min", "max", "none") if getattr(how, kind)]
            found.summaries[record.metric.name] = kinds[0] if kinds else "last"
            if record.metric.options.hidden:
                found.hidden.add(record.metric.name)
        artifact = record.artifact if record.HasField("artifact") else record.request.log_artifact.artifact
        if artifact.type:
            found.artifacts.append(artifact)
    return found
