"""Acts in the page, at a real service that judges their signatures: what is told before, done, and refused; by keyboard; without a trace."""

import json
import os
import socket
import subprocess
from importlib.resources import files
from pathlib import Path

import pytest

from browser import HANGS_AFTER_S, Browser
from conftest import PROGRAMS, Programs

SHOTS = os.environ.get("MCCS_SHOTS")
TOPOLOGY = """[rates]
host_leaf = "100Gbit/s"
leaf_spine = "50Gbit/s"
[[leaf]]
name = "leaf0"
[[spine]]
name = "spine0"
source_ports = "50000-50019"
[[host]]
name = "h0"
devices = 2
leaf = "leaf0"
"""


class Service(Programs):
    """A service that is its own controller, a console beside it, and the operator's tool."""

    def __init__(self, names=()):
        super().__init__()
        with socket.socket() as taken:
            taken.bind(("127.0.0.1", 0))
            port = taken.getsockname()[1]
        subprocess.run([PROGRAMS / "mccsctl", "keys", "--hosts", "h0", "--dir", self.path("keys")], check=True, capture_output=True)
        Path(self.path("topology.toml")).write_text(TOPOLOGY)
        Path(self.path("policy.toml")).write_text('[policy]\nname = "ecmp"\n')
        keys = "\n".join(f'{name} = "{self.path(f"keys/{file}")}"' for name, file in
                         [("certificate", "h0.crt"), ("key", "h0.key"), ("authority", "authority.crt")])
        Path(self.path("service.toml")).write_text(f"""
[service]
name = "h0"
runtime_dir = "{self.path("run")}"
[cuda]
use = "off"
[observers]
users = [{os.getuid()}]
[exchange]
listen = "127.0.0.1:{port}"
{keys}
[controller]
host = "h0"
topology = "{self.path("topology.toml")}"
policy = "{self.path("policy.toml")}"
[[host]]
name = "h0"
address = "127.0.0.1:{port}"
[[tenant]]
name = "training"
""")
        self.serve()
        config = self.path("console.toml")
        Path(config).write_text(f'[console]\nlisten = "127.0.0.1:0"\nsocket = "{self.path("run/mccs-observers.sock")}"\nnames = {json.dumps(list(names))}\n')
        self.console = self.start([PROGRAMS / "mccs-console", "--config", config])[1].split()[-1].rstrip("/")

    def serve(self):
        self.service = self.start([PROGRAMS / "mccs-service", "--config", self.path("service.toml")], stderr=subprocess.DEVNULL)[0]

    def ctl(self, *words):
        command = [PROGRAMS / "mccsctl", "--socket", self.path("run/mccs-control.sock"), *words]
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout

    def token(self, *rights, name="on-call", **more):
        options = [word for key, value in more.items() for word in (f"--{key}", value)]
        return self.ctl("token", "add", name, "--rights", ",".join(rights), *options).strip()


@pytest.fixture(scope="module")
def service():
    service = Service()
    yield service
    service.close()


def enter(browser, address, token):
    """Opens the view and gives it a token, by keys."""
    browser.go(f"{address}/#/act")
    browser.until("document.querySelector('.tiles, form.act')")
    browser.until("!document.getElementById('state').textContent.startsWith('asking')")
    browser.evaluate("document.getElementById('token').focus()")
    browser.type(token)
    browser.press("Enter")


def told(browser, act):
    return f"document.getElementById('{act}-title').parentElement.querySelector('[role=status]').textContent"


def submit(browser, act, **values):
    """Fills a form in and sends it."""
    for name, value in values.items():
        browser.evaluate(f"document.getElementById('{act}-{name}').value = {json.dumps(value)}")
    browser.evaluate(f"document.getElementById('{act}-title').parentElement.requestSubmit()")


def question(browser):
    browser.until("document.querySelector('dialog[open]')")
    return browser.evaluate("document.querySelector('dialog[open]').innerText")


def answer(browser, label):
    browser.evaluate(f"[...document.querySelectorAll('dialog[open] button')].find((one) => one.textContent === {json.dumps(label)}).click()")
    browser.until("!document.querySelector('dialog[open]')")



def test_a_token_shows_the_acts_of_its_rights_alone(browser, service):
    browser.go(f"{service.console}/#/act")
    browser.until("document.querySelector('#token')")
    assert browser.evaluate("[...document.querySelectorAll('button.acts')].every((one) => one.offsetParent === null)"), "without a token it looks"
    enter(browser, service.console, service.token("host"))
    browser.until("document.getElementById('token-told').textContent === 'The token of on-call is in use.'")
    shown = browser.evaluate("[...document.querySelectorAll('form.act h3')].filter((one) => one.offsetParent).map((one) => one.id)")
    assert shown == ["drain-title", "undrain-title"]
    text = browser.text()
    assert "mccsctl token add --rights policy" in text and "on-call may do 999 acts, for 8 h." in text, text
    assert browser.evaluate("document.getElementById('token').value") == ""
    assert browser.complaints() == []


