"""The first import of torch, and what its libraries must be told before it."""

from __future__ import annotations

import logging
import os
from typing import Any

from localspec.core.backend import Report
from localspec.core.options import FASTEST
from localspec.machine.hardware import cpu_flags

KERNELS_KEPT = 256  # of some 0.6 MB; the thousand that are usual come with prompts of all lengths
# oneDNN's largest instruction set for `same-bits`. Its kernels with AMX give a row other bits from
# 33 rows on, so a reply would depend on how its prompt is read. Those with AVX-512 and bf16 do not.
SAME_BITS_ISA = "AVX512_CORE_BF16"
# MKL's mode for `same-bits` on a processor without AVX-512: a row of a product has the same bits at
# every number of rows. Without it attention fills rows up to 24 (forward.row_attention). With
# AVX-512 a few filled rows do the same, and the mode would cost up to a quarter.
SAME_BITS_MKL = "AUTO,STRICT"


def library_settings(kernels: str | None) -> dict[str, str]:
    """Environment variables that torch's libraries read when they are loaded. On a processor they
    make a kernel for each number of rows, and would fill the memory with them. kernels: as in
    LoadOptions."""
    limits = ("LRU_CACHE_CAPACITY", "ONEDNN_PRIMITIVE_CACHE_CAPACITY")
    settings = dict.fromkeys(limits, str(KERNELS_KEPT))
    if kernels == FASTEST:
        return settings
    if "avx512f" not in cpu_flags():
        settings["MKL_CBWR"] = SAME_BITS_MKL
    return {**settings, "ONEDNN_MAX_CPU_ISA": SAME_BITS_ISA}


def quiet_torch(report: Report, kernels: str | None) -> Any:
    """Import torch with `library_settings`, and keep the libraries around it from printing. A
    variable that is set already stays as it is."""
    report("starting torch")
    for name, value in library_settings(kernels).items():
        os.environ.setdefault(name, value)
    import torch
    import transformers

    of_transformers: Any = transformers.logging  # untyped there
    of_transformers.set_verbosity_error()
    of_transformers.disable_progress_bar()
    logging.getLogger("bitsandbytes").setLevel(logging.ERROR)  # a line at every 8-bit product
    return torch
