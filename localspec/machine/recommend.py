"""Which model and draft to run on this machine, what they need and what drafting may gain.

Contract: pure. `recommend` takes what the machine has (Snapshot), the models that can be had and
the wanted context, and gives cards; a model that does not fit is a card too, with the planner's
sentence on what would fit. Sizes of downloads are exact where the hub was asked, else computed
from the shape and marked so. Unknown stays None.

The first card: of open licence and free to fetch without an agreement; on a GPU a pair rather than
a lone model; then the largest, since size is the only measure of quality between families. On a
processor models are limited to what it reads in time.

A gain that was not measured is a range: the best draft length under careful and under hopeful
assumptions. The assumed acceptances span what is published for drafts of the same family and for
quantised copies; checking more tokens costs little on a GPU, which waits for the weights, and more
on a processor, which computes.

Not here: reading the machine or the disk (catalogue), words of the page (web).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from localspec.core import OFF
from localspec.drafters.registry import REGISTRY
from localspec.machine.planner import plan
from localspec.machine.plans import (
    DRAFT_MODEL,
    SELF_QUANT,
    DraftCandidate,
    Plan,
    PlanBytes,
    PlanReport,
    PlanRequest,
    Room,
)
from localspec.machine.shapes import ModelShape, Precision
from localspec.options import LoadOptions
from localspec.speculation import Measurement, best_speedup

OPEN_LICENSES = ("Apache-2.0", "MIT")
# Weights are published in 16 bits; the tokenizer and configurations beside them.
PUBLISHED: Precision = "bf16"
SMALL_FILES_BYTES = 12_000_000
# A processor reads each weight once a token: at the 20 GB/s that common memory gives, this many
# bytes allow some five tokens a second. An assumption, not a measurement.
MOST_BYTES_ON_CPU = 4_000_000_000
NUM_ALTERNATIVES = 2

LONGEST_DRAFT = 8
ASSUMED_ACCEPTANCE = {DRAFT_MODEL: (0.5, 0.8), SELF_QUANT: (0.8, 0.95)}  # careful, hopeful
CHECK_SHARE = {"cuda": 0.03, "mps": 0.06, "cpu": 0.15}  # of a step, for each further token checked
MOST_LOOKUP_GAIN = 2.0

DTYPES: Mapping[Precision, str] = {
    "fp32": "float32",
    "fp16": "float16",
    "bf16": "bfloat16",
    "8-bit": "8-bit",
    "4-bit": "4-bit",
}


@dataclass(frozen=True)
class AvailableModel:
    """A model that can be had. page: on the hub, None for what ships or is in a folder."""

    shape: ModelShape
    license: str | None
    family: str
    drafts: tuple[DraftCandidate, ...] = ()
    gated: bool | None = None
    terms: str | None = None
    page: str | None = None
    note: str = ""

    @property
    def id(self) -> str:
        return self.shape.name


@dataclass(frozen=True)
class Snapshot:
    """What the machine has now. room: the memory, that of the loaded model included.
    cached: bytes on disk of each model that is whole here. exact: bytes to fetch, from the hub."""

    room: Room
    full: Precision
    disk_free_bytes: int | None = None
    cached: Mapping[str, int] = field(default_factory=dict)
    exact: Mapping[str, int] = field(default_factory=dict)
    measurements: tuple[Measurement, ...] = ()


@dataclass(frozen=True)
class Part:
    """A model of a card and its download. is_exact: as the hub says; else by its shape."""

    id: str
    num_bytes: int
    is_exact: bool
    is_here: bool


@dataclass(frozen=True)
class ExpectedGain:
    """Times plain speed. is_measured: low and high are then one figure, from this machine."""

    low: float
    high: float
    basis: str
    is_measured: bool = False


@dataclass(frozen=True)
class Bar:
    """The memory of a plan, part by part, in bytes; they add up to what is free. working: what
    computing needs besides weights and caches. reserve: left free on purpose. spare: may be
    negative where the plan does not fit."""

    target: int
    draft: int
    kv: int
    working: int
    reserve: int
    spare: int

    @property
    def free(self) -> int:
        return self.target + self.draft + self.kv + self.working + self.reserve + self.spare


@dataclass(frozen=True)
class Card:
    """One pair. refusal: why it does not fit and what would, None where it fits. disk_left: after
    the download, None when the disk's room is not known."""

    model: AvailableModel
    precision: Precision
    drafter: str
    draft: str | None
    context_length: int
    parts: tuple[Part, ...]
    bar: Bar
    gain: ExpectedGain | None
    reason: str
    disk_left_bytes: int | None
    refusal: str | None = None

    @property
    def id(self) -> str:
        return self.model.id

    @property
    def download_bytes(self) -> int:
        return sum(part.num_bytes for part in self.parts if not part.is_here)

    @property
    def is_here(self) -> bool:
        return all(part.is_here for part in self.parts)

    @property
    def is_exact(self) -> bool:
        return all(part.is_exact for part in self.parts if not part.is_here)

    def load_options(self, anyway: bool = False) -> LoadOptions:
        """What to ask of the engine: exactly this plan, and nothing that is not here."""
        return LoadOptions(
            model=self.id,
            draft=self.draft,
            context=self.context_length,
            dtype=DTYPES[self.precision],
            anyway=anyway,
            fetches=False,
        )


