"""Calls tools with `langchain-openai`: `langchain_tools_client.py ADDRESS KEY MODEL`.

Prints JSON: the arguments of the calls that each way to ask gives.
"""

import json
import sys
from typing import Literal

from langchain_core.messages import HumanMessage, ToolMessage
from langchain_openai import ChatOpenAI
from pydantic import BaseModel, Field


class Weather(BaseModel, extra="forbid"):
    """The weather of a city."""

    city: str = Field(max_length=8)
    days: list[Literal["today", "tomorrow"]] = Field(max_length=2)


def main(address, key, model, *_):
    """Makes the calls."""
    chat = ChatOpenAI(
        base_url=f"{address}/v1", api_key=key, model=model, temperature=1, seed=3, max_tokens=300,
        max_retries=0,
    )  # fmt: skip
    bound = chat.bind_tools([Weather], tool_choice="any", parallel_tool_calls=False)
    talk = [HumanMessage("Rain?")]
    whole = bound.invoke(talk)
    streamed = None
    for part in bound.stream(talk):
        streamed = part if streamed is None else streamed + part
    again = bound.invoke([*talk, whole, ToolMessage("wet", tool_call_id=whole.tool_calls[0]["id"])])
    found = {
        "calls": [
            [call["name"], Weather(**call["args"]).model_dump()]
            for message in (whole, streamed, again)
            for call in message.tool_calls
        ],
        "forms": [
            chat.with_structured_output(Weather, method=method).invoke("Rain?").model_dump()
            for method in ("function_calling", "json_schema")
        ],
    }
    print(json.dumps(found))


main(*sys.argv[1:])
