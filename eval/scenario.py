#!/usr/bin/env python3
"""Runs a scenario of the simulator on its emulated fabric, with real services, processes and packets, and compares the two.

Lengths are scaled by the rates of the two networks, times are not: a run takes as long as the simulator says that the scenario
itself does. With --longer N, fewer and longer iterations take the same time; with --more N, there are N times as many. Policies are carried out by the service that is the controller; where the switches' hash decides, there is none.

usage: scenario.py SCENARIO.toml [--rounds 5] [--longer N] [--more N] [--settle 2s] [--congestion-control cubic] [--variant NAME]...
                   [--fabric FABRIC.toml] [--suffix TEXT] [--stolen PART]

Needs root. Build first: cargo build --release --workspace. Writes eval/results/fabric-SCENARIO[-SUFFIX].json (data and provenance) and
.md; fails if a variant's completion times are further than a tenth from the simulator's."""

import argparse
import concurrent.futures
import json
import pathlib
import re
import secrets
import statistics
import tempfile
import time
import tomllib

import bench
import cluster
from bench import BINARIES, records, run
from cluster import Fabric

ALLOWED = 0.1
# Of what the policy allots, hosts fill so much where tenants have shares (`service/src/controller/pace.rs`).
SHARED_PAYLOAD = 0.92
UNITS = {"": 1, "K": 1e3, "M": 1e6, "G": 1e9, "Ki": 1 << 10, "Mi": 1 << 20, "Gi": 1 << 30}
SECONDS = {"us": 1e-6, "ms": 1e-3, "s": 1}


def number(text, unit):
    """Of a text such as "50Gbit/s", "512MiB" or "160ms"."""
    value, prefix = re.fullmatch(rf"([\d.]+) *([KMG]?i?){unit}", text).groups()
    return float(value) * UNITS[prefix]


def seconds(text):
    value, unit = re.fullmatch(r"([\d.]+) *(us|ms|s)", text).groups()
    return float(value) * SECONDS[unit]


class Scenario:
    def __init__(self, path, longer, more, fabric):
        self.path = pathlib.Path(path)
        self.toml = tomllib.loads(self.path.read_text())
        self.fabric_path = pathlib.Path(fabric) if fabric else self.path.parent / self.toml["fabric"]
        self.fabric = tomllib.loads(self.fabric_path.read_text())
        rates = self.fabric["rates"]
        self.scale = number(rates["leaf_spine"], "bit/s") / number(self.toml["topology"]["leaf_spine"], "bit/s")
        self.jobs = self.toml["job"]
        for job in self.jobs:
            # Elements of every rank, whatever the collective.
            unit = 4 * len(job["ranks"])
            job["bytes"] = round(number(job["bytes"], "B") * self.scale * longer / unit) * unit
            job["compute"] = f"{round(seconds(job.get('compute', '0s')) * longer * 1e6)}us"
            job["iterations"] = max(1, round(job["iterations"] * more / longer))
        [self.algorithm] = {job.get("algorithm", "ring") for job in self.jobs}
        [self.channels] = {job.get("channels", 2) for job in self.jobs}

    def in_small(self, variants, payload):
        """Some variants of the scenario, with the rates of the fabric and lengths to match: what the simulator is to foretell."""
        toml = json.loads(json.dumps(self.toml))
        del toml["fabric"]
        rate = lambda link: f"{payload * number(self.fabric['rates'][link], 'bit/s'):.0f}bit/s"
        toml["topology"] |= {"nics_per_host": 1, "nic": rate("host_leaf"), "leaf_spine": rate("leaf_spine")}
        toml["variant"] = variants
        for job in toml["job"]:
            job["bytes"] = f"{job['bytes']}B"
        return to_toml(toml)

    def rack(self, host):
        return next(one.get("leaf", 0) for one in self.fabric["host"] if one["name"] == host)

    def placed(self, job, rings):
        """Hosts of a job's ranks. A bad ring is rank order, of ranks that were numbered without knowledge of the network: the
        first host of every rack, then the second."""
        hosts = [rank.split(":")[0] for rank in job["ranks"]]
        if rings == "local":
            return sorted(hosts, key=lambda host: (self.rack(host), host))
        assert rings == "scattered", f"on the fabric there are no rings {rings}"
        turn = lambda host: sorted(other for other in set(hosts) if self.rack(other) == self.rack(host)).index(host)
        return sorted(hosts, key=lambda host: (turn(host), self.rack(host)))

    def topology(self):
        """topology.toml of the fabric."""
        rates, paths = self.fabric["rates"], self.fabric["paths"]
        first = lambda spine: paths["first_port"] + spine * paths["ports"]
        return to_toml({
            "rates": {name: rates[name] for name in ("host_leaf", "leaf_spine")},
            "leaf": [{"name": f"leaf{leaf}"} for leaf in range(self.fabric["leaves"])],
            "spine": [{"name": f"spine{spine}", "source_ports": f"{first(spine)}-{first(spine) + paths['ports'] - 1}"}
                      for spine in range(self.fabric["spines"])],
            "class": [{"priority": priority, "dscp": dscp}
                      for priority, dscp in enumerate(self.fabric.get("buffer", {}).get("first", []), start=1)],
            "host": [{"name": host["name"], "devices": host.get("devices", 1), "leaf": f"leaf{host.get('leaf', 0)}"}
                     for host in self.fabric["host"]]})

    def policy(self, variant):
        """policy.toml of a variant."""
        rings = "kept" if variant.get("rings", "local") == "scattered" else "local"
        tenants = {rule["name"]: rule for rule in self.toml.get("tenant", [])}
        for name, percent in variant.get("shares", {}).items():
            tenants[name] = tenants.get(name, {"name": name}) | {"share_percent": percent}
        return to_toml({"policy": {"name": variant["policy"], "rings": rings}, "tenant": list(tenants.values()),
                        "reserve": self.toml.get("reserve", [])})

    def payload(self, variant):
        """Part of the links' rates that flows fill under a variant: less where hosts pace what tenants' shares are."""
        has_shares = "shares" in variant or any({"weight", "share_percent"} & set(rule) for rule in self.toml.get("tenant", []))
        return SHARED_PAYLOAD if has_shares and variant["policy"] != "ecmp" else 1


