#!/usr/bin/env python3
"""Speed of two builds, before against after, in one run: the sides alternate, round by round.

usage: before_after.py NAME --before COMMIT --folder FOLDER [--rounds N] [--effort 1.0] [--allowed 0.99,1.01]
                       [--measures small,middle,ring,connections,memory,hosts-latency,hosts-middle]
                       [--programs FOLDER] [--commit TEXT]

Before is a commit, which this script exports to a folder in FOLDER and builds there; FOLDER is outside the repository. A build that is
there already is used again. After is what lies in target/release, or in the folder that MCCS_BIN names: build it first, with cargo
build --release --workspace. On a machine without compiler and repository, --programs names the folder of the programs of before, and
--commit what after was built of. Leave the machine alone meanwhile. hosts-latency and hosts-middle need root.

Writes eval/results/NAME.json (data and provenance) and NAME.md (tables). The ratio of a measure is the geometric mean over its calls. Fails if
the median of its rounds is more than is allowed."""

import argparse
import functools
import pathlib
import re
import secrets
import socket
import statistics
import struct
import subprocess
import sys
import time

import bench
import cluster
from cluster import spread

BEFORE, AFTER = "before", "after"
PAIR = bench.ROOT / "eval" / "fabric" / "pair.toml"
# Tells that a build has ended well.
DONE = "built"
# The hello that opens a connection: magic, version and status. Its layout is the same in all versions.
HELLO = struct.Struct("8sII")
MAGIC = b"mccs-ipc"
SESSIONS = 200


def export_and_build(commit, folder):
    """The folder of a commit's release programs, and the whole commit."""
    git = ["git", "-C", str(bench.ROOT)]
    commit = bench.run([*git, "rev-parse", "--verify", f"{commit}^{{commit}}"]).strip()
    tree = folder.resolve() / commit
    if tree.is_relative_to(bench.ROOT):
        raise SystemExit(f"--folder {folder} is inside the repository, whose settings of cargo would apply to it; name one outside")
    if not (tree / DONE).exists():
        tree.mkdir(parents=True, exist_ok=True)
        archive = subprocess.Popen([*git, "archive", commit], stdout=subprocess.PIPE)
        subprocess.run(["tar", "-x", "-C", tree], stdin=archive.stdout, check=True)
        if archive.wait() != 0:
            raise SystemExit(f"git archive {commit} fails")
        subprocess.run(["cargo", "build", "--release", "--workspace", "--bins", "--target-dir", tree / "target"], cwd=tree, check=True)
        (tree / DONE).touch()
    return tree / "target" / "release", commit


class OneHost:
    """This machine, as `cluster` knows hosts."""

    def command(self, _, command):
        return command


def times(found, suffix=""):
    """Times of calls by what was called."""
    return {f"{one['op']}, {one['nranks']} ranks, {one['bytes']} B{', in place' * one['in_place']}{suffix}, us": one["p50_us"] for one in found}