def test_an_act_says_what_it_will_do_and_what_it_did(browser, service):
    enter(browser, service.console, service.token("host"))
    browser.until("document.getElementById('drain-title').offsetParent")
    submit(browser, "drain", reason="a fan is replaced")
    asked = question(browser)
    assert "h0 refuses new processes" in asked and "on-call did it" in asked, asked
    assert browser.evaluate("document.activeElement.textContent") == "Cancel", "Enter without reading does nothing"
    browser.press("Escape")
    browser.until(f"{told(browser, 'drain')} === 'Nothing was done.'")
    assert "a fan" not in service.ctl("--json", "cluster")
    submit(browser, "drain")
    question(browser)
    if SHOTS:
        browser.shoot(Path(SHOTS) / "act-question.png")
    answer(browser, "Drain")
    browser.until(f"{told(browser, 'drain')} === 'No new processes; 0 sessions with 0 communicators go on.'")
    assert "a fan is replaced" in service.ctl("--json", "cluster")
    browser.until("document.body.innerText.includes('on-call may do 998 acts')")
    submit(browser, "undrain")
    question(browser)
    answer(browser, "Take them")
    browser.until(f"{told(browser, 'undrain')} === 'New processes are taken.'")
    assert "a fan is replaced" not in service.ctl("--json", "cluster")
    assert browser.complaints() == []


def test_tenants_come_and_go(browser, service):
    enter(browser, service.console, service.token("tenants"))
    browser.until("document.getElementById('tenant_add-title').offsetParent")
    submit(browser, "tenant_add", name="guest", uids="1000, x")
    browser.until(f"{told(browser, 'tenant_add')}.includes('Users are numbers')")
    submit(browser, "tenant_add", name="guest", uids="1000 1001", weight="2", max_memory="64MiB")
    assert "Users 1000, 1001 may connect." in question(browser)
    answer(browser, "Add")
    browser.until(f"{told(browser, 'tenant_add')}.startsWith('It is there; its processes connect at /')")
    row = next(row for row in json.loads(service.ctl("--json", "tenants"))["tenants"] if row["tenant"] == "guest")
    assert row["weight"] == 2
    # A name that is taken, and one that is nobody's: the service's own reason.
    submit(browser, "tenant_add", name="training", uids="", weight="")
    question(browser)
    answer(browser, "Add")
    browser.until(f"{told(browser, 'tenant_add')}.startsWith('Not done: ')")
    submit(browser, "tenant_remove", name="nobody")
    question(browser)
    answer(browser, "Remove")
    browser.until(f"{told(browser, 'tenant_remove')}.includes('no tenant of that name')")
    submit(browser, "tenant_remove", name="guest")
    assert "Tenant guest goes" in question(browser)
    answer(browser, "Remove")
    browser.until(f"{told(browser, 'tenant_remove')} === 'It is removed; its sessions end.'")
    assert "guest" not in service.ctl("tenants")


def test_a_policy_is_compared_then_in_force_and_goes_back(browser, service):
    enter(browser, service.console, service.token("policy", name="planner"))
    browser.until("document.getElementById('policy_apply-title').offsetParent")
    submit(browser, "policy_apply", text='[policy]\nname = "none"\n')
    browser.until(f"{told(browser, 'policy_apply')}.startsWith('Not done: ')")
    assert browser.evaluate("!document.querySelector('dialog')"), "the comparison refuses it already"
    submit(browser, "policy_apply", text='[policy]\nname = "ffa"\n')
    assert "Nothing would change." in question(browser)
    answer(browser, "Put in force")
    browser.until(f"{told(browser, 'policy_apply')}.startsWith('In force: 0 communicators changed')")
    shown = json.loads(service.ctl("--json", "policy", "show"))["controller"]["show"]
    assert shown["policy"] == "ffa"
    browser.evaluate("location.hash = '#/policy'")
    browser.until("document.querySelector('main').innerText.includes('token planner of uid')")
    # The same from where policies are compared.
    browser.evaluate("document.getElementById('candidate').value = '[policy]\\nname = \"ecmp\"\\n'")
    browser.evaluate("[...document.querySelectorAll('main button')].find((one) => one.textContent === 'Put in force…').click()")
    question(browser)
    answer(browser, "Put in force")
    browser.until("document.querySelector('main').innerText.includes('In force: 0 communicators changed')")
    browser.evaluate("location.hash = '#/act'")
    submit(browser, "policy_rollback")
    question(browser)
    answer(browser, "Go back")
    browser.until(f"{told(browser, 'policy_rollback')}.startsWith('In force')")
    assert json.loads(service.ctl("--json", "policy", "show"))["controller"]["show"]["policy"] == "ffa"
    submit(browser, "link", lower="leaf0", upper="spine0", state="of another rate", rate="")
    browser.until(f"{told(browser, 'link')}.includes('needs the rate')")
    submit(browser, "link", rate="25Gbit/s")
    assert "from leaf0 to spine0 as of 25Gbit/s" in question(browser)
    answer(browser, "Mark")
    browser.until(f"{told(browser, 'link')}.startsWith('In force')")
    assert "leaf0" in json.dumps(json.loads(service.ctl("--json", "policy", "show"))["controller"]["show"]["links"])


