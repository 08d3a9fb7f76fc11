"""Small random Llamas whose tokenizers and chat templates know tools, in the known forms."""

from __future__ import annotations

from pathlib import Path

from tokenizers import AddedToken

from support.byte_llama import write_tokenizer
from support.tiny_llama import TinyLlama

_SYSTEM = """
{%- if tools %}S: tools
{%- for tool in tools %}
{{ tool | tojson }}
{%- endfor %}
{% endif %}"""
_OTHERS = """
{%- else %}{{ message.role[0] | upper }}: {{ message.content }}
{% endif %}"""
_END = "{% endfor %}{% if add_generation_prompt %}A: {% endif %}"

HERMES = (
    _SYSTEM
    + """{%- for message in messages %}
{%- if message.tool_calls %}A: {{ message.content }}
{%- for call in message.tool_calls %}
<tool_call>
{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}
</tool_call>
{%- endfor %}
{% elif message.role == "tool" %}<tool_response>{{ message.content }}</tool_response>
"""
    + _OTHERS
    + _END
)
LLAMA3 = (
    _SYSTEM
    + """{%- for message in messages %}
{%- if "tool_calls" in message %}
{%- if message.tool_calls | length != 1 %}{{ raise_exception("one call at a time") }}{% endif %}
{%- set call = message.tool_calls[0].function %}A: {"name": "{{ call.name }}", "parameters": {{
call.arguments | tojson }}}
{% elif message.role == "tool" %}ipython: {{ message.content }}
"""
    + _OTHERS
    + _END
)
_MISTRAL = (
    _SYSTEM
    + """{%- for message in messages %}
{%- if message.tool_calls is defined %}A: [TOOL_CALLS]@CALLS@</s>
{% elif message.role == "tool" %}
{%- if message.tool_call_id | length != 9 %}{{ raise_exception("ids of nine") }}{% endif -%}
[TOOL_RESULTS]{"content": {{ message.content | tojson }}, "call_id": "{{ message.tool_call_id }}"}
"""
    + _OTHERS
    + _END
)
MISTRAL = _MISTRAL.replace(
    "@CALLS@",
    """[{% for call in message.tool_calls %}{{ call.function | tojson
}}{{ ", " if not loop.last }}{% endfor %}]""",
)
MISTRAL_2025 = _MISTRAL.replace(
    "[TOOL_CALLS]@CALLS@",
    """{% for call in message.tool_calls %}[TOOL_CALLS]{{ call.function.name
}}[ARGS]{{ call.function.arguments | tojson }}{% endfor %}""",
)
_QWEN3 = ("<think>", "</think>", "<tool_call>", "</tool_call>")
TEMPLATES = {
    # name: template, its special tokens, and other added tokens
    "hermes": (HERMES, (), ("<tool_call>", "</tool_call>")),
    "hermes in text": (HERMES, (), ()),
    "llama3": (LLAMA3, ("<|python_tag|>",), ()),
    "mistral": (MISTRAL, ("[TOOL_CALLS]", "[TOOL_RESULTS]"), ()),
    "mistral 2025": (MISTRAL_2025, ("[TOOL_CALLS]", "[ARGS]"), ()),
    "thinking": (HERMES.replace("A: {% endif", "A: <think>\n{% endif"), (), _QWEN3),
}


def write(folder: Path, name: str) -> Path:
    """A model of one of the templates, with its tokenizer."""
    template, special, plain = TEMPLATES[name]
    added = [AddedToken(text, special=True) for text in special]
    added += [AddedToken(text, special=False) for text in plain]
    TinyLlama(vocab_size=288, max_positions=4096).write(folder)
    write_tokenizer(folder, *added, chat_template=template)
    return folder
