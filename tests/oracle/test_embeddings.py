"""Embeddings, scores and classes of models that see only earlier tokens, against transformers."""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from support.byte_llama import write
from support.engines import open_engine, open_llm
from support.pooling_models import (
    POOLINGS,
    embed_ids,
    hidden_states,
    normalized,
    write_classifier,
    write_modules,
)
from support.small_encoders import class_logits
from support.tiny_llama import byte_level_tokenizer, edit_json
from support.variants import VARIANTS, Variant
from transformers.models.auto import modeling_auto

from tpengine.engine.requests import GenerateRequest
from tpengine.errors import ConfigError, RequestError
from tpengine.inputs import PoolingParams
from tpengine.outputs import EmbeddingRequestOutput, PoolingRequestOutput

FAMILIES = {variant.model_type: variant for variant in reversed(VARIANTS)}
CLASSIFIERS = modeling_auto.MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES
PROMPTS = [[7], [5, 9], list(range(10, 50)), list(range(3, 103))]
CLOSE = 1e-5
"""Most difference of an element of a vector of length 1."""


def embeddings(outputs: Sequence[PoolingRequestOutput]) -> torch.Tensor:
    assert [output.error for output in outputs] == [None] * len(outputs)
    return torch.tensor([output.outputs.embedding for output in outputs])


def expected(model: Any, pooling: str, prompts: Sequence[Sequence[int]]) -> torch.Tensor:
    pool: Callable[[torch.Tensor], torch.Tensor] = POOLINGS[pooling]
    return torch.stack([normalized(pool(hidden_states(model, prompt))) for prompt in prompts])


def bare(folder: Path) -> Any:
    """The model in a folder without its head, in float32."""
    return transformers.AutoModel.from_pretrained(folder, dtype=torch.float32).eval()


