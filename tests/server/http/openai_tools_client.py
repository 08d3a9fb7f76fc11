"""Calls tools with the `openai` package: `openai_tools_client.py ADDRESS KEY MODEL`.

Prints JSON: the calls and parsed answers of each way to ask.
"""

import json
import sys
from typing import Literal

import openai
from pydantic import BaseModel, Field


class Weather(BaseModel):
    """The weather of a city."""

    city: str = Field(max_length=8)
    days: list[Literal["today", "tomorrow"]] = Field(max_length=2)


def plain(message):
    """A message's calls, without their ids."""
    assert message.content is None
    return [[one.function.name, one.function.arguments] for one in message.tool_calls]


def main(address, key, model, *_):
    """Makes the calls."""
    client = openai.OpenAI(base_url=f"{address}/v1", api_key=key, max_retries=0, timeout=60)
    tool = openai.pydantic_function_tool(Weather)
    tool["function"].pop("strict")
    asked = {"model": model, "messages": [{"role": "user", "content": "Rain?"}], "seed": 3}
    asked |= {"temperature": 1, "max_tokens": 300}
    held = {**asked, "tools": [tool], "tool_choice": "required", "parallel_tool_calls": False}
    chats = client.chat.completions
    whole = chats.create(**held).choices[0]
    with chats.stream(**held) as events:
        kinds = sorted({event.type for event in events})
        streamed = events.get_final_completion().choices[0]
    pieces = [one.choices[0].delta for one in chats.create(**held, stream=True)]
    pieces = [call for delta in pieces for call in delta.tool_calls or ()]
    strict = {**held, "tools": [openai.pydantic_function_tool(Weather)]}
    (parsed,) = chats.parse(**strict).choices[0].message.tool_calls
    with chats.stream(**strict) as events:
        last = events.get_final_completion().choices[0].message.tool_calls[0]
    call = whole.message.tool_calls[0]
    answer = {"role": "tool", "tool_call_id": call.id, "content": "wet"}
    talk = [*asked["messages"], whole.message, answer]
    form = chats.parse(**asked, response_format=Weather)
    found = {
        "whole": plain(whole.message),
        "streamed": plain(streamed.message),
        "pieces": [pieces[0].function.name, "".join(one.function.arguments for one in pieces)],
        "reasons": [whole.finish_reason, streamed.finish_reason],
        "events": kinds,
        "parsed": [one.function.parsed_arguments.model_dump() for one in (parsed, last)],
        "after": chats.create(**{**held, "messages": talk}).choices[0].finish_reason,
        "form": form.choices[0].message.parsed.model_dump(),
    }
    print(json.dumps(found))


main(*sys.argv[1:])
