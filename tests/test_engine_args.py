"""Engine arguments out of range, too small to serve, contradictory, or without effect."""

from __future__ import annotations

import fnmatch
import math
import re
import shutil
from dataclasses import fields, replace
from operator import attrgetter
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from support.engines import complete, greedy, make_engine, open_llm
from support.messages import refused, said
from support.models import ModelShop
from support.subjects import BY_NAME, Subjects
from support.tables import read_table
from support.tiny_llama import edit_json
from support.variants import WINDOW
from support.workers import loaded_worker
from support.zoo import PLAIN

from tpengine import LLM, EngineArgs, LLMEngine, SamplingParams
from tpengine.checkpoint.model_limits import resolve_max_model_len
from tpengine.cli.parser import CommandParser
from tpengine.config import EMBEDDED_MODEL
from tpengine.engine_args import AsyncEngineArgs
from tpengine.errors import CacheSizeError, ConfigError, ModelLoadError
from tpengine.layers.rotary import rope_parameters
from tpengine.worker import model_runner
from tpengine.worker.device import resolve_dtype

BAD: list[tuple[dict[str, Any], str]] = [
    *read_table("refused_args"),
    ({"seed": 1 << 2000}, "seed | 18446744073709551615"),
    ({"pipeline_parallel_size": 2, "speculative_model": EMBEDDED_MODEL},
     "speculative_model | pipeline_parallel_size = 1 only | '[ngram]'"),
    ({"speculative_model": EMBEDDED_MODEL, "ngram_prompt_lookup_min": 2},
     "ngram_prompt_lookup_min = 2 | no effect | a model"),
    ({"speculative_model": Path(EMBEDDED_MODEL)}, "1536 tokens | has 512"),
    ({"speculative_model": EMBEDDED_MODEL}, "1536 tokens | has 512 | same vocabulary"),
]  # fmt: skip


@pytest.mark.parametrize(("args", "words"), BAD)
def test_refused(models: ModelShop, args: dict[str, Any], words: str) -> None:
    with refused(ConfigError, words) as raised:
        LLM(str(models.folder(PLAIN)), **args)
    assert ("requests wait" in str(raised.value)) == ("requests wait" in words)


def test_refused_draft_models(models: ModelShop, subjects: Subjects, tmp_path: Path) -> None:
    """A GPU, layers that all have a window, too few positions, and files that cannot be read."""
    plain, windowed = models.folder(PLAIN), subjects.folder(BY_NAME["mistral-window"])
    short = shutil.copytree(plain, tmp_path / "short")
    edit_json(short / "config.json", lambda config: config.update(max_position_embeddings=64))
    for model, drafts, device, words in (
        (plain, plain, "cuda", "on CPU only, the device is cuda | '[ngram]'"),
        (windowed, plain, "cpu", f"a window of {WINDOW} tokens | need the blocks before it"),
        (plain, short, "cpu", "64 positions | sequences have up to 640 | lower max_model_len"),
        (plain, tmp_path, "cpu", "cannot be read: | config.json"),
    ):
        args = EngineArgs(str(model), speculative_model=str(drafts))
        with refused((ConfigError, ModelLoadError), f"speculative_model = | {words}"):
            args.create_engine_config(device)


HIDDEN = {
    spec.name: spec.metadata["option"]
    for spec in fields(AsyncEngineArgs)
    if spec.metadata["option"].is_hidden
}
ASYNC_PARSER = AsyncEngineArgs.add_cli_args(CommandParser())
OTHER_VALUES = {"int": 7, "str": "other", "bool": True, "float": 0.5}


def test_positions_are_those_of_vllm() -> None:
    args = EngineArgs("model", ["a", "b"], "tokenizer", True, "slow", True, "folder", "pt", "half")
    assert (args.served_model_name, args.load_format, args.dtype) == (["a", "b"], "pt", "half")
    with pytest.raises(TypeError, match="positional"):
        EngineArgs(*(spec.default for spec in fields(EngineArgs)[:77]))
    assert AsyncEngineArgs(*[None] * 76, False, True).disable_log_requests is True
    with pytest.raises(TypeError, match="bogus"):
        EngineArgs(bogus=1)  # type: ignore[call-arg]


