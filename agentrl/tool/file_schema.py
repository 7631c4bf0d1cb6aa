"""The JSON Schema of a spec file, for editors and for whoever writes specs by program.

Made of what the runners say of themselves, so that it cannot fall behind them.
"""

from __future__ import annotations

from dataclasses import fields
from typing import Any

from agentrl.tool.runners.base import runner_registry
from agentrl.tool.spec import LIMIT_RANGES, ToolLimits, make_runner

_LIMITS: dict[str, dict[str, Any]] = {
    "timeout_s": {"type": "number", "description": "Seconds of one call."},
    "max_calls": {"type": "integer", "description": "Calls of a trajectory."},
    "concurrency": {
        "type": "integer",
        "description": "Calls at once, over all trajectories of a process.",
    },
    "retries": {
        "type": "integer",
        "description": "Further attempts after a failure of ours; needs idempotent: true.",
    },
    "max_output_tokens": {
        "type": "integer",
        "description": "Tokens of an answer; a longer one is cut, and says by how much.",
    },
}


def spec_file_schema() -> dict[str, Any]:
    """Return the JSON Schema (draft 2020-12) that every spec file fits."""
    limits: dict[str, dict[str, Any]] = {}
    for f in fields(ToolLimits):
        least, most = LIMIT_RANGES[f.name]
        limits[f.name] = {
            **_LIMITS[f.name],
            "minimum": least,
            "maximum": most,
            "default": f.default,
        }
    properties: dict[str, Any] = {
        "name": {
            "type": "string",
            "pattern": "^[A-Za-z_][A-Za-z0-9_-]{0,63}$",
            "description": "What the model calls the tool by.",
        },
        "description": {
            "type": "string",
            "minLength": 1,
            "description": "What the model reads of it.",
        },
        "parameters": {
            "type": "object",
            "properties": {"type": {"const": "object"}},
            "required": ["type"],
            "description": "JSON Schema of the arguments.",
        },
        "idempotent": {
            "type": "boolean",
            "default": False,
            "description": "Calling twice does no harm: may be retried.",
        },
        "limits": {"type": "object", "additionalProperties": False, "properties": limits},
    }
    beside: dict[str, list[str]] = {}
    for key in sorted(runner_registry.names()):
        runner = make_runner(key)
        properties[key] = dict(runner.schema)
        for other, schema in runner.beside.items():
            properties[other] = dict(schema)
            beside[other] = [key]
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "agentrl tool spec",
        "description": "A tool that a model may call, or all tools of a server.",
        "type": "object",
        "additionalProperties": False,
        "properties": properties,
        "oneOf": [{"required": [key]} for key in sorted(runner_registry.names())],
        "dependentRequired": beside,
    }
