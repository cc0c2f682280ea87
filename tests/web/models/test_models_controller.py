"""What the Models tab shows and does, without a browser; the hub is a stub, the engine the fake."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from markupsafe import escape

from localspec.chat.service import ReplySettings
from localspec.core.config import settings_for
from localspec.core.errors import ConfigError, RequestError
from localspec.core.hindsight import Hindsight
from localspec.core.units import gain_words, gib
from localspec.machine.catalogue import Catalogue, CatalogueState
from localspec.machine.hardware import TorchBuild, probe
from localspec.machine.other_programs import found_models
from localspec.web.models.models_controller import ModelsController
from tests.kit import samples, waiting
from tests.kit.fake_nvml import CUDA_BUILD, LINUX, FakeNvml
from tests.kit.fakes import Script
from tests.kit.gguf_files import write_gguf
from tests.kit.hub_stub import Refusal
from tests.kit.stub_server import serve_stub
from tests.kit.tiny import tiny_llama
from tests.web.models_site import CONFIG, DRAFT, HEAD, HUGE, TARGET, ModelsSite, models_site

wait = waiting.until


@pytest.fixture
def fresh_models_site(tmp_path: Path) -> Iterator[ModelsSite]:
    with models_site(tmp_path, Script(prefill_s=0.0, round_s=0.001)) as place:
        yield place


@pytest.fixture
def controller(fresh_models_site: ModelsSite) -> Iterator[ModelsController]:
    catalogue = Catalogue(settings_for(fresh_models_site.home))
    try:
        yield ModelsController(fresh_models_site.service, catalogue)
    finally:
        catalogue.close()


def parts(controller: ModelsController) -> dict[str, str]:
    found: dict[str, str] = controller.view()["parts"]
    return found


def act(controller: ModelsController, act: str, model_id: str = "", **more: Any) -> str | None:
    return controller.act({"act": act, "id": model_id, **more})["message"]


def card(controller: ModelsController, model_id: str) -> Any:
    return next(each for each in controller.cards() if each.id == model_id)


def fetched(controller: ModelsController) -> None:
    act(controller, "download", TARGET)
    wait(lambda: all(each.state == "done" for each in controller.catalogue.downloads.downloads))
    assert len(controller.catalogue.downloads.downloads) == 2


def test_looking_asks_nobody(controller: ModelsController, fresh_models_site: ModelsSite) -> None:
    shown = parts(controller)
    assert fresh_models_site.hub.requests == []
    assert "RAM" in shown["found"] and "free" in shown["found"]
    assert "recommended" in shown["first"] and shown["downloads"] == shown["results"] == ""
    reason = controller.cards()[0].plan.reason
    assert f"<dt>Why</dt><dd>{escape(reason)}</dd>" in shown["first"]
    assert "localspec/demo" in shown["here"], "what ships chats until something is chosen"
    assert TARGET in "".join(shown.values()) and "estimate" in shown["first"]


@pytest.mark.slow  # starts the process that fetches
def test_a_dry_run_replaces_the_estimate_by_the_exact_size(
    controller: ModelsController, fresh_models_site: ModelsSite
) -> None:
    assert not card(controller, TARGET).is_exact
    assert act(controller, "size", TARGET) is None
    found = card(controller, TARGET)
    assert found.is_exact and not fresh_models_site.hub.asked_for(f"GET /{TARGET}/resolve")
    pair = (fresh_models_site.hub.models[each] for each in (TARGET, DRAFT))
    size = sum(f.stat().st_size for each in pair for f in each.iterdir())
    assert found.download_bytes == size


@pytest.mark.slow  # starts the process that fetches
def test_a_refused_dry_run_says_why(
    controller: ModelsController, fresh_models_site: ModelsSite
) -> None:
    fresh_models_site.hub.refusal = Refusal(401, "GatedRepo")
    said = act(controller, "size", TARGET)
    assert said is not None and "terms" in said


@pytest.mark.slow  # starts the process that fetches
def test_a_click_fetches_the_pair_and_then_it_can_be_loaded(
    controller: ModelsController, fresh_models_site: ModelsSite
) -> None:
    fresh_models_site.service.start()
    with pytest.raises(RequestError, match="Download it first"):
        act(controller, "load", TARGET)
    fetched(controller)
    shown = parts(controller)
    assert "complete" in shown["here"] and TARGET in shown["here"] and shown["downloads"] == ""
    assert card(controller, TARGET).is_here
    assert act(controller, "load", TARGET) is None
    options = wait(lambda: len(fresh_models_site.opened) > 1 and fresh_models_site.opened[-1])
    assert (options.model, options.draft, options.fetches) == (TARGET, DRAFT, False)
    assert options.context == 8192 and options.anyway is False


@pytest.mark.slow  # starts the process that fetches
def test_a_target_whose_draft_is_missing_is_loaded_without_it(
    controller: ModelsController, fresh_models_site: ModelsSite
) -> None:
    fresh_models_site.service.start()
    controller.catalogue.downloads.ask(TARGET)
    wait(lambda: controller.catalogue.downloads.find(TARGET).state == "done")  # type: ignore[union-attr]
    said = act(controller, "load", TARGET)
    assert said is not None and f"{DRAFT} is not on this machine" in said
    options = wait(lambda: len(fresh_models_site.opened) > 1 and fresh_models_site.opened[-1])
    assert options.draft is None and options.fetches is False


def offers_of(shown: str) -> dict[str, str]:
    """The text of each drafter that is offered for the target, by its name."""
    about = shown.partition(f'data-key="about-{TARGET}"')[2].partition("</dl>")[0]
    items = re.findall(r"<li>\s*<span><b>([^<]*)</b>(.*?)</li>", about, re.S)
    return {name: " ".join(re.sub("<[^>]*>", " ", text).split()) for name, text in items}


def test_drafters_of_a_model_are_offered_with_their_price(controller: ModelsController) -> None:
    offers = offers_of("".join(parts(controller).values()))
    assert offers.keys() == {DRAFT, HEAD}
    head = offers[HEAD]
    assert "a published drafter that guesses a block of tokens at once" in head
    assert "about 131 kB to fetch ( MIT )" in head and "Fetch 131 kB" in head
    weights, tokens = 65536, 8192 * (256 + 2 * 64)
    number_bytes = 2 if probe().host.multiplies_bf16 else 4
    assert f"It takes {gib(number_bytes * (weights + tokens))} of memory" in head
    assert "the context stays at 8,192 tokens." in head and "Planned" not in head
    assert "Planned." in offers[DRAFT]


def test_a_drafter_that_takes_context_says_how_much(controller: ModelsController) -> None:
    """Memory for the model alone, and half of what the head takes besides."""
    found, target = probe(), card(controller, TARGET)
    head = target.offer_of(HEAD)
    free = head.plan.bytes.total - head.needed_bytes // 2
    host = replace(found.host, ram_available_bytes=free)
    controller.catalogue.probe = lambda: replace(found, device="cpu", gpu=None, host=host)
    act(controller, "folder", value="")  # makes it read the machine again
    said = offers_of("".join(parts(controller).values()))[HEAD]
    assert re.search(r"the context falls from 8,192 to (6,144|4,096) tokens", said)
    plan = card(controller, TARGET).plan
    assert (plan.context_length, plan.drafter != "block") == (8192, True)


@pytest.mark.slow  # starts the process that fetches
def test_a_head_on_this_machine_is_loaded_where_it_is_chosen(
    controller: ModelsController, fresh_models_site: ModelsSite
) -> None:
    fresh_models_site.service.start()
    with pytest.raises(RequestError, match="cannot be loaded"):
        controller.catalogue.downloads.ask(TARGET)
        wait(lambda: controller.catalogue.downloads.find(TARGET).state == "done")  # type: ignore[union-attr]
        act(controller, "load", TARGET, drafter=HEAD)
    shown = parts(controller)["here"]
    assert f"Its drafter {DRAFT} is not here: about" in shown and "Fetch its drafter" in shown
    act(controller, "download", HEAD)
    wait(lambda: controller.catalogue.downloads.find(HEAD).state == "done")  # type: ignore[union-attr]
    shown = parts(controller)
    assert f'data-drafter="{HEAD}"' in shown["here"] and shown["downloads"] == ""
    assert not any("head" in notice for notice in controller.catalogue.read(8192).notices)
    said = act(controller, "load", TARGET)
    assert said is not None and f"{DRAFT} is not on this machine" in said
    opened = fresh_models_site.opened
    assert wait(lambda: len(opened) > 1 and opened[-1]).draft == HEAD, "the best that is here"
    assert act(controller, "load", TARGET, drafter=HEAD) is None
    assert wait(lambda: len(opened) > 2 and opened[-1]).draft == HEAD


@pytest.mark.slow  # starts the process that fetches
def test_a_drafter_that_the_hub_does_not_have_leaves_the_model_to_load(
    controller: ModelsController, fresh_models_site: ModelsSite
) -> None:
    fresh_models_site.service.start()
    fresh_models_site.hub.models = {TARGET: fresh_models_site.hub.models[TARGET]}
    act(controller, "download", TARGET)
    downloads = controller.catalogue.downloads
    wait(lambda: downloads.find(DRAFT).state == "failed")  # type: ignore[union-attr]
    shown = parts(controller)["here"]
    assert f"The hub has no model {DRAFT}" in shown
    assert f'data-act="load" data-id="{TARGET}"' in shown
    act(controller, "load", TARGET)
    opened = fresh_models_site.opened
    assert wait(lambda: len(opened) > 1 and opened[-1]).draft is None


@pytest.mark.slow  # starts the process that fetches
def test_what_does_not_fit_says_what_would_and_is_loaded_only_anyway(
    controller: ModelsController, fresh_models_site: ModelsSite
) -> None:
    """A machine with a tenth of a gibibyte, and the model already on its disk."""
    fresh_models_site.service.start()
    controller.catalogue.downloads.ask(TARGET)
    wait(lambda: controller.catalogue.downloads.find(TARGET).state == "done")  # type: ignore[union-attr]
    found = probe()
    host = replace(found.host, ram_available_bytes=100 * 2**20)
    controller.catalogue.probe = lambda: replace(found, device="cpu", gpu=None, host=host)
    act(controller, "folder", value="")  # makes it read the machine again
    refused = card(controller, TARGET).refusal
    assert refused is not None and "is free" in refused
    shown = parts(controller)["others"] + parts(controller)["here"]
    assert "Load anyway" in shown and "may become very slow" in shown
    assert "No model of the list fits" in parts(controller)["first"]
    with pytest.raises(RequestError, match="is free"):
        act(controller, "load", TARGET)
    act(controller, "load", TARGET, anyway=True)
    assert (
        wait(lambda: len(fresh_models_site.opened) > 1 and fresh_models_site.opened[-1]).anyway
        is True
    )


@pytest.mark.slow  # starts the process that fetches
def test_a_search_of_the_hub_finds_by_name_and_size_and_what_it_finds_can_be_fetched_and_loaded(
    controller: ModelsController, fresh_models_site: ModelsSite
) -> None:
    """A model that no profile names."""
    fresh_models_site.service.start()
    fresh_models_site.hub.models = {
        **fresh_models_site.hub.models,
        "else/unlisted": fresh_models_site.hub.models[TARGET],
    }
    with pytest.raises(RequestError):
        act(controller, "download", "else/unlisted")
    assert act(controller, "search", value="unlisted", size="4B") is None
    (asked,) = fresh_models_site.hub.searches
    assert (asked["search"], asked["num_parameters"]) == ("unlisted", "max:4B")
    shown = parts(controller)["results"]
    assert "else/unlisted" in shown and "should fit as published" in shown and TARGET not in shown
    act(controller, "download", "else/unlisted")
    wait(lambda: controller.catalogue.downloads.find("else/unlisted").state == "done")  # type: ignore[union-attr]
    shown = parts(controller)["results"]
    assert "on this machine" in shown and 'data-act="load" data-id="else/unlisted"' in shown
    assert "else/unlisted" in parts(controller)["here"]
    act(controller, "load", "else/unlisted")
    assert (
        wait(lambda: len(fresh_models_site.opened) > 1 and fresh_models_site.opened[-1]).model
        == "else/unlisted"
    )


@pytest.mark.slow  # starts the process that fetches
def test_a_search_that_fails_or_finds_nothing_says_so(
    controller: ModelsController, fresh_models_site: ModelsSite
) -> None:
    act(controller, "search", value="no such name", size="")
    assert "No model with .safetensors weights" in parts(controller)["results"]
    fresh_models_site.hub.refusal = Refusal(401, "GatedRepo")
    act(controller, "search", value="x", size="")
    assert "ls-mfault" in parts(controller)["results"]
    fresh_models_site.hub.refusal = Refusal(
        503, ""
    )  # the client's own list of models asks six times, for 24 s
    num_before = len(fresh_models_site.hub.searches)
    act(controller, "search", value="x", size="")
    said = parts(controller)["results"]
    assert "ls-mfault" in said and len(fresh_models_site.hub.searches) == num_before + 1
    assert "Wait some minutes and try again." in said and "arrived" not in said
    with pytest.raises(RequestError):
        act(controller, "search", value="x", size="all")


def test_what_other_programs_keep_is_named_and_loaded_where_it_can_be(
    controller: ModelsController,
    fresh_models_site: ModelsSite,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("OLLAMA_MODELS", raising=False)
    studio = tmp_path / ".lmstudio" / "models" / "someone"
    shutil.copytree(fresh_models_site.hub.models[TARGET], studio / "whole")
    (studio / "small").mkdir()
    (studio / "small" / "small-Q4.gguf").write_bytes(bytes(2_000_000))
    write_gguf(studio / "small" / "tiny.gguf", tiny_llama(), "Q8_0")
    manifest = tmp_path / ".ollama/models/manifests/registry.ollama.ai/library/tiny/1b"
    manifest.parent.mkdir(parents=True)
    blob = tmp_path / ".ollama/models/blobs/sha256-01"
    blob.parent.mkdir(parents=True)
    write_gguf(blob, tiny_llama(), "Q4_0")
    kind = "application/vnd.ollama.image.model"
    layer = {"mediaType": kind, "size": 3_000_000, "digest": "sha256:01"}
    manifest.write_text(json.dumps({"layers": [layer]}))
    for other in ("library/tiny/latest", "anna/tiny/latest"):  # of the same file
        (manifest.parents[2] / other).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(manifest, manifest.parents[2] / other)
    hub = manifest.parents[3] / "hf.co" / "bert" / "Small-GGUF" / "Q4_0"
    hub.parent.mkdir(parents=True)
    shutil.copy(manifest, hub)
    (manifest.parent / "broken").write_text("{")
    gone = {"mediaType": kind, "size": 4_000_000, "digest": "sha256:02"}
    (manifest.parent / "7b").write_text(json.dumps({"layers": [gone]}))
    shown = parts(controller)
    assert "from LM Studio" in shown["here"] and card(controller, str(studio / "whole")).is_here
    for file in (studio / "small" / "tiny.gguf", blob):
        assert card(controller, str(file)).is_here
    assert "Its weights are kept as GGUF (Q8_0)." in shown["here"]
    sizes = re.findall(r" · ([^·]*(?:on disk|localspec)) ·", shown["here"])
    assert [each.endswith("on disk") for each in sizes] == [False, True, True, True]
    (names,) = re.findall("<b>([^<]*tiny:1b[^<]*)</b>", shown["here"])
    assert {*names.split(", ")} == {
        "tiny:1b", "tiny:latest", "anna/tiny:latest", "hf.co/bert/Small-GGUF:Q4_0"
    }  # fmt: skip
    assert "<b>someone/small/tiny</b>" in shown["here"]
    for said in ("someone/small/small-Q4", "2 MB", "is no GGUF file", "tiny:7b", "4 MB",
                 "Fetch it again with Ollama"):  # fmt: skip
        assert said in shown["elsewhere"]
    assert "broken" not in shown["elsewhere"]


def test_what_lm_studio_was_told_to_keep_elsewhere_is_found_there(
    fresh_models_site: ModelsSite, tmp_path: Path
) -> None:
    named, moved = tmp_path / "Größe", tmp_path / "moved"
    named.mkdir()
    (tmp_path / ".lmstudio-home-pointer").write_text(f"{named}\n", encoding="utf-8")
    settings = json.dumps({"downloadsFolder": str(moved)})
    (named / "settings.json").write_text(settings, encoding="utf-8")
    for folder in (named / "models", moved):
        shutil.copytree(fresh_models_site.hub.models[TARGET], folder / "someone" / folder.name)
    found = {each.name for each in found_models(tmp_path)}
    assert found == {"someone/models", "someone/moved"}


def test_a_model_too_large_for_the_machine_says_so(controller: ModelsController) -> None:
    found = card(controller, HUGE)
    assert found.refusal is not None and "needs" in found.refusal
    assert HUGE in parts(controller)["others"]


@pytest.mark.slow
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
    controller: ModelsController, fresh_models_site: ModelsSite, said: dict[str, Any]
) -> None:
    with pytest.raises(RequestError):
        controller.act(said)
    assert fresh_models_site.hub.requests == []


@pytest.mark.slow
def test_a_folder_of_ones_own_is_offered_and_a_wrong_one_is_explained(
    controller: ModelsController, tmp_path: Path, fresh_models_site: ModelsSite
) -> None:
    mine = fresh_models_site.hub.models[TARGET]
    assert act(controller, "folder", value=str(mine)) is None
    assert str(mine) in parts(controller)["here"]
    empty = tmp_path / "empty"
    empty.mkdir()
    assert act(controller, "folder", value=f'"{empty}"') is None, "its part says it, once"
    assert "no config.json" in parts(controller)["folder"]
    (empty / "config.json").write_text(CONFIG)
    act(controller, "folder", value=str(empty))
    assert "no weights" in parts(controller)["folder"]
    assert act(controller, "folder", value=" ") is None


def test_markup_in_names_is_shown_and_not_obeyed(
    controller: ModelsController, tmp_path: Path
) -> None:
    odd = tmp_path / "<img src=x onerror=alert(1)>"
    odd.mkdir()
    act(controller, "folder", value=str(odd))
    assert "<img" not in parts(controller)["folder"] and "&lt;img" in parts(controller)["folder"]


def test_hidden_characters_of_names_are_left_out_of_what_is_shown(
    controller: ModelsController, tmp_path: Path
) -> None:
    odd = tmp_path / "model\u202egpj"
    odd.mkdir()
    act(controller, "folder", value=str(odd))
    field, _, said = parts(controller)["folder"].partition('value="')[2].partition('"')
    assert field == str(odd), "what the page sends back is the folder itself"
    assert "model gpj" in said and "\u202e" not in said


@pytest.mark.slow
def test_the_tune_up_runs_in_the_queue_and_its_words_are_shown(
    controller: ModelsController, fresh_models_site: ModelsSite
) -> None:
    unloaded = parts(controller)["tune"]
    assert "disabled" in unloaded and "none is loaded. Load one first." in unloaded
    fresh_models_site.service.start()
    wait(lambda: fresh_models_site.service.status().phase == "ready")
    act(controller, "tune")
    tuning = controller.tuning
    assert tuning is not None
    wait(lambda: "Skip the rest" in parts(controller)["tune"] or tuning.result)
    wait(lambda: not tuning.is_running)
    shown = parts(controller)["tune"]
    assert tuning.result is not None and tuning.result.is_complete
    assert "without drafting, tok/s" in shown and "Start again" in shown
    assert "ls-mverdict" in shown and tuning.task.error is None
    assert "<th></th>" not in shown, "a heading without words is read out as one"


@pytest.mark.slow
def test_the_tune_up_can_be_skipped_and_what_was_learnt_stays(
    controller: ModelsController, fresh_models_site: ModelsSite
) -> None:
    fresh_models_site.backend.script.round_s = 0.02
    fresh_models_site.service.start()
    wait(lambda: fresh_models_site.service.status().phase == "ready")
    act(controller, "tune")
    tuning = controller.tuning
    assert tuning is not None
    wait(lambda: tuning.result and len(tuning.result.runs) >= 2)
    act(controller, "skip")
    wait(lambda: not tuning.is_running)
    assert tuning.result is not None and not tuning.result.is_complete
    assert "was cancelled after" in parts(controller)["tune"]


def test_unload_and_load_again(controller: ModelsController, fresh_models_site: ModelsSite) -> None:
    fresh_models_site.service.start()
    wait(lambda: fresh_models_site.service.status().phase == "ready")
    assert "Unload" in parts(controller)["loaded"]
    act(controller, "unload")
    wait(lambda: fresh_models_site.service.status().phase == "unloaded")
    assert "Nothing is loaded" in parts(controller)["loaded"]
    act(controller, "retry")
    wait(lambda: fresh_models_site.service.status().phase == "ready")


def test_what_the_loaded_model_would_give_back_is_counted(
    controller: ModelsController, fresh_models_site: ModelsSite, monkeypatch: pytest.MonkeyPatch
) -> None:
    freed, read = list[int](), controller.catalogue.read

    def noted(context_length: int, freed_bytes: int, folder: str | None) -> CatalogueState:
        freed.append(freed_bytes)
        return read(context_length, freed_bytes, folder)

    monkeypatch.setattr(controller.catalogue, "read", noted)
    parts(controller)
    fresh_models_site.service.start()
    wait(lambda: fresh_models_site.service.status().phase == "ready")
    parts(controller)
    assert freed == [0, 49_800_000 + 9_400_000 + 3_400_000 + 40_000]


def test_where_free_memory_is_unknown_the_plan_says_so(controller: ModelsController) -> None:
    blind = FakeNvml(failing={"nvmlDeviceGetMemoryInfo": 999, "nvmlDeviceGetMemoryInfo_v2": 999})
    found = probe(blind, None, TorchBuild("2.13.0", "13.0"))
    controller.catalogue.probe = lambda: found
    assert "is not known" in parts(controller)["found"]


def test_experts_in_the_ram_and_their_size_are_shown_with_the_reason(
    controller: ModelsController,
) -> None:
    """An 8 GB card beside 20 GiB of free RAM."""
    found = probe(FakeNvml(free_gib=7.5, total_gib=8), LINUX, CUDA_BUILD)
    controller.catalogue.probe = lambda: found
    shown = " ".join("".join(parts(controller).values()).split())
    oss = card(controller, "openai/gpt-oss-20b")
    assert oss.load_options().experts == "ram" and oss.refusal is None
    assert ", experts in the RAM · about" in shown
    assert "9.5 GiB, are in the RAM and computed by the processor" in shown
    assert "and 9.5 GiB of RAM" in shown


def test_what_the_last_replies_gained_stands_in_place_of_an_expectation(
    controller: ModelsController, fresh_models_site: ModelsSite
) -> None:
    """The estimate of a pair is never below 1; its replies were slower."""
    assert card(controller, TARGET).gain is not None
    store = fresh_models_site.service.store
    for slower_ms in (80.0, 40.0):
        turn = samples.begin(store, settings=replace(samples.SETTINGS, model=TARGET))
        stats = replace(samples.STATS, plain_decode_ms=60.0, decode_ms=60.0 + slower_ms)
        samples.finish(store, turn, stats=replace(stats, reply_ms=100.0 + slower_ms))
    plain_ms = sum(row["plain_reply_ms"] for row in store.turn_rows())
    act(controller, "folder", value="")  # makes it read the machine again
    said = f"<b>{gain_words(plain_ms / 320.0)}</b> than without drafting, in your last 2 replies"
    assert said in parts(controller)["first"] + parts(controller)["others"] and plain_ms < 320.0


# a server of the person's own


@pytest.mark.slow
def test_a_server_is_connected_named_and_left_for_a_model_of_this_machine(
    controller: ModelsController, fresh_models_site: ModelsSite
) -> None:
    fresh_models_site.service.start()
    with serve_stub() as stub:
        act(controller, "connect", value=stub.url, key="sesame")
        wait(lambda: "Connected:" in parts(controller)["loaded"])
        shown = controller.view()
        assert "stub-1b" in shown["parts"]["loaded"]
        assert "vLLM 9.9" in shown["parts"]["loaded"]
        assert "plain decoding" in shown["parts"]["loaded"], "what it cannot do"
        entry = {"id": stub.url, "name": "stub-1b", "words": stub.url, "is_loaded": True}
        assert shown["ready"][0] == entry
        assert "sesame" not in str(shown)
        act(controller, "unload")
        wait(lambda: fresh_models_site.service.status().phase == "unloaded")
        assert controller.view()["ready"][0]["is_loaded"] is False
        act(controller, "load", stub.url)
        wait(lambda: "Connected:" in parts(controller)["loaded"])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("address", "said"), [("my server", "Write it like"), ("http://127.0.0.1:9", "not answer")]
)
def test_a_server_that_is_not_there_is_said_and_frees_nothing(
    controller: ModelsController, fresh_models_site: ModelsSite, address: str, said: str
) -> None:
    fresh_models_site.service.start()
    wait(lambda: fresh_models_site.service.status().phase == "ready")
    opened = len(fresh_models_site.opened)
    with pytest.raises(ConfigError, match=said):
        act(controller, "connect", value=address)
    done = fresh_models_site.service.enqueue(
        "the orders before it", lambda backend, cancel: None
    ).done
    assert done.wait(10.0)
    status = fresh_models_site.service.status()
    assert (status.phase, status.description) == ("ready", fresh_models_site.backend.describe())
    assert all(one.remote is not None for one in fresh_models_site.opened[opened:]), (
        "nothing is loaded again"
    )
    assert address not in [entry["id"] for entry in controller.view()["ready"]]


def test_chats_tell_of_the_drafters_without_a_tune_up(
    controller: ModelsController, fresh_models_site: ModelsSite
) -> None:
    service, script = fresh_models_site.service, fresh_models_site.backend.script
    script.hindsight = (Hindsight("ngram", 40, 10, 40, 30, 100.0, 200.0),)
    service.start()
    wait(lambda: service.status().phase == "ready")
    assert "Your chats" not in parts(controller)["tune"]
    service.submit(None, "hi", ReplySettings())
    wait(lambda: service.hindsight(service.turn_rows()))
    shown = " ".join(parts(controller)["tune"].split())
    assert "Your chats with this model tell it without more replies." in shown
    assert "<th>word lookup</th><td>2.0x faster</td><td>4.00</td>" in shown
    assert "Start the tune-up" in shown, "nothing was run for it"
