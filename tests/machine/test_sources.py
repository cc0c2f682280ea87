"""Fetching a model: what is asked for, what a failure says, and that half a model is none."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from localspec.cli.generate import collect
from localspec.core.backend import Message, Request
from localspec.core.errors import ModelError
from localspec.core.options import LoadOptions
from localspec.formats.folder_files import check_folder
from localspec.loading.local_backend import open_local_backend
from localspec.machine.sources import find_model, resolve
from tests.kit.hub_stub import COMMIT, NO_PROXY, HubStub, Refusal, client_of, serve_hub
from tests.kit.model_folders import VOCAB_SIZE, save_model
from tests.kit.tiny import tiny_llama

pytestmark = pytest.mark.usefixtures("own_home")

TARGET, DRAFT = "someone/target", "someone/draft"
PROFILE = f"""
default = "{TARGET}"
family = "llama"
"""
MODEL = """
[models."{id}"]
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
drafts = {drafts}
"""


def fetched(target: str = TARGET) -> Path:
    return resolve(LoadOptions(model=target)).folder


def refused(target: str = TARGET) -> str:
    """What the person reads; one sentence or a few, and never the client's own pages of it."""
    with pytest.raises(ModelError) as caught:
        fetched(target)
    text = str(caught.value)
    assert target in text and "\n" not in text and text.endswith("."), text
    return text


def test_a_fetched_model_asks_for_nothing_again(source_hub: HubStub, client_cache: Path) -> None:
    folder = fetched()
    source_hub.requests.clear()
    source_hub.refusal = Refusal(500, "Down")
    assert fetched() == folder and source_hub.requests == []


def test_a_refusal_says_why_and_what_to_do(source_hub: HubStub, client_cache: Path) -> None:
    source_hub.refusal = Refusal(401, "GatedRepo")
    assert "could not be fetched" in (text := refused())
    assert "agreed to its terms" in text and "HF_TOKEN" in text
    source_hub.refusal = None
    assert (fetched() / "model.safetensors").is_file()


def test_a_fetch_that_broke_off_is_continued_and_names_what_it_fetches(
    source_hub: HubStub, client_cache: Path
) -> None:
    source_hub.fault = "closed"
    assert "breaking off" in refused()
    source_hub.fault = None
    source_hub.ranges.clear()
    said = list[str]()
    folder = resolve(LoadOptions(model=TARGET), said.append).folder
    assert (folder / "model.safetensors").is_file() and source_hub.ranges
    assert said.count(f"fetching model.safetensors of {TARGET}") == 1


def test_no_hub_at_all_is_a_sentence(source_models: dict[str, Path], tmp_path: Path) -> None:
    with serve_hub(source_models) as stub:
        pass
    with client_of(stub.endpoint, tmp_path / "cache"):
        text = refused()
    assert "no connection" in text and "Connect to the network" in text


def test_a_name_that_can_be_no_hub_id_is_a_missing_folder(
    source_hub: HubStub, client_cache: Path
) -> None:
    assert "no model folder" in refused("my models/qwen 3")
    assert source_hub.requests == []


def in_part(cache: Path, models: dict[str, Path], *names: str) -> None:
    """What another program left in the hub's cache: some files, and no list of them all."""
    storage = cache / f"models--{TARGET.replace('/', '--')}"
    (storage / "snapshots" / COMMIT).mkdir(parents=True)
    (storage / "refs").mkdir()
    (storage / "refs" / "main").write_text(COMMIT)
    for name in names:
        shutil.copy(models[TARGET] / name, storage / "snapshots" / COMMIT / name)


@pytest.mark.parametrize("names", [("config.json",), ("config.json", "model.safetensors")])
def test_what_another_program_cached_in_part_is_completed(
    source_hub: HubStub, client_cache: Path, source_models: dict[str, Path], names: tuple[str, ...]
) -> None:
    in_part(client_cache, source_models, *names)
    folder = fetched()
    assert (folder / "model.safetensors").is_file() and (folder / "tokenizer.json").is_file()


def test_a_part_without_a_hub_is_not_taken_for_the_model(
    source_models: dict[str, Path], tmp_path: Path
) -> None:
    with serve_hub(source_models) as stub:
        pass
    in_part(tmp_path / "cache", source_models, "config.json", "tokenizer.json")
    with client_of(stub.endpoint, tmp_path / "cache"):
        assert "no connection" in refused()


@pytest.mark.parametrize("num_there", [1, 2])
def test_a_model_in_several_files_is_there_when_all_of_them_are(
    source_hub: HubStub, client_cache: Path, source_models: dict[str, Path], num_there: int
) -> None:
    in_part(client_cache, source_models, "config.json", "tokenizer.json")
    (folder,) = client_cache.glob("models--*/snapshots/*")
    names = ["model-1.safetensors", "model-2.safetensors"]
    index = {"weight_map": dict(zip("ab", names, strict=True))}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    for name in names[:num_there]:
        (folder / name).write_bytes(b"")
    assert fetched() == folder
    assert source_hub.asked_for("model.safetensors") == (num_there == 1)
    assert num_there == 1 or source_hub.requests == []


