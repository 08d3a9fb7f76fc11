import gc
from time import time

from vllm import LLM, SamplingParams
from vllm.distributed.parallel_state import (
    destroy_distributed_environment,
    destroy_model_parallel,
)

prefix = "You are a helpful assistant in a library. Answer the reader in one sentence. " * 4
questions = ["Where is the atlas?", "Who wrote this?", "When do you close?"]
prompts = [prefix + question for question in questions]
greedy = SamplingParams(temperature=0.0, max_tokens=8)
texts = []
for cached in (False, True):
    llm = LLM("facebook/opt-125m", enable_prefix_caching=cached, gpu_memory_utilization=0.4)
    llm.generate(prompts[0], greedy)
    start = time()
    outputs = llm.generate(prompts, sampling_params=greedy)
    print(f"{'with' if cached else 'without'} the cache: {time() - start:.2f} s")
    texts.append([output.outputs[0].text for output in outputs])
    destroy_model_parallel()
    destroy_distributed_environment()
    del llm
    gc.collect()
print("same:", texts[0] == texts[1])
