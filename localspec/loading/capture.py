"""Which loaded models have their forwards captured as graphs, and in which memory."""

from __future__ import annotations

from typing import TYPE_CHECKING

from localspec.core.errors import ConfigError
from localspec.loading.placement import Place
from localspec.machine.memory import GRAPHS_BYTES

if TYPE_CHECKING:
    from localspec.forward.graphs import GraphPool
    from localspec.forward.model import LanguageModel


def pool_of(place: Place) -> GraphPool | None:
    """Return where forwards are captured; None for a device that has no graphs."""
    from localspec.forward.graphs import CudaGraphPool

    return CudaGraphPool(place.device, GRAPHS_BYTES) if place.device.type == "cuda" else None


def capturable(
    model: LanguageModel, pool: GraphPool | None, is_fastest: bool = True
) -> LanguageModel:
    """Return the model with graphs, where it can have them. is_fastest: see LoadOptions.kernels.
    Raises ConfigError where the same bits are asked for and cannot be had."""
    from localspec.forward.attention import can_split
    from localspec.forward.decoder import Decoder
    from localspec.forward.graphs import CapturedDecoder
    from localspec.forward.one_width import OneWidthDecoder

    if pool is None or not isinstance(model, Decoder):
        return model
    if model.cache.states is not None and not is_fastest:
        raise ConfigError(
            "This model reads the text into states, which a GPU adds up in another order after "
            "every draft, so --kernels same-bits cannot be kept. Load it without --kernels, or on "
            "a processor with --device cpu."
        )
    if not model.is_capturable:
        return model
    if is_fastest or not can_split(model.cache.dtype, model.device):
        return CapturedDecoder(model, pool)
    return OneWidthDecoder(model, pool)