@pytest.fixture(scope="module")
def qwen(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("qwen3")
    FAMILIES["qwen3"].write(folder)
    return folder


@pytest.mark.parametrize(
    ("number", "variant"), list(enumerate(FAMILIES.values())), ids=list(FAMILIES)
)
def test_every_family(tmp_path: Path, number: int, variant: Variant) -> None:
    """Prompts in parts of 24 tokens, beside each other: embeddings and, where transformers has
    such a class, classes."""
    pooling = list(POOLINGS)[number % len(POOLINGS)]
    variant.write(tmp_path)
    options = {"max_num_batched_tokens": 24}
    with open_llm(tmp_path, task="embed", pooling_type=pooling, **options) as llm:
        vectors = embeddings(llm.embed(PROMPTS, use_tqdm=False))
    assert (vectors - expected(bare(tmp_path), pooling, PROMPTS)).abs().max() < CLOSE
    if variant.model_type not in CLASSIFIERS:
        return
    folder = tmp_path / "classes"
    write_classifier(folder, tmp_path, 3)
    with open_llm(folder, **options) as llm:
        outputs = llm.classify(PROMPTS, use_tqdm=False)
        raw = llm.encode(PROMPTS, PoolingParams(activation=False), use_tqdm=False)
    model = transformers.AutoModelForSequenceClassification.from_pretrained(folder).eval()
    for prompt, output, numbers in zip(PROMPTS, outputs, raw, strict=True):
        logits = class_logits(model, prompt)
        most = 1e-4 * max(1.0, float(logits.abs().max()))
        assert (torch.tensor(numbers.outputs.embedding) - logits).abs().max() < most
        assert (torch.tensor(output.outputs.probs) - logits.softmax(0)).abs().max() < 1e-4
        assert output.outputs.num_classes == 3


@pytest.mark.parametrize("tp_size", [1, 2, 4])
@pytest.mark.parametrize("pooling", POOLINGS)
def test_ranks_and_a_tiny_cache(qwen: Path, pooling: str, tp_size: int) -> None:
    """Requests in parts, which wait for each other's blocks, on one, two and four ranks."""
    options = {"num_device_blocks_override": 9, "max_model_len": 96, "max_num_batched_tokens": 24}
    prompts = [list(range(3 + i, 93 + i)) for i in range(6)]
    with open_engine(qwen, tp_size, task="embed", pooling_type=pooling, **options) as engine:
        vectors = embed_ids(engine, prompts)
    assert (vectors - expected(bare(qwen), pooling, prompts)).abs().max() < CLOSE


def test_a_prefix_is_found_where_the_last_token_decides(qwen: Path) -> None:
    prompt = PROMPTS[-1]
    for pooling, least in (("last", 96), ("mean", 0), ("cls", 0)):
        with open_llm(qwen, task="embed", pooling_type=pooling) as llm:
            first, second = (llm.embed([prompt], use_tqdm=False)[0] for _ in range(2))
        assert (first.num_cached_tokens, second.num_cached_tokens) == (0, least)
        assert first.outputs == second.outputs


def test_a_folder_of_sentence_transformers(tmp_path: Path) -> None:
    """Its pooling, layer, length and prompts; dimensions and length of a vector as asked."""
    write(tmp_path)
    prompts = {"query": "ab: ", "document": ""}
    write_modules(tmp_path, "mean", dense=(64, 24), prompts=prompts, default_prompt_name="document")
    (tmp_path / "sentence_bert_config.json").write_text('{"max_seq_length": 12}')
    dense = torch.load(tmp_path / "2_Dense" / "pytorch_model.bin")
    model = bare(tmp_path)

    def vector(token_ids: list[int]) -> torch.Tensor:
        mean = hidden_states(model, token_ids).mean(0)
        return (dense["linear.weight"] @ mean + dense["linear.bias"]).tanh()

    with open_llm(tmp_path) as llm:
        tokenizer = llm.get_tokenizer()
        assert llm.llm_engine.get_model_config().max_model_len == 12

        def embed(prompt: Any, **params: Any) -> EmbeddingRequestOutput:
            (output,) = llm.embed(prompt, pooling_params=PoolingParams(**params), use_tqdm=False)
            return output

        ids = tokenizer.encode("ab: a cab")
        assert embed("a cab", prompt_name="query").prompt_token_ids == ids
        for params, cut in (({}, 24), ({"dimensions": 5}, 5)):
            output = torch.tensor(embed("ab: a cab", **params).outputs.embedding)
            assert output.shape == (cut,)
            assert (output - normalized(vector(ids)[:cut])).abs().max() < CLOSE
        plain = torch.tensor(embed("ab: a cab", normalize=False).outputs.embedding)
        assert (plain - vector(ids)).abs().max() < CLOSE
        long = embed("abc" * 20, truncate_prompt_tokens=-1)
        assert long.prompt_token_ids == tokenizer.encode("abc" * 20)[:12]
        ids_of_tensor = embed([torch.arange(3, 30)], truncate_prompt_tokens=4).prompt_token_ids
        assert ids_of_tensor == [3, 4, 5, 6]
        assert "12" in str(llm.embed("abc" * 20, use_tqdm=False)[0].error)
        with pytest.raises(RequestError, match=r"prompt_name = 'title' .* query, document"):
            embed("a", prompt_name="title")
        with pytest.raises(RequestError, match="dimensions = 25 is more than the model's 24"):
            embed("a", dimensions=25)
        similar = llm.score("a cab", ["a cab", "bbb"], use_tqdm=False)
        assert abs(similar[0].outputs.score - 1.0) < 1e-6
        first, second = (normalized(vector(tokenizer.encode(text))) for text in ("a cab", "bbb"))
        assert abs(similar[1].outputs.score - float(first @ second)) < CLOSE


def test_a_causal_model_says_yes_or_no(qwen: Path, tmp_path: Path) -> None:
    """As Qwen3-Reranker: its two tokens' probabilities; a pair is put into the words that it was
    trained with."""
    FAMILIES["qwen3"].write(tmp_path)
    merges = [("n", "o"), ("y", "e"), ("ye", "s")]
    tokenizer = byte_level_tokenizer(["no", "ye", "yes"], merges)
    tokenizer.save_pretrained(tmp_path)
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path).eval()
    with open_llm(tmp_path, task="score") as llm:
        outputs = llm.score("cats", ["dogs cats", "dogs"], use_tqdm=False)
        whole = len(outputs[0].prompt_token_ids)
        cut = llm.score("cats", "dogs " * 50, truncate_prompt_tokens=whole, use_tqdm=False)[0]
        with pytest.raises(RequestError, match="truncate_prompt_tokens"):
            llm.score("cats", "dogs", truncate_prompt_tokens=20, use_tqdm=False)
    text = tokenizer.decode(cut.prompt_token_ids)
    assert len(cut.prompt_token_ids) <= whole
    assert "<Query>: cats" in text
    assert text.endswith(tokenizer.decode(outputs[0].prompt_token_ids)[-20:])
    yes, no = tokenizer.convert_tokens_to_ids(["yes", "no"])
    for output, document in zip(outputs, ("dogs cats", "dogs"), strict=True):
        text = tokenizer.decode(output.prompt_token_ids)
        assert text.index("Query") < text.index("cats") < text.index(document)
        logits = class_logits(model, output.prompt_token_ids)[-1]
        chances = logits[[no, yes]].softmax(0)
        assert abs(output.outputs.score - float(chances[1])) < 1e-4
    assert outputs[0].outputs != outputs[1].outputs


