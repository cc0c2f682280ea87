"""Exports of other programs: what can be read comes in, and what cannot is named."""

from __future__ import annotations

import io
import json
import random
import struct
import zipfile
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from localspec.chat.importing import Report, file, read_conversations
from localspec.core.errors import RequestError
from localspec.record.conversations import Imported
from localspec.record.store import Store


def read(data: object, report: Report | None = None) -> list[Imported]:
    content = data if isinstance(data, bytes) else json.dumps(data).encode()
    return read_conversations(content, report)


def talk(imported: Imported) -> list[tuple[int | None, str, str]]:
    """Return parent, role and text of each message; the parent by its place."""
    return [(one.parent_id, one.role, one.text) for one in imported.messages]


def shown(imported: Imported) -> list[str]:
    """Return the texts of the branch that is shown."""
    by_id = {one.id: one for one in imported.messages}
    texts, number = list[str](), imported.conversation.tip_message_id
    while number is not None:
        texts.append(by_id[number].text)
        number = by_id[number].parent_id
    return texts[::-1]


# ChatGPT

PICTURE = {"content_type": "image_asset_pointer", "asset_pointer": "file-service://x"}


def node(parent: str | None, role: str, *parts: object, **more: Any) -> dict[str, Any]:
    """Return a node of ChatGPT's tree. content, metadata: replace the usual ones."""
    kind = "multimodal_text" if any(isinstance(part, dict) for part in parts) else "text"
    message = {
        "author": {"role": role},
        "create_time": 1_700_000_001.5,
        "content": {"content_type": kind, "parts": list(parts)},
        "metadata": {},
        "recipient": "all",
        **more,
    }
    return {"parent": parent, "message": message}


CHATGPT = {
    "title": "Peru",
    "create_time": 1_700_000_000.5,
    "current_node": "old answer",
    "mapping": {
        "root": {"parent": None, "message": None},
        "hidden": node(
            "root", "system", "You are", metadata={"is_visually_hidden_from_conversation": True}
        ),
        "about me": node("hidden", "user", "", metadata={"is_user_system_message": True}),
        "q": node("about me", "user", PICTURE, "Capital of Peru?"),
        "thought": node(
            "q",
            "assistant",
            content={"content_type": "thoughts", "thoughts": [{"content": "It is in Peru."}]},
        ),
        "look": node("thought", "assistant", 'search("Peru")', recipient="web"),
        "seen": node("look", "tool", "a page"),
        "answer": node(
            "seen", "assistant", "Lima\ue200cite\ue202turn0\ue201.", metadata={"model_slug": "m1"}
        ),
        "code": node(
            "answer",
            "assistant",
            content={"content_type": "code", "language": "python", "text": "print(1)"},
        ),
        "old answer": node("q", "assistant", "Cusco."),
        "drawn": node("answer 2", "tool", PICTURE),
        "answer 2": node("q2", "assistant", "Here:"),
        "q2": node("old answer", "user", "Draw it."),
        "loop": node("loop", "user", "never"),
    },
}


def test_chatgpts_tree_comes_in_with_branches_thoughts_and_pictures_in_words() -> None:
    report = Report()
    (imported,) = read([CHATGPT], report)
    assert talk(imported) == [
        (None, "user", "[picture, not imported]\n\nCapital of Peru?"),
        (1, "assistant", "Lima.\n\n```python\nprint(1)\n```"),
        (1, "assistant", "Cusco."),
        (3, "user", "Draw it."),
        (4, "assistant", "Here:\n\n[picture, not imported]"),
    ]
    assert shown(imported) == ["[picture, not imported]\n\nCapital of Peru?", "Cusco."]
    answer = imported.messages[1]
    assert (answer.thinking, imported.messages[0].model) == ("It is in Peru.", None)
    assert imported.conversation.title == "Peru"
    assert imported.conversation.created_at_utc == "2023-11-14T22:13:20.500+00:00"
    assert report.said() == (
        "Not imported: pictures (2), custom instructions (1), tool calls (1), tool results (1), "
        "messages that follow themselves (1)."
    )


