"""Pictures in messages, in every form in which a caller may give them."""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import transformers
from PIL import Image
from support.engines import greedy, open_llm
from support.messages import refused, said
from support.small_llavas import LLAVA_TEMPLATE, PNG, QUESTION, data_url, user, write_llava
from support.tiny_llama import edit_json
from support.web import web_server
from support.whole_models import PICTURES, write

from tpengine.engine.picture_prompts import _Idefics3
from tpengine.engine.tokenizer import Tokenizer
from tpengine.errors import ConfigError, InvalidPictureError
from tpengine.llm import LLM
from tpengine.pictures.picture import from_image

PICTURE, OTHER = PICTURES[:2]
TEXT_TEMPLATE = "{% for m in messages %}{{ m.role | upper }}: {{ m.content + ' ' }}{% endfor %}"


@pytest.fixture(scope="module")
def web() -> Iterator[str]:
    """HOST:PORT of a server whose only file is a picture."""
    with web_server(lambda _: (200, {}, [PNG])) as server:
        yield f"127.0.0.1:{server.server_port}"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_llava(tmp_path_factory.mktemp("llava"))


def answers(llm: LLM, *talks: Any) -> list[tuple[list[int], Sequence[int]]]:
    """The ids of each prompt and of its answer."""
    outputs = llm.chat(list(talks), greedy(6), use_tqdm=False)
    return [(output.prompt_token_ids, output.outputs[0].token_ids) for output in outputs]


def test_all_forms_of_a_picture_are_one(folder: Path, web: str) -> None:
    forms: list[Any] = [PICTURE, Image.fromarray(PICTURE), from_image(PICTURE), PNG]
    forms += [bytearray(PNG), data_url(PICTURE), f"http://{web}/a.png"]
    parts: list[Any] = [{"type": "image", "image": form} for form in forms]
    parts += [{"type": "image_pil", "image_pil": forms[1]}]
    parts += [{"type": "image_url", "image_url": url} for url in (*forms[-2:], {"url": forms[-2]})]
    with open_llm(folder, allowed_media_hosts=f"a.example,{web}") as llm:
        first, *others = answers(llm, *(user(part, QUESTION) for part in parts))
        (unlike,) = answers(llm, user({"type": "image", "image": OTHER}, QUESTION))
        data: Any = {"prompt": "a" + " <image>" * len(forms), "multi_modal_data": {"image": forms}}
        (output,) = llm.generate(data, greedy(2), use_tqdm=False)
    assert others == [first] * len(others)
    assert (unlike[0] == first[0], unlike[1] == first[1]) == (True, False)
    assert len(output.prompt_token_ids) == 2 + len(forms) * (1 + 4)  # 4 for a picture


@pytest.mark.parametrize("of_processor", [False, True])
@pytest.mark.parametrize("begin", ["", "<s>"])
def test_prompts_are_those_of_the_processor(tmp_path: Path, of_processor: bool, begin: str) -> None:
    """Two pictures in one message, and one in an earlier turn. A processor adds the token of the
    beginning where its template writes none; the template of a tokenizer says what it wants."""
    template = begin + LLAVA_TEMPLATE
    write_llava(tmp_path, template, of_processor)
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path)
    processor: Any = transformers.LlavaProcessor(
        transformers.CLIPImageProcessorPil.from_pretrained(tmp_path), tokenizer, 14, "default",
        template, num_additional_image_tokens=1,
    )  # fmt: skip
    images = [{"type": "image", "image": image} for image in (PICTURE, OTHER, PICTURE)]
    messages = [*user(images[0], QUESTION), {"role": "assistant", "content": [QUESTION]}]
    messages += user(images[1], QUESTION, images[2])
    wanted = processor.apply_chat_template(messages, add_generation_prompt=True, tokenize=True)
    wanted = list(wanted[0] if isinstance(wanted[0], list) else wanted)
    if not begin and not of_processor:
        wanted.remove(tokenizer.bos_token_id)
    with open_llm(tmp_path) as llm:
        assert llm.chat_token_ids(messages) == answers(llm, messages)[0][0] == wanted


def test_texts_between_tiles_are_whole() -> None:
    """Some tokenizers have a token for two line breaks."""
    sight = {"vision_config": {"image_size": 28, "patch_size": 14}, "scale_factor": 2}
    edges = {"size": {"longest_edge": 56}, "max_image_size": {"longest_edge": 28}}
    expansion = _Idefics3({"image_token_id": 1, **sight}, edges)
    kinds = [type(piece) for piece in expansion.pieces(56, 28)]
    assert kinds == [str, tuple, str, tuple, str, tuple, str]


@pytest.mark.parametrize(
    ("role", "template", "written"),
    [
        ("user", LLAVA_TEMPLATE, "USER: <image>\nWhat is this? <image>\n"),
        ("user", TEXT_TEMPLATE, "USER: <image>\nWhat is this?\n<image> "),
        ("system", "{{ messages[0].content[0].text }}", "<image>\nWhat is this?\n<image>"),
    ],
)
def test_where_the_template_writes_no_pictures_they_are_written(
    folder: Path, role: str, template: str, written: str
) -> None:
    messages = [{"role": role, "content": [{"type": "image"}, QUESTION, {"type": "image"}]}]
    tokenizer = Tokenizer(transformers.AutoTokenizer.from_pretrained(folder))
    words = {"chat_template": template, "picture_token": "<image>"}
    assert tokenizer.render_chat(messages, False, **words) == written


def test_a_model_without_its_vision_tower_says_why(
    folder: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """And a field beside its text model that is null changes nothing of that."""
    bare = Path(shutil.copytree(folder, tmp_path / "bare"))
    for name in ("preprocessor_config.json", "generation_config.json"):
        (bare / name).unlink()
    edit_json(bare / "config.json", lambda config: config.update(eos_token_id=None))
    blind = (folder, 0, "limit_mm_per_prompt allows 0 pictures; raise it")
    for model, limit, why in (blind, (bare, 4, "no preprocessor_config.json; fetch it")):
        with said(caplog), open_llm(model, limit_mm_per_prompt={"image": limit}) as llm:
            with refused(InvalidPictureError, f"this engine reads text alone: | {why}"):
                llm.chat(user(QUESTION, {"type": "image", "image": PICTURE}), use_tqdm=False)
            assert answers(llm, user(QUESTION))
            assert llm.llm_engine.get_model_config().end_token_ids == {2}
        levels = [line.levelname for line in caplog.records if "text alone" in line.getMessage()]
        assert levels == ["WARNING"] * (model == bare)


def test_a_picture_that_no_step_holds_is_refused_at_the_start(tmp_path: Path) -> None:
    write("gemma3", tmp_path)
    words = "max_num_batched_tokens = 3 | the 4 tokens of a picture | raise it"
    with refused(ConfigError, words), open_llm(tmp_path, max_num_batched_tokens=3):
        pass