def test_a_communicator_leads_to_its_acts(browser, service):
    enough = Path(service.path("enough"))
    rank = {**os.environ, "MCCS_SOCKET": service.path("run/mccs.sock"), "MCCS_RANK": "0", "MCCS_NRANKS": "1", "MCCS_UNIQUE_ID": "00112233445566778899aabbccddeeff"}
    job = subprocess.Popen([PROGRAMS / "mccs-perf", "--end", "4KiB", "--until", enough], env=rank, stdout=subprocess.DEVNULL)
    try:
        enter(browser, service.console, service.token("communicators"))
        browser.until("document.getElementById('reconfigure-title').offsetParent")
        browser.evaluate("location.hash = '#/communicators'")
        browser.until("document.querySelector('main tbody tr[aria-rowindex]:not([hidden])')")
        browser.evaluate("document.querySelector('main tbody tr[aria-rowindex]:not([hidden])').click()")
        browser.until("[...document.querySelectorAll('#detail button')].some((one) => one.textContent.startsWith('Change') && one.offsetParent)")
        number = browser.evaluate("location.hash.split('/')[2]")
        browser.evaluate("[...document.querySelectorAll('#detail button')].find((one) => one.textContent.startsWith('Change')).click()")
        browser.until("document.activeElement.id === 'reconfigure-change'")
        assert browser.evaluate("document.getElementById('reconfigure-communicator').value") == number
        submit(browser, "reconfigure", change="channels = 1")
        asked = question(browser)
        assert f"Communicator {number}" in asked and "of tenant training" in asked, asked
        answer(browser, "Change")
        # The service says what became of it: of one rank there may be nothing to agree upon.
        browser.until(f"/^(Strategy [0-9]+ holds|Not done: .)/.test({told(browser, 'reconfigure')})")
        assert browser.complaints() == [] or "Not done" in browser.evaluate(told(browser, "reconfigure"))
    finally:
        enough.touch()
        assert job.wait(timeout=HANGS_AFTER_S) == 0


def test_refusals_are_told_in_words(browser, service):
    for text, words in [("nonsense", "This is no token"), (f"{'0' * 16}.{'0' * 64}", "this is no token of this service")]:
        enter(browser, service.console, text)
        browser.until(f"document.getElementById('token-told').textContent.includes({json.dumps(words)})")
    # The browser's console has the answer 401, and nothing else.
    assert all("401" in json.dumps(one) for one in browser.complaints()), browser.complaints()
    token = service.token("communicators", acts="5")
    enter(browser, service.console, token)
    browser.until("document.getElementById('reconfigure-title').offsetParent")
    submit(browser, "reconfigure", communicator="x", change="channels = 2")
    browser.until(f"{told(browser, 'reconfigure')}.includes('x is no whole number')")
    submit(browser, "reconfigure", communicator="4711", change="")
    browser.until(f"{told(browser, 'reconfigure')}.includes('nothing is filled in')")
    for change in ("channels = 0", "channels = 2"):
        submit(browser, "reconfigure", communicator="4711", change=change)
        assert "Communicator 4711, which this host does not have now," in question(browser)
        answer(browser, "Change")
        browser.until(f"{told(browser, 'reconfigure')}.startsWith('Not done: ')")
    # Taken back while it is in use.
    service.ctl("token", "remove", token.split(".")[0])
    submit(browser, "unpin", communicator="4711")
    question(browser)
    answer(browser, "Release")
    browser.until("document.getElementById('token-told').textContent.includes('the token was removed')")
    assert browser.evaluate("document.getElementById('token').offsetParent !== null && [...document.querySelectorAll('button.acts')].every((one) => one.offsetParent === null)")


