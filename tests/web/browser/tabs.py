"""Tabs of the browser that one test after another takes: in a tab that has shown the page it opens
in half of the processor time, because its process has compiled Gradio's scripts already.

Contract: `new_tab` opens a tab, whose waits look twenty times a second. `Tabs.take` gives the visit
of a tab that is as a new one. `Tabs.give_back` ends its page, as closing the tab does, and takes
back what a test may have set on the tab; what could not be taken back is refused when it is asked.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

VIEWPORT = {"width": 1280, "height": 850}
# A wait for a function looks at every frame otherwise, and has the browser draw 60 a second for it.
LOOK_MS = 50


def new_tab(context: Any) -> Any:
    """A page of Playwright's."""
    page = context.new_page()
    page.wait_for_function = partial(page.wait_for_function, polling=LOOK_MS)
    return page


@dataclass
class Tabs:
    """The tabs that no test has now. bare: an address of the server that is no page, where they
    stay: another site would get another process."""

    bare: str
    make: Callable[[], Any]
    free: list[Any] = field(default_factory=list)

    def take(self) -> Any:
        """A tab that was given back, or a new one."""
        if self.free:
            return self.free.pop()
        visit = self.make()
        for name in ("add_init_script", "expose_function", "expose_binding"):
            setattr(visit.page, name, refuse)
        return visit

    def give_back(self, visit: Any) -> None:
        """Nothing is left of a tab that the test has closed."""
        page = visit.page
        if page.is_closed():
            return
        page.goto(self.bare)
        page.unroute_all()
        page.emulate_media(color_scheme="null")
        page.set_viewport_size(VIEWPORT)
        page.evaluate("sessionStorage.clear()")
        self.free.append(visit)


def refuse(*_: Any, **__: Any) -> None:
    raise AssertionError("A tab cannot be rid of this again: ask for `visit(is_new=True)`.")
