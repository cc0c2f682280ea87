"""The commands of `train`, from flags to a result that is loaded with its target."""

from __future__ import annotations

import itertools
import json
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tokenizers import Tokenizer

from localspec.core.options import LoadOptions
from localspec.core.turn_stats import TurnStats
from localspec.loading.local_backend import open_local_backend
from localspec.machine.sources import resolve
from localspec.machine.trained import offered_results
from localspec.record.store import SessionInfo, Store, TurnEnd, TurnSettings
from tests.kit.command_line import invoke
from tests.kit.tiny import agreeing_draft, tiny_llama
from tests.training.runs import make_folder

pytestmark = pytest.mark.slow  # trains

QUICK = ["--minutes", "0.003", "--answer-minutes", "1", "--max-answer-length", "12",
         "--batch", "256", "--dtype", "float32", "--device", "cpu", "--json"]  # fmt: skip


@pytest.fixture(autouse=True)
def steady_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    """A step of training takes a fiftieth of a second, however busy the machine is."""
    now = itertools.count(step=0.02)
    clock = SimpleNamespace(monotonic=lambda: next(now))
    monkeypatch.setattr("localspec.training.train_loop.time", clock)


def run(*words: str) -> dict[str, Any]:
    """The JSON of a command that succeeds."""
    result = invoke("train", *words)
    assert result.exit_code == 0, result
    found: dict[str, Any] = json.loads(result.lines[-1])
    return found


def refused(*words: str) -> str:
    """The sentence of a command that fails."""
    result = invoke("train", *words)
    assert result.error is not None, result
    return str(result.error)


def chat(home: Path, *texts: str) -> None:
    """A log with one conversation for each text."""
    home.mkdir(parents=True)
    store = Store.open(home / "localspec.db")
    session = store.start_session(SessionInfo())
    for text in texts:
        conversation = store.create_conversation(text)
        asked = store.add_message(conversation, None, "user", text)
        turn = store.begin_turn(session, conversation, asked, TurnSettings())
        store.finish_turn(
            turn,
            TurnEnd(
                text=f"about {text}",
                token_ids=[5],
                provenance=["target"],
                stats=TurnStats(1),
                steps=(),
                finish_reason="eos",
                error=None,
            ),
        )
    store.close()


def test_what_is_accepted_is_measured_and_a_profile_brings_it_to_a_first_chat(
    target_folder: Path, tmp_path: Path
) -> None:
    home, file = tmp_path / "home", tmp_path / "accepted.json"
    (tmp_path / "asked.jsonl").write_text('{"prompt": "cats"}\n{"prompt": "cats and cats"}\n')
    made = run(
        "accepted", "--prompts", str(tmp_path / "asked.jsonl"), "--temperatures", "0",
        "--max-tokens", "8", "--model", str(target_folder), "--dtype", "float32",
        "--out", str(file), "--home", str(home), "--json",
    )  # fmt: skip
    assert made["num_prompts"] == 2 and "lookahead" in made["drafters"]
    profile = home / "profiles" / "models" / "own.toml"
    profile.parent.mkdir(parents=True)
    profile.write_text(
        f'title = "Own"\ndefault = "own/tiny"\n[models."own/tiny"]\nlicense = "none"\n'
        f'drafts = []\nfolder = "{target_folder}"\naccepted = "{file}"\n'
    )
    load = LoadOptions(model="own/tiny", dtype="float32", home=home)
    controller = open_local_backend(load, None, lambda phrase: None).loaded.controller
    records = json.loads(file.read_text())["acceptance"]["records"]
    assert controller.shipped is not None and len(records) > 0
    assert controller.shipped["records"] == records


