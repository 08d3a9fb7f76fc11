"""Bodies of calls to a model that embeds, scores or classifies, as requests of the engine."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any, NamedTuple

from tpengine.async_engine.request_table import unique_id
from tpengine.engine.requests import GenerateRequest
from tpengine.inputs import PoolingParams
from tpengine.outputs import RequestOutput
from tpengine.sampling_params import SamplingParams
from tpengine.server.auth import Call
from tpengine.server.batches import MAX_INPUTS, naming_input, serve_all
from tpengine.server.http.fields import FieldError, Fields, whole
from tpengine.server.http.read import read_common, read_prompts
from tpengine.server.state import ServerState

_PARAMETERS: dict[str, type] = {
    "normalize": bool,
    "activation": bool,
    "dimensions": int,
    "prompt_name": str,
    "truncate_prompt_tokens": int,
}


class Text(NamedTuple):
    """A text of a body.

    Attributes:
        name: of its field, for errors.
        prompt_name: see `PoolingParams`.
    """

    name: str
    text: str
    prompt_name: str | None = None


class PoolingBody:
    """Reads one body, and serves its requests.

    Attributes:
        call: its `request_id` is that of the body, if that has one.
        pooling: what the model does.
        model: its name in the answer.
        fields: those that have not been read.
    """

    def __init__(self, call: Call, state: ServerState) -> None:
        pooling = state.loaded_engine().model_config.pooling
        assert pooling is not None, "`check_task` refuses the call"
        self.call, self.pooling = call, pooling
        self.fields = Fields(call.message)
        self._state = state
        self._common = read_common(self.fields, call, state)
        adapter = self._common["lora_request"]
        self.model = state.model if adapter is None else adapter.lora_name
        self._common["params"] = SamplingParams()  # made once: it takes longer than the rest
        self._params = PoolingParams()

    def end(self, *parameters: str) -> None:
        """Reads the parameters of all requests, and refuses the fields that are left.

        Args:
            parameters: those of `PoolingParams` that this kind of call has besides
                `truncate_prompt_tokens`.

        Raises:
            RequestError: a parameter has a wrong value, or a field is left.
        """
        fields, names = self.fields, (*parameters, "truncate_prompt_tokens")
        if fields.has("use_activation"):  # vLLM's name of both
            same = "normalize" if "normalize" in parameters else "activation"
            fields.left.setdefault(same, fields.pop("use_activation"))
        present = list(filter(fields.has, names))
        values: dict[str, Any] = {name: fields.take(name, _PARAMETERS[name], 0) for name in present}
        self._params = PoolingParams(**values)
        fields.end(is_call=True)

    async def serve_input(self, *parameters: str) -> list[RequestOutput]:
        """Serves the texts and lists of ids in `input`.

        Args:
            parameters: see `end`.
        """
        value = self.fields.left.get("input")
        prompts = read_prompts(self.fields, "input", MAX_INPUTS)
        names = [f"input[{place}]" for place in range(len(prompts))]
        if prompts[0] is value:
            names = ["input"]
        self.end(*parameters)
        return await self.serve(map(self.request, names, prompts))

    def read_texts(self, name: str, role: str | None = None) -> list[Text]:
        """The texts of a field, which is a text or a list of texts, or of objects with a text.

        Args:
            role: an embedding model's own prompt of this name stands before them, if it has one.

        Raises:
            FieldError: they are something else, none or too many.
        """
        value = self.fields.pop(name)
        if value is None or value == []:
            raise FieldError(name, "is missing, or empty")
        items = value if isinstance(value, list) else [value]
        if len(items) > MAX_INPUTS:
            raise FieldError(name, f"holds {len(items)} texts, more than {MAX_INPUTS}; send fewer")
        is_known = self.pooling.task == "embed" and role in self.pooling.prompts
        prompt_name = role if is_known else None
        places = [f"{name}[{place}]" for place in range(len(items))] if items is value else [name]
        texts = zip(places, items, strict=True)
        return [Text(place, _text(place, item), prompt_name) for place, item in texts]

    def request(
        self,
        name: str,
        prompt: str | list[int],
        prompt_name: str | None = None,
        second: str | None = None,
    ) -> tuple[str, GenerateRequest]:
        """Returns a request and its name, for `serve`.

        Args:
            name: of the field that errors are about.
            prompt_name: instead of the one in the body.
            second: see `GenerateRequest`.

        Raises:
            RequestIgnoredError: the prompt is too long.
        """
        params, text, token_ids = self._params, None, None
        if prompt_name is not None:
            params = replace(params, prompt_name=prompt_name)
        if isinstance(prompt, str):
            text = prompt
            self._state.check_text(name, [text, second or ""])
        else:
            if params.truncate_prompt_tokens is None:
                with naming_input(name):
                    self._state.check_num_tokens(len(prompt))
            token_ids = whole(prompt)
        own: dict[str, Any] = {"request_id": unique_id(self.call.request_id), "second": second}
        return name, GenerateRequest(text, token_ids, pooling_params=params, **own, **self._common)

    async def serve(self, requests: Iterable[tuple[str, GenerateRequest]]) -> list[RequestOutput]:
        """Serves requests; see `serve_all`."""
        return await serve_all(self._state, requests)


def _text(name: str, item: Any) -> str:
    if isinstance(item, dict):
        fields = Fields(item, f"{name}.")
        item = fields.take("text", str, "")
        fields.end()
    if not isinstance(item, str):
        raise FieldError(name, f"must be a text, or an object with text, got {type(item).__name__}")
    return item
