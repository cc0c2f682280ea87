// The token view: opened by "details" under a reply (chat.js), filled from /tokens, text nodes only.
// Joined, the runs are the reply's text exactly: what is shown beside it (refused guesses, borders
// of rounds) is drawn by the style sheet from attributes and is no text of the page.
import { ask, byId, make } from "./ui.js";

const POLL_MS = 400;

let asked = 0; // a newer request makes an older answer void
let shown = null; // the message on view

function percent(chance) {
  if (chance === null) return null;
  const value = 100 * chance;
  return value > 0 && value < 1 ? "under 1 %" : `${Math.round(value)} %`;
}

function quoted(text) {
  if (text === null) return "the end of the reply";
  if (text === "") return "a control token";
  const whole = text.replaceAll("\n", "⏎").replaceAll("\t", "⇥");
  return whole.includes("\ufffd") ? "a part of a character" : `“${whole}”`;
}

function frame() {
  if (byId("ls-token-view")) return byId("ls-token-view");
  const view = make("dialog", { id: "ls-token-view", "aria-labelledby": "ls-tv-title" },
    make("div", { className: "ls-tv-head" },
      make("h2", { id: "ls-tv-title", textContent: "Where each token came from" }),
      make("button", { type: "button", className: "ls-tv-close", textContent: "Close", onclick: () => view.close() })),
    make("div", { id: "ls-tv-body", className: "ls-tv-body" }));
  view.addEventListener("click", (event) => { if (event.target === view) view.close(); });
  view.addEventListener("close", () => { asked += 1; shown = null; });
  document.body.append(view);
  return view;
}

// What became of one token, in words.
function tokenWords(data, token) {
  const [kind, number, drafter, confidence] = token;
  const round = data.rounds[number];
  const label = data.legend.find((one) => one.kind === kind)?.label ?? kind;
  const parts = [drafter === "target" ? label : `${label}, guessed by ${drafter}, accepted`];
  const sure = percent(confidence);
  if (sure) parts.push(`the drafter was ${sure} sure`);
  if (kind === "corrected" && round.missed.length) {
    const refused = round.missed.map((one) => quoted(one.text)).join(", ");
    parts.push(`in the place of ${refused}`);
  }
  parts.push(roundWords(number, round));
  return parts.join(" · ");
}

function roundWords(number, round) {
  const probe = round.is_probe ? ", a trial" : "";
  const drafted = round.drafted ? `${round.accepted} of ${round.drafted} guesses right` : "no draft";
  return `round ${number + 1}: ${drafted}${round.time && `, ${round.time}`}${probe}`;
}

function missedWords(number, round, missed) {
  const parts = [`refused: ${quoted(missed.text)}`];
  const sure = percent(missed.confidence);
  if (sure) parts.push(`the drafter was ${sure} sure`);
  parts.push(`${quoted(missed.instead)} stands instead`, roundWords(number, round));
  return parts.join(" · ");
}

// Hover, focus and the arrow keys all lead to the same line of detail: what a token says of itself.
const token = (className, words, more) => make("span", { className, tabIndex: -1, "data-words": words, ...more });

function runSpan(data, [text, tokens]) {
  const last = tokens.at(-1);
  const lineBreak = /^\s*\n\s*$/.test(text) ? " ls-break" : "";
  const said = tokens.map((one) => tokenWords(data, one)).join(" / ");
  const many = tokens.length > 1 ? `${tokens.length} tokens make up this text. ` : "";
  const words = last ? `${quoted(text)} · ${many}${said}` : "written before: this reply went on from here";
  return token(`ls-run ls-k-${last ? last[0] : "earlier"}${lineBreak}`, words, { textContent: text });
}

function missedSpan(number, round, missed) {
  const label = quoted(missed.text);
  const bare = missed.text.trim();
  return token("ls-missed", missedWords(number, round, missed), {
    "data-text": bare === "" || bare.includes("\ufffd") ? label : bare,
    role: "img",
    ariaLabel: `refused: ${label}`,
  });
}

function textBox(data) {
  const box = make("div", { id: "ls-tv-text", className: "ls-tv-text", tabIndex: 0, role: "group",
    ariaLabel: "The reply, token by token. Arrow keys go through the tokens." });
  let round = -1;
  const told = new Set(); // rounds whose refused guesses are placed
  for (const run of data.runs) {
    const [, tokens] = run;
    const span = runSpan(data, run);
    const last = tokens[tokens.length - 1];
    let first = span;
    if (last && last[2] === "target" && !told.has(last[1])) {
      told.add(last[1]);
      for (const missed of data.rounds[last[1]].missed) {
        const refused = missedSpan(last[1], data.rounds[last[1]], missed);
        box.append(refused);
        if (first === span) first = refused;
      }
    }
    if (last && last[1] !== round) {
      if (round >= 0) first.classList.add("ls-first");
      round = last[1];
    }
    box.append(span);
  }
  return box;
}

const numMissed = (data) => data.rounds.reduce((sum, round) => sum + round.missed.length, 0);

function legend(data) {
  const list = make("ul", { className: "ls-tv-legend", ariaLabel: "Legend" });
  const add = (kind, sample, count, meaning) => list.append(make("li", { "data-kind": kind },
    make("span", sample), make("b", { textContent: ` ${count} ` }), make("span", { className: "ls-tv-meaning", textContent: meaning })));
  for (const { kind, label, count, meaning } of data.legend)
    add(kind, { className: `ls-run ls-k-${kind}`, textContent: label }, count, meaning);
  if (numMissed(data))
    add("rejected", { className: "ls-missed", "data-text": "refused", role: "img", ariaLabel: "refused" }, numMissed(data),
      "a guess the model refused; it is no part of the reply");
  return list;
}

