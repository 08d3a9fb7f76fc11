from vllm import LLM, EmbeddingRequestOutput, PoolingParams
from vllm.outputs import EmbeddingOutput

prompts = ["Hello, my name is", "The president of the", "The capital of France is"]
llm = LLM(model="intfloat/e5-mistral-7b-instruct", enforce_eager=True)
outputs: list[EmbeddingRequestOutput] = llm.encode(prompts)
for output in outputs:
    print(output.request_id, len(output.prompt_token_ids), len(output.outputs.embedding))

engine = llm.llm_engine
for i, prompt in enumerate(prompts):
    engine.add_request(f"embd-{i}", prompt, PoolingParams())
embeddings: dict[str, EmbeddingOutput] = {}
while engine.has_unfinished_requests():
    for output in engine.step():
        embeddings[output.request_id] = output.outputs
same = [embeddings[f"embd-{i}"] == output.outputs for i, output in enumerate(outputs)]
print(engine.model_config.embedding_mode, same)
