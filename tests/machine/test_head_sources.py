"""A target is fetched with the head that was published for it, and loads where it is missing."""

from __future__ import annotations

import json
import shutil
import threading
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from localspec.core.backend import Message, Request
from localspec.core.config import SHIPPED_PROFILES, settings_for
from localspec.core.options import LoadOptions
from localspec.loading.local_backend import open_local_backend
from localspec.machine.catalogue import (
    Catalogue,
    profile_models,
    with_heads_of_originals,
    with_own_heads,
)
from localspec.machine.model import Model
from localspec.machine.profiles import load_profiles
from localspec.machine.sources import resolve, usual_drafts
from tests.kit.hub_stub import HubStub
from tests.kit.model_folders import VOCAB_SIZE
from tests.kit.random_block import write_random
from tests.kit.tiny import tiny_llama, with_cache

pytestmark = pytest.mark.usefixtures("own_home")

TARGET, DRAFT, HEAD = "someone/target", "someone/draft", "maker/assistant"
PROFILE = f"""
default = "{TARGET}"
family = "llama"

[models."{TARGET}"]
license = "Apache-2.0"
num_layers = 1
hidden_size = 64
num_heads = 4
num_kv_heads = 2
head_dim = 16
intermediate_size = 128
vocab_size = 264
context_length = 256
is_tied = false
drafts = ["{HEAD}"]

[heads."{HEAD}"]
kind = "assistant"
num_params = 10
"""


def write_profile(home: Path, kind: str = "assistant") -> None:
    folder = home / "profiles" / "models"
    folder.mkdir(parents=True)
    text = PROFILE.replace('"assistant"', f'"{kind}"')
    (folder / "ours.toml").write_text(text)


@pytest.fixture
def head_profile(own_home: Path, tmp_path: Path, source_hub: HubStub) -> str:
    """A profile whose target has a published head alone, which the hub holds."""
    folder = tmp_path / "assistant"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({"model_type": "gemma4_assistant"}))
    shutil.copy(source_hub.models[DRAFT] / "model.safetensors", folder)
    source_hub.models = {**source_hub.models, HEAD: folder}
    write_profile(own_home)
    return "ours"


def test_a_target_is_fetched_with_its_published_head(
    source_hub: HubStub, client_cache: Path, head_profile: str
) -> None:
    found = resolve(LoadOptions(profile=head_profile))
    assert found.drafts == () and found.draft is None
    (folder,) = found.heads
    assert (folder / "model.safetensors").is_file() and not (folder / "tokenizer.json").exists()
    source_hub.requests.clear()
    assert resolve(LoadOptions(profile=head_profile)).heads == found.heads
    assert source_hub.requests == []
    assert resolve(LoadOptions(profile=head_profile, draft="none")).heads == ()


@pytest.mark.slow
def test_a_target_and_its_head_are_fetched_and_draft(
    source_hub: HubStub, client_cache: Path, own_home: Path, tmp_path: Path
) -> None:
    """As one click or one command asks for them, with a block drafter of the target itself."""
    module = tiny_llama(num_layers=1, vocab_size=VOCAB_SIZE)
    write_random(tmp_path / "block", with_cache(module))
    source_hub.models = {TARGET: source_hub.models[TARGET], HEAD: tmp_path / "block"}
    write_profile(own_home, kind="block")
    options = LoadOptions(profile="ours", context=128, dtype="fp32")
    backend = open_local_backend(options, None, lambda phrase: None)
    status = next(each for each in backend.describe().drafters if each.name == "block")
    assert status.is_available, status.reason
    message = (Message("user", "hello hello"),)
    replies = {}
    for drafter in ("block", "off"):
        request = Request(message, max_tokens=24, drafter=drafter, num_draft_tokens=3)
        chunks = list(backend.generate(request, threading.Event()))
        replies[drafter] = "".join(chunk.text for chunk in chunks)
        if drafter == "block":
            assert chunks[-1].stats.num_draft_tokens > 0
    assert replies["block"] == replies["off"]


def test_a_head_that_broke_off_is_continued_and_the_target_stays(
    source_hub: HubStub, client_cache: Path, head_profile: str
) -> None:
    resolve(LoadOptions(model=TARGET, draft="none"))
    source_hub.fault = "closed"
    found = resolve(LoadOptions(profile=head_profile))
    assert found.heads == () and "breaking off" in found.drafts[0].fault
    source_hub.fault = None
    source_hub.ranges.clear()
    assert len(resolve(LoadOptions(profile=head_profile)).heads) == 1 and source_hub.ranges


