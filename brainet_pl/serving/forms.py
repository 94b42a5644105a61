"""The files of a form, `multipart/form-data`, from its bytes."""

from __future__ import annotations

import re
from email.message import Message

from brainet_pl.serving.limits import Refused

FIELDS = 16  # parts that a form may have beside its files
HEADERS = 16_384  # bytes that may stand before the content of a part
IS_FILE = re.compile(rb"^content-disposition:[^\r\n]*;[ \t]*filename\*?[ \t]*=", re.IGNORECASE | re.MULTILINE)


def files_of_form(body: bytes | bytearray, content_type: str, most: int) -> list[bytes]:
    """The content of each file of a form, in their order; its other fields are left out.

    Args:
        body: of the request.
        content_type: its header, which says what stands between the parts.
        most: files that there may be.
    """
    between = rb"\r\n--" + re.escape(_boundary(content_type)) + rb"(?=--|[ \t]*\r\n)"
    parts = re.split(between, b"\r\n" + body, maxsplit=most + FIELDS + 1)[1:]
    files: list[bytes] = []
    for part in parts:
        if part.startswith(b"--"):  # the end of the form
            return files
        head, blank, content = part.partition(b"\r\n\r\n")
        if not blank or len(head) > HEADERS:
            raise _no_form("a part without a header")
        if IS_FILE.search(head):
            files.append(content)
        if len(files) > most:
            raise Refused(413, f"expected at most {most} files, got more: send them in parts")
    if len(parts) > most + FIELDS:
        raise Refused(413, f"expected at most {FIELDS} fields beside files, got more: send the files alone")
    raise _no_form("no end of it")


def _boundary(content_type: str) -> bytes:
    """What stands between the parts of a form."""
    header = Message()
    header["content-type"] = content_type
    boundary = header.get_param("boundary")
    if not isinstance(boundary, str) or not 0 < len(boundary) <= 70 or not boundary.isascii():  # RFC 2046
        raise _no_form("no boundary in its content-type")
    return boundary.encode()


def _no_form(got: str) -> Refused:
    return Refused(400, f"expected a form of files, got {got}: send multipart/form-data")
