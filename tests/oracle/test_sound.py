"""Models whose encoder reads sound against transformers: features, tokens, beams."""

from __future__ import annotations

import io
import re
import sys
import types
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.engines import greedy, open_engine, open_llm, serve
from support.small_barts import distance, serve_preempted
from support.small_whispers import (
    BEFORE,
    BEGIN,
    END,
    GERMAN,
    MAX_POSITIONS,
    NO_TIMES,
    RATE,
    START,
    TRANSLATE,
    Samples,
    features_of,
    sounds,
    transformers_whisper,
    wav,
    write_whisper,
)
from support.tiny_llama import edit_json
from transformers import GenerationMixin, WhisperFeatureExtractor

from tpengine import SamplingParams
from tpengine.engine.log_mel import log_mel
from tpengine.engine.sound_prompts import read_parts, read_samples
from tpengine.errors import ConfigError, InvalidPromptError, RequestError

LENGTHS = [16_000, 1, 7_003, 15_900, 160, 12_345]
SHAPES: dict[str, dict[str, Any]] = {
    "plain": {},
    "1 and 3 layers, 8 heads": {
        "d_model": 128,
        "init_std": 0.2,
        "encoder_attention_heads": 8,
        "decoder_attention_heads": 8,
        "encoder_layers": 1,
        "decoder_layers": 3,
        "activation_function": "relu",
    },
}


