// Both sides of the page: the list of conversations, presets, the theme, what is open.
import { byPerson } from "./address.js";
import { askForLine, byId, command, inWords, make, onNews, question, toast } from "./ui.js";

const SEARCH_MS = 180;
const MAX_PRESET_NAME = 80; // as record/presets.py
const NARROW_PX = 768;
const ROOM_FOR_SETTINGS_PX = 1400;

const rowOf = (element) => element.closest?.("#ls-history .ls-row");
const handleOf = (row) => Number(row.dataset.handle);
const titleOf = (row) => row.querySelector(".ls-title").textContent;

document.addEventListener("click", (event) => {
  const target = event.target;
  const row = rowOf(target);
  if (row && target.closest(".ls-more")) showMenu(row, target.closest(".ls-more"));
  else if (row && target.closest(".ls-open")) {
    command({ do: "open", handle: handleOf(row) });
    if (window.innerWidth < NARROW_PX) setSide("ls-side", false);
  } else if (target.closest?.("#ls-new") && window.innerWidth < NARROW_PX) setSide("ls-side", false);
  else if (target.closest?.("#ls-import")) byId("ls-import-file")?.click();
  else if (target.closest?.("#ls-theme")) nextTheme();
  else if (target.closest?.("#ls-preset-save")) savePreset();
  else if (target.closest?.("#ls-preset-delete")) deletePreset();
});

// The menu of one conversation

function showMenu(row, button) {
  closeMenu();
  const isPinned = row.dataset.pinned === "1";
  const handle = handleOf(row);
  const title = titleOf(row);
  const item = (label, react) =>
    make("button", { type: "button", role: "menuitem", textContent: label, onclick: () => { closeMenu(); react(); } });
  const menu = make(
    "div",
    { id: "ls-menu", role: "menu", ariaLabel: `More: ${title}` },
    item("Rename", async () => {
      const wanted = await askForLine("Rename this chat", "Title", title, "Rename");
      if (wanted && wanted !== title) command({ do: "rename", handle, title: wanted });
    }),
    item(isPinned ? "Unpin" : "Pin to the top", () => command({ do: "pin", handle, is_pinned: !isPinned })),
    item("Delete", () => command({ do: "delete", handle })),
  );
  menu.addEventListener("keydown", (event) => {
    const items = [...menu.children];
    const place = items.indexOf(document.activeElement);
    if (event.key === "ArrowDown") items[(place + 1) % items.length].focus();
    else if (event.key === "ArrowUp") items[(place + items.length - 1) % items.length].focus();
    else if (event.key === "Tab") { closeMenu(); button.focus(); return; } // and on from there
    else return;
    event.preventDefault();
    event.stopPropagation();
  });
  leaveMenu = () => { closeMenu(); button.focus(); };
  document.body.append(menu);
  const place = button.getBoundingClientRect();
  menu.style.left = `${Math.max(8, Math.min(place.left, window.innerWidth - menu.offsetWidth - 8))}px`;
  menu.style.top = `${Math.min(place.bottom + 4, window.innerHeight - menu.offsetHeight - 8)}px`;
  menu.firstChild.focus();
  setTimeout(() => { if (menu.isConnected) document.addEventListener("click", closeMenu); });
}

let leaveMenu = () => {};

function closeMenu() {
  byId("ls-menu")?.remove();
  document.removeEventListener("click", closeMenu); // else it would close the next one as it opens
}

// Wherever the focus is, and before anything else that Escape would end.
document.addEventListener("keydown", (event) => {
  if (event.key !== "Escape" || !byId("ls-menu")) return;
  event.preventDefault();
  event.stopPropagation();
  leaveMenu();
}, { capture: true });

onNews("deleted", ({ handle, title }) => {
  toast(`Deleted “${title}”.`, "Undo", () => command({ do: "restore", handle }));
});

// Search and import

let searchTimer = 0;
document.addEventListener("input", (event) => {
  if (event.target.id !== "ls-search") return;
  clearTimeout(searchTimer);
  const words = event.target.value;
  searchTimer = setTimeout(() => command({ do: "search", words }, { mayRepeat: true }), SEARCH_MS);
});

const MAX_IMPORT_BYTES = 64_000_000; // as chat/importing.py, which checks again
document.addEventListener("change", async (event) => {
  if (event.target.id !== "ls-import-file") return;
  const [file] = event.target.files;
  if (!file) return;
  if (file.size > MAX_IMPORT_BYTES) toast(`${file.name} is ${inWords(file.size)}, but at most ${inWords(MAX_IMPORT_BYTES)} can be imported at once. Export one chat at a time, under Stats, and import these files.`);
  else await takeIn(file);
  event.target.value = "";
});