def test_a_document_written_with_chatgpt_is_kept_and_an_unknown_content_is_named() -> None:
    document = json.dumps({"name": "Poem", "type": "document", "content": "Lima, Lima"})
    mapping = {
        "a": node(None, "user", "Write."),
        "b": node("a", "assistant", document, recipient="canmore.create_textdoc"),
        "c": node("b", "assistant", content={"content_type": "sonic_webpage"}),
    }
    report = Report()
    (imported,) = read({"mapping": mapping, "title": None}, report)
    said = "File `Poem`:\n\n```\nLima, Lima\n```\n\n[sonic_webpage, not imported]"
    assert talk(imported)[1:] == [(1, "assistant", said)]
    assert report.said() == "Not imported: sonic_webpage (1)."
    assert imported.conversation.title == "Write."


# Claude


def test_claudes_messages_come_in_with_files_thoughts_and_edits() -> None:
    def message(uuid: str, parent: str, sender: str, *content: object, **more: Any) -> object:
        return {
            "uuid": uuid,
            "parent_message_uuid": parent,
            "sender": sender,
            "created_at": "2025-01-01T02:00:00+02:00",
            "text": "This block is not supported.",
            "content": list(content),
            **more,
        }

    def text(words: str) -> dict[str, str]:
        return {"type": "text", "text": words}

    chat = {
        "name": "",
        "created_at": "2025-01-01T00:00:00Z",
        "current_leaf_message_uuid": "2",
        "chat_messages": [
            message(
                "1",
                "0000",
                "human",
                text("Sum it up."),
                attachments=[{"file_name": "a.txt", "extracted_content": "long"}],
                files=[{"file_name": "cat.png", "file_kind": "image"}, {"file_name": "b.pdf"}],
            ),
            message(
                "2",
                "1",
                "assistant",
                {"type": "thinking", "thinking": "Short."},
                {"type": "tool_use", "name": "web"},
                {"type": "tool_result", "content": []},
                text("Done."),
            ),
            message("3", "0000", "human", text("Something else.")),
        ],
    }
    report = Report()
    (imported,) = read([chat], report)
    files = "File `a.txt`:\n\n```\nlong\n```\n\n[picture cat.png, not imported]"
    assert talk(imported) == [
        (None, "user", f"Sum it up.\n\n{files}\n\n[file b.pdf, not imported]"),
        (1, "assistant", "Done."),
        (None, "user", "Something else."),
    ]
    assert (imported.messages[1].thinking, shown(imported)[-1]) == ("Short.", "Done.")
    assert imported.messages[0].created_at_utc == "2025-01-01T00:00:00.000+00:00"
    assert imported.conversation.title == "Sum it up."
    kinds = "pictures (1), files (1), tool calls (1), tool results (1)"
    assert report.said() == f"Not imported: {kinds}."


# Open WebUI and LM Studio


def test_open_webuis_tree_and_list_come_in_without_their_elements() -> None:
    thought = (
        '<details type="reasoning" done="true" duration="1">\n<summary>Thought</summary>\n'
        '&gt; It&#x27;s\n&gt; Lima\n</details>\n<details type="tool_calls" name="x"></details>\n'
    )
    picture = [{"type": "image", "url": "data:x"}]
    tree = {
        "1": {"parentId": None, "role": "user", "content": "Capital?", "files": picture},
        "2": {"parentId": "1", "role": "assistant", "content": "Cusco.", "model": "m"},
        "3": {"parentId": "1", "role": "assistant", "content": f"{thought}Lima."},
    }
    chat = {"title": "Peru", "params": {"system": "Be brief."}}
    report = Report()
    (imported,) = read(
        [{"chat": {**chat, "history": {"messages": tree, "currentId": "2"}}}], report
    )
    assert talk(imported) == [
        (None, "user", "Capital?\n\n[picture, not imported]"),
        (1, "assistant", "Cusco."),
        (1, "assistant", "Lima."),
    ]
    assert shown(imported)[-1] == "Cusco."
    assert imported.messages[2].thinking == "It's\nLima"
    assert (imported.conversation.system_prompt, imported.messages[1].model) == ("Be brief.", "m")
    assert report.said() == "Not imported: pictures (1), tool calls (1)."
    listed = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Ho"}]
    (imported,) = read([{"chat": {**chat, "history": {"messages": {}}, "messages": listed}}])
    assert shown(imported) == ["Hi", "Ho"]


