#!/usr/bin/env python3
"""Runs a scenario of the simulator on its emulated fabric, with real services, processes and packets, and compares the two.

Lengths are scaled by the rates of the two networks, times are not: a run takes as long as the simulator says that the scenario
itself does. With --longer N, fewer and longer iterations take the same time; with --more N, there are N times as many. Policies are carried out by the service that is the controller; where the switches' hash decides, there is none.

With --lengths, by length, in the manner of MCCS's figure 6: iterations that are so much longer than the scenario's and so many fewer,
lengths and variants in turn. A scenario with [[moment]]s is shown over time, in the manner of figure 7: things happen while its
job runs.

With --alone, each job by itself, and how much its iterations vary.

With --table, rewrites the tables of results from what they have measured, and what the simulator has foretold; runs nothing else.

usage: scenario.py SCENARIO.toml [--rounds 5] [--longer N] [--more N] [--settle 2s] [--congestion-control cubic] [--variant NAME]... [--job NAME]
                   [--fabric FABRIC.toml] [--suffix TEXT] [--stolen PART] [--alone] [--lengths [0.015625 0.125 1 4]]
                   [--no-goal]
       scenario.py --table eval/results/fabric-SCENARIO.json...

Needs root, to measure. Build first: cargo build --release --workspace. Writes eval/results/fabric-SCENARIO[-sizes][-SUFFIX].json (data and provenance)
and .md, which plot.py draws; fails if a variant's completion times are further than a tenth from the simulator's, or the rates of tenants
that have shares or caps, while all jobs send, further than 3% from what these allot."""

import argparse
import concurrent.futures
import contextlib
import copy
import json
import pathlib
import re
import random
import secrets
import statistics
import tempfile
import threading
import time
import tomllib

import bench
import cluster
from bench import BINARIES, records, run
from cluster import Fabric

ALLOWED = 0.1
# Of what the policy allots to a tenant.
ALLOWED_OF_ALLOTTED = 0.03
# Where a tenant's rate is wanted while others send, those send for so much longer than it.
MEANWHILE = 1000
# Of the scenario's own length: from where latency counts as well to where it does not.
LENGTHS = [1 / 64, 1 / 8, 1, 4]
# Collectives that begin before and end after a moment belong to neither side of it; so long a time does not count either.
EDGE_S = 0.5
# Of what the policy allots, hosts fill so much where tenants have shares (`service/src/controller/pace.rs`).
SHARED_PAYLOAD = 0.92
# Simulated jobs that never vary stay in lockstep: those that begin together would meet in every iteration, as on the fabric they do not. So compute
# times vary there by so much at least: as iterations do on a fabric of jobs that have it for themselves, which is 0.6 to 1 ms, but 4 ms where each sends
# for 138 (eval/results/fabric-qos-alone-fair, fabric-turns-alone-fair).
VARIES_S = 0.65e-3
UNITS = {"": 1, "K": 1e3, "M": 1e6, "G": 1e9, "Ki": 1 << 10, "Mi": 1 << 20, "Gi": 1 << 30}
# Source ports that choose no spine, and that the kernel does not give out by itself: so many for each channel, of which services take the first that are
# free. They differ in the lowest bits, by which ports with a queue for each flow tell flows apart.
HASHED_PORTS, OF_CHANNEL, LOWEST_BITS = range(21_000, 32_000), 67, 4
SECONDS = {"us": 1e-6, "ms": 1e-3, "s": 1}


def number(text, unit):
    """Of a text such as "50Gbit/s", "512MiB" or "160ms"."""
    value, prefix = re.fullmatch(rf"([\d.]+) *([KMG]?i?){unit}", text).groups()
    return float(value) * UNITS[prefix]


def seconds(text):
    value, unit = re.fullmatch(r"([\d.]+) *(us|ms|s)", text).groups()
    return float(value) * SECONDS[unit]


