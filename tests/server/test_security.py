"""Addresses, tokens and certificates: which client may call what."""

from __future__ import annotations

import argparse
import re
import shutil
import ssl
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from support.patches import on_call

from server.calls import NOT_SERVING, TIMEOUT_S, bearer, check, refused
from server.guarded import Authority, TlsFiles, guarded_server
from tpengine.cli import serve
from tpengine.errors import ConfigError, PermissionDeniedError, UnauthenticatedError
from tpengine.inputs import Owner
from tpengine.proto import tpengine_pb2 as pb
from tpengine.proto import tpengine_pb2_grpc
from tpengine.server import auth
from tpengine.server.auth import Authenticator, Client, read_tokens
from tpengine.server.grpc.guard import identify_call
from tpengine.server.server_args import ServerArgs

Code = grpc.StatusCode
ONE, TWO, ADMIN, WRONG = (f"{name}-0123456789abcdef" for name in ("one", "two", "admin", "wrong"))
READY = health_pb2.HealthCheckRequest()
INFO = pb.GetServerInfoRequest()


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority.make(tmp_path_factory.mktemp("authority"))


@pytest.fixture(scope="module")
def files(authority: Authority) -> TlsFiles:
    return authority.sign("server", authority.folder / "server")


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.0.2.7", "example.org", ""])
def test_an_open_server_needs_insecure(host: str) -> None:
    with pytest.raises(ConfigError) as raised:
        ServerArgs(host=host).check_exposure(Authenticator())
    for word in ("--tls-cert", "--token-file", "--insecure", "127.0.0.1"):
        assert word in str(raised.value)
    ServerArgs(host=host, insecure=True).check_exposure(Authenticator())
    ServerArgs(host=host).check_exposure(Authenticator([ONE]))
    ServerArgs(host=host, tls_cert="a", tls_key="b").check_exposure(Authenticator())
    over_http: dict[str, Any] = {"host": host, "http_port": 0, "tls_cert": "a", "tls_key": "b"}
    with pytest.raises(ConfigError, match="--tls-client-ca, or --token-file or --api-key"):
        ServerArgs(**over_http).check_exposure(Authenticator())
    ServerArgs(**over_http, tls_client_ca="c").check_exposure(Authenticator())
    ServerArgs(**over_http).check_exposure(Authenticator([ONE]))
    with pytest.raises(ConfigError):  # an admin token does not protect other calls
        ServerArgs(host=host).check_exposure(Authenticator((), [ADMIN]))


def test_clients_with_names_share_no_prefixes() -> None:
    known = Authenticator([ONE])
    assert ServerArgs().salts_prefixes(known)
    assert ServerArgs(tls_client_ca="c").salts_prefixes(Authenticator())
    assert not ServerArgs(share_prefixes=True).salts_prefixes(known)
    assert not ServerArgs().salts_prefixes(Authenticator())


@pytest.mark.parametrize("host", ["127.0.0.1", "127.8.8.8", "::1", "localhost"])
def test_this_machine_needs_no_guard(host: str) -> None:
    ServerArgs(host=host).check_exposure(Authenticator())


@pytest.mark.parametrize(
    ("fields", "word"),
    [
        ({"port": 65536}, "port"),
        ({"metrics_port": -1}, "metrics_port"),
        ({"port": 8000, "http_port": 8000}, "http_port and port are both 8000"),
        ({"http_port": 8000, "metrics_port": 8000}, "metrics_port and http_port are both 8000"),
        ({"drain_timeout": float("nan")}, "drain_timeout"),
        ({"startup_timeout": float("inf")}, "startup_timeout"),
        ({"max_message_mib": 0.0}, "max_message_mib"),
        ({"write_timeout": 3e6}, "write_timeout must be .* at most 86400"),
        ({"max_client_requests": 4353}, "max_client_requests = 4353 is more than the 4352 calls"),
        ({"cors_origin": "*"}, "http_port"),
        ({"tls_cert": "a"}, "tls_key"),
        ({"tls_client_ca": "a"}, "tls_cert"),
    ],
)
def test_wrong_arguments(fields: dict[str, Any], word: str) -> None:
    with pytest.raises(ConfigError, match=word):
        ServerArgs(**fields).check()