@pytest.mark.parametrize("name", HIDDEN)
def test_fields_that_cannot_change_anything(name: str, caplog: pytest.LogCaptureFixture) -> None:
    """Refused by their name, with what replaces it, or said to have no effect; from Python and from
    the command line alike."""
    value = OTHER_VALUES[AsyncEngineArgs.__dataclass_fields__[name].type.partition(" | ")[0]]
    flag = f"--{name.replace('_', '-')}"
    words = [flag] if value is True else [flag, str(value)]
    assert name not in ASYNC_PARSER.format_help().replace("-", "_")
    for args in (
        AsyncEngineArgs(**{name: value}),
        AsyncEngineArgs.from_cli_args(ASYNC_PARSER.parse_args(words)),
    ):
        assert getattr(args, name) == value
        if HIDDEN[name].refused:
            with pytest.raises(ConfigError, match=rf"^{name} = .* is refused: .*; .*; leave it at"):
                args.create_engine_config("cpu")
            continue
        with said(caplog) as messages:
            args.create_engine_config("cpu")
        assert messages == [f"tpengine has no such setting: no effect of {name} = {value!r}"]


@pytest.mark.parametrize(
    ("args", "place", "expected"),
    [
        ({"model": Path(EMBEDDED_MODEL)}, "model.model", EMBEDDED_MODEL),
        ({"num_gpu_blocks_override": 64}, "cache.num_device_blocks_override", 64),
        ({"kv_cache_dtype": "fp8_e4m3"}, "cache.kv_cache_dtype", "fp8"),
        ({"preemption_mode": None}, "scheduler.preemption_mode", "auto"),
        ({"scheduler_delay_factor": 0.5}, "scheduler.delay_factor", 0.5),
        ({"enable_chunked_prefill": None}, "scheduler.enable_chunked_prefill", True),
        ({"dtype": torch.float16}, "model.dtype", "float16"),
        ({"dtype": "Float32", "quantization": "INT8"}, "model.dtype", "float32"),
        ({"load_format": "SafeTensors"}, "model.load_format", "safetensors"),
        ({"tokenizer_mode": "Slow"}, "model.tokenizer_mode", "slow"),
        ({"skip_tokenizer_init": True, "tokenizer": "/nowhere"}, "model.tokenizer", None),
        ({"max_logprobs": -1}, "model.max_logprobs", -1),
        ({}, "model.max_logprobs", 20),
        ({"worker_use_ray": True}, "parallel.ray.placement_strategy", "PACK"),
        ({"distributed_executor_backend": "ray"}, "parallel.ray.placement_strategy", "PACK"),
        ({"distributed_executor_backend": "mp"}, "parallel.ranks.spare_workers", 0),
    ],
)
def test_other_spellings(args: dict[str, Any], place: str, expected: object) -> None:
    engine_args = EngineArgs(**args)
    assert attrgetter(place)(engine_args.create_engine_config("cuda")) == expected
    assert (engine_args.chosen_executor == "ray") == place.startswith("parallel.ray")


@pytest.mark.parametrize(
    ("model", "served", "names"),
    [
        (EMBEDDED_MODEL, None, ("embedded",)),
        ("/some/where/", None, ("where",)),
        ("some/where", None, ("some/where",)),
        ("some/x.gguf", None, ("x",)),
        ("/some/X.Q4_0.GGUF", None, ("X.Q4_0",)),
        ("x-00001-of-00003.gguf", None, ("x",)),
        ("some/x.gguf", "a", ("a",)),
        ("some/where", "a", ("a",)),
        ("some/where", ["a", "b"], ("a", "b")),
    ],
)
def test_served_names(model: str, served: str | list[str] | None, names: tuple[str, ...]) -> None:
    assert EngineArgs(model, served).served_names == names


