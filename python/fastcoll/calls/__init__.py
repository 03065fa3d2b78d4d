# SPDX-License-Identifier: Apache-2.0
"""One call: its request, the checks of this rank, and the handle that it returns."""
