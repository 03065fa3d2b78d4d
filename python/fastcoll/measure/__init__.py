# SPDX-License-Identifier: Apache-2.0
"""Measuring: rank processes of several libraries side by side, timing windows, result files.

Uses fastcoll only through its public interface (and the compiled loops of `fastcoll._C`); nothing
but the command line and the benchmarks may import it.
"""
