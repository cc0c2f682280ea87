"""Chi-squared: how likely counts are, if they follow the chances that are claimed."""

from __future__ import annotations

from statistics import NormalDist

import torch


def p_value(counts: torch.Tensor, chances: torch.Tensor) -> float:
    """Of counts against chances of one shape; cells expected fewer than 5 times are put together.

    By the Wilson-Hilferty normal approximation, good to some percent from 3 degrees on.
    """
    counts, expected = counts.flatten().double(), chances.flatten().double() * counts.sum()
    impossible = expected < 1e-9
    if float(counts[impossible].sum()) > 0:
        return 0.0
    rare = expected < 5.0
    observed = torch.cat((counts[~rare], counts[rare].sum()[None]))
    wanted = torch.cat((expected[~rare], expected[rare].sum()[None]))
    filled = wanted > 0.5
    statistic = float(((observed - wanted)[filled] ** 2 / wanted[filled]).sum())
    degrees = int(filled.sum()) - 1
    assert degrees >= 5, "too few kinds for a test"
    spread = 2.0 / (9.0 * degrees)
    z = ((statistic / degrees) ** (1 / 3) - (1.0 - spread)) / spread**0.5
    return 1.0 - NormalDist().cdf(z)
