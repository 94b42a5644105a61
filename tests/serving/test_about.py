"""`model.json`: changed in any place, the folder answers as before or is refused in one sentence."""

import copy
import json
import shutil

import pytest

from brainet_pl.serving import ExportedModel

VALUES = [None, True, -1, 0, 7, 10**12, 0.5, "", "x", [], [1], ["x"], {}, {"x": 1}]


def places(value, path=()):
    """The path of every value in dictionaries and lists; of a long list, its first values."""
    inside = value.items() if isinstance(value, dict) else enumerate(value[:2]) if isinstance(value, list) else ()
    for key, item in inside:
        yield (*path, key)
        yield from places(item, (*path, key))


def changes(about):
    """`model.json` with one value deleted, one added, or one in the place of another."""
    for *path, last in places(about):
        for value in ("delete", "add", *VALUES):
            content = copy.deepcopy(about)
            inside = content
            for key in path:
                inside = inside[key]
            if value == "delete":
                del inside[last]
            elif value == "add" and isinstance(inside, dict):
                inside["more"] = 1
            else:
                inside[last] = value
            yield ".".join(map(str, [*path, last])), value, content


def use(folder, inputs):
    model = ExportedModel(folder, 1)
    outputs = model.predict(inputs)
    json.dumps(model.as_answers(outputs))
    monitor = model.monitor()
    if monitor is not None:
        monitor.update(model.signals(outputs))


def refusal(folder, inputs):
    try:
        use(folder, inputs)
    except ValueError as error:
        return str(error)
    return "expected "


def test_every_changed_value_is_refused_in_one_sentence(served, tmp_path):
    shutil.copytree(served.folder, tmp_path / "changed")
    about = json.loads((served.folder / "model.json").read_text())
    about["features"] = [{"column": "age", "kind": "category", "value": "x"}, {"column": "size"}]
    inputs, tried = served.known[:4].numpy(), 0
    for place, value, content in changes(about):
        (tmp_path / "changed" / "model.json").write_text(json.dumps(content))
        assert refusal(tmp_path / "changed", inputs).startswith("expected "), (place, value)
        tried += 1
    assert tried > 500


@pytest.mark.parametrize(
    "text", ["", "{", "[" * 100_000, "[]", "null", '{"format": 1}', '{"format": [1]}', '{"format": true}']
)
def test_what_is_no_description_is_refused(served, tmp_path, text):
    shutil.copytree(served.folder, tmp_path / "changed")
    (tmp_path / "changed" / "model.json").write_text(text)
    with pytest.raises(ValueError, match="expected "):
        ExportedModel(tmp_path / "changed")


@pytest.mark.parametrize("names", [["a"] * 8, ["\ud800", *"bcdefgh"]])
def test_class_names_that_no_answer_could_hold_are_refused(served, tmp_path, names):
    """Of two classes of one name an answer would show one; half a pair of surrogates can't be sent."""
    shutil.copytree(served.folder, tmp_path / "changed")
    about = json.loads((served.folder / "model.json").read_text())
    (tmp_path / "changed" / "model.json").write_text(json.dumps(about | {"class_names": names}))
    with pytest.raises(ValueError, match="expected "):
        ExportedModel(tmp_path / "changed")
