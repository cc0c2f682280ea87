"""What was said in earlier conversations, for a drafter that looks texts up.

Contract: texts of messages, oldest first, the newest kept where they are more than `max_chars`.
Read once at a start; nothing leaves the machine.
"""

from __future__ import annotations

from localspec.record.store import Store

MAX_CHARS = 400_000  # about 100,000 tokens


def past_texts(store: Store, max_chars: int = MAX_CHARS) -> tuple[str, ...]:
    """Every message of the log, whole, as far as `max_chars` reach back."""
    found, left = list[str](), max_chars
    for conversation in reversed(store.conversations()):
        for message in reversed(store.messages(conversation.id)):
            left -= len(message.text)
            if left < 0:
                return tuple(reversed(found))
            found.append(message.text)
    return tuple(reversed(found))
