"""Grammars of requests: their check, and the vocabulary that ranks need to follow them.

A bad schema is refused by `read_grammar`: its form by `structured/constraints.py`, what only the
compiler sees by `Vocabulary.matcher` of `structured/grammars.py`. After a loss a new group gets the
vocabulary again (`VocabularySender.send_for`), and `structured/masks.py` takes the tokens so far.
"""

from __future__ import annotations

from tpengine.config import ModelConfig
from tpengine.engine.tokenizer import Tokenizer
from tpengine.errors import InvalidSamplingParamsError
from tpengine.executor.executor import Executor
from tpengine.messages import StepInput
from tpengine.sampling_params import SamplingParams
from tpengine.structured.constraints import THINK_CLOSING, THINK_OPENING, Thinking, to_grammar
from tpengine.structured.grammars import Vocabulary


def read_grammar(
    params: SamplingParams,
    prompt: str | None,
    is_chat: bool,
    model: ModelConfig,
    tokenizer: Tokenizer | None,
) -> str | None:
    """Returns the grammar of a request's outputs, compiled once to check it; None: they have none.

    Args:
        prompt: its text, if it has one.

    Raises:
        InvalidSamplingParamsError: there is no tokenizer, or the library refuses the grammar.
    """
    if params.structured_outputs is None:
        return None
    if tokenizer is None:
        raise InvalidSamplingParamsError.of_field(
            "structured_outputs", "needs a tokenizer, and the model has none; name one"
        )
    thinking = _thinking(prompt or "", tokenizer) if is_chat else Thinking.NONE
    # For the library no text matches an added token, special or not, as the think tags of Qwen.
    added = list(tokenizer.hf.get_added_vocab())
    vocabulary, grammar = tokenizer.vocabulary(model), ""
    for part in dict.fromkeys((Thinking.NONE, thinking)):  # a thought hides that no answer begins
        grammar = to_grammar(params.structured_outputs, part, added)
        vocabulary.matcher(grammar)
    return grammar


def _thinking(prompt: str, tokenizer: Tokenizer) -> Thinking:
    """Whether an answer to this conversation may begin with reasoning, by the model's template."""
    end = prompt.rstrip()
    if end.endswith(THINK_OPENING):
        return Thinking.BEGUN
    if end.endswith(THINK_CLOSING) or THINK_OPENING not in str(tokenizer.hf.chat_template):
        return Thinking.NONE
    return Thinking.ALLOWED


class VocabularySender:
    """Sends each group of ranks the vocabulary before its first sequence with a grammar."""

    def __init__(self, executor: Executor, model: ModelConfig) -> None:
        self._executor = executor
        self._model = model
        self._sent: tuple[int, Vocabulary] | None = None

    def send_for(self, step: StepInput, tokenizer: Tokenizer | None) -> None:
        """Sends it if this step needs it and the present group does not have it.

        Raises:
            GroupLostError: a rank was lost.
        """
        if tokenizer is None or not any(new.rules.grammar for new in step.new_sequences):
            return
        needed = self._executor.epoch, tokenizer.vocabulary(self._model)
        if self._sent != needed:
            self._executor.load_vocabulary(needed[1])
            self._sent = needed
