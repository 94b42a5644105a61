"""Whether a request may come from a page that a browser shows: a page of somebody else may not ask a local server.

A browser sends what any page tells it to, to this machine too. It says so: by `Sec-Fetch-Site` and `Origin`, which no
page can change. A page may also give its own name the address of this machine; then `Host` has that name.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Collection, Mapping
from urllib.parse import urlsplit

from brainet_pl.serving.limits import Refused

READING = ("GET", "HEAD", "OPTIONS")  # they change nothing, and no page of another origin can read the answer


def check_host(host: str, address: str, allowed: Collection[str]) -> None:
    """Refuse a request by another name than this machine's, where it came over the loopback.

    Args:
        host: what the request calls the server, with or without a port; "" where it says nothing.
        address: of the server, on which the request came.
        allowed: further names of the server.
    """
    if not host or not is_loopback(address):
        return
    name = _name(host)
    if name != "localhost" and not name.endswith(".localhost") and not is_loopback(name) and name not in allowed:
        raise Refused(
            421,
            f"expected a request to localhost, got one to {host[:100]!r}: ask for localhost, or start the server with "
            "that name as --allow_host",
        )


def check_site(method: str, headers: Mapping[str, str]) -> None:
    """Refuse what a page of another origin makes a browser send."""
    if method in READING:
        return
    site, origin, host = (headers.get(name) for name in ("sec-fetch-site", "origin", "host"))
    if site is None:
        strange = origin is not None and (not host or origin.partition("://")[2].lower() != host.lower())
    else:
        strange = site.lower() not in ("same-origin", "none")
    if strange:
        raise Refused(
            403,
            f"expected a request of this server's own origin, got one from a page of {(origin or 'another')[:100]!r}: "
            "let a proxy serve the page and the model from one origin",
        )


def is_loopback(name: str) -> bool:
    """Whether it is an address by which a machine reaches itself."""
    try:
        address = ipaddress.ip_address(name)
    except ValueError:
        return False
    mapped = getattr(address, "ipv4_mapped", None)
    return (mapped or address).is_loopback


def _name(host: str) -> str:
    """A host without its port, in small letters; "" where it is none."""
    try:
        return urlsplit(f"//{host}").hostname or ""
    except ValueError:
        return ""
