"""EAGLE-3 heads give what their publishers' own code gives, in every layout.

The reference outputs were computed once, by the modules of speculators (for each pair of flags) and
DeepSpec (Qwen3 and Gemma 4), for a prompt and ten rounds of four steps.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from localspec.core.errors import ModelError
from localspec.formats.head_folder import head_kind
from localspec.forward.heads.autoregressive import AutoregressiveHead
from localspec.forward.heads.eagle_files import read_eagle
from tests.kit.parity import CAPACITY, Case, MadeUpTarget, cases, largest_error, target_of, text

FILES = sorted((Path(__file__).parent / "parity").glob("eagle_*.safetensors"))
CASES = {name: case for file in FILES for name, case in cases(file).items()}
TOLERANCE = 2e-4  # of logits up to 20, in fp32; a wrong row is off by more than 1


def head_of(case: Case, folder: Path) -> tuple[AutoregressiveHead, MadeUpTarget]:
    target: Any = target_of(case)
    parts = read_eagle(case.write(folder, target), target)
    return AutoregressiveHead(parts, CAPACITY), target


def drafted(
    head: AutoregressiveHead, target: MadeUpTarget, length: int, num_steps: int
) -> tuple[torch.Tensor, list[int]]:
    """A greedy draft after so many tokens: logits [k, V] and tokens."""
    tokens = text()[:length]
    state = head.start(tokens, target.features(head.layers, tokens[:-1])).forward()
    logits, found = list[torch.Tensor](), list[int]()
    for step in range(num_steps):
        if step:
            state = head.extend(found[-1], state).forward()
        logits.append(head.logits(state).forward()[0])
        found.append(int(logits[-1].argmax()))
    head.forget(length - 1)
    return torch.stack(logits), found


@pytest.mark.parametrize("name", CASES)
def test_a_draft_is_that_of_the_reference_in_every_round(name: str, tmp_path: Path) -> None:
    case = CASES[name]
    head, target = head_of(case, tmp_path)
    assert head_kind(tmp_path) == "eagle"
    num_steps = case.results["logits"].shape[1]
    assert {0, 1, 2, 3, num_steps} <= {*case.accepted}
    for at, length in enumerate(case.lengths):
        logits, tokens = drafted(head, target, length, num_steps)
        assert largest_error(logits, case.results["logits"][at]) < TOLERANCE, f"round {at}"
        assert tokens == case.results["tokens"][at].tolist()
    wanted = case.results["cache"]  # [2, kv_heads, n, head_dim]
    assert head.cache.length == wanted.shape[2]
    found = torch.cat(head.cache.slots[0])[:, :, : wanted.shape[2]]
    assert largest_error(found, wanted) < TOLERANCE


FLAGS = ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")
FLAGGED = "speculators llama norm_before_residual fc_norm norm_output"


@pytest.mark.parametrize("flag", FLAGS)
def test_another_flag_is_seen(flag: str, tmp_path: Path) -> None:
    """A flag that is not followed merely loses acceptance; a norm that the file lacks, or that the
    config does not say, is an error."""
    case = CASES[FLAGGED]
    changed = replace(case, config={**case.config, flag: not case.config[flag]})
    if flag in ("norm_before_fc", "fc_norm"):
        with pytest.raises(ModelError, match=r"exclude each other|which no head here has"):
            head_of(changed, tmp_path)
        return
    head, target = head_of(changed, tmp_path)
    logits, _ = drafted(head, target, case.lengths[0], 4)
    assert largest_error(logits, case.results["logits"][0]) > 100 * TOLERANCE


def test_a_norm_that_the_config_says_and_the_file_lacks_is_an_error(tmp_path: Path) -> None:
    case = CASES["speculators llama"]
    changed = replace(case, config={**case.config, "norm_before_fc": True})
    with pytest.raises(ModelError, match="lacks input_norm"):
        head_of(changed, tmp_path)


@pytest.mark.parametrize("name", ["DeepSpec Gemma 4", "SafeAILab", FLAGGED])
def test_a_wrong_variant_is_seen(name: str, tmp_path: Path) -> None:
    """States of other layers, and pairs off by one."""
    case = CASES[name]
    head, target = head_of(case, tmp_path)
    wanted, tokens = case.results["logits"][0], text()[: case.lengths[0]]
    features = target.features(head.layers, tokens)
    turned = replace(head._parts, layers=(*head.layers[1:], head.layers[0]))
    other = AutoregressiveHead(turned, CAPACITY)
    logits = other.logits(other.start(tokens, features).forward()).forward()
    assert largest_error(logits, wanted[:1]) > 100 * TOLERANCE
    late = target.features(head.layers, [tokens[0], *tokens[:-1]])
    logits = head.logits(head.start(tokens, late).forward()).forward()
    assert largest_error(logits, wanted[:1]) > 100 * TOLERANCE


def test_a_gemma_head_of_another_target_is_refused_by_shape(tmp_path: Path) -> None:
    case = CASES["DeepSpec Gemma 4"]
    target: Any = target_of(case)
    case.write(tmp_path, target)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "hidden_size": 64}))
    with pytest.raises(ModelError, match="a target 64 wide with 40 tokens; this one is 32"):
        read_eagle(tmp_path, target)