@pytest.mark.parametrize("refusal", [None, Refusal(404, "RepoNotFound")])
def test_the_client_is_left_offline(
    source_hub: HubStub, client_cache: Path, refusal: Refusal | None
) -> None:
    from huggingface_hub import constants
    from huggingface_hub.utils import get_session

    source_hub.refusal = refusal
    if refusal is None:
        fetched()
    else:
        refused()
    assert constants.HF_HUB_OFFLINE is True
    with pytest.raises(ConnectionError, match="offline"):
        get_session().get(source_hub.endpoint)


@pytest.mark.slow
def test_the_page_offline_still_fetches_what_is_named(source_hub: HubStub, tmp_path: Path) -> None:
    code = (
        "import os, sys; os.environ['HF_HUB_OFFLINE'] = '1'; import huggingface_hub.constants as c;"
        "from localspec.machine.sources import resolve;"
        "from localspec.core.options import LoadOptions;"
        f"print(resolve(LoadOptions(model='{TARGET}')).path, c.HF_HUB_OFFLINE)"
    )
    environment = {
        **os.environ, "HF_ENDPOINT": source_hub.endpoint, "HF_HOME": str(tmp_path / "hf"),
        "XDG_DATA_HOME": str(tmp_path), "NO_PROXY": NO_PROXY,
    }  # fmt: skip
    environment.pop("HF_HUB_CACHE", None)
    command = [sys.executable, "-c", code]
    done = subprocess.run(
        command, env=environment, capture_output=True, text=True, timeout=300, check=True
    )
    folder, flag = done.stdout.split()
    assert flag == "True" and Path(folder).is_relative_to(tmp_path / "hf")
    assert (Path(folder) / "model.safetensors").is_file()


@pytest.fixture
def profile(own_home: Path) -> str:
    folder = own_home / "profiles" / "models"
    folder.mkdir(parents=True)
    text = PROFILE + MODEL.format(id=TARGET, drafts=f'["{DRAFT}"]')
    (folder / "ours.toml").write_text(text + MODEL.format(id=DRAFT, drafts="[]"))
    return "ours"


def test_a_profile_that_is_cached_resolves_with_its_draft(
    source_hub: HubStub, client_cache: Path, profile: str
) -> None:
    first = resolve(LoadOptions(profile=profile))
    source_hub.requests.clear()
    found = resolve(LoadOptions(profile=profile))
    assert found == first and source_hub.requests == []
    assert found.draft is not None and found.draft.folder != found.folder
    assert (found.name, found.draft.name) == (TARGET, DRAFT)
    assert (found.draft.folder / "model.safetensors").is_file()


def test_a_draft_that_cannot_be_had_is_a_reason_unless_it_was_named(
    source_hub: HubStub, client_cache: Path, profile: str
) -> None:
    source_hub.models = {TARGET: source_hub.models[TARGET]}
    found = resolve(LoadOptions(profile=profile))
    assert found.draft is None
    assert (found.folder / "model.safetensors").is_file()
    assert [f"The hub has no model {DRAFT}" in draft.fault for draft in found.drafts] == [True]
    with pytest.raises(ModelError, match=DRAFT):
        resolve(LoadOptions(profile=profile, draft=DRAFT))


def test_head_that_is_named_as_the_draft_is_a_head(
    source_hub: HubStub, client_cache: Path, profile: str, tmp_path: Path
) -> None:
    """A published one without a tokenizer, of a folder and of the hub."""
    published = {"architectures": ["LlamaForCausalLMEagle3"], "num_hidden_layers": 1}
    (tmp_path / "config.json").write_text(json.dumps(published))
    found = resolve(LoadOptions(profile=profile, draft=str(tmp_path)))
    assert found.heads == (tmp_path,)
    assert found.drafts == (), "it takes the place of the usual draft, which is not fetched"
    assert not source_hub.asked_for(DRAFT)
    folder = tmp_path / "assistant"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({"model_type": "gemma4_assistant"}))
    shutil.copy(source_hub.models[DRAFT] / "model.safetensors", folder)
    source_hub.models = {**source_hub.models, "maker/assistant": folder}
    for _ in range(2):  # fetched, then from the cache
        found = resolve(LoadOptions(profile=profile, draft="maker/assistant"))
        assert [folder.is_dir() for folder in found.heads] == [True]


