"""The report holds figures, machine and plots, and not one word of a message."""

from __future__ import annotations

import io
import zipfile
from datetime import UTC, datetime
from xml.etree import ElementTree

import pytest

from localspec.chat.service import ReplySettings
from localspec.core.decoding import SamplingParams
from localspec.core.errors import StoreError
from localspec.web.proof.report import report_zip
from localspec.web.stats.selection import Selection, day_of, selection_of
from tests.kit.waiting import until
from tests.web.browser.visits import Visit
from tests.web.site import Site

SECRET = "my-secret-plan"


@pytest.fixture(scope="module")
def talked(site: Site) -> Site:
    until(lambda: site.service.status().phase == "ready")
    handle = None
    for temperature, drafter in ((0.0, "auto"), (0.7, "auto"), (0.7, "off")):
        settings = ReplySettings(SamplingParams(temperature=temperature), drafter=drafter)
        reply = site.service.submit(handle, f"{SECRET} | echo", settings)
        assert reply is not None and reply.done.wait(60)
        handle = reply.handle
    assert site.service.flush()
    return site


def unpacked(site: Site, query: dict[str, str]) -> dict[str, str]:
    with zipfile.ZipFile(io.BytesIO(report_zip(site.service, query))) as archive:
        return {name: archive.read(name).decode() for name in archive.namelist()}


def test_figures_settings_versions_and_plots_are_in_it(talked: Site) -> None:
    files = unpacked(talked, {"scope": "all"})
    report = files["report.md"]
    for part in ("## In short", "## By temperature", "## Waits", "## Machine", "## Settings"):
        assert part in report
    assert "| turns | 3 |" in report and "demo-12m" in report and "3.11" in report
    plots = [name for name in files if name.startswith("plots/")]
    assert {"plots/gamma-over-time.svg", "plots/waits.svg", "plots/speedup-by-drafter.svg"} <= {
        *plots
    }
    for name in plots:
        assert f"]({name})" in report
        ElementTree.fromstring(files[name])


def test_no_message_and_no_title_is_in_it(talked: Site) -> None:
    assert all(SECRET not in text for text in unpacked(talked, {"scope": "all"}).values())


def test_a_filter_leaves_out_other_models_and_days(talked: Site) -> None:
    today = datetime.now(UTC).date().isoformat()
    kept = Selection("all", model="demo-12m", since=day_of(today), until=day_of(today))
    assert len(kept.rows(talked.service)) == 3
    assert Selection("all", model="another").rows(talked.service) == []
    assert Selection("all", until=day_of("2001-01-01")).rows(talked.service) == []
    assert talked.service.logged_models() == ["demo-12m"]


def test_an_address_comes_back_as_the_selection_it_was_made_from() -> None:
    made = Selection("conversation", 7, "a/b c", day_of("2026-01-02"), None)
    pairs = dict(part.split("=") for part in made.query.split("&"))
    pairs["model"] = "a/b c"
    assert selection_of(pairs) == made
    for text in ("x; DROP", "²", "-1", "9" * 30):
        assert selection_of({"conversation": text, "model": ""}) == Selection()


def test_a_day_that_is_none_is_said() -> None:
    with pytest.raises(StoreError, match="is no day"):
        day_of("31.3.")
    assert day_of(" ") is None


def test_nothing_to_report_is_said(talked: Site) -> None:
    with pytest.raises(StoreError, match="no turn to report on"):
        report_zip(talked.service, {"scope": "all", "model": "another"})


def test_the_page_shows_plots_that_can_be_saved_and_offers_the_report(
    page: Visit, talked: Site
) -> None:
    one = page
    one.page.click("button[role=tab]:has-text('Stats')")
    one.page.get_by_text("Everything", exact=True).click()
    one.page.wait_for_selector("#ls-plots-box svg.ls-plot")
    assert one.page.locator("#ls-plots-box svg.ls-plot:visible").count() == 3
    one.page.click("#ls-figures summary")
    assert one.page.locator("#ls-figures .ls-tile:visible").count() == 9
    one.page.click("#ls-plots-box summary")
    figure = "figure[data-name=gamma-over-time]"
    for form, start in (("svg", b"<svg"), ("png", b"\x89PNG")):
        with one.page.expect_download() as waiting:
            one.page.click(f"{figure} button[data-as={form}]")
        saved = waiting.value
        assert saved.suggested_filename == f"localspec-gamma-over-time.{form}"
        with open(saved.path(), "rb") as file:
            assert file.read(4) == start
    with one.page.expect_download() as waiting:
        one.page.click("a.ls-report")
    assert waiting.value.suggested_filename == "localspec-report.zip"
    one.page.get_by_role("button", name="Filter figures and report by who asked").click()
    one.page.fill("#ls-since input, #ls-since textarea", "tomorrow")
    one.page.keyboard.press("Enter")
    one.wait_for("is no day", "#ls-stats-warning")
    one.page.fill("#ls-since input, #ls-since textarea", "")
    one.page.keyboard.press("Enter")
    one.page.wait_for_selector("#ls-stats-warning:not(:has(.ls-warning))", state="attached")
