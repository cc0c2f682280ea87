"""What a search of the hub found can be downloaded where it would run."""

from __future__ import annotations

from localspec.machine.hub_files import HubModel
from localspec.web.models.page import results_html


def test_a_model_of_every_native_family_can_be_downloaded() -> None:
    found = [HubModel(f"some/{family}", None, None, family, False) for family in ("granite", "odd")]
    shown = results_html(found, (), (), None)
    assert "of the family odd: not yet" in shown and "family granite" not in shown
    assert shown.count("Download") == 1