@pytest.fixture(scope="module")
def qwen(shared_data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Qwen3's shape in small, in several files, with Qwen's tokenizer as published."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    folder = tmp_path_factory.mktemp("qwen3")
    published = json.loads(
        (shared_data / "tokenizers/qwen3-4b-2507/config.json").read_text(encoding="utf-8")
    )
    small = {
        "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "head_dim": 16,
        "num_attention_heads": 4, "num_key_value_heads": 2, "max_window_layers": 2,
    }  # fmt: skip
    torch.manual_seed(0)
    module = Qwen3ForCausalLM(Qwen3Config(**{**published, **small})).to(torch.bfloat16)
    module.save_pretrained(folder, max_shard_size="10MB")
    for name in ("vocab.json", "merges.txt"):
        shutil.copy(shared_data / "tokenizers/qwen1.5" / name, folder)
    for name in ("tokenizer_config.json", "chat_template.jinja"):
        shutil.copy(shared_data / "tokenizers/qwen3-4b-2507" / name, folder)
    return folder


@pytest.mark.slow
def test_a_qwen3_folder_in_several_files_answers_alike_with_and_without_drafting(
    qwen: Path,
) -> None:
    assert len(list(qwen.glob("model-*.safetensors"))) > 1
    backend = open_local_backend(LoadOptions(model=str(qwen), context=128), None, lambda _: None)
    found = {}
    for drafter in ("off", "ngram"):
        message = Message("user", "one two one two one")
        request = Request((message,), max_tokens=8, drafter=drafter, num_draft_tokens=3)
        found[drafter] = collect(backend, request)
    assert len(found["off"]["tokens"]) == 8
    assert found["ngram"]["stats"]["num_draft_tokens"] > 0, found["ngram"]
    assert found["ngram"]["tokens"] == found["off"]["tokens"]
    assert found["ngram"]["text"] == found["off"]["text"]


def test_a_folder_that_a_profile_names_brings_that_profiles_drafts_and_heads(
    tmp_path: Path,
) -> None:
    target = save_model(tmp_path / "target", tiny_llama(vocab_size=VOCAB_SIZE))
    draft = save_model(tmp_path / "draft", tiny_llama(vocab_size=VOCAB_SIZE))
    profiles = tmp_path / "home" / "profiles" / "models"
    profiles.mkdir(parents=True)
    (profiles / "own.toml").write_text(
        f'default = "own"\n[models."own"]\nlicense = "MIT"\nfolder = {json.dumps(str(target))}\n'
        f'drafts = [{json.dumps(str(draft))}]\nheads = ["{tmp_path}/head"]\n'
    )
    home = tmp_path / "home"
    found = resolve(LoadOptions(model=str(target), home=home))
    assert found.draft is not None and found.draft.path == draft
    assert found.heads == (tmp_path / "head",)
    assert resolve(LoadOptions(model="own", home=home)).heads == found.heads
    assert resolve(LoadOptions(model=str(draft), home=home)).heads == ()
    (tmp_path / "other").mkdir()
    other = str(tmp_path / "other")
    ahead = resolve(LoadOptions(model=str(target), home=home, heads=(other,)))
    assert ahead.heads == (Path(other), tmp_path / "head"), "what was named comes first"


def test_a_name_that_no_file_can_have_is_refused_in_words() -> None:
    name = "x" * 300
    with pytest.raises(ModelError, match=r"^x{40}… cannot be looked up .*: File name too long"):
        resolve(LoadOptions(model=name))
    with pytest.raises(ModelError, match="Name a folder that can be read"):
        find_model(name, {})


@pytest.mark.parametrize("named", ["", "model.safetensors", "config.json"])
def test_a_file_of_a_model_stands_for_its_folder(
    named: str, source_models: dict[str, Path]
) -> None:
    folder = source_models[TARGET]
    found = resolve(LoadOptions(model=str(folder / named), fetches=False))
    assert (found.path, found.name) == (folder.resolve(), "target")
    assert find_model(str(folder / named), {}).path == folder


@pytest.mark.parametrize("below", ["", f"snapshots/{COMMIT}"])
def test_a_model_in_the_hubs_cache_is_called_by_its_name_not_by_a_hash(
    below: str, source_models: dict[str, Path], tmp_path: Path
) -> None:
    kept = tmp_path / "models--someone--target"
    shutil.copytree(source_models[TARGET], kept / "snapshots" / COMMIT)
    (kept / "refs").mkdir()
    (kept / "refs" / "main").write_text(COMMIT)
    found = resolve(LoadOptions(model=str(kept / below), fetches=False))
    assert (found.path, found.name) == (kept / "snapshots" / COMMIT, TARGET)
    assert find_model(str(kept / below), {}).name == TARGET
    (found.folder / "model.safetensors").unlink()
    (found.folder / "pytorch_model.bin").touch()
    with pytest.raises(ModelError, match=f"^{TARGET} has its weights as pickle"):
        check_folder(found.folder)
