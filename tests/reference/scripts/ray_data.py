from typing import Any

import numpy as np
import ray
from vllm import LLM, SamplingParams

sampling_params = SamplingParams(temperature=0.8, top_p=0.95, max_tokens=8)


class LLMPredictor:
    def __init__(self) -> None:
        self.llm = LLM(model="facebook/opt-125m")

    def __call__(self, batch: dict[str, np.ndarray]) -> dict[str, Any]:
        outputs = self.llm.generate(list(batch["text"]), sampling_params, use_tqdm=False)
        return {
            "prompt": [output.prompt for output in outputs],
            "generated_text": [output.outputs[0].text for output in outputs],
        }


dataset = ray.data.from_items([{"text": f"Item {i} is"} for i in range(12)])
dataset = dataset.map_batches(LLMPredictor, concurrency=1, batch_size=4)
rows = dataset.take(limit=20)
print(sorted(row["prompt"] for row in rows))