def test_tokens_are_read(tmp_path: Path) -> None:
    file = tmp_path / "tokens"
    file.write_text(f"# ours\n{ONE}\n\n  {TWO} \t 2.5 \n")
    assert read_tokens(str(file), None, "x") == {ONE: 1.0, TWO: 2.5}
    assert read_tokens(None, f"{ONE} 4, {TWO}", "x") == {ONE: 4.0, TWO: 1.0}
    assert read_tokens(None, None, "x") == {}
    known = ServerArgs(token_file=str(file), api_key=TWO).authenticator()
    assert known.identify([f"Bearer {TWO}"], None).owner.weight == 2.5
    for content in ("", "# none\n", "short\n", f"{ONE} {TWO}\n", f"{ONE}é\n", f"{ONE} 2\n{ONE}\n"):
        file.write_text(content)
        with pytest.raises(ConfigError) as raised:
            read_tokens(str(file), None, "x")
        assert ONE not in str(raised.value)
        assert TWO not in str(raised.value)
    for weight in ("0", "-1", "1001", "nan", "many", "1 2"):
        file.write_text(f"{ONE} 2\n{TWO} {weight}\n")
        with pytest.raises(ConfigError, match=f"line 2, must be a number .*{weight}"):
            read_tokens(str(file), None, "x")
    with pytest.raises(ConfigError, match="cannot be read"):
        read_tokens(str(tmp_path / "none"), None, "x")


def test_weights_without_fairness_are_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tokens = tmp_path / "tokens"
    tokens.write_text(f"{ONE} 2\n")
    parser, notes = argparse.ArgumentParser(), []
    serve.add_arguments(parser)
    monkeypatch.setattr(serve.logger, "warning", notes.append)
    for fairness, count in (("owner", 0), ("none", 1)):
        words = ["--token-file", str(tokens), "--host", "192.0.2.7", "--fairness", fairness]
        with pytest.raises(ConfigError, match=r"192.0.2.7: it is not one of this machine"):
            serve.run(parser.parse_args(words))
        assert len(notes) == count


def test_clients_are_told_apart() -> None:
    known = Authenticator({ONE: 2.5, TWO: 1.0}, [ADMIN])
    first, second, admin = (known.identify([f"Bearer {key}"], None) for key in (ONE, TWO, ADMIN))
    assert first == known.identify([f"bearer {ONE}"], "a name")
    assert first.owner.weight == 2.5
    assert len({first.owner.name, second.owner.name, admin.owner.name}) == 3
    near, far = (Authenticator().identify([], None, f"ipv4:10.0.0.{i}") for i in (1, 2))
    named = Authenticator().identify([], "a name", "ipv4:10.0.0.1")
    accounts = {client.owner.account for client in (first, second, near, far, named)}
    assert len(accounts) == 5
    assert (near.owner.name, named.owner.name) == (far.owner.name, "certificate a name")
    assert not any("10.0" in account or "a name" in account for account in accounts)
    admin.require_admin("x")
    for client in (first, second, Client(Owner("anonymous"))):
        with pytest.raises(PermissionDeniedError):
            client.require_admin("x")
    assert Authenticator().identify([f"Bearer {WRONG}"], None).owner.name == "anonymous"
    with pytest.raises(UnauthenticatedError):
        Authenticator((), [ADMIN]).identify([f"Bearer {WRONG}"], None)


@pytest.mark.parametrize(
    "headers",
    [
        *([], [""], ["Bearer"], ["Bearer "], [ONE], [f"Basic {ONE}"], [f"Bearer {WRONG}"]),
        *([f"Bearer {ONE}x"], [f"Bearer {ONE[:-1]}"], [f"Bearer {ONE}", f"Bearer {WRONG}"]),
    ],
)
def test_what_is_no_token_of_the_server(headers: list[str]) -> None:
    with pytest.raises(UnauthenticatedError) as raised:
        Authenticator([ONE, TWO], [ADMIN]).identify(headers, "a name")
    assert ONE not in str(raised.value)