@dataclass(frozen=True)
class Recommendation:
    """card: None when nothing fits; `reasons` then says why. smaller, larger: that fit, nearest
    first. here: those on this machine. others: every other one, fitting or refused."""

    card: Card | None
    smaller: tuple[Card, ...] = ()
    larger: tuple[Card, ...] = ()
    here: tuple[Card, ...] = ()
    others: tuple[Card, ...] = ()
    reasons: tuple[str, ...] = ()


def recommend(
    snapshot: Snapshot, models: Sequence[AvailableModel], context_length: int
) -> Recommendation:
    cards = [card_of(snapshot, model, context_length) for model in models]
    fitting = [card for card in cards if card.refusal is None]
    first = max(
        (card for card in fitting if _may_be_first(snapshot, card, context_length)),
        key=lambda card: _rank(snapshot, card, cards),
        default=None,
    )
    here = tuple(card for card in cards if card.is_here)
    if first is None:
        return Recommendation(None, here=here, others=_but(cards, here), reasons=_why(cards))
    size = first.model.shape.num_params
    by_size = sorted(fitting, key=lambda card: card.model.shape.num_params)
    apart = [card for card in by_size if _is_for_anyone(card) and card is not first]
    smaller = [card for card in reversed(apart) if card.model.shape.num_params < 0.8 * size]
    larger = [card for card in apart if card.model.shape.num_params > 1.2 * size]
    shown = (first, *smaller[:NUM_ALTERNATIVES], *larger[:NUM_ALTERNATIVES], *here)
    return Recommendation(
        card=first,
        smaller=tuple(smaller[:NUM_ALTERNATIVES]),
        larger=tuple(larger[:NUM_ALTERNATIVES]),
        here=here,
        others=_but(cards, shown),
    )


def _but(cards: Sequence[Card], shown: Sequence[Card]) -> tuple[Card, ...]:
    names = {card.id for card in shown}
    return tuple(card for card in cards if card.id not in names)


def _may_be_first(snapshot: Snapshot, card: Card, context_length: int) -> bool:
    """For anyone, quick enough, and holding most of the context that was wanted."""
    is_slow = (
        snapshot.room.device == "cpu"
        and card.model.shape.weight_bytes(card.precision, snapshot.full) > MOST_BYTES_ON_CPU
    )
    ships = card.model.page is None
    is_long = card.context_length >= min(context_length, 4096) / 2
    return _is_for_anyone(card) and is_long and not is_slow and not ships


def _is_for_anyone(card: Card) -> bool:
    """Of open licence, without an agreement, and meant for talk."""
    is_open = card.model.license in OPEN_LICENSES and card.model.gated is not True
    return is_open and "Coder" not in card.id


def _rank(snapshot: Snapshot, card: Card, cards: Sequence[Card]) -> tuple[bool, float, int]:
    """Larger is better; sizes alike to two digits are equal, and then the later family wins."""
    is_pair = card.drafter == DRAFT_MODEL and snapshot.room.device != "cpu"
    return is_pair, float(f"{card.model.shape.num_params:.1e}"), cards.index(card)


def _why(cards: Sequence[Card]) -> tuple[str, ...]:
    """What the smallest ones lack."""
    refused = sorted(
        (card for card in cards if card.refusal is not None),
        key=lambda card: card.model.shape.num_params,
    )
    return tuple(str(card.refusal) for card in refused[:2])


# -- one card -------------------------------------------------------------------------------


def card_of(snapshot: Snapshot, model: AvailableModel, context_length: int) -> Card:
    """The best plan of a model, or the least it would need where nothing fits."""
    request = PlanRequest(
        target=model.shape,
        room=snapshot.room,
        context_length=context_length,
        drafts=model.drafts,
        full=snapshot.full,
        # Quantised weights are seldom faster than whole ones on a processor.
        only_precision=snapshot.full if snapshot.room.device == "cpu" else None,
        measurements=snapshot.measurements,
    )
    report = plan(request)
    if report.plans:
        return _card(snapshot, model, _chosen(snapshot, report, request.wanted_context), None)
    everything = replace(snapshot.room, free_bytes=2**62)
    wished = plan(replace(request, room=everything)).plans
    least = min(wished, key=lambda each: each.bytes.total)
    return _card(snapshot, model, least, _refusal(report))


