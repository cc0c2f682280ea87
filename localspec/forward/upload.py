"""Numbers of the host on a device, and back, without the host waiting for the copy.

A GPU copies from ordinary memory and to it only while the host waits; with pinned memory it copies
when its turn comes. Every function makes new memory each time: torch keeps it until the copy is
over, whereas a buffer of our own could be written to again before the device has read it.
"""

from __future__ import annotations

from typing import Any

import torch


def pinned(values: Any, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """A host tensor of `values` that `device` can copy without a wait (`non_blocking`)."""
    return torch.tensor(values, dtype=dtype, pin_memory=device.type == "cuda")


def uploaded(values: Any, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """A tensor of `values` on `device`."""
    return pinned(values, dtype, device).to(device, non_blocking=True)


def indices(places: Any, device: torch.device) -> torch.Tensor:
    """Ids or places on `device`, int64. A list as an index would be copied with a wait. A tensor
    is there already."""
    return places if isinstance(places, torch.Tensor) else uploaded(places, torch.int64, device)


def put_by(values: torch.Tensor) -> torch.Tensor:
    """Return a copy of `values` on the host, to be copied back to its device later. A GPU writes it
    when its turn comes, so the host must not read it."""
    if values.device.type != "cuda":
        return values.to("cpu", copy=True)
    try:
        copied = torch.empty(values.shape, dtype=values.dtype, pin_memory=True)
    except RuntimeError:  # The system pins a part of its memory at most.
        return values.to("cpu", copy=True)
    return copied.copy_(values, non_blocking=True)
