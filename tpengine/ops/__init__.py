"""The Python interface of the kernels in `csrc/`.

Every op is `torch.ops.tpengine.<name>`. Its plain-torch reference in `reference.py` or another
`*_reference.py`, which runs where there is no kernel, is also its schema and its contract;
`library.op` defines it. Outputs are written into tensors of the caller.
"""
