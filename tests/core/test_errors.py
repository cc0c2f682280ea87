"""What is told of a library's error."""

from __future__ import annotations

import pytest

from localspec.core.errors import first_line


@pytest.mark.parametrize(
    ("error", "told"),
    [
        (ValueError("one\ntwo"), "one"),
        (ValueError("Validation error for field 'x':\n    expected int\nmore"),
         "Validation error for field 'x': expected int"),
        (KeyError("rope"), "'rope' is not known"),
        (KeyError(), "KeyError"),
        (ValueError("  "), "ValueError"),
    ],
)  # fmt: skip
def test_the_line_that_says_something_is_told(error: Exception, told: str) -> None:
    assert first_line(error) == told
