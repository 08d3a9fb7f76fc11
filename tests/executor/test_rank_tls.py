"""Channels over TLS, and ends that have no certificate, or another authority's."""

from __future__ import annotations

import resource
import shutil
import socket
import ssl
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import pytest
from server.guarded import Authority, TlsFiles
from support.engines import complete, greedy, ids, outputs_of
from support.patches import limited

from executor.channels import EPOCH, SECRET, TIMEOUT_S, check_frames, open_channels, receive
from executor.ray_engines import ray_engine
from tpengine.errors import ConfigError, is_shortage, is_temporary
from tpengine.executor import channel as wire
from tpengine.executor.rank_tls import check_at_start

SHORT_S = 1.0
Use = Callable[[str], Path]


@pytest.fixture
def use(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Use:
    """Has this process take a certificate of an authority, which is made when it is first named."""

    def use(name: str) -> Path:
        folder = tmp_path / name
        if not folder.exists():
            authority = Authority.make(tmp_path / f"authority-{name}")
            target = TlsFiles(str(folder / "tls.crt"), str(folder / "tls.key"))
            authority.sign("rank", folder).install(target)
            shutil.copy(authority.certificate, folder / "ca.crt")
        monkeypatch.setenv("TPENGINE_RANK_TLS", str(folder))
        return folder

    return use


def test_frames_go_both_ways_at_once(use: Use) -> None:
    use("ours")
    with open_channels(1) as ([driver], [rank]):
        check_frames(driver, rank)
        assert driver.take() is None
        rank.close()
        with pytest.raises(wire.ChannelClosedError):
            receive(driver, TIMEOUT_S)


@contextmanager
def refusing_driver() -> Iterator[wire.Listener]:
    """It must accept no rank while the caller uses it; then it must accept one of ours."""
    listener = wire.Listener("127.0.0.1", SECRET, EPOCH)
    with ThreadPoolExecutor(1) as pool:
        accepted = pool.submit(listener.accept, 1, TIMEOUT_S)
        try:
            yield listener
            assert not accepted.done()
        finally:
            wire.connect(listener.address, SECRET, 0, EPOCH, TIMEOUT_S).close()
        for channel in accepted.result(TIMEOUT_S):
            channel.close()
    listener.close()


@pytest.mark.parametrize(("name", "why"), [("", ""), ("strangers", "certificate verify failed")])
def test_ends_without_our_certificate(
    use: Use, name: str, why: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """They know the secret and are refused; the next one is not. A stranger refuses the driver,
    before the driver can refuse it."""
    use("ours")
    theirs = use(name) if name else None

    def folder() -> Path | None:
        return theirs if threading.current_thread().name.startswith("theirs") else tmp_path / "ours"

    monkeypatch.setattr("tpengine.envs.rank_tls", folder)
    with refusing_driver() as driver, ThreadPoolExecutor(1, "theirs") as pool:
        refused = pool.submit(wire.connect, driver.address, SECRET, 0, EPOCH, SHORT_S)
        with pytest.raises(wire.ChannelError, match=f"no handshake with.*{why}"):
            refused.result(TIMEOUT_S)


@pytest.mark.parametrize(
    ("name", "why"), [("", "certificate required"), ("strangers", "unknown ca")]
)
def test_the_driver_refuses_a_rank_that_accepts_any_driver(use: Use, name: str, why: str) -> None:
    """By TLS 1.3 the rank's handshake ends before the driver has checked the rank's certificate. So
    the rank reads the refusal in place of the challenge."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    if name:
        theirs = use(name)
        context.load_cert_chain(theirs / "tls.crt", theirs / "tls.key")
    use("ours")
    with (
        refusing_driver() as driver,
        socket.create_connection(driver.address, TIMEOUT_S) as sock,
        context.wrap_socket(sock) as rank,
        pytest.raises(ssl.SSLError, match=why),
    ):
        rank.recv(1)


def test_certificates_that_cannot_be_used(use: Use) -> None:
    """At the driver's start that is final, unless the machine has no descriptor left. Later it may
    pass: they are being exchanged."""
    folder = use("ours")
    good = (folder / "ca.crt").read_text()
    listener = wire.Listener("127.0.0.1", SECRET, EPOCH)
    check_at_start()
    (folder / "ca.crt").write_text((use("others") / "ca.crt").read_text())
    use("ours")
    with pytest.raises(ConfigError, match=r"tls\.crt is not valid by ca\.crt: .*certificate"):
        check_at_start()
    (folder / "ca.crt").write_text("nothing")
    text = r"TPENGINE_RANK_TLS = '.*' cannot be used.*tls\.crt"
    with pytest.raises(ConfigError, match=text) as refused:
        check_at_start()
    assert not is_temporary(refused.value)
    with limited(resource.RLIMIT_NOFILE, 0), pytest.raises(ConfigError, match=text) as full:
        check_at_start()
    assert is_shortage(full.value)
    with pytest.raises(wire.ChannelError, match=text):
        wire.Listener("127.0.0.1", SECRET, EPOCH)
    with ThreadPoolExecutor(2) as pool:
        accepted = pool.submit(listener.accept, 1, TIMEOUT_S)
        with pytest.raises(wire.ChannelError, match=text):
            wire.connect(listener.address, SECRET, 0, EPOCH, 0.1)
        connected = pool.submit(wire.connect, listener.address, SECRET, 0, EPOCH, TIMEOUT_S)
        (folder / "ca.crt").write_text(good)
        for channel in (connected.result(TIMEOUT_S), *accepted.result(TIMEOUT_S)):
            channel.close()
    listener.close()


@pytest.mark.soak
def test_an_engine(use: Use, folder: Path) -> None:
    expected = list(ids(outputs_of(folder, [[5, 6, 7]], greedy(16)))[0])
    use("ours")
    with ray_engine(folder, 2) as engine:
        assert list(complete(engine, [5, 6, 7], greedy(16)).token_ids) == expected
