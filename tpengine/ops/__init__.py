"""The Python interface of the kernels in `csrc/`.

Every op is `torch.ops.tpengine.<name>`. Its schema and fake stand in `library.py`, its plain-torch
reference, which runs where there is no kernel, in `reference.py`, and a thin function with the
contract in `attention.py`, `cache.py`, `fused.py` or `linear.py`. Outputs are written into tensors
of the caller.
"""
