// The token view: opened by the "tokens" link under a reply, filled from /tokens, text nodes only.
// Joined, the runs are the reply's text exactly: what is shown beside it (refused guesses, borders
// of rounds) is drawn by the style sheet from attributes and is no text of the page.
const POLL_MS = 400;

let asked = 0; // a newer request makes an older answer void
let shown = null; // the message on view

const byId = (id) => document.getElementById(id);

function make(tag, className, text) {
  const element = document.createElement(tag);
  if (className) element.className = className;
  if (text !== undefined) element.textContent = text;
  return element;
}

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
  let view = byId("ls-token-view");
  if (view) return view;
  view = make("dialog");
  view.id = "ls-token-view";
  view.setAttribute("aria-labelledby", "ls-tv-title");
  const head = make("div", "ls-tv-head");
  const title = make("h2", "", "Where each token came from");
  title.id = "ls-tv-title";
  const close = make("button", "ls-tv-close", "Close");
  close.type = "button";
  close.addEventListener("click", () => view.close());
  head.append(title, close);
  const body = make("div", "ls-tv-body");
  body.id = "ls-tv-body";
  view.append(head, body);
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

function tell(words) {
  const detail = byId("ls-tv-detail");
  if (detail) detail.textContent = words;
}

// Hover, focus and the arrow keys all lead to the same line of detail.
function speaks(element, words) {
  element.tabIndex = -1;
  element.dataset.words = words;
}

function runSpan(data, run) {
  const [text, tokens] = run;
  const last = tokens[tokens.length - 1];
  const span = make("span", `ls-run ls-k-${last ? last[0] : "earlier"}`, text);
  if (/^\s*\n\s*$/.test(text)) span.classList.add("ls-break");
  if (!last) {
    speaks(span, "written before: this reply went on from here");
    return span;
  }
  const words = tokens.map((token) => tokenWords(data, token));
  const many = tokens.length > 1 ? `${tokens.length} tokens make up this text. ` : "";
  speaks(span, `${quoted(text)} · ${many}${words.join(" / ")}`);
  return span;
}

function missedSpan(number, round, missed) {
  const span = make("span", "ls-missed");
  const label = quoted(missed.text);
  const bare = missed.text.trim();
  span.dataset.text = bare === "" || bare.includes("\ufffd") ? label : bare;
  span.setAttribute("role", "img");
  span.setAttribute("aria-label", `refused: ${label}`);
  speaks(span, missedWords(number, round, missed));
  return span;
}

// What arrow keys go through; filled by textBox or marksBox.
function emptyBox(label) {
  const box = make("div", "ls-tv-text");
  box.id = "ls-tv-text";
  box.tabIndex = 0;
  box.setAttribute("role", "group");
  box.setAttribute("aria-label", label);
  return box;
}

