#!/usr/bin/env python3
"""What it costs a job to be seen: all-reduces with metrics scraped and a trace recorded and read, against neither, on one host
and between two services on loopback addresses; and what single records and counters cost. Being seen goes on and off around one
job, several times a second: services and jobs of their own for each side differ by more than what is looked for.

usage: sight.py NAME [--rounds N] [--interval-ms MS] [--bytes 65536,1048576]

Build first: cargo build --release --workspace. Writes eval/results/NAME.json (data and provenance) and NAME.md; fails if the
median of the ratios of any size is over 1.01."""

import argparse
import contextlib
import pathlib
import statistics
import subprocess
import tempfile

import bench
from bench import BINARIES

RATIO_ALLOWED = 1.01
OFF, METRICS, ALL = "off", "metrics", "metrics and trace"
SIDES = [OFF, METRICS, ALL]
ADDRESSES = ["127.77.0.1", "127.77.0.2"]
METRICS_PORT = 9477


@contextlib.contextmanager
def services(count):
    """Services on this machine, one for each address; gives their folders."""
    with tempfile.TemporaryDirectory() as name, contextlib.ExitStack() as stack:
        folder = pathlib.Path(name)
        names = [f"h{number}" for number in range(count)]
        if count > 1:
            bench.run([BINARIES / "mccsctl", "keys", "--hosts", ",".join(names), "--dir", folder])
        for own, address in zip(names, ADDRESSES):
            (folder / own).mkdir()
            # Everything through the service: what ranks do among themselves is not recorded.
            text = (f'[service]\nname = "{own}"\nruntime_dir = "{folder}/{own}"\n[host_device]\ndirect_limit = "0"\n'
                    f'[metrics]\nlisten = "{address}:{METRICS_PORT}"\n')
            if count > 1:
                text += (f'[exchange]\nlisten = "{address}:7477"\ncertificate = "{folder}/{own}.crt"\nkey = "{folder}/{own}.key"\n'
                         f'authority = "{folder}/authority.crt"\n')
                text += "".join(f'[[host]]\nname = "{host}"\naddress = "{at}:7477"\n' for host, at in zip(names, ADDRESSES))
            config = folder / own / "service.toml"
            config.write_text(text)
            process = subprocess.Popen([BINARIES / "mccs-service", "--config", config], stdout=subprocess.PIPE,
                                       stderr=subprocess.DEVNULL, text=True)
            stack.callback(process.wait, timeout=60)
            stack.callback(process.terminate)
            if process.stdout.readline() != "mccs-service ready\n":
                raise RuntimeError("mccs-service did not start")
        yield [folder / own for own in names]


def measure(hosts, size, options):
    """Two ranks; a record for each round and side."""
    with services(hosts) as folders:
        metrics = [f"{address}:{METRICS_PORT}" for address in ADDRESSES[:hosts]]
        text = bench.run([BINARIES / "mccs-sight", "job", "--services", ",".join(map(str, folders)), "--metrics", ",".join(metrics),
                          "--bytes", f"{size}B", "--rounds", str(options.rounds), "--interval-ms", str(options.interval_ms)])
        return [{"hosts": hosts, "bytes": size, **record} for record in bench.records(text)]


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("name")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--interval-ms", type=int, default=300)
    parser.add_argument("--bytes", default="65536,1048576", help="of an all-reduce")
    options = parser.parse_args()
    calls = bench.records(bench.run([BINARIES / "mccs-sight", "calls"]))
    runs, rows, worst = [], [], 0
    for hosts in (1, 2):
        for size in map(int, options.bytes.split(",")):
            found = measure(hosts, size, options)
            runs += found
            of = {side: [run for run in found if run["side"] == side] for side in SIDES}
            p50 = {side: statistics.median(run["p50_us"] for run in of[side]) for side in SIDES}
            for side in SIDES[1:]:
                # Of the same round: what else the machine does changes from second to second.
                def ratios(what):
                    return sorted(seen[what] / off[what] for seen, off in zip(of[side], of[OFF]))
                medians, fast, means = ratios("p50_us"), ratios("p10_us"), ratios("mean_us")
                quarter = len(medians) // 4
                worst = max(worst, statistics.median(medians))
                records, lost = (sum(run[what] for run in of[side]) for what in ("records", "lost"))
                rate = 1000 * records / (options.interval_ms * options.rounds)
                rows.append([hosts, size, f"{p50[OFF]:.1f}", side, f"{p50[side]:.1f}", f"{statistics.median(medians):.3f}",
                             f"{medians[quarter]:.3f} to {medians[-1 - quarter]:.3f}", f"{statistics.median(fast):.3f}",
                             f"{statistics.median(means):.3f}",
                             f"{rate:.0f}" if records else "", lost if records else ""])
                print(*rows[-1], flush=True)
    text = (f"All-reduce, two ranks, {options.rounds} rounds of {options.interval_ms} ms a side, in turn, around one job. Where it is seen, "
            "metrics are scraped once an interval; a trace is recorded, and read by the same two cores. Times are medians of intervals' "
            "p50; ratios are of one round: of p50s, of p10s (calls that nothing disturbed), and of means without the slowest tenth.\n\n"
            + bench.table(["hosts", "bytes", "off, us", "side", "us", "ratio, median", "half of them", "of p10s", "of means", "records/s", "lost"], rows)
            + "\nLeast times of single calls:\n\n" + bench.table(["call", "ns"], [[call["call"], f"{call['ns']:.1f}"] for call in calls]))
    data = {"calls": calls, "runs": runs, "ratio_allowed": RATIO_ALLOWED, "worst_ratio": worst}
    bench.write_results(options.name, bench.provenance() | data, text)
    print(text)
    if worst > RATIO_ALLOWED:
        raise SystemExit(f"the worst median ratio is {worst:.3f}, more than {RATIO_ALLOWED}")


if __name__ == "__main__":
    main()
