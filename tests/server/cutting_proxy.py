"""A proxy between a client and a server, whose connections are cut after some bytes."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from contextlib import asynccontextmanager, suppress

_BLOCK = 4096


class CuttingProxy:
    """Passes bytes both ways.

    Args:
        target: HOST:PORT of the server.
        budgets: for each connection in turn, the number of bytes from the server after which it is
            cut. Further connections are not cut.
        before_cut: called before each cut.

    Attributes:
        num_cuts: connections that were cut.
    """

    def __init__(
        self,
        target: str,
        budgets: Iterable[int],
        before_cut: Callable[[], Awaitable[object]] | None = None,
    ) -> None:
        self._before_cut = before_cut
        self.num_cuts = 0
        self._server_host, _, port = target.rpartition(":")
        self._server_port = int(port)
        self._budgets = iter(budgets)
        self._listener: asyncio.Server | None = None

    @asynccontextmanager
    async def listening(self) -> AsyncIterator[str]:
        """Yields HOST:PORT of the proxy."""
        self._listener = await asyncio.start_server(self._connect, "127.0.0.1", 0)
        try:
            yield f"127.0.0.1:{self._listener.sockets[0].getsockname()[1]}"
        finally:
            self.close()

    def close(self) -> None:
        """Takes no more connections."""
        self._listener.close()

    async def _connect(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        budget = next(self._budgets, None)
        server_reader, server_writer = await asyncio.open_connection(
            self._server_host, self._server_port
        )
        ways = {
            asyncio.create_task(self._pass(reader, server_writer, None)),
            asyncio.create_task(self._pass(server_reader, writer, budget)),
        }
        await asyncio.wait(ways, return_when=asyncio.FIRST_COMPLETED)
        writer.close()  # after what has been passed
        server_writer.transport.abort()
        for way in ways:
            way.cancel()

    async def _pass(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, budget: int | None
    ) -> None:
        with suppress(OSError):
            while data := await reader.read(_BLOCK if budget is None else min(budget, _BLOCK)):
                writer.write(data)
                await writer.drain()
                if budget is not None:
                    budget -= len(data)
                    if not budget:
                        self.num_cuts += 1
                        if self._before_cut is not None:
                            await self._before_cut()
                        return
