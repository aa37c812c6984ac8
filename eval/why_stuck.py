#!/usr/bin/env python3
"""Checks `mccsctl why-stuck`: whether it names the culprit, how soon, and that it accuses nobody
of a healthy job.

A job runs over the hosts of an emulated rack. First it is asked about while nothing is wrong. Then come faults of several kinds under a
seed, and after each of them one question after the other, each to a host at random.

usage: why_stuck.py [--fabric eval/fabric/rack.toml] [--ranks-per-host 2] [--faults 120] [--looks 1000] [--seed 1] [--bytes 8B,64KiB,4MiB]
                    [--save target/why-stuck.jsonl]

Each fault, and every fifty looks, is a line of `--save` at once: the same command goes on where another was cut off. A job that ends for a
reason of its own is started anew, and what was being measured is measured once more.

Needs root. Build first: cargo build --release --workspace. Writes eval/results/why-stuck.json (data and provenance) and .md; fails if
somebody of a healthy job is accused, or a culprit is not named within 3 s."""

import argparse
import contextlib
import itertools
import json
import os
import pathlib
import random
import secrets
import signal
import subprocess
import sys
import tempfile
import time

from concurrent.futures import ThreadPoolExecutor

import bench
import cluster
from bench import BINARIES, run
from cluster import Fabric, spread

ALLOWED_S = 3.0
# For so long after a fault questions are asked.
ASKED_S = 5.0
# Questions about a healthy job at a time.
LOOKS_AT_ONCE = 4
# Looks that are saved together.
LOOKS_SAVED = 50
# Times that one thing is measured where the job ends meanwhile.
TRIES = 3
# Pause between two answers. Earlier answers are not waited for.
PAUSE_S = 0.1
# Answers to what was asked so soon after the fault may be of a job that has not come to stand yet.
SETTLED_S = 1.0
LEAF = "leaf0"
EXCHANGE_PORT = "7400"


