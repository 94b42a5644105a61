"""A page that a browser shows can't ask a server on the same machine: names, origins, and what proxies pass on."""

import pytest

from brainet_pl.serving.limits import Refused
from brainet_pl.serving.origins import check_host, check_site, is_loopback


@pytest.mark.parametrize(
    ("host", "address", "fine"),
    [
        ("localhost:8000", "127.0.0.1", True),
        ("LocalHost", "127.0.0.1", True),
        ("app.localhost:80", "127.0.0.1", True),
        ("127.0.0.1:8000", "127.0.0.1", True),
        ("127.9.9.9", "127.0.0.1", True),
        ("[::1]:8000", "::1", True),
        ("", "127.0.0.1", True),
        ("model.example", "127.0.0.1", True),  # allowed by name
        ("model.example:8000", "::ffff:127.0.0.1", True),
        ("evil.example", "127.0.0.1", False),
        ("evil.example:8000", "::1", False),
        ("evil.example", "::ffff:127.0.0.1", False),
        ("localhost.evil.example", "127.0.0.1", False),
        ("127.0.0.1.evil.example", "127.0.0.1", False),
        ("localhost@evil.example", "127.0.0.1", False),
        ("192.168.1.5", "127.0.0.1", False),
        ("[", "127.0.0.1", False),
        ("evil.example", "192.168.1.5", True),  # others are meant to reach it
        ("testserver", "testserver", True),
        ("anything", "/run/served.sock", True),
    ],
)
def test_names(host, address, fine):
    if fine:
        check_host(host, address, {"model.example"})
    else:
        with pytest.raises(Refused, match="expected a request to localhost, got one to") as caught:
            check_host(host, address, {"model.example"})
        assert caught.value.status == 421


@pytest.mark.parametrize(
    ("headers", "fine"),
    [
        ({}, True),  # no browser
        # Behind a proxy:
        ({"sec-fetch-site": "same-origin", "origin": "https://model.example", "host": "127.0.0.1:8000"}, True),
        ({"sec-fetch-site": "none"}, True),
        ({"sec-fetch-site": "cross-site"}, False),
        ({"sec-fetch-site": "same-site", "origin": "http://localhost:3000", "host": "localhost:8000"}, False),
        ({"sec-fetch-site": "Cross-Site"}, False),
        ({"origin": "http://localhost:8000", "host": "localhost:8000"}, True),  # a browser from before 2023
        ({"origin": "http://LOCALHOST:8000", "host": "localhost:8000"}, True),
        ({"origin": "http://localhost:3000", "host": "localhost:8000"}, False),
        ({"origin": "https://evil.example", "host": "localhost:8000"}, False),
        ({"origin": "null", "host": "localhost:8000"}, False),
        ({"origin": "null"}, False),
    ],
)
def test_pages(headers, fine):
    for method in ("GET", "HEAD", "OPTIONS"):
        check_site(method, headers)
    for method in ("POST", "PUT", "DELETE"):
        if fine:
            check_site(method, headers)
        else:
            with pytest.raises(Refused, match="own origin, got one from a page of") as caught:
                check_site(method, headers)
            assert caught.value.status == 403


def test_addresses():
    assert [is_loopback(one) for one in ("127.0.0.1", "::1", "10.0.0.1", "", "localhost")] == [True, True] + 3 * [False]
