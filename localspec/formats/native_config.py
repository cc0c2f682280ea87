"""Whether the native decoder runs a model, by its config.json alone.

Loading and the plan both ask here, so a plan counts the memory of the forward that will run.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from localspec.formats.decoder_settings import settings_of
from localspec.formats.native import KNOWN_AS, LAYOUTS, NATIVE, OF_IMAGES
from localspec.formats.rotation_settings import Incomplete, NotNative


def text_settings(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings of the part of a config.json that reads text, its family by the name
    that the layouts have for it."""
    family, text = str(config.get("model_type")), dict(config)
    if family in OF_IMAGES:
        text = {**(config.get("text_config") or {}), **tying(config)}
    if text.get("model_type") not in LAYOUTS:
        text["model_type"] = {**KNOWN_AS, **OF_IMAGES}.get(family, family)
    return text


def tying(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return whether the head is tied, empty where a config does not say it."""
    said = config.get("tie_word_embeddings")
    return {} if said is None else {"tie_word_embeddings": said}


def native_fault(config: Mapping[str, Any]) -> str:
    """Return why the native decoder does not run a model of a native family, after "because"; ""
    where it does, where only transformers can complete the config.json, and for other families.
    Raises ModelError for sizes that no model has."""
    if str(config.get("model_type")) not in NATIVE:
        return ""
    try:
        settings_of(text_settings(config))
    except NotNative as fault:
        return fault.reason
    except Incomplete:
        return ""
    return ""
