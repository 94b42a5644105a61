"""The server's description of itself: what it says is taken is taken, and every answer is one that it says."""

import json
import os
import shutil
import subprocess

import jsonschema
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from brainet_pl import ExportedModel

pytest.importorskip("fastapi")
from fastapi.testclient import TestClient

from brainet_pl.serving.app import make_app
from brainet_pl.serving.limits import Limits
from brainet_pl.serving.openapi import openapi_of
from brainet_pl.serving.tables import Feature

ANYTHING = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.sampled_from(["inputs", "rows", "input"]), inner),
    max_leaves=12,
)
NUMBERS = st.integers(-(10**9), 10**9) | st.floats(allow_nan=False, allow_infinity=False)
CELLS = {"number": NUMBERS, "string": st.text(max_size=5), "null": st.none()}


@pytest.fixture(scope="module")
def client(served):
    with TestClient(
        make_app(ExportedModel(served.folder, 1), Limits(batch=3)), raise_server_exceptions=False
    ) as client:
        yield client


@pytest.fixture(scope="module")
def described(client):
    return client.get("/openapi.json").json()


def values(schema):
    """A strategy for values of a schema, as far as the description uses JSON schema."""
    if "anyOf" in schema:
        return st.one_of([values(one) for one in schema["anyOf"]])
    kinds = schema["type"]
    if kinds == "object":
        return st.fixed_dictionaries({name: values(schema["properties"][name]) for name in schema["required"]})
    if kinds == "array":
        return st.lists(values(schema["items"]), min_size=schema["minItems"], max_size=schema["maxItems"])
    return st.one_of([CELLS[kind] for kind in ([kinds] if isinstance(kinds, str) else kinds)])


def is_described(described, method, path, answer):
    """Whether an answer is of a status, of a kind and of a schema that the description names."""
    responses = described["paths"][path][method.lower()]["responses"]
    assert str(answer.status_code) in responses, answer.text
    kind = answer.headers["content-type"].partition(";")[0]
    schema = responses[str(answer.status_code)]["content"][kind]["schema"]
    if kind == "application/json":
        jsonschema.validate(answer.json(), schema | {"components": described["components"]})
    return True


def test_it_is_a_description_of_openapi(described):
    assert described["openapi"] == "3.1.0"
    for path, methods in described["paths"].items():
        for method, about in methods.items():
            assert about["responses"]["200"]["content"], (method, path)
    for schema in described["components"]["schemas"].values():
        jsonschema.Draft202012Validator.check_schema(schema)


def test_every_path_answers_as_described(client, described):
    for path, methods in described["paths"].items():
        for method in ("GET", "POST", "PUT", "DELETE", "PATCH"):
            answer = client.request(method, path)
            if method.lower() in methods:
                assert is_described(described, method, path, answer)
            else:
                assert (answer.status_code, answer.headers["allow"]) == (405, next(iter(methods)).upper())


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])
@given(st.data())
def test_what_is_described_is_answered(client, described, data):
    asking = described["paths"]["/predict"]["post"]["requestBody"]["content"]["application/json"]["schema"]
    asked = data.draw(values(asking))
    answer = client.post("/predict", json=asked)
    assert answer.status_code == 200
    assert is_described(described, "POST", "/predict", answer)
    given = asked["inputs"]
    assert len(answer.json()["answers"]) == len(given["input"] if isinstance(given, dict) else given)


@settings(max_examples=150, deadline=None)
@given(
    ANYTHING, st.sampled_from(["application/json", "Application/JSON ; x=y", "multipart/form-data; boundary=b", "a"])
)
def test_anything_else_has_a_status_and_a_sentence(client, described, asked, kind):
    for path in ("/predict", "/predict/images"):
        answer = client.post(path, content=json.dumps(asked), headers={"content-type": kind})
        assert answer.status_code in (400, 413, 415, 422)
        assert is_described(described, "POST", path, answer)


@settings(max_examples=150, deadline=None)
@given(st.binary(max_size=200), st.sampled_from(["application/json", "multipart/form-data; boundary=b"]))
def test_any_bytes_have_a_status_and_a_sentence(client, described, content, kind):
    for path in ("/predict", "/predict/images"):
        assert is_described(described, "POST", path, client.post(path, content=content, headers={"content-type": kind}))


def test_rows_are_described_where_the_model_has_columns(served):
    model = ExportedModel(served.folder, 1)
    assert "/predict/images" in openapi_of(model, Limits())["paths"]
    model.features, model.images = [Feature("size"), Feature("size", "missing"), Feature("day", "date")], None
    paths = openapi_of(model, Limits())["paths"]
    assert "/predict/images" not in paths
    asking = paths["/predict"]["post"]["requestBody"]["content"]["application/json"]["schema"]
    for rows in ([{"size": 1, "day": "2024-01-01"}], [[1.5, "2024-01-01"], {"size": None, "day": None}]):
        jsonschema.validate({"rows": rows}, asking)
    for rows in ([{"size": 1}], [[1.5]], [], "text", [[1, 2, 3]]):
        with pytest.raises(jsonschema.ValidationError):
            jsonschema.validate({"rows": rows}, asking)


STATUSES = """
[checks.negative_data_rejection]
enabled = false  # true and texts such as "1" are taken for numbers

[checks.positive_data_acceptance]
expected-statuses = ["2xx", 422]  # a schema can't say which bytes are an image
"""


@pytest.mark.slow
def test_a_tester_from_outside_finds_nothing(served, start, stop, tmp_path):
    """Schemathesis asks whatever the description allows and forbids; each answer has to be one that it names."""
    tester = os.environ.get("BRAINET_SCHEMATHESIS") or shutil.which("schemathesis")
    if tester is None:
        pytest.skip("expected schemathesis in an environment of its own, and BRAINET_SCHEMATHESIS to be its command")
    (tmp_path / "schemathesis.toml").write_text(STATUSES)
    server, address = start(served.folder, "--max_batch", "2")
    command = [tester, "--config-file", str(tmp_path / "schemathesis.toml"), "run", f"{address}/openapi.json"]
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(
        [*command, "--max-examples", "200", "--phases", "coverage,fuzzing", "--seed", "0"],
        env=environment, cwd=tmp_path, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
    stop(server)
