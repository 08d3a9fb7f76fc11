"""Answers in OpenAI's shape, as JSON text: the chunks of a stream, and whole answers.

The text is put together from parts, without an object for each level (docs/openai.md has the cost
of both ways).
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from json.encoder import encode_basestring as quote
from typing import Any

from tpengine.engine.tokenizer import Tokenizer
from tpengine.outputs import CompletionOutput, Logprob, RequestOutput
from tpengine.server.http.reasoning import ReasoningSplitter
from tpengine.server.http.tool_formats import ToolParser
from tpengine.server.http.tools import Tools
from tpengine.server.stream_sender import CandidateTurns, Positions

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

    def head(self, request_id: str, created: int, model: str) -> str:
        """The beginning of an answer or a chunk, up to its first choice.

        Args:
            created: seconds of `time.time`.
        """
        own_id = f"{'chatcmpl' if self.is_chat else 'cmpl'}-{request_id}"
        kind = "chat.completion" if self.is_chat else "text_completion"
        chunk = ".chunk" if self.is_chat and self.streams else ""
        about = f'"object":"{kind}{chunk}","created":{created},"model":{json.dumps(model)}'
        return f'{{"id":{json.dumps(own_id)},{about},"choices":['


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
        self, style: Style, head: str, tokenizer: Tokenizer | None = None, first_index: int = 0
    ) -> None:
        self.num_prompt_tokens = self.num_cached_tokens = self.num_output_tokens = 0
        self._style = style
        self._head = f"data: {head}"
        self._end = ',"usage":null}\n\n' if style.usage else "}\n\n"
        self._tokenizer = tokenizer
        self._first_index = first_index
        self._is_plain = style.logprobs is None and not style.usage_in_all
        self._begun: set[int] = set()
        self._finished: set[int] = set()
        self._splitters: dict[int, ReasoningSplitter] = {}
        self._parsers: dict[int, ToolParser] = {}
        self._offsets: dict[int, int] = {}  # by index: length of the texts of its tokens so far
        self._turns = CandidateTurns()

    def write_tokens(self, output: RequestOutput) -> bytes | None:
        """The chunk of an output that has only new tokens of one choice; None: use `write`."""
        if output.finished or not self._is_plain or len(output.outputs) != 1:
            return None
        one = output.outputs[0]
        if not one.token_ids or one.finish_reason is not None or one.index not in self._begun:
            return None
        self.num_output_tokens += len(one.token_ids)
        return f"{self._head}{self._choice(one, self._text(one))}]{self._end}".encode()

    async def write(self, output: RequestOutput) -> bytes:
        """The chunks of an output, one for each choice that has news, and before its first one the
        chunk with the role."""
        chunks = []
        for one in self._completions(output):
            # The engine reports all sequences of a request, also those that finished earlier.
            is_finished = one.finish_reason is not None
            if one.index in self._finished or not (one.token_ids or one.text or is_finished):
                continue
            if is_finished:
                self._finished.add(one.index)
            begins, about = one.index not in self._begun, ""
            if begins:
                about = await self._begin(output, one)
            if begins and self._style.is_chat:
                role = replace(one, token_ids=(), finish_reason=None)
                content = '""' if self._style.tools is None else "null"
                delta = f'"delta":{{"role":"assistant","content":{content}}}'
                chunks.append(self._chunk(self._choice(role, delta), about))
                about = ""
            chunks.append(self._chunk(await self._whole_choice(output, one, begins, about)))
        return "".join(chunks).encode()

    async def write_whole(self, output: RequestOutput) -> tuple[str, str]:
        """The choices of a finished request, separated by commas; and what a chat completion has
        about its prompt after them."""
        choices, about = [], ""
        for one in self._completions(output):
            about = await self._begin(output, one)
            inside = "" if self._style.is_chat else about
            choices.append(await self._whole_choice(output, one, True, inside))
        return ",".join(choices), about if self._style.is_chat else ""

    def _completions(self, output: RequestOutput) -> Iterator[CompletionOutput]:
        """The choices of an output. Their tokens are added to the usage."""
        self.num_prompt_tokens = len(output.prompt_token_ids)
        self.num_cached_tokens = output.num_cached_tokens
        for one in output.outputs:
            if self._style.echo_only:
                one = CompletionOutput(one.index, "", (), None, [], "length")
            self.num_output_tokens += len(one.token_ids)
            yield one

    async def _begin(self, output: RequestOutput, one: CompletionOutput) -> str:
        """Begins a choice; returns the fields about its prompt."""
        self._begun.add(one.index)
        if self._style.is_chat:
            self._splitters[one.index] = ReasoningSplitter(output.prompt)
        if self._style.tools is not None:
            self._parsers[one.index] = self._style.tools.parser()
        about = ""
        if self._style.token_ids:
            about = f',"prompt_token_ids":{_ids(output.prompt_token_ids)}'
        if self._style.prompt_logprobs:
            about += f',"prompt_logprobs":{await self._prompt_logprobs(output)}'
        return about

    async def _whole_choice(
        self, output: RequestOutput, one: CompletionOutput, begins: bool, about: str
    ) -> str:
        """A choice with its log probabilities and, if it begins, with its prompt."""
        logprobs, repeats = "null", begins and self._style.echo
        if self._style.logprobs is not None:
            told: Positions = zip(one.token_ids, one.logprobs or (), strict=False)
            if repeats:
                told = chain(_of_prompt(output), told)
            write = self._chat_logprobs if self._style.is_chat else self._logprobs
            logprobs = await write(one.index, told)
        text = self._text(one, (output.prompt or "") if repeats else "")
        return self._choice(one, text, logprobs, about)

    def _text(self, one: CompletionOutput, before: str = "") -> str:
        """The field with the text."""
        if not self._style.is_chat:
            return f'"text":{quote(before + one.text)}'
        splitter = self._splitters.get(one.index)
        if splitter is None:
            fields = f'"content":{quote(one.text)}'
        else:
            fields = self._parts(one, splitter)
        if self._style.streams:
            return f'"delta":{{{fields}}}'
        return f'"message":{{"role":"assistant",{fields}}}'

    def _parts(self, one: CompletionOutput, splitter: ReasoningSplitter) -> str:
        """The fields of a text that may have reasoning, and then calls of tools."""
        is_last, parser = one.finish_reason is not None, self._parsers.get(one.index)
        reasoning, content = splitter.take(one.text, is_last)
        calls: list[dict[str, Any]] = []
        if parser is not None:
            content, calls = parser.take(content, is_last)
        elif splitter.is_over:
            del self._splitters[one.index]
        fields = [f'"reasoning_content":{quote(reasoning)}'] if reasoning else []
        if content or not self._style.streams:
            fields.append(f'"content":{quote(content) if content or not calls else "null"}')
        if calls:
            if not self._style.streams:  # only there a call has its place
                calls = [{key: call[key] for key in ("id", "type", "function")} for call in calls]
            fields.append(f'"tool_calls":{json.dumps(calls, ensure_ascii=False)}')
        return ",".join(fields)

    def _choice(
        self, one: CompletionOutput, text: str, logprobs: str = "null", about: str = ""
    ) -> str:
        end = "null"
        if one.finish_reason is not None:
            parser, reason = self._parsers.get(one.index), one.finish_reason
            reason = reason if parser is None else parser.finish_reason(reason)
            end = f'{quote(reason)},"stop_reason":{json.dumps(one.stop_reason)}'
        if self._style.token_ids:
            about += f',"token_ids":{_ids(one.token_ids)}'
        index = self._first_index + one.index
        return f'{{"index":{index},{text},"logprobs":{logprobs},"finish_reason":{end}{about}}}'

    def _chunk(self, choice: str, about: str = "") -> str:
        if self._style.usage_in_all:
            about += f',"usage":{usage([self])}'
            return f"{self._head}{choice}]{about}}}\n\n"
        return f"{self._head}{choice}]{about}{self._end}"

    async def _logprobs(self, index: int, told: Positions) -> str:
        """Log probabilities of a completion."""
        tokens, chosen, likeliest, offsets = [], [], [], []
        offset = self._offsets.get(index, 0)
        async for token_id, found in self._turns.take(told):
            token = self._token_text(token_id, found.get(token_id))
            tokens.append(quote(token))
            offsets.append(str(offset))
            offset += len(token)
            chosen.append(_number(found[token_id]) if found else "null")
            by_text: dict[str, str] = {}
            for one_id, one in _by_rank(found):  # of parts of characters, many have one text
                by_text.setdefault(quote(self._token_text(one_id, one)), _number(one))
            pairs = ",".join(f"{text}:{number}" for text, number in by_text.items())
            likeliest.append(f"{{{pairs}}}" if found else "null")
        self._offsets[index] = offset
        return (
            f'{{"tokens":[{",".join(tokens)}],"token_logprobs":[{",".join(chosen)}],'
            f'"top_logprobs":[{",".join(likeliest)}],"text_offset":[{",".join(offsets)}]}}'
        )

    async def _chat_logprobs(self, index: int, told: Positions) -> str:
        """Log probabilities of a chat completion."""
        content, most = [], self._style.logprobs or 0
        async for token_id, found in self._turns.take(told):
            top = [
                self._candidate(*pair) for pair in _by_rank(found) if (pair[1].rank or 0) <= most
            ]
            likeliest = ",".join(f"{{{one}}}" for one in top)
            chosen = self._candidate(token_id, found[token_id])
            content.append(f'{{{chosen},"top_logprobs":[{likeliest}]}}')
        return f'{{"content":[{",".join(content)}]}}'

    def _candidate(self, token_id: int, one: Logprob) -> str:
        text = self._token_text(token_id, one)
        table = None if self._tokenizer is None else self._tokenizer.byte_table
        piece: str | bytes = text
        if table is not None and token_id < len(table.pieces):
            piece = table.pieces[token_id]
        data = piece if isinstance(piece, bytes) else piece.encode()
        return f'"token":{quote(text)},"logprob":{_number(one)},"bytes":{_ids(data)}'

    async def _prompt_logprobs(self, output: RequestOutput) -> str:
        """Log probabilities of a prompt, in vLLM's shape."""
        positions = []
        async for _, found in self._turns.take(_of_prompt(output)):
            candidates = ",".join(
                f'"{i}":{{"logprob":{_number(one)},"rank":{json.dumps(one.rank)},'
                f'"decoded_token":{quote(self._token_text(i, one))}}}'
                for i, one in found.items()
            )
            positions.append(f"{{{candidates}}}" if found else "null")
        return f"[{','.join(positions)}]"

    def _token_text(self, token_id: int, one: Logprob | None) -> str:
        if one is not None and one.decoded_token is not None:
            return one.decoded_token
        known = self._tokenizer
        return f"token_id:{token_id}" if known is None else known.token_text(token_id)


def usage(writers: Sequence[AnswerWriter]) -> str:
    """The usage of all prompts of a call."""
    num_prompt_tokens = sum(one.num_prompt_tokens for one in writers)
    num_output_tokens = sum(one.num_output_tokens for one in writers)
    fields = {
        "prompt_tokens": num_prompt_tokens,
        "completion_tokens": num_output_tokens,
        "total_tokens": num_prompt_tokens + num_output_tokens,
        "prompt_tokens_details": {"cached_tokens": sum(one.num_cached_tokens for one in writers)},
    }
    return json.dumps(fields, separators=(",", ":"))


def _ids(token_ids: Sequence[int]) -> str:
    return f"[{','.join(map(str, token_ids))}]"


def _number(one: Logprob) -> str:
    # A NaN fails the comparison too.
    return repr(one.logprob if one.logprob > _LEAST_LOGPROB else _LEAST_LOGPROB)


def _of_prompt(output: RequestOutput) -> Positions:
    return zip(output.prompt_token_ids, output.prompt_logprobs or (), strict=False)


def _by_rank(found: Mapping[int, Logprob]) -> list[tuple[int, Logprob]]:
    return sorted(found.items(), key=lambda item: item[1].rank or 0)
