"""Opens peers by the names of their arms and closes them all.

Contract: what several arms share (modules of transformers, the worker of llama.cpp) is loaded
once, when the first of them is opened, and a peer nobody asked for is never started. A peer that
cannot run here is a LocalspecError with reason and remedy. Close it whatever happened: the
workers are processes.
"""

from __future__ import annotations

from pathlib import Path
from time import sleep
from typing import TYPE_CHECKING

from localspec.bench.arms import LLAMA_CPP, PEERS, TRANSFORMERS, Arm
from localspec.bench.peers.adapter import Peer
from localspec.bench.peers.llama_cpp import LlamaCpp
from localspec.bench.peers.vllm import Place, VllmPeer
from localspec.bench.stage import Case, Run, Stage
from localspec.core import SamplingParams
from localspec.errors import LocalspecError, ModelError

if TYPE_CHECKING:
    from localspec.bench.reference import Modules

# Idle threads of a peer may spin for a few ms after its last token; nobody is timed meanwhile.
SETTLING_S = 0.03


class PeerRoom:
    """The peers of one comparison. home: where they are installed. num_threads: of each peer."""

    def __init__(self, stage: Stage, home: Path, num_threads: int) -> None:
        self._stage, self._home, self.num_threads = stage, home, num_threads
        self._modules: Modules | None = None
        self._llama_cpp: LlamaCpp | LocalspecError | None = None
        self._opened = dict[str, Peer]()

    def open(self, arm: Arm) -> Peer:
        """Raises LocalspecError for one that cannot run here."""
        peer = self._open(arm)
        self._opened[arm.name] = peer
        return peer

    def run(self, arm: Arm, case: Case, sampling: SamplingParams, max_tokens: int) -> Run:
        """One reply by an opened peer."""
        try:
            return self._opened[arm.name].run(case, sampling, max_tokens)
        finally:
            sleep(SETTLING_S)

    @property
    def notes(self) -> dict[str, str]:
        """What a reader must know of each opened arm."""
        return {name: peer.note for name, peer in self._opened.items()}

    def close(self) -> None:
        for peer in self._opened.values():
            peer.close()
        if isinstance(self._llama_cpp, LlamaCpp):
            self._llama_cpp.worker.close()

    def _open(self, arm: Arm) -> Peer:
        kind = PEERS[arm.drafter]
        if kind.engine == TRANSFORMERS:
            from localspec.bench.reference import Modules, transformers_peer  # transformers

            if self._modules is None:
                self._modules = Modules(self._stage, self.num_threads)
            return transformers_peer(self._modules, kind.mode, arm.num_draft_tokens)
        if self._stage.engine.target.device.type != "cpu":
            raise ModelError(
                f"{kind.engine} is set up for the CPU only, and this comparison runs on a GPU."
            )
        if kind.engine == LLAMA_CPP:
            return self._shared_llama_cpp().peer(kind.mode, arm.num_draft_tokens)
        place = Place(self._stage, self._home, self.num_threads)
        return VllmPeer(place, kind.mode, arm.num_draft_tokens)

    def _shared_llama_cpp(self) -> LlamaCpp:
        """Started at the first call; what kept it from starting keeps every later call."""
        if self._llama_cpp is None:
            try:
                self._llama_cpp = LlamaCpp(self._stage, self._home, self.num_threads)
            except LocalspecError as error:
                self._llama_cpp = error
        if isinstance(self._llama_cpp, LocalspecError):
            raise self._llama_cpp
        return self._llama_cpp
