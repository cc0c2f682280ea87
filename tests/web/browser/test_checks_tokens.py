"""Check 11: the token view shows the reply's own text, and the log's own counts."""

from __future__ import annotations

from typing import Any

import pytest

from tests.kit.fakes import REPLY
from tests.web.browser.checks import ask, newest
from tests.web.browser.visits import WAIT_MS, Visit
from tests.web.site import Site

pytestmark = pytest.mark.slow

SHOWN = """() => {
  const box = document.querySelector('#ls-tv-text');
  const runs = [...box.querySelectorAll('.ls-run')];
  const look = (one) => {
    const style = getComputedStyle(one);
    return [style.textDecorationLine, style.textDecorationStyle, style.borderBottomStyle,
            style.borderBottomWidth, style.fontWeight, style.fontStyle].join('|');
  };
  const kind = (one) => [...one.classList].find((name) => name.startsWith('ls-k-'));
  const looks = {};
  for (const run of runs) looks[kind(run)] = look(run);
  return {text: runs.map((one) => one.textContent).join(''), looks,
          missed: box.querySelectorAll('.ls-missed').length,
          colours: new Set(runs.map((one) => getComputedStyle(one).backgroundColor)).size,
          rounds: box.querySelectorAll('.ls-first').length};
}"""


def open_view(visit: Visit) -> dict[str, Any]:
    visit.page.locator("#ls-chat a.ls-tokens").last.click()
    visit.page.wait_for_selector("#ls-tv-text .ls-run", timeout=WAIT_MS)
    return dict(visit.page.evaluate(SHOWN))


def test_check_11_the_runs_are_the_reply_the_counts_the_logs_and_a_legend_names_every_kind(
    page: Visit, site: Site
) -> None:
    ask(page, "show the tokens")
    shown, row = open_view(page), newest(site)
    assert shown["text"] == REPLY == site.store.branch(row["message_id"])[-1].text
    data = page.page.evaluate(
        "async (id) => (await fetch(`/tokens?message=${id}`)).json()", row["message_id"]
    )
    for name in ("num_draft_tokens", "num_accepted_tokens", "num_output_tokens"):
        assert data[name] == row[name]
    tokens = [token for _, inside in data["runs"] for token in inside]
    assert len(tokens) == row["num_output_tokens"]
    assert sum(token[0] == "draft" for token in tokens) == row["num_accepted_tokens"]
    assert sum(one["drafted"] for one in data["rounds"]) == row["num_draft_tokens"]
    assert shown["rounds"] == row["num_steps"] - 1, "a border between every two rounds"
    assert shown["missed"] == sum(len(one["missed"]) for one in data["rounds"]) > 0
    kinds = {name.removeprefix("ls-k-") for name in shown["looks"]}
    assert {"draft", "corrected", "bonus"} <= kinds and shown["colours"] >= 3
    assert len(set(shown["looks"].values())) == len(kinds), "each differs by more than its colour"
    legend = page.text("#ls-tv-body").lower()
    assert all(name in legend for name in ("small model", "corrected", "bonus"))
