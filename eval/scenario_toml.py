"""Reads a scenario and scales it to a fabric; writes the files that its runs need. Those are of
the service and of the simulator."""

import json
import pathlib
import re
import tomllib

# Hosts fill so much of the policy's allotment if tenants have shares
# (`service/controller/src/pace.rs`).
SHARED_PAYLOAD = 0.92
# Simulated jobs that never vary stay in lockstep: those that begin together would meet in every
# iteration, as on the fabric they do not. So compute times vary there by so much at least: as
# iterations do on a fabric of jobs that have it for themselves, which is 0.6 to 1 ms, but 4 ms
# where each sends for 138 (eval/results/fabric-qos-alone-fair, fabric-turns-alone-fair).
VARIES_S = 0.65e-3
UNITS = {"": 1, "K": 1e3, "M": 1e6, "G": 1e9, "Ki": 1 << 10, "Mi": 1 << 20, "Gi": 1 << 30}
SECONDS = {"us": 1e-6, "ms": 1e-3, "s": 1}


def number(text, unit):
    """Number of a text such as "50Gbit/s", "512MiB" or "160ms"."""
    value, prefix = re.fullmatch(rf"([\d.]+) *([KMG]?i?){unit}", text).groups()
    return float(value) * UNITS[prefix]


def seconds(text):
    value, unit = re.fullmatch(r"([\d.]+) *(us|ms|s)", text).groups()
    return float(value) * SECONDS[unit]


class Scenario:
    def __init__(self, toml, fabric_path):
        """Scales lengths and rates of a fabric."""
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
