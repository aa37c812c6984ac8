"""Helpers of the scripts about several hosts: an emulated fabric that is up, services on its hosts, ranks, counters."""

import contextlib
import json
import os
import pathlib
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import time

import bench
from bench import BINARIES, run

FABRIC = BINARIES / "mccs-fabric"
STATISTICS = ["tx_bytes", "rx_bytes", "tx_packets"]


class Fabric:
    """A fabric that is up."""

    def __init__(self, spec):
        self.spec = spec
        self.name = re.search(r'^name = "(.*)"', pathlib.Path(spec).read_text(), re.M).group(1)

    def __enter__(self):
        # Also when it is told to end: what was started is ended, and the fabric removed.
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
        run([FABRIC, "down", self.name])
        run([FABRIC, "up", self.spec])
        view = next(one for one in json.loads(run([FABRIC, "list", "--json"])) if one["name"] == self.name)
        self.hosts = [host["name"] for host in view["spec"]["host"]]
        self.addresses = {host: self._address(host) for host in self.hosts}
        return self

    def __exit__(self, *_):
        run([FABRIC, "down", self.name])

    def command(self, host, command):
        return [FABRIC, "exec", self.name, host, "--", *command]

    def _address(self, host):
        return re.search(r"inet ([\d.]+)", run(self.command(host, ["ip", "-4", "address", "show", "eth0"]))).group(1)

    def counters(self):
        """Bytes that each host's interface has sent and received, as the kernel counts them."""
        def counts(host):
            files = [f"/sys/class/net/eth0/statistics/{name}" for name in STATISTICS]
            return dict(zip(STATISTICS, map(int, run(self.command(host, ["cat", *files])).split())))

        return {host: counts(host) for host in self.hosts}

    def link_gbps(self):
        """Rate of one TCP flow (iperf3) from the first host to the last, GB/s of payload."""
        return self._flows_gbps([(self.hosts[0], self.hosts[-1])])

    def ring_gbps(self):
        """Rate of TCP flows (iperf3) from each host to the next one together, GB/s of payload."""
        return self._flows_gbps(list(zip(self.hosts, self.hosts[1:] + self.hosts[:1])))

    def _flows_gbps(self, pairs, seconds=3):
        with contextlib.ExitStack() as stack:
            for _, receiver in pairs:
                self._listen(receiver, stack)
            command = lambda sender, receiver: self.command(sender, [
                "iperf3", "-c", self.addresses[receiver], "-t", str(seconds), "-J"])
            clients = [subprocess.Popen(command(*pair), stdout=subprocess.PIPE, text=True) for pair in pairs]
            for client in clients:
                stack.callback(client.kill)
            ends = [json.loads(client.communicate(timeout=60)[0])["end"] for client in clients]
        return sum(end["sum_received"]["bits_per_second"] for end in ends) / 8e9

    def _listen(self, receiver, stack):
        """Has iperf3 wait for a flow, until the stack is left."""
        server = subprocess.Popen(self.command(receiver, ["iperf3", "-s", "-1", "--forceflush"]), stdout=subprocess.PIPE, text=True)
        stack.callback(server.wait)
        stack.callback(server.kill)
        if not any("listening" in line for line in server.stdout):
            raise RuntimeError(f"iperf3 does not listen on {receiver}")

    def fill(self, sender, receiver, port, congestion_control, stack):
        """A TCP flow (iperf3) from a source port begins, and fills its path until the stack is left."""
        self._listen(receiver, stack)
        client = subprocess.Popen(self.command(sender, [
            "iperf3", "-c", self.addresses[receiver], "--cport", str(port), "-t", "0", "-C", congestion_control]),
            stdout=subprocess.DEVNULL)
        stack.callback(client.wait)
        stack.callback(client.kill)

    def flows(self, sender):
        """Source port, receiver and its port of every TCP flow that a host sends on."""
        receivers = {address: host for host, address in self.addresses.items()}
        lines = run(self.command(sender, ["ss", "-Htn", "state", "established"])).splitlines()
        for (_, port), (to, to_port) in ((end.rsplit(":", 1) for end in line.split()[-2:]) for line in lines):
            if to in receivers:
                yield int(port), receivers[to], int(to_port)

    def way(self, leaf, sender, receiver, ports):
        """The spine over which a leaf sends a flow: its rules or its hash decide."""
        command = ["ip", "route", "get", self.addresses[receiver], "from", self.addresses[sender], "iif", sender,
                   "ipproto", "tcp", "sport", str(ports[0]), "dport", str(ports[1])]
        return re.search(r" dev (\S+)", run(self.command(leaf, command))).group(1)

    def repeated(self):
        """Segments that hosts' TCP has sent again since the fabric is up, and how often because nothing had come back for so long."""
        names = ("TcpRetransSegs", "TcpExtTCPTimeouts")
        counts = [json.loads(run(self.command(host, ["nstat", "-azsj", *names])))["kernel"] for host in self.hosts]
        return [sum(of[name] for of in counts) for name in names]

    def versions(self):
        return {"iperf3": run(["iperf3", "--version"]).splitlines()[0]}


