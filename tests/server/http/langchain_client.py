"""Calls a server with `langchain-openai`: `langchain_client.py BASE_URL KEY CALL LATE`."""

import json
import sys

from langchain_openai import ChatOpenAI

base_url, key, call, late = sys.argv[1:]
call, late = json.loads(call), json.loads(late)


def model(body):
    names = ("model", "temperature", "max_tokens", "seed")
    values = {name: body[name] for name in names}
    return ChatOpenAI(base_url=base_url, api_key=key, max_retries=0, **values)


tool = call["tools"][0]
bound = model(call).bind_tools([tool], tool_choice=tool["function"]["name"])
(made,) = bound.invoke(call["messages"]).tool_calls
text = "".join(chunk.content for chunk in model(late).stream(late["messages"]))
print(json.dumps([made["name"], made["args"], text]))
