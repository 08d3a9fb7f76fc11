"""Pictures as callers give them: as objects, as files, and by URLs; alone, and in messages."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tpengine.engine.tokenizer import PICTURE_PART
from tpengine.errors import InvalidPictureError, InvalidPromptError
from tpengine.pictures.picture import DEFAULT_LIMITS, Picture, PictureLimits, from_image
from tpengine.pictures.picture_decoder import PictureDecoder
from tpengine.pictures.sources import read_source

_TYPES = ("image_url", "image", "image_pil")
"""Types of parts of a message that are pictures, each in a field of the type's name."""

MAX_URL_BYTES = 4 * -(-DEFAULT_LIMITS.max_bytes // 3)
"""Of the base64 of the largest picture."""


@dataclass(frozen=True, slots=True)
class PicturePart:
    """A picture of a message.

    Attributes:
        source: see `PictureReader.read`.
        field: path of its part, for errors.
    """

    source: Any
    field: str


class PictureReader:
    """Reads pictures. Any thread may use it; files are decoded one at a time.

    Args:
        allowed_hosts: see `read_source`.

    Raises:
        ConfigError: Pillow is not installed.
    """

    def __init__(
        self, allowed_hosts: Sequence[str], limits: PictureLimits = DEFAULT_LIMITS
    ) -> None:
        self._allowed_hosts, self._limits = allowed_hosts, limits
        self._decoder = PictureDecoder(limits)

    def read(self, source: Any) -> Picture:
        """Returns the picture of a source.

        Args:
            source: a `Picture`, a `PIL.Image.Image`, an array uint8 `[height, width, 3]`, the bytes
                of a file, a URL, or a `PicturePart` with one of these.

        Raises:
            InvalidPictureError: it is none of these, or no picture within the limits.
            QueueFullError, RequestFailedError: see `PictureDecoder.decode`.
        """
        match source:
            case Picture():
                return source
            case PicturePart():
                try:
                    return self.read(source.source)
                except InvalidPictureError as error:
                    error.field = source.field
                    raise
            case bytes() | bytearray():
                return self._decoder.decode(bytes(source))
            case str():
                return self._decoder.decode(read_source(source, self._limits, self._allowed_hosts))
            case None:
                form = '{"type": "image_url", "image_url": {"url": ...}}'
                raise InvalidPictureError(f"the part holds no picture; write it as {form}")
        return from_image(source, self._limits)

    def close(self) -> None:
        """Ends the process that decodes; a picture that is being decoded fails."""
        self._decoder.close()


def take_pictures(messages: Any, prompt: Any, why_none: str | None) -> tuple[Any, Any]:
    """Takes the pictures out of a conversation, or out of a prompt.

    Args:
        why_none: why the engine reads text alone; None: it reads pictures.

    Returns:
        The messages, unchecked, with `PICTURE_PART` in the place of each picture; and the pictures,
        see `PicturePrompts.put`; None: there are none.

    Raises:
        InvalidPromptError: the prompt has other data than text and pictures.
        InvalidPictureError: there are pictures, and the engine reads text alone.
    """
    messages, parts = _take_parts(messages)
    images: Any = parts or None
    if isinstance(prompt, Mapping) and (data := prompt.get("multi_modal_data")) is not None:
        if not isinstance(data, Mapping) or data.keys() - {"image"}:
            text = f"multi_modal_data must be {{'image': ...}}, got {data!r:.80}"
            raise InvalidPromptError(f"{text}; other kinds of data are not served")
        images = data.get("image")
    if images is not None and why_none is not None:
        text = "the prompt has pictures, and this engine reads text alone"
        field = parts[0].field if parts else None
        raise InvalidPictureError(f"{text}: {why_none}", field=field)
    return messages, images


def _take_parts(messages: Any) -> tuple[Any, list[PicturePart]]:
    pictures = list[PicturePart]()
    if isinstance(messages, (str, bytes, Mapping)) or not isinstance(messages, Sequence):
        return messages, pictures
    rest = []
    for i, message in enumerate(messages):
        content = message.get("content") if isinstance(message, Mapping) else None
        if isinstance(content, (list, tuple)):
            parts = list(content)
            for j, part in enumerate(parts):
                if is_picture(part):
                    source = part.get(part["type"])
                    source = source.get("url") if isinstance(source, Mapping) else source
                    pictures.append(PicturePart(source, f"messages[{i}].content[{j}]"))
                    parts[j] = PICTURE_PART
            message = {**message, "content": parts}
        rest.append(message)
    return rest, pictures


def is_picture(part: object) -> bool:
    """Whether a part of a message is a picture."""
    return isinstance(part, Mapping) and part.get("type") in _TYPES
