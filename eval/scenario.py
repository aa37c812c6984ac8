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
import copy
import json
import pathlib

import bench
from cluster import Fabric
from scenario_foretold import allotted_rates, levels, of_simulated, ratios_of, simulated
from scenario_runs import measure
from scenario_tables import medians, table_of
from scenario_toml import Scenario

# Parts of the scenario's own length: from where latency counts as well to where it does not.
LENGTHS = [1 / 64, 1 / 8, 1, 4]


def rounds_of(fabric, variants, options, measure_one):
    """Measures variants in turn."""
    for number in range(options.rounds):
        for name in bench.in_turn(variants, number):
            measure_one(name, variants[name])


def counted(scenario, fabric, variant, options):
    """The result of `measure`, and TCP's retransmissions meanwhile."""
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


def each_collective(record):
    """Ends and bus bandwidths of all collectives of a job, and moments, in seconds from the first collective."""
    took = [end - begin for begin, end in zip([0, *record["ended_s"]], record["ended_s"])]
    busbw = record["busbw_gbps"] * 8 * sum(took) / len(took)
    return {"moments_s": record["moments_s"], "ended_s": record["ended_s"], "busbw_gbit_s": [busbw / each for each in took]}


def over_time(scenario, variants, options):
    """Bandwidth of a job before, between and after moments."""
    [job] = scenario.jobs
    found = {name: [] for name in variants}

    def one(name, variant):
        record = each_collective(measure(scenario, fabric, variant, options)[job["name"]])
        found[name].append(record)
        print(name, ", ".join(f"{each:.3f}" for each in medians(scenario, record)), flush=True)

    with Fabric(scenario.fabric_path) as fabric:
        # Missing parts are found before anything is measured.
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


def arguments_of(command):
    """A command as it is noted with results: values of options may have spaces."""
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
    parser.add_argument("--stolen", type=float, default=1, help="most of the cores' time that other guests may take; a run with more is repeated")
    parser.add_argument("--no-goal", action="store_true", help="do not fail where times differ from the simulated ones")
    options = parser.parse_args()
    if options.table:
        for path in options.table:
            rewrite(parser, path)
        return
    if not options.scenario:
        parser.error("give a scenario: SCENARIO.toml")
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
