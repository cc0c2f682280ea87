// Editing a message where it stands. What follows it is dimmed: a message of the person's is answered
// anew, as another version; a reply is kept as it was rewritten.
import { command, make, messageBox, onNews } from "./ui.js";

let editor = null; // {message, row, box}

export function stopEditing() {
  if (editor === null) return false;
  editor.row.classList.remove("ls-edited");
  editor.box.remove();
  editor = null;
  messageBox()?.focus();
  return true;
}

// The page would reload, and the text be lost.
window.addEventListener("ls-restarted", (event) => { if (editor !== null) event.preventDefault(); });

function save(decided = {}) {
  const text = editor.box.querySelector("textarea").value;
  if (text.trim()) command({ do: "rewrite", message: editor.message, text, ...decided });
}

onNews("edit", ({ message, role, text, files }) => {
  stopEditing();
  const row = document.querySelector(`#ls-written a.ls-edit.ls-m-${message}`)?.closest(".message-row");
  if (!row) return;
  const isOwn = role === "user";
  const area = make("textarea", { value: text, ariaLabel: isOwn ? "Edit your message" : "Edit the reply" });
  const fit = () => { area.style.height = "auto"; area.style.height = `${area.scrollHeight + 2}px`; };
  area.addEventListener("input", fit);
  area.addEventListener("keydown", (event) => {
    if (event.key !== "Enter" || !(event.ctrlKey || event.metaKey || (isOwn && !event.shiftKey)) || event.isComposing) return;
    event.preventDefault();
    save();
  });
  const said = files.length ? `${files.join(", ")} stay attached. ` : "";
  const box = make(
    "div",
    { className: "ls-editor" },
    area,
    make("small", { textContent: `${said}The original is kept as an earlier version.` }),
    make("button", { type: "button", textContent: "Cancel", onclick: stopEditing }),
    make("button", { type: "button", className: "ls-main", textContent: isOwn ? "Send" : "Save", onclick: () => save() }),
  );
  editor = { message, row, box };
  row.classList.add("ls-edited");
  row.append(box);
  fit();
  area.focus();
  box.scrollIntoView({ block: "nearest" });
});

// What the person decides about a context that is too small is decided for this message.
window.addEventListener("ls-decide", (event) => {
  if (editor === null) return;
  event.stopImmediatePropagation();
  save(event.detail);
}, { capture: true });
for (const name of ["moved", "sent", "rewritten"]) onNews(name, stopEditing);
