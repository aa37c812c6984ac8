#!/usr/bin/env python3
"""Overhead of metrics and traces on a job's all-reduces, on one host and between two services. One
side has metrics scraped and a trace recorded and read, the other has neither. Costs of single
records and counters are measured, too. Services are on loopback addresses. Being seen goes on and
off around one job, many times a second, there and back in each round: services and jobs of their
own for each side differ by more than what is looked for. The ratio of a round is that of its two
intervals of each side; what is told is the median of all rounds, and where it lies with 95%
certainty, by resampling the rounds.

usage: sight.py NAME [--rounds N] [--interval-ms MS] [--bytes 8,65536,1048576] [--hosts 1,2]

Build first: cargo build --release --workspace. Writes eval/results/NAME.json (data and provenance) and NAME.md; fails if it is
certain of any size that the ratio is over 1.01."""

import argparse
import collections
import contextlib
import pathlib
import random
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
RESAMPLED = 2000


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
            text = (f'[service]\nname = "{own}"\nruntime_dir = "{folder}/{own}"\n[host_device]\nshm_exchange_limit = "0"\n'
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


def interval(ratios):
    """The 95% confidence interval of the median of such ratios (percentile bootstrap, always from the same seed)."""
    source = random.Random(1)
    medians = sorted(statistics.median(source.choices(ratios, k=len(ratios))) for _ in range(RESAMPLED))
    return medians[RESAMPLED // 40], medians[-1 - RESAMPLED // 40]


def whole_rounds(runs):
    """Those of rounds in whose every interval the job got to run."""
    counts = collections.Counter(run["round"] for run in runs)
    whole = [run for run in runs if counts[run["round"]] == 2 * len(SIDES)]
    if len(whole) < len(runs) / 2:
        raise RuntimeError("the job did not run in most intervals: make them longer, or the machine quieter")
    return whole


def by_round(runs, side, what):
    """The mean of what a side's intervals of each round show."""
    found = {}
    for run in runs:
        if run["side"] == side:
            found.setdefault(run["round"], []).append(run[what])
    return [statistics.mean(values) for _, values in sorted(found.items())]


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("name")
    parser.add_argument("--rounds", type=int, default=150)
    parser.add_argument("--interval-ms", type=int, default=100)
    parser.add_argument("--bytes", default="8,65536,1048576", help="of an all-reduce")
    parser.add_argument("--hosts", default="1,2", help="services that the two ranks are on")
    options = parser.parse_args()
    calls = bench.records(bench.run([BINARIES / "mccs-sight", "calls"]))
    runs, rows, ratios = [], [], []
    for hosts in map(int, options.hosts.split(",")):
        for size in map(int, options.bytes.split(",")):
            found = whole_rounds(measure(hosts, size, options))
            runs += found
            for side in SIDES[1:]:
                row = {"hosts": hosts, "bytes": size, "side": side}
                for what in ("p50_us", "p10_us", "mean_us"):
                    one = [seen / off for seen, off in zip(by_round(found, side, what), by_round(found, OFF, what))]
                    row[what] = [statistics.median(one), *interval(one)]
                ratios.append(row)
                of_side = [run for run in found if run["side"] == side]
                records, lost, operations = (sum(run[what] for run in of_side) for what in ("records", "lost", "operations"))
                # Those that count are what lies between an interval's margins, records those of all
                # of it.
                shown = lambda what: "{:.4f} ({:.4f} to {:.4f})".format(*row[what])
                rows.append([hosts, size, f"{statistics.median(by_round(found, OFF, 'p50_us')):.1f}", side, shown("p50_us"), shown("p10_us"),
                             shown("mean_us"), f"{records / (len(of_side) * options.interval_ms) * 1000:.0f}" if records else "",
                             lost if records else "", operations])
                print(*rows[-1], flush=True)
    text = (f"All-reduce, two ranks, {options.rounds} rounds of two intervals of {options.interval_ms} ms a side, there and back, around one job. "
            "While it is seen, metrics are scraped every second; a trace is recorded, and read by the same two cores. Ratios of a round's "
            "intervals: median of all rounds in which the job always got to run, and where that lies with 95% certainty; of the p50s of operations' times, of p10s (calls that nothing "
            "disturbed), and of means without the slowest tenth.\n\n"
            + bench.table(["hosts", "bytes", "off, us", "side", "of p50s", "of p10s", "of means", "records/s", "lost", "operations"], rows)
            + "\nLeast times of single calls:\n\n" + bench.table(["call", "ns"], [[call["call"], f"{call['ns']:.1f}"] for call in calls]))
    data = {"calls": calls, "ratios": ratios, "runs": runs, "ratio_allowed": RATIO_ALLOWED}
    bench.write_results(options.name, bench.provenance() | data, text)
    print(text)
    missed = [row for row in ratios if row["p50_us"][1] > RATIO_ALLOWED]
    if missed:
        raise SystemExit(f"over {RATIO_ALLOWED} for certain: {missed}")


if __name__ == "__main__":
    main()
