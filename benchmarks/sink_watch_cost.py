"""What following the sinks by their neurons adds to decoding: seconds a token, with and without, in turn.

python benchmarks/sink_watch_cost.py MODEL
"""

import contextlib
import statistics
import sys
import time

import torch

import sinkscope

STEPS, ROUNDS = 24, 7

loaded = sinkscope.load(sys.argv[1])
batch = sinkscope.token_batch(loaded, length=64, num_sequences=2, bos=len(sys.argv) > 2 or None)
neurons = sinkscope.sink_neurons(loaded, batch)


@torch.inference_mode()
def seconds(watched: bool) -> float:
    watch = sinkscope.SinkWatch(loaded, neurons) if watched else contextlib.nullcontext()
    ids, cache, started = batch.ids[:1, :16].to(loaded.model.device), None, 0.0
    with watch:
        for step in range(STEPS):
            started = time.perf_counter() if step <= 1 else started  # the first call reads the text
            output = loaded.model(ids, past_key_values=cache, use_cache=True)
            ids, cache = output.logits[:, -1:].argmax(-1), output.past_key_values
    return (time.perf_counter() - started) / (STEPS - 1)


pairs = [(seconds(False), seconds(True)) for _ in range(ROUNDS)]
plain = statistics.median(without for without, _ in pairs)
ratio = statistics.median(watched / without for without, watched in pairs)
print(f"{loaded.name}: {neurons}\n{1e3 * plain:.2f} ms a token; watched {ratio - 1:+.1%} (median of {ROUNDS} pairs)")
