"""GGUF files by llama.cpp itself: its converter (`third_party.converter`) and its quantizer.

Commands: `convert SOURCE FOLDER FILE [DTYPE]`; `quantize FILE TYPE`, with the Python that has
`llama_cpp`; `read FOLDER FILE ...` and `answer FILE ASKED ANSWERED NUM_TOKENS` by transformers.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path

FILE_TYPES = {
    "Q8_0": 7,
    "Q4_0": 2,
    "Q4_1": 3,
    "Q5_0": 8,
    "Q5_1": 9,
    "Q2_K": 10,
    "Q3_K": 11,
    "Q4_K": 14,
    "Q5_K": 16,
    "Q6_K": 18,
    "IQ4_NL": 25,
    "IQ4_XS": 30,
    "F16": 1,
    "BF16": 32,
}
"""By type of tensor: the number that the quantizer knows."""


def convert(source: str, folder: str, file: str, dtype: str = "f32") -> None:
    """Writes 16 or 32 bits. The models have no tokenizer, so every class of converter writes
    numbers as tokens instead of its vocabulary."""
    sys.path[:0] = [f"{source}/gguf-py", source]
    import convert_hf_to_gguf
    from conversion.base import ModelBase

    def number_tokens(self: ModelBase) -> None:
        tokens = [str(i) for i in range(self.hparams["vocab_size"])]
        self.gguf_writer.add_tokenizer_model("no_vocab")
        self.gguf_writer.add_token_list(tokens)
        self.gguf_writer.add_vocab_size(len(tokens))
        if "type_vocab_size" in self.hparams:  # BERT's
            self.gguf_writer.add_token_type_count(self.hparams["type_vocab_size"])

    def classes(base: type) -> list[type]:
        return [base, *(kind for child in base.__subclasses__() for kind in classes(child))]

    original = ModelBase.__init__

    def __init__(self: object, *args: object, **kwargs: object) -> None:  # noqa: N807
        for kind in classes(ModelBase):
            if "set_vocab" in vars(kind):
                kind.set_vocab = number_tokens  # type: ignore[attr-defined]
        original(self, *args, **kwargs)

    ModelBase.__init__ = __init__  # type: ignore[method-assign]
    sys.argv = ["convert", folder, "--outfile", file, "--outtype", dtype]
    convert_hf_to_gguf.main()


def quantize(file: str, kind: str) -> None:
    """Writes `TYPE.gguf` beside the file, with the mixture of types that llama.cpp has for it."""
    import ctypes

    import llama_cpp

    params = llama_cpp.llama_model_quantize_default_params()
    params.ftype, params.nthread, params.allow_requantize = FILE_TYPES[kind], 1, True
    target = Path(file).with_name(f"{kind}.gguf")
    status = llama_cpp.llama_model_quantize(
        file.encode(), str(target).encode(), ctypes.byref(params)
    )
    if status:
        sys.exit(f"quantizing {file} to {kind} failed: {status}")


def read(folder: str, *files: str) -> None:
    """Writes the weights that transformers reads from `NAME.gguf` to `NAME.theirs`; nothing where
    transformers lacks the architecture or the type. The sizes come from the folder: of a file it
    does not read them all."""
    import torch
    from safetensors.torch import save_file
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.from_pretrained(folder)
    for path in map(Path, files):
        try:
            model = AutoModelForCausalLM.from_pretrained(
                path.parent, gguf_file=path.name, dtype=torch.float32, config=config
            )
        except Exception as error:  # it has no class of its own
            print(f"{path.name}: {error}")
            continue
        state = {name: tensor.clone().contiguous() for name, tensor in model.state_dict().items()}
        save_file(state, path.with_suffix(".theirs"))


def answer(file: str, asked: str, answered: str, num_tokens: str) -> None:
    """Writes ids of prompts and greedy answers of transformers in float32; a list of messages goes
    through the file's chat template. Beside them `float32`, a folder with the model and the
    tokenizer as transformers read them, which takes it longest."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    path = Path(file)
    tokenizer = AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
    model = AutoModelForCausalLM.from_pretrained(
        path.parent, gguf_file=path.name, dtype=torch.float32
    )
    model.generation_config.eos_token_id = None
    del model.hf_quantizer  # with it a model is not written, although it is float32
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    for whole_part in (tokenizer, model):
        whole_part.save_pretrained(Path(answered).with_name("float32"))
    template = {"add_generation_prompt": True, "return_dict": False}
    prompts = [
        tokenizer.encode(text)
        if isinstance(text, str)
        else tokenizer.apply_chat_template(text, **template)
        for text in json.loads(Path(asked).read_text())
    ]
    # All at once, since a step takes as long for one as for thirty.
    batch = tokenizer.pad({"input_ids": prompts}, padding_side="left", return_tensors="pt")
    whole = model.generate(**batch, max_new_tokens=int(num_tokens), do_sample=False)
    outputs = whole[:, batch["input_ids"].shape[1] :].tolist()
    Path(answered).write_text(json.dumps({"prompts": prompts, "outputs": outputs}))


if __name__ == "__main__":
    commands: dict[str, Callable[..., None]]
    commands = {"convert": convert, "quantize": quantize, "read": read, "answer": answer}
    commands[sys.argv[1]](*sys.argv[2:])
