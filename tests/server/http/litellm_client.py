"""Calls a server with `litellm`: `litellm_client.py ADDRESS KEY MODEL PROMPT NUM_TOKENS`.

Prints JSON: texts of each kind of call, and the exceptions that wrong calls raised.
"""

import asyncio
import json
import sys

import litellm


def main(address, key, model, prompt, num_tokens):
    """Makes the calls."""
    common = {"api_key": key, "temperature": 0, "max_tokens": int(num_tokens), "num_retries": 0}
    messages = [{"role": "user", "content": prompt}]
    chats, texts = [], []
    for provider in ("openai", "hosted_vllm"):
        chat = {**common, "model": f"{provider}/{model}", "api_base": f"{address}/v1"}
        chat["messages"] = messages
        chats.append(litellm.completion(**chat).choices[0].message.content)
        chunks = litellm.completion(**chat, stream=True, stream_options={"include_usage": True})
        chats.append("".join(c.choices[0].delta.content or "" for c in chunks if c.choices))
    chats.append(asyncio.run(litellm.acompletion(**chat)).choices[0].message.content)
    text = {**common, "model": f"text-completion-openai/{model}", "api_base": f"{address}/v1"}
    texts.append(litellm.text_completion(**text, prompt=prompt).choices[0].text)
    errors = {}
    for name, wrong in {
        "key": {**chat, "api_key": "sk-of-another-server"},
        "model": {**chat, "model": "openai/absent"},
        "length": {**chat, "messages": [{"role": "user", "content": "word " * 5000}]},
        "size": {**chat, "messages": [{"role": "user", "content": "word " * 100_000}]},
        "temperature": {**chat, "temperature": -1.0},
    }.items():
        try:
            litellm.completion(**wrong)
        except Exception as error:
            errors[name] = type(error).__name__
    print(json.dumps({"chats": chats, "texts": texts, "errors": errors}))


main(*sys.argv[1:])
