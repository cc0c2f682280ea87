"""How published block drafters say what they are: DFlash, DFlash2 and DSpark.

`layout_of` reads the config of z-lab's, DeepSpec's and speculators' folders into one `BlockLayout`.
Nothing is guessed: a key that is missing or unknown is a ModelError that names the layout.
Sources: DFlash (arXiv 2602.06036), DSpark (arXiv 2607.05147); z-lab/dflash, deepseek-ai/DeepSpec
and vllm-project/speculators.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

from localspec.core.errors import ModelError, first_line
from localspec.formats.decoder_settings import HARMLESS, DecoderSettings, settings_of
from localspec.formats.head_folder import architectures, target_named
from localspec.formats.rotation_settings import Incomplete, NotNative
from localspec.forward.heads.files import HeadSettings, TargetSizes

KIND = "block"
EMBEDDING = -2  # A layer that is read: the embedding, before the first block.
Z_LAB, DEEPSPEC, SPECULATORS = "z-lab", "DeepSpec", "speculators"
CAUSAL = ("is_causal", "causal")  # Keys that decide for every layer, the first before the second.
MarkovKind = Literal["vanilla", "gated", "rnn"]
MARKOV_KINDS: Mapping[str, MarkovKind] = {"vanilla": "vanilla", "gated": "gated", "rnn": "rnn"}

# Keys of a config that concern the drafter and not the family of its layers.
OF_DRAFTERS = frozenset(
    ("dflash_config", "block_size", "num_target_layers", "target_layer_ids", "mask_token_id",
     "num_anchors", "enable_confidence_head", "confidence_head_with_markov", "markov_rank",
     "markov_head_type", "is_causal", "target_model_type", "target_text_model_type",
     "target_model_name_or_path", "draft_vocab_size", "ttt_length", "step_loss_decay",
     "draft_num_hidden_layers")
)  # fmt: skip
# Keys within `dflash_config` that are read.
OF_DFLASH = frozenset(
    ("target_layer_ids", "mask_token_id", "block_size", "causal", "is_causal", "conv_kernel_size",
     "conv_group_size", "selector_rank", "selector_top_k", "input_embedding_scale",
     "output_multiplier", "final_logit_softcapping", "num_target_layers")
)  # fmt: skip
# Keys of speculators' configs that are read, and those that change no logit.
OF_SPECULATORS = frozenset(
    ("speculators_model_type", "speculators_version", "speculators_config",
     "has_no_defaults_at_init", "transformer_layer_config", "draft_vocab_size", "block_size",
     "target_hidden_size", "aux_hidden_state_layer_ids", "mask_token_id",
     "sliding_window_non_causal", "sample_from_anchor", "markov_rank", "markov_head_type",
     "enable_confidence_head", "confidence_head_with_markov")
)  # fmt: skip


@dataclass(frozen=True)
class Markov:
    """A head that adds to a row's logits what follows the token before: W2 · W1[token].

    kind: "gated" and "rnn" weigh W1's row by the row's hidden state, or by a state."""

    kind: MarkovKind
    rank: int


@dataclass(frozen=True)
class Convolutions:
    """Convolutions of each part's input and output along the block, whose taps depend on the row:
    a coefficient for each tap and `group_size` numbers of a row."""

    num_taps: int
    group_size: int


@dataclass(frozen=True)
class Selector:
    """A walk along the best `top_k` tokens of each row, by how well a token follows another."""

    rank: int
    top_k: int


@dataclass(frozen=True)
class BlockLayout:
    """A block drafter as its config says it.

    name: of the layout, for messages. settings: of its decoder layers. layers: blocks of the target
    whose output it reads, or EMBEDDING. mask_id: the token of every row but the first.
    samples_root: the first row, which holds the root, predicts the token after it; otherwise row i
    predicts token i after the root. is_causal: of each layer, whether a row sees earlier rows of
    the block alone. window_from_root: a window reaches back from the root, and not from each row.
    draft_vocab_size: tokens that its own output head knows. has_confidence: it states a chance of
    each token; confidence_reads_markov: from W1's row too. embedding_scale, output_scale, cap: of
    the rows of an embedding, of the products of an output head, and the bound that logits tend to;
    None where the config does not say them."""

    name: str
    settings: DecoderSettings
    layers: tuple[int, ...]
    block_size: int
    mask_id: int
    samples_root: bool
    is_causal: tuple[bool, ...]
    draft_vocab_size: int
    window_from_root: bool = False
    markov: Markov | None = None
    has_confidence: bool = False
    confidence_reads_markov: bool = False
    convolutions: Convolutions | None = None
    selector: Selector | None = None
    embedding_scale: float | None = None
    output_scale: float | None = None
    cap: float | None = None

    @property
    def num_drafts(self) -> int:
        """Draft tokens of a block."""
        return self.block_size if self.samples_root else self.block_size - 1


def layout_of(config: HeadSettings, sizes: TargetSizes) -> BlockLayout:
    """Return the layout of a published drafter for a target of these sizes. Raises ModelError for
    another target's, and for one that cannot be read."""
    values = config.values
    if "speculators_model_type" in values:
        layout = _of_speculators(config, sizes)
    elif any("DSpark" in name for name in architectures(values)):
        layout = _of_deepspec(config, sizes)
    else:
        layout = _of_z_lab(config, sizes)
    if not 0 <= layout.mask_id < sizes.vocab_size:
        raise config.unfit(f"its mask token is {layout.mask_id}, which this target does not have")
    if layout.num_drafts < 1:
        raise config.unfit(f"its blocks are {layout.block_size} long, which leaves no draft")
    return layout


