#!/usr/bin/env python3
"""PyTorch's own tests of its NCCL back end, as they come in its package, on mccs. A test that
fails is run again on NCCL: it counts as a difference where it passes there. Fails unless every
difference is one of those documented below.

usage: pytorch_own.py NRANKS [PATTERN] [--seconds N], with MCCS_LIBRARY naming our libnccl.so.2 and MCCS_SOCKET the service. PATTERN is
a regular expression of tests' names (default: whatever uses the back end). A test for every four cores runs at a time. Each result is
printed when it comes. No test begins N seconds after the start; the last line counts those that did not."""

import argparse
import concurrent.futures
import os
import pathlib
import re
import subprocess
import sys
import tempfile
import time

USES_NCCL = (r"cuda|nccl|subgroups|object|DistributedDataParallel|ddp_(comm_hook|join|uneven|grad_div|broadcast|control_flow|"
             r"namedtuple|static|hook_parity|sync)|sync_bn|sync_params")
AT_ONCE = max(1, (os.cpu_count() or 4) // 4)
# A test that hangs is a failure.
WATCHDOG_S = 240
# Test: why it passes on NCCL alone.
DIFFERENCES = {}

ONE_TEST = """
import sys
from torch.testing._internal.distributed.distributed_test import DistributedTest, TestDistBackend

class OwnTest(TestDistBackend, DistributedTest._DistTestBase):
    def setUp(self):
        super().setUp()
        self._spawn_processes()

if __name__ == "__main__":
    import unittest
    if sys.argv[1] == "--names":
        print("\\n".join(unittest.TestLoader().getTestCaseNames(OwnTest)))
    else:
        result = unittest.TextTestRunner().run(OwnTest(sys.argv[1]))
        sys.exit(0 if result.wasSuccessful() and not result.skipped else 5 if result.skipped else 1)
"""
SKIPPED, NOT_BEGUN = 5, None
STATES = {0: "passed", SKIPPED: "skips itself"}


def run(arguments, nranks, folder, on_mccs):
    """Runs the program above in a folder of its own. Returns its exit status and output."""
    with tempfile.TemporaryDirectory(dir=folder) as work:
        program = pathlib.Path(work, "own_test.py")
        program.write_text(ONE_TEST)
        environment = {**os.environ, "BACKEND": "nccl", "WORLD_SIZE": str(nranks), "TEMP_DIR": work, "TMPDIR": work}
        for name in ("barrier", "test_dir", "init_dir"):
            pathlib.Path(work, name).mkdir()
        if on_mccs:
            environment["LD_PRELOAD"] = os.environ["MCCS_LIBRARY"]
        process = subprocess.Popen([sys.executable, program, *arguments], env=environment, text=True, start_new_session=True,
                                   stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
        try:
            return process.communicate(timeout=WATCHDOG_S)[0], process.returncode
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, 9)
            return process.communicate()[0] + f"\nno end in {WATCHDOG_S} s", -9


def run_by(end, *arguments):
    """As `run`, if there is time left to begin."""
    return run(*arguments) if time.monotonic() < end else ("", NOT_BEGUN)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("nranks", type=int)
    parser.add_argument("pattern", nargs="?", default=USES_NCCL)
    parser.add_argument("--seconds", type=float, default=float("inf"), help="no test begins so long after the start")
    options = parser.parse_args()
    nranks, pattern, end = options.nranks, re.compile(options.pattern), time.monotonic() + options.seconds
    with tempfile.TemporaryDirectory() as folder:
        listed, status = run(["--names"], nranks, folder, False)
        names = [name for name in listed.split() if name.startswith("test_") and pattern.search(name) and not name.endswith("_cpu")]
        if status or not names:
            raise SystemExit(f"PyTorch's tests cannot be listed:\n{listed[-2000:]}")
        found = {}
        with concurrent.futures.ThreadPoolExecutor(AT_ONCE) as pool:
            running = {pool.submit(run_by, end, [name], nranks, folder, True): name for name in names}
            for done in concurrent.futures.as_completed(running):
                name = running[done]
                found[name] = done.result()
                if found[name][1] != NOT_BEGUN:
                    print(f"{len(found)} of {len(names)}: {name}: {STATES.get(found[name][1], 'failed')}", flush=True)
            passed = [name for name in names if found[name][1] == 0]
            skipped = [name for name in names if found[name][1] == SKIPPED]
            not_begun = [name for name in names if found[name][1] == NOT_BEGUN]
            failed = [name for name in names if found[name][1] not in (0, SKIPPED, NOT_BEGUN)]
            on_nccl = pool.map(lambda name: run([name], nranks, folder, False)[1], failed)
            differing = [name for name, status in zip(failed, on_nccl) if status == 0]
    for name in differing:
        print(f"-- {name} passes on NCCL; on mccs:\n{found[name][0][-3000:]}")
    unknown = sorted(set(differing) - set(DIFFERENCES))
    counts = f"{len(passed)} of PyTorch's own tests pass, {len(failed) - len(differing)} fail on NCCL too, {len(differing)} differ"
    if unknown:
        raise SystemExit(f"{counts}, without a documented reason: {' '.join(unknown)}")
    if not passed:
        raise SystemExit(f"{counts}: none ran")
    not_run = f"; {len(not_begun)} were not begun in {options.seconds:.0f} s" if not_begun else ""
    print(f"{counts}; {len(skipped)} skip themselves{not_run}")


if __name__ == "__main__":
    main()
