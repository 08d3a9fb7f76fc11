"""From the URL of a picture to the bytes of its file.

A server that fetches what clients name can be sent to addresses that only it reaches. So hosts are
refused unless the operator has listed them, and their addresses unless the whole internet has them.
"""

from __future__ import annotations

import base64
import binascii
import contextlib
import http.client
import io
import ipaddress
import re
import socket
import ssl
import time
import urllib.parse
from collections.abc import Sequence
from functools import partial
from typing import Any

from tpengine import host as process
from tpengine.errors import InvalidPictureError
from tpengine.logger import init_logger
from tpengine.pictures.picture import PictureLimits

logger = init_logger(__name__)

_SHOWN = 80
_PORTS = {"http": 80, "https": 443}
_CONNECTIONS = {"http": http.client.HTTPConnection, "https": http.client.HTTPSConnection}
_CHUNK_BYTES = 1 << 16
_UNICAST = ipaddress.ip_network("2000::/3")
_CARRIES_IPV4 = ipaddress.ip_network("2002::/16")  # 6to4
_PATH_CHARACTERS = "%/:=&?~#+!$,;'@()*[]"


def read_source(url: str, limits: PictureLimits, allowed_hosts: Sequence[str]) -> bytes:
    """Returns the bytes of a picture's file, which may hold anything.

    `data:image/...;base64,` holds them itself. `http:` and `https:` are fetched, without redirects,
    proxies and compression, within `limits.timeout_s` in all. The host is resolved once, and every
    address of it must be a public one.

    Args:
        allowed_hosts: what may be fetched: `name`, or `*.name` for all names below it, at ports 80
            and 443; `name:port` at that port. A listed address, as in `127.0.0.1:8000`, is not
            checked: the operator vouches for it. Empty: nothing.

    Raises:
        InvalidPictureError: it is another kind of URL, not allowed, too large, or not answered.
    """
    scheme = url[:_SHOWN].lstrip().partition(":")[0].lower()
    if scheme == "data":
        return _read_data(url, limits)
    if scheme not in _PORTS:
        text = "a picture's URL begins with data:image/, https:// or http://"
        text = f"{text}, not with {url[:_SHOWN]!r}"
        raise InvalidPictureError(f"{text}; send a file as its bytes, or in a data: URL")
    try:
        return _fetch(url.strip(), limits, allowed_hosts)
    except InvalidPictureError as error:
        why = f" ({error.__cause__!r:.200})" if error.__cause__ else ""
        logger.info("a picture was not fetched: %s%s", error, why)  # callers do not get the cause
        raise


