"""The other engines as arms, by name.

Contract: `other_engines` is made for one comparison: what several arms share (the modules of
transformers, the worker of llama.cpp) is loaded once, when the first of them is opened, and an
engine that nobody asked for is never started. One that cannot run here is a LocalspecError with
reason and remedy. Sampled replies of vLLM with speculation are not measured (see `vllm`).
"""

from __future__ import annotations

from functools import partial
from pathlib import Path

from localspec.bench.arms import OtherArm, OtherEngines
from localspec.bench.runs import BenchEngine, Runner
from localspec.core.errors import LocalspecError, ModelError
from tools.peers.environments import environment_of, set_up_all
from tools.peers.llama_cpp import LlamaCpp
from tools.peers.transformers_peer import Modules, transformers_peer
from tools.peers.vllm import VllmPeer

PLAIN, LOOKUP, DRAFT = "plain", "lookup", "draft"
# Of each engine the ways that show it at its best, without starting a process for every one.
QUICK_ARMS = ("transformers", "llama_cpp", "llama_cpp_draft", "vllm")
# Beside each engine's own choice: other draft lengths, so that it is met at its best one.
FURTHER_LENGTHS = (
    "transformers_draft@3", "transformers_draft@5", "transformers_draft@8",
    "transformers_lookup@5", "llama_cpp_lookup@5", "llama_cpp_lookup@10",
    "llama_cpp_draft@2", "llama_cpp_draft@5", "vllm_draft@2", "vllm_draft@5",
)  # fmt: skip


def other_engines() -> OtherEngines:
    """The engines of one comparison."""
    shared = _Shared()
    openers = {
        "transformers": shared.transformers,
        "llama_cpp": shared.llama_cpp,
        "vllm": shared.vllm,
    }
    arms = dict[str, OtherArm]()
    for engine, opener in openers.items():
        arms[engine] = OtherArm(partial(opener, PLAIN), takes_length=False)
        for mode in (LOOKUP, DRAFT):
            arms[f"{engine}_{mode}"] = OtherArm(partial(opener, mode), takes_length=True)
    return OtherEngines(arms, (*arms, *FURTHER_LENGTHS), installed, set_up_all)


def installed(home: Path) -> tuple[str, ...]:
    """Of QUICK_ARMS those that can run here without installing anything."""
    ready = {name: environment_of(name, home).is_complete() for name in ("llama_cpp", "vllm")}
    return tuple(arm for arm in QUICK_ARMS if ready.get(arm.removesuffix("_draft"), True))


class _Shared:
    """What the arms of one engine have in common."""

    def __init__(self) -> None:
        self._modules: Modules | None = None
        self._llama_cpp: LlamaCpp | LocalspecError | None = None

    def transformers(
        self, mode: str, bench: BenchEngine, home: Path, num_threads: int, length: int | None
    ) -> Runner:
        if self._modules is None:
            self._modules = Modules(bench, num_threads)
        return transformers_peer(self._modules, mode, length)

    def llama_cpp(
        self, mode: str, bench: BenchEngine, home: Path, num_threads: int, length: int | None
    ) -> Runner:
        _require_cpu("llama_cpp", bench)
        if self._llama_cpp is None:
            try:
                self._llama_cpp = LlamaCpp(bench, home, num_threads)
            except LocalspecError as error:
                self._llama_cpp = error  # it keeps the other arms from being opened too
        if isinstance(self._llama_cpp, LocalspecError):
            raise self._llama_cpp
        return self._llama_cpp.peer(mode, length)

    def vllm(
        self, mode: str, bench: BenchEngine, home: Path, num_threads: int, length: int | None
    ) -> Runner:
        _require_cpu("vllm", bench)
        return VllmPeer(bench, home, num_threads, mode, length)


def _require_cpu(engine: str, bench: BenchEngine) -> None:
    if bench.engine.target.device.type != "cpu":
        raise ModelError(f"{engine} is set up for the CPU only, and this comparison runs on a GPU.")
