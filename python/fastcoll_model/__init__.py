# SPDX-License-Identifier: Apache-2.0
"""Collectives on paper: schedules, their proof, their price.

Pure Python: no GPU, no process group, no tensor. A schedule (`schedule`, built by `builders`) lists
the steps of every rank; `checker` proves it, `simulator` and `formulas` price it.
"""