@pytest.fixture(scope="module")
def whisper(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_whisper(tmp_path_factory.mktemp("whisper"))


def of_sound(samples: Samples, decoder: Any = None) -> dict[str, Any]:
    data = {"audio": (samples, RATE)}
    return {"encoder_prompt": {"prompt": "", "multi_modal_data": data}, "decoder_prompt": decoder}


def as_transformers(model: Any, samples: Samples, **options: Any) -> list[int]:
    """The output of its `generate`, without what pads it."""
    options = {"do_sample": False, "max_new_tokens": 16, **options}
    row: list[int] = model.generate(features_of(model, samples), **options)[0].tolist()
    return row[: row.index(END)] if END in row else row


def ids_of(outputs: Sequence[Any]) -> list[list[int]]:
    """Of each first output, without an end token."""
    return [[i for i in output.outputs[0].token_ids if i != END] for output in outputs]


@pytest.mark.parametrize("num_mel_bins", [80, 128])
def test_features(num_mel_bins: int) -> None:
    extract = WhisperFeatureExtractor(feature_size=num_mel_bins)
    tone = 0.3 * np.sin(np.arange(50_000, dtype=np.float32) * 0.05)
    for samples in (*sounds([1, 201, 100_003, 479_680, 480_000], seed=0), tone):
        expected = extract(samples, sampling_rate=RATE, return_tensors="np")["input_features"][0]
        features = log_mel(samples, num_mel_bins, 3000).T
        assert np.abs(features - expected[:, : features.shape[1]]).max() < 1e-4
        silence = expected[:, features.shape[1] :]
        assert np.abs(silence - features[:, -1:]).max(initial=0.0) < 1e-4


@pytest.mark.parametrize("shape", SHAPES)
def test_a_crowd(tmp_path: Path, shape: str) -> None:
    """Sounds of many lengths in one step, in steps of their own, and each alone."""
    write_whisper(tmp_path, **SHAPES[shape])
    model, prompts = transformers_whisper(tmp_path), sounds(LENGTHS, seed=1)
    expected = [as_transformers(model, samples) for samples in prompts]
    assert len(set(map(tuple, expected))) == len(expected)
    params = SamplingParams(temperature=0.0, max_tokens=16)
    for options in ({}, {"max_num_batched_tokens": MAX_POSITIONS + 1, "block_size": 8}):
        with open_llm(tmp_path, **options) as llm:
            outputs = llm.generate([of_sound(s) for s in prompts], params, use_tqdm=False)
            assert ids_of(outputs) == expected
            assert [output.prompt_token_ids for output in outputs] == [BEGIN] * len(prompts)
            alone = [llm.generate(of_sound(s), params, use_tqdm=False)[0] for s in prompts[:2]]
            pairs = zip(outputs, alone, strict=False)
            for crowded, own in pairs:
                assert crowded.outputs[0].cumulative_logprob == own.outputs[0].cumulative_logprob


@pytest.mark.parametrize("num_beams", [2, 4])
def test_beams(whisper: Path, num_beams: int) -> None:
    """All beams, of transformers' general search: Whisper's own gives the best one alone."""
    model, prompts = transformers_whisper(whisper), sounds(LENGTHS[:4], seed=2)
    params = SamplingParams(n=num_beams, use_beam_search=True, temperature=0.0, max_tokens=12)
    with open_llm(whisper) as llm:
        outputs = llm.generate([of_sound(s) for s in prompts], params, use_tqdm=False)
    for samples, output in zip(prompts, outputs, strict=True):
        rows = GenerationMixin.generate(
            model,
            features_of(model, samples),
            decoder_input_ids=torch.tensor([BEGIN]),
            num_beams=num_beams,
            num_return_sequences=num_beams,
            early_stopping=False,
            max_new_tokens=12,
        )
        expected = [row[len(BEGIN) :] for row in rows.tolist()]
        answers = [list(beam.token_ids) for beam in output.outputs]
        padded = [ids + [END] * (len(expected[0]) - len(ids)) for ids in answers]
        assert padded == expected
        own = as_transformers(model, samples, num_beams=num_beams, max_new_tokens=12)
        assert [i for i in answers[0] if i != END] == own


@pytest.mark.parametrize("tp_size", [2, pytest.param(4, marks=pytest.mark.soak)])
def test_ranks(whisper: Path, tp_size: int) -> None:
    model, prompts = transformers_whisper(whisper), sounds(LENGTHS, seed=3)
    with open_engine(whisper, tp_size) as engine:
        outputs = serve(engine, [of_sound(s) for s in prompts], SamplingParams(temperature=0.0))
    assert ids_of(outputs) == [as_transformers(model, samples) for samples in prompts]


@pytest.mark.parametrize("mode", ["swap", "recompute"])
def test_preemption(whisper: Path, mode: str) -> None:
    model, prompts = transformers_whisper(whisper), sounds(LENGTHS, seed=4)
    fields = {"max_tokens": 40, "ignore_eos": True}
    params = [
        SamplingParams(n=2, top_p=0.9, seed=1, **fields),
        SamplingParams(n=2, use_beam_search=True, temperature=0.0, **fields),
        SamplingParams(temperature=0.0, **fields),
    ] * 2
    outputs = serve_preempted(whisper, [of_sound(s) for s in prompts], params, mode)
    for samples, output in zip(prompts, outputs, strict=True):
        assert distance(model, output, input_features=features_of(model, samples)) < 1e-3


def test_forms_of_a_prompt(whisper: Path, tmp_path: Path) -> None:
    (samples,), model = sounds([12_000], seed=6), transformers_whisper(whisper)
    file = tmp_path / "sound.wav"
    file.write_bytes(wav(samples))
    rounded = np.round(samples.astype(np.float64) * 32767).astype(np.float32) / 32768
    audios = [(rounded, RATE), [(rounded.astype(np.float64), RATE)], wav(samples), file, str(file)]
    params = SamplingParams(temperature=0.0, max_tokens=16)
    german = [START, GERMAN, TRANSLATE, NO_TIMES]
    with open_llm(whisper) as llm:
        prompts: list[Any] = [
            {"prompt_token_ids": BEGIN, "multi_modal_data": {"audio": audio}} for audio in audios
        ]
        prompts += [{"prompt": text, "multi_modal_data": {"audio": file}} for text in (None, "")]
        outputs = llm.generate(prompts, params, use_tqdm=False)
        own = [of_sound(samples, {"prompt_token_ids": ids}) for ids in (german, [BEFORE, *BEGIN])]
        own_outputs = llm.generate(own, params, use_tqdm=False)
    assert ids_of(outputs) == [as_transformers(model, rounded)] * len(prompts)
    assert [output.prompt_token_ids for output in own_outputs] == [german, [BEFORE, *BEGIN]]
    expected = as_transformers(model, samples, language="de", task="translate")
    assert ids_of(own_outputs[:1]) == [expected]
    features = features_of(model, samples)
    assert max(distance(model, output, input_features=features) for output in own_outputs) < 1e-3


@pytest.mark.parametrize(
    ("generation", "begin"),
    [
        ({"no_timestamps_token_id": NO_TIMES, "is_multilingual": False}, [START, NO_TIMES]),
        ({"forced_decoder_ids": [[1, GERMAN], [2, TRANSLATE]]}, [START, GERMAN, TRANSLATE]),
        ({}, [START]),
    ],
)
def test_other_beginnings(tmp_path: Path, generation: dict[str, Any], begin: list[int]) -> None:
    """Of a model of one language, of one with the older field, and of one that names nothing."""
    write_whisper(tmp_path, generation)
    model, (samples,) = transformers_whisper(tmp_path), sounds([9_000], seed=7)
    with open_llm(tmp_path) as llm:
        params = SamplingParams(temperature=0.0, max_tokens=16)
        (output,) = llm.generate(of_sound(samples), params, use_tqdm=False)
    assert output.prompt_token_ids == begin
    assert ids_of([output]) == [as_transformers(model, samples)]


def test_files_of_other_rates_and_widths(whisper: Path) -> None:
    """They give nearly the same probabilities of the same tokens."""
    time = np.arange(48_000) / 48_000
    tones = 0.2 * np.sin(2 * np.pi * 440 * time) + 0.1 * np.sin(2 * np.pi * 2_000 * time)
    files = [wav(tones[:: 48_000 // rate], rate, 2, 2) for rate in (48_000, 16_000, 8_000)]
    files += [wav(tones[::3], RATE, width, 1) for width in (3, 4)]
    with open_llm(whisper) as llm:
        prompts = [
            {"prompt_token_ids": BEGIN, "multi_modal_data": {"audio": file}} for file in files
        ]
        outputs = llm.generate(prompts, greedy(1, logprobs=5), use_tqdm=False)
    best = [output.outputs[0].logprobs[0] for output in outputs]
    for logprobs in best[1:]:
        token_id = outputs[0].outputs[0].token_ids[0]
        assert abs(logprobs[token_id].logprob - best[0][token_id].logprob) < 0.5


def test_other_files(monkeypatch: pytest.MonkeyPatch) -> None:
    """A library's samples of a file that is no WAV, whose length is looked at before."""
    frames = np.stack([np.full(800, 0.5), np.full(800, -0.25)], axis=1)

    class SoundFile:
        samplerate = 8_000

        def __init__(self, content: io.BytesIO) -> None:
            name, self.left = content.read(), frames
            if name == b"wrong":
                raise RuntimeError("Format not recognised")
            self.frames = 10**9 if name == b"long" else len(frames)

        def read(self, num_frames: int, dtype: str, always_2d: bool) -> Any:
            assert always_2d
            taken, self.left = np.split(self.left, [num_frames])
            return taken.astype(dtype)

    module = types.ModuleType("soundfile")
    monkeypatch.setattr(module, "SoundFile", SoundFile, raising=False)
    monkeypatch.setitem(sys.modules, "soundfile", module)
    samples = read_samples(b"flac", 1.0)
    assert (len(samples), samples.dtype) == (1_600, np.float32)
    assert np.allclose(samples, 0.125)
    assert sum(map(len, read_parts(b"flac", 0.0625, 1.0))) == 1_600
    for name, words in ((b"long", "longer than the 1 s"), (b"wrong", "Format not recognised")):
        with pytest.raises(InvalidPromptError, match=words):
            read_samples(name, 1.0)


def test_parts_of_a_long_sound() -> None:
    """No sample is lost, each part but the last ends in the quiet near its end, and a sound that
    fits is one part."""
    (loud,) = sounds([50_000], seed=3)
    loud += np.sign(loud)
    loud[14_000:14_400] = loud[28_300:28_700] = 0.0
    parts = list(read_parts(wav(loud * 0.5), 1.0, 4.0))
    assert [len(part) for part in parts[:2]] == [pytest.approx(14_200, abs=200)] * 2
    assert all(0 < len(part) <= RATE for part in parts)
    assert np.array_equal(np.concatenate(parts), read_samples(wav(loud * 0.5), 4.0))
    (whole,) = read_parts(wav(loud[:RATE] * 0.5), 1.0, 4.0)
    assert len(whole) == RATE
    with pytest.raises(InvalidPromptError, match=r"lasts 3\.125 s, longer than the 3 s"):
        next(read_parts(wav(loud * 0.5), 1.0, 3.0))


def test_damaged_files() -> None:
    """They have samples, or are refused."""
    rng, file = np.random.default_rng(10), wav(sounds([200], seed=10)[0])
    num_refused = 0
    for _ in range(2_000):
        damaged = bytearray(file)
        for at in rng.integers(0, 44, rng.integers(1, 4)):
            damaged[at] = rng.integers(256)
        try:
            content = bytes(damaged[: rng.integers(1, 2 * len(file))])
            sounds_read = [read_samples(content, 1.0), *read_parts(content, 0.005, 1.0)]
        except InvalidPromptError:
            num_refused += 1
        else:
            assert np.isfinite(np.concatenate(sounds_read)).all()
    assert 0 < num_refused < 2_000


def test_a_header_that_declares_too_much() -> None:
    """As writers do that do not know the length at the start; a long file is refused before it is
    read."""
    file = wav(sounds([200], seed=10)[0])
    unknown = file[:40] + b"\xff" * 4 + file[44:]
    assert np.array_equal(read_samples(unknown, 1.0), read_samples(file, 1.0))
    with pytest.raises(InvalidPromptError, match="longer than the 1 s"):
        read_samples(unknown + bytes(32_000), 1.0)


def test_refusals(whisper: Path, tmp_path: Path) -> None:
    for options, words in (
        ({"enable_lora": True}, "enable_lora does not fit WhisperForConditionalGeneration"),
        ({"speculative_model": "[ngram]"}, "speculative_model = '[ngram]' does not fit"),
        ({"pipeline_parallel_size": 2}, "pipeline_parallel_size = 2 does not fit"),
        ({"max_num_batched_tokens": MAX_POSITIONS}, f"must be at least {MAX_POSITIONS + 1}"),
        ({"limit_mm_per_prompt": {"audio": 2}}, "limit_mm_per_prompt"),
    ):
        with pytest.raises(ConfigError, match=re.escape(words)):
            open_llm(whisper, **options)
    write_whisper(tmp_path)
    edit_json(tmp_path / "preprocessor_config.json", lambda own: own.update(hop_length=80))
    with pytest.raises(ConfigError, match="hop_length = 80 of the features"):
        open_llm(tmp_path)
    good = np.zeros(100, np.float32)
    with open_llm(whisper, limit_mm_per_prompt={"audio": 1}) as llm:
        for audio, words in (
            ((np.zeros(16_001, np.float32), RATE), "lasts 1 s, longer than the 1 s"),
            (wav(np.zeros(48_000, np.float32), 24_000), "lasts 2 s, longer than the 1 s"),
            ((good, 44_100.5), "sampling rate 44100.5; give Hz, an integer such as 16000"),
            ((good, 0), "sampling rate 0; it must be .* such as 16000"),
            (good, "holds no sound with its sampling rate: ndarray"),
            ((good.astype(np.int16), RATE), "dtype int16"),
            ((good.reshape(2, 50), RATE), r"shape \[2, 50\]"),
            ((good * np.nan, RATE), "NaN"),
            ((good.astype(np.float64) - 1e30, RATE), r"not within \[-32768, 32768\]"),
            ((good[:0], RATE), "no samples"),
            (b"no sound at all", "is no WAV file with integers .* soundfile"),
            (wav(good)[:30], "is no WAV file"),
            (b"", "is an empty file"),
            (tmp_path / "absent.wav", "cannot be read"),
        ):
            with pytest.raises(InvalidPromptError, match=words):
                llm.generate({"prompt": None, "multi_modal_data": {"audio": audio}}, use_tqdm=False)
        for prompt, words in (
            ({"prompt_token_ids": BEGIN}, "reads sound, and the prompt has none"),
            ({"encoder_prompt": "a text"}, "reads sound, and the prompt has none"),
            ({**of_sound(good), "decoder_prompt": "a"}, "no tokenizer"),
            ({"encoder_prompt": {**of_sound(good)["encoder_prompt"], "prompt": "a"}}, "else too"),
        ):
            with pytest.raises(InvalidPromptError, match=words):
                llm.generate(prompt, use_tqdm=False)
        with pytest.raises(RequestError, match="truncate_prompt_tokens does not fit a sound"):
            llm.generate(of_sound(good), SamplingParams(truncate_prompt_tokens=1), use_tqdm=False)
