"""One connection of the HTTP server: uvicorn's protocol with bounds on what a client may hold.

uvicorn alone waits for a head without limit, reads on what follows an answered request, parses any
number of requests ahead, and does not end the task of a client that has left.
"""

from __future__ import annotations

import asyncio
import functools
import socket
import struct
import time
import uuid
from collections import Counter
from email.utils import formatdate
from typing import Any

import httptools
from uvicorn.protocols.http.flow_control import HIGH_WATER_LIMIT
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol
from uvicorn.server import ServerState

from tpengine.errors import MalformedRequestError, QueueFullError, RequestError
from tpengine.proto import REQUEST_ID_KEY
from tpengine.server.auth import certificate_name
from tpengine.server.http.error_answers import HttpError, refusal
from tpengine.server.limits import Limits, address_key, change_count

DISCARD_S = 3.0
"""Time for a client to stop sending what is not read. A connection that is closed while data arrive
is reset, and the client may lose the answer."""
MAX_PIPELINED = 16
"""Requests that may wait in a connection for the answer of the one before."""
_RETRY_AFTER_S = 5.0
_SHARE_TOLD = 8
"""A refused connection stays open until its client has read why. At most an eighth of the address's
bound stays open so. Further ones are closed at once, because they hold descriptors too."""


class Connections(ServerState):
    """The open connections of a server.

    Attributes:
        limits: bounds of a connection and of their number.
        hosts: number of connections of each client address.
    """

    def __init__(self, limits: Limits) -> None:
        super().__init__()
        self.limits = limits
        self.hosts: Counter[str] = Counter()


