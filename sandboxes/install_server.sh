#!/bin/sh
# Puts into an image what the servers need and the base image lacks: bubblewrap, the packages of
# requirements-server.txt, and agentrl itself without its other dependencies.
set -eu
cd "$(dirname "$0")"

if ! command -v bwrap >/dev/null; then
    apt-get update -qq
    apt-get install -y -qq --no-install-recommends bubblewrap
    rm -rf /var/lib/apt/lists/*
fi
if ! python3 -c 'import fastapi, uvicorn, httpx_aiohttp, jsonschema, mcp, numpy, regex, yaml' 2>/dev/null; then
    python3 -m pip install --no-cache-dir -r requirements-server.txt
fi
if ! python3 -c 'from importlib.metadata import version; version("agentrl")' 2>/dev/null; then
    python3 -m pip install --no-cache-dir --no-deps ..
fi
python3 check_server.py
