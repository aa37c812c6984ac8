#!/usr/bin/env python3
"""Cost to a job, on an emulated fabric, of strategies that the operator changes all the time.
First many changes come with every element of every result checked. Then gaps between
completions are taken, with and without changes in turn.

With --table, rewrites the tables of results from what they have measured; runs nothing else.

usage: changes.py FABRIC.toml NAME [--ranks-per-host 2] [--checked 100000] [--measured 1000] [--bytes 65536,8388608]
                  [--depth 1] [--paths 20000-20099,20100-20199] [--devices] [--paces]
       changes.py --table eval/results/NAME.json...

With --devices each host has a second interface beside its first (macvlan), and ways leave by the one, the other, or whichever the
host's routes say. With --paces the first host is the controller, and every few changes another policy is applied, which leaves strategies as
they are: the tenant's cap, weight or window changes.

Needs root. Build first: cargo build --release --workspace. Writes eval/results/NAME.json (data and provenance) and NAME.md."""

import argparse
import contextlib
import json
import pathlib
import secrets
import tempfile
import tomllib

import bench
import cluster
from bench import BINARIES, records
from cluster import Fabric


TENANT = "eval"
DEVICES = ["eth0", "eth1"]


def second_devices(fabric):
    """Gives each host another interface, with the address behind the first one's."""
    for host in fabric.hosts:
        network, last = fabric.addresses[host].rsplit(".", 1)
        for command in [["link", "add", "link", DEVICES[0], "name", DEVICES[1], "type", "macvlan", "mode", "bridge"],
                        ["address", "add", f"{network}.{int(last) + 1}/24", "dev", DEVICES[1]], ["link", "set", DEVICES[1], "up"]]:
            bench.run(fabric.command(host, ["ip", *command]))


def controller(fabric, files):
    """Settings by which the first host is the controller, of hosts that are alike, and leaves strategies as they are."""
    (files / "policy.toml").write_text('[policy]\nname = "ecmp"\nrings = "kept"\n')
    hosts = "".join(f'[[host]]\nname = "{host}"\nleaf = "leaf"\n' for host in fabric.hosts)
    (files / "topology.toml").write_text(
        f'[rates]\nhost_leaf = "400Mbit/s"\n[[leaf]]\nname = "leaf"\n{hosts}')
    return [f'controller.{name} = "{files}/{name}.toml"' for name in ("topology", "policy")] + [
        f'controller.host = "{fabric.hosts[0]}"']


def run(fabric, placed, arguments, paces):
    with contextlib.ExitStack() as stack:
        files = pathlib.Path(stack.enter_context(tempfile.TemporaryDirectory()))
        settings = controller(fabric, files) if paces else []
        arguments = arguments + (["--paced", TENANT] if paces else [])
        _, folder = stack.enter_context(cluster.services(fabric, settings))
        root = placed[0]
        command = [BINARIES / "mccs-changes", *map(str, arguments)]
        id = secrets.token_hex(16)
        return records(cluster.run_ranks(fabric, placed, command, lambda rank, host: {
            "MCCS_SOCKET": f"{folder}/{host}/mccs.sock", "MCCS_CONTROL_SOCKET": f"{folder}/{host}/mccs-control.sock",
            "MCCS_RANK": str(rank), "MCCS_NRANKS": str(len(placed)), "MCCS_UNIQUE_ID": id, "MCCS_ROOT_ADDRESS": root},
            timeout=3600))[0]


