"""Calls a server with `grpc_requests`, which uses reflection only:
`reflecting_client.py TARGET`, by a Python that has nothing of tpengine.

Prints JSON: the services, the health, and the ids of a prompt completed unary and streamed.
"""

import json
import sys

from grpc_requests import Client

SERVICE = "tpengine.v1.GenerationService"
REQUEST = {
    "prompt": "Once upon a time",
    "sampling": {"temperature": 0.0, "max_tokens": 12, "ignore_eos": True},
}


def main(target: str) -> None:
    """Makes the calls."""
    client = Client.get_by_endpoint(target)
    health = client.request("grpc.health.v1.Health", "Check", {"service": "readiness"})
    service = client.service(SERVICE)
    whole = service.Generate(REQUEST)
    parts = list(service.GenerateStream(REQUEST))
    found = {
        "services": list(client.service_names),
        "health": health,
        "unary": [token for output in whole["outputs"] for token in output["token_ids"]],
        "streamed": [
            token
            for part in parts
            for output in part.get("outputs", [])
            for token in output.get("token_ids", [])
        ],
        "last": parts[-1],
        "model": service.GetModelInfo({}),
    }
    print(json.dumps(found))


if __name__ == "__main__":
    main(sys.argv[1])
