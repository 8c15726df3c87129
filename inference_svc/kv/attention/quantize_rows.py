import mlx.core as mx
def quantize_rows(keys, values, fmt):
    raise NotImplementedError
