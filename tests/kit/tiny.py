"""Tiny models for tests: fp32, CPU, seeded, built in milliseconds.

`tiny_llama` is a real transformers model with logits spread widely enough that sampling meets
every branch of verification (a fresh initialisation is nearly uniform). Its later layers say
little, so `agreeing_draft`, which has its first layer only, agrees with it most of the time.
`TableModel` is a model whose logits are any function of the tokens so far: a script, or the
remembered logits of a real model (`remembered`), where thousands of turns are played.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from localspec.core import decoding
from localspec.core.decoding import (
    DraftPlan,
    Outcome,
    Policy,
    Proposal,
    SamplingParams,
    Step,
)
from localspec.core.filling import Filling
from localspec.engine.engine import Engine
from localspec.engine.noise import GumbelNoise
from localspec.forward.cache import KVCache, KVShape, native_cache
from localspec.forward.decoder import Decoder, kv_shape_of
from localspec.forward.model import CausalLM, kv_shape
from localspec.weights import nf4
from localspec.weights.precision import Precision
from tests.kit.decoders import weights_of

VOCAB_SIZE = 64
END_ID = 63
HIDDEN_SIZE = 64  # formats with blocks of 64 weights need whole blocks
CPU = torch.device("cpu")
GREEDY = SamplingParams()
NEEDS_BF16 = pytest.mark.skipif(
    not nf4.has_kernel(CPU), reason="this processor has no instructions for bf16"
)
KINDS = (pytest.param("nf4", marks=NEEDS_BF16), "int8", "int4")  # quantise.Kind

Context = tuple[int, ...]

# Work this small only waits for other threads, for very long on a busy machine.
torch.set_num_threads(1)


def tiny_llama(
    seed: int = 0, num_layers: int = 2, vocab_size: int = VOCAB_SIZE, later: float = 0.1
) -> Any:
    """A LlamaForCausalLM of `num_layers` layers and hidden size 64 with peaked logits.

    later: how much the layers after the first say. At 0.1 `agreeing_draft` names the same token
    in 70 to 80 % of places and would be accepted 80 to 85 % of the time when sampling.
    """
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=vocab_size,
        hidden_size=HIDDEN_SIZE,
        intermediate_size=128,
        num_hidden_layers=num_layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=256,
        tie_word_embeddings=False,
        eos_token_id=vocab_size - 1,
        bos_token_id=0,
        pad_token_id=0,
    )
    module = LlamaForCausalLM(config).eval()
    assert module.config._attn_implementation == "sdpa"
    with torch.no_grad():
        module.lm_head.weight.mul_(18.0)
        module.model.embed_tokens.weight.mul_(20.0)
        for layer in module.model.layers:  # sharp attention: a wrong slot must change the text
            layer.self_attn.q_proj.weight.mul_(8.0)
            layer.self_attn.v_proj.weight.mul_(8.0)
            layer.self_attn.o_proj.weight.mul_(8.0)
        for layer in module.model.layers[1:]:
            layer.self_attn.o_proj.weight.mul_(later)
            layer.mlp.down_proj.weight.mul_(later)
    return module


def agreeing_draft(target: Any) -> Any:
    """A one-layer draft with the target's embedding, head, norm and first layer."""
    draft = tiny_llama(1, num_layers=1, vocab_size=target.config.vocab_size)
    draft.model.embed_tokens.load_state_dict(target.model.embed_tokens.state_dict())
    draft.model.layers[0].load_state_dict(target.model.layers[0].state_dict())
    draft.model.norm.load_state_dict(target.model.norm.state_dict())
    draft.lm_head.load_state_dict(target.lm_head.state_dict())
    return draft


def with_cache(module: Any, capacity: int = 256) -> Decoder:
    """The module's weights in the native decoder, with a cache of its own."""
    weights = weights_of(module, Precision(module.dtype, CPU), capacity)
    return Decoder(weights, native_cache(kv_shape_of(weights, capacity), module.dtype, CPU))


def with_plain_cache(module: Any, capacity: int = 256) -> Decoder:
    """As `with_cache`, with the layout of keys that a graph reads and states in closed forms, as on
    a GPU."""
    weights = weights_of(module, Precision(torch.float32, CPU), capacity)
    return Decoder(weights, KVCache(kv_shape_of(weights, capacity), torch.float32, CPU))


def on_transformers(module: Any, capacity: int = 256) -> CausalLM:
    """The module behind the transformers path, with a cache of its own."""
    shape = kv_shape(module.config, capacity)
    return CausalLM(module, KVCache(shape, module.dtype, module.device))