# -- the three layouts -------------------------------------------------------------------------


def _of_z_lab(config: HeadSettings, sizes: TargetSizes) -> BlockLayout:
    """Keys within `dflash_config` come before those on top."""
    nested = config.values.get("dflash_config")
    if not isinstance(nested, dict):
        raise _unread(config, Z_LAB, "dflash_config")
    if unknown := sorted(key for key in nested.keys() - OF_DFLASH if nested[key]):
        raise config.unfit(f"its dflash_config says {unknown[0]}, which is not known here")
    read = replace(config, values={**config.values, **nested})
    settings = drafter_settings(read, "qwen3", OF_DRAFTERS | OF_DFLASH)
    _require_target(read, settings, sizes)
    is_causal = next((read.values.get(key) for key in CAUSAL if key in read.values), None)
    convolutions, selector = _second(read)
    kind = "DFlash" if convolutions is None else "DFlash2"
    return BlockLayout(
        name=f"{Z_LAB} ({kind})",
        settings=settings,
        layers=_layers(read, "target_layer_ids", sizes.num_layers, 0),
        block_size=_needed(read, Z_LAB, "block_size"),
        mask_id=_mask_id(read, Z_LAB),
        samples_root=False,
        is_causal=tuple(
            window is not None if is_causal is None else bool(is_causal)
            for window in settings.windows
        ),
        draft_vocab_size=sizes.vocab_size,
        convolutions=convolutions,
        selector=selector,
        embedding_scale=_factor(read, "input_embedding_scale"),
        output_scale=_factor(read, "output_multiplier"),
        cap=_factor(read, "final_logit_softcapping"),
    )


def _of_deepspec(config: HeadSettings, sizes: TargetSizes) -> BlockLayout:
    """Every layer is bidirectional within the block, and row i predicts token i + 1."""
    is_gemma = any(name.startswith("Gemma4") for name in architectures(config.values))
    family = str(config.values.get("model_type")) if is_gemma else "qwen3"
    settings = drafter_settings(config, family, OF_DRAFTERS)
    _require_target(config, settings, sizes)
    markov, reads_markov = _markov(config, DEEPSPEC), False
    has_confidence = bool(config.values.get("enable_confidence_head"))
    if has_confidence:
        reads_markov = bool(config.values.get("confidence_head_with_markov"))
    return BlockLayout(
        name=f"{DEEPSPEC} ({'DFlash' if markov is None else 'DSpark'})",
        settings=settings,
        layers=_layers(config, "target_layer_ids", sizes.num_layers, 0),
        block_size=_needed(config, DEEPSPEC, "block_size"),
        mask_id=_mask_id(config, DEEPSPEC),
        samples_root=True,
        is_causal=(False,) * settings.num_layers,
        draft_vocab_size=sizes.vocab_size,
        markov=markov,
        has_confidence=has_confidence,
        confidence_reads_markov=reads_markov,
        embedding_scale=settings.embedding_scale,
        cap=settings.logit_cap,
    )


def _of_speculators(config: HeadSettings, sizes: TargetSizes) -> BlockLayout:
    """Layers of Qwen3 whatever family is named. Layers of the target are counted by their input."""
    values = config.values
    is_dspark, kind = values["speculators_model_type"] == "dspark", SPECULATORS
    unknown = sorted(
        key for key in values.keys() - OF_SPECULATORS
        if values[key] and not HARMLESS.fullmatch(key) and key != "tie_word_embeddings"
    )  # fmt: skip
    if unknown:
        raise config.unfit(f"its config.json says {unknown[0]}, which is not known here")
    nested = values.get("transformer_layer_config")
    if not isinstance(nested, dict):
        raise _unread(config, kind, "transformer_layer_config")
    layers = _whole(config, nested)
    if isinstance(rotations := layers.get("rope_parameters"), dict):
        layers["rope_parameters"] = rotations.get("sliding_attention", rotations)
    inner = replace(config, values={**layers, "num_target_layers": None})
    settings = drafter_settings(inner, "qwen3", OF_DRAFTERS)
    _require_target(replace(config, values={**layers, **values}), settings, sizes)
    bidirectional = bool(values.get("sliding_window_non_causal", False))
    has_confidence = is_dspark and bool(values.get("enable_confidence_head", True))
    reads_markov = has_confidence and bool(values.get("confidence_head_with_markov", True))
    defaults = {"markov_rank": 256, "markov_head_type": "vanilla"} if is_dspark else {}
    return BlockLayout(
        name=f"{kind} ({'DSpark' if is_dspark else 'DFlash'})",
        settings=settings,
        layers=_layers(config, "aux_hidden_state_layer_ids", sizes.num_layers, 1),
        block_size=_needed(config, kind, "block_size"),
        mask_id=_mask_id(config, kind),
        samples_root=bool(values.get("sample_from_anchor", is_dspark)),
        is_causal=tuple(window is not None and not bidirectional for window in settings.windows),
        window_from_root=True,
        draft_vocab_size=config.whole("draft_vocab_size", sizes.vocab_size),
        markov=_markov(replace(config, values={**defaults, **values}), kind) if is_dspark else None,
        has_confidence=has_confidence,
        confidence_reads_markov=reads_markov,
    )


