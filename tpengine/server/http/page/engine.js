// The live picture of the engine, drawn from the feed `engine/state`.

import { call } from "./api.js";
import { bytes, count, counted, percent } from "./text.js";

const get = (id) => document.getElementById(id);
const POLL_MS = 1000;
const RECOVERY_POLL_MS = 400; // its phases are short
const MOST_MS = 16000; // between two tries while the server does not answer
const CALL_MS = 5000;
const WINDOW_S = 60; // of the curve
const USES = {
  weights: "weights", kv_cache: "KV cache", activations: "activations", graphs: "graphs",
  communicator: "communicator", others: "others", free: "free",
};

let samples = []; // {at, tokens, rate, recovers}; `at` is the server's time
let timer = null;
let numFailed = 0;

/** Draws the engine from now on, while the page is visible; tells `note` each state. */
export function watch(note) {
  async function look() {
    clearTimeout(timer);
    timer = null;
    if (document.hidden) return;
    let wait = POLL_MS;
    try {
      const answer = await call("engine/state", { limitMs: CALL_MS, isQuiet: true });
      const about = await answer.json();
      numFailed = 0;
      draw(about);
      note(about.state);
      if (about.state === "recovering") wait = RECOVERY_POLL_MS;
    } catch (error) {
      numFailed += 1;
      wait = Math.min(MOST_MS, POLL_MS * 2 ** numFailed);
      tell(error);
    }
    clearTimeout(timer);
    timer = setTimeout(look, wait);
  }
  document.addEventListener("visibilitychange", look);
  get("key-dialog").addEventListener("close", (event) => {
    if (event.target.returnValue === "given") look();
  });
  look();
}

/** Writes a text only where it differs: a reader of the screen hears changes alone. */
function write(place, text) {
  if (place.textContent !== text) place.textContent = text;
}

function tell(error) {
  const needsKey = error.status === 401;
  showState(needsKey ? "no key" : "no answer");
  get("problem").hidden = false;
  // Without a status it is the browser's own error, whose words differ from browser to browser.
  write(get("problem"), error.status ? error.message : "The server does not answer; the page asks again.");
}

function showState(state) {
  write(get("status"), state);
  get("status").dataset.state = state;
}

function draw(about) {
  showState(about.state);
  get("problem").hidden = about.state !== "dead";
  if (about.state === "dead") {
    write(get("problem"), "The engine has ended and cannot go on; the server's log says why.");
  }
  const engine = about.engine;
  if (!engine) return; // the model loads
  const { queues, cache } = engine;
  write(get("running"), String(queues.num_running));
  // A request that has not started may not have reached the scheduler's queue yet.
  write(get("waiting"), String(Math.max(queues.num_waiting, queues.num_queued)));
  write(get("swapped"), String(queues.num_swapped));
  const used = cache.num_total_blocks - cache.num_free_blocks;
  write(get("cache"), percent(cache.usage));
  write(get("cache-blocks"), `${count(used)} of ${count(cache.num_total_blocks)} blocks of ` +
    `${cache.block_size} tokens · ${counted(engine.num_preemptions, "preemption")}`);
  get("cache-meter").setAttribute("aria-valuenow", (100 * cache.usage).toFixed(1));
  get("cache-meter").firstElementChild.style.width = percent(cache.usage);
  write(get("epoch"), `epoch ${engine.epoch}`);
  drawRate(about, engine);
  drawRecovery(engine);
  drawRanks(engine.ranks);
  drawRecoveries(engine);
}

/** The curve of the tokens that were made between two looks, and a band where ranks were replaced. */
function drawRate(about, engine) {
  const at = about.uptime_s;
  let last = samples.at(-1);
  if (last && (at <= last.at || engine.output_tokens < last.tokens)) { // another server answers
    samples = [];
    last = undefined;
  }
  const tokens = engine.output_tokens;
  const rate = last ? (tokens - last.tokens) / (at - last.at) : engine.output_tokens_per_s;
  samples.push({ at, tokens, rate, recovers: engine.recovery !== null });
  samples = samples.filter((one) => one.at > at - WINDOW_S);
  const top = Math.max(1, ...samples.map((one) => one.rate));
  const x = (one) => (120 * (1 - (at - one.at) / WINDOW_S)).toFixed(2);
  const y = (one) => (38 - 36 * one.rate / top).toFixed(2);
  const line = samples.map((one) => `${x(one)} ${y(one)}`).join("L");
  get("spark-line").setAttribute("d", `M${line}`);
  get("spark-area").setAttribute("d", `M${x(samples[0])} 40L${line}L120 40Z`);
  get("spark-bands").setAttribute("d", samples.slice(1).map((one, place) =>
    (one.recovers ? `M${x(samples[place])} 0H${x(one)}V40H${x(samples[place])}Z` : "")).join(""));
  write(get("rate"), rate.toFixed(rate < 10 ? 1 : 0));
  const { num_drafted: drafted, num_accepted: accepted } = engine;
  get("drafts").hidden = !drafted;
  write(get("drafts"), `${percent(accepted / drafted)} of ${counted(drafted, "guessed token")} came true`);
  write(get("spark-top"), `top ${top.toFixed(0)}`);
}