def test_measuring_what_is_accepted_needs_something_to_ask(
    target_folder: Path, tmp_path: Path
) -> None:
    model = ("--model", str(target_folder), "--dtype", "float32", "--home", str(tmp_path))
    assert "nothing to ask the target" in refused("accepted", *model)
    assert "no list of numbers" in refused(
        "accepted", "--made-up", "1", "--temperatures", "warm", *model
    )
    (tmp_path / "long.jsonl").write_text(json.dumps({"prompt": "cats " * 4000}))
    long = ("--prompts", str(tmp_path / "long.jsonl"))
    assert "Give shorter prompts" in refused("accepted", *long, *model)
    assert not (tmp_path / "accepted").exists()


def test_a_personal_draft_is_one_command_and_then_on_offer(
    target_folder: Path, tmp_path: Path
) -> None:
    home = tmp_path / "home"
    chat(home, "cats", "dogs", "rain", "tea")
    log = (home / "localspec.db").read_bytes()
    words = ("distil", "--from-chats", "--model", str(target_folder), "--home", str(home), *QUICK)
    made = run(*words)
    assert made["is_personal"] and made["notice"] is None
    assert Path(made["out"]).name.startswith("tiny-draft-personal-")
    assert (home / "localspec.db").read_bytes() == log
    source = resolve(LoadOptions(model=str(target_folder), home=home))
    assert source.draft is not None
    assert (source.draft.path, source.draft.name) == (Path(made["out"]), Path(made["out"]).name)
    assert run(*words)["before"] is not None, "the draft in use learns on"


def test_own_chats_are_not_read_unasked_and_the_result_drafts_in_the_next_chat(
    target_folder: Path, tmp_path: Path
) -> None:
    home = tmp_path / "home"
    chat(home, "a secret", "another secret")
    made = run("distil", "--made-up", "6", "--model", str(target_folder), "--home", str(home),
               "--out", str(tmp_path / "copy"), *QUICK)  # fmt: skip
    assert made["before"] is None and made["notice"] is None
    assert made["out"] == str(tmp_path / "copy") and (tmp_path / "copy" / "made.json").is_file()
    written = [path for path in (home / "training").rglob("*") if path.is_file()]
    assert written and not any(path.name.startswith("answers-own") for path in written)
    load = LoadOptions(model=str(target_folder), dtype="float32", context=128, home=home)
    backend = open_local_backend(load, None, lambda phrase: None)
    ready = {each.name for each in backend.describe().drafters if each.is_available}
    assert "draft_model" in ready and backend.describe().draft == Path(made["folder"]).name


def test_the_report_of_a_result_is_a_comparison_with_it(
    target_folder: Path, tmp_path: Path
) -> None:
    home = tmp_path / "home"
    made = run("medusa", "--num-heads", "2", "--made-up", "6", "--model", str(target_folder),
               "--home", str(home), *QUICK)  # fmt: skip
    words = ["bench", "--model", str(target_folder), "--dtype", "float32", "--limit", "1",
             "--warm", "0", "--max-tokens", "12", "--context", "200", "--json"]  # fmt: skip
    result = invoke(*words, "--heads", made["out"])
    assert result.exit_code == 0, result
    found = json.loads(result.stdout.splitlines()[-1])
    arms = {row["arm"] for row in found["rows"] if row["num_prompts"]}
    lengths = len(made["acceptance"])
    assert arms == {"off", "auto", "medusa", *(f"medusa@{n}" for n in range(1, lengths + 1))}
    (gain,) = found["heads"]
    assert (gain["folder"], gain["acceptance"]) == (made["out"], made["acceptance"])
    assert gain["pays"] in (False, None), "one prompt is no proof of a gain"
    assert f"medusa in {made['out']}" in result.stdout and "pay" in result.stdout
    assert "bench --heads DIR" in refused("report", made["out"], "--threads", "2")


def names_a_draft(target: Path, home: Path, draft: Path) -> Path:
    """A profile of the person's own with a draft that agrees most of the time."""
    agreeing_draft(tiny_llama(5, num_layers=4, vocab_size=420)).save_pretrained(draft)
    profile = home / "profiles" / "models" / "own.toml"
    profile.parent.mkdir(parents=True)
    profile.write_text(
        f'title = "Own"\ndefault = "own/tiny"\n[models."own/tiny"]\nlicense = "none"\n'
        f'folder = "{target}"\ndrafts = ["{draft}"]\n'
    )
    return profile


