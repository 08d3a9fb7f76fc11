// Starts the page: the picture of the engine, the names of the model, and the buttons of the head.

import { askForKey } from "./api.js";
import { loadModels, noteEngine } from "./chat.js";
import { watch } from "./engine.js";

const [key, toggle] = ["key", "toggle"].map((id) => document.getElementById(id));
let hasModels = false;

watch(async (state) => {
  noteEngine(state);
  if (hasModels || state === "loading") return;
  hasModels = true;
  try {
    await loadModels();
  } catch { // the next look asks again; the picture says what is wrong
    hasModels = false;
  }
});

key.addEventListener("click", () => askForKey());

// On a narrow screen either the chat or the engine is shown.
toggle.addEventListener("click", () => {
  const shows = document.body.classList.toggle("shows-engine");
  toggle.setAttribute("aria-pressed", String(shows));
});
document.getElementById("input").focus();
