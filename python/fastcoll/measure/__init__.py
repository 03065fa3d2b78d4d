# SPDX-License-Identifier: Apache-2.0
"""Measuring: rank processes of several libraries side by side, timing windows, result files.

Decides how calls are timed, checked and written down. Reaches into the rooms below where the public
interface cannot name the variant that is measured. Only commands and benchmarks import it.
"""
