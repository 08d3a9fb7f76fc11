// The pictures of the next message: chosen, pasted or dropped, each with a button that removes it.

const get = (id) => document.getElementById(id);
const [button, file, list, chat, input] = ["picture", "picture-file", "pictures", "chat", "input"].map(get);

/** Says whether the model reads pictures; if not, none can be added. */
export function offerPictures(reads) {
  button.hidden = !reads;
  if (!reads) list.replaceChildren();
}

/** An element that shows the picture of a URL. */
export function shown(url) {
  const image = new Image();
  image.src = url;
  image.alt = "Picture";
  return image;
}

/** Puts pictures, as data: URLs, before the next message. */
export function putPictures(urls) {
  for (const url of urls) {
    const item = list.appendChild(document.createElement("li"));
    const remove = document.createElement("button");
    remove.type = "button";
    remove.textContent = "×";
    remove.ariaLabel = "Remove this picture";
    remove.addEventListener("click", () => {
      item.remove();
      input.focus();
    });
    item.append(shown(url), remove);
  }
}

/** Takes the pictures of the next message, as data: URLs. */
export function takePictures() {
  const urls = [...list.querySelectorAll("img")].map((image) => image.src);
  list.replaceChildren();
  return urls;
}

async function add(files) {
  for (const one of files) { // one after another: they keep their order
    const reader = new FileReader();
    const read = new Promise((resolve) => reader.addEventListener("loadend", resolve));
    reader.readAsDataURL(one);
    await read;
    if (reader.result) putPictures([reader.result]);
  }
  input.focus();
}

/** The pictures among the files of a paste or a drop, if the model reads them. */
function picturesOf(transfer) {
  return button.hidden ? [] : [...transfer.files].filter((one) => one.type.startsWith("image/"));
}

button.addEventListener("click", () => file.click());
file.addEventListener("change", async () => {
  await add([...file.files]);
  file.value = ""; // the same file can be chosen again
});
input.addEventListener("paste", (event) => {
  const files = picturesOf(event.clipboardData);
  if (!files.length) return;
  event.preventDefault();
  add(files);
});
chat.addEventListener("dragover", (event) => {
  if (!button.hidden && event.dataTransfer.types.includes("Files")) event.preventDefault();
});
chat.addEventListener("drop", (event) => {
  if (button.hidden || !event.dataTransfer.types.includes("Files")) return;
  event.preventDefault(); // else the browser leaves the page for the file
  add(picturesOf(event.dataTransfer));
});
