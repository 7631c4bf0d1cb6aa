"""Whatever is wrong in a spec file is told with the line and column where it stands."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import jsonschema
import pytest
import yaml

from agentrl.errors import ToolSpecError
from agentrl.tool.binding import bind
from agentrl.tool.file_schema import spec_file_schema
from agentrl.tool.runners.base import Allow, runner_registry
from agentrl.tool.spec import load_spec, load_specs, tool_registry

ROOT = Path(__file__).parents[3]
HEAD = "name: t\ndescription: d\nparameters: {type: object, properties: {a: {type: string}}}\n"
PYTHON = HEAD + "python: ./impl.py:f\n"
HTTP = HEAD + "http:\n  url: https://x.example/{a}\n"


def told(tmp_path: Path, text: str) -> str:
    (tmp_path / "impl.py").write_text("def f(a=''): ...\ndef g(b): ...\nx = 1\n")
    path = tmp_path / "t.yaml"
    path.write_text(text)
    with pytest.raises(ToolSpecError) as caught:
        for spec in load_specs(path):
            bind(spec)
    message = str(caught.value)
    assert message.startswith(f"{path}:"), message
    return message.removeprefix(f"{path}:")


@pytest.mark.parametrize(
    ("text", "place", "what"),
    [
        (PYTHON + "limts: {}\n", "5:1", "did you mean 'limits'"),
        (PYTHON + "limits:\n  timeout_s: soon\n", "6:14", "limits.timeout_s must be a number"),
        (PYTHON + "limits: {max_calls: 010}\n", "5:21", "must be a number"),
        (PYTHON + "limits: {retries: 2}\n", "5:19", "not idempotent"),
        (PYTHON + "limits: {timeout: 2}\n", "5:10", "did you mean 'timeout_s'"),
        (PYTHON + "idempotent: yes\n", "5:13", "true or false"),
        (PYTHON + "kwargs: [1]\n", "5:9", "kwargs must be a mapping"),
        (PYTHON + "kwargs: {b: 1}\npython2: x\n", "6:1", "unknown key 'python2'"),
        (PYTHON.replace("name: t\n", ""), "1:1", "name is missing"),
        (PYTHON.replace("name: t", "name: 1"), "1:7", "name must be text, got 1"),
        (PYTHON.replace("name: t", "name: a b"), "1:7", "letters, digits"),
        (PYTHON.replace("{type: string}", "{typ: string}"), "3:44", "a: says no type"),
        (PYTHON.replace("{type: object,", "{type: obj,"), "3:20", "parameters.type"),
        (PYTHON.replace("string}}}", "string}}, required: [b]}"), "3:72", "required names 'b'"),
        (PYTHON.replace("string}}}", "text}}}"), "3:51", "parameters.properties.a.type"),
        (PYTHON.replace("./impl.py:f", "os:system"), "4:9", "not allowed"),
        (PYTHON.replace("./impl.py:f", "./impl.py:ff"), "4:9", "did you mean f"),
        (PYTHON.replace("./impl.py:f", "./impl.py:g"), "3:13", "cannot be called"),
        (PYTHON.replace("./impl.py:f", "./impl.py:x"), "4:9", "neither a function nor a class"),
        (HEAD, "1:1", "where the tool runs; add one of: http, mcp, python, server"),
        (HEAD + "pyhton: ./impl.py:f\n", "4:1", "did you mean 'python'"),
        (PYTHON + "http: {url: 'https://x.example'}\n", "5:1", "keep one of them"),
        (HEAD + "http: https://x.example\n", "4:7", "http must be a mapping"),
        (HTTP, "5:8", "must be listed under parameters.required"),
        (HTTP.replace("{a}", "{b}"), "5:8", "{b} is no parameter (a)"),
        (HTTP + "  methd: GET\n", "6:3", "did you mean 'method'"),
        (HTTP + "  method: FETCH\n", "6:11", "one of GET"),
        (HTTP + "  answer: data\n", "6:11", "no JSON pointer"),
        (HTTP + "  send: json\n", "6:9", "GET has no body"),
        (HTTP + "  headers: {X-Key: 5}\n", "6:20", "must be text"),
        (HTTP + "  headers: {X-Api-Key: abc}\n", "6:24", "write '${env:NAME}'"),
        (HTTP + "  headers: {A: '${HOME}'}\n", "6:16", "written '${env:NAME}'"),
        (HTTP + "  headers: {'A b': c}\n", "6:13", "no name of a header"),
        (HTTP + "  max_bytes: 0\n", "6:14", "at least 1"),
        ("mcp: {}\n", "1:6", "either command"),
        ("mcp: {command: [x], url: 'http://x'}\n", "1:6", "either command"),
        ("mcp: {command: [x], headers: {}}\n", "1:21", "goes with mcp.url"),
        ("mcp: {command: [x], share: never}\n", "1:28", "one of trajectory, run"),
        ("mcp: {command: [x, 1]}\n", "1:20", "must be text"),
        ("mcp: {command: [x], tool: a, prefix: b}\n", "1:21", "keep either"),
        ("mcp: {command: [x]}\nname: t\n", "2:1", "belongs to one tool"),
        ("mcp: {url: 'http://u:p@x/'}\n", "1:12", "is no host"),
        ("mcp: {url: 'ftp://x/'}\n", "1:12", "scheme"),
        ("mcp: {url: 'http://x/', headers: {Authorization: abc}}\n", "1:50", "'${env:NAME}'"),
    ],
)
def test_the_place_is_told(tmp_path: Path, text: str, place: str, what: str):
    message = told(tmp_path, text)
    assert message.startswith(f"{place}: ") and what in message


@pytest.mark.parametrize(
    ("written", "read"),
    [("no", "no"), ("on", "on"), ("1e-6", 1e-6), ("010", "010"), ("2024-01-01", "2024-01-01")]
    + [("1:30", "1:30"), ("0x1f", 31), ("~", None), ("1_000", "1_000"), ("-3", -3), ("+.5", 0.5)],
)
def test_plain_values_are_read_as_yaml_1_2_reads_them(tmp_path: Path, written: str, read: object):
    path = tmp_path / "t.yaml"
    (tmp_path / "impl.py").write_text("def f(a=''): ...")
    path.write_text(PYTHON + f"kwargs: {{a: {written}}}\n")
    value = load_spec(path).target.kwargs["a"]
    assert value == read and type(value) is type(read)


# ------------------------------------------------------------------ the published schema


def test_the_committed_schema_is_current():
    script = ROOT / "scripts" / "tool_spec_schema.py"
    done = subprocess.run([sys.executable, script, "--check"], capture_output=True, timeout=60)
    assert done.returncode == 0, done.stderr


def fits(text: str) -> bool:
    schema = json.loads((ROOT / "docs" / "tool-spec.schema.json").read_text())
    return jsonschema.Draft202012Validator(schema).is_valid(yaml.safe_load(text))


def test_every_built_in_spec_fits_the_schema():
    jsonschema.Draft202012Validator.check_schema(spec_file_schema())
    for name in tool_registry.names():
        assert fits(tool_registry.get(name).read_text()), name


@pytest.mark.parametrize(
    "text",
    [
        PYTHON,
        HTTP,
        HTTP + "  headers: {A: '${env:B}'}\nlimits: {timeout_s: 1}\n",
        "mcp: {command: [x, y], tools: [a], prefix: b, share: run}\n",
        "python: ./impl.py:f\n",
    ],
)
def test_the_schema_takes_what_the_reader_takes(text: str):
    assert fits(text)


@pytest.mark.parametrize(
    "text",
    [
        HEAD,
        PYTHON + "mcp: {command: [x]}\n",
        PYTHON + "limits: {timeout: 1}\n",
        PYTHON.replace("./impl.py:f", "impl"),
        HTTP + "kwargs: {}\n",
        HTTP + "  method: FETCH\n",
        "mcp: {}\n",
        "mcp: {command: [x], url: 'http://x'}\n",
        "mcp: {command: []}\n",
    ],
)
def test_the_schema_refuses_what_the_reader_refuses(text: str):
    assert not fits(text)


def test_every_spec_on_the_page_of_tools_fits_the_schema():
    page = (ROOT / "docs" / "tools.md").read_text()
    blocks = re.findall(r"```yaml\n(.*?)```", page, re.DOTALL)
    assert len(blocks) >= 4
    for block in blocks:
        assert fits(block), block


def test_a_key_of_a_spec_never_leads_to_an_import(tmp_path: Path):
    """The registry of runners takes import paths from packages, not from a file."""
    message = told(tmp_path, HEAD + "os:system: x\n")
    assert "unknown key 'os:system'" in message
    assert {"python", "http", "mcp", "server"} <= set(runner_registry.names())


@pytest.mark.parametrize("target", ["os:system", "importlib:import_module", "agentrl.launch:main"])
def test_code_outside_of_what_is_allowed_is_not_even_imported(tmp_path: Path, target: str):
    (tmp_path / "t.yaml").write_text(f"python: {target}\n")
    with pytest.raises(ToolSpecError, match="not allowed"):
        load_specs(tmp_path / "t.yaml", allow=Allow(imports=["o", "import", "agentrl.launcher"]))


@pytest.mark.parametrize(
    "target",
    [
        "./impl.py:os.system",
        "./impl.py:subprocess.Popen",
        "./impl.py:join",
        "agentrl_tools.http_fetch.tool:make_client",
        "agentrl_tools.http_fetch.tool:Guard",
    ],
)
def test_what_allowed_code_only_imports_is_no_way_around(tmp_path: Path, target: str):
    (tmp_path / "impl.py").write_text("import os, subprocess\nfrom os.path import join\n")
    path = tmp_path / "t.yaml"
    path.write_text(PYTHON.replace("./impl.py:f", target))
    with pytest.raises(ToolSpecError, match="not allowed"):
        bind(load_spec(path))


def test_code_may_come_from_another_file_of_the_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    (tmp_path / "helper_beside.py").write_text("def f(a=''):\n    return 'beside' + a\n")
    (tmp_path / "impl.py").write_text("from helper_beside import f\n")
    (tmp_path / "t.yaml").write_text(PYTHON)
    monkeypatch.syspath_prepend(str(tmp_path))
    assert bind(load_spec(tmp_path / "t.yaml")).make().call() == "beside"