def test_tokens_over_the_wire() -> None:
    with (
        guarded_server(Authenticator([ONE], [ADMIN])) as target,
        grpc.insecure_channel(target) as channel,
    ):
        stub = tpengine_pb2_grpc.GenerationServiceStub(channel)
        assert stub.GetServerInfo(INFO, timeout=TIMEOUT_S, metadata=bearer(ONE)).version
        for metadata in ((), bearer(WRONG), (*bearer(ONE), *bearer(WRONG))):
            for call, message in (
                (stub.GetServerInfo, INFO),
                (stub.Generate, pb.GenerateRequest(prompt="a")),
                (stub.GenerateStream, pb.GenerateRequest(prompt="a")),
                (stub.Drain, pb.DrainRequest()),
            ):
                refusal = refused(call, message, metadata=metadata)
                assert refusal.code is Code.UNAUTHENTICATED
                assert ONE not in refusal.text
        refusal = refused(stub.Drain, pb.DrainRequest(), metadata=bearer(ONE))
        assert refusal.code is Code.PERMISSION_DENIED
        refusal = refused(stub.Generate, pb.GenerateRequest(prompt="a"), metadata=bearer(ONE))
        assert refusal.code is Code.UNAVAILABLE
        assert "load" in refusal.text
        drained = stub.Drain(pb.DrainRequest(), timeout=TIMEOUT_S, metadata=bearer(ADMIN))
        assert drained.HasField("num_open_calls")


def test_only_health_is_free_of_tokens() -> None:
    with guarded_server(Authenticator([ONE])) as target, grpc.insecure_channel(target) as channel:
        health = health_pb2_grpc.HealthStub(channel)
        assert check(channel) == NOT_SERVING
        assert health.List(health_pb2.HealthListRequest(), timeout=TIMEOUT_S).statuses
        watch = health.Watch(READY, timeout=TIMEOUT_S)
        assert next(watch).status == 2
        watch.cancel()
        path = "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo"
        assert refused(channel.stream_stream(path), iter([b""])).code is Code.UNAUTHENTICATED


def secure(target: str, authority: Authority, own: TlsFiles | None = None) -> grpc.Channel:
    files = (own.key, own.certificate) if own is not None else ()
    pair = [Path(file).read_bytes() for file in files]
    credentials = grpc.ssl_channel_credentials(authority.certificate.read_bytes(), *pair)
    return grpc.secure_channel(target, credentials)


def refuses(channel: grpc.Channel) -> None:
    """The server answers no call of this connection, not even one that needs no token."""
    with channel:
        assert refused(health_pb2_grpc.HealthStub(channel).Check, READY).code is Code.UNAVAILABLE


def test_tls(authority: Authority, files: TlsFiles, tmp_path: Path) -> None:
    """Of the server alone, and of both."""
    client, stranger = authority.sign("client", tmp_path), Authority.make(tmp_path / "stranger")
    with guarded_server(tls=files) as target:
        refuses(secure(target, stranger))
        refuses(grpc.insecure_channel(target))
        with secure(target, authority) as channel:
            assert check(channel) == NOT_SERVING
    both = TlsFiles(files.certificate, files.key, str(authority.certificate))
    with guarded_server(tls=both) as target:
        refuses(secure(target, authority))
        refuses(secure(target, authority, stranger.sign("client", tmp_path / "other")))
        with secure(target, authority, client) as channel:
            assert check(channel) == NOT_SERVING


def test_certificates_without_a_common_name_are_told_apart() -> None:
    def name(**peer: list[bytes]) -> str:
        call = SimpleNamespace(
            invocation_metadata=lambda: (), auth_context=lambda: peer, peer=lambda: "ipv4:1.2.3.4:5"
        )
        return identify_call(Authenticator(), call).owner.name

    san, common, pem = "x509_subject_alternative_name", "x509_common_name", "x509_pem_cert"
    names = [
        name(),
        name(**{pem: [b"1"]}),
        name(**{pem: [b"2"], common: [b""]}),
        name(**{pem: [b"3"], san: [b"spiffe://x/alice"]}),
        name(**{pem: [b"4"], san: [b"spiffe://x/bob"]}),
        name(**{pem: [b"4"], san: [b"alice"]}),
        name(**{pem: [b"5"], san: [b"alice"], common: [b"alice"]}),
    ]
    assert len(set(names)) == len(names)
    assert names[-1] == name(**{pem: [b"6"], common: [b"alice"]}) == "certificate alice"
    assert names[3] == name(**{pem: [b"7"], san: [b"spiffe://x/alice"]}), "a renewed certificate"