def text_of(options, varied, measured, checked):
    """The table, and what was checked."""
    fabric = tomllib.loads((bench.ROOT / options.fabric).read_text())
    us = lambda record, name: f"{record[name]:.0f}"
    # How much longer the longest gap is around a change, in calls.
    longer = lambda one, quantile: (one[f"gap_{quantile}_us"] - one[f"quiet_gap_{quantile}_us"]) / one["call_p50_us"]
    rows = [[one["bytes"], one["changes"], one["calls"], us(one, "call_p50_us"),
             *(f"{us(one, f'quiet_gap_{q}_us')}, {us(one, f'gap_{q}_us')}: {longer(one, q):+.2f}" for q in ("p50", "p99")),
             f"{us(one, 'agreed_p50_us')}, {us(one, 'agreed_p99_us')}"] for one in measured]
    heads = ["bytes", "changes", "calls", "a call, us", "longest gap without a change, with one, us: differ by so many calls, p50",
             "p99", "hosts agreed after, p50, p99 us"]
    text = (f"Fabric {fabric['name']}: {len(fabric['host'])} hosts x {options.ranks_per_host} ranks, all-reduce. Gaps are times between "
            "completions at rank 0; the longest one is of all calls from asking for a change until eight calls under it have ended, "
            "and of as many calls without a change after that, in turn.")
    if few := {one["changes"] for one in measured if one["gap_p99_us"] == one["gap_max_us"]}:
        text += f" The p99 of {' and '.join(map(str, sorted(few)))} changes is the greatest of them."
    text += "\n\n" + bench.table(heads, rows)
    paces = ", and {} policies that change the tenant's cap, weight or window," if options.paces else ""
    depth = f", up to {options.depth} at a time," if options.depth > 1 else ""
    for one in checked:
        text += (f"\nWith new data for each call and every element checked on every rank: {one['changes']} changes of "
                 f"{', '.join(varied[:-1])} and {varied[-1]}{paces.format(one.get('policies'))} during {one['calls']} calls of {one['bytes']} bytes{depth} "
                 f"in {one['seconds']:.0f} s; none lost, repeated, reordered or wrong.\n")
    return text


def rewrite(parser, path):
    """The table of results, from what was measured."""
    data = json.loads(path.read_text())
    options = parser.parse_args(data["command"].split(" ")[1:])
    path.with_suffix(".md").write_text(text_of(options, data["varied"], data["measured"], data["checked"]))


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("fabric", nargs="?")
    parser.add_argument("name", nargs="?")
    parser.add_argument("--table", type=pathlib.Path, nargs="+", help="results whose tables are rewritten")
    parser.add_argument("--ranks-per-host", type=int, default=2)
    parser.add_argument("--checked", type=int, default=100000, help="changes with checked data")
    parser.add_argument("--measured", type=int, default=1000, help="changes of each size whose gaps are measured")
    parser.add_argument("--bytes", default="65536,8388608")
    parser.add_argument("--depth", type=int, default=1, help="checked calls that are made before they are waited for, at most")
    parser.add_argument("--paths", default="", help="source ports of paths through the network, comma-separated")
    parser.add_argument("--devices", action="store_true", help="paths also differ by their device")
    parser.add_argument("--paces", action="store_true", help="caps, weights and windows change as well")
    options = parser.parse_args()
    if options.table:
        for path in options.table:
            rewrite(parser, path)
        return
    if not options.name:
        parser.error("give a fabric and a name: FABRIC.toml NAME")
    varied = ["rings", "algorithm"] + ["ways", "ways of single flows"] * bool(options.paths) + ["devices"] * options.devices
    ways = [argument for ports in options.paths.split(",") if ports for argument in ("--path", ports)]
    ways += [argument for device in DEVICES for argument in ("--device", device)] * options.devices
    with Fabric(options.fabric) as fabric:
        if options.devices:
            second_devices(fabric)
        placed = cluster.dealt(fabric, options.ranks_per_host, "block")
        measured = []
        for size in options.bytes.split(","):
            measured.append(run(fabric, placed, ["--bytes", f"{size}B", "--changes", options.measured, *ways], False))
            print(measured[-1], flush=True)
        checked = []
        if options.checked:
            checked.append(run(fabric, placed, ["--bytes", "4KiB", "--changes", options.checked, "--window", 2, "--check",
                                                "--depth", options.depth, *ways], options.paces))
            print(checked[-1], flush=True)
    text = text_of(options, varied, measured, checked)
    bench.write_results(options.name, bench.provenance() | {"varied": varied, "measured": measured, "checked": checked}, text)
    print(text)


if __name__ == "__main__":
    main()