def test_a_worse_draft_is_kept_and_not_offered(target_folder: Path, tmp_path: Path) -> None:
    home = tmp_path / "home"
    profile = names_a_draft(target_folder, home, tmp_path / "good")
    before = profile.read_bytes()
    made = run("distil", "--made-up", "6", "--hidden-size", "4", "--model", "own/tiny",
               "--home", str(home), *QUICK)  # fmt: skip
    assert profile.read_bytes() == before
    assert [each.path for each in resolve(LoadOptions(model="own/tiny", home=home)).drafts] == [
        tmp_path / "good"
    ]
    assert str(tmp_path / "good") in made["notice"]
    assert made["notice"].count("tokens a round") == 1 and "this one 1." in made["notice"]
    assert (Path(made["out"]) / "model.safetensors").is_file()
    (rival,) = made["rivals"]
    assert rival["acceptance"][0] > made["acceptance"][0]


def test_a_draft_that_is_damaged_keeps_no_new_one_from_being_offered(
    target_folder: Path, tmp_path: Path
) -> None:
    home, damaged = tmp_path / "home", tmp_path / "damaged"
    names_a_draft(target_folder, home, damaged)
    (damaged / "model.safetensors").write_bytes(b"damaged")
    command = ["train", "distil", "--made-up", "6", "--model", "own/tiny", "--home", str(home)]
    result = invoke(*command, *QUICK)
    assert f"{damaged} could not be compared with it" in result.stdout
    made = json.loads(result.stdout.splitlines()[-1])
    assert [each.path for each in resolve(LoadOptions(model="own/tiny", home=home)).drafts] == [
        Path(made["out"])
    ]


def test_heads_go_with_their_target_and_targets_of_one_name_stay_apart(
    target_folder: Path, tokenizer: Tokenizer, tmp_path: Path
) -> None:
    home, other = tmp_path / "home", make_folder(tmp_path / "b" / "tiny", tokenizer, 6)
    words = ["medusa", "--num-heads", "2", "--made-up", "6", "--home", str(home), *QUICK]
    made = {folder: run(*words, "--model", str(folder)) for folder in (target_folder, other)}
    for folder, result in made.items():
        offered = {} if result["notice"] else {"medusa": Path(result["out"])}
        assert offered_results(home, folder) == offered
        assert len(result["acceptance"]) in (2, 3)
    assert len({result["out"] for result in made.values()}) == 2


def test_no_logged_conversations_is_a_sentence(target_folder: Path, tmp_path: Path) -> None:
    home = tmp_path / "home"
    words = ["distil", "--from-chats", "--model", str(target_folder), "--home", str(home)]
    for command in ("distil", "medusa"):
        sentence = refused(command, *words[1:])
        assert "There is no log at" in sentence and "--home" in sentence
    assert not home.exists()
    Store.open(tmp_path / "other" / "localspec.db").close()
    words[-1] = str(tmp_path / "other")
    assert "no finished replies yet" in refused(*words)


