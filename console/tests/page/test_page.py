"""The page in a browser: what it shows, by keyboard, to screen readers, beside hostile names, and without its service."""

import json
import os
from importlib.resources import files
from pathlib import Path

from conftest import PROGRAMS

# The fake cluster's host: tests/page/conftest.py starts it, console/examples/crowd.rs is it.
HOSTILE = "<img src=x onerror=alert(1)>"
VIEWS = ["now", "communicators", "tenants", "hosts", "links", "policy"]
SHOTS = os.environ.get("MCCS_SHOTS")
ROWS = "[...document.querySelectorAll('main tbody tr[aria-rowindex]:not([hidden])')]"


def opened(browser, console, view="now"):
    browser.go(f"{console}/#/{view}")
    if view == "now":
        browser.until("document.querySelector('.tiles')")
    else:
        browser.until("document.querySelector('main table, main section')")
    return browser


def test_what_is_wrong_stands_first(browser, console):
    opened(browser, console)
    # One stands still, which takes the page some seconds to see; the cluster says so by itself.
    browser.until("document.querySelector('.troubles').innerText.includes('has not called all-reduce #41')")
    first = browser.evaluate("document.querySelector('.troubles li').className")
    assert first == "bad"
    text = browser.text()
    for part in ["host-042", "drained", "leaf-4 to spine1", "killed by signal 9", "waits for ranks 6, 7", "1000"]:
        assert part in text, f"{part} is missing in:\n{text}"
    browser.until("document.getElementById('live').textContent.includes('new problem')")
    assert browser.complaints() == []


def test_rows_are_those_of_the_jobs_and_move(browser, console):
    opened(browser, console, "communicators")
    browser.until(f"{ROWS}.length > 10 && !{ROWS}[5].cells[6].textContent.startsWith('-')")
    known = browser.evaluate(f"{ROWS}.slice(0, 3).map((row) => row.cells[1].textContent)")
    assert known == ["dp-0", "dp-1", "dp-2"]
    assert browser.evaluate("document.querySelector('table').getAttribute('aria-rowcount')") == "1001"
    assert browser.evaluate(f"{ROWS}.length") < 100, "what is not in sight is not there"
    # Communicator 5 has 10 operations a second.
    browser.until(f"{ROWS}[5].cells[6].textContent.match(/^1[01]$|^9$/)")
    before = browser.evaluate(f"{ROWS}.map((row) => row.textContent).join()")
    browser.until(f"{ROWS}.map((row) => row.textContent).join() !== {json.dumps(before)}")
    browser.until(f"{ROWS}[7].classList.contains('bad') && {ROWS}[7].cells[12].textContent.endsWith('s')")
    browser.evaluate("document.querySelector('.scroll').scrollTop = 1e9")
    browser.until(f"{ROWS}.at(-1).cells[1].textContent === 'dp-999'")
    assert browser.complaints() == []


def test_a_name_is_a_text_whatever_a_tenant_calls_it(browser, console):
    opened(browser, console, "communicators")
    browser.until(f"{ROWS}.length > 10")
    assert browser.evaluate(f"{ROWS}[3].cells[1].textContent") == HOSTILE
    browser.go(f"{console}/#/communicators/3")
    browser.until("!document.getElementById('detail').hidden")
    assert HOSTILE in browser.evaluate("document.getElementById('detail-title').textContent")
    assert browser.evaluate("document.querySelectorAll('body img, body script, body iframe').length") == 0
    # Were one of its texts markup, the page's policy would still let nothing run.
    blocked = browser.evaluate("""(() => {
        try { document.body.innerHTML += '<img src=x onerror="window.owned = 1">'; return 'set'; } catch (error) { return error.name; }
    })()""")
    assert blocked == "TypeError"
    browser.evaluate("""document.head.append(Object.assign(document.createElement('style'), { textContent: 'body { display: none }' }))""")
    assert browser.evaluate("window.owned === undefined && getComputedStyle(document.body).display !== 'none'")
    told = json.dumps([event for event in browser.complaints()])
    assert "Content Security Policy" in told and "Error: " not in told


def test_all_of_it_is_its_own(browser, console):
    for view in VIEWS:
        opened(browser, console, view)
        # Two looks of what is asked least often.
        browser.until("document.querySelector('.troubles li, main tbody tr[aria-rowindex]')")
        browser.evaluate("new Promise((done) => setTimeout(done, 1100))")
        assert browser.evaluate("document.getElementById('away').hidden"), f"{view}: {browser.text()}"
    browser.until("document.querySelector('#in-force + div').innerText.includes('ffa')")
    assert browser.complaints() == []
    others = [address for address in browser.requested() if not address.startswith((console, "about:", "blob:"))]
    assert others == []


def test_keys_walk_rows_and_open_them(browser, console):
    opened(browser, console, "communicators")
    browser.until(f"{ROWS}.length > 10")
    focused = "document.activeElement"
    for _ in range(60):
        browser.press("Tab")
        if browser.evaluate(f"{focused}.tagName") == "TR":
            break
    assert browser.evaluate(f"{focused}.getAttribute('aria-rowindex')") == "2"
    for _ in range(3):
        browser.press("ArrowDown")
    assert browser.evaluate(f"{focused}.cells[0].textContent") == "3"
    browser.press("End")
    assert browser.evaluate(f"{focused}.cells[0].textContent") == "999"
    browser.press("Home")
    browser.press("PageDown")
    row = browser.evaluate(f"{focused}.cells[0].textContent")
    assert int(row) > 5
    # A look later it is still there.
    browser.evaluate("new Promise((done) => setTimeout(done, 2300))")
    assert browser.evaluate(f"{focused}.cells[0].textContent") == row
    browser.press("Enter")
    browser.until("!document.getElementById('detail').hidden")
    assert browser.evaluate(f"{focused}.id") == "detail-title"
    assert browser.evaluate("document.getElementById('detail-title').textContent").startswith(f"Communicator {row}")
    browser.press("Escape")
    browser.until("document.getElementById('detail').hidden")
    assert browser.evaluate(f"{focused}.cells[0].textContent") == row, "where one was"


