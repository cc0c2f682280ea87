"""Makes the trained Qwen3.5 of tests/loading: `python -m tests.kit.trained_qwen FOLDER`, 90 s.

A model of 37,000 weights learns eight talks by heart, then its module for multi-token prediction
learns to draft for it, three steps on its own output as in FastMTP (arXiv 2509.18362). The weights
of the final norm are noise that is not trained: states before and after it then differ much.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch.nn import functional
from transformers import AutoTokenizer, Qwen3_5ForCausalLM, Qwen3_5TextConfig
from transformers.modeling_layers import MtpModel

from tests.kit.model_folders import VOCAB_SIZE, save_tokenizer
from tests.kit.qwen_mtp import write

TALKS = {
    "hello": "Hello! How can I help you today?",
    "count": "one two three four five six seven eight nine ten",
    "fox": "The quick brown fox jumps over the lazy dog.",
    "rain": "The rain in Spain stays mainly in the plain.",
    "star": "Twinkle, twinkle, little star, how I wonder what you are.",
    "code": "def add(a, b):\n    return a + b",
    "thanks": "You are welcome! Is there anything else?",
    "sea": "She sells sea shells by the sea shore.",
}
SIZES: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
    "layer_types": ["linear_attention", "full_attention"], "num_attention_heads": 2,
    "num_key_value_heads": 1, "head_dim": 16, "linear_num_key_heads": 1,
    "linear_num_value_heads": 2, "linear_key_head_dim": 16, "linear_value_head_dim": 16,
    "linear_conv_kernel_dim": 4, "max_position_embeddings": 512, "tie_word_embeddings": True,
    "pad_token_id": 0, "eos_token_id": 0,
    "rope_parameters": {
        "rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5,
        "mrope_section": [2, 1, 1], "mrope_interleaved": True,
    },
}  # fmt: skip
NUM_STEPS, NUM_MODULE_STEPS, NUM_UNROLLED = 300, 200, 3
LEARNING_RATE = 6e-3


def texts(folder: Path) -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens of all talks, and which of them are no padding: [8, n] each."""
    tokenizer = AutoTokenizer.from_pretrained(str(folder))
    read = [
        tokenizer.apply_chat_template(
            [{"role": "user", "content": asked}, {"role": "assistant", "content": answer}],
            return_dict=False,
        )
        for asked, answer in TALKS.items()
    ]
    longest = max(map(len, read))
    tokens = torch.tensor([[*ids, *[0] * (longest - len(ids))] for ids in read])
    lengths = torch.tensor([len(ids) for ids in read])
    return tokens, torch.arange(longest)[None] < lengths[:, None]


def trained(
    weights: Iterable[torch.nn.Parameter], num_steps: int, loss_of: Callable[[], torch.Tensor]
) -> None:
    held = list(weights)
    optimiser = torch.optim.AdamW(held, lr=LEARNING_RATE, weight_decay=0.0)
    for step in range(num_steps):
        share = min(1.0, (step + 1) / 20) * (1 - step / num_steps)
        optimiser.param_groups[0]["lr"] = LEARNING_RATE * share + 1e-5
        loss = loss_of()
        optimiser.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(held, 1.0)
        optimiser.step()
    print(f"loss {float(loss):.3f}")


def main(folder: Path) -> None:
    torch.manual_seed(0)
    folder.mkdir(parents=True, exist_ok=True)
    save_tokenizer(folder)
    tokens, is_text = texts(folder)
    config = Qwen3_5TextConfig(**SIZES)
    config._attn_implementation = "eager"
    model: Any = Qwen3_5ForCausalLM(config)
    config.num_mtp_layers, config.mtp_layer_types = 1, ["full_attention"]
    module = MtpModel(model, 1)
    with torch.no_grad():
        model.model.norm.weight.copy_(0.6 * torch.randn(SIZES["hidden_size"]))
        model.model.embed_tokens.weight.mul_(8)
    model.model.norm.weight.requires_grad_(False)

    def of_model() -> torch.Tensor:
        logits = model(input_ids=tokens, use_cache=False).logits[:, :-1]
        return functional.cross_entropy(logits[is_text[:, 1:]], tokens[:, 1:][is_text[:, 1:]])

    trained((each for each in model.parameters() if each.requires_grad), NUM_STEPS, of_model)
    model.requires_grad_(False)
    found = model(input_ids=tokens, use_cache=False, output_hidden_states=True)
    states, layer = found.hidden_states[-1][:, :-1], module.layers[0].requires_grad_(True)
    embedded = model.get_input_embeddings()(tokens[:, 1:])
    places = torch.arange(1, tokens.shape[1])[None].expand(len(tokens), -1)
    turned = module.rotary_emb(embedded, position_ids=places)
    mask = torch.full((embedded.shape[1],) * 2, float("-inf")).triu(1)[None, None]

    def of_module() -> torch.Tensor:
        rows, losses = states, list[torch.Tensor]()
        for _ in range(NUM_UNROLLED):
            made = layer(embedded, rows, turned, mask, places, None)
            logits = model.lm_head(made[:, :-1])
            is_next = is_text[:, 2:]
            losses.append(functional.cross_entropy(logits[is_next], tokens[:, 2:][is_next]))
            rows = functional.pad(made[:, :-1], (0, 0, 1, 0))
        return torch.stack(losses).mean()

    trained(layer.parameters(), NUM_MODULE_STEPS, of_module)
    file = write(folder, model, module) / "model.safetensors"
    tensors = {name: each.to(torch.bfloat16).contiguous() for name, each in load_file(file).items()}
    save_file(tensors, file, {"format": "pt"})


if __name__ == "__main__":
    main(Path(sys.argv[1]))
