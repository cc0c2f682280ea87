"""Which model and draft to run on this machine, what they need and what drafting may gain.

Contract: pure. `recommend` takes what the machine has (Snapshot), the models there are and the
wanted context, and gives cards; a model that does not fit is a card too, with the planner's
sentence on what would fit. Sizes of downloads are exact where the hub was asked, else computed
from the shape and marked so. Unknown stays None.

The first card: of open licence and free to fetch without an agreement; of the newest generation
(Model.is_current) where one fits; then the largest, since size is the only other measure of quality
between families. On a GPU a draft counts as much as DRAFT_WORTH
times the size. On a processor models are limited to what it reads in time.

A gain that was not measured is a range: the best draft length under careful and under hopeful
assumptions. The assumed acceptances span what is published for drafts of the same family and for
quantised copies; checking more tokens costs little on a GPU, which waits for the weights, and more
on a processor, which computes.

Not here: reading the machine or the disk (catalogue), words of the page (web).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from localspec.core.decoding import OFF
from localspec.core.options import AUTO_EXPERTS, EXPERTS_IN_RAM, LoadOptions
from localspec.core.precisions import TORCH_NAMES, Precision
from localspec.core.speculation import Measurement, best_speedup
from localspec.drafters.registry import REGISTRY
from localspec.machine.memory import DRAFT_MODEL, MTP, SELF_QUANT, OtherDevice, Room
from localspec.machine.model import Model
from localspec.machine.planner import plan
from localspec.machine.plans import Plan, PlanRequest

OPEN_LICENSES = ("Apache-2.0", "MIT")
# A processor reads each weight once a token: at the 20 GB/s that common memory gives, this many
# bytes allow some five tokens a second. An assumption, not a measurement.
MOST_BYTES_ON_CPU = 4_000_000_000
NUM_ALTERNATIVES = 2
DRAFT_WORTH = 2.25  # a draft about doubles the speed, as half the size would
# Worth of 16-bit files that must be fetched, as a share of that of 4-bit files, a third of the
# download. So the 4-bit files of a model a little smaller are offered before them.
WHOLE_FILES_WORTH = 0.6

LONGEST_DRAFT = 8
# Careful and hopeful. Of modules for multi-token prediction, as published for Qwen3.5 to 3.8: 40 to
# 55 % of drafts at 86k tokens, 72 % at the first place while thinking, 80 to 91 % in short chats.
ASSUMED_ACCEPTANCE = {DRAFT_MODEL: (0.5, 0.8), MTP: (0.5, 0.8), SELF_QUANT: (0.8, 0.95)}
CHECK_SHARE = {"cuda": 0.03, "mps": 0.06, "cpu": 0.15}  # of a step, for each further token checked
MOST_LOOKUP_GAIN = 2.0
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
class ExpectedGain:
    """Times plain speed. is_measured: low and high are then one figure, from this machine."""

    low: float
    high: float
    basis: str
    is_measured: bool = False


@dataclass(frozen=True)
class Card:
    """One model with its plan: the best one, or where none fits the one that needs least.

    free_bytes: memory that there is. refusal: why it does not fit and what would, None where it
    fits. disk_left_bytes: after the download, None when the disk's room is not known."""

    plan: Plan
    parts: tuple[Model, ...]
    free_bytes: int
    gain: ExpectedGain | None
    disk_left_bytes: int | None
    refusal: str | None = None

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
        return sum(part.num_bytes or 0 for part in self.parts)

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
            draft=None if self.plan.draft is None else self.plan.draft.id,
            draft_device=self.plan.draft_device,
            experts=EXPERTS_IN_RAM if self.plan.experts_in_ram else None,
            context=self.plan.context_length,
            dtype=TORCH_NAMES.get(self.plan.precision, self.plan.precision),
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
    here = tuple(card for card in cards if card.is_here)
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
    return device == "cpu" and plan.bytes.target_weights > MOST_BYTES_ON_CPU


def _is_for_anyone(card: Card) -> bool:
    """Of open licence, without an agreement, and not made for code alone."""
    is_open = card.model.license in OPEN_LICENSES and card.model.is_gated is not True
    return is_open and "Coder" not in card.id


def worth_of(plan: Plan, device: str, is_here: bool) -> tuple[bool, float]:
    """Return what a plan is worth compared with those of other models: whether its model is of the
    newest generation, and its size. Sizes alike to two digits are equal, and tables that are looked
    up do not count. A draft adds nothing to the worth of a mixture, whose steps read few weights
    and whose drafted tokens read others. is_here: the target's files are on this machine."""
    target, is_pair = plan.target, plan.drafter in (DRAFT_MODEL, MTP) and device != "cpu"
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
    )


# -- the gain -------------------------------------------------------------------------------


def expected_gain(plan: Plan, device: str) -> ExpectedGain | None:
    """None for plain decoding, and for a draft on a device of another kind that was not measured:
    nothing is known of what its steps cost beside the target's."""
    if plan.drafter == OFF:
        return None
    measured = plan.expected_speedup
    if measured is not None:
        return ExpectedGain(measured, measured, "from what was measured here", True)
    if plan.draft_on is not None and plan.draft_on.room.device != device:
        return None
    if (info := REGISTRY[plan.drafter]).needs == "nothing":
        return ExpectedGain(
            1.0,
            MOST_LOOKUP_GAIN,
            f"{info.label} gains only where text repeats: nothing in new prose, perhaps twice the "
            "speed when a given text or code is reworked",
        )
    low_cost, high_cost = _draft_costs(plan, device)
    careful, hopeful = ASSUMED_ACCEPTANCE[plan.drafter]
    cost = f"{100 * low_cost:.0f} %"
    if high_cost > low_cost:
        cost = f"{100 * low_cost:.0f} to {100 * high_cost:.0f} %"
    check_share = max(CHECK_SHARE[device], plan.target.shape.expert_share)
    return ExpectedGain(
        assumed_speedup(careful, high_cost, check_share),
        assumed_speedup(hopeful, low_cost, check_share),
        f"assumes that {100 * careful:.0f} to {100 * hopeful:.0f} % of the drafted tokens are "
        f"accepted and that drafting one costs {cost} of a step of the target",
    )


def _draft_costs(plan: Plan, device: str) -> tuple[float, float]:
    """A draft token's cost in steps of the target, hopeful and careful: its share of the bytes
    that are read, and on a GPU that waits for launches its share of the layers."""
    if plan.drafter == MTP:
        share = plan.target.shape.drafting_share
        return share, share
    if plan.draft is None:
        assert plan.self_draft is not None, "what needs no model was answered before"
        copied = plan.target.shape.weight_bytes(plan.self_draft, plan.full)
        share = copied / plan.bytes.target_weights
        return share, share
    share = plan.draft_weights / plan.bytes.target_weights
    layers = plan.draft.shape.num_layers / plan.target.shape.num_layers
    return share, share if device == "cpu" else max(share, layers)


def assumed_speedup(acceptance: float, draft_cost: float, check_share: float) -> float:
    """At the best draft length up to LONGEST_DRAFT; never below 1, for drafting that does not pay
    is switched off. Costs in steps of the target."""
    verify_cost = {1: 1.0, LONGEST_DRAFT + 1: 1.0 + LONGEST_DRAFT * check_share}
    found = best_speedup((acceptance,), draft_cost, verify_cost)
    assert found is not None, "both ends of the curve are given"
    return max(1.0, found.value)
