"""Draws the pictures of README and docs/. `python docs/draw.py` writes them anew.

engine.svg shows driver, ranks and one step. recovery.svg shows what recovery.json holds, which
`python tests/benchmarks recovery --executor processes --json docs/recovery.json` measured.
blocks.svg shows blocks.json, of `python docs/draw.py --record-blocks`, noted in a real run;
steps.svg shows steps.json, of `--record-steps`; pipeline.svg shows pipeline.json, of
`PYTHONPATH=docs python docs/draw.py --record-pipeline`.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Iterator
from html import escape
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

WIDTH, HEIGHT = 860, 376
FONT = "font-family='DejaVu Sans, Verdana, sans-serif'"
BLUE, GREEN, GREY, INK, LINE = "#e8f0fb", "#e9f6ec", "#f5f5f5", "#1c2733", "#5a6b7d"
BAR, TOKEN, KILL = "#7da7dc", "#2e8b57", "#c0392b"


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


def draw_engine() -> str:
    """Driver, ranks and one step, as SVG."""
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
    head = (
        "<defs><marker id='head' markerWidth='9' markerHeight='9' refX='8' refY='4.5' "
        f"orient='auto'><path d='M0,0 L9,4.5 L0,9 z' fill='{LINE}'/></marker></defs>"
    )
    return svg(WIDTH, HEIGHT, [head], shapes)


def svg(width: int, height: int, defs: list[str], shapes: list[str]) -> str:
    """A picture on white."""
    body = "\n".join([*defs, f"<rect width='{width}' height='{height}' fill='white'/>", *shapes])
    return (
        f"<svg xmlns='http://www.w3.org/2000/svg' width='{width}' height='{height}' "
        f"viewBox='0 0 {width} {height}'>\n{body}\n</svg>\n"
    )


PHASES = {
    "the group's end": ("nodes", "end", "placement"),
    "processes started": ("processes", "channels"),
    "imports": ("imports",),
    "ranks connected": ("rendezvous", "devices"),
    "weights": ("weights",),
    "memory, cache": ("profile", "cache"),
    "batch": ("batch",),
}
"""The bars of a rebuild, and the phases of `RecoveryRecord.phases_s` that each of them holds."""
WAYS = {
    "processes, keep_kv never": "all ranks start again (--keep-kv never)",
    "processes, keep_kv safe": "the lost rank alone is replaced",
}
"""Titles, by the names in the report of the benchmark."""
LEFT, RIGHT, ROW = 190, 770, 20
BEFORE_S, AFTER_S = 0.6, 1.0
"""What a timeline shows before the signal, and after the next token."""


def median_kill(kills: list[dict[str, Any]]) -> dict[str, Any]:
    """The kill with the median of the longest gaps."""
    return sorted(kills, key=lambda kill: kill["longest_gap_s"])[len(kills) // 2]


def last_token_s(kill: dict[str, Any]) -> float:
    """When the stream got its last token before the gap, in seconds since the signal."""
    return max(moment for moment in kill["tokens_s"] if moment < next_token_s(kill))


def next_token_s(kill: dict[str, Any]) -> float:
    """When the stream went on, in seconds since the signal."""
    ready_s = kill["found_s"] + kill["ready_s"]
    return next(moment for moment in kill["tokens_s"] if moment > ready_s)


def bars(kill: dict[str, Any]) -> Iterator[tuple[str, float, float]]:
    """What happens after the signal: name, start and end in seconds since the signal."""
    spent = dict(kill["phases_s"])
    at = kill["found_s"]
    yield "death noticed, cause found", 0.0, at
    for name, phases in PHASES.items():
        start, at = at, at + sum(spent.pop(phase, 0.0) for phase in phases)
        yield name, start, at
    assert not spent, f"PHASES has no bar for {list(spent)}"
    yield "tokens computed again", kill["found_s"] + kill["ready_s"], next_token_s(kill)


def words(x: float, y: float, text: str, size: int = 12, anchor: str = "start") -> str:
    """A line of text."""
    return (
        f"<text x='{x:.1f}' y='{y:.1f}' {FONT} font-size='{size}' text-anchor='{anchor}' "
        f"fill='{INK}'>{escape(text)}</text>"
    )


def timeline(kill: dict[str, Any], title: str, top: int, end_s: float) -> list[str]:
    """One kill on an axis from `-BEFORE_S` to `end_s`: a row for each bar, one for the tokens."""
    scale = (RIGHT - LEFT) / (end_s + BEFORE_S)

    def x(moment: float) -> float:
        return LEFT + scale * (moment + BEFORE_S)

    shapes = [words(20, top, title, 14), words(x(0), top + 20, "SIGKILL", 11, "middle")]
    y = top + 24
    for name, start, end in bars(kill):
        width = max(scale * (end - start), 1.0)
        shapes += [
            words(LEFT - 12, y + 14, name, anchor="end"),
            f"<rect x='{x(start):.1f}' y='{y + 3}' width='{width:.1f}' height='{ROW - 6}' "
            f"fill='{BAR}'/>",
            words(x(end) + 6, y + 14, f"{end - start:.2f} s"),
        ]
        y += ROW
    shapes.append(words(LEFT - 12, y + 14, "tokens of one stream", anchor="end"))
    shapes += [
        f"<rect x='{x(moment):.1f}' y='{y + 2}' width='1.6' height='{ROW - 4}' fill='{TOKEN}'/>"
        for moment in kill["tokens_s"]
        if -BEFORE_S <= moment <= end_s
    ]
    y += ROW
    shapes.append(
        f"<line x1='{x(0):.1f}' y1='{top + 24}' x2='{x(0):.1f}' y2='{y}' stroke='{KILL}' "
        "stroke-width='1.4' stroke-dasharray='4 3'/>"
    )
    shapes.append(f"<line x1='{LEFT}' y1='{y}' x2='{RIGHT}' y2='{y}' stroke='{LINE}'/>")
    tick_s = next(step for step in (0.5, 1, 2, 5, 10) if end_s / step <= 10)
    for number in range(int(end_s / tick_s) + 1):
        at = number * tick_s
        shapes.append(words(x(at), y + 15, f"{at:g} s", 11, "middle"))
    return shapes


def draw_recovery(data: dict[str, Any]) -> str:
    """From a kill to the next token of a stream, the two ways that there are, as SVG."""
    kills = {title: median_kill(data[name]) for name, title in WAYS.items()}
    end_s = max(map(next_token_s, kills.values())) + AFTER_S
    height = (len(PHASES) + 3) * ROW + 76
    shapes = []
    for number, (name, kill) in enumerate(kills.items()):
        gap_s = next_token_s(kill) - last_token_s(kill)
        title = f"{name}: {gap_s:.2f} s between two tokens of the stream"
        shapes += timeline(kill, title, 28 + number * height, end_s)
    below, load = 2 * height + 14, data["machine's load"]
    shapes += [
        words(20, below, f"{data['work']}; the kill with the median gap.", 11),
        words(20, below + 16, f"{data['machine']}, load {load}; {data['date']}", 11),
        words(20, below + 32, data["command"], 11),
    ]
    return svg(WIDTH, below + 48, [], shapes)


BLOCK_SIZE, NUM_BLOCKS = 8, 7
CELL_HEIGHT, COLUMN = 32, 216
FREE, OWN, SHARED = "#ffffff", BLUE, "#f9e4b7"


def record_blocks() -> dict[str, Any]:
    """Runs the embedded model in a cache of few blocks, and notes its block tables three times:
    after a prompt with n = 2, after the first write to its shared block, and after a swap."""
    from tpengine import EngineArgs, LLMEngine, SamplingParams

    size = {"num_device_blocks_override": NUM_BLOCKS, "max_model_len": NUM_BLOCKS * BLOCK_SIZE}
    args = EngineArgs(device="cpu", block_size=BLOCK_SIZE, swap_space=0.01, **size)
    engine = LLMEngine.from_engine_args(args)
    scheduler = engine._scheduler
    blocks, tokenizer = scheduler.block_manager, engine.get_tokenizer()
    requests = {
        "A": (
            "Once upon a time there lived in Saltby a shepherd",
            SamplingParams(n=2, seed=2, max_tokens=30),
        ),
        "B": ("Hello, my name is", SamplingParams(n=2, seed=3, max_tokens=30)),
    }
    moves: list[Any] = []
    send = engine._executor.send_step

    def note_moves(step: Any) -> None:
        moves[:] = [step.block_moves]
        send(step)

    engine._executor.send_step = note_moves  # type: ignore[method-assign]

    def note(title: str) -> dict[str, Any]:
        tables = []
        for name in requests:
            request = scheduler.get_request(name)
            for sequence in request.sequences if request is not None else []:
                on_host = blocks._host_tables.get(sequence.seq_id)
                ids = sequence.token_ids[: sequence.num_computed_tokens]
                parts = [ids[at : at + BLOCK_SIZE] for at in range(0, len(ids), BLOCK_SIZE)]
                tables.append(
                    {
                        "name": f"{name}.{sequence.index}",
                        "pool": "device" if on_host is None else "host",
                        "block_ids": on_host or blocks.block_ids(sequence),
                        "texts": [tokenizer.decode(part) for part in parts],
                        "num_tokens": [len(part) for part in parts],
                    }
                )
        return {"title": title, "tables": tables, "copies": moves[0].copies}

    engine.add_request("A", *requests["A"])
    engine.step()
    moments = [note("the prompt is computed once; both sequences hold its blocks")]
    engine.step()
    moments.append(note("each writes its own token: the half-filled block is copied first"))
    engine.add_request("B", *requests["B"])
    while not moves[0].swap_outs:
        engine.step()
    moments.append(note("the pool is full: the later request B is swapped out to host blocks"))
    engine.shutdown()
    return {"block_size": BLOCK_SIZE, "num_device_blocks": NUM_BLOCKS, "moments": moments}


def draw_moment(moment: dict[str, Any], num_blocks: int, top: int) -> list[str]:
    """One moment: logical blocks of each sequence on the left, the pool in the middle, host blocks
    on the right, and a line from each logical block to where it lies."""
    tables = moment["tables"]
    holders: dict[tuple[str, int], list[str]] = {}
    texts: dict[tuple[str, int], str] = {}
    for table in tables:
        for place, text in zip(table["block_ids"], table["texts"], strict=False):
            holders.setdefault((table["pool"], place), []).append(table["name"])
            texts[table["pool"], place] = text
    shapes = [words(20, top, moment["title"], 14)]
    left, device, host = 20, 20 + COLUMN + 90, 20 + 2 * (COLUMN + 90)
    top += 32
    y_of: dict[tuple[str, int], int] = {}
    for pool, x, count in (("device", device, num_blocks), ("host", host, num_blocks)):
        used = [place for kind, place in holders if kind == pool]
        shown = range(count) if pool == "device" else sorted(used)
        if shown:
            shapes.append(words(x, top - 8, f"{pool} blocks", 11))
        for row, place in enumerate(shown):
            names = holders.get((pool, place), [])
            fill = SHARED if len(names) > 1 else OWN if names else FREE
            label = f"{place}: {texts.get((pool, place), 'free')}".replace("\n", " ")
            y = top + row * CELL_HEIGHT
            y_of[pool, place] = y
            shapes.append(cell(x, y, fill, label, " and ".join(names)))
    y = top
    for table in tables:
        shapes.append(words(left, y - 8, f"block table of {table['name']}", 11))
        for place, text in zip(table["block_ids"], table["texts"], strict=False):
            shapes.append(cell(left, y, GREY, text.replace("\n", " "), ""))
            to = device if table["pool"] == "device" else host
            end = y_of[table["pool"], place] + 13
            # First, so that a line to a host block passes behind the device blocks.
            shapes.insert(
                0,
                f"<line x1='{left + COLUMN}' y1='{y + 13}' x2='{to}' y2='{end}' stroke='{LINE}'/>",
            )
            y += CELL_HEIGHT
        y += 22
    for source, target in moment["copies"]:
        x, start, end = device + COLUMN, y_of["device", source] + 13, y_of["device", target] + 13
        shapes.append(
            f"<path d='M{x},{start} C{x + 40},{start} {x + 40},{end} {x},{end}' fill='none' "
            f"stroke='{KILL}' stroke-width='1.6'/>"
        )
        shapes.append(words(x + 34, (start + end) / 2 + 4, "copied", 11))
    return shapes


def cell(x: int, y: int, fill: str, text: str, right: str) -> str:
    """A block: the text of its tokens, and at its right end who holds it."""
    return "\n".join(
        (
            f"<rect x='{x}' y='{y}' width='{COLUMN}' height='26' fill='{fill}' stroke='{LINE}'/>",
            words(x + 6, y + 17, text if len(text) < 30 else text[:28] + "…", 11),
            words(x + COLUMN - 6, y + 17, right, 11, "end") if len(text) < 24 else "",
        )
    )


def draw_blocks(data: dict[str, Any]) -> str:
    """Logical and physical blocks at each recorded moment, as SVG."""
    shapes: list[str] = []
    top = 28
    for moment in data["moments"]:
        shapes += draw_moment(moment, data["num_device_blocks"], top)
        rows = sum(len(table["block_ids"]) for table in moment["tables"])
        left = rows * CELL_HEIGHT + 22 * len(moment["tables"])
        top += 60 + max(left, data["num_device_blocks"] * CELL_HEIGHT)
    legend = f"{data['block_size']} tokens a block; yellow: held by two sequences, white: free"
    shapes.append(words(20, top - 14, legend, 11))
    return svg(WIDTH, top, [], shapes)


NUM_STREAMS, FIRST_STEP, NUM_SHOWN = 32, 60, 4


def record_steps(num_in_flight: int) -> list[dict[str, float]]:
    """Runs a Llama of 124 million parameters on two ranks with so many steps in flight. Returns of
    some decode steps when each part began and ended, in seconds."""
    from tpengine import EngineArgs, LLMEngine, SamplingParams
    from tpengine.bench.harness import shape_folder

    args: dict[str, Any] = {"load_format": "dummy", "device": "cpu", "max_model_len": 512}
    args |= {"tensor_parallel_size": 2, "executor": "processes", "cpu_kv_cache_space": 0.5}
    with shape_folder("llama-124m") as folder:
        is_ahead = num_in_flight > 1
        engine = LLMEngine.from_engine_args(EngineArgs(folder, async_scheduling=is_ahead, **args))
    scheduler, executor = engine._scheduler, engine._executor
    schedule, take, steps = scheduler.schedule, executor.take_answer, dict[int, dict[str, float]]()
    answered: list[int] = []

    def note_plan(is_alone: bool = False) -> Any:
        start = time.perf_counter()
        output = schedule(is_alone)
        steps[output.step_input.step] = {"plan": start, "planned": time.perf_counter()}
        return output

    def note_answer() -> Any:
        answer = take()
        answered.append(answer.step)
        step = steps[answer.step]
        step["answered"] = time.perf_counter()
        step["begun"] = step["answered"] - answer.model_s
        return answer

    scheduler.schedule = note_plan  # type: ignore[method-assign]
    executor.take_answer = note_answer  # type: ignore[method-assign]
    params = SamplingParams(temperature=0.0, max_tokens=FIRST_STEP + 40, ignore_eos=True)
    for number in range(NUM_STREAMS):
        engine.add_request(str(number), None, params, prompt_token_ids=[number] * 32)
    while engine.has_unfinished_requests():
        engine.step()
        steps[answered[-1]]["processed"] = time.perf_counter()
    engine.shutdown()
    shown = [steps[number] for number in range(FIRST_STEP, FIRST_STEP + NUM_SHOWN)]
    start = shown[0]["begun"]
    return [{name: moment - start for name, moment in step.items()} for step in shown]


def draw_steps(data: dict[str, Any]) -> str:
    """Planning, computing and processing of a few steps, with one and with two in flight."""
    runs = data["runs"]
    end_s = max(step["processed"] for steps in runs.values() for step in steps)
    scale, shapes, top = (RIGHT + 60 - 130) / end_s, list[str](), 28
    for name, steps in runs.items():
        spent_ms = 1e3 * (steps[-1]["answered"] - steps[0]["answered"]) / (len(steps) - 1)
        shapes.append(words(20, top, f"{name}: {spent_ms:.2f} ms a step", 14))
        for row, label in enumerate(("driver plans", "rank 0 computes", "driver processes")):
            shapes.append(words(118, top + 24 + 22 * row, label, anchor="end"))
        for number, step in enumerate(steps):
            parts = (("plan", "planned", BLUE), ("begun", "answered", BAR))
            parts += (("answered", "processed", "#a9d5b8"),)
            for row, (first, last, fill) in enumerate(parts):
                x, width = 130 + scale * step[first], scale * (step[last] - step[first])
                if x < 124:  # it began before the picture
                    continue
                shapes.append(
                    f"<rect x='{x:.1f}' y='{top + 10 + 22 * row}' width='{max(width, 1):.1f}' "
                    f"height='18' fill='{fill}' stroke='{LINE}'/>"
                )
                text = str(FIRST_STEP + number)
                shapes.append(words(x + width / 2, top + 23 + 22 * row, text, 10, "middle"))
        top += 102
    for number in range(0, int(1e3 * end_s) + 1, 10):
        x = 130 + scale * number / 1e3
        shapes.append(words(x, top - 6, f"{number} ms", 11, "middle"))
    shapes.append(words(20, top + 16, data["work"], 11))
    return svg(WIDTH, top + 32, [], shapes)


NUM_PARTS = 8


def cpu_name() -> str:
    """Of this machine."""
    facts = Path("/proc/cpuinfo").read_text().splitlines()
    cpu = next(line.partition(": ")[2] for line in facts if line.startswith("model name"))
    return f"{cpu}, two cores"


def record_pipeline() -> dict[str, Any]:
    """Runs a Llama of 124 million parameters in two stages: 64 streams, and a prompt of 4,000
    tokens. Returns when each stage computed each of some steps, in seconds."""
    import timed_rank

    from tpengine import EngineArgs, LLMEngine, SamplingParams
    from tpengine.bench.harness import shape_folder
    from tpengine.executor.launch import processes

    processes._PROGRAM = timed_rank.__name__
    args: dict[str, Any] = {"load_format": "dummy", "device": "cpu", "executor": "processes"}
    args |= {"pipeline_parallel_size": 2, "cpu_kv_cache_space": 0.5, "max_num_batched_tokens": 512}
    runs: dict[str, list[list[tuple[float, float]]]] = {}
    with shape_folder("llama-124m", 8192) as folder, TemporaryDirectory() as times:
        os.environ["STEP_TIMES"] = times
        with LLMEngine.from_engine_args(EngineArgs(folder, **args)) as engine:
            places = engine._executor.places  # type: ignore[attr-defined]

            def serve(lengths: list[int], num_tokens: int) -> None:
                params = SamplingParams(temperature=0.0, max_tokens=num_tokens, ignore_eos=True)
                for number, length in enumerate(lengths):
                    ids = list(range(number, number + length))
                    engine.add_request(str(number), None, params, prompt_token_ids=ids)
                while engine.has_unfinished_requests():
                    engine.step()

            serve([16] * 64, 60)
            last = engine.counters.num_steps
            serve([4000], 1)
        lines = [(Path(times) / str(p.pid)).read_text().splitlines() for p in places]
    stages = [{int(n): (float(a), float(b)) for n, a, b in map(str.split, x)} for x in lines]
    for name, first in (("64 streams", last - 40), ("a prompt of 4,000 tokens", last + 1)):
        shown = [[stage[first + i] for i in range(NUM_PARTS)] for stage in stages]
        start = shown[0][0][0]
        runs[name] = [[(a - start, b - start) for a, b in stage] for stage in shown]
    return runs


def draw_pipeline(data: dict[str, Any]) -> str:
    """Which step each stage computes, over time."""
    shapes, top = list[str](), 28
    for name, stages in data["runs"].items():
        end_s = max(end for stage in stages for _, end in stage)
        scale = (RIGHT + 60 - 80) / end_s
        shapes.append(words(20, top, f"{name}: {NUM_PARTS} steps in {1e3 * end_s:.0f} ms", 14))
        for row, stage in enumerate(stages):
            y = top + 10 + 26 * row
            shapes.append(words(70, y + 15, f"stage {row}", anchor="end"))
            for number, (begin, end) in enumerate(stage):
                x, width = 80 + scale * begin, scale * (end - begin)
                fill = (BAR, "#a9d5b8")[number % 2]
                shapes.append(
                    f"<rect x='{x:.1f}' y='{y}' width='{max(width, 1):.1f}' height='22' "
                    f"fill='{fill}' stroke='{LINE}'/>"
                )
                shapes.append(words(x + width / 2, y + 15, str(number + 1), 10, "middle"))
        top += 100
    shapes.append(words(20, top - 6, data["work"], 11))
    return svg(WIDTH, top + 8, [], shapes)


def main() -> None:
    """Writes the pictures beside this file."""
    here = Path(__file__).parent
    if "--record-steps" in sys.argv:
        names = {"one step at a time": 1, "two steps in flight": 2}
        runs = {name: record_steps(count) for name, count in names.items()}
        work = f"Llama of 124 M parameters on 2 ranks, {NUM_STREAMS} streams; {cpu_name()}"
        (here / "steps.json").write_text(json.dumps({"work": work, "runs": runs}, indent=1) + "\n")
    steps = json.loads((here / "steps.json").read_text())
    (here / "steps.svg").write_text(draw_steps(steps))
    if "--record-pipeline" in sys.argv:
        work = f"Llama of 124 M parameters in two stages of one thread each; {cpu_name()}"
        record = {"work": work, "runs": record_pipeline()}
        (here / "pipeline.json").write_text(json.dumps(record) + "\n")
    pipeline = json.loads((here / "pipeline.json").read_text())
    (here / "pipeline.svg").write_text(draw_pipeline(pipeline))
    if "--record-blocks" in sys.argv:
        (here / "blocks.json").write_text(json.dumps(record_blocks(), indent=1) + "\n")
    (here / "engine.svg").write_text(draw_engine())
    (here / "blocks.svg").write_text(draw_blocks(json.loads((here / "blocks.json").read_text())))
    data = json.loads((here / "recovery.json").read_text())
    (here / "recovery.svg").write_text(draw_recovery(data))


if __name__ == "__main__":
    main()