def test_nothing_to_ask_names_the_three_ways(target_folder: Path, tmp_path: Path) -> None:
    sentence = refused("eagle", "--model", str(target_folder), "--home", str(tmp_path))
    assert all(flag in sentence for flag in ("--prompts", "--made-up", "--from-chats"))


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["medusa", "--num-heads", "0"], "must lie between 1 and 16"),
        (["medusa", "--minutes", "0"], "--minutes is 0"),
        (["medusa", "--answer-minutes", "nan"], "--answer-minutes is nan"),
        (["distil", "--batch", "-5"], "--batch is -5"),
        (["distil", "--threads", "0"], "--threads is 0"),
        (["medusa", "--threads", "100000000"], "--threads is 100000000"),
        (["medusa", "--num-heads", "20"], "--num-heads is 20"),
        (["eagle", "--num-heads", "1000"], "--num-heads is 1000"),
        (["medusa", "--layers", "9"], "--layers is 9"),
        (["eagle", "--ffn-size", "0"], "--ffn-size is 0"),
        (["mtp", "--steps", "1000"], "--steps is 1000"),
        (["distil", "--hidden-size", "0"], "layers of 0 was asked for"),
        (["distil", "--device", "quantum"], "--device quantum is not here"),
        (["distil", "--dtype", "float3"], "no precision"),
        (["distil", "--start-from", "./nowhere"], "no model folder"),
    ],
)
def test_wrong_flags_are_sentences(
    words: list[str], sentence: str, target_folder: Path, tmp_path: Path
) -> None:
    usual = ["--made-up", "4", "--model", str(target_folder), "--home", str(tmp_path)]
    assert sentence in refused(words[0], *usual, *words[1:])
    assert not (tmp_path / "training").exists()


@pytest.mark.parametrize("words", [("eagle", "--layers", "2"), ("medusa", "--draft", "some"),
                                   ("distil", "--num-heads", "2")])  # fmt: skip
def test_a_flag_that_the_kind_does_not_have_is_refused(words: tuple[str, ...]) -> None:
    result = invoke("train", *words)
    assert result.exit_code == 2 and f"There is no flag {words[1]}." in result.stderr


def altered(target: Path, folder: Path, **settings: object) -> Path:
    """The target with another config; only the config is read before a training."""
    shutil.copytree(target, folder)
    config = json.loads((folder / "config.json").read_text("utf-8"))
    (folder / "config.json").write_text(json.dumps(config | settings), "utf-8")
    return folder


def test_a_target_that_no_chat_takes_is_refused_before_it_is_asked(
    target_folder: Path, tmp_path: Path
) -> None:
    conv = altered(target_folder, tmp_path / "conv", model_type="lfm2", layer_types=["conv"] * 4)
    usual = ("--made-up", "4", "--model", str(conv), "--home", str(tmp_path / "home"))
    assert "cannot take back" in refused("medusa", *usual)
    assert "cannot take back" in refused("distil", *usual)
    assert not (tmp_path / "home").exists()


def test_a_target_that_was_not_trained_to_chat_is_refused_before_it_is_loaded(
    target_folder: Path, tmp_path: Path
) -> None:
    base = altered(target_folder, tmp_path / "base")
    (base / "chat_template.jinja").unlink()
    usual = ("--made-up", "4", "--model", str(base), "--home", str(tmp_path / "home"))
    assert "base has no chat template, so it gives no answers to train on" in refused(
        "medusa", *usual
    )


@pytest.mark.parametrize("flag", ["--out", "--work", "--home"])
def test_a_place_that_cannot_be_written_is_named_before_anything_is_loaded(
    flag: str, target_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("mine", encoding="utf-8")
    monkeypatch.setattr("localspec.cli.train_run.train", None)
    usual = {"--home": str(tmp_path / "home"), flag: str(tmp_path / "file" / "below")}
    flags = [word for pair in usual.items() for word in pair]
    sentence = refused("distil", "--made-up", "4", "--model", str(target_folder), *flags)
    assert "cannot be written" in sentence and flag in sentence


def test_a_draft_that_is_not_there_is_said_and_a_stop_by_hand_says_how_to_go_on(
    target_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    home = tmp_path / "home"
    profile = names_a_draft(target_folder, home, tmp_path / "good")
    profile.write_text(profile.read_text().replace("good", "gone"))

    def stopped(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("localspec.cli.train_run.train", stopped)
    words = ["distil", "--made-up", "4", "--model", "own/tiny", "--home", str(home)]
    result = invoke("train", *words)
    assert "in use so far cannot be compared: There is no model folder at" in result.stderr
    assert result.exit_code == 130 and "the same command continues there" in result.stderr
