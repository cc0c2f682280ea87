"""The settings in a real browser: kept for each chat, defaults, prompts, ways of drafting."""

from __future__ import annotations

from typing import Any

import pytest

from tests.kit.waiting import until
from tests.web.browser.checks import ask_until, open_chat
from tests.web.browser.tabs import VIEWPORT
from tests.web.browser.visits import WAIT_MS, Visit
from tests.web.site import Site

pytestmark = pytest.mark.slow

SPEED = "#ls-speed-choice summary"

# The help that is seen lies over no field, label or button of the panel.
COVERS_NOTHING = """(help) => {
  const place = (one) => one.getBoundingClientRect();
  const box = place(document.getElementById(help));
  const names = ['input', 'textarea', 'select', 'label', 'button', 'summary'];
  const others = [...document.querySelectorAll(`#ls-settings :is(${names})`)].map(place);
  const isFree = ({ width, left, right, top, bottom }) => !width
    || right <= box.left || left >= box.right || bottom <= box.top || top >= box.bottom;
  return box.height > 10 && others.every(isFree);
}"""


@pytest.fixture
def settings_page(own_page: Visit, site: Site) -> Visit:
    """A new chat with its panel open, without what was set for one that was never sent."""
    page = own_page
    site.clear()
    page.page.set_viewport_size(VIEWPORT)
    page.new_chat()
    page.page.wait_for_function("!!document.querySelector('#ls-defaults-of')?.textContent")
    if not page.page.locator("#ls-settings.open").count():
        page.page.keyboard.press("Control+,")
    page.page.locator("#ls-settings.open").wait_for()
    advanced = page.page.locator("#ls-advanced")
    advanced.evaluate("(fold) => { fold.open = false; }")
    return page


def field(page: Visit, name: str) -> Any:
    return page.page.locator(f"#ls-set-{name}")


def holds(page: Visit, name: str, value: str) -> None:
    page.page.wait_for_function(
        "([id, value]) => document.getElementById(id)?.value === value",
        arg=[f"ls-set-{name}", value],
        timeout=WAIT_MS,
    )


def test_settings_stay_with_their_chat_and_a_new_one_has_the_defaults_of_the_model(
    settings_page: Visit, site: Site
) -> None:
    page = settings_page
    field(page, "temperature").fill("0.3")
    page.wait_for("of 4,096 tokens", "#ls-gauge-text")
    before = page.text("#ls-gauge-text")
    field(page, "system_prompt").fill("Be brief.")
    counted = "(before) => document.querySelector('#ls-gauge-text').innerText !== before"
    page.page.wait_for_function(counted, arg=before, timeout=WAIT_MS)
    page.page.click("#ls-advanced summary")
    field(page, "seed").fill(" 7 ")
    field(page, "fixed_gamma").fill("3")
    field(page, "stop").fill("END\n###")
    ask_until(page, "echo settled", 1)
    asked = site.backend.requests[-1]
    assert asked.messages[0].content == "Be brief."
    assert (asked.sampling.temperature, asked.sampling.seed, asked.num_draft_tokens) == (0.3, 7, 3)
    assert asked.stop == ("END", "###")

    page.page.click("#ls-new")
    holds(page, "temperature", "0.7")
    assert [field(page, name).input_value() for name in ("seed", "system_prompt")] == ["", ""]
    field(page, "max_tokens").fill("40")
    page.page.click("#ls-defaults-save")
    page.wait_for("Defaults of demo-12m", "#ls-defaults-of")
    ask_until(page, "echo by default", 1)
    assert site.backend.requests[-1].num_draft_tokens is None
    open_chat(page, "echo settled")
    holds(page, "temperature", "0.3")
    assert field(page, "max_tokens").input_value() == "512"
    assert field(page, "stop").input_value() == "END\n###"
    field(page, "max_tokens").fill("99")
    until(lambda: site.service.settings_of(newest(site, "settled"))["max_tokens"] == "99")
    page.reload()
    holds(page, "max_tokens", "99")
    holds(page, "system_prompt", "Be brief.")
    page.page.evaluate(
        """() => {
          document.getElementById('ls-new').click();
          const field = document.getElementById('ls-set-temperature');
          field.value = '1.25';
          field.dispatchEvent(new Event('input', { bubbles: true }));
        }"""
    )
    holds(page, "max_tokens", "40")
    ask_until(page, "echo typed before the new chat was there", 1)
    assert site.backend.requests[-1].sampling.temperature == 1.25
    assert site.service.settings_of(newest(site, "settled"))["temperature"] == "0.3"
    page.page.click("#ls-new")
    holds(page, "temperature", "0.7")
    page.page.keyboard.press("Control+,")
    page.page.click("#ls-defaults-forget")
    page.page.locator("#ls-defaults-forget").wait_for(state="hidden")
    field(page, "system_prompt").fill("Be kind.")
    page.page.click("#ls-defaults-back")
    holds(page, "max_tokens", "512")
    assert field(page, "system_prompt").input_value() == "Be kind.", "it is the person's own"
    page.page.locator("#ls-toasts").get_by_role("button", name="Undo").click()
    holds(page, "max_tokens", "40")
    field(page, "max_tokens").fill("0")
    mark = page.page.locator('[data-of="max_tokens"] .ls-set-fault')
    mark.get_by_text("Max tokens is 0, but must lie between 1").wait_for()
    assert field(page, "max_tokens").get_attribute("aria-invalid") == "true"
    page.send("echo refused")
    page.wait_for("Max tokens is 0, but must lie between 1", "#ls-toasts")
    assert page.page.input_value("#ls-message textarea") == "echo refused"


