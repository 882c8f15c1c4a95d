"""The definitions of what is measured, as pure functions from tensors to tensors. `sinkscope.kernels` computes some of
them faster, and tests compare the two.

    sink_score.py              attention received, the sink rate, and from when on a position is a sink
    value_variance.py          variance of the value aggregation, and the averaging law
    super_neurons.py           what each neuron writes into the massive dimensions
    dimension_disparity.py     DomRatio and what else says that a few dimensions dominate; massive dimensions
    directional_collapse.py    whether states at a position point the same way in every sequence; contraction.py: in all
    token_preference.py        how far a model prefers some tokens whatever it reads
    spectrum.py                eigenvalues; thresholds.py: from what value on a link of the chain is there
"""
