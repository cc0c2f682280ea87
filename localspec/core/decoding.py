"""The types that the engine and the drafters share, and the protocols between them.

Frozen dataclasses, complete when built, and protocols. Imports nothing heavy (no torch, no gradio),
so that every wing may import it. Names carry their units; unknown is None, never 0.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Mapping
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal, NamedTuple, Protocol

from localspec.core.errors import RequestError
from localspec.core.leniency import Leniency
from localspec.core.off_code import OffCode
from localspec.core.thought import ReplyParts, ThoughtLimit

if TYPE_CHECKING:
    import torch

    from localspec.core.filling import Fill, Filling
    from localspec.core.grammar import Grammar

FinishReason = Literal["eos", "stop", "length", "cancelled", "error", "interrupted"]

TARGET = "target"  # provenance of a token the target chose itself
FORCED = "forced"  # and of one that ends a thought at its budget
OFF = "off"  # the name of plain decoding as an arm
AUTO = "auto"  # the name of the controller's free choice

COLDEST = 1e-40  # the lowest temperature above 0
LARGEST_INTEGER = 2**63 - 1  # that the log can hold
# Of the fields of SamplingParams, the smallest and the largest value.
RANGES: Mapping[str, tuple[float, float]] = {
    "temperature": (0, 5), "top_k": (0, 1_000_000), "top_p": (1e-6, 1), "min_p": (0, 1),
    "repetition_penalty": (0.1, 10), "presence_penalty": (-2, 2), "frequency_penalty": (-2, 2),
}  # fmt: skip


@dataclass(frozen=True)
class SamplingParams:
    """How the next token is drawn from the target's logits.

    temperature 0 is greedy. top_k 0, top_p 1, min_p 0 and repetition_penalty 1 mean "not used".
    presence_penalty, frequency_penalty: taken from the logit of a token of the reply, once and as
    often as it is there (OpenAI's); 0 is "not used".
    seed: fixes every choice of the turn; None: one is to be drawn before the turn begins.
    leniency: None is exact; a person chooses anything else, and the reply is labelled with it.
    Raises RequestError for a value outside its range.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    seed: int | None = None
    leniency: Leniency | None = None
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0

    def __post_init__(self) -> None:
        for name, (low, high) in RANGES.items():
            value = getattr(self, name)
            if not low <= value <= high:  # also refuses NaN
                told = f"{name} is {value}, but it must lie between {low} and {high}."
                raise RequestError(told, name)
        if 0.0 < self.temperature < COLDEST:
            raise RequestError(
                f"temperature is {self.temperature}, which is too small to divide by. Use 0 for "
                f"the likeliest token always, or at least {COLDEST}.",
                "temperature",
            )
        if self.seed is not None and abs(self.seed) > LARGEST_INTEGER:
            raise RequestError(f"seed is {self.seed}, but it must be smaller than 2^63.", "seed")


class Noise(Protocol):
    """The noise of one turn, which its seed fixes: [count, V] for the tokens at `count` places of
    the sequence from `position` on; and the same on another device."""

    def rows(self, position: int, count: int) -> torch.Tensor: ...

    def on(self, device: torch.device) -> Noise: ...


class Sequence:
    """The tokens of one turn: the rendered prompt, then everything decoded.

    The last token is the *root*: it is in no cache yet. `append` cuts at end-of-text and at
    max_tokens. The end-of-text id stays in `tokens` (the next turn's prompt repeats it) but is
    no output token. noise: what every choice of the turn is made with; greedy turns need none.
    num_logprobs: see backend.Request. prediction: tokens that may look like those to come, for the
    drafters that look texts up. grammar: what the reply is held to, None for any text. thought:
    with a budget, max_tokens are those after the thought. others: what shared its last forward."""

    def __init__(
        self,
        prompt: tuple[int, ...],
        sampling: SamplingParams,
        max_tokens: int,
        end_ids: frozenset[int],
        noise: Noise,
        num_logprobs: int | None = None,
        prediction: tuple[int, ...] = (),
        grammar: Grammar | None = None,
        thought: ThoughtLimit | None = None,
    ) -> None:
        assert prompt, "a sequence needs at least one prompt token"
        self.tokens = list(prompt)
        self.prompt_length = len(prompt)
        self.sampling = sampling
        self.max_tokens = max_tokens
        self.end_ids = end_ids
        self.noise = noise
        self.num_logprobs = num_logprobs
        self.prediction = prediction
        self.grammar = grammar
        self.finish_reason: FinishReason | None = None
        self.others = ALONE
        self.thought = thought
        self.parts = ReplyParts(self.prompt_length, max_tokens, thought)

    @property
    def reply(self) -> list[int]:
        """The tokens decoded so far."""
        return self.tokens[self.prompt_length :]

    def forced_after(self, text: SequenceOf[int] = ()) -> tuple[int, ...]:
        """Of the grammar, if there is one: what must follow the reply and the drafted `text`."""
        return () if self.grammar is None else self.grammar.forced([*self.reply, *text])

    @property
    def num_remaining(self) -> int:
        """Tokens this turn may still decode, in a thought with a budget those before its end."""
        return self.parts.end - len(self.tokens)

    def append(self, tokens: list[int]) -> list[int]:
        """Append `tokens` until the turn ends; returns those that are output."""
        kept: list[int] = []
        for token in tokens:
            self.tokens.append(token)
            if token in self.end_ids:
                self.finish_reason = "eos"
                return kept
            kept.append(token)
            self.parts.follow(self.tokens)
            if self.num_remaining <= 0:
                self.finish_reason = None if self.parts.has_budget else "length"
                return kept
        return kept


@dataclass(frozen=True)
class Proposal:
    """Draft tokens for one round: a chain or, by `parents`, a tree.

    tokens [n]: drafted ids. parents [n]: index of each token's parent, -1 = the root (the last
    accepted token); parents precede children. confidences [n]: the drafter's own probability
    that a token follows its parent, None if it has none. num_steps: how often the drafter ran
    to make it, 0 where a grammar forced all of it, None: once a token, as a chain does. makers
    [n]: the name of the drafter that each token comes from, where one works with others; empty:
    all are its own. fill: what a `Filler` appended; its tokens are the last.
    """

    tokens: tuple[int, ...] = ()
    parents: tuple[int, ...] = ()
    confidences: tuple[float, ...] | None = None
    num_steps: int | None = None
    makers: tuple[str, ...] = ()
    fill: Fill | None = None

    def __post_init__(self) -> None:
        assert len(self.tokens) == len(self.parents), "one parent for each draft token"
        assert len(self.makers) in (0, len(self.tokens)), "one maker for each draft token, or none"
        assert all(p < i for i, p in enumerate(self.parents)), "parents must precede children"

    @property
    def num_draft_steps(self) -> int:
        return len(self.tokens) if self.num_steps is None else self.num_steps

    @property
    def is_chain(self) -> bool:
        return self.parents == tuple(range(-1, len(self.tokens) - 1))

    @property
    def texts(self) -> list[tuple[int, ...]]:
        """The drafted tokens down to each token, itself included."""
        found = list[tuple[int, ...]]()
        for token, parent in zip(self.tokens, self.parents, strict=True):
            found.append((*(found[parent] if parent >= 0 else ()), token))
        return found


def chain(tokens: tuple[int, ...], confidences: tuple[float, ...] | None = None) -> Proposal:
    """A proposal without branches."""
    return Proposal(tokens, tuple(range(-1, len(tokens) - 1)), confidences)


@dataclass(frozen=True)
class Verdict:
    """What verification decided. path: accepted node ids in order. next_token: the target's choice
    after them. lenient: places in the path whose token is not the target's choice (see
    engine.lenient). is_whole: False where the target's row after a token that was not reached
    holds no numbers."""

    path: tuple[int, ...]
    next_token: int
    lenient: tuple[int, ...] = ()
    is_whole: bool = True

    @property
    def accepted_length(self) -> int:
        return len(self.path)


@dataclass(frozen=True)
class Growth:
    """The prices of a larger draft in this round, for a drafter that shapes a tree.

    chance(confidence): estimated chance that a token of this confidence is accepted, given that
    its parent was; a node's worth is the product along its path. node_prices[i]: expected tokens
    that node i (from 0) must bring to pay for its place in the target's forward. step_price: what
    one more step of the drafter must bring, fixed_price any draft. is_chain: nothing branches."""

    chance: Callable[[float], float]
    node_prices: tuple[float, ...]
    step_price: float
    fixed_price: float = 0.0
    is_chain: bool = False

    def pays(self, worths: Iterable[float]) -> bool:
        """Whether nodes of these worths pay for themselves."""
        own = list(worths)
        return sum(own) > self.fixed_price + sum(self.node_prices[: len(own)])


@dataclass(frozen=True)
class DraftPlan:
    """What the controller wants of one round.

    keep_drafting(i, confidence): asked after draft token i (from 0) was made, with the drafter's
    confidence in it; False ends the draft after that token. None: always num_draft_tokens.
    growth: prices for a drafter that shapes a tree of at most num_draft_tokens nodes, None when
    none are known: it then makes its usual shape. is_chain: see Growth. off: why the policy decided
    against drafting; None where it did not. filling: see Filling, None: nothing is appended."""

    drafter: str
    num_draft_tokens: int
    is_probe: bool = False
    reason: str = ""
    signal: Hashable = None
    keep_drafting: Callable[[int, float], bool] | None = None
    growth: Growth | None = None
    is_chain: bool = False
    off: OffCode | None = None
    filling: Filling | None = None

    def growth_or(self, usual: Growth) -> Growth:
        """Return the prices of this plan, or `usual` where it has none."""
        return replace(self.growth or usual, is_chain=self.is_chain)

    def shortened(self, limit: int) -> DraftPlan:
        """The same plan with at most `limit` draft tokens."""
        filling = self.filling and self.filling.shortened(limit)
        length = min(limit, self.num_draft_tokens)
        if (length, filling) == (self.num_draft_tokens, self.filling):
            return self
        return replace(self, num_draft_tokens=length, filling=filling)


class Others(NamedTuple):
    """The other sequences in the forward of a round, and their rows in it. took_ms: of the round,
    for drafting and judging theirs; the forward itself is common to all."""

    num_sequences: int = 0
    num_rows: int = 0
    took_ms: float = 0.0


ALONE = Others()


@dataclass(frozen=True)
class Step:
    """One round of the decode loop, measured.

    draft_ms: propose; 0 where no drafter was asked. verify_ms: everything else of the round
    (rollback, the target's forward, acceptance). context_length: tokens in the target's cache
    before it. policy_ms: planning, and learning once the engine yields the round; a part of
    verify_ms. signal: what the drafter knew before drafting (see Drafter.signal). plain_ms: plain
    decoding for the same tokens, known after a turn that drafted. others: in the same forward.
    num_filled_tokens: draft tokens that `filler` appended to the drafter's own. reading_ms: a part
    of draft_ms, in which the drafter read what it had missed of the text."""

    drafter: str
    num_draft_tokens: int
    num_accepted_tokens: int
    num_output_tokens: int
    draft_ms: float
    verify_ms: float
    context_length: int
    is_probe: bool = False
    signal: Hashable = None
    num_lenient_tokens: int = 0  # of the accepted: what exact checking would have refused
    num_checked_tokens: int = 0  # draft tokens that follow the root or an accepted token
    policy_ms: float = 0.0
    plain_ms: float | None = None
    others: Others = ALONE
    num_filled_tokens: int = 0
    filler: str | None = None
    reading_ms: float = 0.0

    @property
    def round_ms(self) -> float:
        return self.draft_ms + self.verify_ms


@dataclass(frozen=True)
class Outcome:
    """A finished round, to learn from. verdict: before any cut at end-of-text.

    logits: [1 + n, V], the target's, after the root and after every draft token, accepted or not.
    Valid during the call only: the next forward may write over it. choices: the token that the
    target chooses after each of them, None where its row holds no numbers.
    """

    step: Step
    proposal: Proposal
    verdict: Verdict
    logits: torch.Tensor
    choices: SequenceOf[int | None] = ()


class TokenLogprob(NamedTuple):
    """Of an output token: the logarithm of its probability by the target's own logits, before any
    warp, and the likeliest tokens there with theirs, best first."""

    token: int
    logprob: float
    top: tuple[tuple[int, float], ...]


@dataclass(frozen=True)
class Round:
    """What the engine yields: the output tokens of one round, where each came from, and what was
    planned. lenient: places in tokens that exact checking would not have allowed. proposal,
    verdict: what was drafted and what became of it, before any cut. logprobs: of each token, where
    they were asked for."""

    tokens: tuple[int, ...]
    provenance: tuple[str, ...]
    step: Step
    plan: DraftPlan
    lenient: tuple[int, ...]
    proposal: Proposal
    verdict: Verdict
    logprobs: tuple[TokenLogprob, ...] = ()


class Policy(Protocol):
    """Decides each round of one turn, and learns from it. The controller makes one a turn."""

    def plan(self, sequence: Sequence) -> DraftPlan: ...

    def observe(self, sequence: Sequence, outcome: Outcome) -> None:
        """sequence: already with the round's tokens."""
        ...


class Drafter(Protocol):
    """Guesses tokens. `propose` first reads what it missed of the sequence, by its cache's `reuse`:
    of a prompt as well, so a drafter that is not used reads nothing. There is no rollback to call.
    A wrong guess costs time, never correctness.

    shapes_itself: it proposes trees, or whatever it finds, sized by plan.growth; the controller
    then judges its rounds as a whole instead of choosing a length.

    block_length: the most tokens of a draft where one step gives them all, whatever is drafted of
    them; None where a step gives one token."""

    name: str
    shapes_itself: bool
    block_length: int | None

    @property
    def memory_bytes(self) -> int:
        """Bytes held beyond the target's own, weights and cache."""

    def signal(self, sequence: Sequence) -> Hashable:
        """Return what is known before drafting and predicts acceptance, such as a match length;
        None where there is nothing to propose. Costs microseconds."""

    def propose(self, sequence: Sequence, plan: DraftPlan) -> Proposal:
        """At most plan.num_draft_tokens tokens that may follow `sequence`; empty is allowed."""

    def observe(self, sequence: Sequence, outcome: Outcome) -> None:
        """Learn from a finished round that it drafted."""
