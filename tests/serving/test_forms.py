"""Forms of files: what a client of HTTP writes is read to the byte, and what is none is refused."""

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

httpx = pytest.importorskip("httpx")

from brainet_pl.serving.forms import files_of_form  # noqa: E402
from brainet_pl.serving.limits import Refused  # noqa: E402

LINES = st.lists(st.sampled_from([b"\r\n", b"\n", b"--", b"--b", b"\r\n--b", b"\r\n\r\n", b" ", b"x", b"\0\xff"]))
CONTENTS = st.binary(max_size=60) | LINES.map(b"".join)
NAMES = st.text(st.characters(codec="utf-8"), max_size=8)


def written(parts):
    """A form as httpx writes it, and its content-type."""
    request = httpx.Request("POST", "http://localhost/", files=parts)
    return request.read(), request.headers["content-type"]


@settings(max_examples=200, deadline=None)
@given(st.lists(st.tuples(NAMES, NAMES, CONTENTS), max_size=5), st.lists(st.tuples(NAMES, CONTENTS), max_size=3))
def test_files_come_out_as_they_went_in(files, fields):
    parts = [(field, (name or "a", content)) for field, name, content in files]
    parts += [(field, (None, content)) for field, content in fields]
    if parts:
        body, kind = written(parts)
        assert files_of_form(body, kind, 5) == [content for _, _, content in files]


@settings(max_examples=200, deadline=None)
@given(st.lists(CONTENTS, max_size=4), st.data())
@example([b"\r\n--b", b"--", b""], None)
def test_a_form_that_is_cut_off_or_damaged_ends_in_files_or_a_refusal(contents, data):
    head = b'--b\r\nContent-Disposition: form-data; name="f"; filename="g"\r\n\r\n'
    body = b"".join(head + content + b"\r\n" for content in contents) + b"--b--\r\n"
    if data is not None:
        place = data.draw(st.integers(0, len(body)))
        body = body[:place] + data.draw(st.binary(max_size=3)) + body[place + data.draw(st.integers(0, 9)) :]
    try:
        found = files_of_form(body, "multipart/form-data; boundary=b", 9)
    except Refused:
        return
    assert all(isinstance(one, bytes) for one in found)
    assert sum(map(len, found)) <= len(body)


FILE = b'\r\nContent-Disposition: form-data; name="f"; filename="g"\r\n\r\nx\r\n'


@pytest.mark.parametrize(
    ("body", "kind", "files"),
    [
        (b"preamble\r\n--b" + FILE + b"--b--\r\nepilogue\r\n--b" + FILE, 'multipart/form-data; boundary="b"', [b"x"]),
        (b"--b \t" + FILE + b"--b--", "Multipart/Form-Data; charset=utf-8; Boundary=b", [b"x"]),
        (b"--b" + FILE.replace(b"filename", b"FileName*") + b"--b--", "multipart/form-data; boundary=b", [b"x"]),
        (b"--b" + FILE.replace(b"; filename", b"; name2") + b"--b--", "multipart/form-data; boundary=b", []),
        (b"--b--", "multipart/form-data; boundary=b", []),
    ],
)
def test_forms_of_other_writers(body, kind, files):
    assert files_of_form(bytearray(body), kind, 2) == files


@pytest.mark.parametrize(
    ("body", "kind", "status", "said"),
    [
        (b"--b" + FILE, "multipart/form-data; boundary=b", 400, "got no end of it"),
        (b"", "multipart/form-data; boundary=b", 400, "got no end of it"),
        (b"--b\r\nx\r\n--b--", "multipart/form-data; boundary=b", 400, "got a part without a header"),
        (b"--b\r\n" + 20_000 * b"h" + FILE + b"--b--", "multipart/form-data; boundary=b", 400, "without a header"),
        (b"--b" + FILE + b"--b--", "multipart/form-data", 400, "no boundary in its content-type"),
        (b"--b" + FILE + b"--b--", f"multipart/form-data; boundary={71 * 'b'}", 400, "no boundary"),
        (b"--b" + 3 * (FILE + b"--b") + b"--", "multipart/form-data; boundary=b", 413, "at most 2 files"),
        (
            b"--b" + 90 * (b"\r\na: b\r\n\r\n\r\n--b") + b"--",
            "multipart/form-data; boundary=b",
            413,
            "at most 16 fields",
        ),
    ],
)
def test_what_is_no_form_is_told(body, kind, status, said):
    with pytest.raises(Refused, match=said) as caught:
        files_of_form(body, kind, 2)
    assert caught.value.status == status
