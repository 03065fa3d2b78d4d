# SPDX-License-Identifier: Apache-2.0
"""The only import of C++: every module of the package takes the extensions from here.

An extension has no Python source. So the import contracts take a direct import of it for an import
of the package `fastcoll` itself.
"""

import sys

import fastcoll._C as _C

# A free-threaded Python turned it on to load _C, unless it was told to keep it off.
if not getattr(sys, "_is_gil_enabled", lambda: True)():
    raise ImportError("fastcoll needs the GIL: start Python without PYTHON_GIL=0 and -X gil=0")

__all__ = ["_C", "_cuda", "cuda_import_error"]

cuda_import_error = ""  # why `_cuda` is missing, if it is
try:
    import fastcoll._cuda as _cuda  # after _C, whose plans it takes
except ImportError as error:
    cuda_import_error = str(error)
