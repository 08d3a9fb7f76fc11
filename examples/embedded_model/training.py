"""Tokenizer, packing, model and training loop of the embedded model."""

import json
import math
from pathlib import Path

import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from tqdm import tqdm
from transformers import (
    GenerationConfig,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
)

from embedded_model.documents import Documents

END_OF_TEXT, USER, ASSISTANT, END = "<|endoftext|>", "<|user|>", "<|assistant|>", "<|end|>"
SPECIAL_TOKENS = (END_OF_TEXT, USER, ASSISTANT, END)

VOCAB_SIZE = 1536
TOKENIZER_DOCUMENTS = 3000

MAX_POSITION_EMBEDDINGS = 2048

TOKENS_PER_STEP = 1024
PEAK_LEARNING_RATE = 3e-3
WARMUP_STEPS = 50
WEIGHT_DECAY = 0.1

ROW_LENGTHS = ((0.55, 256), (0.85, 512), (1.0, 1024))
"""Tokens per row until a share of the training is done: short rows are cheap, and learn words
and names; the long ones at the end teach the positions that long generations reach."""

CHAT_TEMPLATE = (
    "{%- for message in messages -%}"
    "{{ ('<|assistant|>' if message['role'] == 'assistant' else '<|user|>') + '\\n'"
    " + message['content'] + '<|end|>\\n' }}"
    "{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{ '<|assistant|>\\n' }}{%- endif -%}"
)


def train_tokenizer(seed: int) -> PreTrainedTokenizerFast:
    """A byte-level BPE tokenizer of `VOCAB_SIZE` tokens, numbers digit by digit.

    It adds no token to a prompt of its own accord: ``<|endoftext|>`` ends documents.
    """
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        min_frequency=1,
        special_tokens=[AddedToken(token, special=True) for token in SPECIAL_TOKENS],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    documents = Documents(seed)
    texts = [documents.write() for _ in range(TOKENIZER_DOCUMENTS)]
    tokenizer.train_from_iterator(texts, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=END_OF_TEXT,
        eos_token=END_OF_TEXT,
        pad_token=END_OF_TEXT,
        additional_special_tokens=[USER, ASSISTANT, END],
        chat_template=CHAT_TEMPLATE,
        model_max_length=MAX_POSITION_EMBEDDINGS,
        clean_up_tokenization_spaces=False,
    )


def build_model(vocab_size: int) -> LlamaForCausalLM:
    """An untrained model of about five million parameters; 2 and 4 ranks divide all its sizes."""
    config = LlamaConfig(
        vocab_size=vocab_size,
        hidden_size=256,
        intermediate_size=1024,
        num_hidden_layers=4,
        num_attention_heads=8,
        num_key_value_heads=4,
        head_dim=64,
        max_position_embeddings=MAX_POSITION_EMBEDDINGS,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
        rms_norm_eps=1e-5,
        tie_word_embeddings=True,
        bos_token_id=0,
        eos_token_id=0,
        pad_token_id=0,
    )
    return LlamaForCausalLM(config)


class PackedRows:
    """Rows of tokens cut from the stream of documents.

    Every second row starts at the beginning of a document, where prompts start; the others go
    on where the row before was cut, so that the ends of documents are seen as often.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerFast, seed: int) -> None:
        self._backend = tokenizer.backend_tokenizer
        self._end = tokenizer.convert_tokens_to_ids(END_OF_TEXT)
        self._documents = Documents(seed)
        self._rest: list[int] = []
        self._num_rows = 0

    def batch(self, num_rows: int, length: int) -> torch.Tensor:
        """Token ids `[num_rows, length]`, int64."""
        return torch.tensor([self._row(length) for _ in range(num_rows)])

    def _row(self, length: int) -> list[int]:
        tokens = self._rest if self._num_rows % 2 else []
        self._num_rows += 1
        while len(tokens) < length:
            ids = self._backend.encode(self._documents.write()).ids
            tokens = [*tokens, *ids, self._end]
        self._rest = tokens[length:]
        return tokens[:length]


def row_length(step: int, num_steps: int) -> int:
    """Tokens per row at a step: see `ROW_LENGTHS`."""
    return next(length for share, length in ROW_LENGTHS if step < share * num_steps)


def learning_rate_factor(step: int, num_steps: int) -> float:
    """Linear warm-up, then a cosine down to nothing at the last step."""
    warmup = min(WARMUP_STEPS, num_steps)
    if step < warmup:
        return (step + 1) / warmup
    progress = (step - warmup) / max(1, num_steps - warmup)
    return 0.5 * (1 + math.cos(math.pi * progress))


def _optimizer(model: LlamaForCausalLM) -> torch.optim.AdamW:
    matrices = [p for p in model.parameters() if p.dim() > 1]
    norms = [p for p in model.parameters() if p.dim() == 1]
    groups = [
        {"params": matrices, "weight_decay": WEIGHT_DECAY},
        {"params": norms, "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=PEAK_LEARNING_RATE, betas=(0.9, 0.95))


def train(
    tokenizer: PreTrainedTokenizerFast, num_steps: int, seed: int
) -> tuple[LlamaForCausalLM, float]:
    """Trains a model from scratch; ends by steps.

    Returns the model, in float32 with values that bfloat16 holds exactly, and the mean loss
    (nats per token) of the last 20 steps.
    """
    torch.manual_seed(seed)
    model = build_model(len(tokenizer)).train()
    rows = PackedRows(tokenizer, seed + 1)
    optimizer = _optimizer(model)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: learning_rate_factor(step, num_steps)
    )
    losses: list[float] = []
    progress = tqdm(range(num_steps), desc="training", unit="step")
    for step in progress:
        length = row_length(step, num_steps)
        tokens = rows.batch(TOKENS_PER_STEP // length, length)
        with torch.autocast("cpu", torch.bfloat16):
            loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        if step % 10 == 0:
            progress.set_postfix(loss=f"{losses[-1]:.3f}")
    last = losses[-20:]
    return model.to(torch.bfloat16).float().eval(), sum(last) / len(last)


def save(model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, folder: Path) -> None:
    """Writes a folder in Hugging Face layout, weights in bfloat16."""
    folder.mkdir(parents=True, exist_ok=True)
    half = build_model(len(tokenizer)).to(torch.bfloat16)
    half.load_state_dict(model.state_dict())
    end = tokenizer.convert_tokens_to_ids(END)
    half.generation_config = GenerationConfig(bos_token_id=0, eos_token_id=[0, end], pad_token_id=0)
    half.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    # Written by hand: what transformers 5 writes (its own class names, the template in a file of
    # its own, special tokens as a list) is not read by every transformers 4.
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": END_OF_TEXT,
        "eos_token": END_OF_TEXT,
        "pad_token": END_OF_TEXT,
        "additional_special_tokens": [USER, ASSISTANT, END],
        "model_max_length": MAX_POSITION_EMBEDDINGS,
        "clean_up_tokenization_spaces": False,
        "chat_template": CHAT_TEMPLATE,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=2) + "\n")
    (folder / "chat_template.jinja").unlink(missing_ok=True)
    (folder / "model.safetensors").chmod(0o644)