def calls(options, nranks, operation, sizes, iterations, together=1):
    begin, end, factor = sizes
    iterations = max(1, round(iterations * options.effort))
    return nranks, ["--operation", operation, "--begin", f"{begin}B", "--end", f"{end}B", "--factor", factor, "--iterations", iterations,
                    "--warmup", max(1, iterations // 10), "--together", together]


def one_host(wanted, binaries):
    """`wanted`: ranks and arguments of mccs-perf, and what is added to the names of the times."""
    found = {}
    with bench.service('max_memory = "16GiB"', binaries=binaries) as (_, folder):
        for (nranks, arguments), suffix in wanted:
            # `cluster` has a folder of sockets for each host.
            found |= times(cluster.perf(OneHost(), folder, ["."] * nranks, secrets.token_hex(16), arguments, binaries), suffix)
    return found


def small(options, binaries):
    """The least sizes go through shared memory. One call takes few steps of the clock: many in a row are told more finely."""
    alone = calls(options, 2, "all_reduce", (8, 16384, 8), 20000)
    in_a_row = calls(options, 2, "all_reduce", (8, 64, 8), 2000, together=64)
    return one_host([(alone, ""), (in_a_row, ", 64 in a row")], binaries)


def middle(options, binaries):
    operations = "all_reduce,all_gather,reduce_scatter,broadcast"
    return one_host([(calls(options, nranks, operations, (65536, 16 << 20, 16), 60), "") for nranks in (2, 4)], binaries)


def ring(options, binaries):
    trips = 100 * max(1, round(2000 * options.effort))
    command = [binaries / "mccs-ring-bench", "--json", "--sides", "ring", "--round-trips", str(trips), "--warmup", str(trips // 10),
               "--commands", str(50 * trips)]
    found = bench.records(bench.run(command))[0]
    return {"round trip, us": found["batched_ns"] / 1e3, "a command, one way, us": 1e6 / found["commands_per_s"]}


def connect(folder, version):
    """A connection, and the version that the service speaks. With the same one it is welcomed."""
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    connection.connect(str(folder / "mccs.sock"))
    connection.send(HELLO.pack(MAGIC, version, 0))
    _, theirs, _ = HELLO.unpack(connection.recv(HELLO.size))
    if theirs == version:
        connection.recv(4096)
    return connection, theirs


def connections(binaries):
    """Connections that do nothing: how long each takes, and KiB that the service allocates for one."""
    def allocated_kib(process):
        return int(re.search(r"^RssAnon:\s+(\d+)", pathlib.Path(f"/proc/{process.pid}/status").read_text(), re.M).group(1))

    with bench.service(f"max_sessions = {2 * SESSIONS}", binaries=binaries) as (process, folder):
        refused, version = connect(folder, 0)
        refused.close()
        held = [connect(folder, version) for _ in range(SESSIONS // 10)]
        before, took = allocated_kib(process), []
        for _ in range(SESSIONS):
            began = time.perf_counter()
            held.append(connect(folder, version))
            took.append(1e6 * (time.perf_counter() - began))
        return took, (allocated_kib(process) - before) / SESSIONS


def hosts(options, binaries, sizes, iterations):
    with cluster.services(options.fabric, binaries=binaries) as (_, folder):
        nranks, arguments = calls(options, 2, "all_reduce", sizes, iterations)
        placed = options.fabric.hosts[:nranks]
        return times(cluster.perf(options.fabric, folder, placed, secrets.token_hex(16), arguments, binaries))


MEASURES = {
    "small": small,
    "middle": middle,
    "ring": ring,
    "connections": lambda _, binaries: {"a connection, us": statistics.median(connections(binaries)[0])},
    "memory": lambda _, binaries: {"of an idle connection, KiB": connections(binaries)[1]},
    "hosts-latency": functools.partial(hosts, sizes=(8, 8, 2), iterations=5000),
    "hosts-middle": functools.partial(hosts, sizes=(65536, 1 << 20, 16), iterations=500),
}


def measure(options, sides):
    """Measured values, by measure, place and side, in the order of rounds."""
    found = {}
    for number in range(options.rounds):
        for name in options.measures:
            for side in bench.in_turn(sides, number):
                for place, value in MEASURES[name](options, sides[side]).items():
                    found.setdefault(name, {}).setdefault(place, {BEFORE: [], AFTER: []})[side].append(value)
                print(f"round {number}, {name}, {side}", flush=True)
    return found


def ratios(of):
    return [after / before for before, after in zip(of[BEFORE], of[AFTER])]


def report(options, found, commits, machine):
    least, most = options.allowed
    measures, rows, slower = [], [], []
    for name, places in found.items():
        rounds = list(map(statistics.geometric_mean, zip(*map(ratios, places.values()))))
        ratio = statistics.median(rounds)
        verdict = "less" if ratio < least else "MORE" if ratio > most else "as before"
        if verdict == "MORE":
            slower.append(f"{name}: {ratio:.3f}")
        measures.append([name, spread(rounds, 4), verdict])
        rows += [[name, place, spread(of[BEFORE]), spread(of[AFTER]), spread(ratios(of), 4)] for place, of in places.items()]
    text = (f"Before ({commits[BEFORE][:8]}) and after ({commits[AFTER][:8]}), on {machine['cpu']}, {machine['cores']} cores. Median (least to\n"
            f"greatest) of {options.rounds} rounds, sides in turn. A ratio is that of one round, after by before; of a measure the geometric\n"
            f"mean over its calls. As before: a median of {least} to {most}.\n\n"
            + bench.table(["measure", "after / before", ""], measures) + "\n"
            + bench.table(["measure", "what", "before", "after", "after / before"], rows))
    return text, slower


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("name")
    parser.add_argument("--before", required=True, help="a commit")
    parser.add_argument("--folder", type=pathlib.Path, help="where it is exported to and built")
    parser.add_argument("--programs", type=pathlib.Path, help="where its programs are, instead")
    bench.commit_option(parser)
    parser.add_argument("--measures", default=",".join(MEASURES), help=f"of {','.join(MEASURES)}")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--effort", type=float, default=1.0, help="times as many calls")
    parser.add_argument("--allowed", default="0.99,1.01")
    options = parser.parse_args()
    options.measures = options.measures.split(",")
    options.allowed = [float(bound) for bound in options.allowed.split(",")]
    unknown = set(options.measures) - MEASURES.keys()
    if unknown:
        parser.error(f"there is no measure {', '.join(sorted(unknown))}")
    if (options.folder is None) == (options.programs is None):
        parser.error("either --folder or --programs")
    before, commit = (options.programs, options.before) if options.programs else export_and_build(options.before, options.folder)
    sides = {BEFORE: before, AFTER: bench.BINARIES}
    provenance = bench.provenance(commit=options.commit)
    if any(name.startswith("hosts") for name in options.measures):
        with cluster.Fabric(PAIR) as options.fabric:
            found = measure(options, sides)
    else:
        found = measure(options, sides)
    text, slower = report(options, found, {BEFORE: commit, AFTER: provenance["commit"]}, provenance["machine"])
    data = provenance | {"before": commit, "rounds": options.rounds, "effort": options.effort, "allowed": options.allowed, "found": found}
    bench.write_results(options.name, data, text)
    print(text)
    if slower:
        sys.exit(f"more than {options.allowed[1]} times what it was: {'; '.join(slower)}")


if __name__ == "__main__":
    main()
