"""Authentication: which client calls, by its bearer token or certificate, and what it may do."""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from tpengine.errors import ConfigError, PermissionDeniedError, UnauthenticatedError
from tpengine.logger import init_logger

logger = init_logger(__name__)

MIN_TOKEN_LENGTH = 16
"""Minimum length in characters; a shorter token can be guessed."""
ANONYMOUS = "anonymous"


@dataclass(frozen=True, slots=True)
class Client:
    """An authenticated caller.

    Attributes:
        name: the same for all calls with the same token or certificate; not a secret.
        may: its rights: "serve", or "serve" and "admin".
    """

    name: str
    may: frozenset[str] = frozenset({"serve"})

    def require_admin(self, what: str) -> None:
        """Refuses an operation that only the operator may run.

        Raises:
            PermissionDeniedError: the client did not send the admin token.
        """
        if "admin" not in self.may:
            raise PermissionDeniedError(
                f"{what} needs the admin token, which the server takes from --admin-token-file or "
                "TPENGINE_ADMIN_TOKEN; send it as metadata 'authorization: Bearer TOKEN'"
            )


class Authenticator:
    """Identifies clients by their tokens; keeps only digests of the tokens.

    Args:
        tokens: of ordinary clients; empty: no client needs a token.
        admin_tokens: of the operator; they allow everything.
    """

    def __init__(self, tokens: Iterable[str] = (), admin_tokens: Iterable[str] = ()) -> None:
        self._ordinary = [_digest(token) for token in tokens]
        self._admin = [_digest(token) for token in admin_tokens]

    @property
    def wants_token(self) -> bool:
        """Whether a call without a token is refused."""
        return bool(self._ordinary)

    def identify(self, headers: Sequence[str], certificate: str | None) -> Client:
        """The client that sent these credentials.

        Compares with every token in constant time: the time that a refusal takes tells nothing.

        Args:
            headers: all values of `authorization`.
            certificate: the name in the client's certificate, which TLS has verified.

        Raises:
            UnauthenticatedError: a token is needed and missing, or it is unknown.
        """
        if not headers or not (self._ordinary or self._admin):
            if self.wants_token:
                raise UnauthenticatedError(
                    "this server needs a token; send it as metadata 'authorization: Bearer TOKEN'"
                )
            return Client(ANONYMOUS if certificate is None else f"certificate {certificate}")
        scheme, _, token = headers[0].partition(" ")
        given = _digest(token.strip())
        is_ordinary = _holds(self._ordinary, given)
        is_admin = _holds(self._admin, given)
        if len(headers) > 1 or scheme.lower() != "bearer" or not (is_ordinary or is_admin):
            raise UnauthenticatedError(
                "the token is not one that this server knows; metadata must hold one "
                "'authorization: Bearer TOKEN'"
            )
        return Client(
            f"token {given.hex()[:12]}",
            frozenset({"serve", "admin"} if is_admin else {"serve"}),
        )


def read_tokens(file: str | None, variable: str | None, what: str) -> list[str]:
    """Reads tokens from a file, one per line, and from a value separated by commas.

    Args:
        file: path; None: no file.
        variable: value of an environment variable; None: not set.
        what: name of the option or variable, for messages.

    Raises:
        ConfigError: the file cannot be read or holds no token, or a token is too short or has
            other characters than printable ASCII.
    """
    tokens = [] if variable is None else [part.strip() for part in variable.split(",")]
    if file is not None:
        try:
            lines = Path(file).read_text(encoding="utf-8").splitlines()
            mode = Path(file).stat().st_mode
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"{what} {file} cannot be read: {error}") from error
        if mode & 0o077:
            logger.warning("%s %s can be read by others: chmod 600", what, file)
        tokens += [line.strip() for line in lines if line.strip() and not line.startswith("#")]
        if not tokens:
            raise ConfigError(f"{what} {file} holds no token; write one per line")
    for token in tokens:
        if len(token) < MIN_TOKEN_LENGTH or not all("!" <= char <= "~" for char in token):
            raise ConfigError(
                f"a token of {what} has {len(token)} characters; it must be at least "
                f"{MIN_TOKEN_LENGTH} printable ASCII characters without spaces, as from "
                "`openssl rand -hex 24`"
            )
    return tokens


def _digest(token: str) -> bytes:
    """SHA-256, so that all compared values have the same length."""
    return hashlib.sha256(token.encode("utf-8", "surrogateescape")).digest()


def _holds(known: Sequence[bytes], given: bytes) -> bool:
    found = 0
    for one in known:  # no early return: the time must not depend on the place of a match
        found |= hmac.compare_digest(one, given)
    return bool(found)