def difference(before, after):
    return {host: {name: after[host][name] - count for name, count in counts.items()} for host, counts in before.items()}


def dealt(fabric, per_host, placement):
    """The host of each rank: consecutive ranks of a host, or hosts in turn."""
    nranks = per_host * len(fabric.hosts)
    block = placement == "block"
    return [fabric.hosts[rank // per_host if block else rank % len(fabric.hosts)] for rank in range(nranks)]


def of_hosts(fabric, placed):
    """Ranks by host, as mccs-between reads them."""
    ranks = lambda host: ",".join(str(rank) for rank, where in enumerate(placed) if where == host)
    return "/".join(map(ranks, fabric.hosts))


@contextlib.contextmanager
def services(fabric, settings=(), tenants=(), binaries=BINARIES):
    """A service on each host; gives their processes and folders of sockets. `settings` are lines of service.toml outside
    of all tables: dotted keys. Sockets are called as their tenants; without any there is one, mccs.sock."""
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
        run([binaries / "mccsctl", "keys", "--hosts", ",".join(fabric.hosts), "--dir", folder])
        hosts = "".join(f'[[host]]\nname = "{h}"\naddress = "{fabric.addresses[h]}:7400"\n' for h in fabric.hosts)
        sockets = {name: f"{name}.sock" for name in tenants} or {"eval": "mccs.sock"}
        tenants = "".join(f'[[tenant]]\nname = "{name}"\nsocket = "{socket}"\nmax_memory = "16GiB"\n'
                          for name, socket in sockets.items())
        started = {}
        for host in fabric.hosts:
            config = pathlib.Path(folder) / f"{host}.toml"
            config.write_text("\n".join(settings) + f'''
service.name = "{host}"
service.runtime_dir = "{folder}/{host}"
exchange.listen = "{fabric.addresses[host]}:7400"
exchange.certificate = "{folder}/{host}.crt"
exchange.key = "{folder}/{host}.key"
exchange.authority = "{folder}/authority.crt"
{hosts}
{tenants}
''')
            log = stack.enter_context(open(config.with_suffix(".log"), "w"))
            process = subprocess.Popen(fabric.command(host, [binaries / "mccs-service", "--config", config]), text=True,
                                       stdout=subprocess.PIPE, stderr=log)
            stack.callback(process.wait, timeout=60)
            stack.callback(process.terminate)
            if process.stdout.readline() != "mccs-service ready\n":
                raise bench.failure(["mccs-service"], config.with_suffix(".log").read_text())
            started[host] = process
        yield started, folder


def cpu_seconds(processes):
    def of(process):
        fields = pathlib.Path(f"/proc/{process.pid}/stat").read_text().rsplit(")", 1)[1].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    return sum(map(of, processes))


def run_ranks(fabric, placed, command, environment, timeout=300):
    """Starts a process a rank on the hosts of `placed`; returns what rank 0 printed."""
    processes = [
        subprocess.Popen(fabric.command(host, command), env={**os.environ, **environment(rank, host)}, text=True,
                         stdout=subprocess.PIPE if rank == 0 else subprocess.DEVNULL, stderr=subprocess.PIPE)
        for rank, host in enumerate(placed)
    ]
    try:
        outputs = [process.communicate(timeout=timeout) for process in processes]
    finally:
        for process in processes:
            if process.poll() is None:
                process.kill()
    for process, (_, errors) in zip(processes, outputs):
        if process.returncode != 0:
            raise bench.failure(command, errors)
    return outputs[0][0]


def perf(fabric, folder, placed, unique_id, arguments, binaries=BINARIES):
    """mccs-perf on ranks of `placed`; returns its records."""
    command = [binaries / "mccs-perf", "--json", *map(str, arguments)]
    root = placed[0] if len(set(placed)) > 1 else ""
    return bench.records(run_ranks(fabric, placed, command, lambda rank, host: {
        "MCCS_SOCKET": f"{folder}/{host}/mccs.sock", "MCCS_RANK": str(rank), "MCCS_NRANKS": str(len(placed)),
        "MCCS_UNIQUE_ID": unique_id, "MCCS_ROOT_ADDRESS": root}))


def spread(values, digits=3):
    return f"{statistics.median(values):.{digits}g} ({min(values):.{digits}g} to {max(values):.{digits}g})"
