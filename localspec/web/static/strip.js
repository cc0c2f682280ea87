// What the line over the chat does: the menu of models, and the popover "How fast, and why". And the
// first screen: its examples, and its way to the models. static/live.js fills them.
import { showMenu } from "./menu.js";
import { askModels, byId, messageBox, setMessage, toast, toTab, whenDrawn } from "./ui.js";

const KEPT = "ls-why"; // whether the popover is open, over a reload
const PLACE = "ls-why-place"; // and where it was put
const ARROWS = { ArrowLeft: [-24, 0], ArrowRight: [24, 0], ArrowUp: [0, -24], ArrowDown: [0, 24] };

const ACTS = {
  "#ls-model": chooseModel,
  "#ls-why-open": () => setWhy(byId("ls-why").hidden),
  "#ls-why-close": () => setWhy(false),
  ".ls-to-models": () => toTab("Models"),
  ".ls-example": (button) => { setMessage(button.dataset.message); messageBox()?.focus(); },
};

document.addEventListener("click", (event) => {
  for (const [selector, act] of Object.entries(ACTS)) {
    const found = event.target.closest?.(selector);
    if (found) act(found);
  }
});

// The popover stays open, whatever else is done, until it is closed.

function setWhy(isOpen) {
  const [popover, button] = [byId("ls-why"), byId("ls-why-open")];
  if (!popover || popover.hidden === !isOpen) return false;
  const hadFocus = popover.contains(document.activeElement);
  popover.hidden = !isOpen;
  button.setAttribute("aria-expanded", String(isOpen));
  localStorage.setItem(KEPT, isOpen ? "open" : "");
  if (hadFocus) button.focus();
  return true;
}

export const closeWhy = () => setWhy(false);

// It stays where it was put, as far as it fits: its head is dragged, and arrow keys move its handle.
// A place is the distance from its corner under the line, in pixels.

let wanted = JSON.parse(localStorage.getItem(PLACE) ?? "[0, 0]");
let shown = [0, 0];
let hold = null; // where the pointer took it: of the pointer, and of the popover

const within = (value, low, high) => Math.max(low, Math.min(value, high));

function put() {
  const [popover, room] = [byId("ls-why"), byId("ls-strip-box").getBoundingClientRect()];
  const { left, top, width, height } = popover.getBoundingClientRect();
  const [x, y] = [left - shown[0], top - shown[1]];
  shown = [within(wanted[0], room.left - x, room.right - width - x),
    within(wanted[1], 0, Math.max(0, innerHeight - height - y))];
  popover.style.translate = shown.map((one) => `${one}px`).join(" ");
}

function move(x, y) {
  wanted = [x, y];
  put();
  localStorage.setItem(PLACE, JSON.stringify(shown));
}

document.addEventListener("pointerdown", (event) => {
  const isHandle = event.target.closest?.("#ls-why-move") || !event.target.closest?.("button");
  if (event.button || !isHandle || !event.target.closest?.(".ls-why-head")) return;
  hold = [event.clientX - shown[0], event.clientY - shown[1]];
  event.target.setPointerCapture(event.pointerId);
});
document.addEventListener("pointermove", (event) => {
  if (hold) move(event.clientX - hold[0], event.clientY - hold[1]);
});
for (const kind of ["pointerup", "pointercancel"]) document.addEventListener(kind, () => { hold = null; });
document.addEventListener("keydown", (event) => {
  const step = ARROWS[event.key];
  if (!step || event.target.id !== "ls-why-move") return;
  event.preventDefault();
  move(shown[0] + step[0], shown[1] + step[1]);
});

document.addEventListener("keydown", (event) => {
  if (event.key !== "Escape" || !event.target.closest?.("#ls-why, #ls-strip") || !closeWhy()) return;
  event.preventDefault();
  event.stopPropagation();
}, { capture: true });

whenDrawn(["ls-why", "ls-strip-box"], (...boxes) => {
  for (const box of boxes) new ResizeObserver(put).observe(box);
  setWhy(localStorage.getItem(KEPT) === "open");
});

// The models that are ready here, loaded as the Models tab does

async function chooseModel(button) {
  if (button.getAttribute("aria-busy")) return;
  button.setAttribute("aria-busy", "true");
  const { ready = [], error } = await askModels();
  button.removeAttribute("aria-busy");
  if (error) return toast(error);
  const items = ready.map(({ id, name, words, is_loaded }) =>
    [`${is_loaded ? "✓ " : ""}${name}`, () => { if (!is_loaded) load(id); }, words]);
  showMenu(button, "Models that are ready here", [...items, ["More models…", () => toTab("Models")]]);
}

async function load(id) {
  const { error, message } = await askModels({ act: "load", id });
  if (error || message) toast(error || message);
}
