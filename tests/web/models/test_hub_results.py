"""What a search of the hub found can be downloaded where it would run."""

from __future__ import annotations

from localspec.machine.hub_files import HubModel
from localspec.web.models.models_controller import PAGE


def test_a_model_of_every_native_family_can_be_downloaded() -> None:
    found = [HubModel(f"some/{family}", None, None, family, False) for family in ("granite", "odd")]
    shown = PAGE.results(found, {}, {}, None)
    assert "of the family odd: not yet" in shown and "family granite" not in shown
    assert shown.count("Download") == 1
