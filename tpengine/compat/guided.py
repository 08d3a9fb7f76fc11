"""Constraints on outputs in the form of vLLM 0.5.4."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from tpengine.errors import InvalidSamplingParamsError
from tpengine.sampling_params import StructuredOutputsParams


def guided_options(request: Any) -> StructuredOutputsParams:
    """Reads `guided_options_request` of vLLM 0.5.4: a dict with the fields of
    `GuidedDecodingRequest`, or such an object.

    Raises:
        InvalidSamplingParamsError: it has another type or unknown fields, or see
            `StructuredOutputsParams`.
    """
    if isinstance(request, Mapping):
        try:
            request = GuidedDecodingRequest(**request)
        except TypeError as error:
            raise InvalidSamplingParamsError(f"guided_options_request: {error}") from None
    if not isinstance(request, GuidedDecodingRequest):
        raise InvalidSamplingParamsError(
            f"guided_options_request must be a dict or a GuidedDecodingRequest, got {request!r:.80}"
        )
    fields = {name.removeprefix("guided_"): value for name, value in vars(request).items()}
    del fields["decoding_backend"]
    return StructuredOutputsParams(**fields)


@dataclass
class GuidedDecodingRequest:
    """The constraint of a request in vLLM 0.5.4; `StructuredOutputsParams` says what the fields
    mean. `guided_decoding_backend` has no effect: there is one, llguidance."""

    guided_json: Any = None
    guided_regex: str | None = None
    guided_choice: list[str] | None = None
    guided_grammar: str | None = None
    guided_decoding_backend: str | None = None
    guided_whitespace_pattern: str | None = None
    guided_json_object: bool | None = None


LLMGuidedOptions = dict
"""In vLLM 0.5.4 a dict with the fields of `GuidedDecodingRequest`."""
