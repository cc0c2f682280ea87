"""A result of a search of the hub can be downloaded where it would run."""

from __future__ import annotations

from localspec.machine.model import Model
from localspec.web.models.models_controller import PAGE


def test_a_model_without_a_fault_can_be_downloaded() -> None:
    found = [Model("some/known"), Model("some/odd", fault="of the family odd: not yet")]
    shown = PAGE.results(found, {}, {}, None)
    assert "of the family odd: not yet" in shown and shown.count("not yet") == 1
    assert shown.count("Download") == 1
