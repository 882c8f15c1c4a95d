"""Cuts a cache to its last 32 tokens and its sinks, which neurons find while the text is read; then without them."""

import torch

import sinkscope

loaded = sinkscope.load("reference:softmax")
neurons = sinkscope.sink_neurons(loaded, sinkscope.token_batch(loaded, length=128, num_sequences=4, seed=1))
past, rest = sinkscope.token_batch(loaded, length=128, num_sequences=1).ids.split(96, 1)
whole = loaded.model(torch.cat([past, rest], 1)).logits[:, 96:].softmax(-1)
for with_sinks in (True, False):
    with sinkscope.SinkWatch(loaded, neurons) as watch:
        cache = loaded.model(past, use_cache=True).past_key_values
    kept = (torch.arange(96) >= 64) | (watch.mask[0] & with_sinks)
    for layer in cache.layers:
        layer.keys, layer.values = layer.keys[:, :, kept], layer.values[:, :, kept]
    cut = loaded.model(rest, past_key_values=cache, position_ids=torch.arange(96, 128)[None]).logits.softmax(-1)
    print(f"{int(kept.sum())} of 96 keys: predictions off by {(cut - whole).abs().sum(-1).mean() / 2:.3f}")
