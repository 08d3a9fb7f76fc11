import argparse

from vllm import EngineArgs, LLMEngine, RequestOutput, SamplingParams
from vllm.utils import FlexibleArgumentParser


def create_test_prompts() -> list[tuple[str, SamplingParams]]:
    return [
        ("A robot may not injure", SamplingParams(temperature=0.0, logprobs=1, prompt_logprobs=1)),
        ("To be or not to be,", SamplingParams(temperature=0.8, top_k=5, presence_penalty=0.2)),
        (
            "What is the meaning of life?",
            SamplingParams(n=2, best_of=5, temperature=0.8, top_p=0.95, frequency_penalty=0.1),
        ),
        (
            "It is only with the heart",
            SamplingParams(n=3, best_of=3, use_beam_search=True, temperature=0.0),
        ),
    ]


def process_requests(engine: LLMEngine, test_prompts: list[tuple[str, SamplingParams]]) -> None:
    request_id = 0
    while test_prompts or engine.has_unfinished_requests():
        if test_prompts:
            prompt, sampling_params = test_prompts.pop(0)
            engine.add_request(str(request_id), prompt, sampling_params)
            request_id += 1
        request_outputs: list[RequestOutput] = engine.step()
        for request_output in request_outputs:
            if request_output.finished:
                print(request_output.request_id, [o.text for o in request_output.outputs])


def main(args: argparse.Namespace) -> None:
    engine = LLMEngine.from_engine_args(EngineArgs.from_cli_args(args))
    engine.check_health()
    print(engine.model_config.max_model_len, engine.cache_config.num_gpu_blocks > 0)
    process_requests(engine, create_test_prompts())
    engine.do_log_stats()


if __name__ == "__main__":
    parser = FlexibleArgumentParser(description="the engine, step by step")
    parser = EngineArgs.add_cli_args(parser)
    main(parser.parse_args(["--model", "facebook/opt-125m", "--max_num_seqs", "16", "-tp", "1"]))
