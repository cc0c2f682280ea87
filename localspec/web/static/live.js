// Fills the line over the chat and its popover. Asks /live about six times a second while something happens, once a
// second otherwise, and writes text only (never HTML), so nothing a model says can run here.
import { askModels, byId, make, whenDrawn } from "./ui.js";

const BUSY_MS = 150; // a look costs the server about 2 ms of a core that the engine may want
const IDLE_MS = 1000;
const AFTER_ACTION_MS = 3000;
const LIST_MS = 1000; // between two lists of chats at least
const SPARK_MS = 90; // of decoding between two points: less would draw the noise of single rounds
const SPARK_POINTS = 80;
const SPARK_WIDTH = 320;
const SPARK_HEIGHT = 44;
const BUSY = new Set(["loading", "prefill", "decode", "queued"]);

let lastActionAt = 0;
let shownReply = null;
let numRounds = 0;
let numListChanges = null;
let nextList = 0;
let failures = 0;
let nextLook = 0; // the timer
let isLooking = true;
let launch = null; // the start of the server that this page belongs to

const STOPPED = "localspec has stopped. Start it again, then reload.";
const SHUT_OUT = "localspec was restarted. Open the new link from its window.";
const EDITING = "localspec was restarted. Copy what you are editing, then reload.";

function write(id, text) {
  const element = byId(id);
  if (element && element.textContent !== text) element.textContent = text;
}

// mayStart: the first of them says why no engine runs, and gets the button that starts one. One that
// was read can be put away; it comes back when something else is to be said.
function showNotices(notices, mayStart = false) {
  const box = byId("ls-notices");
  if (!box) return;
  const joined = [mayStart, ...notices].join("\n");
  if (box.dataset.shown === joined) return;
  box.dataset.shown = joined;
  box.replaceChildren(...notices.map((textContent, place) => {
    const start = mayStart && place === 0 ? [startButton()] : [];
    const line = make("p", {}, make("span", { textContent }), ...start,
      make("button", { type: "button", className: "ls-icon", ariaLabel: "Close", textContent: "×", onclick: () => line.remove() }));
    return line;
  }));
}

// How high what has to be said is, and what it stands on.
whenDrawn(["ls-notices", "ls-compose"], (...boxes) => {
  const measure = () => { for (const { id, offsetHeight } of boxes) document.documentElement.style.setProperty(`--${id}`, `${offsetHeight}px`); };
  for (const box of boxes) new ResizeObserver(measure).observe(box);
});

function startButton() {
  const onclick = () => {
    askModels({ act: "retry" }); // the next look says what came of it
    button.disabled = true; // by then the engine starts, or could not again and the notice is the same
    setTimeout(() => { button.disabled = false; }, AFTER_ACTION_MS);
  };
  const button = make("button", { type: "button", id: "ls-start-again", textContent: "Start the engine again", onclick });
  return button;
}

// A line that is there only where there is something to say.
function writeOrHide(id, words) {
  const line = byId(id);
  if (!line) return;
  line.hidden = !words;
  write(id, words ?? "");
}

function showFacts(facts) {
  const list = byId("ls-facts");
  if (!list) return;
  const cells = facts.flat();
  if (list.children.length !== cells.length)
    list.replaceChildren(...cells.map((_, place) => make(place % 2 ? "dd" : "dt")));
  cells.forEach((text, place) => {
    if (list.children[place].textContent !== text) list.children[place].textContent = text;
  });
}

// Tokens per second of what came between two looks: by the engine's own clock, so that a slow
// page draws the same picture. It begins anew with each reply.
const spark = {
  rates: [],
  tokens: 0,
  ms: 0,
  take(state) {
    const tokens = state.num_output_tokens ?? 0;
    const ms = state.decode_ms ?? 0;
    if (tokens < this.tokens || ms < this.ms) {
      this.rates = [];
      this.tokens = 0;
      this.ms = 0;
    }
    if (ms - this.ms < SPARK_MS) return;
    this.rates.push((1000 * (tokens - this.tokens)) / (ms - this.ms));
    if (this.rates.length > SPARK_POINTS) this.rates.shift();
    this.tokens = tokens;
    this.ms = ms;
    this.draw();
  },
  draw() {
    const box = byId("ls-spark");
    if (!box) return;
    box.hidden = this.rates.length < 2;
    const top = Math.max(...this.rates) || 1;
    const step = SPARK_WIDTH / Math.max(1, this.rates.length - 1);
    const points = this.rates.map(
      (rate, index) =>
        `${(index * step).toFixed(1)},${(SPARK_HEIGHT - 2 - ((SPARK_HEIGHT - 4) * rate) / top).toFixed(1)}`,
    );
    byId("ls-spark-line").setAttribute("points", points.join(" "));
    write("ls-spark-label", `${Math.min(...this.rates).toFixed(0)} to ${top.toFixed(0)} tok/s`);
  },
};

function show(state) {
  const strip = byId("ls-strip");
  if (!strip) return;
  if (strip.dataset.phase !== state.phase) {
    strip.dataset.phase = state.phase;
    window.dispatchEvent(new CustomEvent("ls-phase", { detail: state.phase }));
  }
  if (state.num_list_changes !== numListChanges && performance.now() > nextList) { // by whatever window or program
    if (numListChanges !== null) window.dispatchEvent(new CustomEvent("ls-list"));
    numListChanges = state.num_list_changes;
    nextList = performance.now() + LIST_MS;
  }
  write("ls-phase", state.label);
  for (const name of ["speed", "gain", "guesses"]) write(`ls-${name}`, state[name]);
  byId("ls-gain").dataset.is = state.gain_is;
  write("ls-model-name", state.model[0]);
  write("ls-model-detail", state.model[1]);
  byId("ls-model").title = state.model.join(" ");
  write("ls-reason", state.reason);
  writeOrHide("ls-remedy", state.remedy);
  writeOrHide("ls-hardware", state.hardware);
  showFacts(state.facts);
  if (byId("ls-demo")) byId("ls-demo").hidden = !state.is_demo;
  spark.take(state);
  showNotices(state.notices, state.may_start);
  const chat = byId("ls-chat");
  if (chat) chat.setAttribute("aria-busy", String(BUSY.has(state.phase)));
}

