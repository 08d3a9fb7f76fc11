"""A client that opens streams and waits to be killed: `vanish.py TARGET STREAMS SEED`.

It says `open` when every stream is under way, and exits by itself after a minute.
"""

from __future__ import annotations

import random
import sys
import threading
import time

import grpc

from tpengine.proto import tpengine_pb2 as pb
from tpengine.proto import tpengine_pb2_grpc

LIFE_S = 60.0


def main(target: str, num_streams: int, seed: int) -> None:
    """Opens the streams over one connection, and reads half of them."""
    rng = random.Random(seed)
    stub = tpengine_pb2_grpc.GenerationServiceStub(grpc.insecure_channel(target))
    calls = []
    for _ in range(num_streams):
        request = pb.GenerateRequest(
            prompt_token_ids=pb.TokenIds(ids=[rng.randrange(5, 500) for _ in range(8)]),
            sampling=pb.SamplingParams(max_tokens=200, ignore_eos=True, temperature=0.0),
        )
        calls.append(stub.GenerateStream(request, timeout=LIFE_S))
    for call in calls[::2]:
        threading.Thread(target=list, args=(call,), daemon=True).start()
    for call in calls:
        call.initial_metadata()
    print("open", flush=True)
    time.sleep(LIFE_S)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
