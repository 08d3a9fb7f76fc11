"""Authentication: which client calls, by its bearer token or certificate, and what it may do.

The server's own certificates are read again when their files change.
"""

from __future__ import annotations

import _ssl
import asyncio
import contextlib
import hashlib
import hmac
import ipaddress
import math
import ssl
import time
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NoReturn
from urllib.parse import urlsplit

from tpengine.errors import ConfigError, PermissionDeniedError, UnauthenticatedError
from tpengine.inputs import Owner
from tpengine.logger import init_logger

logger = init_logger(__name__)


TlsContents = tuple[bytes, bytes, bytes | None]
"""Contents of the certificate, the key and the client authority, in PEM."""
Terms = Sequence[tuple[str, float, float]]
"""Certificate files, each with the seconds since 1970 from and to which it is valid."""
_POLL_S, _DAY_S, _WEEK_S = 1.0, 86_400.0, 7 * 86_400.0


class CertificateReloader:
    """The contents of certificate files, checked, and read again when a file changes.

    New files that cannot be used, for example while they are being written, change nothing: the
    old contents stay in use until the files are right. So do they if clients accept them and would
    not accept the new ones, because of their dates.

    Args:
        certificate: path of the PEM file of the server's certificate, followed by the chain to its
            authority.
        key: path of its private key, without a passphrase.
        client_authority: path of the certificate of the authority that signs the clients'
            certificates; None: clients need no certificate.

    Attributes:
        contents: what is in use now.
        context: the same for the ssl module, anew for each contents. It resumes no sessions by
            tickets, which would outlive an authority.
    """

    def __init__(self, certificate: str, key: str, client_authority: str | None = None) -> None:
        """Reads the files, and warns of dates in the past or soon.

        Raises:
            ConfigError: a file cannot be read, or key and certificate do not belong together.
        """
        self._certificate, self._key, self._authority = certificate, key, client_authority
        self.contents: TlsContents = (b"", b"", None)
        self._terms: Terms = ()
        self._refusal = ""
        self._load()
        self._warn()

    async def follow(self) -> NoReturn:
        """Looks at the files again and again, on a thread: their disk may not answer."""
        while True:
            await asyncio.sleep(_POLL_S)
            await asyncio.to_thread(self.reload)

    def reload(self) -> None:
        """Takes new contents if the files have changed and can be used; warns once a day."""
        try:
            are_new = self._load()
        except ConfigError as error:
            if str(error) != self._refusal:
                self._refusal = str(error)
                logger.warning("the certificates changed; the old ones stay in use: %s", error)
            return
        self._refusal = ""
        if are_new:
            logger.info("the certificates changed; new connections get %s", self._certificate)
        if are_new or time.monotonic() > self._warned_at + _DAY_S:
            self._warn()

    def _warn(self) -> None:
        self._warned_at = time.monotonic()
        problem = _date_problem(self._terms, ahead_s=_WEEK_S)
        if problem:
            logger.warning("%s, and clients refuse it at other times: renew it", problem)

    def _load(self) -> bool:
        """Takes what is in the files; returns whether it is new.

        Raises:
            ConfigError: it cannot be used, or clients would not accept it, and accept what is in
                use.
        """
        paths = (self._certificate, self._key, self._authority)
        names = [path for path in paths if path is not None]
        try:
            parts = [Path(name).read_bytes() for name in names]
            certificate, key, *authority = parts
            contents = certificate, key, authority[0] if authority else None
            if contents == self.contents:
                return False
            # The ssl module checks what gRPC would accept silently and fail on at each handshake.
            context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
            context.load_cert_chain(self._certificate, self._key, password=_no_passphrase)
            context.options |= ssl.OP_NO_TICKET
            context.num_tickets = 0
            if self._authority is not None:
                context.verify_mode = ssl.CERT_REQUIRED
                context.load_verify_locations(self._authority)
            terms = [_term(name) for name in (self._certificate, self._authority) if name]
            if parts != [Path(name).read_bytes() for name in names]:
                raise ValueError("they changed while they were read")
        except (OSError, ssl.SSLError, ValueError) as error:
            raise ConfigError(
                f"{', '.join(names)} cannot be used for TLS: {error}; certificate and key must be "
                "PEM files that belong together, the key without a passphrase"
            ) from error
        problem = _date_problem(terms)
        if problem and self._terms and not _date_problem(self._terms):
            raise ConfigError(problem)
        self.contents, self.context, self._terms = contents, context, terms
        return True


def _term(path: str) -> tuple[str, float, float]:
    """The term of the first certificate in a file."""
    fields = _ssl._test_decode_cert(path)  # type: ignore[attr-defined]  # nothing public does it
    begin, end = (ssl.cert_time_to_seconds(fields[name]) for name in ("notBefore", "notAfter"))
    return path, begin, end


