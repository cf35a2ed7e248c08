"""Serves a GGUF file with OpenAI's interface on loopback: ``python scripts/judge_server.py FILE``.

Prints its address and serves until its input is closed. Needs ``xllamacpp`` (the ``test`` extra).
"""

import sys

import xllamacpp

SLOTS = 4
"""Requests answered at a time, each with a context of 4,096 tokens."""

if __name__ == "__main__":
    settings = xllamacpp.CommonParams()
    settings.model.path = sys.argv[1]
    settings.port, settings.n_parallel, settings.n_ctx = 0, SLOTS, SLOTS * 4096  # a free port
    # Two threads only wait for each other where other work goes on.
    settings.cpuparams.n_threads = settings.cpuparams_batch.n_threads = 1
    settings.n_gpu_layers = 0
    server = xllamacpp.Server(settings)
    print(server.listening_address, flush=True)
    sys.stdin.read()
