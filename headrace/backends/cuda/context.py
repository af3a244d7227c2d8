"""The device's context, made by the driver while Python imports torch.

To initialise the driver and make a context takes half a second in which no Python runs. It is the
primary context, which torch will find and use. No torch here: it is what this does not wait for.
"""

from __future__ import annotations

import ctypes
import os
import sys
import threading

_DRIVER = "libcuda.so.1"


def make_ahead() -> threading.Thread | None:
    """Begin, in a thread, for the device that torch will take: the first that this process sees.

    None where torch is here already, and may have another device. What fails is left to torch.
    """
    if "torch" in sys.modules:
        return None
    os.environ.setdefault("CUDA_MODULE_LOADING", "LAZY")  # as torch does before it initialises
    thread = threading.Thread(target=_make, name="cuda-context", daemon=True)
    thread.start()
    return thread


def _make() -> None:
    try:
        driver = ctypes.CDLL(_DRIVER)
        device, context = ctypes.c_int(), ctypes.c_void_p()
        if driver.cuInit(0) or driver.cuDeviceGet(ctypes.byref(device), 0):
            return
        driver.cuDevicePrimaryCtxRetain(ctypes.byref(context), device)
    except (OSError, AttributeError):  # no driver, or none that has these
        return
