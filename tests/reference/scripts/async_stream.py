import asyncio

from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.engine.async_llm_engine import AsyncEngineDeadError, AsyncLLMEngine
from vllm.sampling_params import SamplingParams
from vllm.utils import random_uuid


async def answer(engine: AsyncLLMEngine, prompt: str, abort_after: int) -> str:
    request_id = f"cmpl-{random_uuid()}"
    final = None
    async for output in engine.generate(prompt, SamplingParams(max_tokens=12), request_id):
        final = output
        if len(output.outputs[0].token_ids) == abort_after:
            await engine.abort(request_id)
    assert final is not None
    return f"{final.prompt}{final.outputs[0].text}"


async def main() -> None:
    args = AsyncEngineArgs(model="facebook/opt-125m", disable_log_requests=True)
    engine = AsyncLLMEngine.from_engine_args(args, start_engine_loop=True)
    config = await engine.get_model_config()
    tokenizer = await engine.get_tokenizer()
    await engine.check_health()
    print(config.max_model_len, tokenizer.eos_token_id, engine.is_running, engine.errored)
    prompts = ["Hello, my name is", "Once upon a time", "The sea is"]
    try:
        print(await asyncio.gather(*(answer(engine, p, i * 4) for i, p in enumerate(prompts))))
    except AsyncEngineDeadError as error:
        raise SystemExit(str(error)) from error


asyncio.run(main())
