"""Writes the model card of a pair: its data, its figures and its limits.

Contract: `card` is Markdown made of facts that the run measured. It adds no figure of its own.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from tools.demo_pair.evaluate import PairReport

NUM_SHOWN_ANSWERS = 10
SOURCE_TITLES: dict[str, str] = {
    "self_dialogue": "Self-dialogue corpus (Edinburgh)", "topicalchat": "Topical-Chat (Amazon)",
    "synthpersona": "Synthetic-Persona-Chat (Google)", "opendatasets": "Small open dialogue sets",
    "chatterbot": "ChatterBot corpus", "tldr": "tldr-pages",
    "wordnet_defs": "Definitions from WordNet",
    "factbook": "The World Factbook", "asp_stories": "African Storybook",
    "pb_stories": "Pratham Books StoryWeaver",
    "fairytale_stories": "FairytaleQA, stories", "fairytale_qa": "FairytaleQA, questions",
    "pd_folktales": "Folk tales in the public domain", "gsm8k_train": "GSM8K, training part",
    "mbpp_train": "MBPP, training part", "thealgorithms_fn": "TheAlgorithms/Python, functions",
}  # fmt: skip


@dataclass(frozen=True)
class TrainReport:
    """What a run made: sizes, tokens seen and the figures of the pair."""

    num_target_parameters: int
    num_draft_parameters: int
    num_target_tokens: int
    num_draft_tokens: int
    pair: PairReport
    out_dir: Path


def card(made: TrainReport, context_length: int, licences: Mapping[str, str], command: str) -> str:
    """licences: by source."""
    pair = made.pair
    losses = (f"- {name}: {loss:.2f} nats per token" for name, loss in pair.held_out_loss.items())
    heats = (
        f"| {heat:g} | {pair.acceptance[heat]:.3f} | {pair.repetition[heat]:.3f} |"
        for heat in sorted(pair.acceptance)
    )
    sources = (
        f"| {SOURCE_TITLES.get(source, source)} | {licence} |"
        for source, licence in sorted(licences.items())
    )
    shown = pair.answers[:: max(1, len(pair.answers) // NUM_SHOWN_ANSWERS)][:NUM_SHOWN_ANSWERS]
    answers = (f"**{question}**\n\n{_quoted(answer)}" for question, answer in shown)
    return CARD.format(
        target_parameters=_millions(made.num_target_parameters),
        draft_parameters=_millions(made.num_draft_parameters),
        target_tokens=_millions(made.num_target_tokens),
        draft_tokens=_millions(made.num_draft_tokens),
        context_length=context_length,
        losses="\n".join(losses),
        heats="\n".join(heats),
        sources="\n".join(sources),
        num_shown=len(shown),
        num_answers=len(pair.answers),
        answers="\n\n".join(answers),
        command=command,
    )


def _millions(count: int) -> str:
    return f"{count / 1e6:.1f} M"


def _quoted(answer: str) -> str:
    return "\n".join(f"> {line}".rstrip() for line in (answer or "(no text)").split("\n"))


CARD = """# The demo pair

`target/` is a small chat model, `draft/` a smaller one that predicts it. They ship
with localspec so that speculative decoding can be seen at work without a GPU, a network
or a download. They are made to show speed; for useful answers load a larger model.

| | target | draft |
|---|---|---|
| parameters | {target_parameters} | {draft_parameters} |
| training tokens | {target_tokens} | {draft_tokens} |

Both are Llama-shaped (RMSNorm, rotary positions, SwiGLU, tied embeddings), bf16, with
the same byte-level BPE tokenizer and the ChatML format. Context: {context_length} positions
allowed, 2,304 trained.

## Figures

Held-out loss (rows kept apart; generated dialogues of another seed):

{losses}

Acceptance of the draft on the target's own answers to held-out prompts (the mean over
positions of sum min(p, q); at temperature 0 the share of equal first choices), and the
share of 4-grams that an answer repeats:

| temperature | acceptance | repeated 4-grams |
|---|---|---|
{heats}

## What it can and cannot do

It holds short conversations in whole sentences, explains the app's own terms (draft,
acceptance, gamma, tokens per second), and was trained on small sums, capitals, lists,
steps, JSON and CSV forms, small Python functions, rewriting, short stories and e-mails.
It knows almost nothing else. It often gets sums wrong, copies inexactly, summarises by
quoting, does not translate, and can loop on long foreign prompts. Do not rely on
anything it says.

## Data

About half of the tokens are dialogues generated from templates in
`tools/demo_pair/dialogues/`. The rest comes from openly licensed text (credits in
NOTICE):

| source | licence |
|---|---|
{sources}

## {num_shown} of the {num_answers} answers it was judged by

Every third one, greedy, not chosen by quality.

{answers}

## How it was made

```sh
{command}
```
"""
