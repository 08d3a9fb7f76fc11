// The conversation. Text of the model goes into text nodes alone: it is never HTML.

import { call, events, ServerError } from "./api.js";
import { offerPictures, putPictures, shown, takePictures } from "./pictures.js";
import { counted } from "./text.js";

const get = (id) => document.getElementById(id);
const [box, log, form, input, send] = ["log-box", "log", "composer", "input", "send"].map(get);
const NUMBERS = ["temperature", "top_p", "max_tokens", "seed"];
const LEAST_S = 0.2; // of a rate: tokens that come together say nothing of it
const COMPLETION_TOKENS = 256; // of a model without a chat template, where OpenAI's default is 16

let history = [];
let running = null; // the AbortController of the answer that streams
let hasTemplate = true;
let engineState = "";
let showNote = () => {}; // of the answer that streams
let follows = true; // the end of the conversation stays in view

/** Shows the names that the server has; several can be chosen from. */
export async function loadModels() {
  const models = (await (await call("v1/models")).json()).data;
  const names = models.map((one) => one.id);
  offerPictures(models.some((one) => one.reads_pictures));
  const { task } = models[0];
  if (task && task !== "generate") {
    get("hint").textContent = `This model writes no text: its task is "${task}".`;
  }
  get("models").replaceChildren(...names.map((name) => new Option(name)));
  get("model-field").hidden = names.length < 2;
  get("model").textContent = names[0];
}
get("models").addEventListener("change", (event) => {
  get("model").textContent = event.target.value;
});

/** Notes what the engine does: an answer that streams waits while ranks are replaced. */
export function noteEngine(state) {
  engineState = state;
  showNote();
}

/** One message of the conversation on the page. */
class Message {
  constructor(role) {
    this.item = get("message").content.firstElementChild.cloneNode(true);
    this.item.dataset.role = role;
    this.item.querySelector(".who").textContent = role === "user" ? "You" : "Model";
    this.details = this.item.querySelector("details");
    this.text = this.item.querySelector(".text").appendChild(new Text());
    this.reasoning = this.details.querySelector("p").appendChild(new Text());
    this.note = this.item.querySelector(".note");
    log.append(this.item);
    get("hint").hidden = true;
  }

  add(text, reasoning) {
    if (text) this.text.appendData(text);
    if (reasoning) {
      this.details.hidden = false;
      this.reasoning.appendData(reasoning);
    }
    keepEndInView();
  }

  fail(error) {
    const place = this.item.querySelector(".error");
    place.textContent = error.message;
    place.hidden = false;
    keepEndInView();
  }
}

/** Times and counts of an answer. */
class Meter {
  constructor() {
    this.sent = performance.now();
    this.first = this.last = null;
    this.firstTokens = this.tokens = 0;
  }

  count(tokens) {
    this.last = performance.now();
    this.tokens = tokens;
    if (this.first === null) [this.first, this.firstTokens] = [this.last, tokens];
  }

  words(end) {
    const parts = [counted(this.tokens, "token")];
    const seconds = (this.last - this.first) / 1000;
    const more = this.tokens - this.firstTokens;
    if (this.first !== null) {
      if (seconds >= LEAST_S) parts.push(`${(more / seconds).toFixed(1)} tokens/s`);
      parts.push(`first after ${((this.first - this.sent) / 1000).toFixed(2)} s`);
    }
    return [...parts, end].filter(Boolean).join(" · ");
  }
}

/** The request for the next answer. Fields that the user has left empty are the server's to fill. */
function request() {
  const body = { model: get("models").value || undefined, stream: true };
  body.stream_options = { include_usage: true, continuous_usage_stats: true };
  for (const name of NUMBERS) {
    const given = form.elements[name].value.trim();
    // What is no number goes as it is: the server says what is wrong with it.
    if (given !== "") body[name] = Number.isNaN(Number(given)) ? given : Number(given);
  }
  const system = form.elements.system.value;
  const messages = system ? [{ role: "system", content: system }, ...history] : history;
  if (hasTemplate) return ["v1/chat/completions", { ...body, messages }];
  const prompt = messages.map((one) => one.content).join("\n");
  return ["v1/completions", { max_tokens: COMPLETION_TOKENS, ...body, prompt }];
}