# -- single values -----------------------------------------------------------------------------


def _unread(config: HeadSettings, layout: str, key: str) -> ModelError:
    return config.unfit(f"its config.json, of the layout of {layout}, does not say {key}")


def _needed(config: HeadSettings, layout: str, key: str) -> int:
    if config.values.get(key) is None:
        raise _unread(config, layout, key)
    return config.whole(key)


def _mask_id(config: HeadSettings, layout: str) -> int:
    mask_id = config.values.get("mask_token_id")
    if mask_id is None:
        raise _unread(config, layout, "mask_token_id")
    if type(mask_id) is not int:
        raise config.unfit(f"its mask_token_id is {mask_id!r}, but must be a token's id")
    return mask_id


def _layers(config: HeadSettings, key: str, number: int, offset: int) -> tuple[int, ...]:
    """Return the blocks whose output is read. offset: what the config adds to a block's index; one
    before the first block is the embedding."""
    ids = config.values.get(key)
    if not isinstance(ids, list) or not ids or not all(type(i) is int for i in ids):
        raise config.unfit(f"its {key} is {ids!r}, but must name layers of the target")
    blocks = [i - offset for i in ids]
    if not all(-1 <= block < number for block in blocks):
        raise config.unfit(f"it reads the layers {ids} of a target that has {number} layers")
    return tuple(EMBEDDING if block == -1 else block for block in blocks)


def _markov(config: HeadSettings, layout: str) -> Markov | None:
    rank = config.values.get("markov_rank")
    if rank is None:
        raise _unread(config, layout, "markov_rank")
    if rank == 0:
        return None
    kind = str(config.values.get("markov_head_type")).lower()
    if kind not in MARKOV_KINDS:
        raise config.unfit(f"its markov_head_type is {kind}, not {' or '.join(MARKOV_KINDS)}")
    return Markov(MARKOV_KINDS[kind], config.whole("markov_rank"))


def _second(config: HeadSettings) -> tuple[Convolutions | None, Selector | None]:
    """Return what DFlash2 adds. Without its selector it would silently be a DFlash."""
    keys = ("conv_kernel_size", "conv_group_size", "selector_rank", "selector_top_k")
    is_second = any("DFlash2" in name for name in architectures(config.values))
    if not is_second and all(config.values.get(key) is None for key in keys):
        return None, None
    taps, group_size, rank, top_k = (_needed(config, f"{Z_LAB} (DFlash2)", key) for key in keys)
    return Convolutions(taps, group_size), Selector(rank, top_k)


def _factor(config: HeadSettings, key: str) -> float | None:
    return config.fraction(key) if config.values.get(key) else None


def drafter_settings(
    config: HeadSettings, family: str, left_out: Collection[str]
) -> DecoderSettings:
    """Return the settings of the drafter's layers. Raises ModelError."""
    own = {key: value for key, value in config.values.items() if key not in left_out}
    own["model_type"] = family
    try:
        try:
            return settings_of(own)
        except Incomplete:
            return settings_of(own, _whole(config, own))
    except (Incomplete, NotNative) as error:
        raise config.unfit(f"its layers are not known here ({first_line(error)})") from error


def _whole(config: HeadSettings, own: Mapping[str, Any]) -> dict[str, Any]:
    """Return the config with what its family has as a default. Raises ModelError."""
    from transformers import AutoConfig

    try:
        whole: dict[str, Any] = AutoConfig.for_model(**{"model_type": "qwen3", **own}).to_dict()
    except Exception as error:  # unknown values in transformers' code: any type is possible
        raise config.unfit(f"its config.json describes no layer ({first_line(error)})") from error
    return whole


def _require_target(config: HeadSettings, settings: DecoderSettings, sizes: TargetSizes) -> None:
    """Raise ModelError for a drafter of another target, with that target's name and sizes."""
    number = config.values.get("num_target_layers") or sizes.num_layers
    width = config.values.get("target_hidden_size") or settings.hidden_size
    made_for = (width, settings.vocab_size, number)
    if made_for != (sizes.hidden_size, sizes.vocab_size, sizes.num_layers):
        raise config.unfit(
            f"it was made for {target_named(config.values) or 'another target'}, {width} wide with "
            f"{settings.vocab_size} tokens and {number} layers; this target is "
            f"{sizes.hidden_size} wide with {sizes.vocab_size} and {sizes.num_layers}"
        )
    if settings.hidden_size != sizes.hidden_size:
        raise config.unfit(
            f"its rows are {settings.hidden_size} wide and the target's {sizes.hidden_size}"
        )
