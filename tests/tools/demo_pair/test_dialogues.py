"""The generated dialogues are true, parse, run, and are the same for the same seed."""

from __future__ import annotations

import json
import re
from pathlib import Path
from random import Random

from tools.demo_pair import dialogues
from tools.demo_pair.dialogues import facts, forms, numbers, passages, rewrite, talk
from tools.demo_pair.dialogues.__main__ import write_prompts
from tools.demo_pair.dialogues.texts import CAPITALS, NUMBER_WORDS, rows

SEED = 20261120


def test_every_sum_in_an_answer_is_correct() -> None:
    rng = Random(SEED)
    operations = {"+": int.__add__, "-": int.__sub__, "*": int.__mul__, "x": int.__mul__}
    words = {"plus": "+", "minus": "-", "times": "*"}
    num_checked = 0
    for _ in range(800):
        for exchange in [*numbers.sums(rng), *numbers.word_problem(rng), *numbers.counting(rng)]:
            found = re.findall(r"(\d+) (\S+) (\d+) (?:=|is) (\d+)", exchange.assistant)
            for left, sign, right, result in found:
                operation = operations[words.get(sign, sign)]
                assert operation(int(left), int(right)) == int(result), (SEED, exchange)
                num_checked += 1
    assert num_checked > 1200


def test_the_question_and_the_answer_of_a_sum_name_the_same_numbers() -> None:
    rng = Random(SEED)
    for _ in range(500):
        exchange = numbers.one_sum(rng)
        asked = re.findall(r"\d+", exchange.user)
        assert re.findall(r"\d+", exchange.assistant)[:2] == asked, (SEED, exchange)


def test_a_capital_belongs_to_the_country_asked_for() -> None:
    rng = Random(SEED)
    for _ in range(300):
        for exchange in facts.capitals(rng):
            if not exchange.assistant.startswith("The capital of "):
                continue
            country, city = exchange.assistant[15:-1].split(" is ")
            assert CAPITALS[country] == city
            assert country in exchange.user, (SEED, exchange)


def test_json_in_an_answer_parses() -> None:
    rng = Random(SEED)
    for _ in range(300):
        for exchange in [*forms.json_object(rng), *forms.json_list(rng)]:
            body = exchange.assistant.removeprefix("```json\n").removesuffix("\n```")
            assert json.loads(body), (SEED, exchange)


def test_every_python_function_compiles_and_greets_by_name() -> None:
    rng = Random(SEED)
    num_compiled = 0
    for _ in range(400):
        for exchange in [*forms.function(rng), *forms.snippet(rng)]:
            for block in re.findall(r"```python\n(.*?)\n```", exchange.assistant, re.DOTALL):
                compile(block, "answer", "exec")
                num_compiled += 1
    assert num_compiled > 700


def test_sample_functions_do_what_the_question_asks() -> None:
    cases = {
        "computes the factorial of a number": ((5,), 120),
        "reverses a string": (("abc",), "cba"),
        "checks whether a number is prime": ((9,), False),
        "returns the greatest common divisor of two numbers": ((12, 18), 6),
        "greets a person": (("Ann",), "Hello, Ann!"),
    }
    for task, names, parameters, body in rows("functions"):
        if task not in cases:
            continue
        slots = parameters.split()
        name = names.split(",")[0]
        text = body.format(a=slots[0], b=slots[-1], f=name)
        scope: dict[str, object] = {}
        exec(f"def {name}({', '.join(slots)}):\n    {text}", scope)
        arguments, expected = cases.pop(task)
        function = scope[name]
        assert callable(function)
        assert function(*arguments) == expected
    assert not cases


def test_a_list_has_as_many_different_items_as_asked_for() -> None:
    rng = Random(SEED)
    counts = {word: count for count, word in enumerate(NUMBER_WORDS)}
    for _ in range(300):
        exchange = facts.some(rng)[0]
        word = next(
            w for w in re.findall(r"[a-z]+|\d+", exchange.user) if w in counts or w.isdigit()
        )
        asked = int(word) if word.isdigit() else counts[word]
        lines = re.split(r"\n|, | and ", exchange.assistant)
        assert len(set(lines)) == len(lines)
        # Countries such as "Bosnia and Herzegovina" split once more.
        assert len(lines) >= asked, (SEED, exchange)


def test_copying_answers_hold_the_text_of_the_question() -> None:
    rng = Random(SEED)
    for _ in range(200):
        repeated = rewrite.repeat(rng)[0]
        assert repeated.assistant in repeated.user
        shortened = rewrite.shorten(rng)[0]
        assert shortened.assistant in shortened.user
        assert len(shortened.assistant) < len(shortened.user)


def test_a_recalled_fact_was_told_in_an_earlier_turn() -> None:
    rng = Random(SEED)
    for _ in range(200):
        exchanges = talk.recall(rng)
        key = exchanges[-1].assistant.rstrip(".").split(" ")[-1]
        assert any(key in one.user for one in exchanges[:-1]), (SEED, exchanges)


def test_a_summary_quotes_the_passage() -> None:
    rng = Random(SEED)
    passage = "The pipeline opens at nine. Many people come early. It closes at six. Nobody stays."
    exchange = passages.summary(rng, passage, passages.sentences(passage))
    quoted = exchange.assistant.split(": ")[-1]
    assert quoted.split(". ")[0] in passage


def test_the_same_seed_gives_the_same_dialogues_and_every_skill_occurs() -> None:
    first, second = Random(SEED), Random(SEED)
    one = [dialogues.generate(first).messages() for _ in range(50)]
    two = [dialogues.generate(second).messages() for _ in range(50)]
    assert one == two
    for skill, weight in dialogues.SKILLS:
        assert weight > 0
        assert all(e.user.strip() and e.assistant.strip() for e in skill(Random(SEED)))


def test_dialogues_seldom_repeat_so_that_a_model_must_generalise() -> None:
    rng = Random(SEED)
    drawn = [str(dialogues.generate(rng).messages()) for _ in range(2000)]
    assert len(set(drawn)) > 1900, f"seed {SEED}: only {len(set(drawn))} of 2000 differ"


def test_answers_do_not_loop_so_that_none_is_learnt() -> None:
    rng = Random(SEED)
    repeated = total = 0
    for _ in range(1500):
        for exchange in dialogues.generate(rng).exchanges:
            words = exchange.assistant.split()
            grams = [tuple(words[n : n + 4]) for n in range(len(words) - 3)]
            repeated += len(grams) - len(set(grams))
            total += len(grams)
    assert repeated / total < 0.01, f"seed {SEED}: {repeated} of {total}"


def test_the_shipped_prompts_are_what_the_command_writes(root: Path, tmp_path: Path) -> None:
    write_prompts(tmp_path / "prompts.jsonl")
    shipped = root / "assets" / "training_prompts.jsonl"
    assert (tmp_path / "prompts.jsonl").read_bytes() == shipped.read_bytes()
