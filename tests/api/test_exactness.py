"""Over the API the demo pair writes what the chat writes, token for token."""

from __future__ import annotations

import json
from collections.abc import Iterator

import jsonschema
import pytest

from localspec.chat.audit import replay_of
from localspec.chat.service import ReplySettings
from localspec.core.decoding import SamplingParams
from localspec.core.options import LoadOptions
from localspec.loading.local_backend import open_local_backend
from tests.api.doors import Doors, serve_interfaces
from tests.kit.waiting import WAIT_S


@pytest.fixture(scope="module")
def demo_doors(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Doors]:
    home = tmp_path_factory.mktemp("demo")
    backend = open_local_backend(LoadOptions(context=512, home=home), None, lambda phrase: None)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(backend, "calibrate", lambda cancel: iter(()))  # no test is about costs
        with serve_interfaces(backend, home) as doors:
            yield doors


@pytest.mark.slow  # loads the demo pair
@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_a_reply_is_the_chats_token_for_token(demo_doors: Doors, temperature: float) -> None:
    service, text = demo_doors.service, "Tell me a story about a fox."
    with demo_doors.openai() as client:
        found = client.chat.completions.create(
            model="localspec/demo",
            messages=[
                {"role": "system", "content": "Be brief."},
                {"role": "user", "content": text},
            ],
            temperature=temperature,
            seed=11,
            max_tokens=24,
            frequency_penalty=0.5,
            presence_penalty=-0.25,
            extra_body={"drafter": "draft_model", "num_draft_tokens": 3},
        )
    sampling = SamplingParams(
        temperature=temperature, seed=11, frequency_penalty=0.5, presence_penalty=-0.25
    )
    settings = ReplySettings(sampling, 24, drafter="off", system_prompt="Be brief.")
    chat = service.submit(None, text, settings)
    assert chat is not None and chat.done.wait(WAIT_S) and service.flush()
    of_api, of_chat = service.turn_rows()[-2:]
    tokens = [service.store.reply_tokens(row["message_id"]) for row in (of_api, of_chat)]
    assert tokens[0] is not None and tokens[1] is not None
    assert tokens[0][0] == tokens[1][0] and len(tokens[0][0]) > 4
    assert found.choices[0].message.content == chat.view.text
    assert of_api["num_draft_tokens"] > 0 and of_chat["num_draft_tokens"] == 0
    assert of_api["prompt_fingerprint"] == of_chat["prompt_fingerprint"]


@pytest.mark.slow  # loads the demo pair
def test_a_prediction_is_drafted_and_changes_no_token(demo_doors: Doors) -> None:
    asked = {
        "model": "localspec/demo",
        "messages": [{"role": "user", "content": "What is the capital of Peru?"}],
        "temperature": 0,
        "max_tokens": 24,
    }
    drafting = {"drafter": "ngram", "num_draft_tokens": 6}
    with demo_doors.openai() as client:
        plain = client.chat.completions.create(**asked, extra_body=drafting)  # type: ignore[call-overload]
        text = plain.choices[0].message.content
        found = [
            client.chat.completions.create(  # type: ignore[call-overload]
                **asked, extra_body=drafting, prediction={"type": "content", "content": predicted}
            )
            for predicted in (text, text.replace("capital", "town"), "Something else.")
        ]
    assert [one.choices[0].message.content for one in found] == [text] * 3
    details = [one.usage.completion_tokens_details for one in (plain, *found)]
    none, whole, edited, other = (one.accepted_prediction_tokens for one in details)
    assert whole > edited > max(none, other)
    assert demo_doors.service.flush()
    logged = demo_doors.service.store.reply_tokens(demo_doors.service.turn_rows()[-3]["message_id"])
    assert logged is not None and logged[1][0] == "ngram", "the first token was drafted too"


