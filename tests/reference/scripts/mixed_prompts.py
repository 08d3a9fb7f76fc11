from copy import deepcopy

import torch
from vllm import LLM, SamplingParams
from vllm.inputs import TextPrompt, TokensPrompt

llm = LLM(model="facebook/opt-125m", max_num_seqs=8, max_num_batched_tokens=512)


def ban_first_ids(output_ids, logits):
    logits[:5] = -float("inf")
    return logits


def repeat_prompt(prompt_ids, output_ids, logits):
    forced = torch.full_like(logits, -float("inf"))
    forced[prompt_ids[len(output_ids) % len(prompt_ids)]] = 0.0
    return forced


base = SamplingParams(temperature=0.9, max_tokens=6, seed=7)
banned, forced, short = deepcopy(base), base.clone(), base.clone()
banned.logits_processors = [ban_first_ids]
forced.logits_processors = [repeat_prompt]
short.max_tokens, short.logprobs, short.stop = 2, 3, [" the"]
prompts = ["Many words", TextPrompt(prompt="A dict"), TokensPrompt(prompt_token_ids=[5, 6, 7, 8])]
outputs = llm.generate(prompts, [banned, short, forced])
assert min(outputs[0].outputs[0].token_ids) >= 5
assert list(outputs[2].outputs[0].token_ids) == [5, 6, 7, 8, 5, 6]
print([len(entries) for entries in outputs[1].outputs[0].logprobs], base.top_k, base.stop)
ids = [[5, 6, 7], [9, 10]]
for output in llm.generate(prompt_token_ids=ids, sampling_params=base, use_tqdm=False):
    done = output.outputs[0]
    print(output.prompt_token_ids, done.text, output.metrics.finished_time > 0, done.finished())
many = llm.generate([f"Line {i}" for i in range(40)], SamplingParams(max_tokens=3))
print(len(many), all(output.finished for output in many))
