"""The frame of the live strip and of the live rounds, as HTML that static/live.js fills.

Contract: constant text; every figure is a dash until the page asked for it.

Not here: the figures (live).
"""

from __future__ import annotations

import html

from localspec.web.live import DASH

# id, label, what it means in plain words
TILES = (
    (
        "speed",
        "Tokens / s",
        "Tokens written each second, reading the prompt not counted. A token is a short piece of "
        "a word.",
    ),
    (
        "speedup",
        "Speedup",
        "How many times faster than the same model writes here without drafting, measured on "
        "this machine. A dash until it is measured.",
    ),
    (
        "acceptance",
        "Accepted",
        "Acceptance rate: of the tokens the drafter guessed, the share the model agreed with. "
        "0.7 and more is excellent, below 0.5 drafting hardly pays.",
    ),
    (
        "gamma",
        "Draft length γ",
        "Tokens guessed ahead in the latest round, and on average over this reply. It adapts to "
        "the temperature and the text.",
    ),
    (
        "drafter",
        "Drafter",
        "Who guesses ahead: a small draft model, n-grams looked up in this chat, a compressed "
        "copy of the model itself, or nobody (off).",
    ),
    (
        "memory",
        "Memory",
        "Memory held by the model, its drafters and the context they remember.",
    ),
)


def _tile(name: str, label: str, help_text: str) -> str:
    return (
        f'<div class="ls-tile" tabindex="0" aria-describedby="ls-help-{name}">'
        f'<span class="ls-label">{label}</span>'
        f'<span class="ls-value" id="ls-{name}">{DASH}</span>'
        f'<span class="ls-sub" id="ls-{name}-sub"></span>'
        f'<span class="ls-help" role="tooltip" id="ls-help-{name}">{html.escape(help_text)}</span>'
        "</div>"
    )


STRIP_HTML = f"""
<section id="ls-strip" aria-label="Live figures" data-phase="connecting">
  <div class="ls-tile ls-phase" tabindex="0" aria-describedby="ls-help-phase">
    <span class="ls-label"><i class="ls-dot" aria-hidden="true"></i>Now</span>
    <span class="ls-value" id="ls-phase" role="status">Connecting</span>
    <span class="ls-sub" id="ls-clock"></span>
    <span class="ls-help" role="tooltip" id="ls-help-phase">What localspec is doing at this moment,
      and for how long. A slow model and a stuck one look different here.</span>
  </div>
  {"".join(_tile(*tile) for tile in TILES)}
  <div class="ls-why">
    <p id="ls-reason" class="ls-reason">Speculation: {DASH}</p>
    <p id="ls-off" class="ls-off" hidden><b class="ls-off-chip">Off</b>
      <code id="ls-off-code"></code> <span id="ls-off-remedy"></span></p>
    <figure class="ls-spark" id="ls-spark" hidden>
      <svg viewBox="0 0 160 28" preserveAspectRatio="none" role="img"
        aria-label="Tokens per second over this reply"><polyline id="ls-spark-line"/></svg>
      <figcaption id="ls-spark-label"></figcaption>
    </figure>
  </div>
  <p id="ls-hardware" class="ls-hardware" hidden></p>
</section>
<div id="ls-notices" role="alert"></div>
"""

ROUNDS_HTML = """
<section id="ls-rounds" aria-label="Drafted tokens of the latest reply">
  <p class="ls-legend">The latest reply, one block for each check by the model:
    <span class="ls-round ls-r3">underlined twice: all but its last token was drafted</span>
    <span class="ls-round ls-r2">underlined: half or more drafted</span>
    <span class="ls-round ls-r1">dotted: some drafted</span>
    <span class="ls-round ls-r0">plain: written by the model itself</span>
  </p>
  <p id="ls-rounds-text"></p>
  <p class="ls-legend" id="ls-rounds-sum"></p>
</section>
"""
