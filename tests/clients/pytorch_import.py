#!/usr/bin/env python3
"""PyTorch is imported with this library in the place of its own NCCL. Needs no GPU.

usage: pytorch_import.py, with MCCS_LIBRARY naming our libnccl.so.2

The loader binds every function at once, and tells where to. Each function of NCCL's that PyTorch imports has to come from this library.
A call has to arrive there, too."""

import os
import pathlib
import re
import subprocess
import sys
import tempfile

PROGRAM = """
import ctypes, torch
version = ctypes.c_int()
assert ctypes.CDLL(None).ncclGetVersion(ctypes.byref(version)) == 0
print("PyTorch", torch.__version__, "built for NCCL", torch.cuda.nccl.version(), "runs on", version.value)
try:
    torch.cuda.nccl.unique_id()
    print("a unique id")
except RuntimeError as error:
    print("no unique id:", error)
"""
BINDING = re.compile(r"binding file (\S*/libtorch\S*) .* to (\S+) .*symbol `(p?nccl[A-Z]\w*)'")
WATCHDOG_S = 600


def main():
    library = os.path.abspath(os.environ["MCCS_LIBRARY"])
    with tempfile.TemporaryDirectory() as folder:
        # No service: the call's error says whose it is.
        environment = {**os.environ, "LD_PRELOAD": library, "LD_BIND_NOW": "1", "LD_DEBUG": "bindings", "NCCL_DEBUG": "WARN",
                       "LD_DEBUG_OUTPUT": f"{folder}/bindings", "MCCS_SOCKET": f"{folder}/none"}
        done = subprocess.run([sys.executable, "-W", "ignore", "-c", PROGRAM], env=environment, capture_output=True, text=True,
                              timeout=WATCHDOG_S)
        bindings = [found.groups() for file in pathlib.Path(folder).glob("bindings.*") for line in file.open(errors="replace")
                    if (found := BINDING.search(line))]
    print(done.stdout, end="")
    if done.returncode != 0:
        sys.exit(f"PyTorch is not imported:\n{done.stderr}")
    elsewhere = sorted({f"{name} of {where}" for _, where, name in bindings if where != library})
    if elsewhere or not bindings:
        sys.exit(f"bound elsewhere: {', '.join(elsewhere)}" if elsewhere else "PyTorch binds no function of NCCL's")
    if "mccs" not in done.stdout.partition("NCCL WARN")[2]:
        sys.exit("ncclGetUniqueId did not arrive here")
    print(f"{len({name for _, _, name in bindings})} functions, all of this library's")


if __name__ == "__main__":
    main()
