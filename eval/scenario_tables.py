"""Tables of a scenario's measurements beside predictions, and whether the two are near."""

import statistics

import bench
import cluster
from scenario_foretold import ratios_of
from scenario_toml import seconds

ALLOWED = 0.1
# Part of the policy's allotment to a tenant.
ALLOWED_OF_ALLOTTED = 0.03
# Collectives that begin before and end after a moment belong to neither side of it; so long a time
# does not count either.
EDGE_S = 0.5


def jain(values):
    return sum(values) ** 2 / (len(values) * sum(value * value for value in values))


def cv(values):
    return statistics.pstdev(values) / statistics.mean(values)


def busbw_cell(values):
    """Rates of several rounds, Gbit/s."""
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


def table_of_alone(scenario, data, options):
    rows = []
    for job in scenario.jobs:
        rounds = [[1e3 * (end - begin) for begin, end in zip(record["ended_s"], record["ended_s"][1:])] for record in data["alone"][job["name"]]]
        compute = 1e3 * seconds(job["compute"])
        # Standard deviation of times that are spread evenly over so much more and less.
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