@pytest.mark.parametrize(
    ("files", "device"), [(["nvidiactl"], "cpu"), (["nvidiactl", "nvidia0"], "cuda")]
)
def test_device_left_out(files: list[str], device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    config = EngineArgs(device="cpu").create_engine_config()
    assert (config.device, config.scheduler.max_num_batched_tokens) == ("cpu", 512)
    monkeypatch.setattr(
        Path, "glob", lambda path, text: iter(fnmatch.filter(files, text * (path == Path("/dev"))))
    )
    assert EngineArgs().create_engine_config().device == device


def test_float16_on_cpu_computes_in_another_type(caplog: pytest.LogCaptureFixture) -> None:
    with said(caplog) as messages:
        EngineArgs(dtype="half", device="cpu").create_engine_config()
    assert re.search(r"'half'.*CPU.*in bfloat16.* float32", " ".join(messages))
    assert resolve_dtype("half", "cpu") == resolve_dtype("auto", "cpu") != torch.float16
    assert resolve_dtype("half", "cuda") == torch.float16


def test_rotary_arguments_are_those_of_another_config(subjects: Subjects, tmp_path: Path) -> None:
    source = subjects.folder(BY_NAME["llama-yarn-old"])
    shutil.copytree(source, tmp_path, dirs_exist_ok=True)
    scaling = {"type": "linear", "factor": 4.0}
    change = {"rope_scaling": scaling, "rope_theta": 777.0}
    edit_json(tmp_path / "config.json", lambda config: config.update(change))
    expected = EngineArgs(str(tmp_path)).create_engine_config().model
    for other in ({"rope_scaling": scaling, "rope_theta": 777}, change):
        config = EngineArgs(str(source), **other).create_engine_config().model
        assert rope_parameters(config.hf_config) == rope_parameters(expected.hf_config)
    config = EngineArgs(str(source), rope_theta=777.0).create_engine_config().model
    assert rope_parameters(config.hf_config)["rope_type"] == "yarn"
    assert rope_parameters(config.hf_config)["rope_theta"] == 777.0
    longest = 4 * config.hf_config["max_position_embeddings"]
    args = EngineArgs(str(source), rope_scaling=scaling, max_model_len=longest)
    assert args.create_engine_config().model.max_model_len == longest
    args = EngineArgs(str(subjects.folder(BY_NAME["opt-before"])), rope_theta=9.0)
    with pytest.raises(ConfigError, match=r"rope_theta = 9.0: OPTForCausalLM has no rotary"):
        args.create_engine_config()
    args = EngineArgs(str(subjects.folder(BY_NAME["gemma3_text-ropes"])), rope_theta=9.0)
    with pytest.raises(ConfigError, match=r"the layers of Gemma3ForCausalLM rotate differently"):
        args.create_engine_config()


ORIGINAL = "original_max_position_embeddings"


@pytest.mark.parametrize(
    ("rope", "length"),
    [
        ({"rope_scaling": {"type": "linear", "factor": 4.0}}, 400),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, 400),
        ({"rope_parameters": {"rope_type": "yarn", "factor": 2.5, ORIGINAL: 60}}, 150),
        ({"rope_parameters": {"rope_type": "yarn", "factor": 4.0, ORIGINAL: 25}}, 100),
        ({"rope_scaling": {"type": "yarn", "factor": 4.0}, ORIGINAL: 50}, 200),
        ({"rope_scaling": {"type": "linear", "factor": 8.0}, "model_type": "gemma3_text"}, 100),
        ({"rope_scaling": {"type": "dynamic", "factor": 4.0}}, 100),
        ({"rope_scaling": {"type": "llama3", "factor": 8.0, ORIGINAL: 50}}, 100),
        ({"rope_scaling": {"type": "longrope", "factor": 8.0, ORIGINAL: 50}}, 100),
        ({"rope_parameters": {"rope_type": "linear", "factor": math.inf}}, 100),
    ],
    ids=str,
)
def test_the_length_that_a_model_is_made_for(rope: dict[str, Any], length: int) -> None:
    config = {"max_position_embeddings": 100, **rope}
    assert resolve_max_model_len(config, None) == resolve_max_model_len(config, length) == length
    with pytest.raises(ConfigError, match=rf"{length + 1} is more than the {length} positions"):
        resolve_max_model_len(config, length + 1)


def test_without_sliding_window_a_sequence_fits_into_it(subjects: Subjects) -> None:
    def max_model_len(name: str, **args: Any) -> int:
        args = {"disable_sliding_window": True, **args}
        config = EngineArgs(str(subjects.folder(BY_NAME[name])), **args).create_engine_config()
        return config.model.max_model_len

    assert max_model_len("mistral-window") == WINDOW
    assert max_model_len("mistral-window", max_model_len=WINDOW - 1) == WINDOW - 1
    assert max_model_len("mistral-no-window") > WINDOW
    assert max_model_len("qwen2_moe-shared") > WINDOW  # its config says 0 for no window
    with pytest.raises(ConfigError, match=rf"{WINDOW + 1}.*window of {WINDOW} tokens"):
        max_model_len("mistral-window", max_model_len=WINDOW + 1)


