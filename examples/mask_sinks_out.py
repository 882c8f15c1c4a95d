"""Leaves the sinks out of the activations that a sparse autoencoder, or a steering vector, is trained on."""

import sinkscope

loaded = sinkscope.load("reference:softmax")
neurons = sinkscope.sink_neurons(loaded, sinkscope.token_batch(loaded, length=64, num_sequences=8, seed=1))
ids = sinkscope.token_batch(loaded, length=64, num_sequences=8).ids
states = []
block = sinkscope.anatomy_of(loaded.model).layers[-2].block
hook = block.register_forward_hook(lambda module, args, output: states.append(output.detach()))
with sinkscope.SinkWatch(loaded, neurons) as watch:
    loaded.model(ids)
hook.remove()
kept = states[0][~watch.mask]
print(f"all {ids.numel()} tokens: largest {states[0].abs().max():.1f}, spread {states[0].std():.3f}")
print(f"without {int(watch.mask.sum())} sinks: largest {kept.abs().max():.1f}, spread {kept.std():.3f}")
