"""What the Models tab shows and does, without a browser; the hub is a stub, the engine the fake."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from localspec.config import settings_for
from localspec.errors import RequestError
from localspec.machine.catalogue import Catalogue
from localspec.machine.hardware import TorchBuild, probe
from localspec.web.models.desk import ModelsDesk, cards_of
from tests import waiting
from tests.fakes import Script
from tests.machine.fake_nvml import FakeNvml
from tests.machine.hub_stub import Refusal
from tests.web.models_site import CONFIG, DRAFT, HUGE, TARGET, ModelsSite, models_site

wait = partial(waiting.until, wait_s=60.0)


@pytest.fixture
def place(tmp_path: Path) -> Iterator[ModelsSite]:
    with models_site(tmp_path, Script(prefill_s=0.0, round_s=0.001)) as place:
        yield place


@pytest.fixture
def desk(place: ModelsSite) -> Iterator[ModelsDesk]:
    catalogue = Catalogue(settings_for(place.home))
    try:
        yield ModelsDesk(place.service, catalogue)
    finally:
        catalogue.close()


def parts(desk: ModelsDesk) -> dict[str, str]:
    found: dict[str, str] = desk.view()["parts"]
    return found


def act(desk: ModelsDesk, act: str, model_id: str = "", **more: Any) -> str | None:
    return desk.act({"act": act, "id": model_id, **more})


def card(desk: ModelsDesk, model_id: str) -> Any:
    return next(each for each in cards_of(desk._fresh_look().recommendation) if each.id == model_id)


def fetched(desk: ModelsDesk) -> None:
    act(desk, "download", TARGET)
    wait(lambda: all(each.state == "done" for each in desk.catalogue.downloads.downloads))
    assert len(desk.catalogue.downloads.downloads) == 2


def test_looking_asks_nobody(desk: ModelsDesk, place: ModelsSite) -> None:
    shown = parts(desk)
    assert place.hub.requests == []
    assert "RAM" in shown["found"] and "free" in shown["found"]
    assert "Recommended" in shown["first"] and shown["downloads"] == ""
    assert "localspec/demo" in shown["here"], "what ships chats until something is chosen"
    assert TARGET in "".join(shown.values()) and "estimate" in shown["first"]


def test_a_dry_run_replaces_the_estimate_by_the_exact_size(
    desk: ModelsDesk, place: ModelsSite
) -> None:
    assert not card(desk, TARGET).is_exact
    assert act(desk, "size", TARGET) is None
    found = card(desk, TARGET)
    assert found.is_exact and not place.hub.asked_for("resolve")
    size = sum(f.stat().st_size for each in place.hub.models.values() for f in each.iterdir())
    assert found.download_bytes == size


def test_a_refused_dry_run_says_why(desk: ModelsDesk, place: ModelsSite) -> None:
    place.hub.refusal = Refusal(401, "GatedRepo")
    said = act(desk, "size", TARGET)
    assert said is not None and "terms" in said


def test_a_click_fetches_the_pair_and_then_it_can_be_loaded(
    desk: ModelsDesk, place: ModelsSite
) -> None:
    place.service.start()
    with pytest.raises(RequestError, match="Download it first"):
        act(desk, "load", TARGET)
    fetched(desk)
    shown = parts(desk)
    assert "complete" in shown["downloads"] and TARGET in shown["here"]
    assert card(desk, TARGET).is_here
    assert act(desk, "load", TARGET) is None
    options = wait(lambda: len(place.opened) > 1 and place.opened[-1])
    assert (options.model, options.draft, options.fetches) == (TARGET, DRAFT, False)
    assert options.context == 8192 and options.anyway is False


def test_a_target_whose_draft_is_missing_is_loaded_without_it(
    desk: ModelsDesk, place: ModelsSite
) -> None:
    place.service.start()
    desk.catalogue.downloads.ask(TARGET)
    wait(lambda: desk.catalogue.downloads.find(TARGET).state == "done")  # type: ignore[union-attr]
    said = act(desk, "load", TARGET)
    assert said is not None and f"{DRAFT} is not on this machine" in said
    options = wait(lambda: len(place.opened) > 1 and place.opened[-1])
    assert options.draft is None and options.fetches is False


def test_what_does_not_fit_says_what_would_and_is_loaded_only_anyway(
    desk: ModelsDesk, place: ModelsSite
) -> None:
    """A machine with a tenth of a gibibyte, and the model already on its disk."""
    place.service.start()
    desk.catalogue.downloads.ask(TARGET)
    wait(lambda: desk.catalogue.downloads.find(TARGET).state == "done")  # type: ignore[union-attr]
    found = probe()
    host = replace(found.host, ram_available_bytes=100 * 2**20)
    desk.catalogue.probe = lambda: replace(found, device="cpu", gpu=None, host=host)
    desk._forget_look()
    refused = card(desk, TARGET).refusal
    assert refused is not None and "is free" in refused
    shown = parts(desk)["others"] + parts(desk)["here"]
    assert "Load anyway" in shown and "may become very slow" in shown
    assert "No model of the list fits" in parts(desk)["first"]
    with pytest.raises(RequestError, match="is free"):
        act(desk, "load", TARGET)
    act(desk, "load", TARGET, anyway=True)
    assert wait(lambda: len(place.opened) > 1 and place.opened[-1]).anyway is True


def test_a_model_too_large_for_the_machine_says_so(desk: ModelsDesk) -> None:
    found = card(desk, HUGE)
    assert found.refusal is not None and "needs" in found.refusal
    assert HUGE in parts(desk)["others"]


@pytest.mark.parametrize(
    "said",
    [
        {},
        {"act": "format"},
        {"act": "load", "id": "nobody/knows"},
        {"act": "download", "id": "../../etc/passwd"},
        {"act": "pause", "id": TARGET},
        {"act": "resume", "id": "x/y"},
        {"act": "context", "value": 3},
        {"act": "context", "value": "8192"},
    ],
)
def test_what_was_not_offered_is_refused(
    desk: ModelsDesk, place: ModelsSite, said: dict[str, Any]
) -> None:
    with pytest.raises(RequestError):
        desk.act(said)
    assert place.hub.requests == []


def test_a_folder_of_ones_own_is_offered_and_a_wrong_one_is_explained(
    desk: ModelsDesk, tmp_path: Path, place: ModelsSite
) -> None:
    mine = place.hub.models[TARGET]
    assert act(desk, "folder", value=str(mine)) is None
    assert str(mine) in parts(desk)["here"]
    empty = tmp_path / "empty"
    empty.mkdir()
    said = act(desk, "folder", value=str(empty))
    assert said is not None and "no config.json" in said
    assert "no config.json" in parts(desk)["folder"]
    (empty / "config.json").write_text(CONFIG)
    said = act(desk, "folder", value=str(empty))
    assert said is not None and "tokenizer" in said
    assert act(desk, "folder", value=" ") is None


def test_markup_in_names_is_shown_and_not_obeyed(desk: ModelsDesk, tmp_path: Path) -> None:
    odd = tmp_path / "<img src=x onerror=alert(1)>"
    odd.mkdir()
    act(desk, "folder", value=str(odd))
    assert "<img" not in parts(desk)["folder"] and "&lt;img" in parts(desk)["folder"]


def test_the_tune_up_runs_in_the_queue_and_its_words_are_shown(
    desk: ModelsDesk, place: ModelsSite
) -> None:
    assert "disabled" in parts(desk)["tune"], "nothing is loaded yet"
    place.service.start()
    wait(lambda: place.service.status().phase == "ready")
    act(desk, "tune")
    wait(lambda: "Skip the rest" in parts(desk)["tune"] or desk._tuning.result)
    wait(lambda: not desk._tuning.is_running)
    shown = parts(desk)["tune"]
    assert desk._tuning.result is not None and desk._tuning.result.is_complete
    assert "plain, tokens per second" in shown and "Start again" in shown
    assert "ls-mverdict" in shown and desk._tuning.error is None


def test_the_tune_up_can_be_skipped_and_what_was_learnt_stays(
    desk: ModelsDesk, place: ModelsSite
) -> None:
    place.backend.script.round_s = 0.02
    place.service.start()
    wait(lambda: place.service.status().phase == "ready")
    act(desk, "tune")
    wait(lambda: desk._tuning.result and len(desk._tuning.result.runs) >= 2)
    act(desk, "skip")
    wait(lambda: not desk._tuning.is_running)
    assert desk._tuning.result is not None and not desk._tuning.result.is_complete
    assert "ended early" in parts(desk)["tune"]


def test_unload_and_load_again(desk: ModelsDesk, place: ModelsSite) -> None:
    place.service.start()
    wait(lambda: place.service.status().phase == "ready")
    assert "Unload" in parts(desk)["loaded"]
    act(desk, "unload")
    wait(lambda: place.service.status().phase == "unloaded")
    assert "Nothing is loaded" in parts(desk)["loaded"]
    act(desk, "retry")
    wait(lambda: place.service.status().phase == "ready")


def test_what_the_loaded_model_would_give_back_is_counted(
    desk: ModelsDesk, place: ModelsSite
) -> None:
    before = desk._freed_bytes()
    place.service.start()
    wait(lambda: place.service.status().phase == "ready")
    assert before == 0 and desk._freed_bytes() == 49_800_000 + 9_400_000 + 3_400_000


def test_where_free_memory_is_unknown_the_plan_says_so(desk: ModelsDesk) -> None:
    blind = FakeNvml(failing={"nvmlDeviceGetMemoryInfo": 999, "nvmlDeviceGetMemoryInfo_v2": 999})
    found = probe(blind, None, TorchBuild("2.13.0", "13.0"))
    desk.catalogue.probe = lambda: found
    assert "is not known" in parts(desk)["found"]
