from vllm import LLM, SamplingParams

llm = LLM(model="facebook/opt-125m", swap_space=1, seed=0)
params = SamplingParams(
    n=2,
    best_of=4,
    use_beam_search=True,
    temperature=0,
    length_penalty=0.8,
    early_stopping=True,
    max_tokens=10,
)
for output in llm.generate(["The future of AI is", "Rain falls"], params, use_tqdm=False):
    for beam in output.outputs:
        print(f"{beam.cumulative_logprob:.3f} {beam.text!r} {beam.finish_reason}")
