"""The shape of a model, and the bytes that follow from it.

A ModelShape is read from a folder (folder_shapes), from a config.json (config_shapes) or written in
a profile; the bytes of weights and of the KV cache are arithmetic on it. Its parameters are counted
by the headers of the files, or are a profile's ready number, or are estimated by the sizes.

Not here: what fits (memory, planner), loading.
Source: the modelling files of transformers 5.23; totals checked against published shapes in
tests/machine/test_shapes.py.
"""

from __future__ import annotations

import platform
from dataclasses import dataclass
from typing import Literal

from localspec.core.precisions import FULL_BYTES, Precision
from localspec.formats.attention import (
    NUM_PENDING,
    NUM_STATES,
    ring_spare,
)
from localspec.formats.native import NATIVE
from localspec.machine.hardware import cpu_flags

# Whether torch has FBGEMM, by which the native decoder keeps weights that were published in 16 bits
# in 2 bytes where it computes in fp32 (weights.dense.Fp16Linear).
HAS_FBGEMM = platform.machine().lower() in ("x86_64", "amd64")
CPU_KEY_BLOCK = 512  # tokens; a processor's cache has room for a multiple (forward.cache.KEY_BLOCK)
GPU_STRETCH = 256  # tokens; elsewhere a ring has room for a multiple (forward.cache.STRETCH)
# Whether oneDNN lays weights in bf16 out anew (weights.dense.PackedLinear); unknown counts as yes.
PACKS_BF16 = not cpu_flags() or not {"avx512bw", "avx_ne_convert"}.isdisjoint(cpu_flags())
# bitsandbytes NF4: half a byte, and one fp32 scale for each block of 64 weights.
NF4_BYTES = 0.5 + 4 / 64
# Beside them bitsandbytes keeps a code table of 16 and one of 256 fp32 values for each matrix.
NF4_TABLE_BYTES = 4 * (16 + 256)
# MXFP4: half a byte, and one byte of scale for each block of 32 weights.
MXFP4_BYTES = 0.5 + 1 / 32
# int8: one byte, and for each output row at most a scale, a zero point, an offset and a bias.
INT8_ROW_BYTES = 16
ExpertsKept = Literal["4-bit", "stored"]
MATRICES_PER_LAYER = 7


@dataclass(frozen=True)
class Counted:
    """Parameters as the headers of a model's files count them: all, those of plain linear layers,
    those of experts, and those of tables that are looked up and never multiplied with."""

    num_params: int
    linear_params: int
    expert_params: int = 0
    table_params: int = 0


