"""Asks a running server two questions at once, and one whose answer appears as it is generated.

tpengine serve &
python examples/grpc_client.py [HOST:PORT]
"""

import asyncio
import sys

from tpengine import SamplingParams
from tpengine.client import GenerationClient
from tpengine.errors import QueueFullError, ServerUnavailableError

target = sys.argv[1] if len(sys.argv) > 1 else "127.0.0.1:50051"
prompts = ["Hello, my name is", "The capital of France is"]
sampling_params = SamplingParams(temperature=0.8, top_p=0.95, max_tokens=32)


async def main() -> None:
    """Generates and prints."""
    async with GenerationClient(target, timeout_s=60.0) as client:
        outputs = await asyncio.gather(*(client.generate(p, sampling_params) for p in prompts))
        for output in outputs:
            print(f"Prompt: {output.prompt!r}\nOutput: {output.outputs[0].text!r}\n")

        question = [{"role": "user", "content": "What is the capital of France?"}]
        async for part in client.stream(question, sampling_params):
            for sequence in part.outputs:
                print(sequence.text, end="", flush=True)
            if part.usage is not None:
                print(f"\n({part.usage.num_output_tokens} tokens in {part.usage.total_s:.2f} s)")


if __name__ == "__main__":
    try:
        asyncio.run(main())
    except QueueFullError as error:
        sys.exit(f"{error}; come back in {error.retry_after_s:.1f} s")
    except ServerUnavailableError as error:
        sys.exit(f"{error}")
