"""Serves one model over gRPC, and with --http-port over OpenAI's HTTP, until it is told to end.

While the model loads, the health service already answers: alive, not ready. The line "tpengine is
ready on ..." on standard output says where clients may connect.

Examples:
  tpengine serve                                        the small model, on 127.0.0.1:50051
  tpengine client generate 'Once upon a time'           a client for it
  tpengine serve --model FOLDER --host 0.0.0.0 --tls-cert cert.pem --tls-key key.pem
  tpengine serve --host 0.0.0.0 --token-file tokens.txt --admin-token-file admin.txt
  tpengine serve --http-port 8000                       OpenAI's clients at http://127.0.0.1:8000/v1
  tpengine serve --http-port 8000 --model FOLDER --task embed                           embeddings

Health (grpc.health.v1, with Watch), without authentication:
  liveness     the process serves, and its engine can go on
  readiness    the model is loaded, and the engine is idle or its steps advance; also under the
               services' names and under no name

Over HTTP: /health, /ready and /version, without authentication; and by what the model does (--task)
  generate     /v1/completions, /v1/chat/completions
  embed        /v1/embeddings, /v1/rerank (also /rerank, /v2/rerank), /v1/score (also /score)
  score        /v1/rerank, /v1/score
  classify     /v1/classify (also /classify)
A gateway such as smg takes the
server as grpc://HOST:PORT, over vLLM's gRPC service.

Status codes:
  INVALID_ARGUMENT     a field is wrong; the text names it
  NOT_FOUND            another model is served here, or the stream to resume is not kept
  ALREADY_EXISTS       a request with this id is running, or a stream of it is kept and differs
  UNAUTHENTICATED      no token, or an unknown one
  PERMISSION_DENIED    Drain, and Abort of another client's request, need the admin token
  CANCELLED            another call aborted the request, or has resumed its stream
  RESOURCE_EXHAUSTED   the queue is full (RetryInfo says when to try again), one client has too many
                       calls, or a message is too large
  DEADLINE_EXCEEDED    the text says whether it waited, was in prefill, or in decode, or that its
                       client took nothing of the stream for --write-timeout
  UNIMPLEMENTED        vLLM's service has this method, and this server does not offer it
  UNAVAILABLE          loading, draining, or the engine has died
  INTERNAL             a fault of the server; its log has more under the request id in the text

Status of HTTP:
  400 a field is wrong   401 no key   403 not permitted, or another name in Host
  404 another model or path   408 too late   409 key of another stream
  410 stream to resume is not kept   413 body too large
  429 queue is full, or one client has too many calls (Retry-After)
  499 aborted   500 a fault of the server   503 loading, draining, or the engine has died

Ending: at SIGTERM, SIGINT, SIGHUP or Drain readiness ends, new requests are refused, and running
ones have --drain-timeout seconds; then the exit code is 0. A second signal ends the server within a
second, with exit code 128 + its number, and open calls end with UNAVAILABLE. If the engine dies,
the server ends with exit code 1.
"""

from __future__ import annotations

import argparse
import time
from dataclasses import replace

from tpengine.engine_args import AsyncEngineArgs
from tpengine.errors import ConfigError
from tpengine.logger import init_logger
from tpengine.options import adder
from tpengine.server.server_args import ServerArgs

logger = init_logger(__name__)


add_arguments = adder(ServerArgs, AsyncEngineArgs)


def run(args: argparse.Namespace) -> int:
    """Serves; returns the exit code.

    Raises:
        ConfigError: an argument is out of range or contradicts another one, the server would be
            open to strangers, or a port is in use.
    """
    server_args = ServerArgs.from_cli_args(args)
    server_args.check()
    engine_args = AsyncEngineArgs.from_cli_args(args)
    if server_args.isolate and engine_args.executor == "local":
        raise ConfigError(
            "--isolate runs the rank in a process of its own, and --executor local in the "
            "server's; leave one of them out"
        )
    if server_args.isolate and engine_args.chosen_executor == "local":
        engine_args = replace(engine_args, executor="processes")
    server_args.check_adapters(engine_args)
    authenticator = server_args.authenticator()
    server_args.check_exposure(authenticator)
    if authenticator.has_weights and engine_args.fairness == "none":
        logger.warning("the tokens' weights have no effect without --fairness owner")
    server_args.check_ports()
    start = time.monotonic()
    from tpengine.server.lifecycle import run_server  # imports torch, which takes seconds

    phases = {"import": time.monotonic() - start}
    return run_server(server_args, authenticator, engine_args, phases)
