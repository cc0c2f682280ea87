// What the page's scripts share: commands to the server, news from it, dialogs, passing messages.
// Text only ever becomes a text node; nothing here writes HTML.
export const byId = (id) => document.getElementById(id);

// The page is drawn piece by piece: `act` gets the elements of these ids once all of them are there.
export function whenDrawn(ids, act) {
  const drawn = ids.map(byId);
  if (drawn.every(Boolean)) act(...drawn);
  else setTimeout(whenDrawn, 50, ids, act);
}

export function command(what) {
  // Each of the two bridges (layout.py) takes its own; one that is not there yet finds it waiting.
  if (window.lsBridges !== 2) (window.lsWaiting ||= []).push(what);
  window.dispatchEvent(new CustomEvent("ls-command", { detail: what }));
}

const listeners = new Map();
let whereItIs = null; // the chat shown, as last told: the first news may be here before who hears it

export function onNews(name, react) {
  listeners.set(name, [...(listeners.get(name) || []), react]);
  if (name === "moved" && whereItIs !== null) react(whereItIs);
}

function hear(written) {
  const news = JSON.parse(written);
  whereItIs = news.moved ?? whereItIs;
  for (const [name, value] of Object.entries(news))
    for (const react of listeners.get(name) || []) react(value);
}

window.addEventListener("ls-signal", (event) => hear(event.detail));
if (window.lsSignal) hear(window.lsSignal);

export function make(tag, properties = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(properties)) {
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (name in element && name !== "list") element[name] = value;
    else element.setAttribute(name, value);
  }
  element.append(...children);
  return element;
}

// A modal question. choices: [label, value, isMain]. Resolves to the value, null when left.
export function question({ title, body, choices, wide = false }) {
  return new Promise((resolve) => {
    const dialog = make("dialog", { className: `ls-dialog${wide ? " ls-wide" : ""}` });
    dialog.setAttribute("aria-labelledby", "ls-dialog-title");
    const buttons = choices.map(([label, value, isMain]) =>
      make("button", {
        type: "button",
        className: isMain ? "ls-main" : "",
        textContent: label,
        onclick: () => dialog.close(JSON.stringify({ value })),
      }),
    );
    dialog.append(
      make("h2", { id: "ls-dialog-title", textContent: title }),
      ...[body].flat(),
      make("div", { className: "ls-dialog-buttons" }, ...buttons),
    );
    dialog.addEventListener("click", (event) => { if (event.target === dialog) dialog.close(""); });
    dialog.addEventListener("close", () => {
      dialog.remove(); // the browser gave the focus back as it closed; by now a person may have moved it
      resolve(dialog.returnValue ? JSON.parse(dialog.returnValue).value : null);
    });
    document.body.append(dialog);
    dialog.showModal();
    (dialog.querySelector("input, textarea") || dialog.querySelector(".ls-main"))?.focus();
  });
}

// Asks for one line of text; null when left or empty.
export async function askForLine(title, label, value, confirm, maxLength = 200) {
  const input = make("input", { type: "text", value, maxLength, id: "ls-line" });
  input.addEventListener("keydown", (event) => {
    if (event.key !== "Enter" || event.isComposing) return;
    event.preventDefault();
    input.closest("dialog").close(JSON.stringify({ value: true }));
  });
  const body = make("label", { className: "ls-line" }, label, input);
  setTimeout(() => input.select());
  const isMeant = await question({ title, body, choices: [["Cancel", null], [confirm, true, true]] });
  return isMeant ? input.value.trim() || null : null;
}

// What had the focus in `box` may be drawn anew or go, or become what another element was: `give` then
// gives the focus on, told the element and what it was. nameOf: what an element is.
export function keepFocus(box, give, nameOf = () => "") {
  let [last, name] = [null, ""];
  document.addEventListener("focusin", ({ target }) => {
    last = box.contains(target) ? target : null;
    name = last && nameOf(last);
  });
  const look = () => { if (last && (document.activeElement === document.body || nameOf(last) !== name)) give(last, name); };
  new MutationObserver(look).observe(box, { childList: true, subtree: true, attributeFilter: ["data-handle", "data-folder"] });
}

const TOAST_S = 12;

// One is seen at a time, the newest. What can be undone comes back when another has gone from over it;
// `key`: what would be undone, once.
export function toast(text, label, react, key = "") {
  let box = byId("ls-toasts");
  if (!box) document.body.append((box = make("div", { id: "ls-toasts", role: "status" })));
  const line = make("div", { className: "ls-toast" }, make("span", { textContent: text }));
  let before = null; // what had the focus before the line took it
  line.addEventListener("focusin", ({ relatedTarget }) => { if (!line.contains(relatedTarget)) before = relatedTarget; });
  const away = () => {
    const isHere = line.contains(document.activeElement);
    line.remove();
    if (isHere) (before?.isConnected ? before : byId("ls-chat"))?.focus();
  };
  if (label) line.append(make("button", { type: "button", textContent: label, onclick: () => { away(); react(); } }));
  line.append(make("button", { type: "button", className: "ls-icon", ariaLabel: "Close", textContent: "×", onclick: away }));
  line.dataset.key = key;
  for (const one of [...box.children]) if (!one.dataset.key || one.dataset.key === key) one.remove();
  box.append(line);
  const end = () => {
    if (line.nextSibling?.dataset.key === "") setTimeout(end, TOAST_S * 1000); // it could not be seen
    else away();
  };
  setTimeout(end, TOAST_S * 1000);
}

onNews("warning", (text) => toast(text));

// Says something to a screen reader, once.
export function announce(text) {
  let box = byId("ls-announcer");
  if (!box) document.body.append((box = make("div", { id: "ls-announcer", className: "ls-sr", role: "status" })));
  box.textContent = "";
  setTimeout(() => { box.textContent = text; }, 60);
}

// An answer as data. `error` says what is wrong: `refused` where it is no data, `unheard` without one.
export async function ask(address, options, refused, unheard = "localspec does not answer. Is it still running?") {
  try {
    const answer = await fetch(address, options);
    return await answer.json().catch(() => ({ error: refused }));
  } catch {
    return { error: unheard };
  }
}

export const post = (body, type) => ({ method: "POST", headers: { "content-type": type }, body });

// What the Models tab offers; with `act`: does it first. Something to say is `error` or `message`.
export const askModels = (act) =>
  ask("/models", act && post(JSON.stringify(act), "application/json"), "localspec refused this request.");

export function download(href, name = "") {
  make("a", { href, download: name }).click();
}

export const count = (number) => Number(number).toLocaleString("en");

export const messageBox = () => document.querySelector("#ls-message textarea");

export function toTab(name) {
  [...document.querySelectorAll('#ls-tabs [role="tab"]')].find((tab) => tab.textContent.trim() === name)?.click();
}

// Gradio listens to the input event; a value set without one would be lost to it.
export function setMessage(text) {
  const box = messageBox();
  if (!box) return;
  box.value = text;
  box.dispatchEvent(new Event("input", { bubbles: true }));
}

// The size of a file, as file_size in messages.py says it.
export function inWords(numBytes) {
  if (numBytes < 1000) return `${numBytes} byte${numBytes === 1 ? "" : "s"}`;
  if (numBytes < 1_000_000) return `${Math.round(numBytes / 1000)} kB`;
  return `${(numBytes / 1_000_000).toFixed(1)} MB`;
}
