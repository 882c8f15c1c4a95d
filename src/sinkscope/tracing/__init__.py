"""One forward pass becomes a trace. What calls what, in the order in which it runs:

    trace.py          `trace` loads the model and the batch, and puts the parts below together in a Trace
    receipt.py        `check_reading` first compares a short plain pass with the pass that we read: they must agree
    recorder.py       `record` runs the batch, in chunks and in shares of processes, and joins them to a Recording
    observables.py    what to record: each Observable names its hook point, its value, and a reducer of reducers.py
    hooks.py          opens hooks on every layer and shows each running layer, a LayerCall, to the observables; what
                      a block is called with and returns is read by block_states.py
    attention_hook.py hands queries, keys and values to attention.py, which computes attention, in tiles (tiles.py),
                      and what is read of it
    layer_call.py     what a layer holds at each hook point; uses layer_neurons.py, lock.py and attention_rule.py
    findings.py       what the recording shows: sinks, massive dimensions (disparity.py: from layer to
                      layer) and, with super_neurons.py, who writes them
    sequences.py      the sinks of each single text; tables.py and schemas.py: all of it as the columns of tables
    page.py, cli.py   the page (with figures.py, maps.py) and the command

Beside this path: replay.py runs one batch under many interventions and keeps a few numbers of each pass (with
feed_forward_cache.py); open_interventions.py knows which interventions are on; restored.py checks that they leave the
model as it was; single_reader.py lets one thread at a time read a model; overflow.py refuses NaN and infinity.
"""