def to_toml(tables):
    """TOML of tables of plain values, and of lists of such tables; tables in those are inline."""
    inline = lambda entry: (f"{{ {', '.join(f'{key} = {json.dumps(one)}' for key, one in entry.items())} }}"
                            if isinstance(entry, dict) else json.dumps(entry))
    lines = lambda table: "".join(f"{key} = {inline(entry)}\n" for key, entry in table.items())
    is_list = lambda entry: isinstance(entry, list) and (not entry or isinstance(entry[0], dict))
    plain = {key: entry for key, entry in tables.items() if not isinstance(entry, dict) and not is_list(entry)}
    text = lines(plain)
    for key, entry in tables.items():
        if isinstance(entry, dict):
            text += f"\n[{key}]\n{lines(entry)}"
        elif is_list(entry):
            text += "".join(f"\n[[{key}]]\n{lines(one)}" for one in entry)
    return text


def simulated(scenario, variants):
    """Of every variant: the simulator's figures."""
    found = {}
    for payload in (1, SHARED_PAYLOAD):
        some = [variant for variant in variants if scenario.payload(variant) == payload]
        if some:
            with tempfile.TemporaryDirectory() as folder:
                path = pathlib.Path(folder) / "in-small.toml"
                path.write_text(scenario.in_small(some, payload))
                run([BINARIES / "mccs-sim", "run", path, "--out", folder])
                said = json.loads((pathlib.Path(folder) / f"sim-{scenario.toml['name']}.json").read_text())
                found |= {variant["name"]: variant for variant in said["variants"]}
    return found


def measure(scenario, fabric, variant, options):
    """One run of all jobs under a variant; their records by name."""
    settings = [f'strategy.algorithm = "{scenario.algorithm}"', f"strategy.channels = {scenario.channels}",
                f'tcp.congestion_control = "{options.congestion_control}"']
    with tempfile.TemporaryDirectory() as files:
        if variant["policy"] != "ecmp":
            for name, text in [("topology", scenario.topology()), ("policy", scenario.policy(variant))]:
                (pathlib.Path(files) / f"{name}.toml").write_text(text)
                settings.append(f'controller.{name} = "{files}/{name}.toml"')
            settings.append(f'controller.host = "{fabric.hosts[0]}"')
        tenants = [job["name"] for job in scenario.jobs]
        with cluster.services(fabric, settings, tenants) as (_, folder):
            began = time.monotonic()

            def work(job):
                placed = scenario.placed(job, variant.get("rings", "local"))
                time.sleep(max(0, began + seconds(job.get("start", "0s")) - time.monotonic()))
                command = [BINARIES / "mccs-traffic", "--collective", job.get("collective", "all_reduce"), "--bytes", f"{job['bytes']}B",
                           "--compute", job["compute"], "--iterations", str(job["iterations"]), "--settle", options.settle]
                id = secrets.token_hex(16)
                return records(cluster.run_ranks(fabric, placed, command, lambda rank, host: {
                    "MCCS_SOCKET": f"{folder}/{host}/{job['name']}.sock", "MCCS_RANK": str(rank), "MCCS_NRANKS": str(len(placed)),
                    "MCCS_UNIQUE_ID": id, "MCCS_ROOT_ADDRESS": placed[0] if len(set(placed)) > 1 else ""}, timeout=1800))[0]

            with concurrent.futures.ThreadPoolExecutor(len(scenario.jobs)) as pool:
                found = dict(zip(tenants, pool.map(work, scenario.jobs)))
            if variant["policy"] != "ecmp":
                check_strategies(fabric, folder)
            return found


