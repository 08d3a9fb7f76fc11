"""Whisper (https://arxiv.org/abs/2212.04356): a relative of BART whose encoder reads sound."""

from __future__ import annotations

from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from tpengine.config import ModelConfig
from tpengine.layers.embedding import VocabParallelEmbedding
from tpengine.layers.weights import Weights
from tpengine.models.bart import EncoderDecoder

_KEY_BIAS = ".k_proj.bias"


class WhisperForConditionalGeneration(EncoderDecoder):
    """See `EncoderDecoder`. Each rank computes all convolutions over the frames of a sound."""

    def __init__(self, config: ModelConfig, weights: Weights) -> None:
        super().__init__(config, weights)
        assert config.encoder is not None, "a model with two halves has it"
        assert config.encoder.sound is not None, "Whisper's encoder reads sound"
        size = config.hidden_size
        self._convolutions = []
        for number, channels in ((1, config.encoder.sound.num_mel_bins), (2, size)):
            name = f"{self.base_prefix}encoder.conv{number}"
            weight = weights.replicated(f"{name}.weight", size, channels, 3)
            self._convolutions.append((weight, weights.replicated(f"{name}.bias", size), number))
        name = f"{self.base_prefix}decoder.embed_tokens"
        self.embed_tokens = VocabParallelEmbedding(weights, name, config.vocab_size, size)
        self.lm_head = self.make_head(config, weights, "proj_out")
        zeros = torch.zeros(size, dtype=weights.dtype)  # keys have no bias
        absent = {name: zeros for name in weights.shards if name.endswith(_KEY_BIAS)}
        weights.convert = partial(self.complete, absent)

    def read(self, prompts: Tensor) -> Tensor:
        """See `EncoderDecoder.read`. Computes each sound alone, so that its bits do not depend on
        the others; one token for every two frames."""
        states = []
        for x in prompts.to(self._convolutions[0][0].dtype):
            for weight, bias, stride in self._convolutions:
                x = F.gelu(F.conv1d(x, weight, bias, stride, padding=1))
            states.append(x.t())
        return torch.cat(states)
