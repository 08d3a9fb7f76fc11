"""`LLM` with the constructor and the arguments of vLLM 0.5.4."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import fields
from inspect import Parameter, Signature
from typing import Any, ClassVar

from tpengine import llm
from tpengine.compat import aliases
from tpengine.compat.guided import guided_options
from tpengine.compat.refused import RefusesNames, refuse_parameters, with_refused_parameters
from tpengine.engine.pooling_calls import Prompts
from tpengine.engine.requests import is_list
from tpengine.engine_args import EngineArgs
from tpengine.inputs import LoRARequest
from tpengine.outputs import RequestOutput
from tpengine.sampling_params import SamplingParams

_POSITIONS = """
    model tokenizer tokenizer_mode skip_tokenizer_init trust_remote_code tensor_parallel_size dtype
    quantization revision tokenizer_revision seed gpu_memory_utilization swap_space cpu_offload_gb
    enforce_eager max_context_len_to_capture max_seq_len_to_capture disable_custom_all_reduce
"""
"""The positional arguments of `LLM` in vLLM 0.5.4."""
_DEFAULTS = {spec.name: spec.default for spec in fields(EngineArgs)} | {"model": None}
_SIGNATURE = Signature(
    [
        Parameter(name, Parameter.POSITIONAL_OR_KEYWORD, default=_DEFAULTS[name])
        for name in _POSITIONS.split()
    ]
    + [Parameter("arguments", Parameter.VAR_KEYWORD)]
)


class LLM(RefusesNames, llm.LLM):
    __doc__ = llm.LLM.__doc__
    __signature__ = _SIGNATURE
    REFUSED: ClassVar[Mapping[str, str]] = {
        "DEPRECATE_LEGACY deprecate_legacy_api": "leave it out; no argument is deprecated",
    }

    def __init__(self, *values: Any, **named: Any) -> None:
        arguments = _SIGNATURE.bind(*values, **named).arguments
        super().__init__(**arguments.pop("arguments", {}), **arguments)
        self.request_counter = aliases.Counter()

    encode = with_refused_parameters(llm.LLM.encode, ["prompt_adapter_request"])

    def generate(
        self,
        prompts: Prompts | None = None,
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        prompt_token_ids: Sequence[int] | Sequence[Sequence[int]] | None = None,
        use_tqdm: bool = True,
        lora_request: LoRARequest | Sequence[LoRARequest | None] | None = None,
        prompt_adapter_request: None = None,
        guided_options_request: Any = None,
        priority: int | Sequence[int] | None = None,
        *,
        on_error: str = "raise",
    ) -> list[RequestOutput]:
        """Completes every prompt: see `tpengine.llm.LLM.generate`.

        Args:
            prompt_adapter_request: only None.
            guided_options_request: what all outputs must look like, in the form of vLLM 0.5.4;
                `structured_outputs` of the parameters is the present one.
        """
        refuse_parameters({"prompt_adapter_request": prompt_adapter_request})
        if guided_options_request is not None:
            held = {"structured_outputs": guided_options(guided_options_request)}
            params: Any = SamplingParams() if sampling_params is None else sampling_params
            many = [llm.changed(each, **held) for each in (params if is_list(params) else [params])]
            sampling_params = many if is_list(params) else many[0]
        return super().generate(
            prompts,
            sampling_params,
            prompt_token_ids,
            use_tqdm,
            lora_request,
            priority=priority,
            on_error=on_error,
        )


aliases.take_over(llm, LLM)
