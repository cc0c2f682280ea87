"""A transformers causal language model with our KV cache: tokens in, logits out.

Contract: `forward` appends n slots and returns one row of fp32 logits for each of the last
`num_logits` tokens. The module is any family of transformers with full or windowed attention;
neither it nor its config is edited. The cache keeps every position, and layers that attend to a
window get a mask for it, so that a rejected draft can be taken back anywhere. `kv_shape` refuses
models whose cache cannot roll back (recurrent states).

Not here: loading from disk, sampling, drafting.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from itertools import chain
from typing import Any, Protocol

import torch

from localspec.core.errors import ModelError
from localspec.formats.attention import attention_fault, count_key_heads, is_recurrent
from localspec.forward.cache import KVCache, KVShape
from localspec.forward.features import LAST, Features
from localspec.forward.passes import Rows
from localspec.forward.tree import depths, visible_mask
from localspec.forward.upload import indices, uploaded

# How far logits may lie apart that are computed in two ways, by their norm: only rounding.
AGREEMENT = {torch.float32: 1e-3, torch.bfloat16: 0.05, torch.float16: 0.02}
PREFILL_CHUNK = 512  # bounds activations and the time until a cancel is seen


class LanguageModel(Protocol):
    """What the engine and the drafters need of a model, whatever computes it."""

    cache: KVCache
    vocab_size: int
    device: torch.device

    def forward(
        self,
        tokens: Sequence[int],
        parents: Sequence[int] | None = None,
        num_logits: int | None = None,
    ) -> torch.Tensor: ...

    def follow(self, layers: Sequence[int], of_last_row: bool = False) -> Features:
        """Keep the hidden states of these layers beside the cache, from the next forward on.
        of_last_row: see Features.follow."""
        ...

    def head(self, rows: torch.Tensor) -> torch.Tensor:
        """Logits of normalised rows: [n, d] -> [n, V] fp32."""
        ...

    def embed(self, ids: Sequence[int] | torch.Tensor) -> torch.Tensor:
        """Input embeddings: [n, d]. ids: [n], on the device where they are a tensor."""
        ...

    @property
    def num_layers(self) -> int: ...

    @property
    def weight_bytes(self) -> int: ...

    @property
    def sharing_key(self) -> Hashable:
        """Return what models whose rows may run in one forward have in common: their weights."""
        ...

    def forward_rows(self, parts: Sequence[Rows]) -> list[torch.Tensor]:
        """Return the logits of parts of models with this key, as each one's own forward gives
        them."""
        ...


class ModuleLM:
    """What every module of transformers has, whatever it remembers of a text."""

    def __init__(self, module: Any, cache: KVCache) -> None:
        self.module = module
        self.cache = cache
        self.device: torch.device = module.device
        self.vocab_size: int = module.get_output_embeddings().out_features

    @property
    def num_layers(self) -> int:
        return int(self.module.config.get_text_config().num_hidden_layers)

    @property
    def weight_bytes(self) -> int:
        held = {tensor.data_ptr(): tensor.nbytes for tensor in _tensors_of(self.module)}
        return sum(held.values())  # tied weights count once

    @property
    def sharing_key(self) -> Hashable:
        """Return a key that no other model has: transformers runs one sequence at a time."""
        return id(self)

    def forward_rows(self, parts: Sequence[Rows]) -> list[torch.Tensor]:
        """See LanguageModel."""
        return [part.forward() for part in parts]

    @torch.inference_mode()
    def head(self, rows: torch.Tensor) -> torch.Tensor:
        """See LanguageModel."""
        products: torch.Tensor = self.module.get_output_embeddings()(rows)  # [n, V]
        return scaled(products.float(), self.module.config)

    @torch.inference_mode()
    def embed(self, ids: Sequence[int] | torch.Tensor) -> torch.Tensor:
        """See LanguageModel."""
        rows: torch.Tensor = self.module.get_input_embeddings()(indices(ids, self.device))
        factor = getattr(self.module.config.get_text_config(), "embedding_multiplier", None)
        return rows * factor if factor else rows


class CausalLM(ModuleLM):
    """The transformers path."""

    def __init__(self, module: Any, cache: KVCache) -> None:
        super().__init__(module, cache)
        self._window = window_of(module.config)
        self._has_kinds = getattr(module.config.get_text_config(), "layer_types", None) is not None
        # That attention adds its mask to the scores, and knows no causal order without one.
        self._is_eager = module.config.get_text_config()._attn_implementation == "eager"

    @torch.inference_mode()
    def forward(
        self,
        tokens: Sequence[int],
        parents: Sequence[int] | None = None,
        num_logits: int | None = None,
    ) -> torch.Tensor:
        """Run `tokens` after what the cache holds and append them to it.

        parents: index of each token's parent in `tokens`, -1 = the last cached token; None is a
        chain. num_logits: how many of the last tokens need logits; None is all.
        Returns [num_logits, V] fp32. Raises CacheError when the context is full.
        """
        wanted = len(tokens) if num_logits is None else num_logits
        features = self.cache.features
        with self.cache.append(tokens) as start:
            positions, mask = self._layout(len(tokens), parents, start)
            output = self.module(
                input_ids=indices([tokens], self.device),
                position_ids=positions,
                attention_mask=mask,
                past_key_values=self.cache,
                use_cache=True,
                logits_to_keep=wanted,
                output_hidden_states=features is not None,
            )
            if features is not None:
                states = output.hidden_states  # embedding, then each layer; the last normalised
                rows = {at: states[-1 if at == LAST else at + 1][0] for at in features.layers}
                features.write(start + len(tokens), rows)
        logits: torch.Tensor = output.logits[0]  # [num_logits, V]
        return logits.float()

    def follow(self, layers: Sequence[int], of_last_row: bool = False) -> Features:
        """See LanguageModel. Raises ModelError for the residual of the last layer, which
        transformers returns only normalised (LAST)."""
        if self.module.config.get_text_config().num_hidden_layers - 1 in layers:
            raise ModelError("transformers gives the last layer's states normalised only.")
        weight = self.module.get_input_embeddings().weight
        return self.cache.follow(layers, weight.shape[1], weight.dtype, of_last_row)

    def _layout(
        self, num_tokens: int, parents: Sequence[int] | None, start: int
    ) -> tuple[torch.Tensor, torch.Tensor | dict[str, torch.Tensor] | None]:
        """Positions, and the mask: for each kind of layer where they differ."""
        if parents is None:
            positions = torch.arange(start, start + num_tokens, device=self.device)
        else:
            places = [start + depth for depth in depths(parents)]
            positions = uploaded(places, torch.int64, self.device)
        return positions[None], self._mask(num_tokens, parents, start)

    def _mask(
        self, num_tokens: int, parents: Sequence[int] | None, start: int
    ) -> torch.Tensor | dict[str, torch.Tensor] | None:
        def made(window: int | None) -> torch.Tensor:
            seen = visible_mask(num_tokens, parents, start, self.device, window)
            if not self._is_eager:
                return seen
            dtype = self.module.dtype
            blocked = torch.zeros(seen.shape, dtype=dtype, device=self.device)
            return blocked.masked_fill_(~seen, torch.finfo(dtype).min)

        if self._window is not None and start + num_tokens > self._window:
            if not self._has_kinds:
                return made(self._window)
            return {"full_attention": made(None), "sliding_attention": made(self._window)}
        needs_none = parents is None and (num_tokens == 1 or start == 0)  # sdpa's own is_causal
        return None if needs_none and not self._is_eager else made(None)


def _tensors_of(module: Any) -> Iterator[torch.Tensor]:
    """All that it holds, with the scales that bitsandbytes keeps beside a weight of 4 bits."""
    for tensor in chain(module.parameters(), module.buffers()):
        yield tensor
        state = getattr(tensor, "quant_state", None)
        while state is not None:  # scales may have scales
            yield state.absmax
            state = state.state2


def scaled(logits: torch.Tensor, config: Any) -> torch.Tensor:
    """What a family does to its logits after the output embedding: divide (Granite), multiply
    (Cohere) or cap (Gemma 2) them. A caller that depends on it compares with a forward first, since
    other families may do something else.

    logits: [..., V] fp32, as the output embedding gives them. config: of transformers."""
    text = config.get_text_config()
    divisor = getattr(text, "logits_scaling", None)
    factor = getattr(text, "logit_scale", None)
    cap = getattr(text, "final_logit_softcapping", None)
    if divisor:
        logits = logits / divisor
    if factor:
        logits = logits * factor
    return cap * torch.tanh(logits / cap) if cap else logits


def prefill(model: LanguageModel, tokens: Sequence[int]) -> None:
    """Run `tokens` through the model for their keys and values, PREFILL_CHUNK at a time."""
    base = model.cache.length
    place, last = base, base + len(tokens)
    while place < last:
        end = min(last, model.cache.piece_end(place, place + PREFILL_CHUNK))
        model.forward(tokens[place - base : end - base], num_logits=1)
        place = end


def kv_shape(config: Any, capacity: int) -> KVShape:
    """The cache a transformers config needs. Raises ModelError where it cannot roll back."""
    text = config.get_text_config()
    described = _described(text)
    fault = attention_fault(described)
    if fault is not None:
        raise ModelError(fault)
    sizes = [_key_size(each) for each in _configs_of_layers(text)]
    heads, width = max(sizes, key=lambda size: size[0] * size[1], default=(0, 0))
    of_layers = tuple(sizes) if len(set(sizes)) > 1 else ()
    shape = KVShape(len(sizes), heads, width, capacity, of_layers)
    if min(shape.num_layers, shape.num_kv_heads, shape.head_dim) < 1:
        raise ModelError(
            f"The config of this {text.model_type} model names {shape.num_layers} layers of "
            f"{shape.num_kv_heads} heads of {shape.head_dim}, which no model has. Fetch it again."
        )
    return shape


def _configs_of_layers(text: Any) -> list[Any]:
    """Of the layers that keep keys and values: the last ones of Gemma 3n and 4 read others'."""
    num_layers = text.num_hidden_layers
    kept = num_layers - int(getattr(text, "num_kv_shared_layers", None) or 0)
    return list(text.per_layer_config)[:kept] if text.is_heterogeneous else [text] * kept


def _key_size(text: Any) -> tuple[int, int]:
    """Heads of keys and their size."""
    heads = text.num_attention_heads
    width = getattr(text, "head_dim", None) or text.hidden_size // heads
    return count_key_heads(text.to_dict(), heads), width


def has_state(config: Any) -> bool:
    """Whether a transformers config is that of a model with recurrent states."""
    return is_recurrent(_described(config.get_text_config()))


def _described(text: Any) -> dict[str, Any]:
    return {**text.to_dict(), "layer_types": getattr(text, "layer_types", None)}


def window_of(config: Any) -> int | None:
    """How many positions, its own among them, a token sees in the layers of a transformers config
    that attend to a window; None where no layer does."""
    text = config.get_text_config()
    kinds = getattr(text, "layer_types", None)
    # Mistral and Phi-3 name a window and no kinds; Qwen has a switch.
    has_window = (
        "sliding_attention" in kinds if kinds else getattr(text, "use_sliding_window", True)
    )
    return getattr(text, "sliding_window", None) if has_window else None
