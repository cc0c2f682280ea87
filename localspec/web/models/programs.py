"""The part of the Models tab for other programs: the address, the keys, and what a key was.

Contract: pure HTML; everything that is not ours is escaped. The address is the one by which the
browser came, so static/models.js writes it. A key stands in the answer to the click that made it
and nowhere else.
"""

from __future__ import annotations

import html
from collections.abc import Sequence
from dataclasses import dataclass

from localspec.record.api_keys import MOST_CHARACTERS, ApiKey
from localspec.units import DASH
from localspec.web.models.card import button

REVOKE = "Programs that use the key {name!r} are refused from then on. Revoke it?"


@dataclass(frozen=True)
class MadeKey:
    """A key that was just made."""

    name: str
    key: str

    def __str__(self) -> str:
        return f"The key {self.name!r}, shown this once:"


def programs_html(keys: Sequence[ApiKey], model: str | None) -> str:
    """model: the name of what is loaded."""
    rows = "".join(map(_key_html, keys))
    listed = f'<ul class="ls-mrows">{rows}</ul>' if rows else "<p>There is no key yet.</p>"
    return (
        '<details data-key="programs"><summary>Other programs</summary>'
        "<p>Programs that speak OpenAI's or Anthropic's interface can use the loaded model. Give a "
        "program these and a key. Its conversations are in the log, but not in the list of chats."
        '</p><dl class="ls-mgive"><dt>Address</dt><dd>'
        '<code data-origin="/v1"></code></dd><dt>For Anthropic\'s clients</dt><dd>'
        '<code data-origin=""></code></dd>'
        f"<dt>Model</dt><dd><code>{html.escape(model or DASH)}</code></dd></dl>"
        f"{_form_html()}{listed}</details>"
    )


def _form_html() -> str:
    return (
        '<form class="ls-mfolder" data-act="make-key"><label for="ls-mkey">A name to tell the new '
        f'key by</label><span><input id="ls-mkey" data-key="make-key" name="value" type="text" '
        f'required maxlength="{MOST_CHARACTERS}" autocomplete="off" spellcheck="false">'
        '<button type="submit" class="ls-mbtn">Make a key</button></span></form>'
    )


def _key_html(key: ApiKey) -> str:
    revoke = button("Revoke", "revoke-key", key.name, confirm=REVOKE.format(name=key.name))
    used = "never used" if key.last_used_at_utc is None else f"used {_minute(key.last_used_at_utc)}"
    return (
        f'<li><div class="ls-mline"><span class="ls-mname"><b>{html.escape(key.name)}</b> '
        f'<span class="ls-mfine">made {_minute(key.created_at_utc)} · {used}</span></span>'
        f"<span>{revoke}</span></div></li>"
    )


def _minute(at_utc: str) -> str:
    return f"{html.escape(at_utc[:16].replace('T', ' '))} UTC"