function textBox(data) {
  const box = emptyBox("The reply, token by token. Arrow keys go through the tokens.");
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

// Without the text of single tokens: the text, and a mark for each token.
function marksBox(data) {
  const box = emptyBox("One mark for each token. Arrow keys go through the marks.");
  let round = 0;
  for (const token of data.tokens) {
    const mark = make("span", `ls-run ls-mark ls-k-${token[0]}`);
    mark.setAttribute("role", "img");
    mark.setAttribute("aria-label", token[0]);
    if (token[1] !== round) mark.classList.add("ls-first");
    round = token[1];
    speaks(mark, tokenWords(data, token));
    box.append(mark);
  }
  const text = make("p", "ls-tv-plain", data.text);
  const whole = make("div");
  whole.append(text, box);
  return whole;
}

function legend(data) {
  const list = make("ul", "ls-tv-legend");
  list.setAttribute("aria-label", "Legend");
  for (const one of data.legend) {
    const item = make("li");
    item.dataset.kind = one.kind;
    item.append(
      make("span", `ls-run ls-k-${one.kind}`, one.label),
      make("b", "", ` ${one.count} `),
      make("span", "ls-tv-meaning", one.meaning),
    );
    list.append(item);
  }
  const missed = data.rounds.reduce((sum, round) => sum + round.missed.length, 0);
  if (missed) {
    const item = make("li");
    item.dataset.kind = "rejected";
    const sample = make("span", "ls-missed");
    sample.dataset.text = "refused";
    sample.setAttribute("role", "img");
    sample.setAttribute("aria-label", "refused");
    item.append(
      sample,
      make("b", "", ` ${missed} `),
      make("span", "ls-tv-meaning", "a guess the model refused; it is no part of the reply"),
    );
    list.append(item);
  }
  return list;
}

function summary(data) {
  const { num_output_tokens: tokens, num_accepted_tokens: accepted, num_draft_tokens: drafted } = data;
  const rate = drafted ? ` (${Math.round((100 * accepted) / drafted)} %)` : "";
  const missed = data.rounds.reduce((sum, round) => sum + round.missed.length, 0);
  const unseen = data.rounds.map((round) => round.not_reached);
  const skipped = unseen.includes(null)
    ? ""
    : `, ${missed} refused, ${unseen.reduce((a, b) => a + b, 0)} not checked`;
  return (
    `${tokens} tokens in ${data.rounds.length} checks by the model. ` +
    `Guessed: ${drafted}, of which ${accepted} right${rate}${skipped}.`
  );
}

function roundsTable(data) {
  const details = make("details", "ls-tv-rounds");
  details.append(make("summary", "", `Every check (${data.rounds.length})`));
  details.addEventListener("toggle", () => {
    if (!details.open || details.querySelector("table")) return;
    const table = make("table");
    const head = make("tr");
    for (const name of ["Round", "Drafter", "Guessed", "Right", "Time", "Refused → instead"]) {
      const cell = make("th", "", name);
      cell.scope = "col";
      head.append(cell);
    }
    table.append(head);
    data.rounds.forEach((round, number) => {
      const row = make("tr");
      const missed = round.missed.map((one) => `${quoted(one.text)} → ${quoted(one.instead)}`);
      const cells = [number + 1, round.drafter, round.drafted, round.accepted, round.time || "–",
        missed.join(", ") || "–"];
      for (const value of cells) row.append(make("td", "", String(value)));
      table.append(row);
    });
    const wrap = make("div", "ls-tv-scroll");
    wrap.tabIndex = 0;
    wrap.setAttribute("role", "region");
    wrap.setAttribute("aria-label", "Every check");
    wrap.append(table);
    details.append(wrap);
  });
  return details;
}

// The reply made again, with or without drafting.
function auditBox(message, drafters) {
  const box = make("div", "ls-tv-audit");
  const button = make("button", "ls-tv-button", "Make it again");
  button.type = "button";
  const choice = make("select", "ls-tv-drafter");
  choice.setAttribute("aria-label", "Drafter of the replay");
  for (const { name, label } of drafters) {
    const option = make("option", "", label);
    option.value = name;
    choice.append(option);
  }
  const result = make("p", "ls-tv-result");
  result.id = "ls-tv-result";
  result.setAttribute("role", "status");
  button.addEventListener("click", () => replay(message, choice.value, button, result));
  box.append(button, choice, result);
  return box;
}

async function replay(message, drafter, button, result) {
  button.disabled = true;
  const asked = `/audit?message=${message}&drafter=${encodeURIComponent(drafter)}`;
  let state = await ask(asked, { method: "POST" });
  while (state.state === "running" && shown === message) {
    result.textContent = state.text;
    result.dataset.state = state.state;
    await new Promise((done) => { setTimeout(done, POLL_MS); });
    state = await ask(`/audit?message=${message}`);
  }
  if (shown !== message) { // closed meanwhile: the model is wanted elsewhere
    if (state.state === "running") ask(`/audit?message=${message}`, { method: "DELETE" });
    return;
  }
  result.textContent = state.text ?? state.error;
  result.dataset.state = state.state ?? "failed";
  button.disabled = false;
}

async function ask(address, options = {}) {
  try {
    const answer = await fetch(address, { cache: "no-store", ...options });
    return await answer.json();
  } catch {
    return { error: "localspec did not answer. Try again.", state: "failed" };
  }
}

function fill(data, message) {
  const body = byId("ls-tv-body");
  if (data.error) {
    body.replaceChildren(make("p", "ls-tv-note", data.error));
    return;
  }
  const detail = make("p", "ls-tv-detail", "Point at a token, or go through them with arrow keys.");
  detail.id = "ls-tv-detail";
  detail.setAttribute("aria-live", "polite");
  const text = data.runs ? textBox(data) : marksBox(data);
  const notes = data.notes.map((note) => make("p", "ls-tv-note", note));
  const sum = make("p", "ls-tv-sum", summary(data));
  body.replaceChildren(sum, legend(data), ...notes, text, detail, auditBox(message, data.drafters), roundsTable(data));
}

function within(target) {
  return target instanceof Element ? target.closest("#ls-tv-text [data-words]") : null;
}

function move(step) {
  const all = [...byId("ls-tv-text").querySelectorAll("[data-words]")];
  const at = all.indexOf(document.activeElement);
  const next = all[Math.max(0, Math.min(all.length - 1, at < 0 ? 0 : at + step))];
  next?.focus();
}

async function open(message, link) {
  const view = frame();
  asked += 1;
  const mine = asked;
  link.focus(); // where the browser puts the focus back; not every one does so with a click
  shown = message;
  byId("ls-tv-body").replaceChildren(make("p", "ls-tv-note", "Reading the log …"));
  if (!view.open) view.showModal();
  const data = await ask(`/tokens?message=${message}`);
  if (mine === asked) fill(data, message);
}

document.addEventListener("mouseover", (event) => {
  const found = within(event.target);
  if (found) tell(found.dataset.words);
});
document.addEventListener("focusin", (event) => {
  const found = within(event.target);
  if (found) tell(found.dataset.words);
});
document.addEventListener("keydown", (event) => {
  const steps = { ArrowRight: 1, ArrowLeft: -1, ArrowDown: 8, ArrowUp: -8 };
  if (!(event.key in steps) || !event.target.closest?.("#ls-tv-text")) return;
  event.preventDefault();
  move(steps[event.key]);
});
document.addEventListener(
  "click",
  (event) => {
    const link = event.target.closest?.("a.ls-tokens");
    const message = link?.className.match(/\bls-m-(\d+)\b/)?.[1];
    if (!message) return;
    event.preventDefault();
    event.stopPropagation();
    open(message, link);
  },
  { capture: true },
);
