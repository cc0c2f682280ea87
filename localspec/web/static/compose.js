// The message box: attached files, long pastes, the context gauge.
// The server reads each file when it is attached, and keeps nothing; its text travels with the message.
import "./drafts.js";
import { announce, ask, byId, command, count, inWords, make, messageBox, onNews, post, setMessage, toast, whenDrawn } from "./ui.js";

const MAX_BOX_CHARACTERS = 32_768; // a box with more would lag with every key; the rest is attached
const MAX_DOCUMENT_BYTES = 20_000_000; // as in chat/documents.py; these two as in chat/attachments.py
const MAX_TOTAL_BYTES = 2_000_000;
const MAX_FILES = 10;
const PART_BYTES = 900_000;
const GAUGE_MS = 350;

const KEPT_FILES = "ls-files"; // in the tab's storage, from one page to the next

const isBox = (element) => element?.matches?.("#ls-message textarea");

// {name, size, ownSize, said, text, stop}. The size is that of the text, ownSize is that of the file.
// The text is null until the server has read it, and `stop` ends that.
let files = [];
let decided = {}; // left_out, max_tokens: answers to an overflow, for one sending
// What is being sent, {text, files}, as it stood when a person sent it: Gradio reads the box only a
// moment later, and what is typed meanwhile stays there. null while nothing is being sent.
let going = null;
let isMore = false; // what was typed meanwhile was sent too: it follows when the first has arrived

const sentOf = ({ name, text }) => ({ name, text });
const numBytes = (text) => new Blob([text]).size;
const inBox = () => ({ text: messageBox().value, files: [...files] });

function send(event) {
  if (window.lsBridges !== 2) return; // Gradio does not listen yet
  if (going) {
    event.preventDefault();
    event.stopImmediatePropagation();
    isMore ||= messageBox().value !== going.text;
  } else going = inBox();
}
document.addEventListener("keydown", (event) => {
  if (isBox(event.target) && event.key === "Enter" && !event.shiftKey && !event.isComposing) send(event);
}, { capture: true });
document.addEventListener("click", (event) => { if (event.target.closest?.("#ls-message .submit-button")) send(event); }, { capture: true });

// Neither button is of use after its click, but the box is; on a phone it would bring the keyboard back.
document.addEventListener("click", (event) => {
  const isDone = event.target.closest?.("#ls-stop, #ls-message .submit-button");
  if (isDone && matchMedia("(hover: hover)").matches) messageBox().focus();
});

// The message that is sent now, and what goes with it, as the server reads them.
window.lsMessage = () => {
  going ??= inBox();
  const { text, files: sent } = going;
  const added = { ...decided };
  if (sent.length) added.files = sent.map(sentOf);
  decided = {};
  return [text, Object.keys(added).length ? JSON.stringify(added) : ""];
};

// Files

// A file's own size, and what was read of it.
const wordsOf = (file) => [inWords(file.ownSize ?? file.size), file.said].filter(Boolean).join(", ");

function showChips() {
  const chips = files.map((file) =>
    make(
      "li",
      { className: "ls-chip" },
      make("span", { textContent: file.name, title: file.name }),
      make("small", { textContent: wordsOf(file) }),
      make("button", {
        type: "button",
        ariaLabel: file.text === null ? `Stop reading ${file.name}` : `Remove ${file.name}`,
        textContent: "×",
        onclick: () => { file.stop?.(); files = files.filter((one) => one !== file); showChips(); messageBox()?.focus(); },
      }),
    ),
  );
  byId("ls-chips")?.replaceChildren(...chips);
  gaugeSoon();
}

// Returns the sentence that says why a file cannot be attached, null when it can.
function refusal(name, size) {
  const total = files.reduce((sum, file) => sum + file.size, 0);
  if (files.length > MAX_FILES || (size && files.length === MAX_FILES)) return `A message takes at most ${MAX_FILES} files. Remove one, or send this one first.`;
  if (size > MAX_DOCUMENT_BYTES) return `${name} is ${inWords(size)}, but a file may have at most ${inWords(MAX_DOCUMENT_BYTES)}. Attach the part that matters.`;
  if (total > MAX_TOTAL_BYTES) return `With ${name} the files would hold ${inWords(total)} of text, but a message takes ${inWords(MAX_TOTAL_BYTES)}. Attach the part that matters.`;
  return null;
}

