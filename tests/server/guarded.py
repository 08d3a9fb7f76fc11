"""Servers without an engine, in this process: the guard needs no engine."""

from __future__ import annotations

import asyncio
import shutil
import threading
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from support.programs import run_program
from support.system_packages import require

from tpengine.server.auth import Authenticator, CertificateReloader
from tpengine.server.grpc.server import GrpcServer
from tpengine.server.limits import Limits
from tpengine.server.state import ServerState

WAIT_S = 60.0
Run = Callable[[Coroutine[Any, Any, Any]], Any]


@contextmanager
def loop_on_a_thread() -> Iterator[Run]:
    """A function that runs a coroutine on the loop of another thread, and waits for its result."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()
    try:
        yield lambda work: asyncio.run_coroutine_threadsafe(work, loop).result(WAIT_S)
    finally:
        loop.call_soon_threadsafe(loop.stop)
        thread.join(WAIT_S)
        assert not thread.is_alive()
        loop.close()


class TlsFiles(NamedTuple):
    """Paths of PEM files, as `CertificateReloader` takes them."""

    certificate: str
    key: str
    client_authority: str | None = None

    def install(self, target: TlsFiles) -> None:
        """Takes the places of the key and the certificate of a server that runs."""
        shutil.copy(self.key, target.key)
        shutil.copy(self.certificate, target.certificate)


@contextmanager
def following(run: Run, files: TlsFiles | None) -> Iterator[CertificateReloader | None]:
    """The certificates in these files, which the loop follows meanwhile."""
    if files is None:
        yield None
        return
    certificates = CertificateReloader(*files)

    async def begin() -> asyncio.Task[Any]:
        return asyncio.create_task(certificates.follow())

    async def end() -> None:
        task.cancel()
        await asyncio.wait([task])

    task = run(begin())
    try:
        yield certificates
    finally:
        run(end())


@contextmanager
def guarded_server(
    authenticator: Authenticator | None = None,
    tls: TlsFiles | None = None,
    limits: Limits | None = None,
    address: str = "127.0.0.1:0",
) -> Iterator[str]:
    """A server that never leaves loading, on a loop of its own; yields HOST:PORT."""

    async def start(certificates: CertificateReloader | None) -> tuple[GrpcServer, int]:
        state = ServerState(["none"], 1.0, limits=limits or Limits())
        server = GrpcServer(state, authenticator or Authenticator())
        return server, await server.start(address, certificates)

    with loop_on_a_thread() as run, following(run, tls) as certificates:
        server, port = run(start(certificates))
        try:
            yield f"127.0.0.1:{port}"
        finally:
            run(server.close(0))


@dataclass(frozen=True)
class Authority:
    """Signs certificates with the openssl command."""

    folder: Path

    @property
    def certificate(self) -> Path:
        """Certificate of the authority."""
        return self.folder / "ca.pem"

    @classmethod
    def make(cls, folder: Path, name: str = "ca") -> Authority:
        folder.mkdir(parents=True, exist_ok=True)
        _openssl(
            *("req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes"),
            *("-subj", f"/CN={name}", "-days", "2"),
            *("-keyout", str(folder / "ca.key"), "-out", str(folder / "ca.pem")),
        )
        return cls(folder)

    def sign(self, name: str, target: Path, days: int = 2) -> TlsFiles:
        """A new key and certificate for a name and for 127.0.0.1."""
        target.mkdir(parents=True, exist_ok=True)
        key, request, certificate = (target / f"{name}.{end}" for end in ("key", "csr", "pem"))
        _openssl(
            *("req", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes"),
            *("-subj", f"/CN={name}", "-keyout", str(key), "-out", str(request)),
        )
        names = target / "names"
        names.write_text("subjectAltName=IP:127.0.0.1,DNS:localhost")
        _openssl(
            *("x509", "-req", "-in", str(request), "-CA", str(self.certificate)),
            *("-CAkey", str(self.folder / "ca.key"), "-CAcreateserial", "-days", str(days)),
            *("-extfile", str(names), "-out", str(certificate)),
        )
        return TlsFiles(str(certificate), str(key))


def _openssl(*arguments: str) -> None:
    run_program(require("openssl", "openssl"), *arguments)
