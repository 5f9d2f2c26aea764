#!/usr/bin/env bash
# Start the head of a Ray cluster on this machine, with a token that every node must have.
#
#     scripts/head.sh            the head only: it offers no GPUs and no cores
#     scripts/head.sh KIND       the head, which is also a node of that kind (see node.sh)
#
# Environment variables:
#     HEAD_IP     address of this machine for the other nodes          (default: detected by Ray)
#     PORT        the port of the head                                 (default: 6379)
#     RAY         the ray program                                      (default: ray)
#     TEMP_DIR    folder of Ray's logs and sockets, on all nodes       (default: /tmp/ray)
#     BLOCK=1     stay in the foreground, and stop the node when this script ends
#     NUM_GPUS, NUM_CPUS   as in node.sh
#     RAY_AUTH_TOKEN_PATH  the token file                              (default: ~/.ray/auth_token)
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
case "${1-}" in
    -h | --help) sed -n '/^set /q; 1!s/^# \{0,1\}//p' "$0"; exit ;;
esac
if [ $# -gt 1 ]; then
    echo "head.sh: expected at most one kind, not '$*': scripts/head.sh [KIND]" >&2
    exit 2
fi
if [ $# -eq 1 ] && ! [[ $1 =~ ^[a-z0-9_]+$ ]]; then
    echo "head.sh: '$1' is not a valid kind: use a word of a-z, 0-9 and _, such as train, gen or boxes" >&2
    exit 2
fi

# Without a token, anyone who can reach Ray's ports can run code.
export RAY_AUTH_MODE=token
token=${RAY_AUTH_TOKEN_PATH:-$HOME/.ray/auth_token}
if [ ! -s "$token" ]; then
    mkdir -p "$(dirname "$token")"
    (umask 077 && od -An -N32 -tx1 /dev/urandom | tr -d ' \n' > "$token")
    echo "created a token: copy $token to the same path on every node" >&2
fi

if [ $# -eq 0 ]; then
    export NUM_GPUS=0 NUM_CPUS=0
    set -- head
fi
exec env AS_HEAD=1 "$here/node.sh" "$1"
