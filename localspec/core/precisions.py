"""The precisions of weights, by the names that people, torch and the log have for them.

Not here: what a precision takes of a model (machine.shapes), torch's own types (forward.load).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal, get_args

# 4-bit-head: the output head in 4 bits too, and on a GPU the embedding.
Precision = Literal["fp32", "fp16", "bf16", "8-bit", "4-bit", "4-bit-head"]
# Bytes of a value in a precision that is not quantised, and torch's name of it.
FULL_BYTES: Mapping[str, int] = {"fp32": 4, "fp16": 2, "bf16": 2}
TORCH_NAMES: Mapping[Precision, str] = {"fp32": "float32", "fp16": "float16", "bf16": "bfloat16"}
# By every name: torch's, which the log has, or the short one.
PRECISIONS: Mapping[str, Precision] = {
    **{name: name for name in get_args(Precision)},
    **{of_torch: name for name, of_torch in TORCH_NAMES.items()},
}
