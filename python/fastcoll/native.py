# SPDX-License-Identifier: Apache-2.0
"""The one door to C++: every module of the package takes the extensions from here.

An extension has no Python source, so a direct import of it reads as one of the package's face.
"""

from fastcoll import _C as _C

cuda_import_error = ""  # why `_cuda` is missing, if it is
try:
    from fastcoll import _cuda as _cuda  # after _C, whose plans it takes
except ImportError as error:
    cuda_import_error = str(error)
