"""Which model and draft to run on this machine, what they need and what drafting may gain.

Contract: pure. `recommend` takes what the machine has (Snapshot), the models there are and the
wanted context, and gives cards; a model that does not fit is a card too, with the planner's
sentence on what would fit. Sizes of downloads are exact where the hub was asked, else computed
from the shape and marked so. Unknown stays None. A card lists what may draft for its model, with
its price in memory and in context (DrafterOffer).

The first card: of open licence and free to fetch without an agreement; of the newest generation
(Model.is_current) where one fits; then the largest, since size is the only other measure of quality
between families. On a GPU a draft counts as much as DRAFT_WORTH times the size. On a processor
models are limited to what it reads in time.

Not here: reading the machine or the disk (catalogue), what drafting gains (gains), words of the
page (web).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from localspec.core.decoding import OFF
from localspec.core.options import AUTO_EXPERTS, EXPERTS_IN_RAM, LoadOptions
from localspec.core.precisions import TORCH_NAMES, Precision
from localspec.core.speculation import Measurement
from localspec.drafters.registry import published_heads
from localspec.machine.gains import ExpectedGain, expected_gain
from localspec.machine.memory import DRAFT_MODEL, MTP, OtherDevice, Room
from localspec.machine.model import Model
from localspec.machine.planner import plan
from localspec.machine.plans import Plan, PlanReport, PlanRequest

OPEN_LICENSES = ("Apache-2.0", "MIT")
# A processor reads each weight once a token: at the 20 GB/s that common memory gives, this many
# bytes allow some five tokens a second. An assumption, not a measurement.
MOST_BYTES_ON_CPU = 4_000_000_000
NUM_ALTERNATIVES = 2
DRAFT_WORTH = 2.25  # a draft about doubles the speed, as half the size would
# Worth of 16-bit files that must be fetched, as a share of that of 4-bit files, a third of the
# download. So the 4-bit files of a model a little smaller are offered before them.
WHOLE_FILES_WORTH = 0.6

# Bytes of a memory that holds everything, to plan what a model needs.
UNLIMITED = 2**62


@dataclass(frozen=True)
class Snapshot:
    """What the machine has now. room: the memory, that of the loaded model included.
    other: a second device, for a draft. experts: see PlanRequest."""

    room: Room
    full: Precision
    disk_free_bytes: int | None = None
    measurements: tuple[Measurement, ...] = ()
    other: OtherDevice | None = None
    experts: str = AUTO_EXPERTS


@dataclass(frozen=True)
class DrafterOffer:
    """What may draft for a model, in the precision of its plan.

    kind: the name of the drafter. model: the draft model or published head; None for the module in
    the target's own files. plan: with it; None where it is refused. refusal: why, as sentences.
    context_without: tokens of context that fit without it."""

    kind: str
    model: Model | None
    plan: Plan | None
    context_without: int
    refusal: str = ""

    @property
    def needed_bytes(self) -> int:
        """Bytes of memory that it takes, its caches included."""
        held = None if self.plan is None else self.plan.draft_bytes or self.plan.bytes
        return 0 if held is None else held.draft_weights + held.draft_kv

    @property
    def is_here(self) -> bool:
        return self.model is None or self.model.is_here


@dataclass(frozen=True)
class Card:
    """One model with its plan: the best one, or where none fits the one that needs least.

    free_bytes: memory that there is. refusal: why it does not fit and what would, None where it
    fits. disk_left_bytes: after the download, None when the disk's room is not known. offers: what
    may draft for it, the planned drafter among them. ready: the plan to load with what is on this
    machine."""

    plan: Plan
    parts: tuple[Model, ...]
    free_bytes: int
    gain: ExpectedGain | None
    disk_left_bytes: int | None
    refusal: str | None = None
    offers: tuple[DrafterOffer, ...] = ()
    ready: Plan | None = None

    @property
    def id(self) -> str:
        return self.model.id

    @property
    def model(self) -> Model:
        return self.plan.target

    @property
    def name(self) -> str:
        return self.model.name

    @property
    def spare_bytes(self) -> int:
        """Memory that stays free; negative where the plan does not fit."""
        return self.free_bytes - self.plan.bytes.total

    @property
    def download_bytes(self) -> int:
        return sum(part.stored_bytes for part in self.parts if not part.is_here)

    @property
    def disk_bytes(self) -> int:
        """On disk, as far as they were counted: what ships with the program is not."""
        return sum(part.num_bytes or 0 for part in self.parts if part.is_here)

    @property
    def is_here(self) -> bool:
        return all(part.is_here for part in self.parts)

    @property
    def has_target(self) -> bool:
        """True if the model itself is on this machine, whatever drafts for it."""
        return self.parts[0].is_here

    @property
    def fetched_ids(self) -> tuple[str, ...]:
        """The ids of all that may be fetched for it, the model's own first."""
        offered = (offer.model for offer in self.offers if offer.model is not None)
        return tuple(dict.fromkeys(each.id for each in (*self.parts, *offered)))

    def offer_of(self, draft_id: str) -> DrafterOffer | None:
        """Return what is offered under the id of a draft model or a published head."""
        named = (each for each in self.offers if each.model and each.model.id == draft_id)
        return next(named, None)

    @property
    def is_exact(self) -> bool:
        return all(part.is_exact for part in self.parts if not part.is_here)

    def load_options(self, anyway: bool = False, plan: Plan | None = None) -> LoadOptions:
        """What to ask of the engine: exactly a plan, and nothing that is not here. plan: None for
        that of the card."""
        plan = plan or self.plan
        return LoadOptions(
            model=self.id,
            draft=None if plan.draft is None else plan.draft.id,
            draft_device=plan.draft_device,
            experts=EXPERTS_IN_RAM if plan.experts_in_ram else None,
            context=plan.context_length,
            dtype=TORCH_NAMES.get(plan.precision, plan.precision),
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


def recommend(snapshot: Snapshot, models: Sequence[Model], context_length: int) -> Recommendation:
    every = [card_of(snapshot, model, context_length) for model in models]
    # A copy in 4 bits is both a profile's and in the cache: the profile knows its drafts.
    cards = list({card.id: card for card in reversed(every)}.values())[::-1]
    by_size = sorted(cards, key=_size)
    fitting = [card for card in by_size if card.refusal is None]
    first = max(
        (card for card in fitting if _may_be_first(snapshot, card, context_length)),
        # Of equal ones the later family wins.
        key=lambda card: (*_worth(snapshot, card), cards.index(card)),
        default=None,
    )
    here = tuple(card for card in cards if card.has_target)
    if first is None:
        lacking = [card.refusal for card in by_size if card.refusal is not None]
        others, reasons = _without(cards, here), tuple(lacking[:2])
        return Recommendation(None, here=here, others=others, reasons=reasons)
    apart = [card for card in fitting if _is_for_anyone(card) and card is not first]
    smaller = [card for card in reversed(apart) if _size(card) < 0.8 * _size(first)]
    larger = [card for card in apart if _size(card) > 1.2 * _size(first)]
    near = tuple(smaller[:NUM_ALTERNATIVES]), tuple(larger[:NUM_ALTERNATIVES])
    others = _without(cards, (first, *near[0], *near[1], *here))
    return Recommendation(first, *near, here, others)


def _worth(snapshot: Snapshot, card: Card) -> tuple[bool, float]:
    return worth_of(card.plan, snapshot.room.device, card.parts[0].is_here)


def _size(card: Card) -> int:
    return card.model.shape.num_params


def _without(cards: Sequence[Card], shown: Sequence[Card]) -> tuple[Card, ...]:
    names = {card.id for card in shown}
    return tuple(card for card in cards if card.id not in names)


def _may_be_first(snapshot: Snapshot, card: Card, context_length: int) -> bool:
    """For anyone, quick enough, holding most of the context that was wanted, wholly on the device,
    and not what ships."""
    is_quick = not is_slow(card.plan, snapshot.room.device)
    is_long = card.plan.context_length >= min(context_length, 8192) / 2
    is_offered = is_long and is_quick and not card.plan.experts_in_ram
    return _is_for_anyone(card) and is_offered and card.model.page is not None


def is_slow(plan: Plan, device: str) -> bool:
    """True if a processor reads more bytes for a token than it does in time."""
    looked_up = plan.target.shape.looked_up_bytes(plan.full, device)
    return device == "cpu" and plan.bytes.target_weights - looked_up > MOST_BYTES_ON_CPU


def _is_for_anyone(card: Card) -> bool:
    """Of open licence, without an agreement, and not made for code alone."""
    is_open = card.model.license in OPEN_LICENSES and card.model.is_gated is not True
    return is_open and "Coder" not in card.id


def worth_of(plan: Plan, device: str, is_here: bool) -> tuple[bool, float]:
    """Return what a plan is worth compared with those of other models: whether its model is of the
    newest generation, and its size. Sizes alike to two digits are equal, and tables that are looked
    up do not count. A draft adds nothing to the worth of a mixture, whose steps read few weights
    and whose drafted tokens read others. is_here: the target's files are on this machine."""
    pairs = (DRAFT_MODEL, MTP, *published_heads())
    target, is_pair = plan.target, plan.drafter in pairs and device != "cpu"
    counted = target.shape.counted
    size = target.shape.num_params - (0 if counted is None else counted.table_params)
    is_doubled = is_pair and not target.shape.num_experts
    worth = (DRAFT_WORTH if is_doubled else 1.0) * float(f"{size:.1e}")
    # No 4-bit copy of a model of the newest generation is known, so none is offered before it.
    is_whole = not (target.shape.stored_as or is_here or target.is_current)
    return target.is_current, worth * WHOLE_FILES_WORTH if is_whole else worth


# -- one card -------------------------------------------------------------------------------


def card_of(snapshot: Snapshot, model: Model, context_length: int) -> Card:
    """The best plan of a model, or the least it would need where nothing fits."""
    room = snapshot.room
    request = PlanRequest(
        target=model,
        room=room,
        context_length=context_length,
        full=snapshot.full,
        # Quantised weights are seldom faster than whole ones on a processor.
        only_precision=snapshot.full if room.device == "cpu" else None,
        measurements=snapshot.measurements,
        other=snapshot.other,
        experts=snapshot.experts,
    )
    report = plan(request)
    if report.plans:
        chosen, refusal = report.plans[0], None
    else:
        total = room.total_bytes or room.free_bytes  # the margin is a share of it
        ram_bytes = None if room.ram_bytes is None else UNLIMITED
        unlimited = replace(room, free_bytes=UNLIMITED, total_bytes=total, ram_bytes=ram_bytes)
        wished = plan(replace(request, room=unlimited)).plans
        chosen = min(wished, key=lambda each: each.bytes.total)
        refusal = next(each.reason for each in report.refused if each.drafter == OFF)
    parts = (chosen.target,) if chosen.draft is None else (chosen.target, chosen.draft)
    missing, disk = sum(p.stored_bytes for p in parts if not p.is_here), snapshot.disk_free_bytes
    return Card(
        plan=chosen,
        parts=parts,
        free_bytes=room.free_bytes,
        gain=expected_gain(chosen, room.device),
        disk_left_bytes=None if disk is None else disk - missing,
        refusal=refusal,
        offers=() if refusal else tuple(_offers(request, report, chosen)),
        ready=_ready(report.plans, chosen),
    )


def _offers(request: PlanRequest, report: PlanReport, chosen: Plan) -> Iterator[DrafterOffer]:
    """Return what may draft for the target of a plan, in the plan's precision and with its experts
    where they are there."""
    alike = [each for each in report.plans if _is_loaded_alike(each, chosen)]
    without = next((each.context_length for each in alike if each.drafter == OFF), 0)
    module = [(MTP, None)] if request.target.shape.mtp is not None else []
    drafts = [(_kind_of(draft), draft) for draft in request.target.drafts]
    for kind, draft in (*module, *drafts):
        plans = [each for each in alike if (each.drafter, each.draft) == (kind, draft)]
        name = request.target.name if draft is None else draft.name
        reasons = (e.reason for e in report.refused if e.drafter == kind and name in e.reason)
        refusal = "" if plans else next(reasons, "")
        yield DrafterOffer(kind, draft, plans[0] if plans else None, without, refusal)


def _kind_of(draft: Model) -> str:
    return DRAFT_MODEL if draft.head is None else draft.head.kind


def _is_loaded_alike(plan: Plan, chosen: Plan) -> bool:
    wanted = (chosen.target, chosen.precision, chosen.experts_in_ram)
    return (plan.target, plan.precision, plan.experts_in_ram) == wanted


def _ready(plans: Sequence[Plan], chosen: Plan) -> Plan | None:
    """Return the best of these plans that needs no download beside the target, loaded as the chosen
    one; None where there is none."""
    alike = (each for each in plans if _is_loaded_alike(each, chosen))
    return next((each for each in alike if each.draft is None or each.draft.is_here), None)
