"""Many requests at once through SGLang's native `/generate`.

Contract: one call with all prompts, one answer with all replies; the server puts them into one
batch as its scheduler sees fit. Each prompt is the text of a request's last message, without a
chat template: the native interface has none. What was drafted comes with every reply.

Source: SGLang 0.5.23, `GenerateReqInput` and the `meta_info` of its answers. Its kernels want a
GPU, so this was held against the protocol and not against the server.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from localspec.backend import Request
from localspec.errors import LocalspecError
from localspec.remote import servers
from localspec.remote.counters import Drafts

if TYPE_CHECKING:
    import httpx2

BATCH_S = 600.0


@dataclass(frozen=True)
class BatchReply:
    """drafts: None where the server drafts nothing or does not tell it."""

    text: str
    num_output_tokens: int | None
    drafts: Drafts | None


def generate(
    client: httpx2.Client, found: servers.Found, requests: Sequence[Request]
) -> list[BatchReply]:
    """Raises LocalspecError."""
    import httpx2

    fields = {
        "text": [request.messages[-1].content for request in requests],
        "sampling_params": [_sampling(request) for request in requests],
    }
    try:
        answer = client.post("/generate", json=fields, timeout=BATCH_S)
        replies = answer.json()
    except httpx2.HTTPError as error:
        raise LocalspecError(servers.gone(found.url, error)) from error
    except ValueError:
        replies = None
    if answer.status_code != 200 or not isinstance(replies, list):
        said = servers.sentence_in(replies)
        raise LocalspecError(f"{found.kind.name} refused the batch: {said}. Change it.")
    return [_reply(one) for one in replies]


def _sampling(request: Request) -> dict[str, Any]:
    sampling = request.sampling
    fields = {
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k or -1,
        "min_p": sampling.min_p,
        "repetition_penalty": sampling.repetition_penalty,
        "presence_penalty": sampling.presence_penalty,
        "frequency_penalty": sampling.frequency_penalty,
        "sampling_seed": sampling.seed,
        "max_new_tokens": request.max_tokens,
        "stop": list(request.stop) or None,
    }
    return {name: value for name, value in fields.items() if value is not None}


def _reply(one: dict[str, Any]) -> BatchReply:
    told = one.get("meta_info") or {}
    drafted, accepted = (told.get(f"spec_num_{name}_drafts") for name in ("proposed", "correct"))
    drafts = None
    if isinstance(drafted, int) and isinstance(accepted, int):
        drafts = Drafts(told.get("spec_verify_ct"), drafted, accepted)
    return BatchReply(str(one.get("text", "")), told.get("completion_tokens"), drafts)
