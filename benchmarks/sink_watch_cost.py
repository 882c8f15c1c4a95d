"""What following the sinks by their neurons adds to decoding, step by step with a cache.

python benchmarks/sink_watch_cost.py MODEL [--bos]

Other work on a machine slows both sides. So a round decodes the same tokens plain and watched, one right after the
other and in turn first, and compares the medians of their steps; the median over rounds is printed, with its interval.
On a CPU it is the processor's time that is read, which waits for nobody.
"""

import argparse
import contextlib
import statistics
import time

import numpy as np
import torch
from scipy.stats import bootstrap

import sinkscope

STEPS, ROUNDS = 12, 32

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("model")
parser.add_argument("--bos", action="store_true", help="begin each text with BOS")
asked = parser.parse_args()
loaded = sinkscope.load(asked.model)
batch = sinkscope.token_batch(loaded, length=64, num_sequences=4, bos=asked.bos or None)
neurons = sinkscope.sink_neurons(loaded, batch)
clock = time.process_time if loaded.model.device.type == "cpu" else time.perf_counter


@torch.inference_mode()
def median_step(watched: bool) -> float:
    """Seconds of a step after the first, which reads the text."""
    ids, cache, found = batch.ids[:1, :16].to(loaded.model.device), None, []
    with sinkscope.SinkWatch(loaded, neurons) if watched else contextlib.nullcontext():
        for _ in range(STEPS + 1):
            started = clock()
            output = loaded.model(ids, past_key_values=cache, use_cache=True)
            ids, cache = output.logits[:, -1:].argmax(-1), output.past_key_values
            ids.tolist()  # waits for the device
            found.append(clock() - started)
    return statistics.median(found[1:])


median_step(True)  # warm
seconds, ratios = [], []
for number in range(ROUNDS):
    sides = {watched: median_step(watched) for watched in ((False, True) if number % 2 else (True, False))}
    seconds.append(sides[False])
    ratios.append(sides[True] / sides[False] - 1)
low, high = bootstrap((ratios,), np.median).confidence_interval
said = f"watched {statistics.median(ratios):+.2%} (95 % interval {low:+.2%} to {high:+.2%})"
print(f"{loaded.name}: {neurons}\n{1e3 * statistics.median(seconds):.1f} ms a token; {said}")