def test_lm_studios_versions_become_branches_and_its_steps_one_reply() -> None:
    def text(words: str, **more: object) -> dict[str, object]:
        return {"type": "text", "text": words, **more}

    def block(*content: object, style: str = "") -> dict[str, object]:
        return {"type": "contentBlock", "content": content, "style": {"type": style}}

    reply = [
        block(text("<think>", isStructural=True), text("Peru."), style="thinking"),
        block({"type": "toolCallRequest", "name": "web"}),
        {"type": "debugInfoBlock", "debugInfo": "x"},
        block(text("Lima.")),
    ]
    asked = [text("Capital?"), {"type": "file", "fileType": "image", "name": "map.png"}]
    chat = {
        "name": "Peru",
        "createdAt": 1_700_000_000_000,
        "systemPrompt": "Be brief.",
        "messages": [
            {"versions": [{"role": "user", "content": asked}], "currentlySelected": 0},
            {
                "versions": [
                    {"role": "assistant", "steps": [block(text("Cusco."))]},
                    {"role": "assistant", "steps": reply, "senderInfo": {"senderName": "m"}},
                ],
                "currentlySelected": 1,
            },
            {"versions": [{"role": "user", "content": [text("Thanks.")]}]},
        ],
    }
    (imported,) = read(chat)
    assert talk(imported) == [
        (None, "user", "Capital?\n\n[picture map.png, not imported]"),
        (1, "assistant", "Cusco."),
        (1, "assistant", "Lima."),
        (3, "user", "Thanks."),
    ]
    assert (imported.messages[2].thinking, imported.messages[2].model) == ("Peru.", "m")
    assert imported.conversation.system_prompt == "Be brief."
    assert imported.conversation.created_at_utc == "2023-11-14T22:13:20.000+00:00"


# Lists of messages


def test_sharegpts_speakers_come_in_one_conversation_a_line() -> None:
    turns = [
        {"from": "system", "value": "Be brief."},
        {"from": "human", "value": "<image>\nWhat is it?"},
        {"from": "function_call", "value": "{}"},
        {"from": "gpt", "value": "A cat."},
        {"from": "narrator", "value": "They left."},
    ]
    line, report = json.dumps({"conversations": turns}), Report()
    first, second = read(f"{line}\n{line}\n".encode(), report)
    assert shown(first) == shown(second) == ["[picture, not imported]\nWhat is it?", "A cat."]
    assert first.conversation.system_prompt == "Be brief."
    assert report.said() == (
        "Not imported: pictures (2), tool calls (2), messages of narrator (2)."
    )


def test_messages_with_tools_thoughts_and_other_roles_come_in() -> None:
    picture = {"type": "image_url", "image_url": {"url": "data:x"}}
    messages = [
        {"role": "developer", "content": "Be brief."},
        {"role": "user", "content": [picture]},
        {"role": "assistant", "content": None, "tool_calls": [{"id": "1"}]},
        {"role": "tool", "content": "Sunny"},
        {"role": "assistant", "content": "<think>\nSun.\n</think>\n\nSunny."},
        {"role": "user", "content": "<think> is a tag."},
        {"role": "assistant", "content": "<think> cut"},
    ]
    report = Report()
    for data in ({"messages": messages}, messages):
        (imported,) = read(data, report)
        assert shown(imported) == [
            "[picture, not imported]",
            "Sunny.",
            "<think> is a tag.",
            "<think> cut",
        ]
        assert imported.messages[1].thinking == "Sun."
        assert imported.conversation.system_prompt == "Be brief."
    assert report.said() == "Not imported: pictures (2), tool calls (2), tool results (2)."


def test_the_newest_chat_of_a_file_is_stored_last_and_empty_ones_are_counted() -> None:
    def chat(name: str, year: int, *texts: str) -> dict[str, object]:
        messages = [{"sender": "human", "text": text} for text in texts]
        return {"name": name, "created_at": f"{year}-01-01", "chat_messages": messages}

    report = Report()
    imported = read(
        [chat("new", 2025, "a"), chat("old", 2023, "b"), chat("", 2024), {"x": 1}], report
    )
    assert [one.conversation.title for one in imported] == ["old", "new"]
    assert report.said() == "Not imported: empty chats (1), objects that are no chat (1)."
    with pytest.raises(RequestError, match=r"no conversation with a message.*empty chats \(1\)"):
        read([chat("", 2024)])


# Zips


