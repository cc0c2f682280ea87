// A menu under a button: by pointer, arrow keys and Escape. One is open at a time.
import { byId, make } from "./ui.js";

let leaveMenu = () => {};

// items: [label, react, small, className] with a small text behind the label or none.
export function showMenu(button, label, items) {
  closeMenu();
  const made = items.map(([text, react, small, className = ""]) =>
    make("button", { type: "button", role: "menuitem", className, onclick: () => { leaveMenu(); react(); } },
      text, ...(small ? [make("small", { textContent: small })] : [])));
  const menu = make("div", { id: "ls-menu", role: "menu", ariaLabel: label }, ...made);
  menu.addEventListener("keydown", (event) => {
    const place = made.indexOf(document.activeElement);
    if (event.key === "ArrowDown") made[(place + 1) % made.length].focus();
    else if (event.key === "ArrowUp") made[(place + made.length - 1) % made.length].focus();
    else if (event.key === "Home") made[0].focus();
    else if (event.key === "End") made.at(-1).focus();
    else if (event.key === "Tab") { closeMenu(); button.focus(); return; } // and on from there
    else return;
    event.preventDefault();
    event.stopPropagation();
  });
  leaveMenu = () => { closeMenu(); button.focus(); };
  button.setAttribute("aria-expanded", "true");
  document.querySelector("main").append(menu); // a landmark
  const place = button.getBoundingClientRect();
  menu.style.left = `${Math.max(8, Math.min(place.left, window.innerWidth - menu.offsetWidth - 8))}px`;
  menu.style.top = `${Math.max(8, Math.min(place.bottom + 4, window.innerHeight - menu.offsetHeight - 8))}px`;
  made[0].focus();
  setTimeout(() => { if (menu.isConnected) document.addEventListener("click", closeMenu); });
}

function closeMenu() {
  byId("ls-menu")?.remove();
  for (const one of document.querySelectorAll('[aria-haspopup="menu"][aria-expanded="true"]')) one.setAttribute("aria-expanded", "false");
  document.removeEventListener("click", closeMenu); // else it would close the next one as it opens
}

// Wherever the focus is, and before anything else that Escape would end.
document.addEventListener("keydown", (event) => {
  if (event.key !== "Escape" || !byId("ls-menu")) return;
  event.preventDefault();
  event.stopPropagation();
  leaveMenu();
}, { capture: true });
