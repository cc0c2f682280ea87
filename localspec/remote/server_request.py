"""The body of a request to a server, and what is refused because the server cannot do it.

Contract: pure. OpenAI's fields, and of the others those that the kind of server is known to take.

Not here: sending it (server), what the kinds can do (servers).
"""

from __future__ import annotations

from typing import Any

from localspec.core.backend import Request
from localspec.core.decoding import AUTO
from localspec.core.errors import RequestError
from localspec.remote import servers


def fields_of(found: servers.Found, request: Request) -> dict[str, Any]:
    """The body of a request, for OpenAI's package. Raises RequestError for what this server cannot
    do."""
    kind, sampling = found.kind, request.sampling
    _refuse_what_cannot_be(kind, request)
    extra: dict[str, Any] = dict(kind.fields)
    values = {
        "top_k": sampling.top_k or kind.no_top_k,
        "min_p": sampling.min_p,
        "repetition_penalty": sampling.repetition_penalty,
    }
    extra |= {theirs: values[ours] for ours, theirs in kind.sampling.items()}
    options: dict[str, Any] = {"include_usage": True}
    if kind.counts_as_it_goes:
        options["continuous_usage_stats"] = True
    fields: dict[str, Any] = {
        "model": found.model,
        "stream": True,
        "stream_options": options,
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "seed": sampling.seed,
        "max_tokens": request.max_tokens,
        "stop": list(request.stop) or None,
        "presence_penalty": sampling.presence_penalty or None,
        "frequency_penalty": sampling.frequency_penalty or None,
    }
    if request.ignores_end:
        extra["ignore_eos"] = True
    if request.drafter != AUTO:  # else as the server was started
        extra["drafter"] = request.drafter
    if request.num_draft_tokens is not None:
        extra["num_draft_tokens"] = request.num_draft_tokens
    if request.is_raw:
        fields["prompt"] = request.messages[0].content
    else:
        fields["messages"] = servers.as_json(request.messages)
        if request.num_logprobs is not None:
            fields |= {"logprobs": True, "top_logprobs": request.num_logprobs or None}
        if request.thinks is not None and kind.can_switch_thinking:
            extra["chat_template_kwargs"] = {"enable_thinking": request.thinks}
        if request.continues:
            extra |= dict(kind.continuing or {})
    told = {name: value for name, value in fields.items() if value is not None}
    return {**told, "extra_body": extra}


def _refuse_what_cannot_be(kind: servers.ServerKind, request: Request) -> None:
    """Raises RequestError."""
    sampling = request.sampling
    name = "This server" if kind is servers.OTHER else kind.name
    filters = (sampling.top_k, sampling.min_p, sampling.repetition_penalty)
    refusals = (
        (
            not kind.takes_drafter
            and (request.drafter != AUTO or request.num_draft_tokens is not None),
            "decides by itself whether and how it drafts, for all requests alike. Choose "
            '"auto" and leave the fixed γ empty. To compare it with plain decoding, start it '
            "without speculation beside: python -m localspec bench --remote URL --plain URL",
        ),
        (
            sampling.leniency is not None,
            "checks drafts by its own rule, so a lenient one cannot be asked for. Choose exact "
            "checking.",
        ),
        (
            not kind.sampling and filters != (0, 0.0, 1.0),
            "is not known to take top-k, min-p or a repetition penalty. Leave them out.",
        ),
        (
            request.ignores_end and kind is servers.OTHER,
            "is not known to go on after the end of a reply. Leave ignore_eos out.",
        ),
        (
            request.continues and kind.continuing is None,
            "cannot continue a reply. Regenerate it, with more max tokens.",
        ),
        (
            bool(request.tools or request.grammar),
            "is asked here for plain text only. Send requests with tools or a schema to it "
            "directly.",
        ),
        (
            request.is_raw and request.num_logprobs is not None,
            "gives probabilities for chats only here. Ask for them as a chat.",
        ),
        (
            request.thinking_budget is not None
            or (request.thinks and not kind.can_switch_thinking),
            "cannot be told how long to think. Leave it as the model has it.",
        ),
    )
    for is_asked, why in refusals:
        if is_asked:
            raise RequestError(f"{name} {why}")
