"""Pictures in prompts: which tokens stand for them.

A prompt has one placeholder for each picture, such as `<image>`. Here it is replaced by the tokens
that the model was trained with: one for each row of the picture's features, and what stands around
them. How many there are depends on the model, and with some on the picture's size.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from tpengine.config import PICTURE_MODELS, EngineConfig, PicturesConfig
from tpengine.engine.picture_reader import PictureReader
from tpengine.engine.tokenizer import Tokenizer
from tpengine.errors import ConfigError, InvalidPictureError, ModelLoadError, counted
from tpengine.inputs import Owner
from tpengine.messages import PictureLoad, PictureSpan
from tpengine.pictures.picture import Picture
from tpengine.scheduling.sequence import PromptPictures

Grid = tuple[int, int]
"""Tokens that stand for features, as (rows, columns); one for each place."""
Piece = str | Grid
_TEXT_ALONE = """limit_mm_per_prompt='{"image": 0}' serves text alone"""
"""What to do about a model whose pictures cannot be read."""


class Expansion(Protocol):
    """What stands for a picture in the prompts of a model.

    Attributes:
        placeholder_id: of the token that a prompt has for each picture.
        token_id: of each token that stands for a row of features.
    """

    placeholder_id: int
    token_id: int

    def pieces(self, height: int, width: int) -> list[Piece]:
        """What replaces the placeholder of a picture of this size, in pixels."""


class _Llava:
    """LLaVA 1.5 (https://arxiv.org/abs/2310.03744): a square picture, as many rows as patches."""

    def __init__(self, whole: Mapping[str, Any], processor: Mapping[str, Any]) -> None:
        sight = whole["vision_config"]
        kind = sight["model_type"]
        if kind not in ("clip_vision_model", "siglip_vision_model"):
            text = f"pictures of {whole['architectures'][0]} with a vision tower of type {kind!r}"
            raise ConfigError(f"{text} are not supported; {_TEXT_ALONE}")
        self.token_id: int = whole.get("image_token_index") or whole["image_token_id"]
        self.placeholder_id = self.token_id
        has_class_row = kind == "clip_vision_model"
        is_dropped = whole["vision_feature_select_strategy"] == "default"
        num_patches = (sight["image_size"] // sight["patch_size"]) ** 2
        self._num_rows = num_patches + has_class_row - is_dropped

    def pieces(self, height: int, width: int) -> list[Piece]:
        return [(1, self._num_rows)]


class _Gemma3:
    """Gemma 3 (https://arxiv.org/abs/2503.19786): a square picture between two tokens."""

    def __init__(self, whole: Mapping[str, Any], processor: Mapping[str, Any]) -> None:
        if processor.get("do_pan_and_scan"):
            text = "pictures that are cut by do_pan_and_scan are not supported"
            raise ConfigError(f"{text}; set it to false in preprocessor_config.json")
        self.placeholder_id: int = whole["boi_token_index"]
        self.token_id: int = whole["image_token_index"]
        self._num_rows: int = whole["mm_tokens_per_image"]

    def pieces(self, height: int, width: int) -> list[Piece]:
        return ["\n\n<start_of_image>", (1, self._num_rows), "<end_of_image>\n\n"]


class _Qwen2VL:
    """Qwen2-VL to Qwen3-VL (https://arxiv.org/abs/2409.12191): a picture keeps its proportions, and
    a token stands for a square of patches."""

    def __init__(self, whole: Mapping[str, Any], processor: Mapping[str, Any]) -> None:
        self.placeholder_id = self.token_id = int(whole["image_token_id"])
        self._side: int = processor["patch_size"] * processor["merge_size"]
        size = processor.get("size") or {}
        self._fewest: int = processor.get("min_pixels") or size["shortest_edge"]
        self._most: int = processor.get("max_pixels") or size["longest_edge"]

    def pieces(self, height: int, width: int) -> list[Piece]:
        if max(height, width) > _LONGEST_RATIO * min(height, width):
            text = f"the picture has {width} x {height} pixels, and one side may be at most"
            raise InvalidPictureError(f"{text} {_LONGEST_RATIO} times as long as the other; cut it")
        side, rows, columns = self._side, round(height / self._side), round(width / self._side)
        if rows * columns * side**2 > self._most:
            scale = math.sqrt(height * width / self._most) * side
            rows, columns = max(1, int(height / scale)), max(1, int(width / scale))
        elif rows * columns * side**2 < self._fewest:
            scale = math.sqrt(self._fewest / (height * width)) / side
            rows, columns = math.ceil(height * scale), math.ceil(width * scale)
        return [(rows, columns)]


_LONGEST_RATIO = 200
"""As in transformers."""


class _Idefics3:
    """Idefics3 (https://arxiv.org/abs/2408.12637) and SmolVLM (https://arxiv.org/abs/2504.05299): a
    large picture is cut into square tiles, row by row, and the whole follows, made smaller."""

    def __init__(self, whole: Mapping[str, Any], processor: Mapping[str, Any]) -> None:
        self.placeholder_id = self.token_id = int(whole["image_token_id"])
        sight, factor = whole["vision_config"], whole["scale_factor"]
        self._num_rows = (sight["image_size"] // sight["patch_size"]) ** 2 // factor**2
        self._tile: int = processor["max_image_size"]["longest_edge"]
        self._longest: int = processor["size"]["longest_edge"]
        self._is_cut: bool = processor.get("do_image_splitting", True)

    def pieces(self, height: int, width: int) -> list[Piece]:
        num_rows, num_columns = self._tiles(height, width)
        border, tile = "<fake_token_around_image>", (1, self._num_rows)
        pieces, breaks = list[Piece](), ""
        for row in range(1, num_rows + 1):
            for column in range(1, num_columns + 1):
                pieces += [f"{breaks}{border}<row_{row}_col_{column}>", tile]
                breaks = ""
            breaks = "\n" if row < num_rows else "\n\n"  # in one text: it may be one token
        return [*pieces, f"{breaks}{border}<global-img>", tile, border]

    def _tiles(self, height: int, width: int) -> tuple[int, int]:
        """Rows and columns of tiles; none for a picture that is one tile."""
        if not self._is_cut:
            return 0, 0
        height, width = _fitted(height, width, self._longest)
        if width >= height:
            ratio, width = width / height, self._whole_tiles(width)
            height = self._whole_tiles(int(width / ratio))
        else:
            ratio, height = width / height, self._whole_tiles(height)
            width = self._whole_tiles(int(height * ratio))
        sizes = height // self._tile, width // self._tile
        return (0, 0) if max(sizes) == 1 else sizes

    def _whole_tiles(self, length: int) -> int:
        return math.ceil(length / self._tile) * self._tile


def _fitted(height: int, width: int, longest: int) -> tuple[int, int]:
    """A size of the same proportions, whose longer side is `longest`, and the other one even."""
    ratio = width / height
    if width >= height:
        width, height = longest, int(longest / ratio)
        height += height % 2
    else:
        height, width = longest, int(longest * ratio)
        width += width % 2
    return max(height, 1), max(width, 1)


_EXPANSIONS: Mapping[str, Callable[[Mapping[str, Any], Mapping[str, Any]], Expansion]] = {
    "gemma3": _Gemma3,
    "idefics3": _Idefics3,
    "llava": _Llava,
    "qwen2_5_vl": _Qwen2VL,
    "qwen2_vl": _Qwen2VL,
    "qwen3_vl": _Qwen2VL,
    "smolvlm": _Idefics3,
}
"""By `model_type` of the whole model."""
# The list in config.py stays: `EngineArgs` reads it, which may not import this room.
assert _EXPANSIONS.keys() == set(PICTURE_MODELS)


def read_expansion(config: EngineConfig, tokenizer: Tokenizer | None) -> PicturePrompts | None:
    """Returns what puts pictures into the prompts of an engine; None: it reads text alone.

    Raises:
        ConfigError, ModelLoadError: see `PicturePrompts`.
    """
    limits = config.scheduler.pictures
    return None if limits is None else PicturePrompts(config, limits, tokenizer)


class PicturePrompts:
    """Puts pictures into the prompts of one model.

    Raises:
        ConfigError: its vision tower is not supported, a step has no room for a picture, or Pillow
            is not installed.
        ModelLoadError: its files lack what says how pictures become tokens.
    """

    def __init__(
        self, config: EngineConfig, limits: PicturesConfig, tokenizer: Tokenizer | None
    ) -> None:
        model, budget = config.model, config.scheduler.max_num_batched_tokens
        assert model.whole is not None, "the model reads text alone"
        self._limits, self._tokenizer = limits, tokenizer
        try:
            made = _EXPANSIONS[model.whole["model_type"]](model.whole, limits.processor)
        except (KeyError, TypeError) as error:
            text = f"{model.model} does not say how pictures become tokens: {error!r}"
            raise ModelLoadError(f"{text}; fetch its files again, or {_TEXT_ALONE}") from error
        needed, room = _num_tokens(made.pieces(1, 1)), limits.num_cached_rows  # of the smallest one
        if needed > room:
            text = f"encoder_cache has room for {room} tokens of pictures, and one has {needed}"
            raise ConfigError(f"{text} at least; raise it")
        if limits.are_whole and needed > budget:
            text = f"max_num_batched_tokens = {budget} is less than the {needed} tokens of a"
            raise ConfigError(f"{text} picture, which are computed together; raise it")
        self._expansion: Expansion = made
        self._reader = PictureReader(limits.allowed_hosts)

    @property
    def placeholder(self) -> str | None:
        """The text of the placeholder; None: there is no tokenizer."""
        if self._tokenizer is None:
            return None
        return self._tokenizer.decode([self._expansion.placeholder_id], False)

    def close(self) -> None:
        """Ends the process that decodes pictures."""
        self._reader.close()

    def put(
        self,
        images: Any,
        text: str | None,
        token_ids: list[int],
        owner: Owner,
        is_chat: bool,
        tokenizer: Tokenizer | None,
    ) -> tuple[list[int], PromptPictures]:
        """Replaces the placeholders in a prompt.

        Args:
            images: what `PictureReader.read` takes, or a list of such, one for each placeholder.
            text: of the prompt, which the ids may be of. The text is expanded then, as by the
                model's own processor: what stands beside a picture may become one token with what
                the prompt has there.
            owner: requests of other owners do not find its features.
            is_chat: whether the text is a conversation's.

        Raises:
            InvalidPictureError: they are no pictures, too many, too large, or more or fewer than
                placeholders.
            QueueFullError, RequestFailedError: see `PictureReader.read`.
        """
        wanted = list(images) if isinstance(images, (list, tuple)) else [images]
        most = self._limits.max_per_prompt
        if len(wanted) > most:
            problem = f"a prompt has {counted(len(wanted), 'picture')}, and at most {most} are"
            hint = "send fewer, or raise limit_mm_per_prompt"
            raise InvalidPictureError(f"{problem} allowed; {hint}")
        placeholder = self._expansion.placeholder_id
        if (count := list(token_ids).count(placeholder)) != len(wanted):
            shown = f", {self.placeholder!r}" if self.placeholder else ""
            problem = f"the prompt has {counted(count, 'placeholder')} (token {placeholder}{shown})"
            problem = f"{problem} and {counted(len(wanted), 'picture')}"
            hint = "it needs one for each, and in its text they count too"
            raise InvalidPictureError(f"{problem}; {hint}")
        loaded = [self._load(self._reader.read(image), owner) for image in wanted]
        replacements, encode = [pieces for _, pieces in loaded], None
        if text is not None and tokenizer is not None:
            encode = tokenizer.encode_chat if is_chat else tokenizer.encode
            if encode(text) != token_ids:  # the ids were given, and the text is only repeated
                encode = None
        try:
            if encode is None:
                ids = self._expand_ids(token_ids, replacements)
            else:
                ids = encode(self._expand_text(str(text), replacements))
            return ids, self._find(ids, loaded)
        except ValueError as error:  # the tokenizer finds placeholders where the text has none
            problem = "the tokens of the prompt's pictures cannot be told from its text"
            raise InvalidPictureError(f"{problem}; give the prompt as token ids") from error

    def _expand_ids(self, token_ids: Sequence[int], pieces: list[list[Piece]]) -> list[int]:
        ids, left = list[int](), iter(pieces)
        for token_id in token_ids:
            if token_id != self._expansion.placeholder_id:
                ids.append(token_id)
                continue
            for piece in next(left):
                if isinstance(piece, str):
                    ids += self._need_tokenizer().encode(piece, add_special_tokens=False)
                else:
                    ids += [self._expansion.token_id] * math.prod(piece)
        return ids

    def _expand_text(self, text: str, pieces: list[list[Piece]]) -> str:
        token = self._need_tokenizer().decode([self._expansion.token_id], False)
        first, *rest = text.split(str(self.placeholder))
        for replacement, following in zip(pieces, rest, strict=True):
            made = (p if isinstance(p, str) else token * math.prod(p) for p in replacement)
            first += "".join(made) + following
        return first

    def _find(
        self, ids: list[int], loaded: list[tuple[PictureLoad, list[Piece]]]
    ) -> PromptPictures:
        """Finds the tokens that stand for each part of each picture."""
        token_id, start, spans = self._expansion.token_id, 0, list[PictureSpan]()
        for load, pieces in loaded:
            row = 0
            for grid in _grids(pieces):
                count = math.prod(grid)
                start = ids.index(token_id, start)
                spans.append(PictureSpan(start, count, row, grid[1], load.digest))
                start, row = start + count, row + count
        if ids.count(token_id) != sum(span.num_tokens for span in spans):
            problem = f"the prompt has tokens {token_id} beside those of its pictures"
            raise InvalidPictureError(f"{problem}; only placeholders may stand for pictures")
        return PromptPictures(spans, {load.digest: load for load, _ in loaded})

    def _load(self, picture: Picture, owner: Owner) -> tuple[PictureLoad, list[Piece]]:
        height, width = picture.pixels.shape[:2]
        pieces = self._expansion.pieces(height, width)
        num_rows, most = _num_tokens(pieces), self._limits.num_cached_rows
        if num_rows > most:
            text = f"the picture of {width} x {height} pixels takes {num_rows} tokens, and the"
            text = f"{text} ranks have room for the features of {most}"
            raise InvalidPictureError(f"{text}; send a smaller one, or raise encoder_cache")
        digest = picture.digest
        if owner.cache_salt:
            digest = hashlib.sha256(digest + owner.cache_salt.encode()).digest()
        return PictureLoad(digest, num_rows, height, width, picture.pixels.tobytes()), pieces

    def _need_tokenizer(self) -> Tokenizer:
        if self._tokenizer is None:
            raise InvalidPictureError("pictures of this model need its tokenizer; it has none")
        return self._tokenizer


def _grids(pieces: list[Piece]) -> list[Grid]:
    return [piece for piece in pieces if not isinstance(piece, str)]


def _num_tokens(pieces: list[Piece]) -> int:
    return sum(map(math.prod, _grids(pieces)))