@pytest.mark.slow  # loads the demo pair
def test_a_reply_to_a_schema_is_valid_and_the_same_whatever_drafts(demo_doors: Doors) -> None:
    kinds = {"name": {"type": "string", "maxLength": 20}, "kind": {"enum": ["town", "country"]}}
    schema = {
        "type": "object",
        "properties": kinds,
        "required": [*kinds],
        "additionalProperties": False,
    }
    asked = {
        "model": "localspec/demo",
        "messages": [{"role": "user", "content": "What is the capital of Peru?"}],
        "temperature": 0.7,
        "seed": 3,
    }
    form = {"type": "json_schema", "json_schema": {"name": "place", "schema": schema}}
    found, speculation = list[str](), list[dict[str, int]]()
    with demo_doors.openai() as client:
        for drafting in ({"drafter": "off"}, {"drafter": "draft_tree", "num_draft_tokens": 6}):
            made = client.chat.completions.create(  # type: ignore[call-overload]
                **asked, response_format=form, extra_body=drafting
            )
            found.append(made.choices[0].message.content)
            speculation.append(made.choices[0].speculation)
        cut = client.chat.completions.create(  # type: ignore[call-overload]
            **asked, response_format=form, max_tokens=4
        ).choices[0]
    assert found[0] == found[1] and speculation[1]["num_accepted_tokens"] > 0
    jsonschema.validate(json.loads(found[0]), schema)
    assert cut.finish_reason == "length" and found[0].startswith(cut.message.content)


@pytest.mark.slow  # loads the demo pair
def test_a_reply_to_a_schema_or_a_text_can_be_made_again_from_the_log(demo_doors: Doors) -> None:
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"enum": ["ab", "cd"]}}}
    asked = {"model": "localspec/demo", "temperature": 0.8, "seed": 4, "max_tokens": 12}
    with demo_doors.openai() as client:
        message = {"role": "user", "content": "Describe Peru."}
        client.chat.completions.create(**asked, messages=[message], response_format=form)  # type: ignore[call-overload]
        client.completions.create(**asked, prompt="Once upon a time")  # type: ignore[call-overload]
        beyond = {"extra_body": {"ignore_eos": True}, "messages": [message]}
        client.chat.completions.create(**{**asked, "max_tokens": 60}, **beyond)  # type: ignore[call-overload]
    assert demo_doors.service.flush()
    rows = demo_doors.service.turn_rows()[-3:]
    assert rows[-1]["num_output_tokens"] == 60, "it went on beyond its end"
    for row in rows:
        replay = replay_of(demo_doors.service.store, row["message_id"], "off")
        assert demo_doors.service.enqueue("Replaying", replay.run).done.wait(WAIT_S)
        assert replay.finding is not None and replay.finding.outcome == "identical", replay
        assert replay.finding.changes == () and replay.finding.num_compared > 2


@pytest.mark.slow  # loads the demo pair
def test_logprobs_are_the_same_whatever_drafts_and_name_the_greedy_token_first(
    demo_doors: Doors,
) -> None:
    with demo_doors.openai() as client:
        found = [
            client.chat.completions.create(
                model="localspec/demo",
                messages=[{"role": "user", "content": "What is the capital of Peru?"}],
                temperature=0,
                max_tokens=12,
                logprobs=True,
                top_logprobs=3,
                extra_body=drafting,
            ).choices[0]
            for drafting in ({"drafter": "off"}, {"drafter": "draft_model", "num_draft_tokens": 4})
        ]
    plain, drafted = (choice.logprobs.content for choice in found if choice.logprobs)
    assert plain == drafted and plain
    assert all(one.token == one.top_logprobs[0].token for one in plain)
    assert all(one.logprob == one.top_logprobs[0].logprob <= 0 for one in plain)


@pytest.mark.slow  # loads the demo pair
def test_a_raw_text_is_continued_where_it_ends(demo_doors: Doors) -> None:
    """The chat format written out is the chat."""
    import openai

    with demo_doors.openai() as client:
        chat = client.chat.completions.create(
            model="localspec/demo",
            messages=[{"role": "user", "content": "What is the capital of Peru?"}],
            temperature=0,
            max_tokens=12,
        )
        prompt = "<|im_start|>user\nWhat is the capital of Peru?<|im_end|>\n<|im_start|>assistant\n"
        raw = client.completions.create(
            model="localspec/demo", prompt=prompt, temperature=0, max_tokens=12
        )
        with pytest.raises(openai.BadRequestError, match="prompt is empty"):
            client.completions.create(model="localspec/demo", prompt="")
    assert raw.choices[0].text == chat.choices[0].message.content
    assert raw.usage is not None and chat.usage is not None
    assert raw.usage.prompt_tokens == chat.usage.prompt_tokens
