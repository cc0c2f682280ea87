// The address names the chat that is shown. A chat that a person opened is a step of the browser's
// history, so that Back leads to the one before, and shows the Chat tab; every other change only
// corrects the address.
import { command, onNews, toTab } from "./ui.js";

let isByPerson = false;

export function byPerson() {
  isByPerson = true;
  toTab("Chat");
}

// Called with the conversation's address whenever it changes (wiring.py). After Back it is right
// already, and the call may come when the person has chosen the next chat.
window.lsAddress = (url) => {
  if (location.pathname + location.search === url) return;
  history[isByPerson ? "pushState" : "replaceState"](null, "", url);
  isByPerson = false;
};

window.addEventListener("popstate", () => {
  const named = Number(new URLSearchParams(location.search).get("c"));
  isByPerson = false;
  toTab("Chat");
  command({ do: "open", handle: named > 0 ? named : null });
});

document.addEventListener("click", (event) => {
  if (event.target.closest?.("#ls-new, #ls-history .ls-open, a.ls-fork")) byPerson();
}, { capture: true });
onNews("sent", () => { isByPerson = false; });
