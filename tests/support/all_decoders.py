"""Every causal decoder class of the installed transformers, run by its own code over our cache.

    python tests/support/all_decoders.py [--only gemma,phi3] [--write]

For each class it makes a tiny random model, runs it whole, chunked and preempted, and on two ranks,
and compares greedy ids and log probabilities of the prompts with transformers in float32. `--write`
puts the table into `docs/models.md`.
"""

from __future__ import annotations

import argparse
import logging
import random
import resource
import sys
import tempfile
import warnings
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers

sys.path[:0] = [str(Path(__file__).parents[1]), str(Path(__file__).parents[2])]

from transformers import AutoModelForCausalLM  # noqa: E402
from transformers.models.auto import modeling_auto  # noqa: E402
from transformers.models.auto.configuration_auto import CONFIG_MAPPING  # noqa: E402

from support.engines import greedy, open_engine, serve  # noqa: E402
from support.oracle import MIN_MARGIN  # noqa: E402
from support.tables import read_table  # noqa: E402
from tpengine import EngineArgs  # noqa: E402
from tpengine.errors import ConfigError  # noqa: E402

DOCUMENT = Path(__file__).parents[2] / "docs" / "models.md"
BEGIN, END = "<!-- all_decoders: begin -->\n", "<!-- all_decoders: end -->\n"
PROMPT_LENGTHS = (61, 23, 5)
NUM_OUTPUT_TOKENS = 12
MAX_ELEMENTS = 15_000_000
_TABLES = read_table("tiny_decoders")
SIZES: dict[str, Any] = _TABLES["sizes"]
"""Fields of the tiny models, where a configuration has them."""
SPECIAL: dict[str, dict[str, Any]] = _TABLES["special"]
"""By model type: fields that only some classes have, or that need other values."""
_RANDOM = random.Random(1)
PROMPTS = [[_RANDOM.randrange(3, SIZES["vocab_size"]) for _ in range(n)] for n in PROMPT_LENGTHS]


@dataclass(frozen=True)
class Verdict:
    """What became of one class.

    Attributes:
        runs: ids are those of transformers, whole, chunked and preempted.
        ranks: runs, or why not, on two ranks.
        reason: why it is refused; what is wrong otherwise.
        is_typed: whether it runs, or was refused by a ConfigError.
    """

    model_type: str
    architecture: str
    runs: bool
    ranks: str = ""
    reason: str = ""
    is_typed: bool = True


class NotMadeError(Exception):
    """transformers itself cannot make or run such a tiny model."""


def decoder_classes() -> list[tuple[str, str]]:
    """Model type and class of every causal decoder of the installed transformers."""
    return list(modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.items())


def tiny_config(model_type: str) -> Any:
    """A small configuration; its lists of layers are those that the class makes itself."""
    config_class, special = CONFIG_MAPPING[model_type], SPECIAL.get(model_type, {})
    default = config_class(**{name: special[name] for name in special.keys() & {"text_config"}})
    default.allow_global_per_layer_attribute_access = True  # some differ by layer
    wanted = {
        name: value
        for name, value in SIZES.items()
        if hasattr(default, name) and not isinstance(getattr(config_class, name, None), property)
    }
    wanted["is_encoder_decoder"] = False  # as its decoder is saved
    if getattr(default, "is_decoder", None) is False:
        wanted["is_decoder"] = True
    if hasattr(default, "qk_rope_head_dim"):
        wanted.pop("head_dim", None)  # it is the rotated part's size there
        wanted["num_key_value_heads"] = SIZES["num_attention_heads"]
    return config_class(**{**wanted, **special})


def write_model(model_type: str, folder: Path) -> Any:
    """Writes a random model in which every part matters; returns it.

    Raises:
        ConfigError: its config.json is refused; no weights are made then.
        NotMadeError: transformers makes no such model.
    """
    torch.manual_seed(0)
    try:
        config = tiny_config(model_type)
        config.architectures = [dict(decoder_classes())[model_type]]
        config.save_pretrained(folder)
        EngineArgs(str(folder), dtype="float32", **SETTINGS).create_engine_config("cpu")
        with torch.device("meta"):  # the sizes of a class may escape the script
            outline = AutoModelForCausalLM.from_config(config)
        num_elements = sum(parameter.numel() for parameter in outline.parameters())
        if num_elements > MAX_ELEMENTS:
            raise NotMadeError(f"the script's sizes leave it {num_elements} parameters")
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if parameter.dim() > 1:
                    parameter.normal_(0.0, 0.15)
                elif name.endswith("bias"):
                    parameter.normal_(0.0, 0.2)
                elif "norm" in name.lower() or "ln" in name:
                    parameter.uniform_(0.5, 1.5)
            for module in model.modules():  # some classes write zeros there when they load
                if isinstance(module, torch.nn.Embedding) and module.padding_idx is not None:
                    module.weight[module.padding_idx] = 0.0
        model.save_pretrained(folder)
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    except (ConfigError, NotMadeError):
        raise
    except Exception as error:
        raise NotMadeError(f"{type(error).__name__}: {first_line(error)}") from error
    return model


SETTINGS: dict[str, Any] = {
    "model_impl": "transformers",
    "max_model_len": 96,
    "skip_tokenizer_init": True,
    "swap_space": 0.01,
    "num_device_blocks_override": 32,
}


