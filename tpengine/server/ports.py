"""Whether a port can be had, found out before anything slow is done for it."""

from __future__ import annotations

import errno
import os
import socket

from tpengine.errors import ConfigError


def check_port(host: str, port: int, option: str = "--port") -> None:
    """Binds the port and lets it go again. gRPC would tell less: it swallows the system's error.

    Args:
        host: an address of this machine, or a name.
        port: 0 is any.
        option: which the user would change.

    Raises:
        ConfigError: the port is taken, or this process may not have it, or the address is none of
            this machine.
    """
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except (OSError, UnicodeError) as error:
        raise ConfigError(f"host = {host!r} is no address, and no known name: {error}") from error
    failures = [failure for family, *_, where in found if (failure := _bind(family, where))]
    # Of a name's addresses some may not be here (::1 without IPv6); none may be someone else's.
    absent = (errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT)
    refused = [failure for failure in failures if failure.errno not in absent]
    if refused or len(failures) == len(found):
        why = _explain((refused or failures)[0], port, option)
        raise ConfigError(f"cannot listen on {host}, port {port}: {why}")


def _bind(family: int, address: object) -> OSError | None:
    try:
        with socket.socket(family, socket.SOCK_STREAM) as one:
            # As gRPC does: what connections of a server before left behind does not matter.
            one.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            one.bind(address)  # type: ignore[arg-type]
    except OSError as error:
        return error
    return None


def _explain(error: OSError, port: int, option: str) -> str:
    if error.errno == errno.EADDRINUSE:
        return f"the port is taken by another process; choose another with {option}"
    if error.errno == errno.EACCES:
        return (
            f"permission denied: this user may not have port {port}; choose another with {option}"
        )
    if error.errno == errno.EADDRNOTAVAIL:
        return "the address is not one of this machine; choose another with --host"
    return os.strerror(error.errno or 0)