def _read_data(url: str, limits: PictureLimits) -> bytes:
    head, _, body = url.partition(",")
    kind, *parameters = (part.strip().lower() for part in head.partition(":")[2].split(";"))
    if not kind.startswith("image/") or parameters[-1:] != ["base64"]:
        raise InvalidPictureError("a picture's data: URL begins with data:image/TYPE;base64,")
    if "%" in body:
        body = urllib.parse.unquote(body, "latin-1")
    body = "".join(body.split()).rstrip("=")
    limits.check_bytes(len(body) * 3 // 4)
    try:
        return base64.b64decode(body + "=" * (-len(body) % 4), validate=True)
    except (binascii.Error, ValueError) as error:
        raise InvalidPictureError("the picture's data: URL holds no valid base64") from error


def _fetch(url: str, limits: PictureLimits, allowed_hosts: Sequence[str]) -> bytes:
    deadline = time.monotonic() + limits.timeout_s
    shown = f"the picture {re.split('[?#]', url, maxsplit=1)[0][:_SHOWN]!r}"  # no secrets
    try:
        parts = urllib.parse.urlsplit(url)
        host, port = (parts.hostname or "").rstrip("."), parts.port or _PORTS[parts.scheme]
    except ValueError as error:
        raise InvalidPictureError("the picture's URL is not valid") from error
    if parts.username is not None or parts.password is not None:
        raise InvalidPictureError("the picture's URL holds a user's name; leave it out")
    if not _is_allowed(host, port, allowed_hosts):
        text = f"{shown} is at a host or port that is not fetched from"
        hint = "send the picture itself, in a data: URL, or have allowed_media_hosts name the host"
        raise InvalidPictureError(f"{text}; {hint}")
    path = urllib.parse.quote(parts.path or "/", _PATH_CHARACTERS)
    query = urllib.parse.quote(parts.query, _PATH_CHARACTERS)
    try:
        with contextlib.ExitStack() as links:
            link = links.enter_context(_connect(host, port, deadline))
            if parts.scheme == "https":
                link.settimeout(_left_s(deadline))
                context = ssl.create_default_context()
                link = links.enter_context(context.wrap_socket(link, server_hostname=host))
            connection = _CONNECTIONS[parts.scheme](host, port)
            connection.sock = _Timed(link, deadline)
            connection.request("GET", f"{path}?{query}" if query else path)
            return _read_answer(connection.getresponse(), shown, limits)
    except InvalidPictureError:
        raise
    except (OSError, http.client.HTTPException, ValueError) as error:
        reason = f" within {limits.timeout_s:g} s" if isinstance(error, TimeoutError) else ""
        text = f"{shown} could not be fetched{reason}; send the picture itself, in a data: URL"
        raise InvalidPictureError(text) from error


def _is_allowed(host: str, port: int, allowed_hosts: Sequence[str]) -> bool:
    """Whether an entry names the host, and the port unless that is a usual one."""
    for entry in allowed_hosts:
        listed = urllib.parse.urlsplit(f"//{entry}")
        name = (listed.hostname or "").rstrip(".")
        is_named = host.endswith(name[1:]) if name.startswith("*.") else host == name
        ports = _PORTS.values() if listed.port is None else (listed.port,)
        if host and is_named and port in ports:
            return True
    return False


def _connect(host: str, port: int, deadline: float) -> socket.socket:
    """A connection to one of the host's addresses, after all of them were checked.

    Raises:
        OSError: it has none, one of them is not public, or none answers in time.
    """
    addresses = _addresses(host, port, deadline)
    for address in addresses[:-1]:
        with contextlib.suppress(OSError):
            return socket.create_connection((address, port), _left_s(deadline))
    return socket.create_connection((addresses[-1], port), _left_s(deadline))


def _addresses(host: str, port: int, deadline: float) -> list[str]:
    """The addresses of a host, at least one; see `_connect`."""
    with contextlib.suppress(ValueError):
        return [str(ipaddress.ip_address(host))]  # the operator has listed it
    # In a thread, since the C library's resolver has no bound of ours.
    resolve = partial(socket.getaddrinfo, host, port, type=socket.SOCK_STREAM)
    places = process.run_in_thread(resolve, "tpengine-resolver").result(_left_s(deadline))
    addresses = list(dict.fromkeys(str(place[0]) for *_, place in places))
    if not addresses or not all(map(_is_public, addresses)):
        raise OSError("an address of the host is not public")
    return addresses


def _is_public(text: str) -> bool:
    """Whether an address is one of a single machine that the whole internet may reach, itself and
    not by a translation of IPv4."""
    address = ipaddress.ip_address(text)
    if isinstance(address, ipaddress.IPv6Address) and (
        address not in _UNICAST or address in _CARRIES_IPV4
    ):
        return False
    return address.is_global and not address.is_multicast and not address.is_reserved


def _left_s(deadline: float) -> float:
    left_s = deadline - time.monotonic()
    if left_s <= 0:
        raise TimeoutError("the time is over")
    return left_s


class _Timed(io.RawIOBase):
    """A connection as `http.client` uses one. All of it together has a deadline; a socket's own
    timeout begins anew with each byte. `http.client` closes it before it has read the answer."""

    def __init__(self, link: socket.socket, deadline: float) -> None:
        self._link, self._deadline = link, deadline

    def makefile(self, mode: str) -> io.BufferedReader:
        return io.BufferedReader(self)

    def close(self) -> None:
        pass

    def sendall(self, data: bytes) -> None:
        self._link.settimeout(_left_s(self._deadline))
        self._link.sendall(data)

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        self._link.settimeout(_left_s(self._deadline))
        return self._link.recv_into(buffer)


def _read_answer(answer: http.client.HTTPResponse, shown: str, limits: PictureLimits) -> bytes:
    if answer.status != http.HTTPStatus.OK:
        text = f"{shown} was answered with status {answer.status}"
        raise InvalidPictureError(f"{text}; redirects are not followed, only 200 is taken")
    if answer.getheader("Content-Encoding", "identity").lower() != "identity":
        raise InvalidPictureError(f"{shown} was sent compressed, which was not asked for")
    limits.check_bytes(answer.length or 0)
    data = bytearray()
    while chunk := answer.read(_CHUNK_BYTES):
        data += chunk
        limits.check_bytes(len(data))
    if answer.length:
        raise OSError("the body is shorter than its header says")
    return bytes(data)