/** Opens the stream of the next answer. A model without a chat template continues the text. */
async function open(signal) {
  const [path, body] = request();
  try {
    return await call(path, { body, signal });
  } catch (error) {
    if (!hasTemplate || error.status !== 400 || !error.message.includes("no chat template")) throw error;
    hasTemplate = false;
    offerPictures(false);
    if (history.some((one) => typeof one.content !== "string")) throw error;
    get("notice").hidden = false;
    get("notice").textContent =
      "This model has no chat template, so it continues the text of the conversation.";
    return open(signal);
  }
}

/** Streams an answer into a message; returns why the model stopped. */
async function receive(answer, message, meter) {
  let reason = null;
  for await (const data of events(answer.body)) {
    if (data === "[DONE]") return reason;
    const chunk = JSON.parse(data);
    if (chunk.error) throw new ServerError(chunk.error.message);
    const choice = chunk.choices[0];
    reason = choice?.finish_reason ?? reason;
    const text = choice?.text ?? choice?.delta?.content;
    const reasoning = choice?.delta?.reasoning_content;
    if (chunk.usage) meter.tokens = chunk.usage.completion_tokens;
    if (text || reasoning) {
      message.add(text, reasoning);
      meter.count(chunk.usage?.completion_tokens ?? meter.tokens + 1);
    }
  }
  throw new ServerError("The stream was cut before its end.");
}

/** The content of a message in OpenAI's form. */
function contentOf(text, urls) {
  if (!urls.length) return text;
  const pictures = urls.map((url) => ({ type: "image_url", image_url: { url } }));
  return text ? [...pictures, { type: "text", text }] : pictures;
}

async function answer(text, urls) {
  const said = history.length;
  history.push({ role: "user", content: contentOf(text, urls) });
  const question = new Message("user");
  question.item.querySelector(".pictures").append(...urls.map(shown));
  question.add(text);
  const message = new Message("assistant");
  const meter = new Meter();
  const mine = (running = new AbortController());
  message.item.setAttribute("aria-busy", "true"); // it is read aloud when it is complete
  send.textContent = "Stop";
  showNote = () => {
    message.note.textContent =
      engineState === "recovering" ? "A lost rank is being replaced; then the answer goes on." : meter.words();
  };
  const timer = setInterval(showNote, 250);
  let end;
  try {
    end = await receive(await open(mine.signal), message, meter);
  } catch (error) {
    end = mine.signal.aborted ? "stopped" : "failed";
    if (end === "failed") message.fail(error);
  }
  clearInterval(timer);
  message.note.textContent = meter.words(end);
  message.item.removeAttribute("aria-busy");
  if (running !== mine) return; // the user has begun another conversation
  running = null;
  showNote = () => {};
  send.textContent = "Send";
  const content = message.text.data;
  if (end !== "failed") {
    history.push({ role: "assistant", content });
  } else { // the question is no part of the conversation, and can be sent again
    history.length = said;
    input.value ||= text;
    if (hasTemplate) putPictures(urls);
  }
}

function stop() {
  running?.abort();
}

function submit() {
  const text = input.value.trim() ? input.value : "";
  if (running) return;
  const urls = takePictures();
  if (!text && !urls.length) return;
  input.value = "";
  follows = true;
  answer(text, urls);
}

form.addEventListener("submit", (event) => {
  event.preventDefault();
  if (running) stop();
  else submit();
});
input.addEventListener("keydown", (event) => {
  // A key that chooses among an input method's words sends nothing.
  if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
  event.preventDefault();
  submit();
});
document.addEventListener("keydown", (event) => {
  if (event.key === "Escape" && !document.querySelector("dialog[open]")) stop();
});
get("new").addEventListener("click", () => {
  stop();
  running = null;
  showNote = () => {};
  history = [];
  log.replaceChildren();
  get("hint").hidden = false;
  send.textContent = "Send";
  input.focus();
});
box.addEventListener("scroll", () => {
  follows = box.scrollHeight - box.scrollTop - box.clientHeight < 40;
});
window.addEventListener("resize", keepEndInView); // also when a keyboard appears on the screen

function keepEndInView() {
  if (follows) requestAnimationFrame(() => { box.scrollTop = box.scrollHeight; });
}
