#!/usr/bin/env bash
# Start a node of a Ray cluster on this machine, and label it with a KIND.
#
#     HEAD=10.0.0.1:6379 scripts/node.sh KIND
#
# The pools of a run refer to kinds. `resources: {GPU: 1, train: 1}` is one GPU of a node that was started with
# `node.sh train`. `resources: {boxes: 1}` is one core of a node without GPUs that was started with
# `node.sh boxes`. The number of a node's kind resource is its number of GPUs, or of cores if it has no GPU.
#
# Environment variables, besides HEAD:
#     NUM_GPUS    GPUs to offer       (default: as listed by nvidia-smi)
#     NUM_CPUS    cores to offer      (default: all)
#     NODE_IP     address of this machine for the other nodes           (default: detected by Ray)
#     RAY         the ray program                                       (default: ray)
#     BLOCK=1     stay in the foreground, and stop the node when this script ends
#     RAY_AUTH_TOKEN_PATH  the token file, as on the head               (default: ~/.ray/auth_token)
set -euo pipefail
case "${1-}" in
    -h | --help) sed -n '/^set /q; 1!s/^# \{0,1\}//p' "$0"; exit ;;
esac
if [ $# -ne 1 ] || ! [[ $1 =~ ^[a-z0-9_]+$ ]]; then
    echo "node.sh: give one kind of node, a word of a-z, 0-9 and _: HEAD=10.0.0.1:6379 scripts/node.sh KIND," \
        "such as train, gen or boxes${1:+; not '$*'}" >&2
    exit 2
fi
kind=$1

export RAY_AUTH_MODE=token
token=${RAY_AUTH_TOKEN_PATH:-$HOME/.ray/auth_token}
if [ ! -s "$token" ]; then
    echo "node.sh: there is no token at $token: copy the token file of the head to this path" >&2
    exit 1
fi
# A run waits for its actors, so they must not have a lower priority than other processes.
export RAY_worker_niceness="${RAY_worker_niceness:-0}"

gpus=${NUM_GPUS:-$( (nvidia-smi -L 2>/dev/null || true) | wc -l)}
cpus=${NUM_CPUS:-$(nproc)}
if [ "$gpus" -gt 0 ]; then marks=$gpus; else marks=$cpus; fi

args=(--num-gpus="$gpus" --num-cpus="$cpus" --disable-usage-stats)
if [ "$marks" -gt 0 ]; then args+=(--resources="{\"$kind\": $marks}"); fi
if [ "${BLOCK:-}" = 1 ]; then args+=(--block); fi
if [ "${AS_HEAD:-}" = 1 ]; then
    args+=(--head --port="${PORT:-6379}" --include-dashboard=false)
    if [ -n "${TEMP_DIR:-}" ]; then args+=(--temp-dir="$TEMP_DIR"); fi
    if [ -n "${HEAD_IP:-}" ]; then args+=(--node-ip-address="$HEAD_IP"); fi
else
    args+=(--address="${HEAD:?the address of the head: HEAD=10.0.0.1:6379 scripts/node.sh $kind}")
    if [ -n "${NODE_IP:-}" ]; then args+=(--node-ip-address="$NODE_IP"); fi
fi
if [ "${BLOCK:-}" = 1 ]; then exec "${RAY:-ray}" start "${args[@]}"; fi
"${RAY:-ray}" start "${args[@]}"

# The next steps that Ray prints do not include the token and the kind.
echo
if [ "${AS_HEAD:-}" = 1 ]; then
    echo "Next, with RollArt:"
    if [ -z "${HEAD_IP:-}" ]; then echo "  (IP is the \"Local node IP\" above)"; fi
    echo "  on each other machine, after copying $token to it:"
    echo "    HEAD=${HEAD_IP:-IP}:${PORT:-6379} scripts/node.sh KIND        # such as train, gen or boxes"
    echo "  on the machine that starts runs, which needs the token too:"
    echo "    RAY_AUTH_MODE=token rollart run CONFIG runtime.address=${HEAD_IP:-IP}:${PORT:-6379}"
else
    echo "This machine is a node of kind $kind. To list all nodes: RAY_AUTH_MODE=token ray status"
fi