class Job:
    """All-reduces of a process a rank, until it is left."""

    def __init__(self, fabric, folder, placed, size, files):
        self.folder, self.placed, self.files = folder, placed, files
        id = secrets.token_hex(16)
        command = [BINARIES / "mccs-traffic", "--bytes", size, "--iterations", str(10**9), "--compute", "2ms", "--hold"]
        environment = lambda rank, host: {
            "MCCS_SOCKET": f"{folder}/{host}/mccs.sock", "MCCS_RANK": str(rank), "MCCS_NRANKS": str(len(placed)),
            "MCCS_UNIQUE_ID": id, "MCCS_ROOT_ADDRESS": placed[0]}
        self.ranks = [subprocess.Popen(fabric.command(host, [*command, self.held(rank)]), env={**os.environ, **environment(rank, host)},
                                       stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
                      for rank, host in enumerate(placed)]

    def held(self, rank):
        return self.files / f"hold{rank}"

    def end(self):
        for process in self.ranks:
            process.kill()
        for process in self.ranks:
            process.communicate()

    def failure(self):
        """Output of a rank that has ended."""
        return next((process.communicate()[1] for process in self.ranks if process.poll() is not None), None)

    def ask(self, host):
        """Answer to a host's operator; `None` while no communicator is there."""
        ctl = [BINARIES / "mccsctl", "--socket", f"{self.folder}/{host}/mccs-control.sock", "--json"]
        comms = json.loads(run([*ctl, "show"]))["communicators"]
        return json.loads(run([*ctl, "why-stuck", str(comms[0]["communicator"])]))["stuck"] if comms else None

    def goes_on(self, host):
        """Waits until collectives end on all hosts, as a host is told."""
        before, began = None, time.time()
        while True:
            report = self.ask(host) or {"hosts": []}
            started = [account["started"] for _, account in report["hosts"] if account]
            if before and len(started) == len(before) == len(report["hosts"]) and all(a < b for a, b in zip(before, started)):
                return
            before = started
            if (failure := self.failure()) is not None:
                raise RuntimeError(failure)
            if time.time() - began > 60:
                raise RuntimeError(f"does not go on: {json.dumps(report)}")
            time.sleep(0.2)


@contextlib.contextmanager
def stopped(pid):
    os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(pid, signal.SIGCONT)


@contextlib.contextmanager
def held(file):
    file.touch()
    try:
        yield
    finally:
        file.unlink()


@contextlib.contextmanager
def unplugged(fabric, host):
    link = lambda state: run(["ip", "-n", f"mccs-{fabric.name}-{LEAF}", "link", "set", host, state])
    link("down")
    try:
        yield
    finally:
        link("up")


@contextlib.contextmanager
def cut(fabric, pair, data_alone):
    """The leaf drops what two hosts send each other: everything, or what is not of their services' links."""
    rules = []
    for sender, receiver in (pair, pair[::-1]):
        of = ["iif", sender, "to", fabric.addresses[receiver]]
        if data_alone:
            rules += [["pref", "6", *of, "ipproto", "tcp", port, EXCHANGE_PORT, "lookup", "main"] for port in ("sport", "dport")]
        rules.append(["pref", "7", *of, "blackhole"])
    change = lambda what: [run(fabric.command(LEAF, ["ip", "rule", what, *rule])) for rule in rules]
    change("add")
    try:
        yield
    finally:
        change("del")


def named(report):
    return {(culprit["host"], culprit["rank"]) for culprit in report["culprits"]}


def is_rank(rank, host, pid):
    """It alone is named, its process and the call that it has not made."""
    def holds(report, _):
        who = report["culprits"]
        return (report["class"], named(report)) == ("rank", {(host, rank)}) and all(
            one["pid"] == pid and one["seq"] is not None and "collective" in one["what"] for one in who)
    return holds


def is_host(host):
    return lambda report, _: (report["class"], named(report)) == ("host", {(host, None)})


def is_between(pair, placed):
    """Flows between the two alone, by both ends; or, asked on one of them, that the other does not answer."""
    def holds(report, asked):
        if report["class"] == "host":
            return asked in pair and named(report) == {(pair[1 - pair.index(asked)], None)}
        ends = [{one["host"], placed[one["peer"]]} for one in report["culprits"] if one["peer"] is not None]
        return report["class"] == "flow" and bool(ends) and all(end == set(pair) for end in ends)
    return holds


# In words, by name.
KINDS = {
    "rank stopped": "a rank's process is stopped (SIGSTOP)",
    "rank does not call": "a rank computes on and does not make its next call",
    "service stopped": "the service of a host is stopped (SIGSTOP)",
    "cable": "a host's cable is pulled",
    "pair cut off": "all packets between two hosts are dropped",
    "data lost": "all packets between two hosts are dropped but those of their services' links",
}


def fault(kind, chance, fabric, services, job):
    """A fault: its place, how it is done until it is left, whether a report is right, and hosts that may be asked."""
    rank = chance.randrange(len(job.placed))
    host, hosts = job.placed[rank], fabric.hosts
    at = chance.randrange(len(hosts))
    # Neighbours in every ring of the hosts.
    pair = hosts[at], hosts[(at + 1) % len(hosts)]
    others = [other for other in hosts if other != host]
    pid = job.ranks[rank].pid
    match kind:
        case "rank stopped":
            return f"rank {rank}", stopped(pid), is_rank(rank, host, pid), hosts
        case "rank does not call":
            return f"rank {rank}", held(job.held(rank)), is_rank(rank, host, pid), hosts
        case "service stopped":
            return host, stopped(services[host].pid), is_host(host), others
        case "cable":
            return host, unplugged(fabric, host), is_host(host), others
        case "pair cut off" | "data lost":
            return " - ".join(pair), cut(fabric, pair, kind == "data lost"), is_between(pair, job.placed), hosts


def measure(kind, chance, fabric, services, job):
    what, injected, is_right, may_be_asked = fault(kind, chance, fabric, services, job)
    job.goes_on(chance.choice(may_be_asked))
    time.sleep(chance.uniform(0, 0.2))
    answers = []
    with injected:
        began = time.time()
        while (asked_s := time.time() - began) < ASKED_S:
            host = chance.choice(may_be_asked)
            report = job.ask(host)
            answers.append({"host": host, "asked_s": asked_s, "answered_s": time.time() - began, "class": report["class"],
                            "culprits": report["culprits"], "is_right": is_right(report, host)})
            time.sleep(PAUSE_S)
    # From the first answer on behind which none is wrong.
    wrong = [number for number, answer in enumerate(answers) if not answer["is_right"]]
    right = answers[wrong[-1] + 1:] if wrong else answers
    late = [answer for answer in answers if answer["asked_s"] >= SETTLED_S]
    return {"kind": kind, "of": what, "named_s": right[0]["answered_s"] if right else None, "answers": len(answers),
            "late_answers": len(late), "late_wrong": sum(not answer["is_right"] for answer in late), "first_right": right[:1],
            "wrong": [answers[number] for number in wrong]}


def look_at_healthy(chance, fabric, job, count):
    """Reports about a job with which nothing is wrong, by class; and the accusations in full."""
    job.goes_on(chance.choice(fabric.hosts))
    hosts = [chance.choice(fabric.hosts) for _ in range(count)]
    with ThreadPoolExecutor(LOOKS_AT_ONCE) as asking:
        reports = list(asking.map(job.ask, hosts))
    classes = {}
    for report in reports:
        classes[report["class"]] = classes.get(report["class"], 0) + 1
    accused = [{"class": report["class"], "culprits": report["culprits"]} for report in reports if report["culprits"]]
    return {"looks": count, "classes": classes, "accused": accused}


def is_named(one):
    return one["named_s"] is not None and one["named_s"] <= ALLOWED_S


def report(options, hosts, faults, healthy):
    rows = []
    for kind, words in [*KINDS.items(), ("all", "all")]:
        those = [one for one in faults if kind in (one["kind"], "all")]
        if not those:
            continue
        good = [one["named_s"] for one in those if is_named(one)]
        late, wrong = (sum(one[name] for one in those) for name in ("late_answers", "late_wrong"))
        rows.append([words, len(those), f"{len(good)} ({len(good) / len(those):.0%})", spread(good) if good else "-", f"{wrong} of {late}"])
    heads = ["fault", "how many", f"named within {ALLOWED_S:.0f} s", "after, s", f"wrong answers of those asked {SETTLED_S:.0f} s after it or later"]
    text = (f"# Stuck jobs ({len(faults)} faults)\n\nAll-reduces of {options.bytes} over {hosts} hosts x {options.ranks_per_host} ranks, 2 ms "
            "apart. Asked again and again, on a host at random that the fault leaves alone, until 5 s after the fault: *named* is from the "
            "fault to the first answer that is right and has no wrong one after it (median, and smallest to largest). Right is the rank "
            "alone, with its host, process and the number of the call that it has not made; the host that does not answer alone; or "
            "flows between the two hosts alone, and on one of these two, where not even services reach each other, that the other does "
            "not answer.\n\n" + bench.table(heads, rows))
    looks = [[one["bytes"], one["looks"], len(one["accused"]), ", ".join(f"{name}: {count}" for name, count in sorted(one["classes"].items()))]
             for one in healthy]
    text += ("\n## Of a healthy job\n\nThe same job before any fault, asked by several at a time.\n\n"
             + bench.table(["bytes", "looks", "somebody accused", "answers by class"], looks))
    missed = [one for one in faults if not is_named(one)]
    text += "".join(f"\nNot named: {one['kind']}, {one['of']}, {one['bytes']}: {json.dumps(one['wrong'][-1])}\n" for one in missed)
    return text


class Saved:
    """Measurements, by kind, with a line of a file for each."""

    def __init__(self, path):
        self.path, self.all = path, {}
        path.parent.mkdir(parents=True, exist_ok=True)
        for line in path.read_text().splitlines(keepends=True) if path.exists() else []:
            # The last one may have been cut off.
            if line.endswith("\n"):
                one = json.loads(line)
                self.all[tuple(one["what"])] = one["found"]
        path.write_text("".join(self.line(what) for what in self.all))

    def line(self, what):
        return json.dumps({"what": what, "found": self.all[what]}) + "\n"

    def add(self, what, found):
        self.all[what] = found
        with self.path.open("a") as file:
            file.write(self.line(what))


class Jobs:
    """One job at a time, which is started when it is needed, and anew when it has ended."""

    def __init__(self, *of_job):
        self.of_job, self.job = of_job, None

    def measured(self, measure):
        for left in reversed(range(TRIES)):
            try:
                self.job = self.job or Job(*self.of_job)
                return measure(self.job)
            except (RuntimeError, subprocess.CalledProcessError, json.JSONDecodeError, KeyError) as error:
                print(f"measured once more: {error}", file=sys.stderr, flush=True)
                self.end()
                if not left:
                    raise

    def end(self):
        if self.job:
            self.job.end()
        self.job = None


def measure_size(options, size, saved, fabric, services, jobs):
    """Reports about a healthy job, and about faults, of one size."""
    for first in range(0, options.looks_of_size, LOOKS_SAVED):
        what, count = (size, "looks", first), min(LOOKS_SAVED, options.looks_of_size - first)
        if what not in saved.all:
            chance = random.Random(f"{options.seed} {what}")
            saved.add(what, jobs.measured(lambda job: look_at_healthy(chance, fabric, job, count)))
            print(json.dumps([what, saved.all[what]]), flush=True)
    for number, kind in enumerate(itertools.islice(itertools.cycle(options.kinds.split(",")), options.faults_of_size)):
        what = (size, kind, number)
        if what not in saved.all:
            chance = random.Random(f"{options.seed} {what}")
            saved.add(what, jobs.measured(lambda job: measure(kind, chance, fabric, services, job)))
            short = {key: value for key, value in saved.all[what].items() if key not in ("first_right", "wrong")}
            print(json.dumps([what, short]), flush=True)


def together(looks):
    """Several lots of looks as one."""
    classes = {}
    for lot in looks:
        for name, count in lot["classes"].items():
            classes[name] = classes.get(name, 0) + count
    return {"looks": sum(lot["looks"] for lot in looks), "classes": classes, "accused": [one for lot in looks for one in lot["accused"]]}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--fabric", default=bench.ROOT / "eval" / "fabric" / "rack.toml")
    parser.add_argument("--ranks-per-host", type=int, default=2)
    parser.add_argument("--faults", type=int, default=120)
    parser.add_argument("--looks", type=int, default=1000, help="at the healthy job, of all sizes together")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--bytes", default="8B,64KiB,4MiB")
    parser.add_argument("--kinds", default=",".join(KINDS))
    parser.add_argument("--save", type=pathlib.Path, default=bench.ROOT / "target" / "why-stuck.jsonl")
    options = parser.parse_args()
    sizes, saved = options.bytes.split(","), Saved(options.save)
    options.looks_of_size, options.faults_of_size = options.looks // len(sizes), options.faults // len(sizes)
    with Fabric(options.fabric) as fabric:
        placed = cluster.dealt(fabric, options.ranks_per_host, "block")
        # Emulated hosts would all have this machine's GPUs.
        with cluster.services(fabric, ['cuda.use = "off"']) as (services, folder), tempfile.TemporaryDirectory() as files:
            for size in sizes:
                jobs = Jobs(fabric, folder, placed, size, pathlib.Path(files))
                try:
                    measure_size(options, size, saved, fabric, services, jobs)
                finally:
                    jobs.end()
    of_size = lambda size: [(what, found) for what, found in saved.all.items() if what[0] == size]
    healthy = [{"bytes": size} | together([found for what, found in of_size(size) if what[1] == "looks"]) for size in sizes]
    faults = [{"bytes": size} | found for size in sizes for what, found in of_size(size) if what[1] != "looks"]
    text = report(options, len(placed) // options.ranks_per_host, faults, healthy)
    bench.write_results("why-stuck", bench.provenance() | {"seed": options.seed, "faults": faults, "healthy": healthy}, text)
    print(text)
    accused, missed = sum(len(one["accused"]) for one in healthy), sum(not is_named(one) for one in faults)
    if accused or missed:
        raise SystemExit(f"{accused} looks at a healthy job accuse somebody; {missed} culprits were not named within {ALLOWED_S} s")


if __name__ == "__main__":
    main()
