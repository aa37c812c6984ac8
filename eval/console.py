#!/usr/bin/env python3
"""The console with 1,000 communicators and 100 hosts, in headless Chromium: how long the first view takes, how old what it shows is, and
what it costs. The page's cluster is console/examples/crowd.rs, which is no service. What looking costs a service is measured beside a real
one, with as many communicators of two ranks, without a browser: somebody who looks and nobody take turns.

usage: eval/console.py NAME [--rounds N] [--seconds S] [--communicators N]

Build first: cargo build --release --workspace --bins --examples. Needs what console/tests/check prepares, and its Python. Writes
eval/results/NAME.json and NAME.md."""

import argparse
import json
import pathlib
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request

import bench
from bench import BINARIES, ROOT

sys.path.insert(0, str(ROOT / "console" / "tests" / "page"))
from browser import Browser  # noqa: E402

VIEWS = {"now": ".troubles li", "communicators": "main tbody tr[aria-rowindex]", "hosts": "main tbody tr[aria-rowindex]",
         "links": "main tbody tr[aria-rowindex]", "policy": "main tbody tr[aria-rowindex]"}
# As the page asks where there is no controller: path, and seconds.
ASKED = {"overview": 0.95, "failed": 5}


class Program:
    """A program that says when it is ready."""

    def __init__(self, *command):
        self.process = subprocess.Popen(list(map(str, command)), stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
        self.line = self.process.stdout.readline()
        if "ready" not in self.line:
            raise RuntimeError(f"{command} says {self.line!r}")

    def cpu_seconds(self):
        """Processor time of all its threads, those that have ended included, to the scheduler's tick."""
        fields = pathlib.Path(f"/proc/{self.process.pid}/stat").read_text().rsplit(")", 1)[1].split()
        return (int(fields[11]) + int(fields[12])) / 100

    def stop(self):
        self.process.stdin.close()
        self.process.kill()
        self.process.wait()


def console_of(folder, socket):
    config = pathlib.Path(folder) / "console.toml"
    config.write_text(f'[console]\nlisten = "127.0.0.1:0"\nsocket = "{socket}"\n')
    console = Program(BINARIES / "mccs-console", "--config", config)
    return console, console.line.split()[-1].rstrip("/")


def first_views(browser, address, rounds):
    """Milliseconds from a navigation to rows of a view, by view; the views take turns, nothing is cached."""
    found = {view: [] for view in VIEWS}
    for _ in range(rounds):
        for view, shown in VIEWS.items():
            browser.go("about:blank")
            browser.call("Network.clearBrowserCache")
            browser.call("Page.navigate", url=f"{address}/#/{view}")
            found[view].append(browser.evaluate(f"""new Promise((done) => {{
                const look = () => document.querySelector({json.dumps(shown)}) ? requestAnimationFrame(() => done(performance.now())) : requestAnimationFrame(look);
                look();
            }})"""))
    return found


def updates(browser, address, seconds):
    """Milliseconds between two looks that are shown, and of the page's thread for each."""
    browser.go("about:blank")
    browser.go(f"{address}/#/communicators")
    browser.until("document.querySelectorAll('main tbody tr[aria-rowindex]').length > 10")
    browser.call("Performance.enable")
    busy = lambda: {one["name"]: one["value"] for one in browser.call("Performance.getMetrics")["metrics"]}["TaskDuration"]
    before = busy()
    times = browser.evaluate(f"""new Promise((done) => {{
        const times = [];
        new MutationObserver(() => times.push(performance.now())).observe(document.querySelector('main tbody'), {{ subtree: true, characterData: true, childList: true }});
        setTimeout(() => done(times), {seconds * 1000});
    }})""")
    # Changes within a look are one change.
    looks = [at for at, earlier in zip(times[1:], times) if at - earlier > 100]
    between = [later - earlier for earlier, later in zip(looks, looks[1:])]
    return between, 1000 * (busy() - before) / max(1, len(looks))


def look(address, stop):
    """Asks as a page does, until it is told to stop."""
    tags, due = {}, {path: 0.0 for path in ASKED}
    while not stop.wait(0.02):
        for path, every in ASKED.items():
            if time.monotonic() < due[path]:
                continue
            due[path] = time.monotonic() + every
            request = urllib.request.Request(f"{address}/api/v1/{path}", headers={"If-None-Match": tags.get(path, "")})
            try:
                with urllib.request.urlopen(request) as answer:
                    tags[path] = answer.headers["ETag"]
                    answer.read()
            except urllib.error.HTTPError as error:
                if error.code != 304:
                    raise


def costs(options):
    """Parts of a core that a service and its console take, by round: nobody looks, one does."""
    rounds = []
    with tempfile.TemporaryDirectory() as folder:
        config = pathlib.Path(folder) / "service.toml"
        config.write_text(f'[service]\nruntime_dir = "{folder}"\n[cuda]\nuse = "off"\n[[tenant]]\nname = "t"\nmax_communicators = 4096\n'
                          'max_streams = 16384\nmax_regions = 65536\n')
        service = Program(BINARIES / "mccs-service", "--config", config)
        many = Program(BINARIES / "examples" / "many", f"{folder}/mccs.sock", options.communicators)
        console, address = console_of(folder, f"{folder}/mccs-control.sock")
        for _ in range(options.rounds):
            row = {}
            for side in ("nobody", "one"):
                stop = threading.Event()
                looking = threading.Thread(target=look, args=(address, stop))
                if side == "one":
                    looking.start()
                    time.sleep(1)
                before = time.monotonic(), service.cpu_seconds(), console.cpu_seconds()
                time.sleep(options.seconds)
                took = time.monotonic() - before[0]
                row[side] = {"service": (service.cpu_seconds() - before[1]) / took, "console": (console.cpu_seconds() - before[2]) / took}
                stop.set()
                if looking.ident:
                    looking.join()
            rounds.append(row)
            print(row, flush=True)
        with urllib.request.urlopen(f"{address}/api/v1/overview") as answer:
            overview = answer.read()
        for program in (console, many, service):
            program.stop()
    return rounds, len(overview), len(json.loads(overview)["communicators"])


def spread(values, scale=1.0, digits=0):
    return [f"{scale * at:.{digits}f}" for at in (statistics.median(values), min(values), max(values))]


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("name")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=int, default=10)
    parser.add_argument("--communicators", type=int, default=1000)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        crowd = Program(BINARIES / "examples" / "crowd", f"{folder}/crowd.sock", options.communicators, 100)
        console, address = console_of(folder, f"{folder}/crowd.sock")
        browser = Browser()
        version = browser.call("Browser.getVersion")["product"]
        views = first_views(browser, address, options.rounds)
        between, busy_ms = updates(browser, address, 2 * options.seconds)
        browser.close()
        for program in (console, crowd):
            program.stop()
    rounds, overview_bytes, communicators = costs(options)
    rows = [[f"first view: {view}, ms", *spread(times)] for view, times in views.items()]
    rows.append(["between two looks that are shown, ms", *spread(between)])
    rows.append(["the page's thread for each look, ms", f"{busy_ms:.0f}", "", ""])
    for part in ("service", "console"):
        for side in ("nobody", "one"):
            who = "nobody looks" if side == "nobody" else "one looks"
            rows.append([f"{part}, {who}, % of a core", *spread([row[side][part] for row in rounds], 100, 2)])
        rows.append([f"{part}, what looking adds, % of a core", *spread([row["one"][part] - row["nobody"][part] for row in rounds], 100, 2)])
    text = (f"{options.communicators} communicators and 100 hosts in the page's cluster; {communicators} communicators of two ranks in the real service, "
            f"whose overview has {overview_bytes / 1e6:.2f} MB. {options.rounds} rounds; of {options.seconds} s for each side of costs.\n\n"
            + bench.table(["what", "median", "least", "most"], rows))
    data = {"views_ms": views, "between_ms": between, "page_ms_a_look": busy_ms, "costs": rounds, "overview_bytes": overview_bytes, "communicators": communicators}
    bench.write_results(options.name, bench.provenance({"chromium": version}) | data, text)
    print(text)


if __name__ == "__main__":
    main()
