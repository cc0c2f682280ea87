"""A tiny Gemma 4 that knows a few dialogues by heart, and its assistant, trained in seconds."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from tests.kit.assistants import NUM_LAYERS, shared_keys
from tests.kit.families import GEMMA4
from tests.kit.model_folders import VOCAB_SIZE, save_model

DIALOGUES = {
    "Where does the river go?": "It leaves the hills, passes the old mill and meets the sea.",
    "Who keeps the bees?": "Two sisters keep them behind the school and sell the honey.",
    "What grows here?": "Vines on the south side, and on the north side only heather.",
}
WINDOW = 24
TARGET_STEPS, ASSISTANT_STEPS = 100, 100
NUM_CHAINED = 3  # Steps of a draft that the assistant is trained for.
NO_LABEL = -100
SIZES: dict[str, Any] = {
    **GEMMA4,
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 48,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "pad_token_id": 0,
    "sliding_window": WINDOW,
    "hidden_size_per_layer_input": 0,
    "vocab_size_per_layer_input": 0,
    "final_logit_softcapping": None,
    "tie_word_embeddings": True,
}


def write_pair(target_folder: Path, assistant_folder: Path) -> None:
    """Train both and write their folders."""
    with shared_keys():
        target, assistant = _models()
        ids = train_target(target_folder, target)
        read = target(
            input_ids=ids.clamp(min=0), output_hidden_states=True, return_shared_kv_states=True,
            use_cache=False,
        )  # fmt: skip
        train(assistant, ASSISTANT_STEPS, lambda: _draft_loss(target, assistant, ids, read))
        assistant.save_pretrained(assistant_folder)


def train_target(folder: Path, target: Any) -> torch.Tensor:
    """Teach a target the dialogues and write its folder; returns them as `_text` does."""
    save_model(folder, target)  # its tokenizer is needed for the text
    ids = _text(folder)
    train(target, TARGET_STEPS, lambda: _next_token_loss(target, ids))
    save_model(folder, target)
    target.requires_grad_(False)
    return ids


def target_model() -> Any:
    """The target before it has learnt anything."""
    settings = {name: value for name, value in SIZES.items() if name != "model_type"}
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(
        AutoConfig.for_model("gemma4_text", **settings), attn_implementation="eager"
    )


def _models() -> tuple[Any, Any]:
    kinds = ["sliding_attention"] * (NUM_LAYERS - 1) + ["full_attention"]
    target = target_model()
    text = {**SIZES, "num_hidden_layers": NUM_LAYERS, "num_kv_shared_layers": NUM_LAYERS,
            "layer_types": kinds}  # fmt: skip
    config = AutoConfig.for_model(
        "gemma4_assistant", text_config=text, backbone_hidden_size=SIZES["hidden_size"]
    )
    return target, AutoModelForCausalLM.from_config(config, attn_implementation="eager")


def _text(folder: Path) -> torch.Tensor:
    """The dialogues as token ids, [dialogues, n]; NO_LABEL behind the end."""
    tokenizer: Any = AutoTokenizer.from_pretrained(folder)
    rows = [
        tokenizer.apply_chat_template(
            [{"role": "user", "content": asked}, {"role": "assistant", "content": answer}],
            return_dict=False,
        )
        for asked, answer in DIALOGUES.items()
    ]
    tensors = [torch.tensor(row) for row in rows]
    return torch.nn.utils.rnn.pad_sequence(tensors, batch_first=True, padding_value=NO_LABEL)


def train(module: Any, num_steps: int, loss_of: Any) -> None:
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-2)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 1e-2, total_steps=num_steps)
    for _ in range(num_steps):
        optimizer.zero_grad()
        loss_of().backward()
        torch.nn.utils.clip_grad_norm_(module.parameters(), 1.0)
        optimizer.step()
        schedule.step()
    module.eval()


def _next_token_loss(target: Any, ids: torch.Tensor) -> torch.Tensor:
    logits = target(input_ids=ids.clamp(min=0), use_cache=False).logits
    return F.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())


def _draft_loss(target: Any, assistant: Any, ids: torch.Tensor, read: Any) -> torch.Tensor:
    """The loss of all chained steps from every position at once."""
    losses = list[torch.Tensor]()
    count = ids.shape[1] - NUM_CHAINED - 1
    states, masks = read.hidden_states[-1][:, :count], _masks(count, ids.shape[1])
    positions = torch.arange(1, count + 1)[None]
    for step in range(1, NUM_CHAINED + 1):
        tokens = ids[:, step : step + count].clamp(min=0)
        joined = torch.cat((target.get_input_embeddings()(tokens), states), -1)
        rows = assistant.model(
            inputs_embeds=assistant.pre_projection(joined),
            attention_mask=masks,
            position_ids=positions,
            shared_kv_states=read.shared_kv_states,
            use_cache=False,
            output_hidden_states=True,  # transformers otherwise drops all rows but the last
        ).last_hidden_state
        labels = ids[:, step + 1 : step + 1 + count]
        losses.append(F.cross_entropy(assistant.lm_head(rows).flatten(0, 1), labels.flatten()))
        states = assistant.post_projection(rows)
    return torch.stack(losses).mean()


def _masks(num_rows: int, num_keys: int) -> dict[str, torch.Tensor]:
    """A draft after token i sees the keys up to i, or the window's; [1, 1, rows, keys]."""
    distance = torch.arange(num_rows)[:, None] - torch.arange(num_keys)
    kinds = {"full_attention": num_keys, "sliding_attention": WINDOW}
    return {
        kind: torch.zeros(1, 1, num_rows, num_keys).masked_fill(
            (distance < 0) | (distance > most), torch.finfo(torch.float32).min
        )
        for kind, most in kinds.items()
    }


def prompt_of(folder: Path) -> list[int]:
    """The first question, as the chat asks it."""
    tokenizer: Any = AutoTokenizer.from_pretrained(folder)
    messages = [{"role": "user", "content": next(iter(DIALOGUES))}]
    ids: list[int] = tokenizer.apply_chat_template(
        messages, add_generation_prompt=True, return_dict=False
    )
    return ids
