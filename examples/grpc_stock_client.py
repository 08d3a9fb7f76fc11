"""Talks to a running server without tpengine: grpcio, and what the server's reflection tells.

pip install grpcio grpcio-reflection
tpengine serve &
python examples/grpc_stock_client.py [HOST:PORT]

In other languages make stubs from tpengine/proto/tpengine.proto, or use a client that
reads reflection by itself:

buf curl --protocol grpc --http2-prior-knowledge -d '{"prompt": "Once upon a time"}' \
    http://127.0.0.1:50051/tpengine.v1.GenerationService/Generate
"""

import sys

import grpc
from google.protobuf.descriptor_pool import DescriptorPool
from google.protobuf.message_factory import GetMessageClass
from grpc_reflection.v1alpha.proto_reflection_descriptor_database import (
    ProtoReflectionDescriptorDatabase,
)

SERVICE = "tpengine.v1.GenerationService"
target = sys.argv[1] if len(sys.argv) > 1 else "127.0.0.1:50051"


def main() -> None:
    """Generates and prints."""
    with grpc.insecure_channel(target) as channel:
        pool = DescriptorPool(ProtoReflectionDescriptorDatabase(channel))
        method = pool.FindServiceByName(SERVICE).FindMethodByName("GenerateStream")
        request_class = GetMessageClass(method.input_type)
        generate = channel.unary_stream(
            f"/{SERVICE}/{method.name}",
            request_serializer=request_class.SerializeToString,
            response_deserializer=GetMessageClass(method.output_type).FromString,
        )
        request = request_class(prompt="Once upon a time")
        request.sampling.temperature = 0.0
        request.sampling.max_tokens = 32
        # A server with tokens wants metadata=[("authorization", "Bearer TOKEN")] as well.
        for response in generate(request, timeout=60.0):
            for output in response.outputs:
                print(output.text, end="", flush=True)
            if response.finished:
                print(f"\n({response.usage.num_output_tokens} tokens)")


if __name__ == "__main__":
    try:
        main()
    except grpc.RpcError as error:
        sys.exit(f"{target}: {error.code().name}: {error.details()}")
