// The conversation: small links under messages, following the text down, what a screen reader
// hears, and the dialog for a context that is too small.
import { setSide } from "./side.js";
import { showTokens } from "./tokens.js";
import { announce, byId, command, count, keepFocus, make, messageBox, onNews, question, toast, whenDrawn } from "./ui.js";

const DONE_MS = 1500; // how long an action shows that it was done
const NEAR_THE_END_PX = 80;
const ASKED_MS = 1500; // a scroll this soon after a wheel, key or finger is the person's

// Small buttons under messages (talk/messages.py): the address names the command, the class the message.
const numberIn = (link) => Number(/\bls-m-(\d+)\b/.exec(link.className)?.[1]);
const HERE = { copy: copyMessage, earlier: showEarlier, tokens: (link) => showTokens(numberIn(link), link) }; // what this page does itself; the server does the others

let asked = ""; // by the click before
let steppedIn = -1; // the place of the message of which another version was asked for last
const messageRows = () => [...document.querySelectorAll("#ls-written .message-row")];

document.addEventListener("click", (event) => {
  const link = event.target.closest?.("a.ls-do");
  if (!link) return;
  event.preventDefault();
  const name = link.hash.slice(1);
  if (HERE[name]) return HERE[name](link);
  if (name === "show") steppedIn = messageRows().indexOf(link.closest(".message-row"));
  const what = { do: name, message: numberIn(link) };
  const before = asked;
  asked = JSON.stringify(what);
  if (event.detail < 2 || asked !== before) command(what); // a double click asks once
});

export function actOnLast(name, row = "") {
  const links = document.querySelectorAll(`#ls-chat ${row} a.ls-${name}`);
  links[links.length - 1]?.click();
}

// The arrow to the next version in the same direction, or back where there is none.
function arrowAgain(lost) {
  if (!lost.matches("a.ls-show")) return null;
  const arrows = [...(messageRows()[steppedIn]?.querySelectorAll("a.ls-show") ?? [])];
  return arrows.find((one) => one.title === lost.title) ?? arrows[0];
}

// All messages; the first of those that were shown stays on top.
function showEarlier() {
  const num = messageRows().length - 1; // but for the link's own
  const drawn = new MutationObserver(() => {
    if (document.querySelector("a.ls-earlier")) return;
    drawn.disconnect();
    requestAnimationFrame(() => messageRows().at(-num)?.scrollIntoView());
  });
  drawn.observe(byId("ls-written"), { childList: true, subtree: true });
  command({ do: "earlier" });
}

// Gradio's own button, which is not shown, has the text of the message.
function copyMessage(link) {
  const buttons = link.closest(".message-row")?.nextElementSibling;
  buttons?.querySelector('[title="Copy message"]')?.click();
  announce("Copied.");
  link.classList.add("ls-done");
  setTimeout(() => link.classList.remove("ls-done"), DONE_MS);
}

onNews("announce", announce);
onNews("more", (handle) => command({ do: "open", handle })); // the next reply

onNews("removed", (what) => {
  toast("The message was deleted.", "Undo", () => command({ do: "bring_back", ...what }), `message ${what.message}`);
});

onNews("all", (text) => {
  const whole = make("textarea", { readOnly: true, rows: 18, className: "ls-whole", value: text });
  whole.setAttribute("aria-label", "The whole message");
  whole.setSelectionRange(0, 0); // else the focus scrolls to its end
  question({ title: "The whole message", body: whole, choices: [["Close", null, true]], wide: true });
});

// What another tab does with this chat is shown here too, unless this one is busy with it: other
// messages than those shown, and all else when this tab comes to the front.
const OWN_MS = 3000; // what this tab does itself is shown by then
const isBusy = () => !byId("ls-stop")?.disabled || Boolean(document.querySelector(".ls-editor"));
function openAgain() {
  const handle = Number(new URLSearchParams(location.search).get("c"));
  if (isBusy()) return;
  if (handle > 0) command({ do: "open", handle });
  else window.dispatchEvent(new CustomEvent("ls-list")); // one that is not recorded: only the list
}
whenDrawn(["ls-history"], (list) => {
  const isOld = () => Boolean(list.querySelector("[data-is-old]")); // the chat shown, says a later list
  let timer = 0;
  const look = () => { timer ||= isOld() ? setTimeout(showAnew, OWN_MS) : 0; };
  const showAnew = () => { timer = 0; if (isOld()) openAgain(); look(); };
  new MutationObserver(look).observe(list, { childList: true, subtree: true, attributeFilter: ["data-is-old"] });
});
document.addEventListener("visibilitychange", () => { if (!document.hidden) openAgain(); });

// The column scrolls with the text unless the person has scrolled up to read.
let isAtEnd = true;

function followDown(column) {
  const staysPut = () => document.querySelector(".ls-editor") || !column.querySelector(".message-row");
  const toEnd = () => { if (isAtEnd && !staysPut()) column.scrollTop = column.scrollHeight; };
  const jump = make("button", {
    type: "button",
    id: "ls-to-end",
    hidden: true,
    textContent: "↓",
    ariaLabel: "To the newest message",
    onclick: () => { isAtEnd = true; toEnd(); },
  });
  byId("ls-compose")?.prepend(jump);
  // Only the person's own scrolling leaves the end; the text's growing and shrinking does not.
  let askedAt = -Infinity;
  for (const kind of ["wheel", "touchmove", "keydown", "pointerdown"])
    column.addEventListener(kind, () => { askedAt = performance.now(); }, { passive: true });
  column.addEventListener("scroll", () => {
    const left = column.scrollHeight - column.scrollTop - column.clientHeight;
    if (left < NEAR_THE_END_PX) isAtEnd = true;
    else if (performance.now() - askedAt < ASKED_MS) isAtEnd = false;
    jump.hidden = left < NEAR_THE_END_PX;
  }, { passive: true });
  const sized = new ResizeObserver(toEnd);
  for (const id of ["ls-written", "ls-growing"]) if (byId(id)) sized.observe(byId(id));
  sized.observe(column);
  onNews("sent", () => { isAtEnd = true; toEnd(); });
  onNews("moved", (handle) => { if (!handle) column.scrollTop = 0; });
}