def test_what_a_model_does_not_do_is_refused(qwen: Path, tmp_path: Path) -> None:
    write_classifier(tmp_path, qwen, 2)
    for folder, options, words in (
        (qwen, {"task": "classify"}, "task = 'classify' does not fit Qwen3ForCausalLM"),
        (qwen, {"task": "score"}, "no tokens 'no' and 'yes'"),
        (qwen, {"pooling_type": "mean"}, "set task='embed'"),
        (qwen, {"task": "score", "pooling_type": "mean"}, "leave pooling_type out"),
        (qwen, {"task": "embed", "speculative_model": "[ngram]"}, "leave speculative_model out"),
        (qwen, {"task": "embed", "model_impl": "transformers"}, "own code"),
        (tmp_path, {"task": "generate"}, "can do 'classify'"),
        (tmp_path, {"task": "score"}, "can do 'classify'"),
    ):
        with pytest.raises(ConfigError, match=re.escape(words)):
            open_llm(folder, **options)
    with open_llm(qwen) as llm, pytest.raises(RequestError, match="task='embed'"):
        llm.encode(PROMPTS, use_tqdm=False)
    with open_llm(tmp_path) as llm:
        with pytest.raises(RequestError, match=r"'classify' and makes no tokens; use LLM\.encode"):
            llm.generate(PROMPTS, use_tqdm=False)
        with pytest.raises(RequestError, match=r"LLM\.score needs a model for score or embed"):
            llm.score("a", "b")
        with pytest.raises(RequestError, match="dimensions = 3"):
            llm.encode(PROMPTS, PoolingParams(dimensions=3), use_tqdm=False)


@pytest.mark.parametrize(
    ("num_labels", "fields", "activation"),
    [
        (3, {"problem_type": "multi_label_classification"}, torch.sigmoid),
        (1, {"problem_type": "regression"}, torch.nn.Identity()),
        (1, {"sbert_ce_default_activation_function": "torch.nn.Identity"}, torch.nn.Identity()),
        (1, {"sentence_transformers": {"activation_fn": "torch.nn.Sigmoid"}}, torch.sigmoid),
        (1, {}, torch.sigmoid),
    ],
    ids=["many labels", "regression", "identity", "sigmoid", "one label"],
)
def test_probabilities_are_those_of_the_files(
    qwen: Path, tmp_path: Path, num_labels: int, fields: dict[str, Any], activation: Any
) -> None:
    write_classifier(tmp_path, qwen, num_labels)
    edit_json(tmp_path / "config.json", lambda config: config.update(fields))
    with open_llm(tmp_path) as llm:
        (numbers,) = llm.encode([PROMPTS[2]], PoolingParams(activation=False), use_tqdm=False)
        (output,) = llm.encode([PROMPTS[2]], use_tqdm=False)
    made = activation(torch.tensor(numbers.outputs.embedding, dtype=torch.float64))
    assert torch.allclose(torch.tensor(output.outputs.embedding).double(), made, atol=1e-6)


def test_a_prompt_without_numbers_fails_alone(qwen: Path, tmp_path: Path) -> None:
    """Token 7 has NaN as its embedding; what a user assigns to parameters later has no effect."""
    shutil.copytree(qwen, tmp_path, dirs_exist_ok=True)
    tensors = load_file(tmp_path / "model.safetensors")
    tensors["model.embed_tokens.weight"][7] = torch.nan
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    with open_engine(tmp_path, task="embed", num_device_blocks_override=64) as engine:
        params = PoolingParams()
        for number, prompt in enumerate(([7, 8], [8, 9])):
            engine.add_request(str(number), {"prompt_token_ids": prompt}, params)
        params.dimensions = "many"
        outputs = {}
        while engine.has_unfinished_requests():
            outputs |= {output.request_id: output for output in engine.step()}
    assert "not finite" in str(outputs["0"].error)
    assert outputs["1"].error is None
    with pytest.raises(RequestError, match="dimensions"):
        params.clone()
    for fields in ({"prompt_name": ["query"]}, {"normalize": 1}, {"activation": None}):
        with pytest.raises(RequestError, match=next(iter(fields))):
            PoolingParams(**fields)


def test_an_id_whose_end_was_discarded_is_as_new(qwen: Path) -> None:
    """The form of its outputs is that of the request that has it now."""
    request = GenerateRequest(prompt_token_ids=[7], pooling_params=PoolingParams())
    with open_engine(qwen, task="embed", num_device_blocks_override=64) as engine:
        engine.add_request("same", {"prompt_token_ids": [7]}, PoolingParams())
        engine.abort_request("same")
        assert [output.finished for output in engine.discard_outputs(["same"])] == [True]
        engine.add_checked("same", engine.check_request(request))
        assert engine.step()[0].pooled is not None
