#!/usr/bin/env python3
"""Memory of a service with many communicators, and with many outstanding operations.

usage: scale.py NAME [--communicators N] [--operations N] [--steps N]

Build first: cargo build --release --workspace. Writes eval/results/NAME.json (data and provenance) and NAME.md."""

import argparse

import bench

KINDS = ["rss_anon_bytes", "rss_shmem_bytes", "pss_bytes"]
COMMAND_BYTES = 128
# Linear: no point is further from the straight line than this part of the whole growth.
RESIDUAL_ALLOWED = 0.05


def measure(options, what, count, quotas):
    """Runs mccs-scale against a service of its own; returns its records."""
    with bench.service(quotas) as (service, folder):
        return bench.records(bench.run([
            bench.BINARIES / "mccs-scale", "--socket", folder / "mccs.sock", "--control-socket",
            folder / "mccs-control.sock", "--service-pid", str(service.pid), "--steps", str(options.steps), what, "--count",
            str(count)]))


def fit(points, kind):
    """Bytes for each, by least squares, and the largest distance from that line as a part of the whole growth."""
    xs, ys = [point["count"] for point in points], [point[kind] for point in points]
    x_mean, y_mean = sum(xs) / len(xs), sum(ys) / len(ys)
    slope = sum((x - x_mean) * (y - y_mean) for x, y in zip(xs, ys)) / sum((x - x_mean) ** 2 for x in xs)
    distance = max(abs(y - y_mean - slope * (x - x_mean)) for x, y in zip(xs, ys))
    growth = max(ys) - min(ys)
    return {"bytes_each": slope, "largest_residual": distance / growth if growth else 0.0}


def conclude(records, growing):
    points = [record for record in records if record["stage"] == growing]
    # Freed memory stays with the allocator; what counts is that it is used again.
    again = [record["rss_anon_bytes"] for record in records if "again" in record["stage"]]
    return {"records": records, "fit": {kind: fit(points, kind) for kind in KINDS},
            "times_again": len(again), "private_growth_of_those_bytes": again[-1] - again[0],
            "is_linear": fit(points, "pss_bytes")["largest_residual"] <= RESIDUAL_ALLOWED}


def section(title, found, each):
    mib = 1 << 20
    rows = [[record["stage"], record["count"], *(f"{record[kind] / mib:.2f}" for kind in KINDS)]
            for record in found["records"]]
    anon, pss = found["fit"]["rss_anon_bytes"], found["fit"]["pss_bytes"]
    return (
        f"{title}\n\n{pss['bytes_each']:.0f} bytes {each} ({anon['bytes_each']:.0f} of them private). Growth is "
        f"{'linear' if found['is_linear'] else 'NOT linear'}: no point is further from a straight line than "
        f"{100 * pss['largest_residual']:.1f}% of the whole.\n\n"
        + bench.table(["stage", "number", "private MiB", "shared MiB", "proportional MiB"], rows)
        + f"\nDone {found['times_again']} times again, the last of them takes {found['private_growth_of_those_bytes']} private "
          "bytes more than the first.\n\n")


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("name")
    parser.add_argument("--communicators", type=int, default=1000)
    parser.add_argument("--operations", type=int, default=40_000)
    parser.add_argument("--steps", type=int, default=4)
    options = parser.parse_args()
    communicators = conclude(measure(options, "communicators", options.communicators,
                                     f"max_communicators = {2 * options.communicators}"), "made")
    operations = conclude(measure(options, "operations", options.operations,
                                  f"max_operations_in_flight = {2 * options.operations}"), "waiting")
    used = next(record for record in communicators["records"] if record["stage"] == "used")
    made = next(record for record in reversed(communicators["records"]) if record["stage"] == "made")
    communicators["private_bytes_each_by_first_use"] = (
        (used["rss_anon_bytes"] - made["rss_anon_bytes"]) / options.communicators)
    operations["ring_bytes_each"] = COMMAND_BYTES
    text = (
        section(f"{options.communicators} communicators of two ranks, of one session; then one all-reduce on each, checked.",
                communicators, "a communicator")
        + f"Using each once adds {communicators['private_bytes_each_by_first_use']:.0f} private bytes a communicator.\n\n"
        + section(f"{options.operations} operations of one session, of which the other rank never calls its own; then it does.",
                  operations, "an outstanding operation")
        + f"Besides, an operation takes {COMMAND_BYTES} bytes of the session's ring, which is as long as it is configured.\n")
    data = {"provenance": bench.provenance(), "communicators": communicators, "operations": operations}
    bench.write_results(options.name, data, text)
    print(text)


main()
