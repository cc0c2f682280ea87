"""A made-up family is one layout entry, a made-up format one reader; files and settings are
compared before weights are read, and no modelling code of transformers is imported."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from localspec.formats import native
from localspec.forward.builder import build_weights
from localspec.forward.cache import KVCache, KVShape
from localspec.forward.decoder import Decoder
from localspec.forward.load import load_model
from localspec.forward.model import CausalLM
from localspec.forward.tensor_names import TensorNames
from localspec.weights.precision import Precision
from localspec.weights.stored import Dense, Weight
from tests.kit.decoders import settings_of_module
from tests.kit.families import assert_close, small
from tests.kit.tiny import CPU, on_transformers, tiny_llama

TEXT = [3, 14, 15, 9, 26, 5, 35, 8]


def saved(folder: Path, **more: Any) -> Path:
    """A Llama, with further settings."""
    tiny_llama().save_pretrained(str(folder))
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **more}))
    return folder


class SteppedSource:
    """A made-up format: whole numbers of steps, and one step for each tensor."""

    def __init__(self, tensors: dict[str, torch.Tensor]) -> None:
        self._steps = {name: float(each.abs().max()) / 1000 for name, each in tensors.items()}
        self._numbers = {
            name: (each / (self._steps[name] or 1.0)).round().short()
            for name, each in tensors.items()
        }

    @property
    def names(self) -> frozenset[str]:
        return frozenset(self._numbers)

    def read(self, name: str) -> Weight:
        return Dense(self._numbers[name].float() * self._steps[name])


def test_a_new_format_is_one_reader() -> None:
    module = small("llama")
    settings, source = settings_of_module(module), SteppedSource(module.state_dict())
    names = TensorNames.of(settings, source.names, "a module")
    weights = build_weights(settings, source, names, Precision(torch.float32, CPU), 64)
    sizes = settings.layers[0]
    shape = KVShape(settings.num_layers, sizes.num_kv_heads, sizes.head_dim, 64)
    found = Decoder(weights, KVCache(shape, torch.float32, CPU)).forward(TEXT)
    module.load_state_dict({name: source.read(name).dense(torch.float32) for name in source.names})
    assert_close(found, on_transformers(module, 64).forward(TEXT))


def test_a_new_family_is_one_layout_entry(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A Llama whose layers have names of its own, which transformers does not know at all."""
    module = small("llama")
    config = {**module.config.to_dict(), "model_type": "loom"}
    (tmp_path / "config.json").write_text(json.dumps(config))
    own = {"post_attention_layernorm": "weft", "self_attn.o_proj": "self_attn.knot"}
    tensors = dict[str, torch.Tensor]()
    for name, tensor in module.state_dict().items():
        for usual, name_there in own.items():
            name = name.replace(usual, name_there)
        tensors[name] = tensor.clone()
    save_file(tensors, str(tmp_path / "model.safetensors"), metadata={"format": "pt"})
    layout = replace(native.LAYOUTS["llama"], feed_forward_norm="weft", output="knot")
    for families in (native.LAYOUTS, native.NATIVE):
        monkeypatch.setitem(families, "loom", layout)  # type: ignore[arg-type]
    model = load_model(tmp_path, torch.float32, CPU, 64).model
    assert isinstance(model, Decoder)
    assert_close(model.forward(TEXT), on_transformers(module, 64).forward(TEXT))


def test_a_setting_that_the_layout_does_not_know_sends_a_model_to_transformers(
    tmp_path: Path,
) -> None:
    opened = load_model(saved(tmp_path, attention_tricks=3), torch.float32, CPU, 32)
    assert isinstance(opened.model, CausalLM)
    assert opened.notice is not None and "attention_tricks" in opened.notice
    wanted = tiny_llama()(input_ids=torch.tensor([TEXT])).logits[0]
    assert torch.allclose(opened.model.forward(TEXT), wanted, atol=1e-5)


@pytest.mark.slow
def test_a_native_model_is_loaded_without_the_modelling_code_of_transformers(
    tmp_path: Path,
) -> None:
    script = (
        "import sys, torch\n"
        "from pathlib import Path\n"
        "from localspec.forward.load import load_model\n"
        "load_model(Path(sys.argv[1]), torch.float32, torch.device('cpu'), 32)\n"
        "names = [name for name in sys.modules if name.startswith('transformers.')]\n"
        "print([name for name in names if 'modeling' in name or 'models.' in name])\n"
    )
    command = [sys.executable, "-c", script, str(saved(tmp_path))]
    ran = subprocess.run(command, capture_output=True, text=True, check=True)
    assert ran.stdout.strip() == "[]"
