// The settings at the side: the fields' values go to the server as one text, kept for each chat; the
// person's prompts; the defaults of the model. Texts of the person's are only ever text nodes.
import { askForLine, byId, command, make, onNews, question, toast } from "./ui.js";
import { NARROW_PX, setSide } from "./side.js";

const KEEP_MS = 300; // of rest after a letter, before what the fields hold is kept
const MAX_PROMPT_NAME = 80; // as commands.py
const KERNELS = { "same-bits": "results are identical with and without drafting", fastest: "fastest, near ties may differ" };

const form = () => byId("ls-form");
const field = (name) => form()?.elements[name];
const fieldNames = () => [...new Set([...form().elements].map((one) => one.name).filter(Boolean))];
const held = () => Object.fromEntries(fieldNames().map((name) => [name, field(name).value]));

let panel = { prompts: {}, ways: [], defaults: {}, model: null, is_loaded: false };

// Values. What the server says may have been asked before a person changed a field: then the field
// stays as it is. What is changed while another chat is on its way belongs to that one.

const LEAVES = new Set(["open", "duplicate", "fork", "delete", "restore"]); // commands: the chat that is shown
const changedFields = new Set(); // by the person, since this chat was asked for
let isOnItsWay = false;

function leave() {
  if (keepTimer) keepNow();
  changedFields.clear();
  isOnItsWay = true;
}

function arrive() {
  isOnItsWay = false;
  if (changedFields.size) keep(0);
}

window.addEventListener("ls-command", ({ detail }) => { if (LEAVES.has(detail.do)) leave(); });
onNews("warning", arrive);

// Gradio may put an earlier value back into the component, so what the person changed is set again.
function show(written) {
  const values = Object.entries(JSON.parse(written));
  fill(values.filter(([name]) => !changedFields.has(name)));
  const isEarlier = values.some(([name, value]) => changedFields.has(name) && field(name)?.value !== value);
  if (isEarlier && !isOnItsWay) keep(0);
}

function fill(values) {
  for (const [name, value] of values) {
    const one = field(name);
    if (!one || one.value === value) continue;
    one.value = value;
    if (one.tagName === "SELECT" && one.selectedIndex < 0) one.selectedIndex = 0;
  }
  draw();
}

// What follows from the values: sliders, the words for the speed, which prompt this is.
function draw() {
  const focused = document.activeElement;
  for (const slider of form().querySelectorAll("input[data-for]")) slider.value = field(slider.dataset.for).value || 0;
  const chosen = form().querySelector("input[name=drafter]:checked");
  const label = chosen?.closest(".ls-way").querySelector("b").textContent ?? "";
  if (byId("ls-speed-chosen").textContent !== label) byId("ls-speed-chosen").textContent = label;
  byId("ls-speed-choice").toggleAttribute("data-unready", Boolean(chosen?.closest(".ls-unready")));
  form().querySelector('[data-of="lenient_rule"]').hidden = field("checking").value !== "lenient";
  byId("ls-prompts").value = promptShown();
  for (const id of ["ls-prompt-rename", "ls-prompt-delete"]) byId(id).hidden = !byId("ls-prompts").value;
  byId("ls-prompt-save").disabled = !field("system_prompt").value.trim() || Boolean(byId("ls-prompts").value);
  const values = held();
  const changedNames = Object.keys(panel.defaults).filter((name) => values[name] !== panel.defaults[name]);
  const isUsual = !changedNames.length;
  byId("ls-defaults-back").disabled = changedNames.every((name) => name === "system_prompt");
  byId("ls-defaults-save").disabled = isUsual || !panel.model;
  byId("ls-defaults-forget").hidden = !panel.has_defaults;
  passFocusOn(focused);
}

// A button that did its work may be off or gone now: what stands beside it has the focus then.
function passFocusOn(button) {
  if (!form().contains(button) || !(button.disabled || button.hidden)) return;
  const next = button.closest(".ls-library, .ls-ends")?.querySelector(":enabled:not([hidden])");
  (next ?? field("system_prompt")).focus({ preventScroll: true });
}

const promptShown = () => {
  const values = held();
  const isThis = ([, one]) => Object.entries(one).every(([name, value]) => (values[name] ?? value) === value);
  return Object.entries(panel.prompts).find(isThis)?.[0] ?? "";
};