// The latest reply in blocks: one per check by the model, marked by how much of it was drafted.
function roundClass(tokens, drafted) {
  if (drafted === 0) return "ls-r0";
  if (drafted >= tokens - 1) return "ls-r3";
  return drafted * 2 >= tokens ? "ls-r2" : "ls-r1";
}

function showRounds(state) {
  const box = byId("ls-rounds-text");
  if (!box || state.rounds === undefined) return;
  if (state.reply !== shownReply || state.num_rounds < numRounds) {
    const isOther = state.reply !== shownReply;
    shownReply = state.reply;
    numRounds = 0;
    box.replaceChildren();
    if (isOther) return; // the next answer brings this reply's rounds from its first
  }
  for (const [text, tokens, drafted, drafter] of state.rounds) {
    const title = drafted
      ? `${tokens} tokens in one step: ${drafted} guessed by ${drafter}, the rest by the model`
      : `${tokens} ${tokens === 1 ? "token" : "tokens"} by the model itself`;
    box.append(make("span", { className: `ls-round ${roundClass(tokens, drafted)}`, title, textContent: text }));
  }
  numRounds = state.num_rounds;
  const checks = state.num_checks; // one of them may have no text: it found the end
  write("ls-rounds-sum", checks === 1 ? "1 check by the model." : `${checks} checks by the model.`);
}

const wantsRounds = () => Boolean(byId("ls-rounds")?.open && !byId("ls-why").hidden);

// Nothing runs that this page belongs to.
function showGone(notice) {
  if (!byId("ls-strip")) return;
  byId("ls-strip").dataset.phase = "gone";
  write("ls-phase", "Not running");
  write("ls-reason", "Nothing runs.");
  showFacts([]);
  showNotices([notice]);
}

// The server was started anew and knows nothing of this page. What is typed and attached goes along
// (drafts.js, compose.js); an open edit keeps the page (edit.js).
function comeBack() {
  if (window.dispatchEvent(new CustomEvent("ls-restarted", { cancelable: true }))) location.reload();
  else showGone(EDITING);
}

async function look() {
  isLooking = true;
  let pause = IDLE_MS;
  try {
    const query = new URLSearchParams({ c: new URLSearchParams(location.search).get("c") ?? "" });
    if (wantsRounds()) query.set("rounds_from", numRounds);
    const answer = await fetch(`/live?${query}`, { cache: "no-store" });
    if (answer.status === 401) showGone(SHUT_OUT);
    else if (!answer.ok) throw new Error(String(answer.status));
    else {
      const state = await answer.json();
      failures = 0;
      launch ??= state.launch;
      if (launch !== state.launch) comeBack();
      else {
        show(state);
        showRounds(state);
        const isFresh = performance.now() - lastActionAt < AFTER_ACTION_MS;
        if (BUSY.has(state.phase) || isFresh) pause = BUSY_MS;
      }
    }
  } catch {
    failures += 1;
    if (failures > 2) showGone(STOPPED);
  }
  nextLook = setTimeout(look, document.hidden ? IDLE_MS : pause);
  isLooking = false;
}

for (const kind of ["keydown", "click"]) {
  document.addEventListener(kind, () => {
    const isRested = performance.now() - lastActionAt > AFTER_ACTION_MS;
    lastActionAt = performance.now();
    if (!isRested || isLooking) return;
    clearTimeout(nextLook);
    nextLook = setTimeout(look, BUSY_MS);
  }, { capture: true });
}

// A browser lets the timers of a hidden tab wait for up to a minute.
document.addEventListener("visibilitychange", () => {
  if (document.hidden || isLooking) return;
  clearTimeout(nextLook);
  look();
});

// What is copied is what was written: without our line of figures, and without the invisible marks
// that keep text from becoming markup (plain_markdown.py).
const MARKS = /\u2063/g;
const BOXES = [[/☐\u2063/g, "[ ]"], [/☑\u2063/g, "[x]"]]; // as plain_markdown.py writes them
const bare = (text) => BOXES.reduce((so, [box, written]) => so.replace(box, written), text).replace(MARKS, "");
const THOUGHT = /\u2063\u2063[^]*?\u2063\u2063\s*/g; // its title and its text, as messages.py marks them
const NOTES = /\n?<p class="ls-(?:footer|error|lenient|own)">[^]*?<\/p>/g;
let isMessageCopied = false;

document.addEventListener(
  "click",
  (event) => { isMessageCopied = Boolean(event.target.closest?.('[title="Copy message"]')); },
  { capture: true },
);
if (navigator.clipboard) {
  const writeText = navigator.clipboard.writeText.bind(navigator.clipboard);
  navigator.clipboard.writeText = (text) =>
    writeText(bare(isMessageCopied ? text.replace(THOUGHT, "").replace(NOTES, "") : text));
}
document.addEventListener("copy", (event) => {
  const text = String(getSelection());
  if (text.search(MARKS) < 0) return;
  event.clipboardData.setData("text/plain", bare(text));
  event.preventDefault();
});

look();