def _date_problem(terms: Terms, ahead_s: float = 0.0) -> str:
    """What is wrong with the dates of certificates, now or some seconds later; empty: nothing."""
    now = time.time()
    for path, begin, end in terms:
        if not begin <= now <= end - ahead_s:
            first, last = (datetime.fromtimestamp(moment, UTC) for moment in (begin, end))
            return f"{path} is valid from {first:%Y-%m-%d %H:%M} to {last:%Y-%m-%d %H:%M} UTC"
    return ""


def _no_passphrase() -> str:
    """Without this callback OpenSSL asks for a passphrase at the terminal."""
    raise ValueError("the key has a passphrase")


def certificate_name(tls: ssl.SSLObject) -> str | None:
    """`name_of` the client's certificate of a connection, which TLS has verified; None: the client
    has none."""
    der = tls.getpeercert(binary_form=True)
    if der is None:
        return None
    cert: Any = tls.getpeercert() or {}
    pairs = (pair for part in cert.get("subject", ()) for pair in part)
    common = [value for kind, value in pairs if kind == "commonName"]
    others = [value for _, value in cert.get("subjectAltName", ())]
    return name_of(common, others, ssl.DER_cert_to_PEM_cert(der).encode())


def name_of(common: Sequence[str], others: Sequence[str], pem: bytes) -> str | None:
    """A name that differs between certificates: their own, or without one, a digest.

    Args:
        common: the common names.
        others: the alternative names.
        pem: the certificate; empty: there is none.
    """
    for names, label in ((common, ""), (others, "for ")):
        nonempty = sorted(name for name in names if name)
        if nonempty:
            return label + ", ".join(nonempty)
    return f"sha256 {hashlib.sha256(pem).hexdigest()[:32]}" if pem else None


def is_own_host(host: str, names: Collection[str]) -> bool:
    """Whether the header Host of a call names this server: by an address, by localhost, or by one
    of these names; "*": all.

    A browser sends the name under which it has loaded a page. The owner of that name can let it
    lead to 127.0.0.1 afterwards (DNS rebinding): then the page may read what servers there answer.
    """
    if "*" in names:
        return True
    try:
        name = (urlsplit(f"//{host}").hostname or "").rstrip(".")
    except ValueError:
        return False
    with contextlib.suppress(ValueError):
        ipaddress.ip_address(name)
        return True
    return f".{name}".endswith((".", ".localhost")) or name in names


def wrong_host(host: str) -> str:
    """The text for a client whose header Host does not name this server."""
    hint = "call it by its address, or start it with --allowed-hosts"
    return f"this server is not called {host[:200]!r}; {hint}"


MIN_TOKEN_LENGTH = 16
"""Minimum length in characters; a shorter token can be guessed."""
MAX_WEIGHT = 1000.0
ANONYMOUS = "anonymous"
_FORM = "'authorization: Bearer TOKEN'"


@dataclass(frozen=True, slots=True)
class Client:
    """An authenticated caller.

    Attributes:
        owner: of its requests. The name is the same for all calls with the same token or
            certificate, and not a secret. The account is a token, a certificate or an address, by
            its kind and a digest. The weight is that of the token.
        is_admin: whether it is the operator, who may do everything.
    """

    owner: Owner
    is_admin: bool = False

    def require_admin(self, what: str) -> None:
        """Refuses an operation that only the operator may run.

        Raises:
            PermissionDeniedError: the client did not send the admin token.
        """
        if not self.is_admin:
            sources = "--admin-token-file or TPENGINE_ADMIN_TOKEN"
            text = f"{what} needs the admin token, which the server takes from {sources}"
            raise PermissionDeniedError(f"{text}; send {_FORM}")


@dataclass(slots=True)
class Call:
    """A call of a client, at any door.

    Attributes:
        request_id: over gRPC made by the server, for requests without an id and for the log; over
            HTTP the client's x-request-id, or one that the server has made. Other calls may have it
            too.
        client: who calls; anonymous in calls of health, which need no token.
        deadline: moment of `time.monotonic`; None: none.
        message: its only message, or the JSON object of its body; None until it is read, and in
            calls with many.
    """

    request_id: str
    client: Client = Client(Owner(ANONYMOUS))  # frozen
    deadline: float | None = None
    message: Any = None


