"""The Python face of the kernels in `csrc/`.

Every op is `torch.ops.tpengine.<name>`: schema and fakes in `library.py`, a plain-torch reference
in `reference.py` (used wherever there is no kernel), and a thin function with the contract in
`attention.py`, `cache.py`, `fused.py`, `linear.py` and `sampling.py`. Outputs are written into
tensors that the caller owns.
"""
