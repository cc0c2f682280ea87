"""The steps of a Gemma 4 assistant with fixed shapes and no work on the host.

All steps of a draft stand at one position and see the same keys of the target, so that their masks
are made once a draft. Nothing is written.
"""

from __future__ import annotations

import torch

from localspec.forward.attention import grouped_attention, grouped_mask
from localspec.forward.decoder import Decoder
from localspec.forward.features import LAST, Features
from localspec.forward.heads.assistant_parts import AssistantParts
from localspec.forward.mixer import Table
from localspec.forward.row_attention import Attend
from localspec.forward.tree import slot_mask


class StaticAssistant:
    """An assistant's steps over the first `bucket` positions of its target's cache: a
    heads.fixed.FixedSteps. The numbers are the position of the root and its id."""

    def __init__(
        self, parts: AssistantParts, target: Decoder, bucket: int, features: Features
    ) -> None:
        self._parts, self._target, self._features = parts, target, features
        self._decoder = Decoder(parts.layers, target.cache, is_fastest=True)
        self._bucket = bucket
        self._columns = torch.arange(bucket, device=target.device)
        self._single = torch.zeros(1, 1, dtype=target.cache.dtype, device=target.device)
        self._tables: tuple[Table, ...] = ()
        self._attend: Attend | None = None

    def start(self, numbers: torch.Tensor) -> torch.Tensor:
        """See FixedSteps."""
        position, root = numbers[:1], numbers[1:2]
        self._stand_at(position)
        return self._step(root, self._features.slots(LAST).index_select(0, position - 1))

    def resume(self, numbers: torch.Tensor, num_drafted: torch.Tensor) -> None:
        """See FixedSteps; the position stays."""
        self._stand_at(numbers[:1])

    def extend(self, token: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        """See FixedSteps."""
        return self._step(token, self._parts.after(rows))

    def logits(self, rows: torch.Tensor) -> torch.Tensor:
        """See FixedSteps."""
        return self._parts.logits(rows)

    def stated(self) -> None:
        """See FixedSteps."""

    def _step(self, token: torch.Tensor, states: torch.Tensor) -> torch.Tensor:
        """Return normalised rows [1, d]. states: of the target, [1, backbone]."""
        assert self._attend is not None, "`start` or `resume` came before"
        rows = self._parts.entered(self._target.embed(token), states)
        rows, _ = self._decoder.unpadded_layers(rows, self._tables, self._attend)
        return self._parts.layers.final_norm(rows)

    def _stand_at(self, position: torch.Tensor) -> None:
        self._tables = self._parts.layers.tables_at(position)
        self._attend = self._attention(position - 1)

    def _attention(self, last: torch.Tensor) -> Attend:
        """Return the attention of one row to all that the target has cached up to `last`, [1]."""
        layers, cached = self._parts.layers.attentions, self._target.cache.slots
        slots = [cached[kv_layer] for kv_layer in self._parts.kv_layers]
        kinds = [
            (layer.window, layer.heads.num_groups, min(self._bucket, keys.shape[2]))
            for layer, (keys, _) in zip(layers, slots, strict=True)
        ]
        # As in `Assistant`: one token more than the last cached one itself sees.
        masks = {
            (window, groups, size): grouped_mask(
                slot_mask(last, last, self._single, self._columns[:size], window and window + 1),
                groups,
            )
            for window, groups, size in dict.fromkeys(kinds)
        }

        def attend(layer: int, queries: torch.Tensor, keys_values: torch.Tensor) -> torch.Tensor:
            (keys, values), kind = slots[layer], kinds[layer]
            size = kind[2]
            return grouped_attention(queries, keys[:, :, :size], values[:, :, :size], masks[kind])

        return attend
