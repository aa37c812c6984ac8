#!/usr/bin/env python3
"""CPU time of an idle service, while ten sessions, each with a communicator and a stream, do
nothing.

usage: idle.py NAME [--sessions N] [--seconds N]

Build first: cargo build --release --workspace. Writes
eval/results/NAME.json (data and provenance) and NAME.md; fails if the service takes 0.1% of a core or more."""

import argparse
import contextlib
import os
import pathlib
import subprocess
import sys
import time

import bench

PERCENT_ALLOWED = 0.1
SETTLE_SECONDS = 1


class CpuTime:
    """Processor time of a process so far."""

    def __init__(self, pid):
        self.at_ns = time.monotonic_ns()
        self.by_thread_ns, self.wakeups, self.names = {}, {}, {}
        for task in pathlib.Path(f"/proc/{pid}/task").iterdir():
            used_ns, _waited_ns, times_run = map(int, (task / "schedstat").read_text().split())
            thread = int(task.name)
            self.by_thread_ns[thread], self.wakeups[thread] = used_ns, times_run
            self.names[thread] = (task / "comm").read_text().strip()
        # After the process' name, which may contain anything: state is field 3 of the whole, utime
        # and stime 14 and 15.
        fields = pathlib.Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
        self.ticks = int(fields[11]) + int(fields[12])


def difference(before, after):
    if before.by_thread_ns.keys() != after.by_thread_ns.keys():
        raise RuntimeError("the service began or ended threads meanwhile")
    cpu_ns = sum(after.by_thread_ns.values()) - sum(before.by_thread_ns.values())
    elapsed_ns = after.at_ns - before.at_ns
    threads = [{"name": after.names[thread], "cpu_ns": after.by_thread_ns[thread] - before.by_thread_ns[thread],
                "times_run": after.wakeups[thread] - before.wakeups[thread]} for thread in sorted(after.names)]
    return {"elapsed_ns": elapsed_ns, "cpu_ns": cpu_ns, "percent_of_a_core": 100 * cpu_ns / elapsed_ns,
            "cpu_ticks": after.ticks - before.ticks, "ticks_per_s": os.sysconf("SC_CLK_TCK"), "threads": threads}


@contextlib.contextmanager
def idle_sessions(socket, count):
    program = bench.BINARIES / "mccs-idle"
    sessions = [subprocess.Popen([program], env={**os.environ, "MCCS_SOCKET": str(socket)}, text=True,
                                 stdin=subprocess.PIPE, stdout=subprocess.PIPE) for _ in range(count)]
    try:
        for session in sessions:
            if session.stdout.readline() != "idle\n":
                raise RuntimeError("a session did not come up")
        yield
        for session in sessions:
            if session.poll() is not None:
                raise RuntimeError("a session ended meanwhile")
    finally:
        for session in sessions:
            session.stdin.close()
            session.wait(timeout=60)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("name")
    parser.add_argument("--sessions", type=int, default=10)
    parser.add_argument("--seconds", type=float, default=10)
    options = parser.parse_args()
    with bench.service() as (service, folder), idle_sessions(folder / "mccs.sock", options.sessions):
        time.sleep(SETTLE_SECONDS)
        before = CpuTime(service.pid)
        time.sleep(options.seconds)
        used = difference(before, CpuTime(service.pid))
    percent = used["percent_of_a_core"]
    good = percent < PERCENT_ALLOWED
    text = (
        f"CPU time of the service while {options.sessions} sessions, each with a communicator and a stream, do nothing for "
        f"{used['elapsed_ns'] / 1e9:.1f} s:\n{used['cpu_ns']} ns by the scheduler's account, {used['cpu_ticks']} ticks of "
        f"1/{used['ticks_per_s']} s by the process': {percent:.4f}% of a core\n"
        f"({'less' if good else 'NOT less'} than the {PERCENT_ALLOWED}% that are allowed).\n\n"
        + bench.table(["thread", "CPU time, ns", "times run"],
                      [[thread["name"], thread["cpu_ns"], thread["times_run"]] for thread in used["threads"]]))
    data = {"provenance": bench.provenance(), "sessions": options.sessions, "allowed_percent": PERCENT_ALLOWED, **used}
    bench.write_results(options.name, data, text)
    print(text)
    sys.exit(0 if good else 1)


if __name__ == "__main__":
    main()
