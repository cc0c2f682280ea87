"""The models in assets/demo are complete, small, and fit together."""

from __future__ import annotations

import json
from itertools import product
from pathlib import Path
from typing import Any

import pytest

LIMIT_BYTES = 48 * 1000 * 1000
SHARD_LIMIT_BYTES = 15 * 1024 * 1024


@pytest.fixture(scope="module")
def demo(root: Path) -> Path:
    """The folder of the pair."""
    folder = root / "assets" / "demo"
    if not (folder / "target" / "config.json").exists():
        pytest.skip("the demo pair is not in this checkout")
    return folder


@pytest.fixture(scope="module")
def shipped_backend(demo: Path, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The pair with every drafter, in fp32."""
    pytest.importorskip("torch")
    from localspec.core.options import LoadOptions
    from localspec.loading.local_backend import open_local_backend

    options = LoadOptions(context=256, home=tmp_path_factory.mktemp("home"), dtype="float32")
    return open_local_backend(options, None, lambda _: None)


def test_the_pair_is_small_and_in_small_files(demo: Path) -> None:
    files = [file for file in demo.rglob("*") if file.is_file()]
    assert sum(file.stat().st_size for file in files) < LIMIT_BYTES
    assert max(file.stat().st_size for file in files) < SHARD_LIMIT_BYTES


def test_draft_and_target_map_tokens_to_the_same_ids(demo: Path) -> None:
    tokenizers = pytest.importorskip("tokenizers")
    maps = [
        tokenizers.Tokenizer.from_file(str(demo / role / "tokenizer.json")).get_vocab()
        for role in ("target", "draft")
    ]
    assert maps[0] == maps[1]


def test_the_context_holds_long_prompts_and_ends_agree(demo: Path) -> None:
    configs = [json.loads((demo / role / "config.json").read_text("utf-8"))
               for role in ("target", "draft")]  # fmt: skip
    for config in configs:
        assert config["max_position_embeddings"] >= 2304
        assert config["eos_token_id"] == configs[0]["eos_token_id"]
        assert config["vocab_size"] == configs[0]["vocab_size"]
    assert configs[1]["num_hidden_layers"] <= 2 < configs[0]["num_hidden_layers"]


@pytest.mark.slow  # loads every drafter
def test_every_drafter_but_the_assistant_can_be_had_on_the_demo_model(
    shipped_backend: Any,
) -> None:
    from localspec.drafters.registry import REGISTRY

    found = {each.name: each for each in shipped_backend.describe().drafters}
    assert list(found) == list(REGISTRY), "and nothing beside them is refused"
    refused = [name for name, each in found.items() if not each.is_available]
    assert refused == ["assistant", "block"], "they are published for other models only"


@pytest.mark.slow  # loads every drafter
def test_whatever_the_target_chooses_is_the_reply_of_every_drafter(shipped_backend: Any) -> None:
    """Nine texts of three tokens with top-k 3, forced by the noise, in fp32: any two ranks at any
    two of their places. All texts of a tiny model: drafters/test_contract_sampled."""
    torch = pytest.importorskip("torch")
    from localspec.core.decoding import SamplingParams
    from tests.kit.tiny import Plans, decoded

    engine = shipped_backend.loaded.engine
    prompt, target = (1, 17, 230, 45, 17, 230), engine.target

    class Forcing:
        def __init__(self, text: tuple[int, ...]) -> None:
            self._text = text

        def on(self, device: torch.device) -> Any:
            return self

        def rows(self, position: int, count: int) -> Any:
            made = torch.zeros(count, target.vocab_size)
            for row in range(count):
                place = position + row - len(prompt)
                made[row, self._text[min(place, 2)]] = 90.0
            return made

    def best(text: tuple[int, ...]) -> list[int]:
        target.cache.rollback(0)
        found: list[int] = target.forward((*prompt, *text))[-1].topk(3).indices.tolist()
        return found

    texts = list[tuple[int, ...]]()
    for first, second in product(range(3), repeat=2):
        text: tuple[int, ...] = ()
        for rank in (first, second, (first + second) % 3):
            text = (*text, best(text)[rank])
        texts.append(text)
    for name in engine.drafters:
        for text in texts:
            sequence = engine.start(prompt, SamplingParams(1.0, top_k=3, seed=0), 3, frozenset())
            sequence.noise = Forcing(text)
            assert tuple(decoded(engine, sequence, Plans((name, 3)))) == text, name


@pytest.mark.slow  # loads every drafter
def test_the_examples_of_the_first_screen_are_what_it_drafts_well(shipped_backend: Any) -> None:
    """The draft model guesses at least half of each reply, and there is enough of it."""
    import threading

    from localspec.core.backend import Message, Request
    from localspec.core.decoding import SamplingParams
    from localspec.web.layout import EXAMPLES

    found = {}
    for title, _, message in EXAMPLES:
        sampling = SamplingParams(0.7, seed=1)
        asked = Request((Message("user", message),), sampling, 64, drafter="draft_tree")
        *_, last = shipped_backend.generate(asked, threading.Event())
        found[title] = (last.stats.num_output_tokens, last.stats.draft_share)
    assert all(tokens >= 25 and share >= 0.5 for tokens, share in found.values()), found


def test_the_foreign_draft_has_a_vocabulary_of_its_own(demo: Path) -> None:
    tokenizers = pytest.importorskip("tokenizers")
    target, foreign = (
        tokenizers.Tokenizer.from_file(str(demo / role / "tokenizer.json")).get_vocab()
        for role in ("target", "foreign")
    )
    assert len(foreign) == 4096 < len(target)
    assert any(target.get(token) != place for token, place in foreign.items())


def test_the_card_names_data_figures_and_the_command(demo: Path) -> None:
    card = (demo / "README.md").read_text("utf-8")
    for wanted in ("CC-BY-4.0", "acceptance", "nats per token", "python -m localspec train"):
        assert wanted in card


@pytest.mark.slow
def test_the_target_answers_a_greeting_in_a_whole_sentence(demo: Path) -> None:
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    tokenizer = transformers.AutoTokenizer.from_pretrained(demo / "target")
    model = transformers.AutoModelForCausalLM.from_pretrained(demo / "target", dtype=torch.float32)
    ids = tokenizer.apply_chat_template(
        [{"role": "user", "content": "Hello!"}], add_generation_prompt=True, return_tensors="pt",
        return_dict=False,
    )  # fmt: skip
    mask = torch.ones_like(ids)
    written = model.generate(ids, attention_mask=mask, max_new_tokens=60)[0, ids.shape[1] :]
    text = tokenizer.decode(written, skip_special_tokens=True).strip()
    assert written[-1] in (
        tokenizer.convert_tokens_to_ids(t) for t in ("<|im_end|>", "<|endoftext|>")
    )
    assert text[-1] in ".!?"


def test_what_is_accepted_is_known_of_every_way_of_drafting(demo: Path) -> None:
    """Of the very models that it ships with, at three temperatures and for every kind of text."""
    from localspec.controller.shipped_acceptance import read_accepted
    from localspec.core.options import LoadOptions
    from localspec.loading.drafters import heads_of, marks_of
    from localspec.machine.sources import resolve

    source = resolve(LoadOptions())
    assert source.accepted is not None and demo in source.accepted.parents
    marks = marks_of(source, heads_of(source)[0])
    state, notice = read_accepted(source.accepted, marks)
    assert state is not None and notice is None
    origin = json.loads(source.accepted.read_text(encoding="utf-8"))
    assert origin["marks"] == marks and len(marks) == 6
    assert (origin["target"], origin["draft"]) == (source.name, source.draft and source.draft.name)
    known = {(row["drafter"], row["bucket"]) for row in state["records"] if not row["kind"]}
    drafters = {name for name, _ in known}
    assert drafters >= {"ngram", "lookahead", "draft_model", "draft_tree", "chained", "early_exit"}
    assert drafters >= {"medusa", "mtp", "eagle", "cross_tokenizer", "self_quant"}
    assert known == {(name, bucket) for name in drafters for bucket in (0, 3, 4)}
    kinds = {row["kind"] for row in state["records"]}
    assert kinds == {"", "chat", "code", "json", "rework", "story"}


def test_it_is_not_believed_of_another_draft_or_other_heads(demo: Path, tmp_path: Path) -> None:
    from localspec.core.options import LoadOptions
    from localspec.machine.sources import resolve

    other = LoadOptions(draft=str(demo / "foreign"))
    assert resolve(other).accepted is None
    assert resolve(LoadOptions(heads=(str(tmp_path),))).accepted is None
