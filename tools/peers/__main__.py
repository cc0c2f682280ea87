"""`python -m tools.peers --arms off,auto,llama_cpp,vllm`: `bench` with other engines as arms.

The flags and the JSON are those of `bench`; --setup-peers installs the engines.
"""

from __future__ import annotations

from localspec.bench.arms import OtherEngines
from localspec.cli.bench import bench_with
from localspec.cli.flags import run_app


def _open_engines() -> OtherEngines:
    from tools.peers.engines import other_engines  # torch

    return other_engines()


if __name__ == "__main__":
    run_app({"": bench_with(_open_engines)}, "python -m tools.peers")