class Authenticator:
    """Identifies clients by their tokens; keeps only digests of the tokens.

    Args:
        tokens: of ordinary clients, with their weights if they have any; empty: no client needs a
            token.
        admin_tokens: of the operator; they allow everything.
    """

    def __init__(self, tokens: Iterable[str] = (), admin_tokens: Iterable[str] = ()) -> None:
        self._ordinary = [_digest(token) for token in tokens]
        self._admin = [_digest(token) for token in admin_tokens]
        tables = [table for table in (tokens, admin_tokens) if isinstance(table, Mapping)]
        self._weights = {_digest(key): weight for table in tables for key, weight in table.items()}

    @property
    def wants_token(self) -> bool:
        """Whether a call without a token is refused."""
        return bool(self._ordinary)

    @property
    def has_weights(self) -> bool:
        """Whether a token has another weight than 1."""
        return any(weight != 1 for weight in self._weights.values())

    def identify(self, headers: Sequence[str], cert: str | None, address: str = "") -> Client:
        """The client that sent these credentials.

        Compares with every token in constant time: the time that a refusal takes tells nothing.

        Args:
            headers: all values of `authorization`.
            cert: the name in the client's certificate, which TLS has verified.
            address: of the client's machine, by which clients without a name share the engine.

        Raises:
            UnauthenticatedError: a token is needed and missing, or it is unknown.
        """
        if not headers or not (self._ordinary or self._admin):
            if self.wants_token:
                raise UnauthenticatedError(f"this server needs a token; send {_FORM}")
            if cert is None:
                return Client(Owner(ANONYMOUS, f"address {_digest(address).hex()[:12]}"))
            account = f"certificate {_digest(cert).hex()[:12]}"
            return Client(Owner(f"certificate {cert}", account))
        scheme, _, token = headers[0].partition(" ")
        digest = _digest(token.strip())
        # Each is compared with all: the time must not depend on the place of a match.
        is_ordinary = sum(hmac.compare_digest(token, digest) for token in self._ordinary) > 0
        is_admin = sum(hmac.compare_digest(token, digest) for token in self._admin) > 0
        if len(headers) > 1 or scheme.lower() != "bearer" or not (is_ordinary or is_admin):
            text = f"the token is not one that this server knows; send one {_FORM}"
            raise UnauthenticatedError(text)
        name = f"token {digest.hex()[:12]}"
        return Client(Owner(name, name, self._weights.get(digest, 1.0)), is_admin)


def read_tokens(file: str | None, variable: str | None, what: str) -> dict[str, float]:
    """Reads tokens from a file, one per line, and from a value separated by commas. After a token
    its weight may follow, which is 1 without.

    Args:
        file: path; None: no file.
        variable: value of an environment variable; None: not set.
        what: name of the option or variable, for messages.

    Raises:
        ConfigError: the file cannot be read or holds no token, or a token is too short or has
            other characters than printable ASCII, or stands there twice, or a weight is out of its
            range.
    """
    entries: list[tuple[str, str]] = []
    if variable is not None:
        entries = [(what, part) for part in variable.split(",")]
    if file is not None:
        try:
            lines = Path(file).read_text(encoding="utf-8").splitlines()
            mode = Path(file).stat().st_mode
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"{what} {file} cannot be read: {error}") from error
        if mode & 0o077:
            logger.warning("%s %s can be read by others: chmod 600", what, file)
        for number, line in enumerate(lines, start=1):
            if line.strip() and not line.startswith("#"):
                entries.append((f"{what}, file {file}, line {number},", line))
        if not entries:
            raise ConfigError(f"{what} {file} holds no token; write one per line")
    tokens: dict[str, float] = {}
    for place, text in entries:
        token, weight = _read_token(place, text)
        if token in tokens:
            raise ConfigError(f"a token of {place} was given before; leave one of the two out")
        tokens[token] = weight
    return tokens


def _read_token(place: str, text: str) -> tuple[str, float]:
    """A token and its weight.

    Args:
        place: where the text stands, for messages, which never hold the token.
    """
    token, _, weight = " ".join(text.split()).partition(" ")
    if len(token) < MIN_TOKEN_LENGTH or not all("!" <= char <= "~" for char in token):
        raise ConfigError(
            f"a token of {place} has {len(token)} characters; it must be at least "
            f"{MIN_TOKEN_LENGTH} printable ASCII characters without spaces, as from "
            "`openssl rand -hex 24`"
        )
    try:
        number = float(weight or 1)
    except ValueError:
        number = math.nan
    if not 1 / MAX_WEIGHT <= number <= MAX_WEIGHT:
        shown = repr(weight[:20]) if len(weight) < MIN_TOKEN_LENGTH else f"{len(weight)} characters"
        raise ConfigError(
            f"the weight of a token of {place} must be a number in [{1 / MAX_WEIGHT:g}, "
            f"{MAX_WEIGHT:g}], got {shown}; write 'TOKEN WEIGHT' on a line, or 'TOKEN' alone"
        )
    return token, number


def _digest(token: str) -> bytes:
    """SHA-256, so that all compared values have the same length."""
    return hashlib.sha256(token.encode("utf-8", "surrogateescape")).digest()
