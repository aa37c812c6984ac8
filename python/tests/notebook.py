#!/usr/bin/env python3
"""Runs the code cells of notebooks, one after the other. As a program it keeps what they print and return: `notebook.py FILE...`."""

from __future__ import annotations

import ast
import contextlib
import io
import json
import sys
from pathlib import Path
from typing import Any


def code_cells(content: dict[str, Any]) -> list[dict[str, Any]]:
    return [cell for cell in content["cells"] if cell["cell_type"] == "code"]


def outcome(code: str, names: dict[str, Any]) -> tuple[str, Any]:
    """Output of a cell, and the value of its last expression."""
    tree = ast.parse(code)
    last = tree.body.pop() if tree.body and isinstance(tree.body[-1], ast.Expr) else None
    printed, value = io.StringIO(), None
    with contextlib.redirect_stdout(printed):
        exec(compile(tree, "a cell", "exec"), names)
        if isinstance(last, ast.Expr):
            value = eval(compile(ast.Expression(last.value), "a cell", "eval"), names)
    return printed.getvalue(), value


def outputs(content: dict[str, Any]) -> list[list[dict[str, Any]]]:
    """The outputs of all code cells, as a notebook keeps them."""
    names: dict[str, Any] = {"__name__": "__main__"}
    every = []
    for number, cell in enumerate(code_cells(content), 1):
        printed, value = outcome("".join(cell["source"]), names)
        kept: list[dict[str, Any]] = []
        if printed:
            kept.append({"name": "stdout", "output_type": "stream", "text": printed.splitlines(keepends=True)})
        if value is not None:
            data = {"text/plain": repr(value).splitlines(keepends=True)}
            kept.append({"data": data, "execution_count": number, "metadata": {}, "output_type": "execute_result"})
        every.append(kept)
    return every


def main() -> None:
    for name in sys.argv[1:]:
        content = json.loads(Path(name).read_text())
        for number, (cell, kept) in enumerate(zip(code_cells(content), outputs(content)), 1):
            cell["outputs"], cell["execution_count"] = kept, number
        Path(name).write_text(json.dumps(content, indent=1, ensure_ascii=False) + "\n")


if __name__ == "__main__":
    main()
