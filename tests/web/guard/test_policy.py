"""What 'unsafe-eval' lets Gradio compile in the browser is our own constants, never text."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from localspec.web.guard.policy import content_policy

COMPILED = ("html_template", "css_template", "js_on_load", "js")


def not_constant(source: str) -> list[str]:
    """Arguments that Gradio compiles and that are neither written out nor a module's constant."""
    found = []
    for node in ast.walk(ast.parse(source)):
        for keyword in node.keywords if isinstance(node, ast.Call) else ():
            if keyword.arg in COMPILED and not _is_constant(keyword.value):
                found.append(f"{keyword.arg}={ast.unparse(keyword.value)}")
    return found


def _is_constant(node: ast.expr) -> bool:
    if isinstance(node, ast.BinOp):  # constants put together
        return _is_constant(node.left) and _is_constant(node.right)
    if isinstance(node, ast.Call):  # a constant with a constant put into it
        is_replace = isinstance(node.func, ast.Attribute) and node.func.attr == "replace"
        return is_replace and _is_constant(node.func.value)  # type: ignore[attr-defined]
    is_name = isinstance(node, ast.Name) and node.id.isupper()
    return is_name or isinstance(node, ast.Constant)


def test_nothing_but_constants_is_compiled_in_the_browser(root: Path) -> None:
    """But for the settings, whose texts from outside are made inert (test_handlers)."""
    files = sorted((root / "localspec" / "web").rglob("*.py"))
    found = {path.name: not_constant(path.read_text(encoding="utf-8")) for path in files}
    made = {name: lines for name, lines in found.items() if lines}
    assert made == {"form.py": ["html_template=form_html(service)"]}


@pytest.mark.parametrize(
    ("line", "is_seen"),
    [
        ("gr.HTML(value, html_template=f'<p>{title}</p>')", True),
        ("gr.HTML(value, js_on_load=script)", True),
        ("button.click(run, js=make_script(name))", True),
        ("gr.HTML(title, html_template='')", False),
        ("button.click(run, js=TO_ADDRESS)", False),
    ],
)
def test_a_template_made_of_text_is_seen(line: str, is_seen: bool) -> None:
    assert bool(not_constant(line)) is is_seen


@pytest.mark.parametrize(
    ("rule", "wanted"),
    [
        ("script-src", "'self' 'unsafe-eval'"),
        ("default-src", "'self'"),
        ("connect-src", "'self'"),
        ("frame-ancestors", "'none'"),
        ("frame-src", "'none'"),
        ("object-src", "'none'"),
        ("worker-src", "'none'"),
        ("form-action", "'self'"),
    ],
)
def test_the_policy_is_as_tight_as_the_page_allows(rule: str, wanted: str) -> None:
    rules = dict(part.strip().split(" ", 1) for part in content_policy().split(";"))
    assert rules[rule] == wanted
    assert "unsafe-inline" not in rules["script-src"]
    assert not [words for words in rules.values() if "http" in words or "*" in words]
