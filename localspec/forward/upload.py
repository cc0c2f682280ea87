"""Numbers of the host on a device, without the host waiting for the copy.

Contract: a GPU copies from ordinary memory only while the host waits; from pinned memory it copies
when its turn comes. Both functions make new memory each time: torch keeps it until the copy is
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