def test_dates_of_certificates(
    authority: Authority, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A warning before they count no more, and after; valid ones are not replaced by others."""
    lines: list[str] = []
    long = authority.sign("long", tmp_path, days=30)
    short = authority.sign("short", tmp_path, days=9)
    now = time.time()  # after they were signed: they count from that second on
    clock = SimpleNamespace(time=lambda: now, monotonic=time.monotonic)
    monkeypatch.setattr(auth, "time", clock)
    monkeypatch.setattr(auth.logger, "warning", lambda text, *args: lines.append(text % args))

    def load(files: TlsFiles, day: float) -> auth.CertificateReloader:
        lines.clear()
        clock.time = lambda: now + day * 86_400
        return auth.CertificateReloader(*files)

    for day in (0.0, 22.9):
        load(long, day)
        assert lines == []
    for day in (-1, 23.1, 29.9, 31):
        load(long, day)
        assert len(lines) == 1
        assert re.search(r"long.pem is valid from \d{4}-\d\d-\d\d [\d:]+ to \d", lines[0])
    load(TlsFiles(long.certificate, long.key, str(authority.certificate)), 3)
    assert str(authority.certificate) in lines[0], "that of the authority counts for two days"

    live = TlsFiles(str(tmp_path / "c"), str(tmp_path / "k"))

    def install(files: TlsFiles) -> bytes:
        files.install(live)
        for _ in range(3):
            served.reload()
        return Path(files.certificate).read_bytes()

    long.install(live)
    served = load(live, 10)
    before = Path(long.certificate).read_bytes()
    assert install(short) != served.contents[0]
    assert served.contents[0] == before
    assert len(lines) == 1
    assert "the old ones stay in use" in lines[0]
    clock.time = lambda: now + 31 * 86_400
    served.reload()
    assert served.contents[0] == Path(short.certificate).read_bytes(), "both have expired"
    assert install(long) == served.contents[0]


def test_files_that_change_while_they_are_read_are_read_again(
    files: TlsFiles, authority: Authority, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else gRPC would have the new certificate with the old key, which ssl has not seen. Old files
    stay in use while new ones are wrong, do not belong together or are not there."""
    live = TlsFiles(str(tmp_path / "c"), str(tmp_path / "k"))
    fresh = authority.sign("both", tmp_path)
    files.install(live)
    served = auth.CertificateReloader(*live)
    certificate, key = Path(live.certificate), Path(live.key)
    for change_files in (certificate.unlink, lambda: certificate.write_text("none")):
        change_files()
        served.reload()
        assert served.contents[0] == Path(files.certificate).read_bytes()
    files.install(live)
    shutil.copy(fresh.key, key)
    served.reload()
    assert served.contents[1] == Path(files.key).read_bytes()
    files.install(live)
    shutil.copy(fresh.certificate, live.certificate)

    def change(*_: object, **__: object) -> None:
        shutil.copy(fresh.key, live.key)

    on_call(monkeypatch, ssl.SSLContext, "load_cert_chain", change)
    served.reload()
    assert served.contents[0] == Path(files.certificate).read_bytes()
    served.reload()
    pair = tuple(Path(name).read_bytes() for name in live[:2])
    assert served.contents == (*pair, None)


def test_unusable_certificates_are_refused(files: TlsFiles, authority: Authority) -> None:
    other = authority.sign("other", authority.folder / "other")
    nowhere = "/nowhere.pem"
    for wrong in (
        TlsFiles(files.certificate, other.key),
        TlsFiles(nowhere, files.key),
        TlsFiles(files.key, files.certificate),
        TlsFiles(files.certificate, files.key, nowhere),
        TlsFiles(files.certificate, files.key, files.key),
    ):
        with pytest.raises(ConfigError, match=r"\.pem|\.key|nowhere"), guarded_server(tls=wrong):
            pass


def test_a_port_is_not_shared() -> None:
    """By default gRPC lets two servers share a port, and each gets half of the clients."""
    with (
        guarded_server() as target,
        pytest.raises(ConfigError, match="the port is taken"),
        guarded_server(address=target),
    ):
        pass
