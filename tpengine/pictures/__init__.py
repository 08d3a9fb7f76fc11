"""Pictures of prompts: from untrusted bytes to pixels.

Where to look:

- `picture.py`: `Picture`, `PictureLimits`, and `from_image` for what a Python program hands over.
- `sources.py`: `read_source`, from a `data:` or `https:` URL to bytes.
- `picture_decoder.py`: `PictureDecoder`, from bytes to a `Picture`, in a process that may die.
- `decoder_protocol.py`: what that process is asked and answers; the formats.
- `decoder_program.py`: that process. `conversion.py`: any image of Pillow to RGB.
"""
