"""Who calls: bearer tokens, certificates, and what each may do."""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tpengine.errors import ConfigError, PermissionDeniedError, UnauthenticatedError
from tpengine.logger import init_logger

logger = init_logger(__name__)

MIN_TOKEN_LENGTH = 16
"""Characters below which a token is guessed sooner or later."""
ANONYMOUS = "anonymous"


@dataclass(frozen=True, slots=True)
class Client:
    """Somebody who calls.

    Attributes:
        name: the same for all calls with the same token or certificate; no secret.
        may: what it is allowed besides its own requests: "serve", or "serve" and "admin".
    """

    name: str
    may: frozenset[str] = frozenset({"serve"})

    def require_admin(self, what: str) -> None:
        """Refuses what only the operator may do.

        Raises:
            PermissionDeniedError: the client did not show the admin token.
        """
        if "admin" not in self.may:
            raise PermissionDeniedError(
                f"{what} wants the admin token, which the server takes from --admin-token-file or "
                "TPENGINE_ADMIN_TOKEN; send it as metadata 'authorization: Bearer TOKEN'"
            )


class Authenticator:
    """Tells clients apart by their tokens; holds digests only.

    Args:
        tokens: those of ordinary clients; none: nobody needs one.
        admin_tokens: those that may do everything.
    """

    def __init__(self, tokens: Iterable[str] = (), admin_tokens: Iterable[str] = ()) -> None:
        self._ordinary = [_digest(token) for token in tokens]
        self._admin = [_digest(token) for token in admin_tokens]

    @property
    def wants_token(self) -> bool:
        """Whether a call without a token is refused."""
        return bool(self._ordinary)

    def identify_call(self, context: Any) -> Client:
        """The client that makes a call, by what gRPC knows of it.

        Raises:
            UnauthenticatedError: as `identify`.
        """
        metadata = context.invocation_metadata() or ()
        headers = [str(value) for name, value in metadata if name == "authorization"]
        return self.identify(headers, _certificate_name(context.auth_context()))

    def identify(self, headers: Sequence[str], certificate: str | None) -> Client:
        """The client that sent these.

        Every token is compared, each in constant time: how long a refusal takes tells nothing.

        Args:
            headers: all values of `authorization`.
            certificate: the name in the client's certificate, which TLS has verified.

        Raises:
            UnauthenticatedError: a token is wanted and there is none, or not one that is known.
        """
        if not headers or not (self._ordinary or self._admin):
            if self.wants_token:
                raise UnauthenticatedError(
                    "this server wants a token; send it as metadata 'authorization: Bearer TOKEN'"
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


def _certificate_name(peer: Mapping[str, Sequence[bytes]]) -> str | None:
    """Tells certificates apart: by their names, or where they have none, by their bytes.

    Args:
        peer: what TLS has verified, as gRPC gives it.
    """
    for kind, label in (("x509_common_name", ""), ("x509_subject_alternative_name", "for ")):
        names = sorted(name.decode("utf-8", "replace") for name in peer.get(kind, ()) if name)
        if names:
            return label + ", ".join(names)
    pem = b"".join(peer.get("x509_pem_cert", ()))
    return f"sha256 {hashlib.sha256(pem).hexdigest()[:32]}" if pem else None


def read_tokens(file: str | None, variable: str | None, what: str) -> list[str]:
    """Tokens of a file, one per line, and of an environment variable, separated by commas.

    Args:
        variable: the value, or None.
        what: the option or variable, for messages.

    Raises:
        ConfigError: the file cannot be read or holds none, or a token cannot be one.
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
    """Digests are of equal length, whatever the tokens are."""
    return hashlib.sha256(token.encode("utf-8", "surrogateescape")).digest()


def _holds(known: Sequence[bytes], given: bytes) -> bool:
    found = 0
    for one in known:
        found |= hmac.compare_digest(one, given)
    return bool(found)
