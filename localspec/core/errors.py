"""The errors a person may see. Each message says the fact, the reason and the remedy.

    LocalspecError
    ├── SetupError       the environment cannot be made or started
    │   └── AlreadyRunning    another process serves this home folder
    ├── ConfigError      a profile, a setting or a flag is wrong
    ├── RequestError     a message or sampling value cannot be used
    │   ├── ContextOverflow   the conversation is longer than the context
    │   └── NotCounted        a server does not tell how many tokens a conversation has
    ├── QueueFull        too many requests wait
    ├── ModelError       a model folder is missing, corrupt, unsafe or unsupported
    │   └── DraftMismatch     a draft cannot serve this target
    ├── NumericsError    the target returned values that are not numbers
    ├── MemoryShortage   something does not fit
    ├── CacheError       a KV cache was asked for a slot it does not have
    ├── UnexpectedFault  something failed that no part of localspec expects
    ├── EngineLost       the engine cannot answer any more and must be started again
    └── StoreError       the log cannot be read or written

Our own mistakes are assertions, not these.
"""

import errno
from pathlib import Path

from localspec.core.units import enumerated
from localspec.core.visible import visible


class LocalspecError(Exception):
    """Base of every error that is shown to the person as it is, but for hidden characters of
    strangers' words in it."""

    def __init__(self, sentence: str = "") -> None:
        super().__init__(visible(sentence))


class SetupError(LocalspecError):
    """The environment cannot be made or started."""


class AlreadyRunning(SetupError):
    """Another process serves this home folder."""


class ConfigError(LocalspecError):
    """A profile, a setting or a flag is wrong."""


class RequestError(LocalspecError):
    """A message or a sampling value cannot be used. field: of a request, the one that is wrong."""

    def __init__(self, sentence: str, field: str | None = None) -> None:
        super().__init__(sentence)
        self.field = field


class ContextOverflow(RequestError):
    """The conversation and the wanted reply do not fit the context."""

    def __init__(
        self,
        num_prompt_tokens: int,
        max_tokens: int,
        context_length: int,
        num_system_tokens: int = 0,
        are_fewest: bool = False,
    ) -> None:
        """num_system_tokens: of the prompt, those of the system prompt, where that was asked.
        are_fewest: the prompt may have more tokens. fewest_left_out: the oldest messages without
        which the rest would fit, where a chat was asked and some do (set by chat.service)."""
        self.fewest_left_out: int | None = None
        self.num_prompt_tokens = num_prompt_tokens
        self.max_tokens = max_tokens
        self.context_length = context_length
        self.is_by_system_prompt = 2 * num_system_tokens > num_prompt_tokens
        room = max(0, context_length - num_prompt_tokens)
        told = f"This conversation is {'at least ' * are_fewest}{num_prompt_tokens:,} tokens"
        told += ", most of them the system prompt" if self.is_by_system_prompt else ""
        told += f", and the reply may take {max_tokens:,}" if room else ""
        what = "system prompt in the settings" if self.is_by_system_prompt else "message"
        remedies = [f"Shorten the {what}"]
        remedies += [f"set max tokens to {room:,} or less"] if room else []
        remedies += [] if self.is_by_system_prompt else ["start a new chat"]
        super().__init__(
            f"{told}, but the context holds {context_length:,}. Nothing was cut. "
            f"{enumerated(remedies, ', or ')}.",
            "messages",
        )


class NotCounted(RequestError):
    """A server does not tell how many tokens a conversation has, for the reason in the message."""


class QueueFull(LocalspecError):
    """Too many requests wait; nothing is wrong with this one."""

    def __init__(self, num_waiting: int, seconds_each: float, num_slots: int = 1) -> None:
        """seconds_each: how long a reply takes. num_slots: replies that are written together; a
        place in the queue is free once one of them has ended."""
        self.retry_after_s = max(1, round(seconds_each / num_slots))
        super().__init__(
            f"{num_waiting} requests wait already, and more are not kept. Try again in about "
            f"{self.retry_after_s} seconds."
        )


class ModelError(LocalspecError):
    """A model folder is missing, corrupt, unsafe or unsupported."""


class DraftMismatch(ModelError):
    """A draft cannot serve this target."""


class NumericsError(LocalspecError):
    """The target returned values that are not numbers."""


class MemoryShortage(LocalspecError):
    """Something does not fit into the memory that is free."""


class CacheError(LocalspecError):
    """A KV cache was asked for a slot it does not have."""


class UnexpectedFault(LocalspecError):
    """Something failed that no part of localspec expects."""


class EngineLost(LocalspecError):
    """The engine ended, or its device did; what it held is gone and another must be started."""


class StoreError(LocalspecError):
    """The log cannot be read or written."""


def too_long_a_name(error: OSError) -> str:
    """What to say of a name that no file can have. Raises every other error again."""
    if error.errno != errno.ENAMETOOLONG:
        raise error
    return f"{str(error.filename or '')[:40]}… is too long for the name of a file. Shorten it."


def damaged(file: Path, reason: str) -> ModelError:
    return ModelError(f"{file.name} in {file.parent} is damaged: {reason}. Fetch the file again.")


def first_line(error: BaseException) -> str:
    """The first line of a library's error, for a message of ours; its type where it has none. The
    line after one that ends in a colon belongs to it."""
    lines = [line.strip() for line in str(error).strip().splitlines()]
    if isinstance(error, KeyError):
        return f"{lines[0]} is not known" if lines else "KeyError"
    whole = lines[:1] + lines[1:2] * (bool(lines) and lines[0].endswith(":"))
    return " ".join(whole) or type(error).__name__
