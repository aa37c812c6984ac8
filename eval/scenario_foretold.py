"""Predictions of the simulator for a scenario: times, rates between moments, and rates that are
allotted."""

import copy
import json
import pathlib
import tempfile

from bench import BINARIES, run
from scenario_toml import SHARED_PAYLOAD

# A tenant whose rate is wanted while others send: those send for so much longer.
MEANWHILE = 1000


def simulated(scenario, variants):
    """The simulator's figures of every variant."""
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
    """The policy's allotments to jobs while all of them send, as bus bandwidth in Gbit/s: the simulator's, of links shared by the policies' own code."""
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


def of_simulated(scenario, variant, rounds, foretold):
    """By job: completion time, of the simulated one. If a hash decides, it is of the same flows on the same paths, which are others in every
    round; elsewhere what was `foretold`."""
    def expected(records_):
        hashed = [flow for record in records_.values() for flow in record.get("hashed", [])]
        again = copy.copy(scenario)
        again.toml = scenario.toml | {"seeds": 1, "hashed": hashed}
        figures = simulated(again, [variant])[variant["name"]] if hashed else foretold
        return {job: figures["jobs"][job]["completion_s"]["mean"] for job in records_}

    times = [expected(records_) for records_ in rounds]
    return {job: sum(one[job]["seconds"] for one in rounds) / sum(one[job] for one in times) for job in times[0]}


def ratios_of(scenario, foretold, found):
    variants = {variant["name"]: variant for variant in scenario.toml["variant"]}
    return {name: of_simulated(scenario, variants[name], rounds, foretold[name]) for name, rounds in found.items()}
