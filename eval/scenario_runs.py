"""One run of a scenario on its emulated fabric: services, jobs, timed events, and the spines that
a hash picks."""

import concurrent.futures
import contextlib
import json
import pathlib
import random
import secrets
import tempfile
import threading
import time

import cluster
from bench import BINARIES, records, run
from scenario_toml import seconds

# Source ports that choose no spine, and that the kernel does not give out by itself: so many for
# each channel, of which services take the first that are free. They differ in the lowest bits, by
# which ports with a queue for each flow tell flows apart.
HASHED_PORTS, OF_CHANNEL, LOWEST_BITS = range(21_000, 32_000), 67, 4


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
            # Emulated hosts would all have this machine's GPUs, of which their topology says
            # nothing.
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
    """An event at a moment; it goes on until the stack is left."""
    if flow := moment.get("flow"):
        # From the middle of the spine's ports, which services take from the first on.
        port = sum(scenario.ports(flow["way"])) // 2 + 1
        fabric.fill(flow["from"], flow["to"], port, options.congestion_control, stack)
    if change := moment.get("reconfigure"):
        control = [BINARIES / "mccsctl", "--socket", f"{folder}/{fabric.hosts[0]}/mccs-control.sock"]
        [comm] = json.loads(run([*control, "--json", "communicators"]))["communicators"]
        run([*control, "reconfigure", str(comm["communicator"]), "--path", "{}-{}".format(*scenario.ports(change["way"]))])


def check_strategies(fabric, folder):
    """Checks that the controller's orders came into force, but for communicators that had ended."""
    control = f"{folder}/{fabric.hosts[0]}/mccs-control.sock"
    history = json.loads(run([BINARIES / "mccsctl", "--socket", control, "--json", "policy", "history"]))["controller"]["history"]
    orders = [entry["went"] for entry in history if entry["what"].startswith("order")]
    if "done" not in orders or any(went != "done" and "has ended" not in str(went) for went in orders):
        raise RuntimeError(f"the controller's orders: {json.dumps(history)}")