@pytest.mark.parametrize(
    ("words", "name", "expected"),
    [
        (["--max_num_seqs=8"], "max_num_seqs", 8),
        (["--max_num_seqs", "8"], "max_num_seqs", 8),
        (["-tp", "2"], "tensor_parallel_size", 2),
        (["-pp", "2"], "pipeline_parallel_size", 2),
        (["-q", "int8"], "quantization", "int8"),
        (["-q", "None"], "quantization", None),
        (["-spec-draft-tp", "2"], "speculative_draft_tensor_parallel_size", 2),
        (["--tokenizer", ""], "tokenizer", None),
        (["--tokenizer", "my_folder"], "tokenizer", "my_folder"),
        (["--enable-chunked-prefill"], "enable_chunked_prefill", True),
        (["--enable-chunked-prefill=False"], "enable_chunked_prefill", False),
        (["--enable_chunked_prefill", "false"], "enable_chunked_prefill", False),
        (["--enforce-eager", "True"], "enforce_eager", True),
        (["--no-enable-prefix-caching"], "enable_prefix_caching", False),
        (["--rope-scaling", '{"factor": 2}'], "rope_scaling", {"factor": 2}),
        (["--served-model-name", "a", "b"], "served_model_name", ["a", "b"]),
        (["--ignore-patterns", "a", "--ignore-patterns=b"], "ignore_patterns", ["a", "b"]),
        (["--cpu-offload-gb", "0"], "cpu_offload_gb", 0),
    ],
)
def test_words_of_a_command_line(words: list[str], name: str, expected: object) -> None:
    parser = EngineArgs.add_cli_args(CommandParser())
    assert getattr(EngineArgs.from_cli_args(parser.parse_args(words)), name) == expected
    parser.add_argument("prompt")
    assert parser.parse_args([*words, "--", "--a_b"]).prompt == "--a_b"


def test_a_word_that_is_no_json_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        EngineArgs.add_cli_args(CommandParser()).parse_args(["--limit-mm-per-prompt", "image=1"])
    assert """must be JSON as in '{"name": value}'; got 'image=1'""" in capsys.readouterr().err


def test_own_options_of_an_async_engine() -> None:
    parser = AsyncEngineArgs.add_cli_args(CommandParser(), async_args_only=True)
    parsed = vars(parser.parse_args(["--disable-log-requests"]))
    assert parsed == {"disable_log_requests": True, "engine_use_ray": False}


def test_cache_space_is_for_cpus(models: ModelShop) -> None:
    args = EngineArgs(str(models.folder(PLAIN)), cpu_kv_cache_space=0.1)
    assert args.create_engine_config("cpu").cache.cpu_kv_cache_bytes == int(0.1 * (1 << 30))
    with pytest.raises(ConfigError, match=r"cpu_kv_cache_space = 0.1.*gpu_memory_utilization"):
        args.create_engine_config("cuda")


@pytest.mark.parametrize("seed", [-(1 << 63), (1 << 64) - 1])
def test_outermost_seeds_work(models: ModelShop, seed: int) -> None:
    """Dummy weights come from the seed, too."""
    params = SamplingParams(temperature=1.0, max_tokens=4, ignore_eos=True)
    with make_engine(models.folder(PLAIN), load_format="dummy", seed=seed) as engine:
        assert len(complete(engine, [5, 6, 7], params).token_ids) == 4


def test_most_sequences_and_spaces_are_accepted(models: ModelShop) -> None:
    most = {"max_num_seqs": 65536, "swap_space": 1 << 20, "cpu_kv_cache_space": 1 << 20}
    config = EngineArgs(str(models.folder(PLAIN)), **most).create_engine_config("cpu")
    assert config.scheduler.max_num_seqs == 65536
    assert config.cache.swap_space_bytes == config.cache.cpu_kv_cache_bytes == 1 << 50


def test_what_ranks_cannot_send_is_refused_at_the_start(models: ModelShop) -> None:
    vocabulary = {"max_logprobs": -1, "max_num_batched_tokens": 1 << 16}
    args = EngineArgs(str(models.folder(PLAIN)), tensor_parallel_size=2, **vocabulary)
    with pytest.raises(ConfigError, match=r"max_logprobs = -1 .* at most 303, or lower"):
        args.create_engine_config("cpu")
    replace(args, max_logprobs=303).create_engine_config("cpu")
    replace(args, tensor_parallel_size=1).create_engine_config("cpu")


