// Calls to the server: the key, errors as the server tells them, and streams of events.

const KEY = "tpengine-key";
const UNKNOWN = "The server does not know this key.";
const dialog = document.getElementById("key-dialog");
const input = document.getElementById("key-input");
const problem = document.getElementById("key-problem");
const button = document.getElementById("key");
const forget = document.getElementById("key-forget");
let asking = null; // the promise of the open dialog, which all calls share
let declined = false; // the user was asked, and has given no key

/** An answer that is an error, with the text of the server. */
export class ServerError extends Error {
  constructor(message, status) {
    super(message);
    this.status = status;
  }
}

/** Calls the server with the key of this tab. If the server refuses the key, the user is asked for
 *  another; a call with `isQuiet` does not ask again after the user has given none. A `body` is
 *  posted as JSON. `limitMs` bounds the time of the answer. Throws a ServerError, or what `fetch`
 *  throws. */
export async function call(path, { body, signal, limitMs, isQuiet } = {}) {
  for (;;) {
    const key = sessionStorage.getItem(KEY);
    const headers = key === null ? {} : { authorization: `Bearer ${key}` };
    const options = { headers, signal, cache: "no-store" };
    if (limitMs) options.signal = AbortSignal.timeout(limitMs);
    if (body !== undefined) {
      headers["content-type"] = "application/json";
      Object.assign(options, { method: "POST", body: JSON.stringify(body) });
    }
    const answer = await fetch(path, options);
    if (answer.ok) return answer;
    const error = new ServerError(await errorText(answer), answer.status);
    if (answer.status !== 401 || (isQuiet && declined)) throw error;
    // Another call may have got a key from the user since this one was sent.
    if (key === sessionStorage.getItem(KEY) && !(await askForKey(key && UNKNOWN))) throw error;
  }
}

async function errorText(answer) {
  const text = await answer.text();
  try {
    return JSON.parse(text).error.message;
  } catch { // a proxy's own answer
    return `The server answered ${answer.status} ${answer.statusText}: ${text.slice(0, 300)}`;
  }
}

/** Opens the dialog; the promise says whether the user has given a key. */
export function askForKey(why) {
  button.hidden = false;
  problem.textContent = why || "";
  asking ??= new Promise((resolve) => {
    forget.hidden = sessionStorage.getItem(KEY) === null;
    input.value = "";
    dialog.returnValue = "";
    dialog.showModal();
    dialog.addEventListener("close", () => {
      asking = null;
      declined = dialog.returnValue !== "given";
      resolve(!declined);
    }, { once: true });
  });
  return asking;
}

dialog.querySelector("form").addEventListener("submit", (event) => {
  event.preventDefault();
  const key = input.value.trim();
  if (!/^[!-~]+$/.test(key)) {
    problem.textContent = "A key has only printable ASCII characters, and at least one.";
    return;
  }
  sessionStorage.setItem(KEY, key);
  dialog.close("given");
});
document.getElementById("key-cancel").addEventListener("click", () => dialog.close());
forget.addEventListener("click", () => {
  sessionStorage.removeItem(KEY);
  dialog.close();
});
button.hidden = sessionStorage.getItem(KEY) === null;

/** Yields the data of each event of a stream, which may be cut anywhere: inside a character, or
 *  between the two characters that end a line. */
export async function* events(body) {
  const reader = body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  let data = [];
  try {
    for (let done = false; !done;) {
      const part = await reader.read();
      done = part.done;
      rest += part.value ?? "";
      // The line feed of a carriage return at the end may still come.
      const end = rest.endsWith("\r") && !done ? rest.length - 1 : rest.length;
      const lines = rest.slice(0, end).split(/\r\n|\n|\r/);
      rest = lines.pop() + rest.slice(end);
      for (const line of lines) {
        if (line === "") {
          if (data.length) yield data.join("\n");
          data = [];
        } else if (line === "data" || line.startsWith("data:")) {
          data.push(line.slice(5).replace(/^ /, ""));
        } // other fields and comments say nothing to this page
      }
    }
  } finally {
    reader.cancel().catch(() => {}); // the stream may have failed already, and that was told
  }
}
