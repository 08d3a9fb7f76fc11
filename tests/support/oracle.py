"""Plain `transformers` in float32: what every switch of the engine is compared with."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers

NUM_OUTPUT_TOKENS = 64
MIN_MARGIN = 2e-3
"""Lead of a greedy token over the second best logit that rounding cannot take away."""
Edit = Callable[[list[int], torch.Tensor], torch.Tensor]
"""Changes the logits of the token after these ids."""


@dataclass(frozen=True)
class Answer:
    """Greedy continuation of one prompt.

    Attributes:
        logprobs: float32 `[num_output_tokens, vocab_size]`.
        margin: smallest lead of a chosen logit over the second best.
    """

    prompt: tuple[int, ...]
    token_ids: tuple[int, ...]
    logprobs: torch.Tensor
    margin: float


class Oracle:
    """Greedy answers of the model in a folder, or of `model`, computed once per prompt.

    Attributes:
        num_tokens: length of each answer.
    """

    def __init__(
        self, folder: Path, num_tokens: int = NUM_OUTPUT_TOKENS, model: Any = None
    ) -> None:
        self._folder = folder
        self.num_tokens = num_tokens
        self._model = model
        self._answers: dict[tuple[int, ...], Answer] = {}

    @property
    def model(self) -> Any:
        """The transformers model, float32."""
        if self._model is None:
            model = transformers.AutoModelForCausalLM.from_pretrained(
                self._folder, dtype=torch.float32
            )
            self._model = model.eval()
        return self._model

    def answers(self, prompts: Sequence[Sequence[int]]) -> list[Answer]:
        """Answers in the order of the prompts; those of equal length are computed together."""
        by_length: dict[int, list[tuple[int, ...]]] = {}
        for prompt in prompts:
            key = tuple(prompt)
            if key not in self._answers:
                by_length.setdefault(len(key), []).append(key)
        for group in by_length.values():
            for answer in self._compute(list(dict.fromkeys(group))):
                self._answers[answer.prompt] = answer
        return [self._answers[tuple(prompt)] for prompt in prompts]

    def logits_after(self, prompt: Sequence[int], token_ids: Sequence[int]) -> torch.Tensor:
        """Logits `[num_tokens, vocab_size]`, float32: those from which each token was chosen."""
        with torch.inference_mode():
            logits = self.model(torch.tensor([[*prompt, *token_ids]])).logits[0].float()
        return logits[len(prompt) - 1 : -1]

    def assert_greedy(
        self,
        prompts: Sequence[Sequence[int]],
        outputs: Sequence[Sequence[int]],
        num_tokens: int = 0,
    ) -> None:
        """Makes sure that each output is greedy and has so many tokens, by default all."""
        assert {len(token_ids) for token_ids in outputs} == {num_tokens or self.num_tokens}
        self.assert_likeliest(prompts, outputs)

    def assert_likeliest(
        self,
        prompts: Sequence[Sequence[int]],
        outputs: Sequence[Sequence[int]],
        edit: Edit | None = None,
    ) -> None:
        """Makes sure that each token is the likeliest one after those before it, or as likely but
        for rounding: one forward pass an output, where `answers` needs one a token."""
        for prompt, token_ids in zip(prompts, outputs, strict=True):
            logits = self.logits_after(prompt, token_ids)
            if edit is not None:
                ids = [*prompt, *token_ids]
                rows = enumerate(logits, len(prompt))
                logits = torch.stack([edit(ids[:place], row) for place, row in rows])
            chosen = logits.gather(1, torch.tensor([token_ids]).t())[:, 0]
            lead = float((logits.amax(dim=1) - chosen).max())
            assert lead < MIN_MARGIN, f"prompt of {len(prompt)} tokens: {list(token_ids)}"

    def random_prompts(self, lengths: Sequence[int], seed: int) -> list[list[int]]:
        """Random prompts of these lengths, for `assert_greedy`."""
        rng, vocab_size = random.Random(seed), self.model.config.vocab_size
        return [[rng.randrange(3, vocab_size) for _ in range(length)] for length in lengths]

    def next_logprobs(self, prompt: Sequence[int]) -> torch.Tensor:
        """Log probabilities `[vocab_size]` of the token after the prompt."""
        with torch.inference_mode():
            logits = self.model(torch.tensor([list(prompt)])).logits
        return torch.log_softmax(logits[0, -1].float(), dim=-1)

    def prompts(self, lengths: Sequence[int], seed: int) -> list[list[int]]:
        """Random prompts of these lengths whose greedy continuation is no matter of rounding.

        Of several candidates per length the first that has no near-tie is taken; the choice knows
        nothing of the engine.
        """
        rng = random.Random(seed)
        vocab_size = self.model.config.vocab_size
        clear: dict[int, list[list[int]]] = {}
        for length, count in Counter(lengths).items():
            clear[length] = []
            for _ in range(10):
                lacking = count - len(clear[length])
                if lacking < 1:
                    break
                # Some more than needed, as they cost little when they are computed together.
                candidates = [
                    [rng.randrange(3, vocab_size) for _ in range(length)]
                    for _ in range(lacking + lacking // 4 + 1)
                ]
                answers = self.answers(candidates)
                clear[length] += [list(a.prompt) for a in answers if a.margin >= MIN_MARGIN]
            assert len(clear[length]) >= count, f"too few prompts of {length} without a near-tie"
        return [clear[length].pop(0) for length in lengths]

    def assert_discerning(self, prompts: Sequence[Sequence[int]]) -> None:
        """Makes sure that a wrong engine could not pass: answers vary, and depend on an early
        token of a long prompt."""
        answers = self.answers(prompts)
        distinct = {token for answer in answers for token in answer.token_ids}
        assert len(distinct) >= 20, f"the oracle gives only {len(distinct)} distinct ids"
        assert min(answer.margin for answer in answers) >= MIN_MARGIN
        longest = list(max(prompts, key=len))
        if len(longest) > 1:
            changed = [*longest]
            changed[0] = 3 + (changed[0] + 1) % (self.model.config.vocab_size - 3)
            before, after = self.answers([longest, changed])
            assert before.token_ids != after.token_ids, "the first prompt token changes nothing"

    def _compute(self, prompts: list[tuple[int, ...]]) -> list[Answer]:
        inputs, cache = torch.tensor(prompts), None
        logits = []
        with torch.inference_mode():
            for _ in range(self.num_tokens):
                output = self.model(inputs, past_key_values=cache, use_cache=True)
                cache = output.past_key_values
                logits.append(output.logits[:, -1].float())
                inputs = logits[-1].argmax(dim=-1, keepdim=True)
            stacked = torch.stack(logits, dim=1)  # [num_prompts, num_output_tokens, vocab_size]
            best = stacked.topk(2, dim=-1)
            margins = (best.values[..., 0] - best.values[..., 1]).amin(dim=1)
            logprobs = torch.log_softmax(stacked, dim=-1)
        return [
            Answer(prompt, tuple(best.indices[i, :, 0].tolist()), logprobs[i], float(margins[i]))
            for i, prompt in enumerate(prompts)
        ]
