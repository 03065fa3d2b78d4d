# SPDX-License-Identifier: Apache-2.0
"""The only import of C++: every module of the package takes the extensions from here.

An extension has no Python source. So the import contracts take a direct import of it for an import
of the package `fastcoll` itself.
"""

import fastcoll._C as _C

__all__ = ["_C", "_cuda", "cuda_import_error"]

cuda_import_error = ""  # why `_cuda` is missing, if it is
try:
    import fastcoll._cuda as _cuda  # after _C, whose plans it takes
except ImportError as error:
    cuda_import_error = str(error)