def test_tables_that_do_not_fit(models: ModelShop, monkeypatch: pytest.MonkeyPatch) -> None:
    args = {"num_device_blocks_override": 64, "max_num_seqs": 65536}
    worker = loaded_worker(models.folder(PLAIN), **args)
    fail = Mock(side_effect=MemoryError("Unable to allocate 9.00 TiB"))
    monkeypatch.setattr(model_runner, "InputBatch", fail)
    with pytest.raises(CacheSizeError, match=r"max_num_seqs = 65536.*640.*9\.00 TiB.*lower"):
        worker.init_cache_engine(64)


@pytest.mark.parametrize(
    ("args", "named"),
    [
        ({"enforce_eager": True}, []),
        (
            {"gpu_memory_utilization": 0.5, "attention_backend": "sdpa"},
            ["no effect on CPU: gpu_memory_utilization = 0.5, attention_backend = 'sdpa'"],
        ),
    ],
)
def test_what_does_nothing_on_cpu_is_named_once(
    models: ModelShop, caplog: pytest.LogCaptureFixture, args: dict[str, Any], named: list[str]
) -> None:
    for device, expected in (("cuda", []), ("cpu", named)):
        with said(caplog) as messages:
            EngineArgs(str(models.folder(PLAIN)), **args).create_engine_config(device)
        assert messages == expected


@pytest.mark.parametrize(
    ("args", "name", "advice"),
    [
        ({"cpu_kv_cache_space": 1e-6, "max_model_len": 16}, "cpu_kv_cache_space", "to at least"),
        ({"cpu_kv_cache_space": 0.0005}, "cpu_kv_cache_space", "so that the cache gets"),
        ({"num_device_blocks_override": 20}, "max_model_len", "to at most"),
        ({"num_device_blocks_override": 20}, "num_device_blocks_override", "to"),
    ],
)
def test_advice_is_enough(models: ModelShop, args: dict[str, Any], name: str, advice: str) -> None:
    folder, args = models.folder(PLAIN), {"num_device_blocks_override": None, **args}
    with refused(CacheSizeError, name) as raised:
        make_engine(folder, **args)
    match = re.search(rf"{name} {advice} ([\d.]+\d)", str(raised.value))
    assert match is not None, raised.value
    value = float(match[1]) if name == "cpu_kv_cache_space" else int(match[1])
    with make_engine(folder, **{**args, name: value}) as engine:
        assert len(complete(engine, [5, 6, 7], greedy(4)).token_ids) == 4
    if name == "num_device_blocks_override":
        with pytest.raises(CacheSizeError):
            make_engine(folder, **{**args, name: value - 1})


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_cuda_that_is_not_there(models: ModelShop) -> None:
    with pytest.raises(ConfigError, match=r"cuda.*device='cpu'"):
        LLMEngine.from_engine_args(EngineArgs(str(models.folder(PLAIN)), device="cuda"))


IN_FILE = r"threads?, (bfloat16|float32) \(the file has float16\):"


@pytest.mark.parametrize("dtype", ["auto", "half", "float32"])
def test_one_line_says_what_runs_and_a_dtype_other_than_the_files_is_said(
    models: ModelShop, tmp_path: Path, caplog: pytest.LogCaptureFixture, dtype: str
) -> None:
    """The latter where the user did not choose it."""
    folder = shutil.copytree(models.folder(PLAIN), tmp_path / "model")
    args = {"dtype": dtype, "seed": 7, "skip_tokenizer_init": True}
    for in_file in ("float16", None):
        edit_json(folder / "config.json", lambda fields, name=in_file: fields.update(dtype=name))
        with said(caplog) as messages, caplog.at_level("INFO", "tpengine"):
            open_llm(folder, num_device_blocks_override=64, **args)
        wanted = f"model {folder}, tokenizer none, dtype {dtype}, seed 7, 1 rank on cpu"
        assert messages.count(wanted) == 1
        is_said = re.search(IN_FILE, "\n".join(messages)) is not None
        assert is_said == (dtype == "auto" and in_file is not None)