@pytest.mark.slow
def test_a_head_that_the_hub_does_not_have_is_a_notice_and_the_target_loads(
    source_hub: HubStub, client_cache: Path, head_profile: str
) -> None:
    source_hub.models = {TARGET: source_hub.models[TARGET]}
    options = LoadOptions(profile=head_profile, context=64)
    backend = open_local_backend(options, None, lambda phrase: None)
    assert backend.describe().draft is None
    (said,) = [each for each in backend.describe().notices if HEAD in each]
    assert f"The hub has no model {HEAD}" in said
    statuses = {each.name: each.reason for each in backend.describe().drafters}
    assert statuses[f"head {HEAD}"] == said
    assert HEAD not in statuses["draft_model"]


def test_a_head_is_not_fetched_unasked_for_a_target_with_a_module_of_its_own(
    source_hub: HubStub, client_cache: Path, head_profile: str
) -> None:
    entry = load_profiles(settings_for(None).profile_folders)["ours"].models[TARGET]
    shape = replace(entry.shape, mtp=entry.shape)
    assert [each.id for each in usual_drafts(entry)] == [HEAD]
    assert usual_drafts(replace(entry, known_shape=shape)) == ()
    resolve(LoadOptions(profile=head_profile))  # fetches it
    assert [each.id for each in usual_drafts(replace(entry, known_shape=shape))] == [HEAD]


def write_block(folder: Path, config: dict[str, Any]) -> Path:
    """A folder with as much of a block drafter as is counted of it."""
    folder.mkdir()
    block = {"architectures": ["Qwen3DSparkModel"], "model_type": "qwen3", "block_size": 7}
    (folder / "config.json").write_text(json.dumps({**block, **config}))
    save_file({"fc.weight": torch.zeros(16, 32)}, folder / "model.safetensors")
    return folder


@pytest.mark.parametrize(
    ("config", "is_offered"),
    [
        ({"target_model_name_or_path": TARGET}, True),
        ({"target_model_name_or_path": "/somewhere/else/Target/"}, True),
        ({"speculators_config": {"verifier": {"name_or_path": TARGET}}}, True),
        ({"target_model_name_or_path": "someone/other"}, False),
        ({"speculators_config": [1]}, False),
    ],
)
def test_a_head_is_offered_with_the_target_that_it_names(
    tmp_path: Path, config: dict[str, Any], is_offered: bool
) -> None:
    head = Model("maker/block", path=write_block(tmp_path / "block", config))
    target, other = with_own_heads([Model(TARGET), Model("someone/draft")], [head])
    assert target.drafts == ((head,) if is_offered else ()) and other.drafts == ()


def test_a_copy_of_a_known_model_is_offered_its_heads() -> None:
    """By name and sizes: as other publishers and other programs call it."""
    known = profile_models(load_profiles((SHIPPED_PROFILES,)), [])
    gemma, qwen, newer = (
        next(each for each in known if each.id == id)
        for id in ("google/gemma-4-12B-it", "Qwen/Qwen3-4B", "Qwen/Qwen3-4B-Instruct-2507")
    )

    def offered(name: str, like: Model, **sizes: int) -> set[str]:
        shape = replace(like.shape, **sizes)
        model = Model("/files/model", name, known_shape=shape)
        *_, found = with_heads_of_originals([*known, model])
        assert (like.id in found.note) == bool(found.drafts)
        assert all(draft.head is not None for draft in found.drafts)
        return {draft.id for draft in found.drafts}

    heads = {draft.id for draft in gemma.drafts}
    assert offered("unsloth/gemma-4-12b-it-Q4_K_M", gemma) == heads
    assert offered("/my/gemma-4-12B-it", gemma) == heads
    assert offered("gemma-4-12b-it", gemma, num_layers=47) == set()
    assert offered("someone/other", gemma) == set()
    assert len(offered("Qwen3-4B-GPTQ", qwen)) == 2
    assert offered("Qwen3-4B-Instruct-2507-GGUF", newer) == set(), "of another model of its sizes"
    same = with_heads_of_originals(known)
    assert same == known


@pytest.mark.slow
def test_a_head_in_the_cache_is_offered_with_its_target_and_is_no_model(
    source_hub: HubStub, client_cache: Path, head_profile: str, tmp_path: Path
) -> None:
    folder = write_block(tmp_path / "block", {"target_model_name_or_path": TARGET})
    source_hub.models = {**source_hub.models, "maker/block": folder}
    resolve(LoadOptions(profile=head_profile, draft="maker/block"))
    with closing(Catalogue(settings_for(None))) as catalogue:
        state = catalogue.read(64)
    assert not any("maker/block" in each for each in state.notices)
    cards = (*state.recommendation.here, *state.recommendation.others)
    assert "maker/block" not in {card.id for card in cards}
    (target,) = [card for card in cards if card.id == TARGET]
    offer = target.offer_of("maker/block")
    assert offer is not None and offer.plan is not None
    assert (offer.kind, offer.is_here) == ("block", True)
    assert offer.needed_bytes == offer.plan.bytes.draft_weights + offer.plan.bytes.draft_kv > 0
