"""What following the sinks by their neurons adds to decoding: time a token, with and without, in turn.

python benchmarks/sink_watch_cost.py MODEL
"""

import contextlib
import statistics
import sys
import time

import torch

import sinkscope

STEPS, ROUNDS = 24, 8

loaded = sinkscope.load(sys.argv[1])
batch = sinkscope.token_batch(loaded, length=64, num_sequences=2, bos=len(sys.argv) > 2 or None)
neurons = sinkscope.sink_neurons(loaded, batch)


@torch.inference_mode()
def seconds(watched: bool) -> list[float]:
    """Of each step after the first, which reads the text."""
    ids, cache, found = batch.ids[:1, :16].to(loaded.model.device), None, []
    with sinkscope.SinkWatch(loaded, neurons) if watched else contextlib.nullcontext():
        for _ in range(STEPS):
            started = time.perf_counter()
            output = loaded.model(ids, past_key_values=cache, use_cache=True)
            ids, cache = output.logits[:, -1:].argmax(-1), output.past_key_values
            found.append(time.perf_counter() - started)
    return found[1:]


plain, watched = [], []
for _ in range(ROUNDS):
    plain += seconds(False)
    watched += seconds(True)
# The fastest tenth: other work on the machine slows the rest.
fast = [statistics.mean(sorted(times)[: len(times) // 10]) for times in (plain, watched)]
print(f"{loaded.name}: {neurons}\n{1e3 * fast[0]:.2f} ms a token; watched {fast[1] / fast[0] - 1:+.1%}")
