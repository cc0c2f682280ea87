"""What a person asked to be loaded: plain values from flags or the page, checked by load, but for
the address of a server, which is checked at once: what is loaded is not freed for a wrong one.

Contract: standard library only. LOAD_FLAGS are the flags of `app.py` and of every command that
loads a model, so that a name means the same at each.
"""

from __future__ import annotations

import ipaddress
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import urlsplit

from localspec.core.errors import ConfigError

SAME_BITS, FASTEST = "same-bits", "fastest"
KERNELS = (SAME_BITS, FASTEST)
USUAL_PARALLEL = 4
MOST_PARALLEL = 64
MOST_MINUTES = 1_000_000  # until a model is let go: two years
MOST_CONTEXT = 100_000_000  # tokens, more than any model was made for


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
    """None means "decide for me". model and draft: a folder or a hub id; the draft may have a
    vocabulary of its own. heads: folders of heads, before those of the profile. home: where the
    person's own profiles are, None: the usual place. anyway: load even where the plan says that
    it does not fit, at the person's own risk. fetches: whether a model that is not on this machine
    may be fetched while loading; the page downloads by itself and says False. kernels: of KERNELS,
    same bits for one row and several, or what is fastest at plain decoding; None: same bits on a
    processor, else what is fastest. raw: the messages are one text that the model continues,
    whatever its template. parallel: replies that are decoded together, at most; None: as many as
    fit, up to USUAL_PARALLEL on a processor, else 1.
    device: "cpu", "cuda", "cuda:N" as `doctor` counts GPUs, or "mps"; None: the GPU with the most
    free memory, else the processor. remote: a server, whereupon all but parallel and home is of no
    use. draft_device: as device, for a draft model; None: beside the target, or where it does not
    fit there on another GPU."""

    profile: str | None = None
    model: str | None = None
    draft: str | None = None
    drafter: str | None = None
    context: int | None = None
    dtype: str | None = None
    heads: tuple[str, ...] = ()
    home: Path | None = None
    anyway: bool = False
    fetches: bool = True
    kernels: str | None = None
    raw: bool = False
    device: str | None = None
    parallel: int | None = None
    remote: RemoteServer | None = None
    draft_device: str | None = None


@dataclass(frozen=True)
class Offer:
    """Something else to load, with the reason as a sentence."""

    text: str
    options: LoadOptions


@dataclass(frozen=True)
class Flag:
    """A flag of what is loaded. name: of the value. kind: bool for one that takes none. least,
    most: of a number."""

    name: str
    help: str
    metavar: str | None = None
    kind: type = str
    least: int | None = None
    most: int | None = None
    is_repeatable: bool = False

    @property
    def option(self) -> str:
        """As it is written."""
        return f"--{self.name.replace('_', '-')}"


LOAD_FLAGS = {
    flag.name: flag
    for flag in (
        Flag("profile", "A model family of profiles/models."),
        Flag("model", "Target: a folder or a hub id.", "DIR_OR_ID"),
        Flag("draft", "Draft model: a folder or a hub id.", "DIR_OR_ID"),
        Flag("heads", "Folder of a trained head; repeatable.", "DIR", is_repeatable=True),
        Flag("drafter", "Who may draft: auto, off or a drafter's name.", "NAME"),
        Flag("context", "Tokens of context to make room for.", "TOKENS", int, 1, MOST_CONTEXT),
        Flag(
            "dtype",
            "fp32, bf16, fp16, 8-bit or 4-bit; 4-bit-head: the output head in 4 bits too, on a GPU "
            "also the embedding, which changes the output more.",
        ),
        Flag(
            "kernels",
            f"{SAME_BITS}, the default on a processor: a reply is the same token for token "
            "whatever drafts. On an NVIDIA GPU it is slower, and no GPU has shown it yet. "
            f"{FASTEST}, the default on a GPU: one row at a time may round differently from "
            "several.",
        ),
        Flag(
            "parallel",
            "Replies that are written at the same time, at most; others wait. Each takes memory "
            "for a context of its own. Default: as many as fit, up to "
            f"{USUAL_PARALLEL}, on a processor; 1 on a card.",
            "REPLIES",
            int,
            least=1,
            most=MOST_PARALLEL,
        ),
        Flag("device", "cpu, cuda, cuda:N as doctor counts the GPUs, or mps. Default: the best."),
        Flag(
            "draft_device",
            "The same for the draft model. Default: beside the target, or on another GPU where it "
            "does not fit there.",
        ),
        Flag(
            "remote",
            "Address of a server with OpenAI's interface (vLLM, SGLang, ...) that answers instead "
            "of an engine here; --model is then one of its models. Its key: LOCALSPEC_REMOTE_KEY.",
            "URL",
        ),
        Flag("remote_key_file", "File with the key of the --remote server.", "FILE", Path),
        Flag(
            "remote_key_unencrypted",
            "Send the key also over a connection to another machine that is not encrypted.",
            kind=bool,
        ),
        Flag(
            "home",
            "Folder of the log and of what was learnt. Default: the usual one where a log is kept, "
            "else a cold start.",
            "DIR",
            Path,
        ),
    )
}
