from vllm import LLM, SamplingParams

llm = LLM("facebook/opt-125m", tokenizer_mode="auto", max_model_len=256)
tokenizer = llm.get_tokenizer()
tokenizer.chat_template = "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}"
conversation = [
    {"role": "system", "content": "You are brief."},
    {"role": "user", "content": "Name a colour."},
]
text = tokenizer.apply_chat_template(conversation, tokenize=False, add_generation_prompt=True)
params = SamplingParams(
    temperature=0.7, max_tokens=12, stop=["\n"], stop_token_ids=[tokenizer.eos_token_id]
)
(by_text,) = llm.generate(text, params)
print(by_text.outputs[0].text, by_text.outputs[0].finish_reason)
(by_chat,) = llm.chat(conversation, params)
print(by_chat.prompt, by_chat.outputs[0].text)