class HttpProtocol(HttpToolsProtocol):
    """One connection. Its application is cancelled when the client has left. It finds in the
    scope's `state` the name in the client's certificate (`certificate`), the `address_key` of the
    client (`host`), and what resets the connection (`drop`)."""

    server_state: Connections

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._host = ""
        self._is_in_head = True
        self._head_bytes = 0
        self._num_unanswered = 0
        self._timer: asyncio.TimerHandle | None = None
        self._task: asyncio.Task[None] | None = None
        self._violation: RequestError | None = None  # if set, no more is read

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Counts the connection; one too many is refused."""
        super().connection_made(transport)
        # A writer waits as soon as the system takes no more: outputs then wait in the mailbox. With
        # high=0 it would always wait with TLS, where asyncio compares by "at least".
        transport.set_write_buffer_limits(high=1, low=0)
        limits, hosts = self.server_state.limits, self.server_state.hosts
        self._host = address_key(self.client[0]) if self.client is not None else ""
        hosts[self._host] += 1
        tls = transport.get_extra_info("ssl_object")
        name = None if tls is None else certificate_name(tls)
        self.app_state = {"certificate": name, "host": self._host, "drop": self._drop}
        self._set_timer(limits.head_s)
        total, of_host = len(self.connections), hosts[self._host]
        most, most_of_host = limits.max_connections, limits.max_host_connections
        too_many = max(total - most, of_host - most_of_host)
        if too_many > 0:
            text = f"{total} connections are open, {of_host} of them from your address; close some"
            self._refuse(QueueFullError(text, _RETRY_AFTER_S))
        if too_many > most_of_host // _SHARE_TOLD:
            transport.close()

    def _drop(self) -> None:
        """Resets the connection. After a plain close the system would still hold what the client
        has not read, and go on sending it."""
        if not self.transport.is_closing():
            self._end_by_reset(True)
            self.transport.abort()

    def _end_by_reset(self, resets: bool) -> None:
        """Whether the system ends the connection by a reset, and drops what it has not sent."""
        linger = struct.pack("ii", resets, 0)
        if not self.transport.is_closing():
            connection = self.transport.get_extra_info("socket")
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)

    def connection_lost(self, exc: Exception | None) -> None:
        """Ends what the connection holds."""
        super().connection_lost(exc)
        self._unset_keepalive_if_required()
        self._set_timer(None)
        self.pipeline.clear()
        change_count(self.server_state.hosts, self._host, -1)
        if self._task is not None:
            # uvicorn tells only the newest request, which may still wait for this one's answer.
            self._answering.disconnected = True
            self._task.cancel()

    def data_received(self, data: bytes) -> None:
        """Parses what the client sends, until it breaks a rule; later bytes are dropped."""
        if self._violation is not None:
            return
        if self._is_in_head:
            self._head_bytes += len(data)
        if self._num_unanswered == 0 and self._timer is None:
            self._set_timer(self.server_state.limits.head_s)
        self._parse(data)
        if self._is_in_head:
            self._check_head(self._head_bytes)

    def _parse(self, data: bytes) -> None:
        self._unset_keepalive_if_required()
        try:
            self.parser.feed_data(data)
        except httptools.HttpParserUpgrade as offer:
            self._parse_without_offer(data[offer.args[0] :])
        except httptools.HttpParserError:
            self.send_400_response("")

    def _parse_without_offer(self, rest: bytes) -> None:
        """Reads a head that offers another protocol again, without the offer: a server may ignore
        it (RFC 9110, 7.8). After an offer the parser takes the rest for the other protocol.

        Args:
            rest: what follows the head.
        """
        method, version = self.parser.get_method(), self.parser.get_http_version()
        if method == b"CONNECT":
            self.send_400_response("")
            return
        lines = [b"%b %b HTTP/%b" % (method, self.url, version.encode())]
        lines += [b"%b: %b" % header for header in self.headers if header[0] != b"upgrade"]
        self.parser = httptools.HttpRequestParser(self)
        self.parser.set_dangerous_leniencies(lenient_data_after_close=True)  # as uvicorn
        self._parse(b"\r\n".join([*lines, b"", rest]))

    def on_headers_complete(self) -> None:
        """Begins to serve a request whose head is complete."""
        if self.parser.should_upgrade():  # it is read again
            return
        self._check_head(sum(len(name) + len(value) for name, value in self.headers))
        self._check_head(len(self.url))
        if self._num_unanswered > MAX_PIPELINED:
            text = f"more than {MAX_PIPELINED} requests wait in this connection; open another"
            self._refuse(HttpError(text, 429, "too_many_pipelined", {"retry-after": "2"}))
        if self._violation is not None:
            raise self._violation  # ends the parser's work
        self.server_state.default_headers = [(b"date", _date(int(time.time())))]
        super().on_headers_complete()
        self._num_unanswered += 1
        self._is_in_head = False
        self._set_timer(None)

    def on_message_complete(self) -> None:
        """Waits for the next head."""
        if self.parser.should_upgrade():
            return
        super().on_message_complete()
        # uvicorn pauses at a large body and at a second request. That a client leaves is noticed
        # only by reading.
        if sum(len(cycle.body) for cycle, _ in self.pipeline) <= HIGH_WATER_LIMIT:
            self.flow.resume_reading()
        self._is_in_head = True
        self._head_bytes = 0
        if self._num_unanswered == 0:  # it was answered before, and its body has been dropped
            self._set_timer(self.server_state.limits.idle_s)

    def on_response_complete(self) -> None:
        """Starts the next request, or waits for it."""
        self._num_unanswered -= 1
        super().on_response_complete()
        if self._num_unanswered or self.transport.is_closing():
            return
        if self._violation is not None:
            self._tell(self._violation)
        elif not self._is_in_head:  # the application did not want the whole body
            self._set_timer(DISCARD_S)
            if self.expect_100_continue:  # and the client may not send it
                self.transport.close()

    def send_400_response(self, msg: str) -> None:
        """Refuses bytes that are not HTTP; uvicorn calls it for any error of its parser."""
        text = "the request is not HTTP/1.1: cut short, or with wrong characters or lengths"
        self._refuse(MalformedRequestError(text))

    def _end_body_by_close(self, cycle: Any) -> None:
        """Sends an answer without chunks, which HTTP/1.0 does not have: a body without a length
        ends with the connection. Until the system has the last part, anything else that ends the
        connection, this process's death too, resets it: a reader can tell a body that is cut."""
        send = cycle.send

        async def send_plain(message: Any) -> None:
            begins = message["type"] == "http.response.start"
            if begins:
                self._end_by_reset(True)
            cycle.expected_content_length += len(message.get("body", b""))
            if not begins and not message.get("more_body", False):
                await send({**message, "more_body": True})
                await self.flow.drain()
                self._end_by_reset(False)
                message = {"type": "http.response.body"}
            await send(message)

        cycle.chunked_encoding, cycle.send = False, send_plain

    def _start_asgi_task(self, cycle: Any, app: Any) -> None:
        if cycle.scope["http_version"] == "1.0":
            self._end_body_by_close(cycle)
        self._answering = cycle  # the request that the task answers
        self._task = self.loop.create_task(cycle.run_asgi(app))
        self._task.add_done_callback(self.tasks.discard)
        self.tasks.add(self._task)

    def _check_head(self, size: int) -> None:
        bound = self.server_state.limits.max_metadata_bytes
        if size > bound:
            text = f"the request's head has more than {bound} bytes; send fewer headers"
            self._refuse(HttpError(text, 431, "head_too_large"))

    def _refuse(self, error: RequestError) -> None:
        """Takes no more from the client, and tells it why after the answers that it waits for."""
        if self._violation is not None:
            return
        self._violation = error
        is_in_body = self._num_unanswered == 1 and not self._is_in_head
        if is_in_body and self._task is not None and not self.cycle.response_started:
            self.cycle.disconnected = True  # it cannot get the rest of its body
            self._task.cancel()
            self._num_unanswered = 0
        if self._num_unanswered == 0:
            self._tell(error)

    def _tell(self, error: RequestError) -> None:
        """Writes a refusal that has no request, and closes soon."""
        request_id = f"req-{uuid.uuid4().hex}"
        answer = refusal(error, request_id)
        answer.headers.update({REQUEST_ID_KEY: request_id, "connection": "close"})
        head = b"".join(b"%b: %b\r\n" % pair for pair in answer.raw_headers)
        self.transport.write(STATUS_LINE[answer.status_code] + head + b"\r\n" + bytes(answer.body))
        self.flow.resume_reading()  # and drop it
        self._unset_keepalive_if_required()
        if self.transport.can_write_eof():
            self.transport.write_eof()
            self._set_timer(DISCARD_S)
        else:  # TLS has no half-closed connections
            self.transport.close()

    def _set_timer(self, seconds: float | None) -> None:
        """Sets the time until `_on_timer`, in place of the one before; None: never."""
        if self._timer is not None:
            self._timer.cancel()
        self._timer = None if seconds is None else self.loop.call_later(seconds, self._on_timer)

    def _on_timer(self) -> None:
        self._timer = None
        if self._violation is None and self._is_in_head and self._head_bytes:
            head_s = self.server_state.limits.head_s
            text = f"the request's head did not arrive within {head_s:g} s; send it faster"
            self._refuse(HttpError(text, 408, "head_timeout"))
        else:
            self.transport.close()


@functools.lru_cache(1)
def _date(second: int) -> bytes:
    return formatdate(second, usegmt=True).encode()
