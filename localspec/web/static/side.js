// Both sides of the page: the list of conversations, the theme, what is open.
import { byPerson } from "./address.js";
import { showMenu } from "./menu.js";
import { ask, askForLine, byId, command, download, inWords, keepFocus, make, onNews, post, question, toast, whenDrawn } from "./ui.js";

const SEARCH_MS = 180;
export const NARROW_PX = 769; // where less is there, Gradio lays its sides over the page
const ROOM_FOR_SETTINGS_PX = 1400;
const KEPT = "ls-settings"; // whether they were left open, over a reload

const rowOf = (element) => element.closest?.("#ls-history .ls-row");
const handleOf = (row) => Number(row.dataset.handle);
const titleOf = (row) => row.querySelector(".ls-title").textContent;

document.addEventListener("click", (event) => {
  const target = event.target;
  const row = rowOf(target);
  const folder = target.closest?.("#ls-history .ls-folder");
  if (folder && !row && target.closest(".ls-more")) showFolderMenu(folder, target.closest(".ls-more"));
  else if (folder && target.closest("summary")) {
    command({ do: "fold", folder: Number(folder.dataset.folder), is_collapsed: folder.firstElementChild.open });
  } else if (target.closest?.("#ls-new-folder")) newFolder(null);
  else if (row && target.closest(".ls-more")) menuOf(row, target.closest(".ls-more"));
  else if (row && target.closest(".ls-open")) {
    command({ do: "open", handle: handleOf(row) });
    if (window.innerWidth < NARROW_PX) setSide("ls-side", false);
  } else if (target.closest?.("#ls-new") && window.innerWidth < NARROW_PX) setSide("ls-side", false);
  else if (target.closest?.("#ls-import")) byId("ls-import-file")?.click();
  else if (target.closest?.("#ls-theme")) nextTheme();
});

// The menus of a conversation and of a folder

function menuOf(row, button) {
  const isPinned = row.dataset.pinned === "1";
  const handle = handleOf(row);
  const title = titleOf(row);
  showMenu(button, `More: ${title}`, [
    ["Rename", async () => {
      const wanted = await askForLine("Rename this chat", "Title", title, "Rename");
      if (wanted && wanted !== title) command({ do: "rename", handle, title: wanted });
    }],
    [isPinned ? "Unpin" : "Pin to the top", () => command({ do: "pin", handle, is_pinned: !isPinned })],
    ["Move to a folder", () => command({ do: "folders", handle })],
    ["Duplicate", () => { byPerson(); command({ do: "duplicate", handle }); }],
    ["Export", () => exportChat(handle)],
    ["When the context is full", () => command({ do: "when_full", handle })],
    ["Delete", () => command({ do: "delete", handle }), "", "ls-ends-it"],
  ]);
}

function showFolderMenu(section, button) {
  const folder = Number(section.dataset.folder);
  const name = section.querySelector("summary").textContent;
  showMenu(button, `More: folder ${name}`, [
    ["Rename", async () => {
      const wanted = await askForLine("Rename this folder", "Name", name, "Rename");
      if (wanted && wanted !== name) command({ do: "rename_folder", folder, name: wanted });
    }],
    ["Delete, keep its chats", () => command({ do: "delete_folder", folder })],
  ]);
}

async function newFolder(handle) {
  const name = await askForLine("New folder", "Name", "", "Create");
  if (name) command({ do: "new_folder", name, handle });
}

onNews("folders", async ({ handle, folders }) => {
  const choices = folders.map(([folder, name]) => [name, { folder }]);
  const body = make("p", { textContent: folders.length ? "Choose a folder." : "There is no folder yet." });
  const chosen = await question({
    title: "Move to a folder",
    body,
    choices: [["Cancel", null], ...choices, ["No folder", { folder: null }], ["New folder", "new", true]],
  });
  if (chosen === "new") await newFolder(handle);
  else if (chosen) command({ do: "place", handle, folder: chosen.folder });
});

const WHEN_FULL = [["Ask", "ask"], ["Leave out the oldest", "roll"], ["Stop", "stop"]];

