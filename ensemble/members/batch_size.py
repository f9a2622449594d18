"""Set the size of a batch for configs without ``max_num_batched_tokens`` and ``batch_size``."""

# Padded tokens of a batch; more do not make a GPU faster, and a CPU is fastest with fewer.
GPU_TOKEN_BUDGET = 16384
CPU_TOKEN_BUDGET = 2048
# The least batches of a chunk for each GPU over which a member is spread: while the last GPU computes a batch, the
# GPUs before it compute the next ones, but at the beginning and end of a chunk they wait for each other.
BATCHES_PER_STAGE = 8
# A batch of fewer tokens costs a GPU more time than waiting does.
MIN_STAGE_TOKENS = 2048
