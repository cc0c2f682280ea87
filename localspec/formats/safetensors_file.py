"""The shapes of the tensors in .safetensors files, from their headers alone.

Contract: raises ModelError for a header that cannot be read; whether a file is whole is checked
where it is loaded (forward.weights).
"""

from __future__ import annotations

import struct
from pathlib import Path

from localspec.errors import ModelError
from localspec.files import parsed

MAX_HEADER_BYTES = 100 * 1024**2  # the format's own limit


def tensor_shapes(file: Path) -> dict[str, tuple[int, ...]]:
    try:
        with file.open("rb") as stream:
            (length,) = struct.unpack("<Q", stream.read(8))
            if length > MAX_HEADER_BYTES:
                raise ValueError("its header is too long")
            entries = parsed(stream.read(length))
        return {
            str(name): tuple(int(size) for size in each["shape"])
            for name, each in entries.items()
            if name != "__metadata__"
        }
    except (OSError, ValueError, LookupError, TypeError, AttributeError, struct.error) as error:
        raise ModelError(
            f"The header of {file.name} in {file.parent} cannot be read. Fetch the file again."
        ) from error