let keepTimer = 0;

function keep(afterMs) {
  window.lsSettings.set(JSON.stringify(held()));
  clearTimeout(keepTimer);
  if (!isOnItsWay) keepTimer = setTimeout(keepNow, afterMs);
}

function keepNow() {
  clearTimeout(keepTimer);
  keepTimer = 0;
  command({ do: "keep" });
}

function changed(names, isWhole) {
  for (const name of names) changedFields.add(name);
  draw();
  keep(isWhole ? 0 : KEEP_MS);
}

function set(values) {
  fill(Object.entries(values));
  changed(Object.keys(values), true);
  form().dispatchEvent(new Event("change", { bubbles: true })); // the gauge counts anew
}

document.addEventListener("input", (event) => {
  const target = event.target;
  if (!target.closest?.("#ls-form")) return;
  if (target.dataset.for) field(target.dataset.for).value = target.value;
  const name = target.dataset.for ?? target.name; // the lists and switches that are no fields have none
  if (name) changed([name], false);
});
document.addEventListener("change", (event) => {
  if (event.target.id === "ls-makes-titles") command({ do: "titles", value: event.target.checked });
  else if (event.target.id === "ls-kept-limit") command({ do: "keep_chats", value: event.target.valueAsNumber });
  else if (event.target.id === "ls-prompts") set(panel.prompts[event.target.value] ?? {});
  else if (event.target.closest?.("#ls-form") && event.target.id !== "ls-form") changed([], true);
});
document.addEventListener("submit", (event) => { if (event.target.id === "ls-form") event.preventDefault(); });

// What the fields have to know besides

const ask = (isReady) => command({ do: "panel", is_ready: isReady });
window.addEventListener("ls-phase", (event) => { if (event.detail === "ready") ask(true); }); // a model is there
onNews("moved", () => { arrive(); ask(false); });

onNews("panel", (told) => {
  panel = told;
  const names = Object.keys(panel.prompts);
  byId("ls-prompts").replaceChildren(
    make("option", { value: "", textContent: names.length ? "Your prompts…" : "No prompts saved yet" }),
    ...names.map((name) => make("option", { value: name, textContent: name })),
  );
  byId("ls-prompts").disabled = !names.length;
  for (const radio of form().querySelectorAll(".ls-way:not(.ls-always) input")) drawWay(radio);
  byId("ls-thinking").hidden = !panel.thinks;
  byId("ls-kernels").textContent = KERNELS[panel.kernels] ?? (panel.is_loaded ? "one kind only" : "not known yet");
  const model = panel.model?.split(/[\\/]/).pop();
  byId("ls-defaults-of").textContent = model ? `Defaults of ${model}${panel.has_defaults ? "" : ": as shipped"}` : "";
  byId("ls-makes-titles").closest("label").hidden = panel.makes_titles === null;
  byId("ls-makes-titles").checked = panel.makes_titles;
  byId("ls-kept-limit").value = panel.kept.limit;
  byId("ls-kept-now").textContent = `Now ${panel.kept.now}.`;
  draw();
});

// A value that cannot be used is marked where it stands, and the reason is read beside it.
onNews("faults", (faults) => {
  for (const name of fieldNames()) {
    const one = form().querySelector(`#ls-set-${name}`);
    const row = one?.closest(".ls-set");
    if (!row) continue;
    const why = faults[name] ?? "";
    one.setAttribute("aria-invalid", why ? "true" : "false");
    row.querySelector(".ls-set-fault")?.remove();
    if (why) row.append(make("p", { className: "ls-set-fault", role: "alert", textContent: why }));
  }
});

// The person's own prompt is no setting of the model: it stays.
function backToDefaults() {
  const before = held();
  const { system_prompt: _, ...usual } = panel.defaults;
  set(usual);
  toast("The defaults are back. The system prompt is kept.", "Undo", () => set(before));
}

onNews("defaults_saved", () => toast("New chats with this model begin with these settings."));