def run(folder: Path, model: Any, tp_size: int = 1, **args: Any) -> str:
    """Runs a model; returns what differs from `model`, that of transformers, or nothing."""
    with open_engine(folder, tp_size, **{**SETTINGS, **args}) as engine:
        outputs = serve(engine, PROMPTS, greedy(NUM_OUTPUT_TOKENS, prompt_logprobs=0))
    for prompt, output in zip(PROMPTS, outputs, strict=True):
        ids, last = torch.tensor([*prompt, *output.outputs[0].token_ids]), len(prompt) - 1
        if (count := len(ids) - len(prompt)) != NUM_OUTPUT_TOKENS:
            return f"{count} output tokens after a prompt of {len(prompt)}"
        with torch.inference_mode():
            logits = model(ids[None], use_cache=False).logits[0, :-1].float()
        chosen = logits.gather(1, ids[1:, None])[:, 0]
        if (logits.amax(1) - chosen)[last:].max() > MIN_MARGIN:
            return f"other ids after a prompt of {len(prompt)} tokens"
        pairs = zip(prompt[1:], output.prompt_logprobs[1:], strict=True)
        logprobs = torch.tensor([entry[token].logprob for token, entry in pairs])
        if (logprobs - (chosen - logits.logsumexp(1))[:last]).abs().max() > 1e-3:
            return "other log probabilities of a prompt"
    return ""


def try_class(model_type: str, architecture: str) -> Verdict:
    """Runs one class in every way."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        try:
            model = write_model(model_type, folder)
            problem = run(folder, model)
            problem = problem or run(
                folder, model, max_num_batched_tokens=16, num_device_blocks_override=6
            )
        except NotMadeError as error:
            reason = f"not tried, transformers makes no tiny one: {first_line(error)}"
            return Verdict(model_type, architecture, False, reason=reason)
        except ConfigError as error:
            return Verdict(model_type, architecture, False, reason=short(error))
        except Exception as error:
            problem = f"{type(error).__name__}: {first_line(error)}"
        if problem:
            return Verdict(model_type, architecture, False, reason=problem, is_typed=False)
        try:
            problem = run(folder, model, 2)
        except ConfigError as error:
            return Verdict(model_type, architecture, True, short(error))
        except Exception as error:
            problem = f"{type(error).__name__}: {first_line(error)}"
        ranks = "runs" if not problem else f"WRONG: {problem}"
        return Verdict(model_type, architecture, True, ranks, is_typed=not problem)


def first_line(error: BaseException) -> str:
    """What an error says, shortened."""
    return str(error).strip().partition("\n")[0][:200]


def short(error: ConfigError) -> str:
    """A refusal without the names of class and folder."""
    text = str(error).partition("\n")[0]
    for border in ("transformers' code: ", "tensor_parallel_size = 2: ", "is not supported: "):
        text = text.rpartition(border)[2]
    return text.removesuffix("; docs/models.md lists what runs").removesuffix("; set it to 1")


def row(verdict: Verdict) -> str:
    """The verdict as a row of the table."""
    state = "runs" if verdict.runs else verdict.reason.replace("|", "/")
    return f"| {verdict.model_type} | {verdict.architecture} | {state} | {verdict.ranks} |"


def write_rows(verdicts: Sequence[Verdict]) -> None:
    """Puts the verdicts into the table of `docs/models.md`; rows of other classes stay."""
    before, _, rest = DOCUMENT.read_text().partition(BEGIN)
    old, _, after = rest.partition(END)
    known = {model_type for model_type, _ in decoder_classes()}
    rows = {line.split(" | ")[0][2:]: line for line in old.splitlines() if line.startswith("| ")}
    rows = {name: line for name, line in rows.items() if name in known}
    rows |= {verdict.model_type: row(verdict) for verdict in verdicts}
    running = [line for line in rows.values() if line.split(" | ")[2] == "runs"]
    on_two = sum(line.endswith("| runs |") for line in running)
    lines = [
        f"Of {len(rows)} causal decoders of transformers {transformers.__version__}, "
        f"{len(running)} run on its code, {on_two} of them on two ranks too.",
        "",
        "| model type | class | one rank | two ranks |",
        "|---|---|---|---|",
        *(rows[name] for name in sorted(rows, key=lambda name: (rows[name] not in running, name))),
    ]
    DOCUMENT.write_text(before + BEGIN + "\n".join(lines) + "\n" + END + after)


def run_all(only: Sequence[str]) -> Iterator[Verdict]:
    """Verdicts in the order of transformers' mapping."""
    for model_type, architecture in decoder_classes():
        if not only or model_type in only:
            verdict = try_class(model_type, architecture)
            state = "runs" if verdict.runs else verdict.reason
            mark = "" if verdict.is_typed else "!! "
            print(f"{mark}{model_type}: {state} | {verdict.ranks}", flush=True)
            yield verdict


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--only", default="")
    parser.add_argument("--write", action="store_true")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    verdicts = list(run_all([name for name in options.only.split(",") if name]))
    print(Counter("runs" if v.runs else "refused" if v.is_typed else "WRONG" for v in verdicts))
    print(f"{resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024:.0f} MiB of memory at most")
    if options.write:
        write_rows(verdicts)


if __name__ == "__main__":
    main()