// A thought that a person opened while it was written stays open when its reply stands.
const thoughts = () => [...document.querySelectorAll("#ls-written .thought-group .title")];
let numStanding = null; // thoughts that stood when it was opened
for (const kind of ["click", "keydown"]) {
  document.addEventListener(kind, ({ target, key = "Enter" }) => {
    const isMeant = key === "Enter" && target.closest?.("#ls-growing .thought-group .title");
    if (isMeant) numStanding = numStanding === null ? thoughts().length : null;
  }, { capture: true }); // Gradio lets no click pass
}
window.addEventListener("ls-command", ({ detail }) => { if (detail.do === "open") numStanding = null; });

function keepThoughtOpen() {
  if (numStanding === null || thoughts().length <= numStanding) return;
  numStanding = null;
  const title = thoughts().at(-1);
  title.click();
  requestAnimationFrame(() => { for (const one of title.parentElement.getAnimations({ subtree: true })) one.finish(); });
}

// One announcement at the end replaces a live region that would read every few words.
function calm(column) {
  const quiet = () => {
    keepThoughtOpen();
    for (const log of column.querySelectorAll('[role="log"]')) {
      log.setAttribute("aria-live", "off");
      log.removeAttribute("role"); // the column around both is the region
      log.removeAttribute("aria-label");
    }
    // Gradio repeats each message, our notes included, as the name of an element without a role.
    for (const message of column.querySelectorAll("[data-testid][aria-label]")) message.removeAttribute("aria-label");
    // The note under a message is no message.
    for (const note of column.querySelectorAll('[data-testid="user"]:has(p.ls-own)')) note.dataset.testid = "note";
    for (const box of column.querySelectorAll('[role="complementary"]')) box.removeAttribute("role");
    for (const code of column.querySelectorAll('pre:not([data-language]) > code[class*="language-"]')) {
      const language = /\blanguage-([\w+#.-]+)/.exec(code.className)?.[1];
      if (language && language !== "none") code.parentElement.dataset.language = language;
    }
    for (const list of column.querySelectorAll(":is(ul, ol, table):not([dir])")) {
      list.dir = "auto"; // its signs are on its side
      list.classList.toggle("ls-boxes", /^\s*[☐☑]\u2063/.test(list.textContent)); // as plain_markdown.py writes them
    }
    for (const act of column.querySelectorAll("a.ls-act:not([role])")) act.setAttribute("role", "button");
  };
  quiet();
  let frame = 0; // once before each is drawn, however often the column changed
  new MutationObserver(() => { frame ||= requestAnimationFrame(() => { frame = 0; quiet(); }); })
    .observe(column, { childList: true, subtree: true });
  column.tabIndex = 0;
  column.setAttribute("role", "region");
  column.setAttribute("aria-label", "Conversation");
}

// What scrolls sideways must be reached by keyboard too. What is out of sight is not laid out, and is
// measured when it comes into sight.
const sideways = new ResizeObserver((entries) => {
  const isWide = entries.map(({ target }) => target.scrollWidth > target.clientWidth);
  entries.forEach(({ target }, place) => { target.tabIndex = isWide[place] ? 0 : -1; });
});
const reachCode = () => setTimeout(() => {
  for (const block of document.querySelectorAll("#ls-written :is(pre, table)")) sideways.observe(block);
}, 500);
onNews("announce", reachCode);
onNews("moved", reachCode);

// Nothing is cut unless the person says so here.
onNews("overflow", async (news) => {
  const body = make("p", { textContent: news.sentence });
  const what = news.is_by_system_prompt ? "system prompt" : "message";
  const choices = [[`Shorten the ${what}`, "shorten", true]];
  if (news.room) choices.push([`Allow a reply of at most ${count(news.room)} tokens`, "room"]);
  if (news.left_out) {
    const noun = news.left_out === 1 ? "the oldest message" : `the ${count(news.left_out)} oldest messages`;
    choices.push([`Go on without ${noun}, from now on`, "leave"]);
  }
  const chosen = await question({ title: "This does not fit the context", body, choices });
  if (chosen === "shorten" && news.is_by_system_prompt) setSide("ls-settings", true);
  (chosen === "shorten" && news.is_by_system_prompt ? byId("ls-set-system_prompt") : messageBox())?.focus();
  if (chosen === "room") window.dispatchEvent(new CustomEvent("ls-decide", { detail: { max_tokens: news.room } }));
  if (chosen === "leave") window.dispatchEvent(new CustomEvent("ls-decide", { detail: { left_out: news.left_out } }));
});

whenDrawn(["ls-chat", "ls-compose"], (column) => {
  followDown(column);
  calm(column);
  keepFocus(column, (lost) => (arrowAgain(lost) ?? column).focus({ preventScroll: true }));
});
