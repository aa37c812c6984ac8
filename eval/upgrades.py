#!/usr/bin/env python3
"""Upgrades of a service under load: how long nobody is served, and how long calls stand. First
every element of every result is checked. Then gaps between completions are taken, around an
upgrade and without one in turn.

usage: upgrades.py NAME [--ranks 2,4] [--bytes 8,65536,8388608] [--checked 200] [--measured 200] [--pause-us 0]

Build first: cargo build --release --workspace. Writes eval/results/NAME.json (data and provenance) and NAME.md."""

import argparse
import contextlib
import os
import pathlib
import signal
import subprocess
import tempfile
import time

import bench


@contextlib.contextmanager
def service():
    """A service whose process changes with each upgrade; gives its folder. Ends whichever is the service last."""
    with tempfile.TemporaryDirectory() as folder:
        config = pathlib.Path(folder) / "service.toml"
        config.write_text(f'[service]\nruntime_dir = "{folder}"\n[cuda]\nuse = "off"\n')
        first = subprocess.Popen([bench.BINARIES / "mccs-service", "--config", config], stdout=subprocess.PIPE,
                                 stderr=subprocess.DEVNULL, text=True)
        try:
            if first.stdout.readline() != "mccs-service ready\n":
                raise RuntimeError("mccs-service did not start")
            yield pathlib.Path(folder)
        finally:
            for process in pathlib.Path("/proc").glob("[0-9]*"):
                with contextlib.suppress(OSError):
                    if str(config).encode() in (process / "cmdline").read_bytes().split(b"\0"):
                        os.kill(int(process.name), signal.SIGTERM)
            first.wait(timeout=60)
            while (pathlib.Path(folder) / "mccs.sock").exists():
                time.sleep(0.01)


def run(ranks, bytes, upgrades, pause_us, check):
    with service() as folder:
        command = [bench.BINARIES / "mccs-upgrades", "--socket", folder / "mccs.sock", "--control-socket",
                   folder / "mccs-control.sock", "--ranks", ranks, "--bytes", bytes, "--upgrades", upgrades, "--pause-us", pause_us,
                   *(["--check"] if check else [])]
        return bench.records(bench.run([str(word) for word in command], timeout=3600))[0]


def main():
    numbers = lambda text: [int(number) for number in text.split(",")]
    parser = argparse.ArgumentParser()
    parser.add_argument("name")
    parser.add_argument("--ranks", type=numbers, default=[2, 4])
    parser.add_argument("--bytes", type=numbers, default=[8, 65536, 8 << 20])
    parser.add_argument("--checked", type=int, default=200)
    parser.add_argument("--measured", type=int, default=200)
    parser.add_argument("--pause-us", type=int, default=0)
    options = parser.parse_args()
    cases = [(ranks, bytes) for ranks in options.ranks for bytes in options.bytes]
    checked = [run(ranks, bytes, options.checked, options.pause_us, True) for ranks, bytes in cases]
    measured = [run(ranks, bytes, options.measured, options.pause_us, False) for ranks, bytes in cases]
    ms = lambda record, name: f"{record[name] / 1e3:.2f}"
    rows = [[one["nranks"], one["bytes"], one["upgrades"], one["calls"],
             *(ms(one, f"{what}_{q}_us") for what in ("gap", "longest", "quiet") for q in ("p50", "p99"))] for one in measured]
    heads = ["ranks", "bytes", "upgrades", "calls", "not served, ms, p50", "p99", "longest gap between calls, with an upgrade, ms, p50",
             "p99", "without, ms, p50", "p99"]
    upgrades, calls = (sum(one[name] for one in checked) for name in ("upgrades", "calls"))
    pause = f" Ranks pause {options.pause_us} us between calls." if options.pause_us else ""
    text = (f"Upgrades of a service under all-reduces, each rank in a session of its own.{pause}\n\n{bench.table(heads, rows)}\n"
            f"Checked: {calls} calls over {upgrades} upgrades, every element of every rank. No call failed.\n")
    bench.write_results(options.name, {**bench.provenance(), "checked": checked, "measured": measured}, text)
    print(text)


if __name__ == "__main__":
    main()