// The server reads the file, whatever kind it is, and gives its text back.
async function attach(blobs) {
  for (const blob of blobs) {
    const why = refusal(blob.name, blob.size);
    if (why) { toast(why); continue; }
    const request = new AbortController();
    const file = { name: blob.name, size: 0, ownSize: blob.size, said: "reading", text: null, stop: () => request.abort() };
    files.push(file);
    showChips();
    const options = { ...post(blob, "application/octet-stream"), signal: request.signal };
    const told = await ask(`/read?name=${encodeURIComponent(blob.name)}`, options,
      `localspec refused ${blob.name}. Reload the page and attach it again.`,
      `${blob.name} could not be read. A folder cannot be attached; choose the files in it.`);
    if (!files.includes(file)) continue; // its reading was stopped
    if (told.error) {
      files = files.filter((one) => one !== file);
      toast(told.error);
    } else {
      Object.assign(file, told, { size: numBytes(told.text) });
      announce(`${file.name}: ${wordsOf(file)}`);
      const tooMuch = refusal(file.name, 0);
      if (tooMuch) { files = files.filter((one) => one !== file); toast(tooMuch); }
    }
    showChips();
  }
}

// After a restart of localspec the page reloads by itself: files that were read go along.
window.addEventListener("ls-restarted", () => {
  const read = files.filter((file) => file.text !== null).map(({ name, size, ownSize, said, text }) => ({ name, size, ownSize, said, text }));
  try {
    if (read.length) sessionStorage.setItem(KEPT_FILES, JSON.stringify(read));
  } catch {
    // No room, or a browser that keeps nothing: they have to be attached again.
  }
});

// In parts that are small enough for one file each; false where it is too much for a message.
function attachText(text) {
  const size = numBytes(text);
  if (size + files.reduce((sum, file) => sum + file.size, 0) > MAX_TOTAL_BYTES) {
    toast(`This text is ${inWords(size)}, but a message takes ${inWords(MAX_TOTAL_BYTES)}. Nothing was attached; paste the part that matters.`);
    return false;
  }
  const numParts = Math.ceil(size / PART_BYTES);
  const length = Math.ceil(text.length / numParts);
  for (let start = 0; start < text.length; ) {
    let end = Math.min(start + length, text.length);
    if (/[\ud800-\udbff]/.test(text[end - 1]) && end < text.length) end += 1; // never within a pair
    const number = files.filter((file) => file.name.startsWith("pasted text")).length;
    const name = number ? `pasted text ${number + 1}.txt` : "pasted text.txt";
    const part = text.slice(start, end);
    const why = refusal(name, numBytes(part));
    if (why) { toast(why); break; }
    files.push({ name, size: numBytes(part), said: "", text: part });
    start = end;
  }
  showChips();
  return true;
}

document.addEventListener("click", (event) => {
  if (event.target.closest?.("#ls-attach")) byId("ls-attach-file")?.click();
});
document.addEventListener("change", (event) => {
  if (event.target.id !== "ls-attach-file") return;
  attach([...event.target.files]);
  event.target.value = "";
});

const holdsFiles = (event) => [...(event.dataTransfer?.types || [])].includes("Files");
document.addEventListener("dragover", (event) => {
  if (!holdsFiles(event)) return;
  event.preventDefault();
  document.body.classList.add("ls-dropping");
});
document.addEventListener("dragleave", (event) => {
  if (!event.relatedTarget) document.body.classList.remove("ls-dropping");
});
document.addEventListener("drop", (event) => {
  document.body.classList.remove("ls-dropping");
  if (!holdsFiles(event)) return;
  event.preventDefault();
  attach([...event.dataTransfer.files]);
});

// Long text goes into a file before the box, or Gradio behind it, has to lay it out.
document.addEventListener("paste", (event) => {
  if (!isBox(event.target)) return;
  const pasted = [...(event.clipboardData?.files || [])];
  const text = event.clipboardData?.getData("text/plain") || "";
  if (!text && pasted.length) { event.preventDefault(); attach(pasted); return; }
  if (text.length + event.target.value.length <= MAX_BOX_CHARACTERS) return;
  event.preventDefault();
  event.stopImmediatePropagation();
  attachText(text);
}, { capture: true });

