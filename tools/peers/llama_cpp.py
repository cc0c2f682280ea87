"""llama.cpp through its Python binding as an arm: one process for all its ways of decoding.

Contract: bench.runs.Runner. Weights are written once as GGUF under HOME/peers/gguf, in the
precision of the comparison (8-bit as Q8_0, 4-bit as Q4_0), and kept by the sizes and times of their
files. The binding offers prompt lookup and takes any draft model; both are verified by drawing from
the target at each position, which is exact at every temperature.

Not here: the conversion (convert_gguf), what the worker does (workers/engine_llama_cpp).
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path

from localspec.bench.cases import Case
from localspec.bench.runs import BenchEngine, MeasuredReply
from localspec.core.decoding import SamplingParams
from localspec.core.errors import ModelError
from localspec.core.files import replacing
from tools.peers import convert_gguf
from tools.peers.convert_gguf import convert
from tools.peers.environments import python_of
from tools.peers.replies import reply_of, request_for
from tools.peers.worker import WORKERS, PeerWorker

OPENING_LIMIT_S = 300.0
RUN_LIMIT_S = 600.0
KINDS = {"float32": "f32", "bfloat16": "bf16", "8-bit": "q8_0", "4-bit": "q4_0"}
DEFAULT_LENGTHS = {
    "plain": 0,
    "lookup": 2,  # what the binding's manual names for machines without a GPU
    "draft": 3,  # llama.cpp's own default
}


class LlamaCpp:
    """The worker with target and draft, shared by all arms of this engine."""

    def __init__(self, bench: BenchEngine, home: Path, num_threads: int) -> None:
        """Raises SetupError where it is not installed, ModelError where it cannot run this."""
        if bench.precision not in KINDS or bench.target_folder is None:
            raise ModelError(
                f"llama.cpp is compared in {' or '.join(KINDS)} on a model folder; this "
                f"comparison runs in {bench.precision}."
            )
        self.end_ids = bench.end_ids
        draft = bench.draft_folder
        self.has_draft = draft is not None
        python, kind = python_of("llama_cpp", home), KINDS[bench.precision]
        opening = {
            "target": str(converted(bench.target_folder, kind, home)),
            "draft": None if draft is None else str(converted(draft, kind, home)),
            "context_length": bench.context_length,
            "num_threads": num_threads,
            "is_fp32": kind == "f32",
        }
        command = [str(python), str(WORKERS / "serve.py"), "engine_llama_cpp"]
        log = home / "peers" / "logs" / "llama_cpp.log"
        self.worker = PeerWorker("llama.cpp", command, opening, log, OPENING_LIMIT_S)

    def peer(self, mode: str, length: int | None) -> LlamaCppPeer:
        """One arm. Raises ModelError without a draft model where one is wanted."""
        if mode == "draft" and not self.has_draft:
            raise ModelError("there is no draft model that llama.cpp could be assisted by.")
        chosen = length or DEFAULT_LENGTHS[mode]
        version = self.worker.facts["version"]
        told = {
            "plain": "without speculation",
            "lookup": f"the binding's prompt lookup of {chosen}",
            "draft": f"the binding's verification of {chosen} greedy tokens of the draft model",
        }[mode]
        return LlamaCppPeer(self, mode, chosen, f"llama-cpp-python {version}, {told}")


@dataclass(frozen=True)
class LlamaCppPeer:
    """One way of decoding in the shared worker."""

    engine: LlamaCpp
    mode: str
    length: int
    note: str

    def run(self, case: Case, sampling: SamplingParams, max_tokens: int) -> MeasuredReply:
        end_ids = self.engine.end_ids
        request = {
            **request_for(case, sampling, max_tokens, end_ids),
            "mode": self.mode,
            "num_draft_tokens": self.length,
        }
        return reply_of(self.engine.worker.ask(request, RUN_LIMIT_S), end_ids)

    def close(self) -> None:
        """The worker is shared: closing one arm closes all."""
        self.engine.worker.close()


def converted(folder: Path, kind: str, home: Path) -> Path:
    """The folder's weights as GGUF, written unless they are there. Raises ModelError."""
    out = home / "peers" / "gguf" / f"{folder.name}-{kind}-{_fingerprint(folder)}.gguf"
    if not out.is_file():
        try:
            with replacing(out) as part:
                convert(folder, part, kind)
        except ModelError as error:
            raise ModelError(f"{folder.name} could not be written for llama.cpp: {error}") from None
    return out


def _fingerprint(folder: Path) -> str:
    """Changes when the weights, the config or the conversion do."""
    digest = hashlib.sha256(str(folder.resolve()).encode())
    digest.update(Path(convert_gguf.__file__).read_bytes())
    for path in sorted((*folder.glob("*.safetensors"), folder / "config.json")):
        found = path.stat()
        digest.update(f"{path.name} {found.st_size} {found.st_mtime_ns}".encode())
    return digest.hexdigest()[:12]
