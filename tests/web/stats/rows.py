"""Rows of the log's view of turns."""

from __future__ import annotations

from typing import Any

ROW: dict[str, Any] = {
    "continues_message_id": None,
    "turn_id": 1,
    "drafter": "draft_model",
    "temperature": 0.7,
    "num_output_tokens": 100,
    "num_drafts": 25,
    "num_draft_tokens": 100,
    "num_checked_tokens": 80,
    "num_accepted_tokens": 75,
    "decode_ms": 1000.0,
    "plain_decode_ms": 2000.0,
    "reply_ms": 1250.0,
    "plain_reply_ms": 2250.0,
    "drafted_by": '{"draft_model": 100}',
    "tokens_per_second": 100.0,
    "speedup": 1.8,
    "decode_speedup": 2.0,
    "no_speedup": None,
    "least_speedup": None,
    "acceptance_rate": 0.75,
    "draft_share": 0.75,
    "mean_accepted_length": 4.0,
    "mean_num_draft_tokens": 4.0,
    "ttft_ms": 12.3,
    "finish_reason": "eos",
    "exact": True,
    "num_lenient_tokens": 0,
    "workload": "chat",
}
LENIENT = ROW | {"exact": False, "num_lenient_tokens": 7, "workload": "code"}
OFF = ROW | {
    "drafter": "off",
    "temperature": 0.0,
    "num_drafts": 0,
    "num_draft_tokens": 0,
    "num_checked_tokens": 0,
    "num_accepted_tokens": 0,
    "acceptance_rate": None,
    "mean_accepted_length": None,
    "mean_num_draft_tokens": None,
    "plain_decode_ms": None,
    "plain_reply_ms": None,
    "drafted_by": "{}",
    "speedup": None,
    "decode_speedup": None,
    "decode_ms": 3000.0,
    "num_output_tokens": 90,
    "tokens_per_second": 30.0,
}
NOTHING = {name: None for name in ROW} | {"turn_id": 3, "finish_reason": "error"}
