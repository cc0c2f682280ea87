"""Writes the model card of a pair: its data, its figures and its limits.

Contract: `write_card` writes one Markdown file from facts that the run measured. It adds no figure
of its own.
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
class CardFacts:
    """What the card states; all of it measured or set by the run."""

    num_target_parameters: int
    num_draft_parameters: int
    num_target_tokens: int
    num_draft_tokens: int
    context_length: int
    licences: Mapping[str, str]
    pair: PairReport
    command: str


def write_card(path: Path, facts: CardFacts) -> None:
    """Write the card."""
    made = f"## How it was made\n\n```sh\n{facts.command}\n```\n"
    parts = (
        heading(),
        sizes(facts),
        figures(facts.pair),
        abilities(),
        data(facts),
        answers(facts.pair),
        made,
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("\n".join(parts), encoding="utf-8")


def heading() -> str:
    """Say what this is."""
    return (
        "# The demo pair\n\n"
        "`target/` is a small chat model, `draft/` a one-layer model that predicts it. They ship\n"
        "with localspec so that speculative decoding can be seen at work without a GPU, a network\n"
        "or a download. They are made to show speed; for useful answers load a larger model.\n"
    )


def sizes(facts: CardFacts) -> str:
    """State sizes and tokens seen."""
    return (
        "| | target | draft |\n|---|---|---|\n"
        f"| parameters | {millions(facts.num_target_parameters)} "
        f"| {millions(facts.num_draft_parameters)} |\n"
        f"| training tokens | {millions(facts.num_target_tokens)} "
        f"| {millions(facts.num_draft_tokens)} |\n\n"
        "Both are Llama-shaped (RMSNorm, rotary positions, SwiGLU, tied embeddings), bf16, with\n"
        "the same byte-level BPE tokenizer and the ChatML format. Context: "
        f"{facts.context_length} positions\nallowed, 2,304 trained.\n"
    )


def millions(count: int) -> str:
    """Write a count in millions."""
    return f"{count / 1e6:.1f} M"


def figures(pair: PairReport) -> str:
    """State held-out losses, acceptance and repetition."""
    losses = "\n".join(
        f"- {name}: {loss:.2f} nats per token" for name, loss in pair.held_out_loss.items()
    )
    rows = "\n".join(
        f"| {heat:g} | {pair.acceptance[heat]:.3f} | {pair.repetition[heat]:.3f} |"
        for heat in sorted(pair.acceptance)
    )
    return (
        "## Figures\n\nHeld-out loss (rows kept apart; generated dialogues of another seed):\n\n"
        f"{losses}\n\n"
        "Acceptance of the draft on the target's own answers to held-out prompts (the mean over\n"
        "positions of sum min(p, q); at temperature 0 the share of equal first choices), and the\n"
        "share of 4-grams that an answer repeats:\n\n"
        f"| temperature | acceptance | repeated 4-grams |\n|---|---|---|\n{rows}\n"
    )


def abilities() -> str:
    """State what the pair is for and where it fails."""
    return (
        "## What it can and cannot do\n\n"
        "It holds short conversations in whole sentences, explains the app's own terms (draft,\n"
        "acceptance, gamma, tokens per second), and was trained on small sums, capitals, lists,\n"
        "steps, JSON and CSV forms, small Python functions, rewriting, short stories and e-mails.\n"
        "It knows almost nothing else. It often gets sums wrong, copies inexactly, summarises by\n"
        "quoting, does not translate, and can loop on long foreign prompts. Do not rely on\n"
        "anything it says.\n"
    )


def data(facts: CardFacts) -> str:
    """Credit the data, by source and licence."""
    rows = "\n".join(
        f"| {SOURCE_TITLES.get(source, source)} | {licence} |"
        for source, licence in sorted(facts.licences.items())
    )
    return (
        "## Data\n\nAbout half of the tokens are dialogues generated from templates in\n"
        "`tools/demo_pair/dialogues/`. The rest comes from openly licensed text (credits in\n"
        "NOTICE):\n\n"
        f"| source | licence |\n|---|---|\n{rows}\n"
    )


def answers(pair: PairReport) -> str:
    """Show every third of the judged answers, good or bad."""
    step = max(1, len(pair.answers) // NUM_SHOWN_ANSWERS)
    shown = pair.answers[::step][:NUM_SHOWN_ANSWERS]
    blocks = "\n\n".join(f"**{question}**\n\n{quoted(answer)}" for question, answer in shown)
    return (
        f"## {len(shown)} of the {len(pair.answers)} answers it was judged by\n\n"
        f"Every third one, greedy, not chosen by quality.\n\n{blocks}\n"
    )


def quoted(answer: str) -> str:
    """Quote an answer line by line."""
    return "\n".join(f"> {line}".rstrip() for line in (answer or "(no text)").split("\n"))