/** The recovery that goes on: which rank was lost, why, and what happens now. */
function drawRecovery({ recovery, queues }) {
  get("recovery").hidden = recovery === null;
  if (recovery === null) return;
  const { loss } = recovery;
  write(get("recovery-time"), `${recovery.elapsed_s.toFixed(1)} s`);
  const step = loss?.step == null ? "" : `, step ${loss.step}`;
  const lost = loss && `Rank ${loss.rank} was lost (${loss.phase}${step}): ${loss.cause}`;
  write(get("recovery-loss"), lost ?? "There is room for all ranks again: they are started.");
  const done = Object.entries(recovery.phases_s).map(([name, s]) => item(`${name} ${s.toFixed(2)} s`));
  const now = recovery.phase && item(`${recovery.phase} …`, "now");
  get("phases").replaceChildren(...done, ...(now ? [now] : []));
  const attempt = recovery.num_attempts > 1 ? `, attempt ${recovery.num_attempts}` : "";
  write(get("recovery-rest"), `${counted(queues.num_waiting, "request")} kept for the new ranks${attempt}`);
}

function drawRanks(ranks) {
  const list = get("ranks");
  while (list.children.length > ranks.length) list.lastElementChild.remove();
  while (list.children.length < ranks.length) list.append(get("rank").content.cloneNode(true));
  ranks.forEach((rank, place) => {
    const entry = list.children[place];
    const pill = entry.querySelector(".pill");
    write(entry.querySelector(".name"), `Rank ${rank.rank}`);
    write(pill, rank.state);
    pill.dataset.state = rank.state;
    write(entry.querySelector(".device"), [rank.stage, rank.device].filter(Boolean).join(", "));
    const held = Object.values(rank.memory_bytes).reduce((sum, one) => sum + one, 0);
    const uses = { ...rank.memory_bytes, free: Math.max(0, rank.total_bytes - held) };
    const key = JSON.stringify(uses);
    if (entry.dataset.uses === key) return;
    entry.dataset.uses = key;
    const shown = Object.entries(uses).filter(([, one]) => one > 0);
    entry.querySelector(".stack").replaceChildren(...shown.map(([use, one]) => part(use, one)));
    entry.querySelector(".uses").replaceChildren(...shown.map(([use, one]) => legend(use, one)));
  });
}

function part(use, numBytes) {
  const made = document.createElement("span");
  made.dataset.use = use;
  made.style.flexGrow = numBytes;
  return made;
}

function legend(use, numBytes) {
  const made = document.createElement("div");
  made.dataset.use = use;
  made.append(document.createElement("dt"), document.createElement("dd"));
  made.firstElementChild.textContent = USES[use] ?? use;
  made.lastElementChild.textContent = bytes(numBytes);
  return made;
}

function drawRecoveries({ recoveries, num_recoveries: number }) {
  write(get("num-recoveries"), count(number));
  const list = get("recoveries");
  const key = JSON.stringify(recoveries);
  if (list.dataset.key === key) return;
  list.dataset.key = key;
  list.replaceChildren(...recoveries.toReversed().map((one) => {
    const gap = one.longest_gap_s === null ? "" : `, longest pause of a stream ${one.longest_gap_s.toFixed(1)} s`;
    const made = item(`Epoch ${one.epoch}: ready after ${one.ready_s.toFixed(1)} s, ` +
      `${counted(one.num_requests, "request")} kept${gap}`);
    const why = document.createElement("span");
    why.className = "muted small";
    why.textContent = `Rank ${one.loss.rank}: ${one.loss.cause}`;
    made.append(why);
    return made;
  }));
}

function item(text, className = "") {
  const made = document.createElement("li");
  made.textContent = text;
  made.className = className;
  return made;
}
