"""Helpers of the evaluation's scripts: running programs and services, reading their records, writing results."""

import contextlib
import json
import os
import pathlib
import platform
import re
import shlex
import statistics
import subprocess
import sys
import tempfile
import time

ROOT = pathlib.Path(__file__).resolve().parents[1]
# Tests name the folder of those that they have built.
BINARIES = pathlib.Path(os.environ.get("MCCS_BIN", ROOT / "target" / "release"))
RESULTS = ROOT / "eval" / "results"


def without_folders(text):
    """Absolute paths, reduced to the file's name: results are read on other machines."""
    return re.sub(r"(?<![\w./])/(?:[^\s/'\"]+/)+", "", text)


def failure(command, *output):
    return RuntimeError(without_folders(f"{' '.join(map(str, command))} failed:\n" + "\n".join(output)))


def run(command, environment=None, timeout=600):
    environment = {**os.environ, "RUST_BACKTRACE": "0", **(environment or {})}
    try:
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=timeout)
    except FileNotFoundError as error:
        raise RuntimeError(f"there is no {error.filename}: install it, or build it if it is ours") from error
    if done.returncode != 0:
        raise failure(command, done.stdout, done.stderr)
    return done.stdout


def records(text):
    return [json.loads(line) for line in text.splitlines() if line.startswith("{")]


def in_turn(sides, number):
    """Sides in the order of round `number`: another one begins each, so that none always follows the same one."""
    sides = list(sides)
    return sides[number % len(sides):] + sides[:number % len(sides)]


def median_us(call, calls):
    """The median of what so many calls take."""
    times = []
    for _ in range(calls):
        start = time.perf_counter()
        call()
        times.append(time.perf_counter() - start)
    return statistics.median(times) * 1e6


def with_gloo(times, digits):
    """Medians of both sides' times, round by round, and the ratio of each round: above 1 mccs is ahead."""
    ratios = [gloo / mccs for mccs, gloo in zip(times["mccs"], times["gloo"])]
    return {"us": {side: round(statistics.median(us), digits) for side, us in times.items()},
            "ratio": round(statistics.median(ratios), 3), "least": round(min(ratios), 3), "most": round(max(ratios), 3)}


def undisturbed(work, most, tries=6):
    """The result of `work`, and the part of the cores' time that other guests of this machine took meanwhile. More than `most`: again, and
    the least disturbed of all tries counts."""
    def times():
        fields = [int(field) for field in open("/proc/stat").readline().split()[1:9]]
        return sum(fields), fields[7]

    best = None
    for _ in range(tries):
        before = times()
        found = work()
        total, stolen = (now - then for now, then in zip(times(), before))
        if best is None or stolen / total < best[1]:
            best = found, stolen / total
        if best[1] <= most:
            break
        print(f"others took {stolen / total:.0%} of the cores' time: again", flush=True)
    return best


@contextlib.contextmanager
def service(tenant="", settings="", binaries=BINARIES):
    """A mccs-service with one tenant, of whose table `tenant` is a part; gives the process and its folder of sockets."""
    with tempfile.TemporaryDirectory() as folder:
        config = pathlib.Path(folder) / "service.toml"
        config.write_text(f'[service]\nruntime_dir = "{folder}"\n{settings}\n[[tenant]]\nname = "eval"\n{tenant}\n')
        process = subprocess.Popen([binaries / "mccs-service", "--config", config], stdout=subprocess.PIPE,
                                   stderr=subprocess.DEVNULL, text=True)
        try:
            if process.stdout.readline() != "mccs-service ready\n":
                raise RuntimeError("mccs-service did not start")
            yield process, pathlib.Path(folder)
        finally:
            process.terminate()
            process.wait(timeout=60)


def provenance(versions=None, commit=None):
    """The head of results. With a commit git is not asked: the machine may have no repository."""
    def setting(path):
        try:
            return re.search(r"\[(\w+)\]", pathlib.Path(path).read_text()).group(1)
        except (OSError, AttributeError):
            return None

    cpu = next(line.split(":")[1].strip() for line in open("/proc/cpuinfo") if line.startswith("model name"))
    pages = "/sys/kernel/mm/transparent_hugepage/"
    git = ["git", "-C", str(ROOT)]
    changed = None if commit else run([*git, "status", "--porcelain", "--untracked-files=no", "--", ":!eval/results"]).strip() != ""
    return {
        "commit": commit or run([*git, "rev-parse", "HEAD"]).strip(),
        "uncommitted_changes": changed,
        "machine": {"cpu": cpu, "cores": os.cpu_count(), "kernel": platform.release(), "load": os.getloadavg(),
                    "huge_pages": {"anonymous": setting(pages + "enabled"), "shared": setting(pages + "shmem_enabled")}},
        "versions": versions or {},
        "command": command(),
    }


def command():
    """The running script's command."""
    return without_folders(shlex.join([pathlib.Path(sys.argv[0]).name, *sys.argv[1:]]))


def commit_option(parser):
    """Adds --commit, for machines that have what was built and no repository."""
    parser.add_argument("--commit", help="what was built, where git does not know")


def facts(options, machine, **more):
    """The head of results of a machine with GPUs, on which `provenance` may find no repository: the commit, the machine in words, the
    command, the rounds, and `more`."""
    commit = options.commit or run(["git", "-C", str(ROOT), "rev-parse", "--short", "HEAD"]).strip()
    return {"commit": commit, "machine": machine, "command": command(), "rounds": options.rounds, **more}


def write_results(name, data, text):
    """Writes NAME.json and NAME.md."""
    RESULTS.mkdir(exist_ok=True)
    (RESULTS / f"{name}.json").write_text(json.dumps(data, indent=1) + "\n")
    (RESULTS / f"{name}.md").write_text(text)


def write_out(options, data, text):
    """The same of a machine with GPUs, in the folder --out, without its paths; prints the page."""
    out = pathlib.Path(options.out)
    (out / f"{options.name}.json").write_text(without_folders(json.dumps(data)) + "\n")
    (out / f"{options.name}.md").write_text(text)
    print(text)


def table(heads, rows):
    lines = [heads, ["---"] * len(heads), *rows]
    return "".join("| " + " | ".join(map(str, line)) + " |\n" for line in lines)