class Scenario:
    def __init__(self, toml, fabric_path):
        """Of a fabric's lengths and rates already."""
        self.toml, self.fabric_path = toml, pathlib.Path(fabric_path)
        self.fabric = tomllib.loads(self.fabric_path.read_text())
        self.jobs, self.moments = self.toml["job"], self.toml.get("moment", [])
        self.scale = number(self.fabric["rates"]["leaf_spine"], "bit/s") / number(toml["topology"]["leaf_spine"], "bit/s")
        [self.algorithm] = {job.get("algorithm", "ring") for job in self.jobs}
        [self.channels] = {job.get("channels", 2) for job in self.jobs}
        [self.way] = {job.get("way") for job in self.jobs}

    @staticmethod
    def load(path, longer, more, fabric, only=None):
        path = pathlib.Path(path)
        toml = tomllib.loads(path.read_text())
        if only:
            [job] = [job for job in toml["job"] if job["name"] == only]
            toml["job"] = [{key: entry for key, entry in job.items() if key != "start"}]
        scenario = Scenario(toml, fabric or path.parent / toml["fabric"])
        for job in scenario.jobs:
            # Elements of every rank, whatever the collective.
            unit = 4 * len(job["ranks"])
            job["bytes"] = round(number(job["bytes"], "B") * scenario.scale * longer / unit) * unit
            job["compute"] = f"{round(seconds(job.get('compute', '0s')) * longer * 1e6)}us"
            job["iterations"] = max(1, round(job["iterations"] * more / longer))
        for rule in toml.get("tenant", []):
            for cap in {"cap", "host_cap"} & set(rule):
                rule[cap] = f"{number(rule[cap], 'bit/s') * scenario.scale:.0f}bit/s"
        return scenario

    def in_small(self, variants, payload):
        """Some variants of the scenario, with the rates of the fabric and lengths to match: what the simulator is to foretell."""
        toml = json.loads(json.dumps(self.toml))
        del toml["fabric"]
        rate = lambda link: f"{payload * number(self.fabric['rates'][link], 'bit/s'):.0f}bit/s"
        toml["topology"] |= {"nics_per_host": 1, "nic": rate("host_leaf"), "leaf_spine": rate("leaf_spine")}
        toml["variant"] = variants
        for job in toml["job"]:
            job["bytes"] = f"{job['bytes']}B"
            if compute := seconds(job["compute"]):
                job["jitter_percent"] = max(job.get("jitter_percent", 0), round(100 * VARIES_S / compute, 2))
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

    def ports(self, way):
        """First and last of the source ports by which a flow goes over a spine."""
        paths, spine = self.fabric["paths"], int(re.fullmatch(r"spine(\d+)", way).group(1))
        assert spine < self.fabric["spines"], f"the fabric has no {way}"
        first = paths["first_port"] + spine * paths["ports"]
        return first, first + paths["ports"] - 1

    def leaf(self, host):
        return f"leaf{self.rack(host)}"

    def topology(self):
        """topology.toml of the fabric."""
        rates = self.fabric["rates"]
        return to_toml({
            "rates": {name: rates[name] for name in ("host_leaf", "leaf_spine")},
            "leaf": [{"name": f"leaf{leaf}"} for leaf in range(self.fabric["leaves"])],
            "spine": [{"name": spine, "source_ports": "{}-{}".format(*self.ports(spine))}
                      for spine in (f"spine{number}" for number in range(self.fabric["spines"]))],
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

    def has_shares(self, variant):
        return "shares" in variant or any({"weight", "share_percent"} & set(rule) for rule in self.toml.get("tenant", []))

    def payload(self, variant):
        """Part of the links' rates that flows fill under a variant: less where hosts pace what tenants' shares are."""
        return SHARED_PAYLOAD if self.has_shares(variant) and variant["policy"] != "ecmp" else 1

    def allotted(self, variant):
        """Jobs that always have data to send, and may send what the policy says: those of tenants with caps, and all where some have shares."""
        if variant["policy"] == "ecmp" or self.moments or any(seconds(job["compute"]) for job in self.jobs):
            return []
        capped = {rule["name"] for rule in self.toml.get("tenant", []) if {"cap", "host_cap"} & set(rule)}
        return [job["name"] for job in self.jobs if self.has_shares(variant) or job["name"] in capped]


def to_toml(tables):
    """TOML of tables of plain values, and of lists of such tables; tables in those are inline."""
    def inline(entry):
        if isinstance(entry, dict):
            return f"{{ {', '.join(f'{key} = {inline(one)}' for key, one in entry.items())} }}"
        return f"[{', '.join(map(inline, entry))}]" if isinstance(entry, list) else json.dumps(entry)

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


def allotted_rates(scenario, variant):
    """What the policy allots to jobs while all of them send, as bus bandwidth in Gbit/s: the simulator's, of links shared by the policies' own code."""
    found = {}
    for name in scenario.allotted(variant):
        meanwhile = copy.copy(scenario)
        meanwhile.toml = scenario.toml | {"seeds": 1, "job": [
            job | {"iterations": job["iterations"] * (1 if job["name"] == name else MEANWHILE)} for job in scenario.jobs]}
        found[name] = 8 * simulated(meanwhile, [variant])[variant["name"]]["jobs"][name]["busbw_gb_s"]["mean"]
    return found


def levels(scenario, variant):
    """Bus bandwidth before the first moment, between moments, and after the last, Gbit/s, as the simulator has it of what goes on there: the job
    on its way, and each flow as a job of two hosts that does nothing else."""
    [job] = scenario.jobs
    way, flows, found = scenario.way, [], []
    for moment in [{}, *scenario.moments]:
        if variant["name"] in moment.get("variants", [variant["name"]]):
            flows += [moment["flow"]] if "flow" in moment else []
            way = moment.get("reconfigure", {}).get("way", way)
        others = [{"name": f"flow{number}", "ranks": [f"{flow['from']}:0", f"{flow['to']}:0"], "channels": 1, "bytes": 1 << 26,
                   "iterations": 1_000_000} for number, flow in enumerate(flows)]
        ways = {job["name"]: way} | {other["name"]: flow["way"] for other, flow in zip(others, flows)}
        still = copy.copy(scenario)
        still.toml = {key: entry for key, entry in scenario.toml.items() if key != "moment"} | {
            "seeds": 1, "job": [{key: entry for key, entry in job.items() if key != "way"}, *others],
            "reserve": [{"tenant": name, "paths": [path]} for name, path in ways.items()]}
        foretold = simulated(still, [{"name": "still", "policy": "pfa"}])["still"]
        found.append(8 * foretold["jobs"][job["name"]]["busbw_gb_s"]["mean"])
    return found


def measure(scenario, fabric, variant, options):
    """One run of all jobs under a variant; their records by name."""
    settings = [f'strategy.algorithm = "{scenario.algorithm}"', f"strategy.channels = {scenario.channels}",
                f'tcp.congestion_control = "{options.congestion_control}"']
    if scenario.way:
        assert variant["policy"] == "ecmp", "a policy decides over which spines flows go"
        settings.append('strategy.path = [{{ source_ports = "{}-{}" }}]'.format(*scenario.ports(scenario.way)))
    with tempfile.TemporaryDirectory() as files, contextlib.ExitStack() as meanwhile:
        if variant["policy"] != "ecmp":
            for name, text in [("topology", scenario.topology()), ("policy", scenario.policy(variant))]:
                (pathlib.Path(files) / f"{name}.toml").write_text(text)
                settings.append(f'controller.{name} = "{files}/{name}.toml"')
            # Emulated hosts would all have this machine's GPUs, of which their topology says nothing.
            settings += [f'controller.host = "{fabric.hosts[0]}"', 'cuda.use = "off"']
        tenants = [job["name"] for job in scenario.jobs]
        _, folder = meanwhile.enter_context(cluster.services(fabric, settings, tenants))
        began, moments = time.monotonic(), {}

        def work(job):
            placed = scenario.placed(job, variant.get("rings", "local"))
            time.sleep(max(0, began + seconds(job.get("start", "0s")) - time.monotonic()))
            command = [BINARIES / "mccs-traffic", "--collective", job.get("collective", "all_reduce"), "--bytes", f"{job['bytes']}B",
                       "--compute", job["compute"], "--iterations", str(job["iterations"]), "--settle", options.settle]
            command += ["--each"] * bool(options.alone or scenario.moments or scenario.allotted(variant))
            id = secrets.token_hex(16)
            return records(cluster.run_ranks(fabric, placed, command, lambda rank, host: {
                "MCCS_SOCKET": f"{folder}/{host}/{job['name']}.sock", "MCCS_RANK": str(rank), "MCCS_NRANKS": str(len(placed)),
                "MCCS_UNIQUE_ID": id, "MCCS_ROOT_ADDRESS": placed[0] if len(set(placed)) > 1 else ""}, timeout=1800))[0]

        def happen():
            for moment in scenario.moments:
                time.sleep(max(0, began + seconds(options.settle) + seconds(moment["at"]) - time.monotonic()))
                moments[moment["name"]] = time.time()
                if variant["name"] in moment.get("variants", [variant["name"]]):
                    act(scenario, fabric, folder, moment, options, meanwhile)
                    if "reconfigure" in moment:
                        moments["agreed"] = time.time()

        is_hashed, over = variant["policy"] == "ecmp" and not scenario.way, threading.Event()
        with concurrent.futures.ThreadPoolExecutor(len(scenario.jobs) + 2) as pool:
            happened = pool.submit(happen)
            seen = pool.submit(see_hash, scenario, fabric, folder, variant, over) if is_hashed else None
            try:
                found = dict(zip(tenants, pool.map(work, scenario.jobs)))
            finally:
                over.set()
            happened.result()
            for flow in seen.result() if seen else []:
                found[flow["job"]].setdefault("hashed", []).append(flow)
        if variant["policy"] != "ecmp":
            check_strategies(fabric, folder)
        for record in found.values() if moments else []:
            record["moments_s"] = {name: at - record["began_unix_s"] for name, at in moments.items()}
        if scenario.allotted(variant):
            note_rates(found)
        return found


def note_rates(found):
    """Notes the bus bandwidth of every job, Gbit/s, over the collectives that end while all jobs send; `ended_s` has served for that."""
    begin = max(record["began_unix_s"] for record in found.values())
    end = min(record["began_unix_s"] + record["ended_s"][-1] for record in found.values())
    for name, record in found.items():
        ends = [record["began_unix_s"] + at for at in record.pop("ended_s")]
        inside = [at for at in ends if begin <= at <= end]
        if len(inside) < 2:
            raise RuntimeError(f"{name} hardly sends while the other jobs do: other iterations (--longer, --more)")
        # They do nothing but send: each took as long as from one end to the next.
        gbit = 8 * record["busbw_gbps"] * record["seconds"] / record["iterations"]
        record["busbw_of_all_gbit_s"] = gbit * (len(inside) - 1) / (inside[-1] - inside[0])


def see_hash(scenario, fabric, folder, variant, over):
    """Gives every channel of every job source ports of its own, anew each time, and says over which spine the hash of a leaf sends each flow."""
    blocks = list(HASHED_PORTS[::OF_CHANNEL])
    random.shuffle(blocks)
    all_ports = iter({first % (1 << LOWEST_BITS): first for first in blocks}.values())
    channels, crossing = {}, 0
    for job in scenario.jobs:
        placed = scenario.placed(job, variant.get("rings", "local"))
        hops = {hop for hop in zip(placed, placed[1:] + placed[:1]) if scenario.rack(hop[0]) != scenario.rack(hop[1])}
        crossing += len(hops) * scenario.channels
        own = {next(all_ports): channel for channel in range(scenario.channels)}
        channels |= {first: (job["name"], channel) for first, channel in own.items()}
        control = [BINARIES / "mccsctl", "--socket", f"{folder}/{placed[0]}/mccs-control.sock"]
        comms = []
        while not comms and not over.wait(0.1):
            all_comms = json.loads(run([*control, "--json", "communicators"]))["communicators"]
            comms = [comm["communicator"] for comm in all_comms if comm["tenant"] == job["name"]]
        ways = [argument for first in own for argument in ("--path", f"{first}-{first + OF_CHANNEL - 1}")]
        for comm in comms:
            run([*control, "reconfigure", str(comm), *ways])
    seen = {}
    while len(seen) < crossing and not over.wait(0.5):
        for sender in fabric.hosts:
            for port, receiver, to_port in fabric.flows(sender):
                channel = channels.get(port - (port - HASHED_PORTS.start) % OF_CHANNEL)
                key = (channel, sender, receiver)
                if channel and scenario.rack(sender) != scenario.rack(receiver) and key not in seen:
                    seen[key] = fabric.way(scenario.leaf(sender), sender, receiver, (port, to_port))
    if len(seen) < crossing:
        raise RuntimeError(f"of {crossing} flows between racks {len(seen)} were seen")
    return [{"job": job, "channel": channel, "from": sender, "to": receiver, "way": way}
            for ((job, channel), sender, receiver), way in seen.items()]


def act(scenario, fabric, folder, moment, options, stack):
    """What happens at a moment; it goes on until the stack is left."""
    if flow := moment.get("flow"):
        # From the middle of the spine's ports, which services take from the first on.
        port = sum(scenario.ports(flow["way"])) // 2 + 1
        fabric.fill(flow["from"], flow["to"], port, options.congestion_control, stack)
    if change := moment.get("reconfigure"):
        control = [BINARIES / "mccsctl", "--socket", f"{folder}/{fabric.hosts[0]}/mccs-control.sock"]
        [comm] = json.loads(run([*control, "--json", "communicators"]))["communicators"]
        run([*control, "reconfigure", str(comm["communicator"]), "--path", "{}-{}".format(*scenario.ports(change["way"]))])


def check_strategies(fabric, folder):
    """What the controller has ordered came into force, but for communicators that had ended."""
    control = f"{folder}/{fabric.hosts[0]}/mccs-control.sock"
    history = json.loads(run([BINARIES / "mccsctl", "--socket", control, "--json", "policy", "history"]))["controller"]["history"]
    orders = [entry["went"] for entry in history if entry["what"].startswith("order")]
    if "done" not in orders or any(went != "done" and "has ended" not in str(went) for went in orders):
        raise RuntimeError(f"the controller's orders: {json.dumps(history)}")


def of_simulated(scenario, variant, rounds, foretold):
    """By job: completion time, of the simulated one. Where a hash decides that is of the same flows on the same ways, which are others in every
    round; elsewhere what was `foretold`."""
    def expected(records_):
        hashed = [flow for record in records_.values() for flow in record.get("hashed", [])]
        again = copy.copy(scenario)
        again.toml = scenario.toml | {"seeds": 1, "hashed": hashed}
        figures = simulated(again, [variant])[variant["name"]] if hashed else foretold
        return {job: figures["jobs"][job]["completion_s"]["mean"] for job in records_}

    times = [expected(records_) for records_ in rounds]
    return {job: sum(one[job]["seconds"] for one in rounds) / sum(one[job] for one in times) for job in times[0]}


def jain(values):
    return sum(values) ** 2 / (len(values) * sum(value * value for value in values))


def cv(values):
    return statistics.pstdev(values) / statistics.mean(values)


def rounds_of(fabric, variants, options, measure_one):
    """Measures variants in turn."""
    for number in range(options.rounds):
        for name in bench.in_turn(variants, number):
            measure_one(name, variants[name])


def counted(scenario, fabric, variant, options):
    """What `measure` gives, and what TCP repeated meanwhile."""
    before = fabric.repeated()
    records_ = measure(scenario, fabric, variant, options)
    return records_, dict(zip(("segments", "timeouts"), (now - then for now, then in zip(fabric.repeated(), before))))


def said(name, records_):
    times = ", ".join(f"{job} {record['seconds']:.2f} s" for job, record in records_.items())
    print(f"{name}: {times}", flush=True)


def write(kind, scenario, options, data, text):
    name = "-".join(filter(None, ["fabric", scenario.toml["name"], kind, options.suffix]))
    bench.write_results(name, data | {"scenario": scenario.toml, "scale": scenario.scale}, text)
    print(text)


def compare(scenario, variants, options):
    """Completion times and bandwidths of variants, beside the simulator's."""
    foretold = simulated(scenario, variants.values())
    found, repeated, disturbed = ({name: [] for name in variants} for _ in range(3))

    def one(name, variant):
        (records_, again), stolen = bench.undisturbed(lambda: counted(scenario, fabric, variant, options), options.stolen)
        found[name].append(records_)
        repeated[name].append(again)
        disturbed[name].append(stolen)
        said(name, records_)

    with Fabric(scenario.fabric_path) as fabric:
        rounds_of(fabric, variants, options, one)
    allotted = {name: allotted_rates(scenario, variant) for name, variant in variants.items()}
    ratios = ratios_of(scenario, foretold, found)
    return None, bench.provenance() | {"simulated": foretold, "of_simulated": ratios, "allotted_gbit_s": allotted, "rounds": found, "repeated": repeated,
                                       "stolen": disturbed}


def ratios_of(scenario, foretold, found):
    variants = {variant["name"]: variant for variant in scenario.toml["variant"]}
    return {name: of_simulated(scenario, variants[name], rounds, foretold[name]) for name, rounds in found.items()}


def busbw_cell(values):
    """Of several rounds, Gbit/s."""
    return f"{statistics.mean(values) * 8:.3f} ({100 * cv(values):.1f}%)"


def table_of_compared(scenario, data, options):
    """Returns also whether the simulator's times, and what the policy allots, are near."""
    jobs, found = [job["name"] for job in scenario.jobs], data["rounds"]
    policies = {variant["name"]: variant["policy"] for variant in scenario.toml["variant"]}
    rows, good = [], True
    allotted, repeated = data.get("allotted_gbit_s", {}), data.get("repeated")
    of_simulated_ = data.get("of_simulated") or ratios_of(scenario, data["simulated"], found)
    first = next(iter(found.values()))
    for name, rounds in found.items():
        row = [name, policies[name]]
        ratios = of_simulated_[name]
        good &= all(abs(ratio - 1) <= ALLOWED for ratio in ratios.values())
        for job in jobs:
            completions = [one[job]["seconds"] for one in rounds]
            busbw = [one[job]["busbw_gbps"] for one in rounds]
            row += [f"{statistics.mean(completions):.2f} ({min(completions):.2f} to {max(completions):.2f})",
                    busbw_cell(busbw), f"{ratios[job]:.3f}"]
            if job in allotted.get(name, {}):
                rates = [one[job]["busbw_of_all_gbit_s"] / allotted[name][job] for one in rounds]
                good &= abs(statistics.mean(rates) - 1) <= ALLOWED_OF_ALLOTTED
                row.append(f"{statistics.mean(rates):.3f} ({min(rates):.3f} to {max(rates):.3f})")
            elif any(map(len, allotted.values())):
                row.append("")
        speedups = [statistics.mean(a[job]["busbw_gbps"] and b[job]["busbw_gbps"] / a[job]["busbw_gbps"] for job in jobs)
                    for a, b in zip(first, rounds)]
        if len(jobs) > 1:
            row.append(busbw_cell([sum(one[job]["busbw_gbps"] for job in jobs) for one in rounds]))
        row += [f"{statistics.mean(jain([one[job]['busbw_gbps'] for job in jobs]) for one in rounds):.3f}", cluster.spread(speedups)]
        if repeated:
            row.append(" and ".join(f"{statistics.mean(again[kind] for again in repeated[name]):.0f}" for kind in ("segments", "timeouts")))
        rows.append(row)
    heads = ["variant", "policy"]
    for job in jobs:
        heads += [f"{job}: s", f"{job}: busbw Gbit/s (CV)", f"{job}: of the simulated time"]
        heads += [f"{job}: of what it is allotted, while all send"] * any(map(len, allotted.values()))
    heads += ["all jobs: busbw Gbit/s (CV)"] * (len(jobs) > 1) + ["Jain", "speed-up"] + ["TCP: segments repeated, time-outs"] * bool(repeated)
    stolen = [share for shares in data.get("stolen", {}).values() for share in shares]
    text = (f"{scenario.toml['question']}\n\nOn the emulated fabric {scenario.fabric['name']}, lengths scaled by {scenario.scale:g}, iterations {options.longer:g} times "
            f"as long and so much fewer, then {options.more:g} times as many, congestion control {options.congestion_control}: mean (least to greatest) of {len(first)} rounds, variants in turn. Speed-up: of the jobs' bus bandwidth against the first variant's, "
            f"round by round." + (f" Other guests of the machine took {max(stolen):.0%} of the cores' time at most." if stolen else "") + "\n\n"
            + bench.table(heads, rows))
    return text, good


def by_length(scenario, variants, options):
    """Bandwidths of variants by the length of iterations."""
    scenarios = [Scenario.load(options.scenario, longer, options.more, options.fabric) for longer in sorted(options.lengths or LENGTHS)]
    lengths = [{"bytes": {job["name"]: job["bytes"] for job in one.jobs}, "simulated": simulated(one, variants.values()),
                "rounds": {name: [] for name in variants}, "repeated": {name: [] for name in variants}} for one in scenarios]

    def one(name, variant):
        for scaled, found in zip(scenarios, lengths):
            records_, again = counted(scaled, fabric, variant, options)
            found["rounds"][name].append(records_)
            found["repeated"][name].append(again)
            said(f"{name}, {found['bytes']}", records_)

    with Fabric(scenario.fabric_path) as fabric:
        rounds_of(fabric, variants, options, one)
    for scaled, one in zip(scenarios, lengths):
        one["of_simulated"] = {name: of_simulated(scaled, variants[name], one["rounds"][name], one["simulated"][name]) for name in variants}
    return "sizes", bench.provenance() | {"lengths": lengths}


def table_by_length(scenario, data, options):
    jobs, lengths = [job["name"] for job in scenario.jobs], data["lengths"]
    columns = [([job], one) for job in jobs for one in lengths] + [(jobs, one) for one in lengths if len(jobs) > 1]
    heads = ["variant", *(f"{'all jobs' if len(some) > 1 else some[0]}: {sum(one['bytes'][job] for job in some)} bytes" for some, one in columns)]

    def cell(name, some, one):
        busbw = [8 * sum(each[job]["busbw_gbps"] for job in some) for each in one["rounds"][name]]
        ratio = f": {one['of_simulated'][name][some[0]]:.3f}" if len(some) == 1 and "of_simulated" in one else ""
        return f"{statistics.mean(busbw):.3f} ({min(busbw):.3f} to {max(busbw):.3f}){ratio}"

    rounds = lengths[0]["rounds"]
    rows = [[name, *(cell(name, *column) for column in columns)] for name in rounds]
    text = (f"{scenario.toml['question']}\n\nBy length, on the emulated fabric {scenario.fabric['name']}: the scenario's lengths are scaled by {scenario.scale:g}, congestion control "
            f"{options.congestion_control}. Bus bandwidth in Gbit/s: mean (least to greatest) of {len(next(iter(rounds.values())))} rounds, variants in turn"
            + (": completion time of the simulated one" if "of_simulated" in lengths[0] else "") + ".\n\n" + bench.table(heads, rows))
    ratios = [ratio for one in lengths for by_job in one.get("of_simulated", {}).values() for ratio in by_job.values()]
    return text, all(abs(ratio - 1) <= ALLOWED for ratio in ratios)


def each_collective(record):
    """Ends and bus bandwidths of all collectives of a job, and moments, in seconds from the first collective."""
    took = [end - begin for begin, end in zip([0, *record["ended_s"]], record["ended_s"])]
    busbw = record["busbw_gbps"] * 8 * sum(took) / len(took)
    return {"moments_s": record["moments_s"], "ended_s": record["ended_s"], "busbw_gbit_s": [busbw / each for each in took]}


def medians(scenario, record):
    """Median bus bandwidth before the first moment, between moments, and after the last; Gbit/s."""
    marks = [record["moments_s"][moment["name"]] for moment in scenario.moments]
    spans = zip([0, *marks], [*marks, record["ended_s"][-1] + EDGE_S])
    inside = lambda begin, end: [each for at, each in zip(record["ended_s"], record["busbw_gbit_s"])
                                 if begin + EDGE_S <= at <= end - EDGE_S]
    spans = [inside(*span) for span in spans]
    if not all(spans):
        raise RuntimeError("the job has ended before all has happened: more iterations (--more)")
    return [statistics.median(span) for span in spans]


def over_time(scenario, variants, options):
    """Bandwidth of a job before, between and after moments."""
    [job] = scenario.jobs
    found = {name: [] for name in variants}

    def one(name, variant):
        record = each_collective(measure(scenario, fabric, variant, options)[job["name"]])
        found[name].append(record)
        print(name, ", ".join(f"{each:.3f}" for each in medians(scenario, record)), flush=True)

    with Fabric(scenario.fabric_path) as fabric:
        # What is missing is found out before anything is measured.
        versions = fabric.versions()
        rounds_of(fabric, variants, options, one)
    foretold = {name: levels(scenario, variant) for name, variant in variants.items()}
    return None, bench.provenance(versions) | {"simulated": foretold, "rounds": found}


def alone(scenario, variants, options):
    """When collectives of jobs end that have the network for themselves."""
    [variant] = variants.values()
    assert variant["policy"] != "ecmp", "where a hash decides iterations vary with it"
    found = {job["name"]: [] for job in scenario.jobs}

    def one(name, job):
        by_itself = copy.copy(scenario)
        by_itself.jobs = [job]
        found[name].append(measure(by_itself, fabric, variant, options)[name])
        said(f"{name} alone", {name: found[name][-1]})

    with Fabric(scenario.fabric_path) as fabric:
        rounds_of(fabric, {job["name"]: job for job in scenario.jobs}, options, one)
    return "alone", bench.provenance() | {"alone": found}


def table_of_alone(scenario, data, options):
    rows = []
    for job in scenario.jobs:
        rounds = [[1e3 * (end - begin) for begin, end in zip(record["ended_s"], record["ended_s"][1:])] for record in data["alone"][job["name"]]]
        compute = 1e3 * seconds(job["compute"])
        # Of times that are spread evenly over so much more and less.
        spread = [100 * 3**0.5 * statistics.pstdev(times) / compute for times in rounds]
        rows.append([job["name"], sum(map(len, rounds)), f"{compute:g}", f"{statistics.mean(map(statistics.mean, rounds)):.1f}",
                     cluster.spread([statistics.pstdev(times) for times in rounds]), cluster.spread(spread)])
    heads = ["job", "iterations", "compute ms", "an iteration, ms", "standard deviation, ms", "as compute times that vary by so many percent"]
    text = (f"How much do iterations of jobs vary that have the network for themselves?\n\nJobs of {scenario.toml['name']} on the emulated fabric {scenario.fabric['name']}, one after the other: "
            f"median (least to greatest) of {options.rounds} rounds.\n\n" + bench.table(heads, rows))
    return text, True


def table_over_time(scenario, data, options):
    [job] = scenario.jobs
    rows, good, found = [], True, data["rounds"]
    for name, records_ in found.items():
        by_phase = list(zip(*(medians(scenario, record) for record in records_)))
        ratios = [statistics.median(each) / level for each, level in zip(by_phase, data["simulated"][name])]
        good &= all(abs(ratio - 1) <= ALLOWED for ratio in ratios)
        rows.append([name, *(f"{cluster.spread(each)}: {ratio:.3f}" for each, ratio in zip(by_phase, ratios)),
                     cluster.spread([last / first for first, last in zip(by_phase[0], by_phase[-1])])])
    agreed = [1e3 * (record["moments_s"]["agreed"] - record["moments_s"][moment["name"]]) for moment in scenario.moments
              if "reconfigure" in moment for records_ in found.values() for record in records_ if "agreed" in record["moments_s"]]
    heads = ["the job's flows", "before, Gbit/s", *(f"from {moment['at']} on: {moment['what']}" for moment in scenario.moments), "last, of first"]
    text = (f"{scenario.toml['question']}\n\n{len(job['ranks'])} ranks on the emulated fabric {scenario.fabric['name']}, {job.get('collective', 'all_reduce')} of {job['bytes']} bytes "
            f"over {scenario.channels} channels, congestion control {options.congestion_control}. Bus bandwidth: median of the collectives between two moments; "
            f"median (least to greatest) of {len(next(iter(found.values())))} rounds, in turn: of what the simulator has while nothing changes."
            + (f" `mccsctl reconfigure` took {cluster.spread(agreed)} ms." if agreed else "") + "\n\n" + bench.table(heads, rows))
    return text, good


def table_of(scenario, data, options):
    if scenario.moments:
        return table_over_time(scenario, data, options)
    of_kind = {"lengths": table_by_length, "alone": table_of_alone}
    return next((of_kind[kind] for kind in of_kind if kind in data), table_of_compared)(scenario, data, options)


def arguments_of(command):
    """Of a command as it is noted with results: values of options may have spaces."""
    first, *options = command.split(" --")
    arguments = first.split(" ")[1:]
    for name, _, value in (option.partition(" ") for option in options):
        arguments += [f"--{name}", *([value] if name == "variant" else value.split())]
    return arguments


def rewrite(parser, path):
    """The table of results, from what was measured."""
    data = json.loads(path.read_text())
    options = parser.parse_args(arguments_of(data["command"]))
    toml = data["scenario"]
    fabric = bench.ROOT / options.fabric if options.fabric else bench.ROOT / "eval/scenarios" / toml["fabric"]
    scenario = Scenario(toml, fabric)
    if "simulated" in data and not scenario.moments:
        variants = [variant for variant in toml["variant"] if variant["name"] in data["rounds"]]
        data["simulated"] = simulated(scenario, variants)
        data["of_simulated"] = ratios_of(scenario, data["simulated"], data["rounds"])
        data["simulated_at"] = bench.provenance()["commit"]
        path.write_text(json.dumps(data, indent=1) + "\n")
    text, _ = table_of(scenario, data, options)
    path.with_suffix(".md").write_text(text)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("scenario", nargs="?")
    parser.add_argument("--table", type=pathlib.Path, nargs="+", help="results whose tables are rewritten")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--longer", type=float, default=1, help="how much longer iterations are, and how much fewer")
    parser.add_argument("--more", type=float, default=1, help="how many more iterations there are")
    parser.add_argument("--lengths", type=float, nargs="*", help="by length: how much longer iterations are, one after the other")
    parser.add_argument("--alone", action="store_true", help="each job by itself")
    parser.add_argument("--settle", default="2s")
    parser.add_argument("--congestion-control", default="cubic", help="of all flows, whatever this machine's own is")
    parser.add_argument("--variant", action="append", help="only these")
    parser.add_argument("--job", help="only this one, from the beginning")
    parser.add_argument("--fabric", help="another than the scenario's")
    parser.add_argument("--suffix", help="of the results' name")
    parser.add_argument("--stolen", type=float, default=1, help="runs are repeated of whose time on the cores other guests of the machine took more than this part")
    parser.add_argument("--no-goal", action="store_true", help="times may be others than the simulated ones, which have no latencies")
    options = parser.parse_args()
    if options.table:
        for path in options.table:
            rewrite(parser, path)
        return
    if not options.scenario:
        parser.error("which scenario?")
    scenario = Scenario.load(options.scenario, options.longer, options.more, options.fabric, options.job)
    variants = {variant["name"]: variant for variant in scenario.toml["variant"]}
    if options.variant:
        variants = {name: variants[name] for name in options.variant}
    if scenario.moments and options.lengths is not None:
        parser.error("what happens at moments is shown over time, not by length")
    measured = alone if options.alone else over_time if scenario.moments else compare if options.lengths is None else by_length
    kind, data = measured(scenario, variants, options)
    text, good = table_of(scenario, data, options)
    write(kind, scenario, options, data, text)
    raise SystemExit(0 if good or options.no_goal else 1)


if __name__ == "__main__":
    main()
