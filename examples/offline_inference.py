"""Completes four prompts with the model that tpengine carries, or with one that you name.

python examples/offline_inference.py [MODEL]
"""

import sys

from tpengine import LLM, SamplingParams

prompts = [
    "Hello, my name is",
    "The president of the United States is",
    "The capital of France is",
    "The future of AI is",
]
sampling_params = SamplingParams(temperature=0.8, top_p=0.95, max_tokens=64)


def main() -> None:
    """Generates and prints."""
    llm = LLM(model=sys.argv[1]) if len(sys.argv) > 1 else LLM()
    for output in llm.generate(prompts, sampling_params):
        print(f"Prompt: {output.prompt!r}\nOutput: {output.outputs[0].text!r}\n")


if __name__ == "__main__":
    main()