def check_strategies(fabric, folder):
    """What the controller has ordered came into force, but for communicators that had ended."""
    control = f"{folder}/{fabric.hosts[0]}/mccs-control.sock"
    history = json.loads(run([BINARIES / "mccsctl", "--socket", control, "--json", "policy", "history"]))["controller"]["history"]
    orders = [entry["went"] for entry in history if entry["what"].startswith("order")]
    if "done" not in orders or any(went != "done" and "has ended" not in str(went) for went in orders):
        raise RuntimeError(f"the controller's orders: {json.dumps(history)}")


def jain(values):
    return sum(values) ** 2 / (len(values) * sum(value * value for value in values))


def cv(values):
    return statistics.pstdev(values) / statistics.mean(values)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("scenario")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--longer", type=float, default=1, help="how much longer iterations are, and how much fewer")
    parser.add_argument("--more", type=float, default=1, help="how many more iterations there are")
    parser.add_argument("--settle", default="2s")
    parser.add_argument("--congestion-control", default="cubic", help="of all flows, whatever this machine's own is")
    parser.add_argument("--variant", action="append", help="only these")
    parser.add_argument("--fabric", help="another than the scenario's")
    parser.add_argument("--suffix", help="of the results' name")
    parser.add_argument("--stolen", type=float, default=1, help="runs are repeated of whose time on the cores other guests of the machine took more than this part")
    options = parser.parse_args()
    scenario = Scenario(options.scenario, options.longer, options.more, options.fabric)
    variants = {variant["name"]: variant for variant in scenario.toml["variant"]}
    if options.variant:
        variants = {name: variants[name] for name in options.variant}
    foretold = simulated(scenario, variants.values())
    found, disturbed = ({name: [] for name in variants} for _ in range(2))
    with Fabric(scenario.fabric_path) as fabric:
        # What is missing is found out before anything is measured.
        versions = fabric.versions()
        for number in range(options.rounds):
            for name in bench.in_turn(variants, number):
                one, stolen = bench.undisturbed(lambda: measure(scenario, fabric, variants[name], options), options.stolen)
                found[name].append(one)
                disturbed[name].append(stolen)
                times = ", ".join(f"{job} {record['seconds']:.2f} s" for job, record in found[name][-1].items())
                print(f"{name}: {times}", flush=True)
    jobs = [job["name"] for job in scenario.jobs]
    rows, good = [], True
    first = found[next(iter(variants))]
    for name, rounds in found.items():
        row = [name, variants[name]["policy"]]
        for job in jobs:
            completions = [one[job]["seconds"] for one in rounds]
            busbw = [one[job]["busbw_gbps"] for one in rounds]
            ratio = statistics.mean(completions) / foretold[name]["jobs"][job]["completion_s"]["mean"]
            good &= abs(ratio - 1) <= ALLOWED
            row += [f"{statistics.mean(completions):.2f} ({min(completions):.2f} to {max(completions):.2f})",
                    f"{statistics.mean(busbw) * 8:.3f} ({100 * cv(busbw):.1f}%)", f"{ratio:.3f}"]
        speedups = [statistics.mean(a[job]["busbw_gbps"] and b[job]["busbw_gbps"] / a[job]["busbw_gbps"] for job in jobs)
                    for a, b in zip(first, rounds)]
        row += [f"{statistics.mean(jain([one[job]['busbw_gbps'] for job in jobs]) for one in rounds):.3f}", cluster.spread(speedups)]
        rows.append(row)
    most = max(share for shares in disturbed.values() for share in shares)
    heads = ["variant", "policy"]
    for job in jobs:
        heads += [f"{job}: s", f"{job}: busbw Gbit/s (CV)", f"{job}: of the simulated time"]
    heads += ["Jain", "speed-up"]
    text = (f"{scenario.toml['question']}\n\nOn the emulated fabric {fabric.name}, lengths scaled by {scenario.scale:g}, iterations {options.longer:g} times "
            f"as long and so much fewer, then {options.more:g} times as many, congestion control {options.congestion_control}: mean (least to greatest) of {options.rounds} rounds, variants in turn. Speed-up: of the jobs' bus bandwidth against the first variant's, "
            f"round by round. Other guests of the machine took {most:.0%} of the cores' time at most.\n\n" + bench.table(heads, rows))
    data = bench.provenance(versions) | {"scenario": scenario.toml, "scale": scenario.scale, "simulated": foretold,
                                                  "rounds": found, "stolen": disturbed}
    bench.write_results("-".join(filter(None, ["fabric", scenario.toml["name"], options.suffix])), data, text)
    print(text)
    raise SystemExit(0 if good else 1)


if __name__ == "__main__":
    main()
