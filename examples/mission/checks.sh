# Sourced by setup, engines and nodes: what each needs is said in a line, before anything starts.

refuse() {
    echo "examples/mission/$(basename "$0"): $*" >&2
    exit 1
}

# needs_python PYTHON HOW_TO_NAME_ANOTHER: it is there, and has rollart.
needs_python() {
    type -P "$1" > /dev/null || refuse "there is no Python $1: \`make setup\` makes .venv/bin/python; $2"
    # Not from here, where the folder rollart_core lies.
    local found
    found=$(type -P "$1")
    found=$(cd "$(dirname "$found")" && pwd)/$(basename "$found")
    (cd / && "$found" -c 'import rollart_core') 2> /dev/null ||
        refuse "$1 cannot import rollart_core: $1 -m pip install -e '.[train,ray,sglang,serverless,lambda,registry]'; $2"
}

# needs_command COMMAND...: it is said, and is there.
needs_command() {
    [[ $# -gt 0 ]] || refuse "say which command: examples/mission/$(basename "$0") COMMAND..."
    type -P "$1" > /dev/null || refuse "there is no program $1 to run"
}