def test_the_secret_is_nowhere_but_in_memory(browser, service):
    token = service.token("host")
    secret = token.split(".")[1]
    browser.call("Network.enable")
    enter(browser, service.console, token)
    browser.until("document.getElementById('drain-title').offsetParent")
    submit(browser, "undrain")
    question(browser)
    answer(browser, "Take them")
    browser.until(f"{told(browser, 'undrain')} === 'New processes are taken.'")
    kept = browser.evaluate("JSON.stringify([{ ...localStorage }, { ...sessionStorage }, document.cookie, location.href, history.state, document.documentElement.outerHTML, [...document.querySelectorAll('input')].map((one) => one.value)])")
    assert secret not in kept
    assert browser.evaluate("indexedDB.databases().then((all) => all.length)") == 0
    sent = [event for event in browser.events if event.get("method", "").startswith("Network.requestWillBeSent")]
    assert any("Authorization" in json.dumps(event) for event in sent), "acts are among them"
    assert secret not in json.dumps(sent)
    # Another page of the tab, and back: it is forgotten.
    browser.go("about:blank")
    entries = browser.call("Page.getNavigationHistory")["entries"]
    browser.call("Page.navigateToHistoryEntry", entryId=entries[-2]["id"])
    browser.until("document.querySelector('#token')?.offsetParent")


def test_a_service_that_has_started_anew_knows_no_token(browser, service):
    enter(browser, service.console, service.token("host"))
    browser.until("document.getElementById('drain-title').offsetParent")
    service.stop(service.service)
    service.serve()
    browser.until("document.getElementById('away').hidden")
    submit(browser, "undrain")
    question(browser)
    answer(browser, "Take them")
    browser.until("document.getElementById('token-told').textContent.includes('tokens end with the service')")


def test_keys_alone_do_an_act(browser, service):
    enter(browser, service.console, service.token("host"))
    browser.until("document.activeElement.textContent === 'Forget it'")
    for _ in range(20):
        browser.press("Tab")
        if browser.evaluate("document.activeElement.textContent") == "Take them…":
            break
    browser.press("Enter")
    question(browser)
    browser.press("Tab")
    assert browser.evaluate("document.activeElement.textContent") == "Take them"
    browser.press("Enter")
    browser.until(f"{told(browser, 'undrain')} === 'New processes are taken.'")
    # The focus is where it was.
    assert browser.evaluate("document.activeElement.textContent") == "Take them…"


def test_assistive_technology_is_told_of_forms_and_questions(browser, service):
    axe = files("axe_playwright_python").joinpath("axe.min.js").read_text()
    enter(browser, service.console, service.token("host", "policy", "tenants", "communicators"))
    browser.until("document.getElementById('unpin-title').offsetParent")
    names = browser.names()
    unnamed = [role for role, name in names if role in ("button", "textbox", "combobox", "form", "dialog") and not name.strip()]
    assert unnamed == []
    for scheme in ("light", "dark"):
        browser.prefer(color_scheme=scheme)
        for width in (1280, 420):
            browser.size(width, 800)
            assert browser.evaluate("document.documentElement.scrollWidth <= innerWidth"), width
            if SHOTS:
                browser.shoot(Path(SHOTS) / f"act-{width}-{scheme}.png")
        submit(browser, "undrain")
        question(browser)
        browser.evaluate(axe + "; 1")
        found = browser.evaluate("""axe.run({ resultTypes: ['violations'] }).then(({ violations }) =>
            violations.map(({ id, nodes }) => [id, nodes.slice(0, 3).map(({ html, failureSummary }) => [html.slice(0, 200), failureSummary])]))""")
        assert found == [], f"{scheme}: {json.dumps(found, indent=1)}"
        assert ("dialog", "Take new processes again?") in browser.names()
        answer(browser, "Cancel")


def test_a_page_that_may_not_sign_says_so():
    service, browser = Service(names=["console.test"]), None
    try:
        browser = Browser(options=["--host-resolver-rules=MAP console.test 127.0.0.1"])
        port = service.console.rsplit(":", 1)[1]
        browser.go(f"http://console.test:{port}/#/act")
        browser.until("document.getElementById('token-told')?.textContent.includes('lets no page of http://console.test')")
        assert browser.evaluate("document.getElementById('token').offsetParent === null")
        assert f"http://127.0.0.1:{port}/" in browser.text()
    finally:
        service.close()
        if browser:
            browser.close()