def packed(method: int = zipfile.ZIP_DEFLATED, **members: object) -> bytes:
    """Return a zip; __ in a name is a slash, and a name gets the end .json."""
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w", method) as archive:
        for name, content in members.items():
            text = content if isinstance(content, str | bytes) else json.dumps(content)
            archive.writestr(f"{name.replace('__', '/')}.json", text)
    return out.getvalue()


def test_the_conversations_of_a_zip_are_read_and_nothing_else() -> None:
    chat = {**CHATGPT, "title": "second"}
    data = packed(
        export__conversations=[CHATGPT], export__conversations_1=b"\xff", user="{", x=b"\0"
    )
    assert [one.conversation.title for one in read(data)] == ["Peru"]
    parts = {"conversations-000": [CHATGPT], "conversations-001": [chat]}
    assert [one.conversation.title for one in read(packed(**parts))] == ["Peru", "second"]
    with pytest.raises(RequestError, match=r"zip holds no conversations\.json.*LM Studio"):
        read(packed())


def test_a_zip_that_unpacks_to_too_much_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    data = packed(conversations=b" " * 200_000)
    claimed = data.replace(struct.pack("<I", 200_000), struct.pack("<I", 10))
    monkeypatch.setattr(file, "MAX_UNPACKED_BYTES", 100_000)
    with pytest.raises(RequestError, match="more than 100,000 bytes"):
        read(data)
    with pytest.raises(RequestError, match=r"damaged|more than"):
        read(claimed)
    monkeypatch.setattr(file, "MAX_MEMBERS", 3)
    with pytest.raises(RequestError, match="more than 3 files"):
        read(packed(**{f"m{number}": "" for number in range(4)}))


def test_zips_that_cannot_be_read_are_refused_in_words() -> None:
    data = packed(conversations=[CHATGPT])
    encrypted = bytearray(data)
    encrypted[6] |= 1
    encrypted[data.index(b"PK\x01\x02") + 8] |= 1
    for broken in (data[:-30], data[:60] + bytes(40) + data[100:], bytes(encrypted)):
        with pytest.raises(RequestError, match="damaged or encrypted"):
            read(broken)
    with pytest.raises(RequestError, match=r"by another method than Deflate.*Unpack it"):
        read(packed(zipfile.ZIP_LZMA, conversations=[CHATGPT]))


# Anything else


@pytest.mark.parametrize(
    "data",
    [b"hello", b"3", b"[1, 2]", b"{}", b"[" * 100_000, b'{"a": 1}\n{"b": 2}', b"\xff\xfe{\0}\0"],
)
def test_what_is_no_chat_export_is_refused_in_these_words(data: bytes) -> None:
    with pytest.raises(RequestError, match=r"This is not a chat export\. Nothing was imported\."):
        read(data)


def test_formats_with_values_of_any_type_come_in_or_are_refused(tmp_path: Path) -> None:
    """The readers trust no type: what is stored is a tree of messages with a text."""
    values = [None, True, -1, 1e308, "", "x", [], [[]], {}, {"role": "user"}, "<think>", "\ud800"]
    rng, turns = random.Random(0), [{"role": "user", "from": "gpt", "value": "b", "content": "a"}]
    text = {"content": [{"type": "text", "text": "a"}, {"type": "file", "name": "b"}]}
    samples = (
        CHATGPT,
        {"chat_messages": [{"sender": "human", "uuid": "1", **text, "files": [{"name": "a"}]}] * 2},
        {"chat": {"history": {"messages": {"1": {**turns[0], "parentId": "0"}}}}},
        {"messages": [{"versions": [{"role": "assistant", "steps": [text]}]}]},
        {"messages": turns, "conversations": turns, "title": "a"},
    )

    def twisted(value: object) -> object:
        if rng.random() < 0.05:
            return rng.choice(values)
        if isinstance(value, dict):
            return {name: twisted(item) for name, item in value.items()}
        return [twisted(item) for item in value] if isinstance(value, list) else value

    read_in = list[Imported]()
    for _ in range(600):
        try:
            read_in += read(twisted(rng.choice(samples)))
        except RequestError:
            continue
    assert len(read_in) > 200
    assert all(one.text.strip() for imported in read_in for one in imported.messages)
    with closing(Store.open(tmp_path / "log.db")) as store:
        assert len(store.conversation_list.add_imported(read_in)) == len(read_in)
