"""Calls a server with `langchain-openai`: `langchain_client.py ADDRESS KEY MODEL PROMPT TOKENS`.

Prints JSON: texts of each kind of call, and tokens as it counts them.
"""

import asyncio
import json
import sys

from langchain_openai import ChatOpenAI, OpenAI


def main(address, key, model, prompt, num_tokens):
    """Makes the calls."""
    common = {"base_url": f"{address}/v1", "api_key": key, "model": model, "temperature": 0}
    common |= {"max_tokens": int(num_tokens), "max_retries": 0}
    chat, plain = ChatOpenAI(**common, stream_usage=True), OpenAI(**common)
    whole, parts = chat.invoke(prompt), list(chat.stream(prompt))
    found = {
        "chats": [
            whole.content,
            "".join(part.content for part in parts),
            *(one.content for one in chat.batch([prompt] * 4)),
            asyncio.run(chat.ainvoke([("user", prompt)])).content,
        ],
        "num_tokens": [
            whole.usage_metadata["output_tokens"],
            *(one.usage_metadata["output_tokens"] for one in parts if one.usage_metadata),
        ],
        "texts": [plain.invoke(prompt), "".join(plain.stream(prompt)), *plain.batch([prompt] * 2)],
    }
    print(json.dumps(found))


main(*sys.argv[1:])
