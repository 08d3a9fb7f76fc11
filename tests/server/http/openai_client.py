"""Calls a server with `openai`: `openai_client.py BASE_URL KEY CALL LATE`, bodies as JSON."""

import json
import sys

import openai

base_url, key, call, late = sys.argv[1:]
chats = openai.OpenAI(base_url=base_url, api_key=key, max_retries=0).chat.completions
(made,) = chats.create(**json.loads(call)).choices[0].message.tool_calls
chunks = chats.create(**json.loads(late))
text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
print(json.dumps([made.function.name, json.loads(made.function.arguments), text]))
