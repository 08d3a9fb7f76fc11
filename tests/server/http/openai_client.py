"""Calls a server with the package `openai`, by a Python that has nothing of tpengine:
`openai_client.py ADDRESS KEY MODEL PROMPT NUM_TOKENS`.

Prints JSON: what each kind of call gave, and the exceptions that wrong calls raised.
"""

import asyncio
import json
import sys

import openai

AT_ONCE, CROWD = 8, 48


def errors(client, model, prompt):
    """The exceptions by name of the fault: class, status, code, param."""
    stranger, complete = client.with_options(api_key="sk-of-another"), client.completions.create
    text = {"model": model, "prompt": prompt}
    wrong = {
        "key": stranger.models.list,
        "model": lambda: complete(model="absent", prompt=prompt),
        "temperature": lambda: complete(**text, temperature=-1.0),
        "stream": lambda: complete(**text, temperature=-1.0, stream=True),
        "suffix": lambda: complete(**text, suffix="the end"),
        "length": lambda: complete(model=model, prompt=[5] * 5000),
        "messages": lambda: client.chat.completions.create(model=model, messages=[]),
        "embeddings": lambda: client.embeddings.create(model=model, input=prompt),
    }
    found = {}
    for name, call in wrong.items():
        try:
            call()
        except openai.APIStatusError as error:
            kind = type(error).__name__
            found[name] = [kind, error.status_code, error.code, error.param, error.request_id]
    return found


async def at_once(client, chat, completion):
    """Eight streams at once; a crowd that finds the queue full, without and with retries."""

    async def stream():
        chunks = await client.chat.completions.create(**chat, stream=True)
        return "".join([chunk.choices[0].delta.content or "" async for chunk in chunks])

    async def crowd(retries):
        patient = client.with_options(max_retries=retries)
        calls = [patient.completions.create(**completion) for _ in range(CROWD)]
        return await asyncio.gather(*calls, return_exceptions=True)

    async with client:
        streams = await asyncio.gather(*[stream() for _ in range(AT_ONCE)])
        ends = [sorted({type(one).__name__ for one in await crowd(n)}) for n in (0, 30)]
    return streams, ends


def main(address, key, model, prompt, num_tokens):
    """Makes the calls."""
    client = openai.OpenAI(base_url=f"{address}/v1", api_key=key, max_retries=0, timeout=60)
    greedy = {"model": model, "temperature": 0, "max_tokens": int(num_tokens)}
    completion = {**greedy, "prompt": prompt}
    chat = {**greedy, "messages": [{"role": "user", "content": prompt}]}
    whole, usage = client.completions.create(**completion), {"include_usage": True}
    *parts, last = client.completions.create(**completion, stream=True, stream_options=usage)
    first = client.chat.completions.create(**chat, logprobs=True, top_logprobs=2).choices[0]
    second = client.chat.completions.create(**chat, seed=7, stop=["\n\n\n"], user="me").choices[0]
    with client.chat.completions.stream(**chat) as events:
        kinds = [event.type for event in events]
        streamed = events.get_final_completion().choices[0]
    asynchronous = openai.AsyncOpenAI(base_url=f"{address}/v1", api_key=key, max_retries=0)
    streams, ends = asyncio.run(at_once(asynchronous, chat, {**completion, "max_tokens": 100}))
    found = {
        "models": [one.id for one in client.models.list()],
        "model": client.models.retrieve(model).id,
        "completions": [whole.choices[0].text, "".join(one.choices[0].text for one in parts)],
        "usage": [whole.usage.to_dict(), last.usage.to_dict()],
        "request_id": whole._request_id,
        "finish_reasons": [whole.choices[0].finish_reason, parts[-1].choices[0].finish_reason],
        "chats": [*(one.message.content for one in (first, second, streamed)), *streams],
        "token_bytes": [byte for token in first.logprobs.content for byte in token.bytes],
        "num_candidates": [len(token.top_logprobs) for token in first.logprobs.content],
        "events": kinds,
        "ends": ends,
        "errors": errors(client, model, prompt),
    }
    print(json.dumps(found))


main(*sys.argv[1:])
