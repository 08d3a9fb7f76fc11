"""Files of TLS certificates, read again when they change."""

from __future__ import annotations

import ssl
from dataclasses import dataclass
from pathlib import Path

from tpengine.errors import ConfigError
from tpengine.logger import init_logger

logger = init_logger(__name__)


@dataclass(frozen=True, slots=True)
class TlsFiles:
    """Paths of PEM files.

    Attributes:
        certificate: the server's certificate, followed by the chain to its authority.
        key: the private key of that certificate, without a passphrase.
        client_authority: certificate of the authority that signs the clients' certificates; None:
            clients need no certificate.
    """

    certificate: str
    key: str
    client_authority: str | None = None

    def paths(self) -> list[Path]:
        """All files that are given."""
        names = (self.certificate, self.key, self.client_authority)
        return [Path(name) for name in names if name is not None]


TlsContents = tuple[bytes, bytes, bytes | None]
"""Contents of the certificate, the key and the client authority, in PEM."""


class CertificateReloader:
    """The contents of certificate files, checked, and read again when a file changes.

    New files that cannot be used, for example while they are being written, change nothing: the
    old contents stay in use until the files are right.

    Attributes:
        contents: what is in use now.
    """

    def __init__(self, files: TlsFiles) -> None:
        """Reads the files.

        Raises:
            ConfigError: a file cannot be read, or key and certificate do not belong together.
        """
        self._files = files
        self._seen = self._stamps()
        self.contents = self._load()

    def reload(self) -> TlsContents | None:
        """The new contents if the files have changed since the last call and can be used; else
        None. Safe to call from any one thread at a time."""
        try:
            stamps = self._stamps()
            if stamps == self._seen:
                return None
            self._seen = stamps
            self.contents = self._load()
        except ConfigError as error:
            logger.warning("the certificates changed and the old ones stay in use: %s", error)
            return None
        logger.info("the certificates changed; new connections get %s", self._files.certificate)
        return self.contents

    def _stamps(self) -> list[tuple[int, int, int]]:
        stamps = []
        for path in self._files.paths():
            try:
                found = path.stat()
            except OSError as error:
                raise ConfigError(f"{path} cannot be read: {error}") from error
            stamps.append((found.st_mtime_ns, found.st_size, found.st_ino))
        return stamps

    def _load(self) -> TlsContents:
        files = self._files
        try:
            # The ssl module checks what gRPC would accept silently and fail on at each handshake.
            context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
            context.load_cert_chain(files.certificate, files.key, password=_no_passphrase)
            if files.client_authority is not None:
                context.load_verify_locations(files.client_authority)
            certificate, key, *authority = [path.read_bytes() for path in files.paths()]
        except (OSError, ssl.SSLError, ValueError) as error:
            names = ", ".join(str(path) for path in files.paths())
            raise ConfigError(
                f"{names} cannot be used for TLS: {error}; certificate and key must be PEM files "
                "that belong together, the key without a passphrase"
            ) from error
        return certificate, key, authority[0] if authority else None


def _no_passphrase() -> str:
    """Without this callback OpenSSL asks for a passphrase at the terminal."""
    raise ValueError("the key has a passphrase")