async function takeIn(file) {
  let told = { error: "localspec does not answer, so nothing was imported. Is it still running?" };
  try {
    const answer = await fetch("/import", { method: "POST", headers: { "content-type": "application/octet-stream" }, body: file });
    const refused = { error: "localspec refused this file, so nothing was imported. Reload the page and choose it again." };
    told = await answer.json().catch(() => refused);
  } catch {
    // what is told already says it
  }
  if (told.error) return toast(told.error);
  toast(told.imported === 1 ? "One chat was imported." : `${told.imported} chats were imported.`);
  byPerson();
  command({ do: "open", handle: told.last });
}

// Presets

const chosenPreset = () => document.querySelector("#ls-preset input")?.value || "";

async function savePreset() {
  const name = await askForLine("Save these settings as a preset", "Name", chosenPreset(), "Save", MAX_PRESET_NAME);
  if (name) command({ do: "save_preset", name });
}

onNews("preset_exists", async (name) => {
  const isMeant = await question({
    title: `Replace the preset “${name}”?`,
    body: make("p", { textContent: "There is one of this name. What it holds now would be gone." }),
    choices: [["Keep it", null], ["Replace", true, true]],
  });
  if (isMeant) command({ do: "save_preset", name, replace: true });
});

async function deletePreset() {
  const name = chosenPreset();
  if (!name) return toast("Choose the preset that is to go, then press Delete.");
  const isMeant = await question({
    title: `Delete the preset “${name}”?`,
    body: make("p", { textContent: "Chats that used it keep their settings." }),
    choices: [["Keep it", null], ["Delete", true, true]],
  });
  if (isMeant) command({ do: "delete_preset", name });
}

// Light and dark: as the system says, until the person says otherwise

const THEMES = ["system", "light", "dark"];
const SIGNS = { system: "◐", light: "☀", dark: "☾" };
const systemIsDark = window.matchMedia("(prefers-color-scheme: dark)");
const remembered = () => {
  const name = localStorage.getItem("ls-theme");
  return THEMES.includes(name) ? name : "system";
};

function applyTheme() {
  const name = remembered();
  const isDark = name === "dark" || (name === "system" && systemIsDark.matches);
  if (document.body.classList.contains("dark") !== isDark) document.body.classList.toggle("dark", isDark);
  document.documentElement.style.colorScheme = isDark ? "dark" : "light";
  const button = byId("ls-theme");
  const said = `Theme: ${name === "system" ? "as the system" : name}`;
  if (!button || button.title === said) return;
  button.title = said;
  button.setAttribute("aria-label", said);
  button.firstElementChild.textContent = SIGNS[name];
}

function nextTheme() {
  localStorage.setItem("ls-theme", THEMES[(THEMES.indexOf(remembered()) + 1) % THEMES.length]);
  applyTheme();
}

systemIsDark.addEventListener("change", applyTheme);
new MutationObserver(applyTheme).observe(document.body, { attributes: true, attributeFilter: ["class"] });

// The sides themselves

const sideIsOpen = (name) => byId(name)?.classList.contains("open") ?? false;

export function setSide(name, isOpen) {
  if (sideIsOpen(name) !== isOpen) byId(name)?.querySelector(".toggle-button")?.click();
}

function nameToggles() {
  for (const [name, said] of [["ls-side", "conversations"], ["ls-settings", "settings"]]) {
    const toggle = byId(name)?.querySelector(".toggle-button");
    if (!toggle) continue;
    const label = `${sideIsOpen(name) ? "Close" : "Open"} ${said}`;
    if (toggle.getAttribute("aria-label") === label) continue;
    toggle.setAttribute("aria-label", label);
    toggle.title = label;
    toggle.setAttribute("aria-expanded", String(sideIsOpen(name)));
    byId(name).querySelector(".sidebar-content")?.toggleAttribute("inert", !sideIsOpen(name));
  }
}

function begin(triesLeft) {
  const sides = ["ls-side", "ls-settings"].map(byId);
  if (!sides.every(Boolean)) {
    if (triesLeft > 0) setTimeout(begin, 50, triesLeft - 1);
    return;
  }
  for (const side of sides)
    new MutationObserver(nameToggles).observe(side, { attributes: true, attributeFilter: ["class"] });
  if (window.innerWidth < ROOM_FOR_SETTINGS_PX) setSide("ls-settings", false);
  if (window.innerWidth < NARROW_PX) setSide("ls-side", false);
  // Made narrow, or turned upright, the page would lie under its sides.
  window.matchMedia(`(max-width: ${NARROW_PX - 1}px)`).addEventListener("change", (event) => {
    if (event.matches) for (const name of ["ls-side", "ls-settings"]) setSide(name, false);
  });
  applyTheme();
  nameToggles();
  namePreset(400);
}
begin(400);

// Gradio's own list has no words for nothing chosen.
function namePreset(triesLeft) {
  const input = document.querySelector("#ls-preset input");
  if (input) input.placeholder = "none chosen";
  else if (triesLeft > 0) setTimeout(namePreset, 50, triesLeft - 1);
}
