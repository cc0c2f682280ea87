"""Whether the attention that a config.json describes can be run here, before any weight is read."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

# Positions that a layer with a window holds beyond the window, so that a text can go back by them.
RING_SPARE = 256
# The same where later layers read its keys after all rows of a forward: so many as a prompt is read
# at once (forward.model.PREFILL_CHUNK).
RING_SPARE_OF_SHARED = 512
# States of a recurrent model that are held at once, the present one and the one before a draft. The
# native decoder holds the latter alone on a GPU.
NUM_STATES = 2
# Tokens between these two states at most, of which the native decoder holds the ingredients.
NUM_PENDING = 32
# Copies of states and rings at earlier lengths of one text, which are held in the RAM. A copy of
# states takes 50 to 150 MiB.
MOST_SNAPSHOTS = 8
# Bytes of RAM for these copies of one text. The windows of Gemma 4 31B take 825 MiB in bf16, so
# that the ends of two turns and of their prompts fit.
MOST_SNAPSHOT_BYTES = 4 * 2**30
# Families all of whose layers attend to the window that they name.
WINDOWED = frozenset(("mistral", "phi3", "starcoder2", "mixtral", "qwen3_moe", "ministral3",
                      "qwen3_vl_moe_text"))  # fmt: skip
# The layers of Gemma 3 between two that see everything, where its config.json lists no kinds.
GEMMA3_PATTERN = 6
KNOWN_KINDS = ("full_attention", "sliding_attention", "attention")
# Layers whose memory of the text is a state of fixed size; a hybrid has keys and values as well.
STATE_KINDS = frozenset(("linear_attention", "conv", "mamba", "recurrent"))
RECURRENT_KINDS = STATE_KINDS | {"hybrid"}
OTHER_KINDS = frozenset(("mlp", "moe"))  # beside them, in the words of such families
# Families without any layer of attention.
ALL_STATES = frozenset(("mamba", "mamba2", "falcon_mamba"))
# Of these transformers begins with an empty state at every piece of several tokens.
TOKEN_BY_TOKEN = frozenset(("mamba", "falcon_mamba", "jamba"))
# Attention of their own in transformers, which cannot check several drafted tokens at once.
CHECKS_NO_DRAFTS = frozenset(
    ("bloom", "codegen", "cpmant", "git", "gptj", "hrm_text", "mpt", "openai-gpt",
     "recurrent_gemma", "xlstm")
)  # fmt: skip
# They read whole texts and continue none.
ENCODERS = frozenset(
    ("albert", "bert", "bert-generation", "big_bird", "camembert", "data2vec-text", "deberta",
     "deberta-v2", "distilbert", "electra", "ernie", "megatron-bert", "modernbert", "mpnet",
     "nomic_bert", "rembert", "roberta", "roberta-prelayernorm", "roc_bert", "roformer",
     "xlm-roberta", "xlm-roberta-xl", "xmod")
)  # fmt: skip
RECURRENT_FAMILIES = ALL_STATES | {
    "bamba", "falcon_h1", "granitemoehybrid", "jamba", "lfm2", "lfm2_moe", "nemotron_h",
    "qwen3_5", "qwen3_5_moe", "qwen3_5_moe_text", "qwen3_5_text", "qwen3_next",
}  # fmt: skip


def layer_kinds(text: Mapping[str, Any]) -> list[str]:
    """Of each layer; empty where nothing says them."""
    return [str(kind) for kind in text.get("layer_types") or text.get("layers_block_type") or ()]


def is_recurrent(text: Mapping[str, Any]) -> bool:
    """Whether a model keeps a state that cannot go back, and can be run plainly. Of hybrid families
    some models have layers of attention alone, as Granite 4 Micro."""
    kinds = {*layer_kinds(text)}
    known = RECURRENT_KINDS | OTHER_KINDS | {*KNOWN_KINDS}
    family = str(text.get("model_type"))
    is_hybrid = family in RECURRENT_FAMILIES and (not kinds or family in ALL_STATES)
    has_states = is_hybrid or bool(kinds & RECURRENT_KINDS)
    return has_states and kinds <= known and family not in CHECKS_NO_DRAFTS


def no_drafts_for(family: str) -> str:
    """Why nothing drafts for a family of TOKEN_BY_TOKEN."""
    return (
        f"{family} reads the text into a state, here token by token, so checking a draft takes as "
        "long as writing it and replies come at plain speed. For a model with full attention, such "
        "as Qwen3, something could draft."
    )


def chains_for(family: str) -> str:
    """How drafts are checked for the other models with a recurrent state."""
    return (
        f"{family} reads the text into a state. It checks a draft that is one chain of tokens, and "
        "reads the accepted part again after a rejection; trees, heads and drafts by its own "
        "layers need a model with full attention."
    )


# Why a drafter that sends trees is not offered.
TAKES_CHAINS = (
    "Each of its forwards follows one text, so it checks a draft that is one chain of tokens, and "
    "this drafter sends trees. Choose a drafter that sends chains, such as word lookup or the "
    "small model."
)


def cannot_check(family: str) -> str:
    """Why nothing of a family of CHECKS_NO_DRAFTS is loaded."""
    return (
        f"{family} has an attention of its own that cannot check several tokens at once here. "
        "Choose a model of another family, such as Llama, Qwen or Gemma."
    )


def does_not_continue(family: str) -> str:
    return (
        f"{family} does not continue a text. Choose a model that chats, such as one of Llama, Qwen "
        "or Gemma."
    )


def count_attention_layers(text: Mapping[str, Any], num_layers: int) -> int:
    """Layers that keep keys and values; all where nothing says otherwise."""
    if str(text.get("model_type")) in ALL_STATES:
        return 0
    if kinds := layer_kinds(text):
        return sum(kind not in STATE_KINDS | OTHER_KINDS for kind in kinds)
    every = text.get("full_attention_interval") or text.get("attn_layer_period")
    return num_layers // every if isinstance(every, int) and every > 0 else num_layers


def count_dense_layers(text: Mapping[str, Any], num_layers: int) -> int:
    """Layers of a mixture that hold a plain MLP instead of experts."""
    dense = set(text.get("mlp_only_layers") or ())
    stride = int(text.get("decoder_sparse_step") or 1)
    return sum(1 for i in range(num_layers) if i in dense or (i + 1) % stride != 0)


def count_key_heads(text: Mapping[str, Any], num_heads: int) -> int:
    """Heads of keys, and of values, of a layer with num_heads heads of queries."""
    if text.get("multi_query") and not text.get("new_decoder_architecture"):  # Falcon
        return 1
    return int(text.get("num_key_value_heads") or num_heads)


def count_key_width(text: Mapping[str, Any], num_layers: int, is_window: bool = False) -> int:
    """Width of the keys, and of the values, of all layers together. is_window: of those that attend
    to a window alone. In Gemma 4 layers that see everything have another width, and the last ones
    read the keys of others."""
    kinds = layer_kinds(text)
    if not kinds:
        every = count_windows(text, num_layers) if is_window else num_layers
        return min(count_attention_layers(text, num_layers), every) * key_width_of(text, 0)
    num_kept = len(kinds) - int(text.get("num_kv_shared_layers") or 0)
    return sum(
        key_width_of(text, layer)
        for layer, kind in enumerate(kinds[:num_kept])
        if (kind == "sliding_attention" if is_window else kind not in STATE_KINDS | OTHER_KINDS)
    )


def count_windows(text: Mapping[str, Any], num_layers: int) -> int:
    """Return the layers with a window where a config.json lists no kinds of layers."""
    family = str(text.get("model_type"))
    if not text.get("sliding_window") or text.get("use_sliding_window") is False:
        return 0
    if family.startswith("gemma3"):
        return num_layers - num_layers // int(text.get("sliding_window_pattern") or GEMMA3_PATTERN)
    return num_layers if family in WINDOWED else 0


def key_width_of(text: Mapping[str, Any], layer: int) -> int:
    """Width of the keys, and of the values, of one layer."""
    heads, size = key_heads_of(text, layer)
    return heads * size


def key_heads_of(text: Mapping[str, Any], layer: int) -> tuple[int, int]:
    """Return the heads of keys of one layer, and the size of its heads. A published config names
    what differs once for all such layers, one that transformers has written for each of them."""
    num_heads = int(text.get("num_attention_heads") or 1)
    heads = count_key_heads(text, num_heads)
    size = int(text.get("head_dim") or int(text.get("hidden_size") or 0) // num_heads)
    if by_layer := text.get("per_layer_config"):
        own = sizes_of_layer(by_layer, layer)
        return int(own.get("num_key_value_heads") or heads), int(own.get("head_dim") or size)
    kinds, wide = layer_kinds(text), text.get("global_head_dim")
    if not wide or not kinds or kinds[layer] != "full_attention":
        return heads, size
    few = text.get("attention_k_eq_v") and text.get("num_global_key_value_heads")
    return int(few or heads), int(wide)


def sizes_of_layer(by_layer: Mapping[str, Any], layer: int) -> Mapping[str, Any]:
    """Return what `per_layer_config` says of one layer. transformers numbers the layers in as many
    digits as the last one has: "04" of 12 layers."""
    by_number: dict[int, Mapping[str, Any]] = {int(key): own for key, own in by_layer.items()}
    return by_number.get(layer) or {}


def count_rotated_width(text: Mapping[str, Any]) -> int:
    """Return the sizes of the heads of each kind of layers, added up; 0 where nothing says them."""
    kinds = layer_kinds(text)
    return sum({kind: key_heads_of(text, at)[1] for at, kind in enumerate(kinds)}.values())


def ring_spare(has_shared_keys: bool) -> int:
    """Return the positions that a layer with a window holds beyond the window, at least.
    has_shared_keys: whether later layers read the keys of others."""
    return RING_SPARE_OF_SHARED if has_shared_keys else RING_SPARE


def attention_fault(text: Mapping[str, Any]) -> str | None:
    """Why not, as sentences; None where nothing is against it. text: the config of the part that
    reads text."""
    family = str(text.get("model_type"))
    if family in ENCODERS or text.get("is_encoder_decoder"):
        return does_not_continue(family)
    if family in CHECKS_NO_DRAFTS:
        return cannot_check(family)
    others = sorted({*layer_kinds(text)} - set(KNOWN_KINDS))
    if others:
        return (
            f"{family} has layers of the kind {', '.join(others)}. Their state cannot take back a "
            "rejected draft. Choose a model with full attention."
        )
    of_values = text.get("v_head_dim")
    if text.get("kv_lora_rank") or of_values not in (None, text.get("head_dim", of_values)):
        named = "latent attention (MLA)" if text.get("kv_lora_rank") else "attention"
        return (
            f"{family} has {named} whose keys and values differ in size, which the cache here does "
            "not hold yet. Choose a model of another family, such as Qwen3."
        )
    return None