onNews("when_full", async ({ handle, value }) => {
  const chosen = await question({
    title: "When the context is full: ask, leave out the oldest messages, or stop?",
    body: make("p", { textContent: "Messages that are left out stay in the chat. This chat keeps what you choose." }),
    choices: [["Cancel", null], ...WHEN_FULL.map(([label, name]) => [name === value ? `${label} (now)` : label, name, name === value])],
  });
  if (chosen && chosen !== value) command({ do: "when_full", handle, value: chosen });
});

async function exportChat(handle) {
  const format = await question({
    title: "Export this chat",
    body: make("p", { textContent: "JSONL has everything and can be imported again; Markdown is for reading; CSV: speed figures of the replies written here; SQLite is the database." }),
    choices: [["Cancel", null], ["Markdown", "markdown", true], ["JSONL", "jsonl"], ["CSV", "csv"], ["SQLite", "sqlite"]],
  });
  if (format) download(`/export?scope=conversation&conversation=${handle}&format=${format}`);
}

onNews("deleted", ({ handle, title }) => {
  toast(`Deleted “${title}”.`, "Undo", () => command({ do: "restore", handle }), `chat ${handle}`);
});

// The list is drawn anew, mostly by making each row another chat's: the focus stays with its chat or
// folder, else where it is, and goes above the list where it would be lost.
function placeInList(one) {
  const { handle, folder } = one.closest("[data-handle], [data-folder]")?.dataset ?? {};
  return handle ? `[data-handle="${handle}"] .${one.className}` : folder ? `[data-folder="${folder}"] summary` : "";
}

function focusAgain(lost, place) {
  const same = place && byId("ls-history").querySelector(place);
  if (same || document.activeElement === document.body) (same || byId("ls-new")).focus();
}

// Search and import

// Numbered, for one may arrive after a later one.
let searchTimer = 0, numSearches = 0;
const search = () =>
  command({ do: "search", words: byId("ls-search")?.value ?? "", number: ++numSearches });
document.addEventListener("input", (event) => {
  if (event.target.id !== "ls-search") return;
  clearTimeout(searchTimer);
  searchTimer = setTimeout(search, SEARCH_MS);
});

window.addEventListener("ls-list", search);

const MAX_IMPORT_BYTES = 64_000_000; // as chat/importing/file.py, which checks again
document.addEventListener("change", async (event) => {
  if (event.target.id !== "ls-import-file") return;
  const [file] = event.target.files;
  if (!file) return;
  if (file.size > MAX_IMPORT_BYTES) toast(`${file.name} is ${inWords(file.size)}, but at most ${inWords(MAX_IMPORT_BYTES)} can be imported at once. Unpack a zip and choose its conversations.json, or export fewer chats at once.`);
  else await takeIn(file);
  event.target.value = "";
});

async function takeIn(file) {
  const told = await ask("/import", post(file, "application/octet-stream"),
    "localspec refused this file, so nothing was imported. Reload the page and choose it again.",
    "localspec does not answer, so nothing was imported. Is it still running?");
  if (told.error) return toast(told.error);
  const chats = told.imported === 1 ? "One chat was imported." : `${told.imported} chats were imported.`;
  toast(`${chats} ${told.left_out}`.trim());
  byPerson();
  command({ do: "open", handle: told.last });
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

let isBegun = false;

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
    if (name === "ls-settings" && isBegun) localStorage.setItem(KEPT, sideIsOpen(name) ? "open" : "");
  }
  isBegun = true;
}

whenDrawn(["ls-side", "ls-settings", "ls-history"], (side, settings, history) => {
  for (const each of [side, settings])
    new MutationObserver(nameToggles).observe(each, { attributes: true, attributeFilter: ["class"] });
  if (window.innerWidth >= ROOM_FOR_SETTINGS_PX && localStorage.getItem(KEPT)) setSide("ls-settings", true);
  // Narrow, or turned upright, the page would lie under its sides; they come back when it is wide.
  let closed = [];
  const fit = ({ matches: isNarrow }) => {
    if (isNarrow) closed = ["ls-side", "ls-settings"].filter(sideIsOpen);
    for (const name of closed) setSide(name, !isNarrow);
  };
  const narrow = window.matchMedia(`(max-width: ${NARROW_PX - 1}px)`);
  narrow.addEventListener("change", fit);
  if (narrow.matches) fit(narrow);
  keepFocus(history, focusAgain, placeInList);
  applyTheme();
  nameToggles();
});