document.addEventListener("input", (event) => {
  if (!isBox(event.target)) return;
  if (event.target.value.length > MAX_BOX_CHARACTERS) {
    const text = event.target.value;
    event.target.value = "";
    attachText(text);
  }
  gaugeSoon();
}, { capture: true });

onNews("sent", () => {
  if (!going) return; // decided in a dialog of an edit
  const { text, files: sent } = going;
  const isNext = isMore;
  notGoing();
  files = files.filter((one) => !sent.includes(one));
  showChips();
  const typed = messageBox()?.value ?? "";
  if (text && typed.startsWith(text)) setMessage(typed.slice(text.length));
  if (isNext) submitBox();
});

function notGoing() {
  going = null;
  isMore = false;
}
window.lsNotSent = notGoing; // no answer came
onNews("unsent", notGoing);

// Gradio takes what was put into the box with its next change of the page.
function submitBox() {
  setTimeout(() => document.querySelector("#ls-message .submit-button")?.click());
}

onNews("taken_back", ({ text, files: before }) => {
  files = [...before.map((one) => ({ ...one, size: numBytes(one.text) })), ...files];
  showChips();
  setMessage([text, messageBox()?.value].filter(Boolean).join("\n\n"));
  messageBox()?.focus();
});

window.addEventListener("ls-decide", (event) => {
  decided = event.detail;
  submitBox();
});

// The gauge: tokens are counted by the model's own tokenizer, when typing pauses

let gaugeTimer = 0;

function gaugeSoon() {
  clearTimeout(gaugeTimer);
  gaugeTimer = setTimeout(() => {
    const text = messageBox()?.value ?? "";
    command({ do: "gauge", text, files: files.filter((one) => one.text !== null).map(sentOf) });
  }, GAUGE_MS + 4 * files.reduce((sum, file) => sum + file.size, 0) / 4096);
}

onNews("gauge", (gauge) => {
  const [bar, words] = [byId("ls-gauge"), byId("ls-gauge-text")];
  if (!bar || !words) return;
  if (!gauge) {
    words.textContent = "";
    bar.hidden = true;
    return;
  }
  words.classList.toggle("ls-problem", Boolean(gauge.problem));
  words.title = gauge.problem || "";
  if (gauge.problem) {
    words.textContent = gauge.problem;
    bar.hidden = true;
    return;
  }
  const share = (gauge.num_tokens + gauge.num_reply_tokens) / gauge.context_length;
  bar.hidden = false;
  bar.dataset.state = share > 1 ? "over" : share > 0.85 ? "tight" : "";
  bar.style.setProperty("--used", `${Math.min(100, (100 * gauge.num_tokens) / gauge.context_length)}%`);
  bar.style.setProperty("--reply", `${Math.min(100, 100 * share)}%`);
  const without = gauge.num_left_out ? `, without the ${count(gauge.num_left_out)} oldest messages` : "";
  words.textContent = `${count(gauge.num_tokens)} of ${count(gauge.context_length)} tokens${without}`;
  const said = `Context: ${words.textContent}; the reply may take ${count(gauge.num_reply_tokens)}`;
  bar.setAttribute("aria-label", said);
  bar.title = said;
});
window.addEventListener("ls-phase", (event) => {
  if (event.detail === "ready" && byId("ls-gauge")?.hidden) gaugeSoon(); // a model is there again
});
onNews("announce", gaugeSoon);
onNews("moved", gaugeSoon);
let isNewAsked = false;
document.addEventListener("click", (event) => { isNewAsked ||= Boolean(event.target.closest?.("#ls-new")); });
onNews("moved", () => {
  if (isNewAsked) messageBox()?.focus();
  isNewAsked = false;
});
for (const kind of ["input", "change"]) {
  document.addEventListener(kind, (event) => { if (event.target.closest?.("#ls-settings")) gaugeSoon(); });
}

// Files of the page before a restart of localspec.
whenDrawn(["ls-chips"], () => {
  try {
    files = [...JSON.parse(sessionStorage.getItem(KEPT_FILES) ?? "[]"), ...files];
    sessionStorage.removeItem(KEPT_FILES);
  } catch {
    return;
  }
  if (files.length) showChips();
});
