"""Hidden characters of strangers' words reach neither a terminal nor the page."""

from __future__ import annotations

import pytest

from localspec.chat.attachments import shown_name
from localspec.chat.turn import Status
from localspec.cli import output
from localspec.core.errors import LocalspecError, ModelError
from localspec.core.visible import one_line, visible
from localspec.record.rows import title_line
from localspec.web.live import live_state

# A terminal's colour and title, a bell, a turned direction of text, a mark that nobody sees.
HOSTILE = "model\x1b[31m\x1b]0;owned\x07\u202egpj.exe\u2066\u200b\ufeff\x9b\ud800"
HIDDEN = ("\x1b", "\x07", "\u202e", "\u2066", "\u200b", "\ufeff", "\x9b", "\ud800")


@pytest.mark.parametrize(
    "shown",
    [visible, one_line, shown_name, title_line, lambda text: str(ModelError(f"{text} is bad."))],
)
def test_hidden_characters_are_taken_out_of_sentences_names_and_titles(shown: object) -> None:
    assert callable(shown)
    text = shown(HOSTILE)
    assert text.startswith("model [31m") and not any(sign in text for sign in HIDDEN)


@pytest.mark.parametrize("text", ["two\n\tlines", "👩‍👩‍👧", "می‌خواهم", "🏴󠁧󠁢󠁥󠁮󠁧󠁿", "a b", "é 日本"])
def test_what_people_write_stays(text: str) -> None:
    assert visible(text) == text


def test_the_terminal_gets_no_hidden_characters(capsys: pytest.CaptureFixture[str]) -> None:
    def app() -> None:
        raise LocalspecError(HOSTILE)

    output.to_stderr(HOSTILE)
    output.finish({}, f"{HOSTILE}\nthe second line", as_json=False)
    with pytest.raises(SystemExit):
        output.run(app)
    out, err = capsys.readouterr()
    assert out.endswith("\nthe second line\n") and err.count("\n") == 2
    assert not any(sign in out + err for sign in HIDDEN)


def test_a_reply_that_is_sent_to_a_file_stays_exact_and_a_terminal_gets_it_clean(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    reply = "\x1b[31mשלום\u200f"
    output.finish({}, reply, as_json=False, is_exact=True)
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    output.finish({}, reply, as_json=False, is_exact=True)
    assert capsys.readouterr().out == f"{reply}\n [31mשלום \n"


def test_the_page_gets_no_hidden_characters() -> None:
    status = Status("failed", HOSTILE, 0.0, None, (HOSTILE,), 0, None)
    state = live_state(status, hardware=HOSTILE)
    assert [words.startswith("model [31m") for words in state["notices"]] == [True, True]
    assert not any(sign in str(list(state.values())) for sign in HIDDEN)
    assert not any(repr(sign)[1:-1] in str(state) for sign in HIDDEN)
