"""What a page was doing when a browser test failed: the report of the failure says it.

Contract: `watch` before a context opens its first page; `account` then tells of each page what it
shows, what it waits for, and the last of what it was asked and told. It changes nothing on a page.
"""

from __future__ import annotations

from typing import Any

# The page's own record: input, commands to the server, news from it, requests without an answer.
RECORD = """
(() => {
  const MOST = 60;
  const lines = [];
  const open = new Set();
  const note = (...words) => {
    lines.push(`${(performance.now() / 1000).toFixed(2)} s ${words.join(" ")}`.slice(0, 300));
    if (lines.length > MOST) lines.shift();
  };
  const nameOf = (one) => `${one?.tagName ?? "nothing"} ${one?.closest?.("[id]")?.id ?? ""} ${
    one?.className?.baseVal ?? one?.className ?? ""}`;
  for (const kind of ["click", "submit"])
    addEventListener(kind, (event) => note(kind, nameOf(event.target)), true);
  addEventListener("keydown", (event) => {
    if (event.key.length > 1) note("key", event.key, nameOf(event.target));
  }, true);
  for (const kind of ["ls-command", "ls-signal", "ls-phase"]) {
    const told = (one) => typeof one === "string" ? one : JSON.stringify(one);
    addEventListener(kind, (event) => note(kind, told(event.detail)), true);
  }
  addEventListener("error", (event) => note("error", event.message), true);
  addEventListener("unhandledrejection", (event) => note("rejected", event.reason));
  for (const kind of ["log", "info", "warn", "error"]) {
    const native = console[kind];
    console[kind] = (...words) => { note(`console.${kind}`, ...words); native(...words); };
  }
  const native = window.fetch;
  window.fetch = async (...asked) => {
    const { pathname } = new URL(asked[0].url ?? asked[0], location.href);
    const one = { since: performance.now(), pathname };
    if (pathname !== "/live") note("fetch", pathname);
    open.add(one);
    try {
      const answer = await native.apply(window, asked);
      if (!answer.ok) note("answered", answer.status, pathname);
      return answer;
    } finally {
      open.delete(one);
    }
  };
  window.lsWitness = { lines, open };
})();
"""

STATE = """async () => {
  const frame = new Promise((done) => requestAnimationFrame(() => done("drawn")));
  const none = new Promise((done) => setTimeout(done, 1000, "not drawn within a second"));
  const text = (selector) => (document.querySelector(selector)?.innerText ?? "absent").slice(-1200);
  const classes = (id) => document.getElementById(id)?.className ?? "absent";
  const moving = (one) => `${one.constructor.name} ${one.transitionProperty ?? one.animationName
    } ${one.playState} at ${one.currentTime} of ${one.effect?.target?.className}`;
  const known = window.lsWitness ?? { lines: ["not watched"], open: [] };
  const waits = [...known.open].map((one) =>
    `${one.pathname} for ${Math.round(performance.now() - one.since)} ms`);
  return {
    address: location.href,
    size: `${innerWidth} x ${innerHeight}, ${document.visibilityState}, focus ${
      document.activeElement?.id || document.activeElement?.tagName}`,
    frames: await Promise.race([frame, none]),
    phase: document.querySelector("#ls-strip")?.dataset.phase,
    bridges: window.lsBridges,
    signal: window.lsSignal,
    sides: `${classes("ls-side")} | ${classes("ls-settings")}`,
    dialogs: [...document.querySelectorAll("dialog[open]")].map((one) => one.innerText),
    moving: document.getAnimations().map(moving),
    "requests without an answer": waits,
    strip: text("#ls-strip"),
    chat: text("#ls-chat"),
    box: document.querySelector("#ls-message textarea")?.value?.slice(0, 300),
    toasts: text("#ls-toasts"),
    "last events": "\\n  " + known.lines.join("\\n  "),
  };
}"""


def watch(context: Any) -> None:
    """Let every page of this context keep its record."""
    context.add_init_script(RECORD)


def account(browser: Any) -> str:
    """What all open pages of the browser are doing."""
    pages = [page for context in browser.contexts for page in context.pages]
    return "\n\n".join(_account_of(page) for page in pages) or "no page is open"


def _account_of(page: Any) -> str:
    try:
        state = page.evaluate(STATE)
    except Exception as error:  # whatever keeps a page from answering is an account of it too
        return f"{page.url}: {error}"
    return "\n".join(f"{name}: {value}" for name, value in state.items())


def account_of_site(site: Any) -> str:
    """What the server of a page is doing."""
    if site.service is None:
        return "no service"
    status = site.service.status()
    lines = [f"phase {status.phase} for {status.seconds:.1f} s: {status.phrase}"]
    lines += [f"current reply: {site.service.current}", f"waiting: {status.num_waiting}"]
    if site.backend is not None:
        asked = [one.messages[-1].content[:80] for one in site.backend.requests[-5:]]
        script = site.backend.script
        lines += [f"asked last: {asked}", f"rounds: {site.backend.num_rounds}"]
        lines += [f"fails at round {script.fail_at_round} with {script.fault!r}"]
    return "\n".join(lines)
