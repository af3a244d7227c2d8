"""C++ kernels for the CPU over packed weights, built with the system's compiler at first use.

`build.py` compiles `src/`, `library.py` is its C ABI in ctypes, `weights.py` packs matrices,
`pool.py` runs ops on the one thread pool. No torch: everything takes addresses.
"""