function summary(data) {
  const { num_output_tokens: tokens, num_accepted_tokens: right, num_checked_tokens: checked, num_draft_tokens: drafted } = data;
  const share = (part, whole) => (whole ? ` (${Math.round((100 * part) / whole)} %)` : "");
  const head = `${tokens} tokens in ${data.rounds.length} checks by the model`;
  if (!drafted) return `${head}, none of them guessed.`;
  const guessed = `${head}. Guessed: ${right} of the tokens${share(right, tokens)}.`;
  if (checked === null) return `${guessed} Right: ${right} of ${drafted} guesses${share(right, drafted)}.`;
  return `${guessed} Right: ${right} of ${checked} checked guesses${share(right, checked)}; ${drafted - checked} more stood after a wrong guess.`;
}

const COLUMNS = ["Round", "Drafter", "Guessed", "Right", "Time", "Refused → instead"];

function roundsTable(data) {
  const row = (tag, values, more) => make("tr", {}, ...values.map((value) => make(tag, { textContent: String(value), ...more })));
  const cells = ({ drafter, drafted, accepted, time, missed }, number) => [number + 1, drafter, drafted, accepted,
    time || "–", missed.map((one) => `${quoted(one.text)} → ${quoted(one.instead)}`).join(", ") || "–"];
  const details = make("details", { className: "ls-tv-rounds" }, make("summary", { textContent: `Every check (${data.rounds.length})` }));
  details.addEventListener("toggle", () => {
    if (!details.open || details.querySelector("table")) return;
    const rows = data.rounds.map((round, number) => row("td", cells(round, number)));
    const table = make("table", {}, row("th", COLUMNS, { scope: "col" }), ...rows);
    details.append(make("div", { className: "ls-tv-scroll", tabIndex: 0, role: "region", ariaLabel: "Every check" }, table));
  });
  return details;
}

// The reply made again, with or without drafting.
function auditBox(message, drafters) {
  const choice = make("select", { className: "ls-tv-drafter", ariaLabel: "Drafter of the replay" },
    ...drafters.map(({ name, label }) => new Option(label, name)));
  const result = make("p", { id: "ls-tv-result", className: "ls-tv-result", role: "status" });
  const button = make("button", { type: "button", className: "ls-tv-button", textContent: "Make it again",
    onclick: () => replay(message, choice.value, button, result) });
  return make("div", { className: "ls-tv-audit" }, button, choice, result);
}

const SILENT = "localspec did not answer. Try again.";
const reach = (address, method = "GET") => ask(address, { method, cache: "no-store" }, SILENT, SILENT);

async function replay(message, drafter, button, result) {
  button.disabled = true;
  const asked = `/audit?message=${message}&drafter=${encodeURIComponent(drafter)}`;
  let state = await reach(asked, "POST");
  while (state.state === "running" && shown === message) {
    result.textContent = state.text;
    result.dataset.state = state.state;
    await new Promise((done) => { setTimeout(done, POLL_MS); });
    state = await reach(`/audit?message=${message}`);
  }
  if (shown !== message) { // closed meanwhile: the model is wanted elsewhere
    if (state.state === "running") reach(`/audit?message=${message}`, "DELETE");
    return;
  }
  result.textContent = state.text ?? state.error;
  result.dataset.state = state.state ?? "failed";
  button.disabled = false;
}

const note = (text) => make("p", { className: "ls-tv-note", textContent: text });

function fill(data, message) {
  const body = byId("ls-tv-body");
  if (data.error) return body.replaceChildren(note(data.error));
  const hint = "Point at a token, or go through them with arrow keys.";
  const detail = make("p", { id: "ls-tv-detail", className: "ls-tv-detail", ariaLive: "polite", textContent: hint });
  const sum = make("p", { className: "ls-tv-sum", textContent: summary(data) });
  body.replaceChildren(sum, legend(data), ...data.notes.map(note), textBox(data), detail, auditBox(message, data.drafters), roundsTable(data));
}

function move(step) {
  const all = [...byId("ls-tv-text").querySelectorAll("[data-words]")];
  const at = all.indexOf(document.activeElement);
  const next = all[Math.max(0, Math.min(all.length - 1, at < 0 ? 0 : at + step))];
  next?.focus();
}

export async function showTokens(message, link) {
  const view = frame();
  asked += 1;
  const mine = asked;
  link.focus(); // where the browser puts the focus back; not every one does so with a click
  shown = message;
  byId("ls-tv-body").replaceChildren(note("Reading the log …"));
  if (!view.open) view.showModal();
  const data = await reach(`/tokens?message=${message}`);
  if (mine === asked) fill(data, message);
}

for (const kind of ["mouseover", "focusin"]) {
  document.addEventListener(kind, ({ target }) => {
    const found = target instanceof Element && target.closest("#ls-tv-text [data-words]");
    if (found) byId("ls-tv-detail").textContent = found.dataset.words;
  });
}
document.addEventListener("keydown", (event) => {
  const steps = { ArrowRight: 1, ArrowLeft: -1, ArrowDown: 8, ArrowUp: -8 };
  if (!(event.key in steps) || !event.target.closest?.("#ls-tv-text")) return;
  event.preventDefault();
  move(steps[event.key]);
});
