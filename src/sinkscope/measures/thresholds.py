"""From what value of a measure on there is a link of the chain. Pages and claims read these without torch."""

VARIANCE_RATIO = 2.0
"""Position 0's variance over that of later positions: from here on there is a discrepancy."""
LEVEL_ELSEWHERE = 10.0
"""A super neuron's write at the sink over its level at other positions."""
TOP_SHARE = 0.25
"""An output vector with at least this share of its energy in one dimension is channel-sparse."""
DOM_RATIO = 3.0
"""DomRatio at the sink, over that elsewhere: from here on there is a disparity."""
COSINE = 0.9
"""A position whose states have this mean cosine across sequences is one direction."""
MIN_HEAD_SINK_RATE = 0.5
"""A head has the sink when it counts the position as its sink in at least this share of sequences."""
