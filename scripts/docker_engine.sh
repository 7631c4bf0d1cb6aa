#!/usr/bin/env bash
# A Docker engine for tests, on a machine without systemd: docker_engine.sh start|stop|status
#
# `start` installs Debian's docker.io and busybox-static where they are missing (root only), starts
# dockerd on a private unix socket and prints the socket's address, to be used as DOCKER_HOST.
# `status` prints the same, and fails where no engine answers. All are idempotent and may be called
# by several processes at once. Nothing of the host's network is changed: a default start would
# leave iptables chains, a FORWARD policy and ip_forward=1 behind, so all of that is turned off.
#
# AGENTRL_DOCKER_DIR: where socket, log and images are kept. Keep it short: the path of a unix
# socket is limited to 108 bytes.
set -euo pipefail

folder="${AGENTRL_DOCKER_DIR:-/run/agentrl-docker}"
address="unix://$folder/docker.sock"
start_s=60

answers() {
    [ -S "$folder/docker.sock" ] && timeout 5 /usr/bin/docker -H "$address" version >/dev/null 2>&1
}

running_pid() { # the engine's process id, if it is one of this folder's and alive
    local pid
    pid="$(cat "$folder/docker.pid" 2>/dev/null)" || return 1
    grep -qaF "$folder/docker.sock" "/proc/$pid/cmdline" 2>/dev/null && echo "$pid"
}

install_missing() {
    if [ -x /usr/sbin/dockerd ] && [ -x /usr/bin/docker ] && [ -x /usr/bin/busybox ]; then return; fi
    if [ "$(id -u)" != 0 ] || ! command -v apt-get >/dev/null; then
        echo "docker_engine: no engine here, and only root on a machine with apt-get can install" \
            "one; install docker.io and busybox-static, or set DOCKER_HOST to an engine" >&2
        exit 3
    fi
    echo "docker_engine: installing docker.io and busybox-static" >&2
    export DEBIAN_FRONTEND=noninteractive
    { apt-get update -qq &&
        apt-get -o DPkg::Lock::Timeout=300 install -y -qq --no-install-recommends \
            docker.io busybox-static; } >"$folder/install.log" 2>&1 || {
        tail -n 20 "$folder/install.log" >&2
        exit 1
    }
}

start() {
    if answers; then
        echo "$address"
        return
    fi
    install_missing
    stop # one that hangs, or what a killed one left
    # Descriptor 9 is our lock, which the engine must not hold for its life.
    setsid /usr/sbin/dockerd --data-root="$folder/data" --exec-root="$folder/exec" \
        --pidfile="$folder/docker.pid" -H "$address" \
        --bridge=none --iptables=false --ip-forward=false --ip-masq=false \
        >"$folder/dockerd.log" 2>&1 </dev/null 9>&- &
    local pid=$!
    for _ in $(seq $((start_s * 10))); do
        if answers; then
            echo "$address"
            return
        fi
        kill -0 "$pid" 2>/dev/null || break
        sleep 0.1
    done
    echo "docker_engine: dockerd did not answer on $address; the end of $folder/dockerd.log:" >&2
    tail -n 20 "$folder/dockerd.log" >&2
    exit 1
}

stop() {
    local pid
    pid="$(running_pid)" || pid=""
    if [ -n "$pid" ]; then
        kill "$pid"
        for _ in $(seq 200); do
            [ -d "/proc/$pid" ] || break
            sleep 0.1
        done
        if [ -d "/proc/$pid" ]; then kill -KILL "$pid"; fi
    fi
    rm -f "$folder/docker.pid" "$folder/docker.sock"
}

mkdir -p "$folder" 2>/dev/null || {
    echo "docker_engine: cannot create $folder; set AGENTRL_DOCKER_DIR, or DOCKER_HOST to an" \
        "engine that runs already" >&2
    exit 3
}
exec 9>"$folder/lock"
flock -w 600 9
case "${1:-}" in
start) start ;;
stop) stop ;;
status)
    if ! answers; then
        echo "docker_engine: no engine answers on $address" >&2
        exit 1
    fi
    echo "$address"
    ;;
*)
    echo "usage: docker_engine.sh start|stop|status" >&2
    exit 2
    ;;
esac
