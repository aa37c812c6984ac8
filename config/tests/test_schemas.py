"""The schemas in config/schemas beside a validator that is not ours: every example is right, and mistakes are seen. `console/tests/check` runs
it, which has Python and a validator."""

import json
import tomllib
from pathlib import Path

import pytest
from jsonschema import Draft202012Validator

ROOT = Path(__file__).resolve().parents[2]
SCHEMAS = {path.stem: json.loads(path.read_text()) for path in (ROOT / "config/schemas").glob("*.json")}


def examples():
    """Files of the repository, each with the schema that its name begins with."""
    for path in sorted([*(ROOT / "config/examples").glob("*.toml"), *(ROOT / "packaging").glob("*.toml"), *(ROOT / "eval/jobs").glob("*.toml")]):
        kind = "job" if path.parent.name == "jobs" or path.name == "first.toml" else path.stem.split("-")[0]
        yield pytest.param(kind, path, id=str(path.relative_to(ROOT)))


def mistakes(kind, text):
    validator = Draft202012Validator(SCHEMAS[kind])
    return [f"{error.json_path}: {error.message}" for error in validator.iter_errors(tomllib.loads(text))]


@pytest.mark.parametrize("name", SCHEMAS)
def test_a_schema_is_one(name):
    Draft202012Validator.check_schema(SCHEMAS[name])
    assert SCHEMAS[name]["title"] == f"{name}.toml"


@pytest.mark.parametrize("kind, path", examples())
def test_examples_are_right(kind, path):
    assert mistakes(kind, path.read_text()) == []


@pytest.mark.parametrize("kind, text, place", [
    ("service", "[servise]\n", "servise"),
    ("service", '[limits]\ninit_timeout = "10"\n', "$.limits.init_timeout"),
    ("service", "[limits]\ninit_timeout = 10\n", "$.limits.init_timeout"),
    ("service", '[limits]\nmin_free_memory = "4MB"\n', "$.limits.min_free_memory"),
    ("service", "[limits]\ncommand_ring = -1\n", "$.limits.command_ring"),
    ("service", '[cuda]\nuse = "perhaps"\n', "$.cuda.use"),
    ("service", '[cuda]\nlarge_from = "often"\n', "$.cuda.large_from"),
    ("service", '[tcp]\nsource_ports = "20000"\n', "source_ports"),
    ("service", '[[tenant]]\nsocket = "a.sock"\n', "name"),
    ("service", '[[host]]\nname = "a"\naddress = "host-a"\n', "$.host[0].address"),
    ("service", "[tenant]\nname = 'a'\n", "$.tenant"),
    ("policy", "", "policy"),
    ("policy", '[policy]\nname = "ffa"\n[[tenant]]\nname = "a"\ncap = "10GB"\n', "$.tenant[0].cap"),
    ("policy", '[policy]\nname = "ffa"\nchannels = "some"\n', "$.policy.channels"),
    ("topology", "[rates]\n", "host_leaf"),
    ("job", '[[job]]\nname = "a"\n', "command"),
    ("job", '[[job]]\nname = "a"\ncommand = ["x"]\nplacement = "anywhere"\n', "$.job[0].placement"),
    ("slurm", "[default]\nwieght = 2\n", "wieght"),
    ("slurm", 'without_service = "ignore"\n', "$.without_service"),
    ("kubernetes", "[tenant.a]\nslots = '8'\n", "$.tenant.a.slots"),
    ("console", '[console]\nlisten = "localhost"\n', "$.console.listen"),
    ("change", "rings = [0, 1]\n", "$.rings[0]"),
    ("tenant", "weight = 2\n", "name"),
])
def test_mistakes_are_seen(kind, text, place):
    found = mistakes(kind, text)
    assert found and any(place in one for one in found), found


@pytest.mark.parametrize("key, right, wrong", [
    ("init_timeout", ["0", "100us", "50ms", " 90s ", "1h", "2 m"], ["", "50", "1.5s", "-1s", "1d", "1S"]),
    ("min_free_memory", ["0", "512", "64KiB", " 4 MiB ", "1TiB"], ["", "MiB", "-1", "1.5GiB", "4MB", "4mib"]),
])
def test_forms_of_values_are_those_of_the_reader(key, right, wrong):
    """As config/src/units.rs reads them."""
    for value in right:
        assert mistakes("service", f'[limits]\n{key} = "{value}"\n') == [], value
    for value in wrong:
        assert mistakes("service", f'[limits]\n{key} = "{value}"\n'), value
