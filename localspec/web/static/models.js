// The Models tab: shows the parts that the server makes, asks again while the tab is seen, and
// sends what a button asks. Only parts whose text changed are put in place anew, and whatever had
// the focus or was open has and is it again.

import { askModels, byId, make } from './ui.js';

const EVERY_MS = 1000;
const shown = new Map();
let timer = 0;
let looking = null; // the look under way

const root = () => byId('ls-models');
const isSeen = () => root() !== null && root().offsetParent !== null && !document.hidden;

function say(text, isBad = false, key = '') {
  const place = byId('ls-models-said');
  if (!place) return;
  place.textContent = text || '';
  place.classList.toggle('ls-mfault', isBad && Boolean(text));
  if (!key) return;
  const code = make('code', { textContent: key });
  place.append(' ', code, ' ', copyButton(code));
}

// Only a page of this very machine may use the clipboard; elsewhere the text is selected.
function copyButton(code) {
  const onclick = async ({ target }) => {
    if (!navigator.clipboard) return window.getSelection().selectAllChildren(code);
    await navigator.clipboard.writeText(code.textContent);
    target.textContent = 'Copied';
  };
  return make('button', { type: 'button', className: 'ls-mbtn', textContent: 'Copy', onclick });
}

function place(section, text) {
  const held = section.contains(document.activeElement) ? document.activeElement : null;
  const open = [...section.querySelectorAll('details[open]')].map((each) => each.dataset.key);
  section.innerHTML = text;
  for (const each of section.querySelectorAll('[data-grow]')) each.style.flexGrow = each.dataset.grow;
  for (const each of section.querySelectorAll('[data-origin]')) {
    each.textContent = location.origin + each.dataset.origin;
  }
  for (const each of section.querySelectorAll('details')) {
    each.open = open.includes(each.dataset.key);
  }
  if (held === null) return;
  const again = section.querySelector(`[data-key="${CSS.escape(held.dataset.key)}"]`);
  if (again && held.tagName === 'INPUT') again.value = held.value;
  section.tabIndex = -1; // so that it takes the focus while nothing in it does
  (again ?? section.querySelector('button, summary') ?? section).focus({ preventScroll: true });
}

function show(parts) {
  for (const section of root().querySelectorAll('[data-part]')) {
    const text = parts[section.dataset.part] || '';
    const isChosen = section.contains(document.activeElement)
      && document.activeElement.tagName === 'SELECT' && !document.activeElement.dataset.isChosen;
    // A part that Gradio made anew is empty again, whatever was shown before.
    if ((shown.get(section.dataset.part) === text && section.childNodes.length) || isChosen) continue;
    shown.set(section.dataset.part, text);
    place(section, text);
  }
  root().setAttribute('aria-busy', 'false');
}

const look = () => { looking ??= askAndShow().finally(() => { looking = null; }); return looking; };

async function askAndShow() {
  if (!isSeen()) return;
  const { parts, error } = await askModels();
  if (error) say(error, true);
  else if (root()) show(parts);
}

// The answer stands below the part that asks. The style sheet keeps it in sight where that part is
// a long list; a form makes room for it.
async function act(said, asking) {
  const part = asking.closest('[data-part]');
  say('');
  part?.after(byId('ls-models-said'));
  root().setAttribute('aria-busy', 'true');
  const { error, message, key } = await askModels(said);
  say(error || message, Boolean(error), key);
  await looking; // it may have begun before the answer
  await look();
  if (asking.form) part?.scrollIntoView({ block: 'nearest' });
}

// A button asks once until there is an answer. It is not disabled meanwhile: that takes the focus.
async function actBy(button, said) {
  if (button.ariaDisabled) return;
  button.ariaDisabled = 'true';
  await act(said, button).finally(() => { button.ariaDisabled = null; });
}

document.addEventListener('click', (event) => {
  const button = event.target.closest('#ls-models button[data-act]');
  if (!button) return;
  const said = { act: button.dataset.act, id: button.dataset.id || '' };
  if (button.dataset.anyway) said.anyway = true;
  if (button.dataset.drafter) said.drafter = button.dataset.drafter;
  if (button.dataset.confirm && !window.confirm(button.dataset.confirm)) return;
  actBy(button, said);
});

document.addEventListener('change', (event) => {
  const choice = event.target.closest('#ls-models select[data-act]');
  if (!choice) return;
  choice.dataset.isChosen = '1'; // it may be made anew now
  act({ act: choice.dataset.act, value: Number(choice.value) }, choice);
});

document.addEventListener('submit', (event) => {
  const form = event.target.closest('#ls-models form[data-act]');
  if (!form) return;
  event.preventDefault();
  const button = form.querySelector('[type=submit]');
  const label = button.textContent;
  const asked = actBy(button, { act: form.dataset.act, ...Object.fromEntries(new FormData(form)) });
  if (form.dataset.act === 'search') button.textContent = 'Asking …';
  asked.finally(() => { button.textContent = label; });
  if (form.dataset.act === 'make-key') form.reset();
}, true);

window.lsModels = () => {
  requestAnimationFrame(look);
  if (!timer) timer = setInterval(look, EVERY_MS);
};
window.lsModels();
