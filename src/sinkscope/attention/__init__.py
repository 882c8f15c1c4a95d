"""Attention to train with.

variants.py          softmax attention with one of its steps changed: a class and an entry of VARIANTS for each
head_norm.py         the modules between attention and the output projection, such as HeadRMSNorm
sink_attention.py    attention with a learned sink by torch's flash attention, forward and backward
"""
