"""What is worth a Triton kernel, each with the same function in plain torch for other devices.

attention_received.py    what each key receives, and entropy and mixing of each query's row, without a T x T tensor
token_statistics.py      statistics by token and by channel from one read of the activations
head_rms_norm.py         head-wise RMSNorm, forward and backward
jit.py                   lets all of them be imported where Triton is not installed
"""
