"""A headless Chromium, driven over the DevTools protocol."""

import base64
import contextlib
import itertools
import json
import os
import re
import shutil
import signal
import subprocess
import tempfile
import time
from pathlib import Path

from websockets.sync.client import connect

# Never decides about speed: what hangs ends the tests.
HANGS_AFTER_S = 120

KEYS = {"Enter": 13, "Tab": 9, "Escape": 27, "ArrowDown": 40, "ArrowUp": 38, "PageDown": 34, "End": 35, "Home": 36}


class Browser:
    """A page of its own, and what it has said. Ends with `close`."""

    def __init__(self, width=1280, height=800, options=()):
        self.folder = tempfile.mkdtemp()
        # Chromium's own sandbox needs what containers lack; it loads nothing but the console.
        command = ["chromium-headless-shell", "--no-sandbox", "--disable-gpu", "--remote-debugging-port=0",
                   f"--user-data-dir={self.folder}", *options, "about:blank"]
        # Debian's program is a script, which has the browser as its child.
        self.process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, start_new_session=True)
        lines = iter(self.process.stderr.readline, "")
        address = next(found.group(1) for line in lines if (found := re.search(r"listening on (ws://\S+)", line)))
        self.open = contextlib.ExitStack()
        self.socket = self.open.enter_context(connect(address, max_size=None, open_timeout=HANGS_AFTER_S))
        self.numbers = itertools.count(1)
        self.events = []
        self.session = None
        target = self.call("Target.createTarget", url="about:blank", width=width, height=height)["targetId"]
        self.session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network", "Accessibility"):
            self.call(f"{domain}.enable")
        self.size(width, height)

    def call(self, method, **parameters):
        number = next(self.numbers)
        message = {"id": number, "method": method, "params": parameters}
        if self.session:
            message["sessionId"] = self.session
        self.socket.send(json.dumps(message))
        while True:
            told = json.loads(self.socket.recv(timeout=HANGS_AFTER_S))
            if told.get("id") != number:
                self.events.append(told)
                continue
            assert "error" not in told, f"{method}: {told['error']}"
            return told["result"]

    def evaluate(self, expression):
        """The value of an expression in the page; a promise's once it has one."""
        told = self.call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in told, told["exceptionDetails"]
        return told["result"].get("value")

    def until(self, expression):
        """Waits until an expression is true."""
        began = time.monotonic()
        while not self.evaluate(f"Boolean({expression})"):
            assert time.monotonic() - began < HANGS_AFTER_S, f"never: {expression}\n{self.text()}"
            time.sleep(0.02)

    def go(self, address):
        self.call("Page.navigate", url=address)
        self.until("document.readyState === 'complete'")

    def size(self, width, height):
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False)

    def prefer(self, **features):
        """Media features, such as color_scheme='dark'."""
        listed = [{"name": f"prefers-{name.replace('_', '-')}", "value": value} for name, value in features.items()]
        self.call("Emulation.setEmulatedMedia", features=listed)

    def press(self, key):
        code = KEYS.get(key, 0)
        for kind in ("keyDown", "keyUp"):
            text = {"text": "\r"} if key == "Enter" and kind == "keyDown" else {}
            self.call("Input.dispatchKeyEvent", type=kind, key=key, code=key, windowsVirtualKeyCode=code, **text)

    def type(self, text):
        self.call("Input.insertText", text=text)

    def text(self):
        return self.evaluate("document.body.innerText")

    def shoot(self, path):
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        Path(path).write_bytes(base64.b64decode(self.call("Page.captureScreenshot", format="png")["data"]))

    def names(self):
        """Role and name of each element, as assistive technology is told."""
        nodes = self.call("Accessibility.getFullAXTree")["nodes"]
        value = lambda node, key: node.get(key, {}).get("value", "")
        return [(value(node, "role"), value(node, "name")) for node in nodes if not node.get("ignored")]

    def complaints(self):
        """Errors of the page: on the console, exceptions, and requests to elsewhere, which the browser has refused."""
        self.evaluate("1")
        found = []
        for event in self.events:
            method, told = event.get("method"), event.get("params", {})
            if method == "Runtime.exceptionThrown":
                found.append(told["exceptionDetails"])
            if method == "Runtime.consoleAPICalled" and told["type"] in ("error", "warning", "assert"):
                found.append(told)
            if method == "Log.entryAdded" and told["entry"]["level"] == "error":
                found.append(told["entry"])
        return found

    def requested(self):
        return [event["params"]["request"]["url"] for event in self.events if event.get("method") == "Network.requestWillBeSent"]

    def close(self):
        self.open.close()
        os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        self.process.stderr.close()
        # Processes that write there end a moment later.
        shutil.rmtree(self.folder, ignore_errors=True)
