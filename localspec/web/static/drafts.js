// What is typed and not sent yet: one draft for each chat, kept while this tab of the browser lives,
// so that neither a reload nor a look at another chat loses it. Attached files are kept over a
// restart of localspec alone (compose.js).
import { messageBox, onNews, setMessage } from "./ui.js";

const START_MS = 100;
const START_TRIES = 30;

let shown = null; // the chat whose draft is in the box; null until the page says

// A chat that is not recorded yet has no address either, and shares the draft of a new one.
const keyOf = (handle) => `ls-draft-${handle > 0 ? handle : "new"}`;

function write(key, text) {
  try {
    if (text) sessionStorage.setItem(key, text);
    else sessionStorage.removeItem(key);
  } catch {
    // No room, or a browser that keeps nothing: the text is in the box all the same.
  }
}

function draft() {
  try {
    return sessionStorage.getItem(keyOf(shown)) ?? "";
  } catch {
    return "";
  }
}

function bringBack() {
  if ((messageBox()?.value ?? "") !== draft()) setMessage(draft());
}

document.addEventListener("input", (event) => {
  if (event.target === messageBox() && shown !== null) write(keyOf(shown), event.target.value);
});

onNews("moved", (handle) => {
  const before = shown;
  const typed = messageBox()?.value ?? "";
  shown = handle;
  if (before === null && typed) write(keyOf(handle), typed); // faster than the page
  else if (before === null) atStart(START_TRIES);
  else if (keyOf(before) !== keyOf(handle)) bringBack();
});

// Gradio shows its box before it listens to it, and may put its own empty text back.
function atStart(triesLeft) {
  if (!messageBox()?.value) bringBack();
  if (triesLeft > 0) setTimeout(atStart, START_MS, triesLeft - 1);
}

onNews("sent", (handle) => {
  write(keyOf(shown), "");
  shown = handle;
  write(keyOf(shown), messageBox()?.value ?? ""); // typed while the message was being sent
});

// A chat that was new has been recorded: what was typed meanwhile goes along.
onNews("recorded", (handle) => {
  if (shown === null || keyOf(shown) === keyOf(handle)) return;
  const text = draft();
  write(keyOf(shown), "");
  shown = handle;
  write(keyOf(shown), text);
});
