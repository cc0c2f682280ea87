"""What the catalogue says of a machine; what it offers when memory is short."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from localspec.core.config import settings_for
from localspec.core.options import LoadOptions
from localspec.machine.catalogue import Catalogue, profile_models, smaller_offer
from localspec.machine.hardware import probe
from localspec.machine.profiles import Profile, load_profiles
from localspec.machine.recommend import Card
from tests.kit.fake_nvml import CUDA_BUILD, LINUX, FakeNvml
from tests.kit.hub_stub import client_of
from tests.kit.model_folders import VOCAB_SIZE, save_model
from tests.kit.tiny import tiny_llama

PROFILE = """
title = "Two"
default = "two/large"
[models."two/large"]
license = "MIT"
folder = "FOLDER/large"
drafts = ["two/draft"]
[models."two/small"]
license = "MIT"
folder = "FOLDER/small"
drafts = []
[models."two/draft"]
license = "MIT"
folder = "FOLDER/draft"
drafts = []
[models."two/absent"]
license = "MIT"
folder = "FOLDER/absent"
drafts = []
"""


@pytest.fixture(scope="module")
def profiles(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Profile]:
    folder = tmp_path_factory.mktemp("profiles")
    for name, num_layers in (("large", 4), ("small", 2), ("draft", 3)):
        save_model(folder / name, tiny_llama(vocab_size=VOCAB_SIZE, num_layers=num_layers))
    (folder / "two.toml").write_text(PROFILE.replace("FOLDER", folder.as_posix()))
    return dict(load_profiles((folder,)))


@pytest.mark.parametrize("precision", ["float32", "bfloat16", "float16", "8-bit"])
def test_fewer_bits_of_the_same_model_come_first(
    profiles: dict[str, Profile], precision: str
) -> None:
    options = LoadOptions(model="two/large", context=512)
    offer = smaller_offer(options, "two/large", precision, profiles, "cuda")
    assert offer is not None and "4-bit" in offer.text
    assert offer.options == LoadOptions(model="two/large", context=512, dtype="4-bit")


def test_after_four_bits_the_next_smaller_model_here_that_is_no_draft(
    profiles: dict[str, Profile],
) -> None:
    offer = smaller_offer(LoadOptions(context=512), "two/large", "4-bit", profiles, "cuda")
    assert offer is not None and "two/small" in offer.text
    assert offer.options == LoadOptions(model="two/small", context=512)


def test_fewer_bits_are_offered_only_where_they_work(
    profiles: dict[str, Profile], tmp_path: Path
) -> None:
    """Not on Apple GPUs, nor where a model is kept in the bits of its files."""
    asked = LoadOptions(model="two/large")
    offer = smaller_offer(asked, "two/large", "bfloat16", profiles, "mps")
    assert offer is not None and offer.options == LoadOptions(model="two/small")
    kept = save_model(tmp_path / "kept", tiny_llama(vocab_size=VOCAB_SIZE, num_layers=3))
    config = json.loads((kept / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "bitsandbytes", "load_in_8bit": True}
    (kept / "config.json").write_text(json.dumps(config))
    asked = LoadOptions(model=str(kept))
    offer = smaller_offer(asked, "kept", "8-bit", profiles, "cuda")
    assert offer is not None and offer.options == LoadOptions(model="two/small")


def test_a_model_of_two_profiles_is_offered_once_as_the_first_one_says(
    profiles: dict[str, Profile],
) -> None:
    own = replace(profiles["two"].models["two/small"], license="own")
    models = profile_models({"own": Profile("own", "", {own.id: own}, own.id), **profiles}, [])
    assert [model.license for model in models if model.id == own.id] == ["own"]


def test_below_the_smallest_nothing_is_offered(
    profiles: dict[str, Profile], tmp_path: Path
) -> None:
    assert smaller_offer(LoadOptions(), "two/small", "4-bit", profiles, "cuda") is None
    assert (
        smaller_offer(LoadOptions(model=str(tmp_path)), "unknown", "4-bit", profiles, "cuda")
        is None
    )


@pytest.mark.slow
def test_what_is_offered_is_for_the_devices_that_were_asked_for(tmp_path: Path) -> None:
    machine = probe(FakeNvml(free_gib=24, total_gib=24, num_gpus=2), LINUX, CUDA_BUILD)

    def first(**asked: str) -> Card:
        catalogue = Catalogue(settings_for(tmp_path), lambda: machine, asked=LoadOptions(**asked))
        card = catalogue.read(4096).recommendation.card
        assert card is not None
        return card

    def draft_devices(**asked: str) -> set[str | None]:
        catalogue = Catalogue(settings_for(tmp_path), lambda: machine, asked=LoadOptions(**asked))
        state = catalogue.read(4096).recommendation
        cards = (*state.smaller, *state.larger, *state.others)
        pairs = [card for card in cards if card.plan.drafter == "draft_model"]
        return {card.load_options().draft_device for card in pairs}

    runtimes = [first(device=device).plan.bytes.runtime for device in ("cuda", "cpu")]
    assert runtimes[0] != runtimes[1]
    assert draft_devices() == {None}
    assert draft_devices(draft_device="cuda:1") == {"cuda:1"}


def test_where_the_gpus_memory_is_unknown_nothing_is_said_to_fit(tmp_path: Path) -> None:
    hidden = FakeNvml(failing={"nvmlDeviceGetMemoryInfo": 999, "nvmlDeviceGetMemoryInfo_v2": 999})
    found = probe(hidden, LINUX, CUDA_BUILD)
    with client_of("http://127.0.0.1:9", tmp_path / "cache"):
        state = Catalogue(settings_for(tmp_path), lambda: found).read(4096)
    assert any("no model is said to fit" in notice for notice in state.notices)
    assert state.hardware.device == "cuda" and state.recommendation.card is None
    assert all(card.refusal for card in state.recommendation.others)
