"""Answers in OpenAI's shape: the chunks of a stream, and whole answers.

They are made of dicts, without a class for each level (docs/openai.md compares the costs).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any

from tpengine.engine.tokenizer import Tokenizer
from tpengine.outputs import CompletionOutput, Logprob, RequestOutput
from tpengine.server.http.json_text import event
from tpengine.server.http.reasoning import THOUGHT_FIELDS, ReasoningSplitter
from tpengine.server.http.tool_formats import ToolParser
from tpengine.server.http.tools import Tools
from tpengine.server.stream_sender import CandidateTurns, Positions, of_output, of_prompt

Json = dict[str, Any]
_LEAST_LOGPROB = -9999.0
"""In place of minus infinity, which JSON does not have; vLLM writes this number too."""


@dataclass(frozen=True, slots=True)
class Style:
    """What the answer to one call has in it.

    Attributes:
        is_chat: whether it is a chat completion.
        streams: whether it is a stream of chunks.
        echo: each completion begins with its prompt.
        echo_only: it ends there, because the request asks for 0 tokens.
        logprobs: number of likeliest tokens at each position; None: no log probabilities.
        prompt_logprobs: the log probabilities of the prompt are a field of their own.
        token_ids: the ids of prompt and output are fields.
        usage: a stream ends with a chunk of usage.
        usage_in_all: each chunk has the usage so far.
        tools: that the model may call; None: none.
        constraint: the field of the body that says what the output must look like.
    """

    is_chat: bool
    streams: bool = False
    echo: bool = False
    echo_only: bool = False
    logprobs: int | None = None
    prompt_logprobs: bool = False
    token_ids: bool = False
    usage: bool = False
    usage_in_all: bool = False
    tools: Tools | None = None
    constraint: str = "structured_outputs"

    def head(self, request_id: str, created: int, model: str) -> Json:
        """The fields of an answer or a chunk before its choices.

        Args:
            created: seconds of `time.time`.
        """
        own_id = f"{'chatcmpl' if self.is_chat else 'cmpl'}-{request_id}"
        kind = "chat.completion" if self.is_chat else "text_completion"
        chunk = ".chunk" if self.is_chat and self.streams else ""
        return {"id": own_id, "object": kind + chunk, "created": created, "model": model}


@dataclass(slots=True)
class _Choice:
    """A choice that has begun.

    Attributes:
        splitter: None: its text has no reasoning, or no more.
        parser: None: the model may call no tools.
        offset: length of the texts of its tokens so far.
    """

    splitter: ReasoningSplitter | None
    parser: ToolParser | None
    offset: int = 0


class AnswerWriter:
    """Writes the answer to one prompt.

    Args:
        style: of the call.
        head: see `Style.head`.
        tokenizer: None: the model has none.
        first_index: of its choices.

    Attributes:
        num_prompt_tokens, num_cached_tokens, num_output_tokens: so far.
    """

    def __init__(
        self, style: Style, head: Json, tokenizer: Tokenizer | None = None, first_index: int = 0
    ) -> None:
        self.num_prompt_tokens = self.num_cached_tokens = self.num_output_tokens = 0
        self._style = style
        self._head = head
        self._tokenizer = tokenizer
        self._first_index = first_index
        self._choices: dict[int, _Choice] = {}
        self._turns = CandidateTurns()

    def write_tokens(self, output: RequestOutput) -> bytes | None:
        """The chunk of a delta that `has_only_tokens`; None: use `write`."""
        completion = output.outputs[0]
        if self._style.logprobs is not None or completion.index not in self._choices:
            return None
        self.num_output_tokens = output.num_output_tokens
        return self._chunk(self._choice(completion, self._text(completion)), {})

    async def write(self, output: RequestOutput) -> bytes:
        """The chunks of a delta, one for each choice, and before its first one the chunk with the
        role."""
        chunks = []
        for completion in self._completions(output):
            begins, extra = completion.index not in self._choices, Json()
            if begins:
                extra = await self._begin(output, completion.index)
            if begins and self._style.is_chat:
                role = replace(completion, token_ids=(), finish_reason=None)
                content = "" if self._style.tools is None else None
                delta = {"delta": {"role": "assistant", "content": content}}
                chunks.append(self._chunk(self._choice(role, delta), extra))
                extra = {}
            choice = await self._whole_choice(output, completion, begins)
            chunks.append(self._chunk(choice | extra, {}))
        return b"".join(chunks)

    async def write_whole(self, output: RequestOutput) -> tuple[list[Json], Json]:
        """The choices of a finished request; and the fields that a chat completion has about its
        prompt after them."""
        choices, extra = [], Json()
        for completion in self._completions(output):
            extra = await self._begin(output, completion.index)
            choice = await self._whole_choice(output, completion, True)
            choices.append(choice if self._style.is_chat else choice | extra)
        return choices, extra if self._style.is_chat else {}

    def _completions(self, output: RequestOutput) -> list[CompletionOutput]:
        """The choices of an output. The usage becomes what it is with them."""
        self.num_prompt_tokens = output.num_prompt_tokens
        self.num_cached_tokens = output.num_cached_tokens
        if self._style.echo_only:
            indices = [completion.index for completion in output.outputs]
            return [CompletionOutput(index, "", (), None, [], "length") for index in indices]
        self.num_output_tokens = output.num_output_tokens
        return output.outputs

    async def _begin(self, output: RequestOutput, index: int) -> Json:
        """Begins a choice; returns the fields about its prompt."""
        style = self._style
        self._choices[index] = _Choice(
            ReasoningSplitter(output.prompt) if style.is_chat else None,
            None if style.tools is None else style.tools.parser(),
        )
        extra: Json = {}
        if style.token_ids:
            extra["prompt_token_ids"] = output.prompt_token_ids
        if style.prompt_logprobs:
            extra["prompt_logprobs"] = await self._prompt_logprobs(output)
        return extra

    async def _whole_choice(
        self, output: RequestOutput, completion: CompletionOutput, begins: bool
    ) -> Json:
        """A choice with its log probabilities and, if it begins, with its prompt."""
        logprobs, repeats = None, begins and self._style.echo
        if self._style.logprobs is not None:
            positions = of_output(completion)
            if repeats:
                positions = chain(of_prompt(output), positions)
            if self._style.is_chat:
                logprobs = await self._chat_logprobs(positions)
            else:
                logprobs = await self._logprobs(self._choices[completion.index], positions)
        prompt = output.prompt if output.encoder_prompt is None else output.encoder_prompt
        text = self._text(completion, (prompt or "") if repeats else "")
        return self._choice(completion, text, logprobs)

    def _text(self, completion: CompletionOutput, before: str = "") -> Json:
        """The field with the text."""
        if not self._style.is_chat:
            return {"text": before + completion.text}
        choice = self._choices[completion.index]
        if choice.splitter is None:
            fields: Json = {"content": completion.text}
        else:
            fields = self._parts(completion, choice, choice.splitter)
        if self._style.streams:
            return {"delta": fields}
        return {"message": {"role": "assistant", **fields}}

    def _parts(
        self, completion: CompletionOutput, choice: _Choice, splitter: ReasoningSplitter
    ) -> Json:
        """The fields of a text that may have reasoning, and then calls of tools."""
        is_last = completion.finish_reason is not None
        reasoning, content = splitter.take(completion.text, is_last)
        calls: list[Json] = []
        if choice.parser is not None:
            content, calls = choice.parser.take(content, is_last)
        elif splitter.is_over:
            choice.splitter = None
        fields: Json = dict.fromkeys(THOUGHT_FIELDS, reasoning) if reasoning else {}
        if content or not self._style.streams:
            fields["content"] = content if content or not calls else None
        if calls:
            if not self._style.streams:  # only there a call has its place
                calls = [{key: call[key] for key in ("id", "type", "function")} for call in calls]
            fields["tool_calls"] = calls
        return fields

    def _choice(
        self, completion: CompletionOutput, text: Json, logprobs: Json | None = None
    ) -> Json:
        index, reason = self._first_index + completion.index, completion.finish_reason
        choice = {"index": index, **text, "logprobs": logprobs, "finish_reason": reason}
        if reason is not None:
            parser = self._choices[completion.index].parser
            if parser is not None:
                choice["finish_reason"] = parser.finish_reason(reason)
            choice["stop_reason"] = completion.stop_reason
        if self._style.token_ids:
            choice["token_ids"] = completion.token_ids
        return choice

    def _chunk(self, choice: Json, extra: Json) -> bytes:
        chunk = {**self._head, "choices": [choice], **extra}
        if self._style.usage:
            chunk["usage"] = usage([self]) if self._style.usage_in_all else None
        return event(chunk)

    async def _logprobs(self, choice: _Choice, positions: Positions) -> Json:
        """Log probabilities of a completion."""
        tokens, chosen, likeliest, offsets = [], [], [], []
        async for token_id, candidates in self._turns.take(positions):
            token = self._token_text(token_id, candidates.get(token_id))
            tokens.append(token)
            offsets.append(choice.offset)
            choice.offset += len(token)
            chosen.append(_number(candidates[token_id]) if candidates else None)
            by_text: dict[str, float] = {}
            for other_id, other in _by_rank(candidates):  # parts of characters may have one text
                by_text.setdefault(self._token_text(other_id, other), _number(other))
            likeliest.append(by_text or None)
        lists = {"tokens": tokens, "token_logprobs": chosen, "top_logprobs": likeliest}
        return {**lists, "text_offset": offsets}

    async def _chat_logprobs(self, positions: Positions) -> Json:
        """Log probabilities of a chat completion."""
        content, most = [], self._style.logprobs or 0
        async for token_id, candidates in self._turns.take(positions):
            ranked = [pair for pair in _by_rank(candidates) if (pair[1].rank or 0) <= most]
            chosen = self._candidate(token_id, candidates[token_id])
            content.append({**chosen, "top_logprobs": [self._candidate(*pair) for pair in ranked]})
        return {"content": content}

    def _candidate(self, token_id: int, candidate: Logprob) -> Json:
        text = self._token_text(token_id, candidate)
        table = None if self._tokenizer is None else self._tokenizer.byte_table
        piece: str | bytes = text
        if table is not None and token_id < len(table.pieces):
            piece = table.pieces[token_id]
        data = piece if isinstance(piece, bytes) else piece.encode()
        return {"token": text, "logprob": _number(candidate), "bytes": list(data)}

    async def _prompt_logprobs(self, output: RequestOutput) -> list[Json | None]:
        """Log probabilities of a prompt, in vLLM's shape."""
        positions: list[Json | None] = []
        async for _, candidates in self._turns.take(of_prompt(output)):
            fields = {
                str(token_id): {
                    "logprob": _number(candidate),
                    "rank": candidate.rank,
                    "decoded_token": self._token_text(token_id, candidate),
                }
                for token_id, candidate in candidates.items()
            }
            positions.append(fields or None)
        return positions

    def _token_text(self, token_id: int, candidate: Logprob | None) -> str:
        if candidate is not None and candidate.decoded_token is not None:
            return candidate.decoded_token
        tokenizer = self._tokenizer
        return f"token_id:{token_id}" if tokenizer is None else tokenizer.token_text(token_id)


def usage(writers: Sequence[AnswerWriter]) -> Json:
    """The usage of all prompts of a call."""
    num_prompt_tokens = sum(writer.num_prompt_tokens for writer in writers)
    num_output_tokens = sum(writer.num_output_tokens for writer in writers)
    num_cached_tokens = sum(writer.num_cached_tokens for writer in writers)
    return {
        "prompt_tokens": num_prompt_tokens,
        "completion_tokens": num_output_tokens,
        "total_tokens": num_prompt_tokens + num_output_tokens,
        "prompt_tokens_details": {"cached_tokens": num_cached_tokens},
    }


def _number(candidate: Logprob) -> float:
    # A NaN fails the comparison too.
    return candidate.logprob if candidate.logprob > _LEAST_LOGPROB else _LEAST_LOGPROB


def _by_rank(candidates: Mapping[int, Logprob]) -> list[tuple[int, Logprob]]:
    return sorted(candidates.items(), key=lambda item: item[1].rank or 0)
