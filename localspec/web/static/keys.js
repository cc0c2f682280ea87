// Keyboard shortcuts, and the dialog that lists them. None of them takes a key that types text
// while the person is typing.
import { actOnLast } from "./chat.js";
import "./compose.js";
import { stopEditing } from "./edit.js";
import { byId, make, messageBox, question } from "./ui.js";
import { toggleSettings } from "./settings.js";
import { setSide } from "./side.js";
import { closeWhy } from "./strip.js";

const isMac = /mac|iphone|ipad/i.test(navigator.userAgent);
const MAIN = isMac ? "⌘" : "Ctrl";

// Letters with Alt (new, search, regenerate) are free in browsers on every system.
const SHORTCUTS = [
  ["Enter", "Send the message; Shift+Enter starts a new line"],
  ["Esc", "Stop the reply, or leave what is open"],
  ["Alt+N", "New chat"],
  ["Alt+F", "Search the chats"],
  ["Alt+R", "Answer the last message again"],
  ["Alt+E", "Edit your last message (or ↑ in an empty box)"],
  ["/", "To the message box"],
  [`${MAIN}+,`, "Open or close the settings"],
  ["?", "This list"],
];

function showKeys() {
  const rows = SHORTCUTS.flatMap(([key, what]) => [
    make("dt", {}, make("kbd", { textContent: key })),
    make("dd", { textContent: what }),
  ]);
  question({ title: "Keyboard shortcuts", body: make("dl", { className: "ls-keys" }, ...rows), choices: [["Close", null, true]] });
}

const isTyping = (element) => Boolean(element?.closest?.("input, textarea, select, [contenteditable]"));

function stop() {
  const button = byId("ls-stop");
  if (!button || button.disabled) return false;
  button.click();
  return true;
}

const WITH_ALT = {
  KeyN: () => byId("ls-new")?.click(),
  KeyF: () => { setSide("ls-side", true); byId("ls-search")?.focus(); },
  KeyR: () => actOnLast("again"),
  KeyE: () => actOnLast("edit", ".user-row"),
};

document.addEventListener("keydown", (event) => {
  if (event.isComposing || event.repeat || document.querySelector("dialog[open]")) return;
  const isPlain = !event.altKey && !event.ctrlKey && !event.metaKey;
  let react = null;
  if (event.altKey && !event.ctrlKey && !event.metaKey) react = WITH_ALT[event.code];
  else if ((event.ctrlKey || event.metaKey) && event.key === ",") {
    react = toggleSettings;
  } else if (event.key === "Escape") {
    if (stopEditing() || stop() || closeWhy()) event.preventDefault();
    return;
  } else if (isPlain && event.key === "ArrowUp" && event.target === messageBox() && !event.target.value) react = () => actOnLast("edit", ".user-row");
  else if (isPlain && !isTyping(event.target)) {
    if (event.key === "?") react = showKeys;
    else if (event.key === "/") react = () => messageBox()?.focus();
  }
  if (!react) return;
  event.preventDefault();
  react();
});

document.addEventListener("click", (event) => {
  if (event.target.closest?.("#ls-keys")) showKeys();
});