@dataclass(frozen=True)
class ModelShape:
    """One decoder. intermediate_size: width of the dense MLP; for a mixture of experts
    `num_experts` of `expert_intermediate_size` replace it, except in `num_dense_layers`.
    context_length: the longest that can be used here. is_recurrent: it has states; state_numbers:
    numbers of all its states in fp32 and of all their convolutions, which are kept in what is
    computed in; ingredient_bytes: of one token that states can go back. extra_params: weights
    beside the decoder (a vision tower), which are fetched with it and not kept. stored_as: how the
    file keeps the weights, where that is another way than they are computed in. kept_as: the
    precision of a model that stays as its files keep it, and kept_bytes, what they take.
    not_native: why the native decoder does not run it, after "because"; empty where it does.
    counted: None where its parameters are estimated. all_kv_width: as `kv_width` of all layers
    together, None where all have the same; window_kv_width: of those that see `window` positions.
    has_shared_keys: whether later layers read the keys of earlier ones.
    rotated_width: of all tables of angles together, 0 where they are as wide as a usual head.
    experts_kept: see native.Layout. group_size, num_in_groups: of 4-bit weights in the files that
    can stay as they are (formats.stored). is_published_wide: not held by fp16. mtp: the module for
    multi-token prediction in its files, as a decoder of one layer without an embedding; it is kept
    only where it drafts, and among extra_params."""

    family: str
    num_layers: int
    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    vocab_size: int
    context_length: int
    is_tied: bool
    num_experts: int = 0
    num_experts_per_token: int = 0
    expert_intermediate_size: int = 0
    num_dense_layers: int = 0
    is_recurrent: bool = False
    state_numbers: tuple[int, int] = (0, 0)
    ingredient_bytes: int = 0
    extra_params: int = 0
    stored_as: str = ""
    kept_as: Precision | None = None
    kept_bytes: int = 0
    not_native: str = ""
    counted: Counted | None = None
    all_kv_width: int | None = None
    window: int = 0
    window_kv_width: int = 0
    has_shared_keys: bool = False
    rotated_width: int = 0
    experts_kept: ExpertsKept = "4-bit"
    group_size: int = 0
    num_in_groups: int | None = None
    is_published_wide: bool = False
    mtp: ModelShape | None = None

    @property
    def published_bytes(self) -> int:
        """Of its weights on the hub: 16 bits each, but for those that are kept in groups of 4 bits,
        each group with a scale of 16 bits and a zero of 4."""
        packed = self.linear_params if self.group_size else 0
        in_blocks = self.expert_params if self.stored_as == "MXFP4" else 0
        whole = FULL_BYTES["bf16"] * (self.num_params - packed - in_blocks)
        return whole + int(packed * (0.5 + 2.5 / (self.group_size or 1)) + MXFP4_BYTES * in_blocks)

    @property
    def is_native(self) -> bool:
        """Whether the native decoder runs it."""
        return not self.not_native

    @property
    def keeps_mxfp4(self) -> bool:
        """True if its experts stay in MXFP4; those of a dense folder are none."""
        return self.is_native and self.experts_kept == "stored" and "MXFP4" in self.stored_as

    @property
    def has_4_bit_experts(self) -> bool:
        """True if its experts take about 4 bits a weight where its linear layers do."""
        return self.keeps_mxfp4 or (self.is_native and self.experts_kept == "4-bit")

    def may_split(self, precision: Precision, is_asked: bool = False) -> bool:
        """True if its experts may be in host memory while a GPU computes the rest: unasked only
        those that are kept in about 4 bits."""
        if not self.num_experts or not self.is_native or self.kept_as is not None:
            return False
        return is_asked or self._kept_experts(precision)[0] > 0

    def read_expert_bytes(self, precision: Precision, full: Precision) -> int:
        """Bytes of the experts that one token goes through."""
        tables = self.host_bytes(precision, full)
        held = self.host_bytes(precision, full, has_experts=True) - tables
        return held * self.num_experts_per_token // self.num_experts

    @property
    def query_width(self) -> int:
        return self.num_heads * self.head_dim

    @property
    def kv_width(self) -> int:
        """Width of the keys, and of the values, of one layer."""
        return self.num_kv_heads * self.head_dim

    @property
    def num_expert_layers(self) -> int:
        return self.num_layers - self.num_dense_layers if self.num_experts else 0

    @property
    def linear_params(self) -> int:
        """Weights held in plain linear layers: what 8-bit and 4-bit can shrink.

        Experts are not among them: transformers keeps them in fused three-dimensional
        parameters, which bitsandbytes leaves as they are.
        """
        if self.counted is not None:
            return self.counted.linear_params
        attention = 2 * (self.query_width + self.kv_width) * self.num_layers  # q, k, v and o
        mlp = 3 * self.intermediate_size * (self.num_layers - self.num_expert_layers)
        return self.hidden_size * (attention + mlp)

    @property
    def expert_params(self) -> int:
        if self.counted is not None and self.counted.expert_params:
            return self.counted.expert_params
        per_layer = 3 * self.hidden_size * self.expert_intermediate_size * self.num_experts
        return per_layer * self.num_expert_layers

    @property
    def num_params(self) -> int:
        """All weights. Where no header counts them this is an estimate by the sizes, without biases
        and the norms of heads: off by less than a thousandth."""
        if self.counted is not None:
            return self.counted.num_params
        embeddings = self.vocab_size * self.hidden_size * (1 if self.is_tied else 2)
        routers = self.num_experts * self.num_expert_layers
        small = self.hidden_size * (2 * self.num_layers + 1 + routers)
        return embeddings + self.linear_params + self.expert_params + small + self.extra_params

    @property
    def drafting_share(self) -> float:
        """Share of the weights that a token goes through that a token of the module for multi-token
        prediction goes through: one layer and the output head."""
        module = 0 if self.mtp is None else self.mtp._num_read
        return (self.vocab_size * self.hidden_size + module) / self._num_read

    @property
    def read_share(self) -> float:
        """Share of the weights of the decoder that a token goes through."""
        return self._num_read / (self.num_params - self.extra_params)

    @property
    def expert_share(self) -> float:
        """Share of the weights that a token goes through that are those of its experts. A further
        token in the same forward reads about as many others."""
        return self._num_read_of_experts / self._num_read

    @property
    def _num_read_of_experts(self) -> int:
        if not self.num_experts:
            return 0
        return self.expert_params * self.num_experts_per_token // self.num_experts

    @property
    def _num_read(self) -> int:
        """Weights that a token goes through, the output head among them."""
        unread = self.extra_params + self.table_params + self.expert_params
        unread += 0 if self.is_tied else self.vocab_size * self.hidden_size
        return self.num_params - unread + self._num_read_of_experts

    @property
    def active_width(self) -> int:
        """MLP width one token passes through."""
        experts = self.num_experts_per_token * self.expert_intermediate_size
        return max(experts, self.intermediate_size if not self.num_expert_layers else 0)

    @property
    def table_params(self) -> int:
        """Weights of tables that the native decoder looks up in host memory."""
        return self.counted.table_params if self.is_native and self.counted is not None else 0

    def weight_bytes(
        self,
        precision: Precision,
        full: Precision = "bf16",
        device: str = "cuda",
        has_experts: bool = True,
    ) -> int:
        """Bytes of all weights that stay on a device, see `host_bytes` for the others. full: what
        the unquantised part is kept in. has_experts: the experts are on the device too."""
        num_params, head = self.num_params - self.extra_params, self.vocab_size * self.hidden_size
        num_params -= self.table_params if device != "cpu" else 0
        num_params -= 0 if has_experts else self.expert_params
        # The native decoder lays a head out for a processor: beside an embedding it is tied to.
        is_kept = precision == self.kept_as  # its head in bf16, whatever is computed in
        is_copied = self.is_tied and device == "cpu" and self.is_native
        is_copied = is_copied and (PACKS_BF16 or not (is_kept or full == "bf16"))
        if is_kept:
            return self.kept_bytes + is_copied * head * FULL_BYTES["bf16"]
        num_params += head if is_copied else 0
        in_full: Precision = precision if precision in FULL_BYTES else full
        shrunk, held = (0, 0) if precision in FULL_BYTES else self._shrunk(precision, device, full)
        experts, of_experts = self._kept_experts(precision, device, full) if has_experts else (0, 0)
        shrunk, held = shrunk + experts, held + of_experts
        if precision == "4-bit-head":
            shrunk += head if is_copied or not self.is_tied else 0
            held += int(head * NF4_BYTES)
        embedded, in_layers = FULL_BYTES[in_full] * head, num_params - head - shrunk
        if precision == "4-bit-head" and device == "cuda":  # tied, it is the head's own
            embedded = 0 if self.is_tied else int(head * NF4_BYTES)
        return embedded + in_layers * self._layer_bytes(in_full, device) + held

    def looked_up_bytes(self, full: Precision, device: str) -> int:
        """Return the bytes on a device of what a token looks up and does not go through: tables of
        the native decoder, and an embedding apart from the output head."""
        is_apart = not self.is_tied or (device == "cpu" and self.is_native)
        embedding = self.vocab_size * self.hidden_size * FULL_BYTES[full] if is_apart else 0
        on_device = self.table_params if device == "cpu" else 0
        return embedding + on_device * self._layer_bytes(full, device)

    def host_bytes(self, precision: Precision, full: Precision, has_experts: bool = False) -> int:
        """Bytes of what stays in host memory where the native decoder computes on a GPU: tables as
        their files keep them, unpacked to 16 bits where those are quantised. has_experts: the
        experts are kept and computed there too."""
        is_wide = self.is_published_wide and not self.stored_as
        tables = self.table_params * FULL_BYTES["fp32" if is_wide else "bf16"]
        if not has_experts:
            return tables
        count, held = self._kept_experts(precision, "cpu", full)
        return tables + held + (self.expert_params - count) * FULL_BYTES[full]

    def loading_bytes(self, precision: Precision, full: Precision, device: str) -> int:
        """What a load holds beyond that for a while: on a GPU, embedding and head that bitsandbytes
        loads in full precision before they are put into 4 bits (forward.quantise)."""
        is_apart = bool(self.count_in_groups(device, full))  # they come from the host one by one
        if precision != "4-bit-head" or device != "cuda" or is_apart:
            return 0
        head, tables = self.vocab_size * self.hidden_size, 1 if self.is_tied else 2
        return tables * head * FULL_BYTES[full] - int((tables - 1) * head * NF4_BYTES)

    def _kept_experts(
        self, precision: Precision, device: str = "cuda", full: Precision = "bf16"
    ) -> tuple[int, int]:
        """How many weights of experts are kept in fewer bits, and their bytes."""
        if self.keeps_mxfp4:
            return self.expert_params, int(MXFP4_BYTES * self.expert_params)
        if not self.has_4_bit_experts or not precision.startswith("4"):
            return 0, 0
        has_groups = self.count_in_groups(device, full) > 0
        each = 0.5 + 2 * FULL_BYTES["bf16"] / self.group_size if has_groups else NF4_BYTES
        return self.expert_params, int(each * self.expert_params)

    def _layer_bytes(self, full: Precision, device: str) -> int:
        """Of a weight in a layer that is not quantised."""
        is_halved = full == "fp32" and device == "cpu" and self.is_native and HAS_FBGEMM
        return FULL_BYTES["fp16" if is_halved and not self.is_published_wide else full]

    def count_in_groups(self, device: str, full: Precision) -> int:
        """Weights that stay in the 4 bits of the files. torch has kernels for them on a processor
        and on a GPU that computes in bf16 (weights.int4)."""
        has_kernel = device == "cpu" or (device == "cuda" and full == "bf16")
        if not self.group_size or not has_kernel:
            return 0
        return self.linear_params if self.num_in_groups is None else self.num_in_groups

    def _shrunk(self, precision: Precision, device: str, full: Precision) -> tuple[int, int]:
        """How many weights of linear layers are kept in 8 or 4 bits, and their bytes."""
        count = 0 if precision == "8-bit" else self.count_in_groups(device, full)
        if not count:
            bits: Precision = "8-bit" if precision == "8-bit" else "4-bit"
            return self.linear_params, self.quantised_bytes(bits)
        # On a GPU layers that the file keeps in more bits are rounded (weights.precision).
        count = self.linear_params if device == "cuda" else count
        return count, int(count * (0.5 + 2 * FULL_BYTES["bf16"] / self.group_size))

    def loaded_bytes(
        self,
        precision: Precision,
        full: Precision,
        num_tokens: int,
        device: str,
        has_experts: bool = True,
    ) -> tuple[int, int]:
        """Of the weights and the tables that rotate so many tokens, and of their keys and values,
        on a device."""
        # As forward.cache.native_cache keeps keys and values.
        computed_in: Precision = "bf16" if precision == self.kept_as else full
        num_slots, kept_in, ring_unit = num_tokens, computed_in, GPU_STRETCH
        if self.is_native and device == "cpu":
            num_slots += -num_slots % CPU_KEY_BLOCK
            ring_unit = CPU_KEY_BLOCK
            kept_in = "fp32" if computed_in == "fp16" else computed_in
        weights = self.weight_bytes(precision, full, device, has_experts)
        if self.family in NATIVE and self.is_native:
            width = self.rotated_width or NATIVE[self.family].num_rotations * self.head_dim
            weights += 2 * num_tokens * width * FULL_BYTES[computed_in]  # cosines and sines
        # As forward.delta_chunks keeps the states on a GPU.
        num_states = 1 if self.is_native and device != "cpu" else NUM_STATES
        return weights, self.kv_bytes(num_slots, kept_in, num_states, ring_unit)

    def copy_bytes(self, precision: Precision) -> int:
        """Of linear layers and output head in 8 or 4 bits: what a self-draft does not share."""
        row_bytes = self.hidden_size * NF4_BYTES
        if precision == "8-bit":
            row_bytes = self.hidden_size + INT8_ROW_BYTES
        return self.quantised_bytes(precision) + int(self.vocab_size * row_bytes)

    def quantised_bytes(self, precision: Precision) -> int:
        """Bytes of the linear layers alone at 8 or 4 bits."""
        if precision == "4-bit":
            tables = self.num_layers * MATRICES_PER_LAYER * NF4_TABLE_BYTES
            return int(self.linear_params * NF4_BYTES) + tables
        assert precision == "8-bit", f"{precision} is not a quantised precision"
        attention_rows = self.query_width + 2 * self.kv_width + self.hidden_size
        mlp_rows = 2 * self.intermediate_size + self.hidden_size
        num_dense_layers = self.num_layers - self.num_expert_layers
        rows = self.num_layers * attention_rows + num_dense_layers * mlp_rows
        return self.linear_params + INT8_ROW_BYTES * rows

    def kv_bytes_per_token(self, full: Precision = "bf16") -> int:
        """Bytes of one position of all layers, whether they see a window or everything."""
        width = self.all_kv_width
        return 2 * (self.num_layers * self.kv_width if width is None else width) * FULL_BYTES[full]

    @property
    def state_bytes(self) -> int:
        """Bytes of the state after one token of a recurrent model, its convolution in 16 bits."""
        sums, convolved = self.state_numbers
        return FULL_BYTES["fp32"] * sums + FULL_BYTES["bf16"] * convolved

    def kv_bytes(
        self,
        num_tokens: int,
        full: Precision = "bf16",
        num_states: int = NUM_STATES,
        ring_unit: int = GPU_STRETCH,
    ) -> int:
        """Bytes of what is held of a text: keys and values, and the states of a recurrent model.
        The native decoder holds the newest positions of layers with a window in a ring of a
        multiple of `ring_unit` slots; transformers' forward holds every position."""
        held = self.kv_bytes_per_token(full) * num_tokens + num_states * self.state_bytes
        held += NUM_PENDING * self.ingredient_bytes
        num_slots = self.window + ring_spare(self.has_shared_keys)
        num_slots += -num_slots % ring_unit
        forgotten = max(0, num_tokens - num_slots) if self.is_native else 0
        return held - 2 * self.window_kv_width * FULL_BYTES[full] * forgotten
