"""What a person asked to be loaded: plain values from flags or the page, checked by load, but for
the address of a server, which is checked at once: what is loaded is not freed for a wrong one.

Contract: standard library only. The fields with a `Flag` are the flags of `app.py` and of every
command that loads a model, so that a name means the same at each.
"""

from __future__ import annotations

import ipaddress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated
from urllib.parse import urlsplit

from localspec.core.errors import ConfigError
from localspec.core.flags import Flag

SAME_BITS, FASTEST = "same-bits", "fastest"
KERNELS = (SAME_BITS, FASTEST)
# Where the experts of a mixture are on a machine with a GPU.
AUTO_EXPERTS, EXPERTS_ON_GPU, EXPERTS_IN_RAM = "auto", "gpu", "ram"
EXPERTS = (AUTO_EXPERTS, EXPERTS_ON_GPU, EXPERTS_IN_RAM)
NO_DRAFT = "none"  # as --draft takes it: no draft model is loaded
USUAL_PARALLEL = 4
MOST_PARALLEL = 64
MOST_MINUTES = 1_000_000  # until a model is let go: two years
MOST_GB = 1_000_000  # of disk for what was read of chats: more than any disk has
MOST_CONTEXT = 100_000_000  # tokens, more than any model was made for

HomeFlag = Annotated[
    Path | None,
    Flag(
        "Folder of the log and of what was learnt. Default: the usual one where a log is kept, "
        "else a cold start.",
        "DIR",
    ),
]


@dataclass(frozen=True)
class RemoteServer:
    """A server with OpenAI's interface that answers instead of an engine here. url: with or without
    /v1. model: None: its first. key: None: none is sent; it is never written down.
    sends_key_openly: also where the connection to another machine is not encrypted. Raises
    ConfigError for an address that cannot be used, or not with this key."""

    url: str
    model: str | None = None
    key: str | None = field(default=None, repr=False)
    sends_key_openly: bool = False

    def __post_init__(self) -> None:
        try:
            parts = urlsplit(self.address)
            host, _ = parts.hostname, parts.port
            (host or "").encode("idna")  # as a connection looks it up
        except ValueError:
            parts, host = urlsplit(""), None
        has_more = parts.query or parts.fragment or not self.address.isprintable()
        if parts.scheme not in ("http", "https") or not host or has_more:
            raise ConfigError(
                "The address of the server cannot be read. Write it like http://127.0.0.1:8000 or "
                "https://my-server.example/v1."
            )
        if parts.username or parts.password:
            raise ConfigError(
                "The address of the server holds a name or a password, which would be logged. "
                "Leave it out of the address and give a key."
            )
        is_open = parts.scheme == "http" and not is_loopback(host)
        if self.key and is_open and not self.sends_key_openly:
            raise ConfigError(
                f"The key was not sent: the connection to {host} is not encrypted, so whoever "
                "listens on the network could read it. Use an https:// address or a tunnel (ssh "
                "-L), or, in a network that you trust, start with --remote-key-unencrypted."
            )

    @property
    def address(self) -> str:
        """Without /v1."""
        return self.url.strip().rstrip("/").removesuffix("/v1")


def is_loopback(host: str) -> bool:
    """Whether nobody but this machine is reached there, also as IPv4 within IPv6. Of names, which
    may point anywhere, only localhost."""
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return host.lower() == "localhost"
    mapped = address.ipv4_mapped if isinstance(address, ipaddress.IPv6Address) else None
    return (mapped or address).is_loopback


@dataclass(frozen=True)
class LoadOptions:
    """None means "decide for me". home: where the person's own profiles are too. heads: before
    those of the profile. device: None: the GPU with the most free memory, else the processor.
    anyway: load even where the plan says that it does not fit, at the person's own risk. fetches:
    whether a model that is not on this machine may be fetched while loading; the page downloads by
    itself and says False. raw: the messages are one text that the model continues, whatever its
    template. remote: a server, whereupon all but parallel and home is of no use."""

    profile: Annotated[str | None, Flag("A model family of profiles/models.")] = None
    model: Annotated[str | None, Flag("Target: a folder or a hub id.", "DIR_OR_ID")] = None
    draft: Annotated[
        str | None,
        Flag(
            "Draft model or published head: a folder or a hub id, in place of the usual one. "
            f"{NO_DRAFT}: no draft model.",
            "DIR_OR_ID",
        ),
    ] = None
    drafter: Annotated[
        str | None, Flag("Who may draft: auto, off or a drafter's name.", "NAME")
    ] = None
    context: Annotated[
        int | None, Flag("Tokens of context to make room for.", "TOKENS", 1, MOST_CONTEXT)
    ] = None
    dtype: Annotated[
        str | None,
        Flag(
            "fp32, bf16, fp16, 8-bit or 4-bit; 4-bit-head: the output head in 4 bits too, on a GPU "
            "also the embedding, which changes the output more."
        ),
    ] = None
    heads: Annotated[tuple[str, ...], Flag("Folder of a trained head; repeatable.", "DIR")] = ()
    home: HomeFlag = None
    anyway: bool = False
    fetches: bool = True
    kernels: Annotated[
        str | None,
        Flag(
            f"{SAME_BITS}, the default on a processor: a reply is the same token for token "
            "whatever drafts. On an NVIDIA GPU it is slower, and no GPU has shown it yet. "
            f"{FASTEST}, the default on a GPU: one row at a time may round differently from "
            "several.",
            choices=KERNELS,
        ),
    ] = None
    raw: bool = False
    device: Annotated[
        str | None, Flag("cpu, cuda, cuda:N as doctor counts the GPUs, or mps. Default: the best.")
    ] = None
    parallel: Annotated[
        int | None,
        Flag(
            "Replies that are written at the same time, at most; others wait. Each takes memory "
            "for a context of its own. Default: as many as fit, up to "
            f"{USUAL_PARALLEL}, on a processor; 1 on a card.",
            "REPLIES",
            1,
            MOST_PARALLEL,
        ),
    ] = None
    remote: RemoteServer | None = None
    draft_device: Annotated[
        str | None,
        Flag(
            "The device of the draft model, as --device takes it. Default: beside the target, or "
            "on another GPU where it does not fit there."
        ),
    ] = None
    experts: Annotated[
        str | None,
        Flag(
            f"Where the experts of a mixture are. {EXPERTS_ON_GPU}: on the GPU. {EXPERTS_IN_RAM}: "
            "in the RAM, where the processor computes them, for a GPU that does not hold them. "
            f"{AUTO_EXPERTS}, the default: in the RAM only where the GPU does not hold them.",
            choices=EXPERTS,
        ),
    ] = None


@dataclass(frozen=True)
class RemoteFlags:
    """The flags of a server that answers instead of an engine here."""

    remote: Annotated[
        str | None,
        Flag(
            "Address of a server with OpenAI's interface (vLLM, SGLang, ...) that answers instead "
            "of an engine here; --model is then one of its models. Its key: LOCALSPEC_REMOTE_KEY.",
            "URL",
        ),
    ] = None
    remote_key_file: Annotated[
        Path | None, Flag("File with the key of the --remote server.", "FILE")
    ] = None
    remote_key_unencrypted: Annotated[
        bool,
        Flag("Send the key also over a connection to another machine that is not encrypted."),
    ] = False


@dataclass(frozen=True)
class Offer:
    """Something else to load, with the reason as a sentence."""

    text: str
    options: LoadOptions
