"""What to load instead when the loaded plan has no room: fewer bits, then a smaller model.

Contract: looks at profiles and folders only, loads nothing, needs no torch. What is offered is
smaller for certain; whether it fits is checked when it is loaded.

Not here: what fits beforehand (planner).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from localspec.config import Profile
from localspec.errors import LocalspecError
from localspec.machine.models import KnownModel, find_model
from localspec.options import LoadOptions, Offer

# A precision and the next one with fewer bits, as the person names them.
FEWER_BITS = {"float32": "8-bit", "float16": "8-bit", "bfloat16": "8-bit", "8-bit": "4-bit"}


def smaller_offer(
    options: LoadOptions, target: str, precision: str, profiles: Mapping[str, Profile]
) -> Offer | None:
    """target, precision: of what is loaded, as a description names them. None where nothing
    smaller is known that lies on this machine."""
    fewer = FEWER_BITS.get(precision)
    if fewer is not None:
        text = f"{target} in {fewer} weights takes about half the memory; answers change a little."
        return Offer(text, replace(options, dtype=fewer))
    found = _next_smaller(options.model or target, profiles)
    if found is None:
        return None
    text = f"{found.shape.name} is smaller and lies on this machine."
    wanted = LoadOptions(model=found.shape.name, context=options.context, home=options.home)
    return Offer(text, wanted)


def _next_smaller(name: str, profiles: Mapping[str, Profile]) -> KnownModel | None:
    """The largest of those with fewer parameters, drafts of another aside."""
    try:
        size = find_model(name, profiles).shape.num_params
    except LocalspecError:
        return None
    drafts = {d for p in profiles.values() for e in p.models.values() for d in e.drafts if e.folder}
    here = list[KnownModel]()
    for profile in profiles.values():
        for key in profile.models:
            try:
                known = find_model(key, profiles)
            except LocalspecError:  # a profile's folder that is not there
                continue
            if known.folder is not None and key not in drafts and known.shape.num_params < size:
                here.append(known)
    return max(here, key=lambda known: known.shape.num_params, default=None)