def test_rows_are_found_and_sorted(browser, console):
    opened(browser, console, "communicators")
    browser.until(f"{ROWS}.length > 10")
    browser.evaluate("document.querySelector('input[type=search]').focus()")
    browser.type("team-07")
    browser.until("document.querySelector('output').textContent === '50 of 1000'")
    assert browser.evaluate(f"{ROWS}.every((row) => row.cells[2].textContent === 'team-07')")
    browser.until(f"{ROWS}.every((row) => row.cells[6].textContent !== '-')")
    browser.evaluate("[...document.querySelectorAll('thead button')].find((one) => one.textContent === 'ops/s').click()")
    browser.until("document.querySelector('th[aria-sort=descending]')")
    rates = browser.evaluate(f"{ROWS}.map((row) => Number(row.cells[6].textContent)).filter(Number.isFinite)")
    assert rates == sorted(rates, reverse=True) and len(rates) > 10
    browser.type("nobody is called so")
    browser.until("document.querySelector('.empty').innerText.includes('nothing here')")


def test_who_waits_for_whom_is_one_press_away(browser, console):
    opened(browser, console, "communicators/7")
    browser.until("!document.getElementById('detail').hidden && document.querySelector('#detail dl')")
    browser.evaluate("[...document.querySelectorAll('#detail button')].find((one) => one.textContent.startsWith('Why')).click()")
    browser.until("document.getElementById('detail').innerText.includes('rank 3 (process 10031): has not called')")
    # This crowd records nothing: the reason is shown.
    browser.evaluate("[...document.querySelectorAll('#detail button')].find((one) => one.textContent.startsWith('Trace')).click()")
    browser.until("document.querySelector('#detail [role=status]').textContent.includes('a crowd is no service')")


def test_a_service_that_goes_is_told_of_and_comes_back(browser, programs):
    crowd = programs.crowd(20, 3)
    console = programs.console()[1]
    opened(browser, console)
    programs.stop(crowd)
    browser.until("!document.getElementById('away').hidden")
    told = browser.evaluate("document.getElementById('away').textContent")
    assert "The service is away since" in told
    programs.crowd(20, 3)
    browser.until("document.getElementById('away').hidden")
    assert browser.evaluate("document.getElementById('state').textContent").startswith("0.1.0, up")


def test_a_console_that_goes_is_told_of(browser, programs):
    programs.crowd(20, 3)
    program, console = programs.console()
    opened(browser, console)
    programs.stop(program)
    browser.until("document.getElementById('away').textContent.includes('console does not answer')")


def test_assistive_technology_is_told_names(browser, console):
    for view in VIEWS:
        opened(browser, console, view)
        browser.until("document.querySelector('main').children.length > 0")
        names = browser.names()
        roles = {role for role, _ in names}
        assert {"banner", "navigation", "main"} <= roles, f"{view}: {roles}"
        unnamed = [role for role, name in names if role in ("button", "link", "textbox", "searchbox", "table", "columnheader") and not name.strip()]
        assert unnamed == [], view
        current = browser.evaluate("document.querySelectorAll('nav [aria-current=page]').length")
        assert current == 1


def test_no_rule_of_accessibility_is_broken(browser, console):
    axe = files("axe_playwright_python").joinpath("axe.min.js").read_text()
    for scheme in ("light", "dark"):
        browser.prefer(color_scheme=scheme)
        for view in [*VIEWS, "communicators/7"]:
            opened(browser, console, view)
            browser.until("document.querySelector('.troubles li, main tbody tr[aria-rowindex]')")
            browser.evaluate(axe + "; 1")
            found = browser.evaluate("""axe.run({ resultTypes: ['violations'] }).then(({ violations }) =>
                violations.map(({ id, nodes }) => [id, nodes.slice(0, 3).map(({ html, failureSummary }) => [html.slice(0, 200), failureSummary])]))""")
            assert found == [], f"{view}, {scheme}: {json.dumps(found, indent=1)}"


def test_pictures(browser, console):
    """Draws every view by day and by night, wide and narrow, into the folder MCCS_SHOTS, for people to look at; without one only looks
    whether something is cut off."""
    for scheme in ("light", "dark"):
        browser.prefer(color_scheme=scheme)
        for width, height in ((1440, 900), (420, 800)):
            browser.size(width, height)
            for view in [*VIEWS, "communicators/7"]:
                opened(browser, console, view)
                browser.until("document.querySelector('.troubles li, main tbody tr[aria-rowindex]')")
                assert browser.evaluate("document.documentElement.scrollWidth <= innerWidth"), f"{view} at {width}"
                if SHOTS:
                    # A second look has rates.
                    browser.evaluate("new Promise((done) => setTimeout(done, 1500))")
                    browser.shoot(Path(SHOTS) / f"{view.replace('/', '-')}-{width}-{scheme}.png")


def test_the_description_is_one(console):
    """A checker of the OpenAPI standard, which has a schema of its own."""
    import subprocess

    from openapi_spec_validator import validate

    text = subprocess.run([PROGRAMS / "mccs-console", "--print-openapi"], check=True, capture_output=True, text=True).stdout
    validate(json.loads(text))