class TableModel:
    """A LanguageModel whose logits are a function of all tokens up to and including the last.

    It keeps the promises of the cache by its token mirror: what stands in `cache.tokens` is what
    a token sees, so a slot that should have been rolled back changes the output.
    """

    def __init__(
        self,
        logits: Callable[[Context], torch.Tensor],
        vocab_size: int,
        capacity: int = 256,
        cache: KVCache | None = None,
    ) -> None:
        self._logits = logits
        self.vocab_size = vocab_size
        self.device = CPU
        self.weight_bytes = 0
        self.num_forwards = 0
        self.cache = cache or KVCache(KVShape(1, 1, 1, capacity), torch.float32, CPU)

    def forward(
        self,
        tokens: Sequence[int],
        parents: Sequence[int] | None = None,
        num_logits: int | None = None,
    ) -> torch.Tensor:
        self.num_forwards += 1
        held = tuple(self.cache.tokens)
        contexts: list[Context] = []
        with self.cache.append(tokens):
            for node, token in enumerate(tokens):
                parent = node - 1 if parents is None else parents[node]
                before = held if parent < 0 else contexts[parent]
                contexts.append((*before, token))
        wanted = len(tokens) if num_logits is None else num_logits
        return torch.stack([self._logits(context) for context in contexts[-wanted:]])


def remembered(module: Any) -> Callable[[Context], torch.Tensor]:
    """Next-token logits [V] of `module` after a context, each computed once."""
    known: dict[Context, torch.Tensor] = {}

    def logits(context: Context) -> torch.Tensor:
        if context not in known:
            with torch.no_grad():
                known[context] = module(input_ids=torch.tensor([context])).logits[0, -1].float()
        return known[context]

    return logits


def remembered_model(model: Decoder) -> Callable[[Context], torch.Tensor]:
    """The same of a model with a cache, which is left empty."""
    known: dict[Context, torch.Tensor] = {}

    def logits(context: Context) -> torch.Tensor:
        if context not in known:
            model.cache.rollback(0)
            known[context] = model.forward(context, num_logits=1)[0]
            model.cache.rollback(0)
        return known[context]

    return logits


def scripted(
    script: Sequence[int], prompt_length: int, vocab_size: int, capacity: int = 256
) -> TableModel:
    """A model that, greedily, answers a prompt of `prompt_length` tokens with `script`."""

    def logits(context: Context) -> torch.Tensor:
        place = len(context) - prompt_length
        row = torch.zeros(vocab_size)
        row[script[place] if 0 <= place < len(script) else 0] = 50.0
        return row

    return TableModel(logits, vocab_size, capacity)


def turn_of(
    tokens: Context,
    sampling: SamplingParams = GREEDY,
    max_tokens: int = 50,
    vocab_size: int = VOCAB_SIZE,
) -> decoding.Sequence:
    """A turn without an engine. Noise of seed 0 where the sampling has none."""
    noise = GumbelNoise(sampling.seed or 0, vocab_size, CPU)
    return decoding.Sequence(tokens, sampling, max_tokens, frozenset(), noise)


class Plans:
    """A policy that plans (drafter, length) in turn, over and over. filling: of every round."""

    def __init__(self, *plans: tuple[str, int], filling: Filling | None = None) -> None:
        self._plans = plans
        self._filling = filling
        self.steps: list[Step] = []
        self.proposals: list[Proposal] = []

    def plan(self, sequence: decoding.Sequence) -> DraftPlan:
        drafter, length = self._plans[len(self.steps) % len(self._plans)]
        return DraftPlan(drafter, length, filling=self._filling)

    def observe(self, sequence: decoding.Sequence, outcome: Outcome) -> None:
        self.steps.append(outcome.step)
        self.proposals.append(outcome.proposal)


def play(
    engine: Engine,
    prompt: Context,
    policy: Policy,
    max_tokens: int = 40,
    sampling: SamplingParams = GREEDY,
    end_ids: frozenset[int] = frozenset(),
) -> decoding.Sequence:
    """A whole turn; returns its sequence."""
    sequence = engine.start(prompt, sampling, max_tokens, end_ids)
    decoded(engine, sequence, policy)
    return sequence


def decoded(engine: Engine, sequence: decoding.Sequence, policy: Policy) -> list[int]:
    """Decode a turn to its end; returns its reply."""
    engine.prefill(sequence, threading.Event())
    for _ in engine.decode(sequence, policy, threading.Event()):
        pass
    return sequence.tokens[sequence.prompt_length :]


def tiny_qwen(kind: str) -> Any:
    """Of a width that holds whole blocks of the K kinds."""
    torch.manual_seed(0)
    sizes: dict[str, Any] = {
        "vocab_size": 64,
        "hidden_size": 256,
        "intermediate_size": 256,
        "num_hidden_layers": 1,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 64,
        "tie_word_embeddings": True,
        "pad_token_id": None,
    }
    if kind == "qwen2":
        return Qwen2ForCausalLM(Qwen2Config(**sizes)).eval()
    return Qwen3ForCausalLM(Qwen3Config(**sizes, head_dim=64)).eval()
