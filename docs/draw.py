"""Draws docs/engine.svg: driver, ranks and one step. `python docs/draw.py` writes it anew."""

from __future__ import annotations

from html import escape
from pathlib import Path

WIDTH, HEIGHT = 860, 376
FONT = "font-family='DejaVu Sans, Verdana, sans-serif'"
BLUE, GREEN, GREY, INK, LINE = "#e8f0fb", "#e9f6ec", "#f5f5f5", "#1c2733", "#5a6b7d"


def box(x: int, y: int, width: int, height: int, fill: str, title: str, *lines: str) -> str:
    """A rounded box with a bold title and lines of text below it."""
    parts = [
        f"<rect x='{x}' y='{y}' width='{width}' height='{height}' rx='8' fill='{fill}' "
        f"stroke='{LINE}'/>",
        f"<text x='{x + 12}' y='{y + 22}' {FONT} font-size='14' font-weight='bold' "
        f"fill='{INK}'>{escape(title)}</text>",
    ]
    for number, line in enumerate(lines):
        parts.append(
            f"<text x='{x + 12}' y='{y + 42 + 18 * number}' {FONT} font-size='12' "
            f"fill='{INK}'>{escape(line)}</text>"
        )
    return "\n".join(parts)


def arrow(x1: int, y1: int, x2: int, y2: int, label: str, x: int, y: int) -> str:
    """An arrow with a label at (x, y)."""
    return (
        f"<line x1='{x1}' y1='{y1}' x2='{x2}' y2='{y2}' stroke='{LINE}' stroke-width='1.6' "
        f"marker-end='url(#head)'/>\n<text x='{x}' y='{y}' {FONT} font-size='12' "
        f"fill='{INK}'>{escape(label)}</text>"
    )


def draw() -> str:
    """The picture, as SVG."""
    shapes = [
        box(20, 20, 150, 92, GREY, "clients", "Python: LLM(...)", "gRPC: tpengine serve"),
        box(
            240,
            20,
            400,
            132,
            BLUE,
            "driver: LLMEngine.step()",
            "1 schedule   who computes how many tokens, in which blocks",
            "2 execute    sends the step to every rank, takes one answer",
            "3 process    text, stop decisions, RequestOutput",
            "4 update     gives blocks and slots back",
            "It holds every request's tokens: a lost rank loses none.",
        ),
        box(
            670,
            20,
            170,
            132,
            GREY,
            "Ray",
            "places, starts and",
            "watches the ranks.",
            "It carries no step.",
        ),
    ]
    for rank, x in enumerate((110, 490)):
        shapes.append(
            box(
                x,
                236,
                300,
                122,
                GREEN,
                f"rank {rank}: a process with a GPU or CPU",
                "its shard of the model",
                "its KV cache, in blocks (CacheEngine)",
                "paged attention kernels",
                "samples the tokens" if rank == 0 else "gets the sampled tokens from rank 0",
            )
        )
    shapes += [
        arrow(172, 60, 236, 60, "requests", 176, 52),
        arrow(236, 92, 172, 92, "tokens", 182, 108),
        arrow(330, 154, 240, 232, "step: what changed", 150, 192),
        arrow(280, 232, 370, 154, "sampled ids", 338, 204),
        arrow(520, 154, 620, 232, "step", 586, 190),
        arrow(412, 300, 486, 300, "sums", 434, 292),
        arrow(486, 322, 412, 322, "", 0, 0),
        arrow(750, 154, 730, 232, "starts", 750, 198),
    ]
    body = "\n".join(shapes)
    return (
        f"<svg xmlns='http://www.w3.org/2000/svg' width='{WIDTH}' height='{HEIGHT}' "
        f"viewBox='0 0 {WIDTH} {HEIGHT}'>\n"
        "<defs><marker id='head' markerWidth='9' markerHeight='9' refX='8' refY='4.5' "
        f"orient='auto'><path d='M0,0 L9,4.5 L0,9 z' fill='{LINE}'/></marker></defs>\n"
        f"<rect width='{WIDTH}' height='{HEIGHT}' fill='white'/>\n{body}\n</svg>\n"
    )


if __name__ == "__main__":
    Path(__file__).with_name("engine.svg").write_text(draw())