def newest(site: Site, title: str) -> int:
    return next(row.id for row in site.service.conversations() if title in row.title)


def test_a_changed_field_is_sent_though_an_earlier_value_came_back_to_the_component(
    settings_page: Visit, site: Site
) -> None:
    page = settings_page
    earlier = page.page.evaluate("window.lsSettings.get()")
    field(page, "max_tokens").fill("77")
    page.page.keyboard.press("Tab")
    page.page.wait_for_function("(earlier) => window.lsSettings.get() !== earlier", arg=earlier)
    page.page.evaluate(
        """(earlier) => {
          window.lsSettings.set(earlier);
          window.dispatchEvent(new CustomEvent('ls-settings', { detail: earlier }));
        }""",
        earlier,
    )
    ask_until(page, "echo as the field says", 1)
    assert site.backend.requests[-1].max_tokens == 77


def has_focus(page: Visit, name: str) -> None:
    script = "(id) => document.activeElement.id === id"
    page.page.wait_for_function(script, arg=name, timeout=5_000)


def test_a_prompt_is_saved_chosen_renamed_replaced_and_deleted(
    settings_page: Visit, site: Site
) -> None:
    page = settings_page
    dialog = page.page.get_by_role("dialog")

    def save(text: str, name: str) -> None:
        field(page, "system_prompt").fill(text)
        page.page.click("#ls-prompt-save")
        page.page.fill("#ls-line", name)
        page.page.press("#ls-line", "Enter")

    field(page, "system_prompt").focus()
    page.page.wait_for_function(COVERS_NOTHING, arg="ls-help-of-system_prompt", timeout=WAIT_MS)
    field(page, "temperature").focus()
    page.page.wait_for_function(COVERS_NOTHING, arg="ls-help-of-temperature", timeout=WAIT_MS)
    save("first", "Twice")
    page.page.wait_for_function("document.querySelector('#ls-prompts').value === 'Twice'")
    has_focus(page, "ls-prompts")
    save("second", "Twice")
    dialog.get_by_role("button", name="Keep it").click()
    assert site.service.prompts.all() == {"Twice": {"system_prompt": "first"}}
    save("second", "Twice")
    dialog.get_by_role("button", name="Replace").click()
    page.page.wait_for_function("document.querySelector('#ls-prompts').value === 'Twice'")
    assert site.service.prompts.all() == {"Twice": {"system_prompt": "second"}}
    field(page, "system_prompt").fill("")
    page.page.select_option("#ls-prompts", "Twice")
    holds(page, "system_prompt", "second")
    page.page.click("#ls-prompt-rename")
    page.page.fill("#ls-line", "Once")
    page.page.press("#ls-line", "Enter")
    page.page.wait_for_function("document.querySelector('#ls-prompts').value === 'Once'")
    page.page.click("#ls-prompt-delete")
    dialog.get_by_role("button", name="Delete").click()
    until(lambda: site.service.prompts.all() == {})
    has_focus(page, "ls-prompt-save")
    assert field(page, "system_prompt").input_value() == "second"


def test_ways_of_drafting_are_listed_with_reasons_and_the_list_closes_when_it_is_left(
    settings_page: Visit, site: Site
) -> None:
    page = settings_page
    is_open = "document.querySelector('#ls-speed-choice').open"
    page.page.click(SPEED)
    shown = page.page.locator("#ls-speed-choice .ls-way:visible")
    named = [text.split("\n")[0] for text in shown.all_inner_texts()]
    assert named == ["Auto", "Off", "Word lookup", "Small model", "Compressed copy"]
    assert "Not ready. A 4-bit copy needs" in shown.last.inner_text()
    assert shown.last.locator("input").is_disabled()
    for key in ("Escape", "Tab"):
        assert page.page.evaluate(is_open)
        page.page.keyboard.press(key)
        page.page.keyboard.press(key)
        page.page.wait_for_function(f"!{is_open}")
        page.page.click(SPEED)
    shown.filter(has_text="Off").click()
    page.page.wait_for_function(f"!{is_open}")
    assert page.page.inner_text("#ls-speed-chosen") == "Off"
    page.send("plainly")
    until(lambda: [one.drafter for one in site.backend.requests][-1:] == ["off"])


def test_the_panel_belongs_to_the_chat_and_leaves_a_narrow_page_by_escape(
    settings_page: Visit, site: Site
) -> None:
    page = settings_page
    panel = page.page.locator("#ls-settings .sidebar-content")
    kept = page.page.locator("#ls-kept-limit")
    until(lambda: kept.input_value() == "4")
    kept.fill("2.5")
    kept.press("Tab")
    until(lambda: site.service.kept_chats.gigabytes == 2.5)
    assert page.page.locator("#ls-kept-now").inner_text() == "Now 0 MiB."
    page.page.get_by_role("tab", name="Stats").click()
    panel.wait_for(state="hidden")
    page.page.get_by_role("tab", name="Chat", exact=True).click()
    panel.wait_for()
    page.page.set_viewport_size({"width": 390, "height": 844})
    page.page.locator("#ls-settings:not(.open)").wait_for(state="attached")
    page.page.focus("#ls-message textarea")
    page.page.keyboard.press("Control+,")
    page.page.wait_for_function("document.activeElement.name === 'system_prompt'")
    page.page.keyboard.press("Escape")
    page.page.locator("#ls-settings:not(.open)").wait_for(state="attached")
    assert page.page.evaluate("document.activeElement.matches('#ls-message textarea')")