function drawWay(radio) {
  const row = radio.closest(".ls-way");
  const way = panel.ways.find((one) => one.name === radio.value);
  row.hidden = panel.is_loaded && !way && !radio.checked;
  radio.disabled = !way?.is_ready;
  row.classList.toggle("ls-unready", panel.is_loaded && !way?.is_ready);
  const reason = way?.reason ?? (panel.is_loaded ? "Not there for this model." : "Known once the model is loaded.");
  row.querySelector(".ls-way-why").textContent = way && !way.is_ready ? `Not ready. ${reason}` : reason;
}

// The list of speeds closes when one is chosen, and when it is left

const speeds = () => byId("ls-speed-choice");
const closeSpeeds = () => { speeds().open = false; };

document.addEventListener("click", (event) => {
  const target = event.target;
  if (target.closest?.("#ls-new")) leave();
  const way = target.closest?.("#ls-speed-choice .ls-way");
  if (way && event.detail && !way.querySelector("input").disabled) { // by a pointer: keys may go on
    setTimeout(() => { closeSpeeds(); speeds().querySelector("summary").focus(); });
  } else if (speeds()?.open && !target.closest?.("#ls-speed-choice")) closeSpeeds();
  if (target.id === "ls-prompt-save") savePrompt();
  else if (target.id === "ls-prompt-rename") renamePrompt();
  else if (target.id === "ls-prompt-delete") deletePrompt();
  else if (target.id === "ls-defaults-back") backToDefaults();
  else if (target.id === "ls-defaults-save") command({ do: "save_defaults" });
  else if (target.id === "ls-defaults-forget") command({ do: "forget_defaults" });
});
document.addEventListener("focusout", (event) => {
  const isLeft = event.target.closest?.("#ls-speed-choice") && event.relatedTarget;
  if (isLeft && !event.relatedTarget.closest("#ls-speed-choice")) closeSpeeds();
});
// The person's prompts

async function savePrompt() {
  const name = await askForLine("Save this prompt", "Name", "", "Save", MAX_PROMPT_NAME);
  if (name && (await mayReplace(name))) command({ do: "save_prompt", name });
}

async function renamePrompt() {
  const name = byId("ls-prompts").value;
  const wanted = await askForLine("Rename this prompt", "Name", name, "Rename", MAX_PROMPT_NAME);
  if (wanted && wanted !== name && (await mayReplace(wanted))) command({ do: "rename_prompt", name, wanted });
}

async function deletePrompt() {
  const name = byId("ls-prompts").value;
  const isMeant = await question({
    title: `Delete the prompt “${name}”?`,
    body: make("p", { textContent: "Chats that used it keep their settings." }),
    choices: [["Keep it", null], ["Delete", true, true]],
  });
  if (isMeant) command({ do: "delete_prompt", name });
}

async function mayReplace(name) {
  if (!(name in panel.prompts)) return true;
  return question({
    title: `Replace the prompt “${name}”?`,
    body: make("p", { textContent: "There is one of this name. What it holds now would be gone." }),
    choices: [["Keep it", null], ["Replace", true, true]],
  });
}

// The panel belongs to the chat, and gives the focus where it opens and back where it closes

let wasFocused = null;

export function toggleSettings() {
  const isOpen = byId("ls-settings").classList.contains("open");
  if (!isOpen) wasFocused = document.activeElement;
  setSide("ls-settings", !isOpen);
  if (isOpen) (wasFocused ?? document.body).focus?.();
  else setTimeout(() => field("system_prompt").focus({ preventScroll: true }));
}

// Escape leaves the list of speeds, then, where it lies over the chat, the panel. Enter chooses.
function leaveByKey(event) {
  const isOfList = speeds()?.open && (event.key === "Escape" || event.target.name === "drafter");
  if (isOfList) {
    closeSpeeds();
    speeds().querySelector("summary").focus();
  } else if (event.key === "Escape" && window.innerWidth < NARROW_PX) toggleSettings();
  return isOfList || event.key === "Escape" && window.innerWidth < NARROW_PX;
}
document.addEventListener("keydown", (event) => {
  const isMeant = ["Escape", "Enter"].includes(event.key) && event.target.closest?.("#ls-settings");
  if (!isMeant || document.querySelector("dialog[open]") || !leaveByKey(event)) return;
  event.preventDefault();
  event.stopPropagation(); // else it would end a reply
}, { capture: true });

window.addEventListener("ls-settings", (event) => show(event.detail));
if (window.lsSettings) show(window.lsSettings.get());