def _chosen(snapshot: Snapshot, report: PlanReport, wanted_context: int) -> Plan:
    """The planner's first; on a GPU, where a pair is wanted, the first with a draft model that
    keeps half the context."""
    pairs = [
        each
        for each in report.plans
        if each.drafter == DRAFT_MODEL and each.context_length >= wanted_context / 2
    ]
    return pairs[0] if pairs and snapshot.room.device != "cpu" else report.plans[0]


def _refusal(report: PlanReport) -> str:
    said = [each.reason for each in report.refused if each.drafter == OFF]
    return said[0] if said else report.refused[0].reason


def _card(snapshot: Snapshot, model: AvailableModel, chosen: Plan, refusal: str | None) -> Card:
    draft = next((each.shape for each in model.drafts if each.shape.name == chosen.draft), None)
    models = (model.shape, draft) if draft is not None else (model.shape,)
    parts = tuple(_part(snapshot, shape, model) for shape in models)
    disk = snapshot.disk_free_bytes
    missing = sum(part.num_bytes for part in parts if not part.is_here)
    return Card(
        model=model,
        precision=chosen.precision,
        drafter=chosen.drafter,
        draft=chosen.draft,
        context_length=chosen.context_length,
        parts=parts,
        bar=_bar(chosen.bytes, snapshot.room),
        gain=expected_gain(chosen, model.shape, draft, snapshot.room.device, snapshot.full),
        reason=chosen.reason,
        disk_left_bytes=None if disk is None else disk - missing,
        refusal=refusal,
    )


def _part(snapshot: Snapshot, shape: ModelShape, model: AvailableModel) -> Part:
    if model.page is None:  # it ships with the program, or is in a folder
        return Part(shape.name, 0, True, True)
    if shape.name in snapshot.cached:
        return Part(shape.name, snapshot.cached[shape.name], True, True)
    if shape.name in snapshot.exact:
        return Part(shape.name, snapshot.exact[shape.name], True, False)
    return Part(shape.name, shape.weight_bytes(PUBLISHED) + SMALL_FILES_BYTES, False, False)


def _bar(needed: PlanBytes, room: Room) -> Bar:
    return Bar(
        target=needed.target_weights,
        draft=needed.draft_weights,
        kv=needed.target_kv + needed.draft_kv,
        working=needed.logits + needed.activations + needed.runtime,
        reserve=needed.margin,
        spare=room.free_bytes - needed.total,
    )


# -- the gain -------------------------------------------------------------------------------


def expected_gain(
    plan: Plan, target: ModelShape, draft: ModelShape | None, device: str, full: Precision
) -> ExpectedGain | None:
    """None for plain decoding."""
    if plan.drafter == OFF:
        return None
    measured = plan.expected_speedup
    if measured is not None:
        return ExpectedGain(measured, measured, "from what was measured here", True)
    if (info := REGISTRY[plan.drafter]).needs == "nothing":
        return ExpectedGain(
            1.0,
            MOST_LOOKUP_GAIN,
            f"{info.label} gains only where text repeats: nothing in new prose, perhaps twice the "
            "speed when a given text or code is reworked",
        )
    low_cost, high_cost = _draft_costs(plan, target, draft, device, full)
    careful, hopeful = ASSUMED_ACCEPTANCE[plan.drafter]
    cost = f"{100 * low_cost:.0f} %"
    if high_cost > low_cost:
        cost = f"{100 * low_cost:.0f} to {100 * high_cost:.0f} %"
    return ExpectedGain(
        assumed_speedup(careful, high_cost, CHECK_SHARE[device]),
        assumed_speedup(hopeful, low_cost, CHECK_SHARE[device]),
        f"assumes that {100 * careful:.0f} to {100 * hopeful:.0f} % of the drafted tokens are "
        f"accepted and that drafting one costs {cost} of a step of the target",
    )


def _draft_costs(
    plan: Plan, target: ModelShape, draft: ModelShape | None, device: str, full: Precision
) -> tuple[float, float]:
    """A draft token's cost in steps of the target, hopeful and careful: its share of the bytes
    that are read, and on a GPU that waits for launches its share of the layers."""
    target_bytes = target.weight_bytes(plan.precision, full)
    if draft is None:
        copy: Precision = "8-bit" if device == "cpu" else "4-bit"
        share = target.weight_bytes(copy, full) / target_bytes
        return share, share
    share = draft.weight_bytes(full) / target_bytes
    if device == "cpu":
        return share, share
    return share, max(share, draft.num_layers / target.num_layers)


def assumed_speedup(acceptance: float, draft_cost: float, check_share: float) -> float:
    """At the best draft length up to LONGEST_DRAFT; never below 1, for drafting that does not pay
    is switched off. Costs in steps of the target."""
    verify_cost = {1: 1.0, LONGEST_DRAFT + 1: 1.0 + LONGEST_DRAFT * check_share}
    found = best_speedup((acceptance,), draft_cost, verify_cost)
    assert found is not None, "both ends of the curve are given"
    return max(1.0, found.value)
