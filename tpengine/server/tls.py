"""Certificates, read again when their files change."""

from __future__ import annotations

import ssl
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc

from tpengine.errors import ConfigError
from tpengine.logger import init_logger

logger = init_logger(__name__)


@dataclass(frozen=True, slots=True)
class TlsFiles:
    """PEM files.

    Attributes:
        certificate: the server's, with the chain to its authority.
        key: of that certificate, without a passphrase.
        client_authority: who signs clients' certificates; None: clients need none.
    """

    certificate: str
    key: str
    client_authority: str | None = None

    def paths(self) -> list[Path]:
        """All files that there are."""
        names = (self.certificate, self.key, self.client_authority)
        return [Path(name) for name in names if name is not None]


class CertificateReloader:
    """Server credentials that follow their files.

    At each handshake the files' times are looked at. New ones that cannot be used, as while they
    are written, change nothing: the old ones stay until the files are right.
    """

    def __init__(self, files: TlsFiles) -> None:
        """Reads the files.

        Raises:
            ConfigError: a file cannot be read, or key and certificate do not belong together.
        """
        self._files = files
        self._seen = self._stamps()
        self._configuration = self._load()

    def credentials(self) -> Any:
        """Credentials for a port."""
        return grpc.dynamic_ssl_server_credentials(
            self._configuration,
            self._fetch,
            require_client_authentication=self._files.client_authority is not None,
        )

    def _fetch(self) -> Any:
        """Called by grpc at every handshake, on a thread of its own; None: nothing new."""
        try:
            stamps = self._stamps()
            if stamps == self._seen:
                return None
            self._seen = stamps
            self._configuration = self._load()
        except ConfigError as error:
            logger.warning("the certificates changed and the old ones stay in use: %s", error)
            return None
        logger.info("the certificates changed; new connections get %s", self._files.certificate)
        return self._configuration

    def _stamps(self) -> list[tuple[int, int, int]]:
        stamps = []
        for path in self._files.paths():
            try:
                found = path.stat()
            except OSError as error:
                raise ConfigError(f"{path} cannot be read: {error}") from error
            stamps.append((found.st_mtime_ns, found.st_size, found.st_ino))
        return stamps

    def _load(self) -> Any:
        files = self._files
        try:
            context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
            context.load_cert_chain(files.certificate, files.key, password=_no_passphrase)
            if files.client_authority is not None:
                context.load_verify_locations(files.client_authority)
            contents = [path.read_bytes() for path in files.paths()]
        except (OSError, ssl.SSLError, ValueError) as error:
            names = ", ".join(str(path) for path in files.paths())
            raise ConfigError(
                f"{names} cannot be used for TLS: {error}; certificate and key must be PEM files "
                "that belong together, the key without a passphrase"
            ) from error
        authority = contents[2] if files.client_authority is not None else None
        return grpc.ssl_server_certificate_configuration(
            [(contents[1], contents[0])], root_certificates=authority
        )


def _no_passphrase() -> str:
    """OpenSSL would ask at the terminal otherwise."""
    raise ValueError("the key has a passphrase")
